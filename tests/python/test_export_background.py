"""Hugging Face directories of a job's checkpoints in the background: each durable version once, no save waits, no failure ends training."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from nebulaml.errors import NebulaConfigError
from nebulaml.export import background
from processes import stop
from waiting import until

safetensors = pytest.importorskip("safetensors.torch")


def step_in(path: Path) -> float:
    return float(safetensors.load_file(path / "model.safetensors")["w"][0])


def processes_of(trainer: int) -> list[int]:
    """Returns the processes of exports that a trainer has started, without their own children that have not executed a program yet."""
    found = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
            parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"nebulaml.export.background" in words and str(trainer).encode() in words:
            found[int(entry)] = int(parent)
    return [process for process, parent in found.items() if parent not in found]


@pytest.mark.nightly("test_the_last_version_is_exported_although_the_trainer_has_ended")
def test_a_manager_exports_its_durable_versions_and_the_last_one_always(nm, place, tmp_path):
    export = nm.HFExport(str(tmp_path / "out" / "step{step}"), every=2, dtype="bf16", config={"model_type": "mine"}, key=None)
    events = []
    with nm.Manager(place.storage, export=export) as manager:
        manager.on_event(events.append)
        for step in (1, 2, 3):
            manager.save(step, {"model": {"w": torch.full((5,), float(step))}}, force=True)
        until((tmp_path / "out" / "step2").exists, 120)
        [process] = processes_of(os.getpid())
        assert os.getpriority(os.PRIO_PROCESS, process) > os.getpriority(os.PRIO_PROCESS, 0)
        manager.save(6, {"model": {"w": torch.full((5,), 6.0)}}, force=True)
    assert nm.wait_for_exports(120)
    assert sorted(os.listdir(tmp_path / "out")) == ["step2", "step6"]
    assert step_in(tmp_path / "out" / "step6") == 6
    assert json.loads((tmp_path / "out" / "step6" / "config.json").read_text()) == {"model_type": "mine", "torch_dtype": "bfloat16"}
    exported = [event for event in events if event.kind == "exported"]
    assert [event.step for event in exported] == [2, 6] and exported[0].text == str(tmp_path / "out" / "step2")


@pytest.mark.nightly("test_the_last_version_is_exported_although_the_trainer_has_ended")
def test_a_job_exports_no_version_of_another_job_of_its_path(nm, place, tmp_path):
    with nm.Manager(place.storage, job="mine", export=nm.HFExport(str(tmp_path / "out" / "{step}"))) as manager:
        manager.save(1, {"model": {"w": torch.ones(5)}}, force=True)
        other = nm.Session(str(place.storage), job="other", persistent_time_interval=0)
        with other.checkpoint("global_step2") as checkpoint:
            checkpoint.save("model.pt", {"model": {"w": torch.zeros(5)}})
        checkpoint.wait("durable", 60)
    assert nm.wait_for_exports(120)  # at its end, the process looks once more
    assert os.listdir(tmp_path / "out") == ["1"]


# fault: as test_a_failed_export_is_an_event_and_a_log_line_and_training_goes_on
@pytest.mark.nightly
def test_an_export_whose_directory_failed_is_tried_again(nm, place, tmp_path):
    events = []
    blocked = tmp_path / "out"
    blocked.write_text("a file where the directory should be")
    with nm.Manager(place.storage, export=nm.HFExport(str(blocked / "{step}"))) as manager:
        manager.on_event(events.append)
        manager.save(1, {"model": {"w": torch.ones(2)}}, force=True)
        until(lambda: any(event.kind == "export-failed" for event in events), 120)
        blocked.unlink()
    assert nm.wait_for_exports(120)
    assert step_in(blocked / "1") == 1
    assert "it is tried again" in next(event for event in events if event.kind == "export-failed").text


# fault: as test_a_failed_export_is_an_event_and_a_log_line_and_training_goes_on
@pytest.mark.nightly
def test_the_newest_version_wins_and_no_save_waits_for_an_export(nm, place, tmp_path):
    export = nm.HFExport(str(tmp_path / "newest"), replace=True)
    with nm.Manager(place.storage, export=export) as manager:
        manager.save(1, {"model": {"w": torch.full((5,), 1.0)}}, force=True)
        until(lambda: processes_of(os.getpid()), 60)
        [process] = processes_of(os.getpid())
        stop(process)  # a save that waited for it would wait for ever
        for step in (2, 3, 4):
            manager.save(step, {"model": {"w": torch.full((5,), float(step))}}, force=True)
        manager.wait(4)
        os.kill(process, signal.SIGCONT)
    assert nm.wait_for_exports(120)
    assert step_in(tmp_path / "newest") == 4


# fault (Deaths): The process that makes Hugging Face directories in the background of a job fails, is stopped or
# killed, or the trainer ends.
# result: No save waits, and training goes on. A failure is an event and a log line; the next save starts another
# process. After the trainer's end the newest version is exported.
@pytest.mark.nightly("test_the_last_version_is_exported_although_the_trainer_has_ended")
def test_a_failed_export_is_an_event_and_a_log_line_and_training_goes_on(nm, place, tmp_path, caplog):
    events = []
    with nm.Manager(place.storage, export=nm.HFExport(str(tmp_path / "{step}"), key="ema")) as manager:
        manager.on_event(events.append)
        manager.save(1, {"model": {"w": torch.ones(2)}}, force=True)
        until(lambda: any(event.kind == "export-failed" for event in events), 120)
        assert manager.save(2, {"model": {"w": torch.ones(2)}}, force=True) is not None
    assert not nm.wait_for_exports(120)
    failed = next(event for event in events if event.kind == "export-failed")
    assert failed.step == 1 and "no flat dict of tensors under 'ema'" in failed.text
    assert any("global_step1 is not exported" in line for line in caplog.messages)
    assert [one for one in os.listdir(tmp_path) if "export" in one or one in "12"] == []


# fault: as test_a_failed_export_is_an_event_and_a_log_line_and_training_goes_on
@pytest.mark.nightly
def test_a_process_of_exports_that_is_killed_is_an_event_and_the_next_save_starts_another(nm, place, tmp_path):
    events = []
    with nm.Manager(place.storage, export=nm.HFExport(str(tmp_path / "out" / "{step}"))) as manager:
        manager.on_event(events.append)
        manager.save(1, {"model": {"w": torch.full((5,), 1.0)}}, force=True)
        until((tmp_path / "out" / "1").exists, 120)
        [process] = processes_of(os.getpid())
        os.kill(process, signal.SIGKILL)
        until(lambda: any("ended with -9" in event.text for event in events), 60)
        manager.save(2, {"model": {"w": torch.full((5,), 2.0)}}, force=True)
        until((tmp_path / "out" / "2").exists, 120)
    nm.wait_for_exports(120)
    assert step_in(tmp_path / "out" / "2") == 2


# fault: as test_a_failed_export_is_an_event_and_a_log_line_and_training_goes_on
@pytest.mark.parametrize("how", ["kill", pytest.param("exit", marks=pytest.mark.nightly)])
def test_the_last_version_is_exported_although_the_trainer_has_ended(place, tmp_path, how):
    trainer = place.trainer(
        """
        manager = nm.Manager(sys.argv[1], export=nm.HFExport(sys.argv[2] + "/{tag}"))
        manager.save(5, {"model": {"w": torch.full((5,), 5.0)}}, force=True)
        say("saved")
        if sys.argv[3] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        place.storage, tmp_path / "out", how,
    )  # fmt: skip
    assert trainer.wait(60) == (-signal.SIGKILL if how == "kill" else 0)
    until((tmp_path / "out" / "global_step5").exists, 120)
    assert step_in(tmp_path / "out" / "global_step5") == 5


