"""A second storage of a manager: copies in the background, retention of its own, and loads from there when the first storage was lost."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import types
from pathlib import Path

import nebulaml
import pytest
import torch
from nebulaml._session import agree, locate, ranks
from nebulaml.errors import NebulaConfigError, NebulaError, NebulaNotFound, NebulaStorageError, NebulaTimeout
from nebulaml.manager import far as far_module
from nebulaml.manager.far import Second
from test_export_background import processes_of
from waiting import until


def steps_in(path: Path) -> list[int]:
    return sorted(int(one.name.removeprefix("global_step")) for one in Path(path).glob("global_step*"))


def whole(path: Path) -> bool:
    """Verifies every byte of a storage path by the command."""
    command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    return subprocess.run([command, "verify", "--all", f"--path={path}"], capture_output=True, timeout=120).returncode == 0


def optimizer_of(path: Path, step: int) -> list[Path]:
    return list(path.glob(f"global_step{step}/optimizer*"))


def items(value: float, size: int = 5) -> dict[str, object]:
    return {"model": {"w": torch.full((size,), float(value))}}


def both(value: float) -> dict[str, object]:
    return {**items(value), "optimizer": {"m": torch.full((5,), float(value))}}


def restored(manager, step: int | None = None) -> tuple[int, float] | None:
    into = {"w": torch.zeros(5)}
    found = manager.restore({"model": into}, step)
    return None if found is None else (found.step, float(into["w"][0]))


def lose(place, path: Path) -> None:
    """Loses a storage path, and what the memory of this machine has."""
    place.lose_memory()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def ended(place):
    """Ends what a test has left: a process goes on for long if its storage does not come back."""
    yield
    for process in processes_of(os.getpid()):
        os.kill(process, signal.SIGKILL)
    nebulaml.wait_for_exports(60)


@pytest.fixture
def far(tmp_path) -> Path:
    return tmp_path / "far"


def test_each_storage_has_versions_by_its_own_rules(nm, place, far):
    events = []
    with nm.Manager(place.storage, keep_last=2, far=nm.Far(far, every=2, keep_last=1, keep_every=4)) as manager:
        manager.on_event(events.append)
        for step in range(1, 9):
            manager.save(step, items(step), force=True)
            manager.wait(step)
            if step % 2 == 0:
                until(lambda step=step: any(event.kind == "copied" and event.step == step for event in events), 120)
        [process] = processes_of(os.getpid())
        assert os.getpriority(os.PRIO_PROCESS, process) > os.getpriority(os.PRIO_PROCESS, 0)
    assert nm.wait_for_exports(120)
    assert steps_in(far) == [4, 8] and whole(far)
    until(lambda: steps_in(place.storage) == [7, 8], 60)
    assert [event.text for event in events if event.kind == "copied"] == [str(far)] * 4


# fault (Deaths): The storage path of a manager and the memory of its machine are lost, and it has a far storage.
# result: The job goes on from the newest copy, and saves into its own path. If the far storage cannot be read, it does
# not begin from nothing.
def test_a_job_whose_storage_and_memory_are_lost_goes_on_from_the_far_storage_and_saves_into_the_near_one(nm, place, far, caplog):
    described = nm.Far(far)
    with nm.Manager(place.storage, far=described) as manager:
        for step in (1, 2):
            manager.save(step, items(step), metrics={"loss": 1 / step}, force=True)
            manager.wait(step)
    assert nm.wait_for_exports(120)
    with nm.Manager(place.storage, far=described) as manager:
        assert restored(manager) == (2, 2.0) and "is taken from" not in caplog.text
    lose(place, place.storage)
    with nm.Manager(place.storage, far=described) as manager:
        assert manager.latest_step() == 2 and 2 in manager.all_steps() and manager.best_step("loss") == 2
        assert restored(manager) == (2, 2.0)
        assert f"global_step2 is taken from {far}" in caplog.text
        assert next(row.step for row in manager.checkpoints()) == 2
        manager.save(3, items(3), force=True)
        manager.wait(3)
        assert steps_in(place.storage) == [3] and manager.latest_step() == 3
        assert manager.checkpoint(2).step == 2 and restored(manager) == (3, 3.0)
        with pytest.raises(NebulaNotFound, match="there is no checkpoint of step 9"):
            manager.checkpoint(9)
    assert nm.wait_for_exports(120)
    assert 3 in steps_in(far) and whole(far)
    with nm.Manager(place.storage, far=described) as manager:
        assert restored(manager) == (3, 3.0) and restored(manager, 2) == (2, 2.0)


# fault: as test_a_job_whose_storage_and_memory_are_lost_goes_on_from_the_far_storage_and_saves_into_the_near_one
def test_a_near_storage_that_is_older_than_the_far_one_does_not_set_the_job_back(nm, place, far, tmp_path):
    described = nm.Far(far)
    with nm.Manager(place.storage, far=described) as manager:
        manager.save(1, items(1), force=True)
        manager.wait(1)
        shutil.copytree(place.storage, tmp_path / "old")
        manager.save(2, items(2), force=True)
    assert nm.wait_for_exports(120)
    lose(place, place.storage)
    shutil.copytree(tmp_path / "old", place.storage)
    with nm.Manager(place.storage, far=described) as manager:
        assert manager.latest_step() == 2 and manager.all_steps() == [1, 2]
        assert restored(manager, 1) == (1, 1.0) and restored(manager) == (2, 2.0)


def test_steps_that_are_trained_again_replace_their_copies(nm, place, far):
    described = nm.Far(far)
    for value in (1.0, 7.0):
        with nm.Manager(place.storage, far=described) as manager:
            manager.save(5, items(value), force=True)
            manager.wait(5)
        assert nm.wait_for_exports(120)
    lose(place, place.storage)
    with nm.Manager(place.storage, far=described) as manager:
        assert restored(manager) == (5, 7.0)


@pytest.fixture
def mount(tmp_path) -> Path:
    """Returns a link to a file system that is not mounted. mkdir() of what it names mounts it."""
    link = tmp_path / "mount"
    link.symlink_to(tmp_path / "disk")
    return link


# fault (Deaths): The far storage of a manager (`far=`) or its own one is away for a while, the trainer or the process
# of copies is killed, or a version is removed or thinned meanwhile.
# result: No save waits. When the storage is back, the newest version is copied first. After the trainer's end the
# newest version is copied. A trouble is one event and one log line.
def test_a_far_storage_that_is_away_for_a_while_is_one_trouble_and_has_the_newest_version_when_it_is_back(nm, place, mount):
    events = []
    with nm.Manager(place.storage, far=nm.Far(mount / "far", keep_last=2)) as manager:
        manager.on_event(events.append)
        for step in (1, 2, 3):
            manager.save(step, items(step), force=True)
            manager.wait(step)
        until(lambda: any(event.kind == "copy-failed" for event in events), 120)
        manager.save(4, items(4), force=True)
        manager.wait(4)
        mount.readlink().mkdir()
        until(lambda: sum(event.kind == "copied" for event in events) == 2, 180)
    assert nm.wait_for_exports(120)
    assert [(event.kind, event.step) for event in events if event.kind.startswith("cop")][1:] == [("copied", 4), ("copied", 3)]
    assert steps_in(mount / "far") == [3, 4] and whole(mount / "far")


# fault: as test_a_far_storage_that_is_away_for_a_while_is_one_trouble_and_has_the_newest_version_when_it_is_back
def test_storages_that_are_both_away_at_the_start_get_what_was_saved_when_they_are_back(nm, place, tmp_path, mount):
    near = tmp_path / "other"
    near.symlink_to(tmp_path / "disk of its own")
    events = []
    with nm.Manager(near / "run", far=nm.Far(mount / "far")) as manager:
        manager.on_event(events.append)
        manager.save(1, items(1), force=True)
        until(lambda: any(event.kind == "storage" for event in events), 120)
        mount.readlink().mkdir()
        near.readlink().mkdir()
        until(lambda: any(event.kind == "copied" for event in events), 180)
    assert nm.wait_for_exports(120)
    assert steps_in(near / "run") == steps_in(mount / "far") == [1] and whole(mount / "far")


# fault: as test_a_far_storage_that_is_away_for_a_while_is_one_trouble_and_has_the_newest_version_when_it_is_back
@pytest.mark.nightly("test_a_version_that_was_thinned_after_its_copy_was_made_stays_whole_in_the_far_storage")
def test_a_version_that_the_near_storage_removed_or_thinned_meanwhile_is_no_failure(place, mount):
    events = []
    with nebulaml.Manager(place.storage, keep_last=2, keep_items={"optimizer": 1}, far=nebulaml.Far(mount / "far")) as manager:
        manager.on_event(events.append)
        manager.save(1, both(1), force=True)
        until(lambda: any(event.kind == "copy-failed" for event in events), 120)
        steps = itertools.count(2)

        def save_another() -> bool:  # retention spares a version that is just being tried: it goes after a later save
            step = next(steps)
            manager.save(step, both(step), force=True)
            manager.wait()  # also until retention is done
            return steps_in(place.storage) == [step - 1, step] and not optimizer_of(place.storage, step - 1)

        until(save_another, 120)
        kept = steps_in(place.storage)
        mount.readlink().mkdir()
        until(lambda: steps_in(mount / "far") == kept, 180)
    assert nebulaml.wait_for_exports(120)
    assert whole(mount / "far") and [bool(optimizer_of(mount / "far", step)) for step in kept] == [False, True]
    assert sum(event.kind == "copy-failed" for event in events) == 1


def test_a_version_that_was_thinned_after_its_copy_was_made_stays_whole_in_the_far_storage(place, far):
    described = nebulaml.Far(far)
    for step in (1, 2):  # the second manager's process does not know what the first one's has copied
        with nebulaml.Manager(place.storage, keep_items={"optimizer": 1}, far=described) as manager:
            manager.save(step, both(step), force=True)
            manager.wait(step)
        assert nebulaml.wait_for_exports(120)
    until(lambda: not optimizer_of(place.storage, 1), 120)
    with nebulaml.Manager(place.storage, keep_items={"optimizer": 1}, far=described) as manager:
        manager.save(3, items(3), force=True)
    assert nebulaml.wait_for_exports(120)
    assert optimizer_of(far, 1) and whole(far)


@pytest.fixture
def gate(place, tmp_path, monkeypatch):
    """Makes each `nebula copy` say that it has begun, and wait. Returns the files of both."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    script = tmp_path / "nebula"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = copy ]; then touch {begun}; while [ ! -e {go} ]; do sleep 0.05; done; fi\nexec {command} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("NEBULA_AGENT_PATH", str(script))
    return begun, go


