"""Real kills: of the trainer, of the agent, of everything at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import nebulaml
import pytest
import torch
from nebulaml import NebulaError
from nebulaml._session import locate
from waiting import until

TRAIN = """
    nm.init(sys.argv[1], float(sys.argv[2]), 2, on_error="raise")
    start = nm.get_latest_checkpoint()
    first = start.load("m.pt")["step"] + 1 if start else 1
    say("from", first)
    w = torch.zeros(200_000)
    for step in range(first, first + int(sys.argv[3])):
        w += step
        c = nm.Checkpoint(f"global_step{step}")
        c.save("m.pt", {"step": step, "w": w})
        w.add_(1).sub_(1)
        c.commit()
        say("committed", step)
    say(sys.argv[4])
"""


def lines_until(process, word):
    seen = []
    for line in process.stdout:
        seen.append(line.strip())
        if word in line:
            return seen
    raise AssertionError(f"the trainer ended before it said {word!r}: {seen}")


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()


def expected(step):
    return float(sum(range(1, step + 1)))


def test_a_trainer_killed_right_after_commit_resumes_from_memory(place):
    process = place.trainer(TRAIN + "    time.sleep(60)", place.storage, 1000, 4, "idle")
    lines_until(process, "committed 4")
    kill(process)
    nebulaml.init(str(place.storage), 1000, 2)
    found = nebulaml.get_latest_checkpoint()
    assert found.tag == "global_step4"
    got = found.load("m.pt")
    assert got["step"] == 4 and (got["w"] == expected(4)).all()


def test_the_agent_makes_the_newest_durable_after_the_trainer_was_killed(place):
    process = place.trainer(TRAIN + "    time.sleep(60)", place.storage, 1000, 3, "idle")
    lines_until(process, "committed 3")
    kill(process)
    path = place.storage / "global_step3" / ".nebula" / "manifest-1.json"
    until(path.exists)
    assert torch.load(place.storage / "global_step3" / "m.pt")["step"] == 3


# A way into a block of two files: its first save, and the save of the second one.
BLOCKS = {
    "alone": ("c.save('a.pt', step)", "c.save('b.pt', step)"),
    "beside another object": ("c.save('a.pt', step); nm.Checkpoint(c.tag).save('b.pt', step)", "c.save('c.pt', step)"),
    "of another checkpoint around it": ("c.save('a.pt', step); d = nm.Checkpoint('d'); d.save('d.pt', 0); d.commit()", "c.save('b.pt', step)"),
    "flushed": ("c.save('a.pt', step); nm.flush_persistence()", "c.save('b.pt', step)"),
}


# fault (Deaths): The trainer is killed inside a `with Checkpoint(tag)` block, between two saves.
# result: That version fails, and the one before can be loaded. This holds for a job of one process, and for several
# with `N=-2`. Without `N`, an open-ended part closes when its rank ends, and counts with the files that were saved.
@pytest.mark.parametrize(("way", "agent_dies"), [*((way, False) for way in BLOCKS), ("alone", True)])
def test_a_trainer_killed_between_two_saves_of_a_block_leaves_the_version_before(place, way, agent_dies):
    code = f"""
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        for step in (1, 2):
            with nm.Checkpoint(f"global_step{{step}}") as c:
                {BLOCKS[way][0]}
                if step == 2:
                    say("between")
                    time.sleep(60)
                {BLOCKS[way][1]}
    """
    process = place.trainer(code, place.storage)
    lines_until(process, "between")
    if agent_dies:
        place.kill_agent()
    kill(process)
    nebulaml.init(str(place.storage), 0, 2)
    found = nebulaml.get_checkpoint("global_step1")
    assert {name: found.load(name) for name in found.files} == dict.fromkeys(found.files, 1) and len(found.files) > 1
    assert nebulaml.get_checkpoint("global_step2") is None
    assert nebulaml.get_latest_checkpoint().tag in ("global_step1", "d")
    assert not (place.storage / "global_step2" / ".nebula" / "manifest-1.json").exists()


def in_memory(path, tag):
    listed = subprocess.run([locate.agent_path(), "list", "--json", "--path", path], capture_output=True, check=True, timeout=60).stdout
    return next("memory" in row["where"] for row in json.loads(listed)["versions"] if row["tag"] == tag)


# fault (Deaths): The trainer is killed in the middle of a save, or the agent is killed there, too.
# result: The version before is loaded. If it was durable, it comes from storage, because the save had taken its memory. If it was
# not, or with `num_of_version_in_retention=2`, it comes from memory.
@pytest.mark.parametrize("agent_dies", [False, True])
@pytest.mark.parametrize(("interval", "versions", "source"), [(0, 1, "storage"), (0, 2, "memory"), (1000, 1, "memory")])
def test_a_trainer_killed_in_the_middle_of_a_save_resumes_from_the_version_before(place, interval, versions, source, agent_dies):
    code = """
        nm.init(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), on_error="raise")
        for step in (1, 2, 3):
            with nm.Checkpoint(f"global_step{step}") as c:
                c.save("a", torch.full((50_000,), step))
                if step == 3:
                    say("between")
                    time.sleep(60)
            if step == 1 or not float(sys.argv[2]):
                c.wait("durable", timeout=60)
    """
    process = place.trainer(code, place.storage, interval, versions)
    lines_until(process, "between")
    if agent_dies:
        place.kill_agent()
    kill(process)
    nebulaml.init(str(place.storage), interval, versions)
    found = nebulaml.get_latest_checkpoint()
    assert found.tag == "global_step2" and in_memory(place.storage, "global_step2") == (source == "memory") and (found.load("a") == 2).all()


# fault (Deaths): The trainer is killed while it writes a durable tag again.
# result: The tag has the files of its last complete writing, with those that it had taken over.
def test_a_trainer_killed_while_it_writes_a_tag_again_leaves_the_writing_before(place):
    code = """
        nm.init(sys.argv[1], 0, on_error="raise")
        with nm.Checkpoint("t") as c:
            c.save("a", torch.full((50_000,), 1))
            c.save("b", torch.full((50_000,), 1))
        c.wait("durable", timeout=60)
        for value in (2, 3):
            with nm.Checkpoint("t") as c:
                c.save("a", torch.full((50_000,), value))
                if value == 3:
                    say("between")
                    time.sleep(60)
            for state in ("committed", "durable"):
                c.wait(state, timeout=60)
                found = nm.get_checkpoint("t")
                say(found.load("a")[0].item(), found.load("b")[-1].item())
    """
    process = place.trainer(code, place.storage)
    assert lines_until(process, "between") == ["2 1", "2 1", "between"]
    kill(process)
    nebulaml.init(str(place.storage), 0)
    found = nebulaml.get_latest_checkpoint()
    assert found.tag == "t" and (found.load("a") == 2).all() and (found.load("b") == 1).all()


# fault (Deaths): The trainer is killed around its commit.
# result: The newest committed version can be loaded, from memory.
@pytest.mark.parametrize("moment", [0, 2, *(pytest.param(moment, marks=pytest.mark.nightly("test_a_trainer_killed_at_any_moment_leaves_a_whole_checkpoint")) for moment in (1, 3, 4))])
def test_a_trainer_killed_at_any_moment_leaves_a_whole_checkpoint(place, moment):
    process = place.trainer(TRAIN, place.storage, 0, 100_000, "never")
    lines_until(process, "committed 3")
    time.sleep(0.007 * moment)
    process.send_signal(signal.SIGKILL)
    rest = [int(line.split()[1]) for line in process.stdout if line.startswith("committed")]
    process.wait(timeout=60)
    last = max([3, *rest])
    nebulaml.init(str(place.storage), 0, 2)
    got = nebulaml.get_latest_checkpoint().load("m.pt")
    assert got["step"] in (last, last + 1)  # it may have been killed between the commit and its line
    assert (got["w"] == expected(got["step"])).all()


def test_the_run_goes_on_where_it_was_killed(place):
    process = place.trainer(TRAIN + "    time.sleep(60)", place.storage, 1000, 3, "idle")
    lines_until(process, "committed 3")
    kill(process)
    output = place.run(TRAIN, place.storage, 1000, 2, "done")
    assert output.split("\n")[0] == "from 4" and "committed 5" in output


# fault: as an_agent_that_dies_at_any_request_is_survived
@pytest.mark.parametrize("delay", [*(pytest.param(delay, marks=pytest.mark.nightly("test_an_agent_killed_at_any_moment_does_not_stop_the_trainer")) for delay in (0.0, 0.002, 0.05)), 0.01])
def test_an_agent_killed_at_any_moment_does_not_stop_the_trainer(place, delay):
    process = place.trainer(TRAIN, place.storage, 0, 60, "done")
    lines_until(process, "committed 5")
    time.sleep(delay)
    place.kill_agent(wait=False)
    lines_until(process, "done")
    assert process.wait(timeout=60) == 0
    nebulaml.init(str(place.storage), 0, 2)
    got = nebulaml.get_latest_checkpoint().load("m.pt")
    assert got["step"] == 60
    nebulaml.flush_persistence()
    assert torch.load(nebulaml.get_latest_checkpoint_path("m.pt"))["step"] == 60


# fault (Deaths): All processes are killed.
# result: Committed versions can be loaded from memory. If memory is lost, too, the newest durable one can be loaded.
def test_everything_killed_at_once_resumes_from_the_memory_tier(place):
    process = place.trainer(TRAIN + "    time.sleep(60)", place.storage, 1000, 4, "idle")
    lines_until(process, "committed 4")
    place.kill_all(process)
    nebulaml.init(str(place.storage), 1000, 2)
    found = nebulaml.get_latest_checkpoint()
    assert found.tag == "global_step4" and (found.load("m.pt")["w"] == expected(4)).all()


def test_a_checkpoint_object_survives_the_agent(nm, place):
    checkpoint = nm.Checkpoint("across", -2)
    checkpoint.save("a.pt", torch.ones(1000))
    place.kill_agent()
    checkpoint.save("b.pt", torch.zeros(1000))
    assert checkpoint.commit()
    checkpoint.wait("durable", 60)
    assert sorted(os.listdir(place.storage / "across")) == [".nebula", "a.pt", "b.pt"]


def save(step, tag=None, count=None):
    checkpoint = nebulaml.Checkpoint(tag or f"global_step{step}", count)
    checkpoint.save("m.pt", torch.full((4,), step))
    checkpoint.commit()
    return checkpoint


def durable(checkpoint):
    checkpoint.wait("durable", 60)
    return checkpoint


# fault (Deaths): The agent is killed or stopped after a commit, while the program keeps the object.
# result: The object shows and loads what memory or storage has of that writing of the tag. If neither has it any more,
# `.state` is `failed`, `.error` says so, and every wait ends.
def test_handles_of_what_was_committed_know_what_became_of_it_after_the_agent(nm, place):
    held = [durable(save(step)) for step in range(1, 5)]  # memory keeps the last two
    place.kill_agent()
    assert [checkpoint.state for checkpoint in held] == ["durable"] * 4
    for step, checkpoint in enumerate(held, 1):
        checkpoint.wait("durable", 60)
        assert checkpoint.error is None
        assert (checkpoint.load("m.pt") == step).all()


# fault: as test_handles_of_what_was_committed_know_what_became_of_it_after_the_agent
@pytest.mark.parametrize("count", [None, 1, -2])
def test_a_handle_of_files_that_were_lost_with_an_agent_reports_that_and_no_call_waits(place, monkeypatch, count):
    monkeypatch.setenv("NEBULA_MEMORY_DIR", "/proc/nowhere")  # images are memfds then
    nebulaml.init(str(place.storage), 3600, 2, on_error="raise")
    kept = durable(save(1, "best", count))
    lost = save(2, "best", count)  # the same tag: what storage has of it is not this
    place.kill_agent()
    assert lost.state == "failed"
    assert "neither memory nor storage" in lost.error
    for state in ("committed", "durable"):
        with pytest.raises(NebulaError, match="neither memory nor storage"):
            lost.wait(state, 10)
    assert kept.state == "durable"
    assert (nebulaml.get_latest_checkpoint().load("m.pt") == 1).all()
    lost.save("m.pt", torch.full((4,), 3))  # the object writes its tag again
    assert lost.commit()
    lost.wait("durable", 60)
    assert (lost.load("m.pt") == 3).all()

def test_a_normal_exit_without_flush_leaves_everything_to_the_agent(place):
    place.run(TRAIN, place.storage, 1000, 2, "done")
    path = place.storage / "global_step2" / ".nebula" / "manifest-1.json"
    until(path.exists)


def test_a_forked_worker_leaves_the_parents_session_alone(nm):
    checkpoint = nm.Checkpoint("forked")
    checkpoint.save("a.pt", 1)
    pid = os.fork()
    if pid == 0:
        nm.Checkpoint  # noqa: B018
        os._exit(0)
    os.waitpid(pid, 0)
    loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2)
    assert len(list(loader)) == 8
    checkpoint.save("b.pt", 2)
    assert checkpoint.commit() and checkpoint.load("a.pt") == 1


# fault (The machine and other users): The agent is stopped, or dies without `/dev/shm`, between the only file of a rank
# and its commit.
# result: Nothing is lost. The client gives the next agent the file from its memory.
def test_an_agent_that_was_stopped_between_a_save_and_its_commit_costs_nothing(place, nm):
    value = torch.arange(1 << 18)
    checkpoint = nm.Checkpoint("global_step1", -2)
    checkpoint.save("a.pt", value)
    value.zero_()
    subprocess.run([locate.agent_path(), "stop"], check=True, timeout=60, capture_output=True)
    assert checkpoint.commit()
    checkpoint.wait("committed", 60)
    assert torch.equal(nm.get_latest_checkpoint().load("a.pt"), torch.arange(1 << 18))


# fault (The machine and other users): The agent is stopped, or dies without `/dev/shm`, between two files of a
# checkpoint.
# result: The file is lost, and the checkpoint is never called complete without it: saves and the commit fail and say
# so. If the program begins it again, it takes all files.
def test_a_checkpoint_that_lost_a_file_with_an_agent_that_was_stopped_is_not_called_whole(place, nm):
    lost = nm.Checkpoint("global_step1", -2)
    lost.save("a.pt", 1)
    lost.save("b.pt", 2)
    subprocess.run([locate.agent_path(), "stop"], check=True, timeout=60, capture_output=True)
    with pytest.raises(nm.NebulaError, match="lost with an agent that has ended"):
        lost.save("c.pt", 3)
    assert not lost.commit()
    assert nm.get_latest_checkpoint() is None
    again = nm.Checkpoint("global_step1", -2)
    assert again.save("a.pt", 1) and again.save("b.pt", 2) and again.commit()
    assert sorted(nm.get_latest_checkpoint().files) == ["a.pt", "b.pt"]


@pytest.mark.parametrize("tag", [None, "global_step1"])
def test_a_checkpoint_that_was_flushed_goes_on_with_the_next_agent_and_one_that_was_not_fails(place, nm, tag):
    flushed = nm.Checkpoint("global_step1")
    flushed.save("a.pt", 1)
    assert nm.flush_persistence(tag)
    subprocess.run([locate.agent_path(), "stop"], check=True, timeout=60, capture_output=True)
    assert flushed.save("b.pt", 2) and flushed.commit()
    assert sorted(nm.get_latest_checkpoint().files) == ["a.pt", "b.pt"]
    lost = nm.Checkpoint("global_step2")
    lost.save("a.pt", 1)
    subprocess.run([locate.agent_path(), "stop"], check=True, timeout=60, capture_output=True)
    assert nm.flush_persistence()  # of an agent that never knew of it
    with pytest.raises(nm.NebulaError, match="lost with an agent that has ended"):
        lost.save("b.pt", 2)


# fault (Deaths): The agent is killed, also several times, while a trainer uses tensors that it has loaded from memory.
# result: The loaded values stay as they are: no later agent writes to memory that an earlier one made.
def test_values_loaded_from_memory_stay_unchanged_when_agents_are_killed(place):
    """Also in a forked child, and when the next agent is killed, too."""
    place.run("""
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        with nm.Checkpoint("global_step1") as c:
            c.save("m.pt", {"w": torch.full((1 << 20,), 1.0)})
        c.wait("durable", 60)
    """, place.storage)
    trainer = place.trainer("""
        torch.set_num_threads(1)  # its threads would not be there in the child
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        state = nm.get_latest_checkpoint().load("m.pt")
        def save(first, last):
            for step in range(first, last):
                with nm.Checkpoint(f"global_step{step}") as c:
                    c.save("m.pt", {"w": torch.full((1 << 20,), float(step))})
                c.wait("durable", 60)
        say("loaded"); sys.stdin.readline()
        save(2, 7)
        say("saved"); sys.stdin.readline()
        save(7, 12)
        wrong = int((state["w"] != 1).sum())  # looked at for the first time
        child = os.fork()
        if not child:
            os._exit(int((state["w"] != 1).any()))
        say("wrong", wrong, os.waitpid(child, 0)[1])
    """, place.storage, stdin=True)
    for line in ("loaded", "saved"):
        lines_until(trainer, line)
        place.kill_agent()
        trainer.stdin.write("\n")
        trainer.stdin.flush()
    assert lines_until(trainer, "wrong")[-1] == "wrong 0 0"
    trainer.stdin.close()
    assert trainer.wait(60) == 0