# fault (The machine and other users): The program has given SIGPIPE its default action, and a background process of Nebula was killed.
# result: The write to that process fails, and the program goes on.
@pytest.mark.nightly("test_the_last_version_is_exported_although_the_trainer_has_ended")
def test_a_program_that_dies_of_sigpipe_outlives_the_processes_that_it_has_started(place, tmp_path):
    place.run(
        """
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        from nebulaml.export import background
        manager = nm.Manager(sys.argv[1], export=nm.HFExport(sys.argv[2] + "/{step}"))
        manager.save(1, {"model": {"w": torch.ones(5)}}, force=True)
        [worker] = background._running.values()
        publisher = nm.Publisher({"w": torch.ones(5)}, sys.argv[1] + "-weights")
        publisher.publish(1)
        maker = publisher._maker
        maker.poll = lambda: None  # it dies after the last look at it
        for process in (worker.process, maker):
            process.kill()
        worker.thread.join()
        os.waitid(os.P_PID, maker.pid, os.WEXITED | os.WNOWAIT)
        publisher.publish(2)
        publisher.wait(60)
        manager.close()
        background.wait(None)
        assert signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL and not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGPIPE}
        publisher.close()
        """,
        place.storage, tmp_path,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directory": "/x/{step}", "dtype": "int3"}, "dtype='int3'"),
        ({"directory": "/x/all"}, "neither {step} nor {tag}: each export needs replace=True"),
        ({"directory": "/x/{what}"}, "only {step} and {tag} can be in it"),
        ({"directory": "/x/{step}", "every": 0}, "every=0"),
        ({"directory": "/x/{step}", "mapping": {"*": lambda parts: parts[0]}}, "must be plain values, not functions"),
    ],
)
def test_a_description_that_cannot_work_is_refused_before_training(nm, options, message):
    with pytest.raises(NebulaConfigError) as failure:
        nm.HFExport(**options)
    assert message in str(failure.value)


def test_steps_are_read_from_the_tags_of_all_adapters():
    tags = ["global_step500", "checkpoint-7", "epoch=1-step=20.ckpt", "checkpoint-9~2", "best"]
    assert [background.step_of(tag) for tag in tags] == [500, 7, 20, 9, None]