# fault: as test_a_far_storage_that_is_away_for_a_while_is_one_trouble_and_has_the_newest_version_when_it_is_back
def test_a_trainer_that_is_killed_during_a_copy_has_the_newest_version_in_the_far_storage(place, far, gate):
    begun, go = gate
    trainer = place.trainer(
        """
        manager = nm.Manager(sys.argv[1], far=nm.Far(sys.argv[2], keep_last=1))
        manager.save(5, {"model": {"w": torch.full((5,), 5.0)}}, force=True)
        while not os.path.exists(sys.argv[3]):
            time.sleep(0.05)
        manager.save(6, {"model": {"w": torch.full((5,), 6.0)}}, force=True)
        say("saved")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        place.storage, far, begun,
    )  # fmt: skip
    assert trainer.wait(120) == -signal.SIGKILL
    assert steps_in(far) == []
    go.touch()
    until(lambda: steps_in(far) == [6], 120)
    assert whole(far)


# fault: as test_a_far_storage_that_is_away_for_a_while_is_one_trouble_and_has_the_newest_version_when_it_is_back
def test_retention_leaves_a_version_alone_while_it_is_copied_and_no_save_waits(nm, place, far, gate):
    begun, go = gate
    with nm.Manager(place.storage, keep_last=1, far=nm.Far(far)) as manager:
        manager.save(1, items(1), force=True)
        until(begun.exists, 120)
        for step in (2, 3, 4):
            manager.save(step, items(step), force=True)
            manager.wait(step)
        assert 1 in steps_in(place.storage) and steps_in(far) == []
        go.touch()
        until(lambda: {1, 4} <= set(steps_in(far)), 120)
    assert nm.wait_for_exports(120)
    assert whole(far)


# fault: as test_a_far_storage_that_is_away_for_a_while_is_one_trouble_and_has_the_newest_version_when_it_is_back
@pytest.mark.nightly("test_a_trainer_that_is_killed_during_a_copy_has_the_newest_version_in_the_far_storage")
def test_a_process_of_copies_that_is_killed_is_an_event_and_the_next_save_starts_another(nm, place, far, gate):
    events, (begun, go) = [], gate
    with nm.Manager(place.storage, far=nm.Far(far)) as manager:
        manager.on_event(events.append)
        manager.save(1, items(1), force=True)
        until(begun.exists, 120)
        [process] = processes_of(os.getpid())
        os.kill(process, signal.SIGKILL)
        until(lambda: any(event.kind == "copy-failed" and "ended with -9" in event.text for event in events), 60)
        go.touch()
        manager.save(2, items(2), force=True)
        until(lambda: steps_in(far) == [1, 2], 120)
    nm.wait_for_exports(120)
    assert whole(far)


# fault: as test_a_job_whose_storage_and_memory_are_lost_goes_on_from_the_far_storage_and_saves_into_the_near_one
def test_a_far_storage_that_cannot_be_read_does_not_hold_up_a_job_and_never_makes_it_begin_anew(nm, place, caplog):
    with socket.socket() as unheard:  # bound, and nobody listens
        unheard.bind(("127.0.0.1", 0))
        described = nm.Far(f"http://127.0.0.1:{unheard.getsockname()[1]}/account/container/far")
        with nm.Manager(place.storage, far=described) as manager:
            with pytest.raises(NebulaError):  # nothing is near, and nobody knows what is far
                restored(manager)
            manager.save(1, items(1), force=True)
            manager.wait(1)
            assert manager.latest_step() == 1 and restored(manager) == (1, 1.0)
        with nm.Manager(place.storage, far=described) as manager:
            assert restored(manager) == (1, 1.0) and manager.latest_step() == 1 and manager.all_steps() == [1]
            assert caplog.text.count("cannot be read") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "names no storage path"),
        ({"path": "/x", "every": 0}, "every=0"),
        ({"path": "/x", "keep_last": 0}, "keep_last=0"),
        ({"path": "https://a.blob.core.windows.net/c/run?sig=secret"}, "has a secret in its URL"),
    ],
)
def test_a_description_that_cannot_work_is_refused_before_training(nm, options, message):
    with pytest.raises(NebulaConfigError) as failure:
        nm.Far(**options)
    assert message in str(failure.value) and "sig=" not in str(failure.value)


def test_a_far_storage_that_is_the_near_one_is_refused(nm, place):
    with pytest.raises(NebulaConfigError, match="is the manager's own path"):
        nm.Manager(place.storage, far=nm.Far(place.storage / ".." / "storage"))
    with pytest.raises(NebulaConfigError, match=r"give nebulaml.Far"):
        nm.Manager(place.storage, far="s3://bucket/run")


# fault (Storage): The far storage does not answer before the first save of a job on several nodes, and the clocks of its ranks differ.
# result: All ranks do without it until they save. None asks it again alone, which would wait for the others.
def test_ranks_of_several_nodes_do_not_go_by_their_clocks_to_ask_the_far_storage_again(monkeypatch):
    asked, needed = [], [True]

    def look(owner, path):
        asked.append(path)
        if path == "/far":
            raise NebulaStorageError("it does not answer")
        return [{"tag": "global_step1", "was_removed": False}]

    owner = types.SimpleNamespace(agreement=types.SimpleNamespace(needed=lambda: needed[0]), place=lambda: None)
    second = Second(types.SimpleNamespace(persist_path="/near", _engine=owner), nebulaml.Far("/far"))
    monkeypatch.setattr(agree, "of_all_ranks", look)
    monkeypatch.setattr(far_module, "AWAY_S", 0.0)
    for _ in range(3):
        assert [one["tag"] for one in second.versions(look)] == ["global_step1"]
    assert asked == [None, "/far", None, None]
    needed[0] = False  # after a save each rank answers for itself
    second.versions(look)
    assert asked[4:] == [None, "/far"]


# fault (Deaths): A rank does not ask the far storage with the others in time.
# result: The ranks that wait for it raise. They do not go on with the near storage alone, which the late rank would not do.
def test_a_rank_that_is_late_does_not_count_as_a_far_storage_that_is_away(monkeypatch):
    def look(owner, path):
        if path == "/far":
            agree._until(lambda: None, lambda: [1], ranks.Place(0, 2, 0, 1))
        return [{"tag": "global_step1", "was_removed": False}]

    owner = types.SimpleNamespace(agreement=types.SimpleNamespace(needed=lambda: True), place=lambda: None)
    second = Second(types.SimpleNamespace(persist_path="/near", _engine=owner), nebulaml.Far("/far"))
    monkeypatch.setenv("NEBULA_AGREE_TIMEOUT", "0.01")
    with pytest.raises(NebulaTimeout, match="ranks 1 did not"):
        second.versions(look)
