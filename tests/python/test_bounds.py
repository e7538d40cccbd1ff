"""A memory tier that holds 1.2 versions, and storage of 20 MB/s: the effects of wait, stream and skip, and their cost for training."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import nebulaml
import pytest
import torch
from nebulaml._session import locate
from nebulaml.errors import NebulaError, NebulaNotFound
from waiting import until

MIB = 1 << 20
SIZE = 24 * MIB
IMAGE = 26 * MIB  # header and rounding
BUDGET = IMAGE * 12 // 10


@pytest.fixture
def slow(place, monkeypatch):
    """Sets memory for 1.2 versions, and storage of 20 MB/s on a local disk."""
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", str(BUDGET))
    monkeypatch.setenv("NEBULA_STORE_MBPS", "20")
    return place


def save(step):
    """Saves and commits a version. Returns whether both succeeded."""
    value = torch.full((SIZE // 4,), float(step))
    checkpoint = nebulaml.Checkpoint(f"global_step{step}")
    saved = checkpoint.save("m.pt", value)
    committed = checkpoint.commit()
    value.fill_(-1)
    return bool(saved and committed)


def holds(step):
    return bool((nebulaml.get_checkpoint(f"global_step{step}").load("m.pt") == step).all())


def stored(place, step):
    return (place.storage / f"global_step{step}" / ".nebula" / "manifest-1.json").exists()


# fault (Memory): Memory is full.
# result: `on_full` decides.
def test_wait_holds_the_trainer_until_the_older_version_is_durable_and_loses_none(slow):
    nebulaml.init(str(slow.storage), 1000, 2, on_full="wait", on_error="raise")
    for step in (1, 2, 3):
        assert save(step) and slow.memory_bytes() <= BUDGET
        assert step == 1 or stored(slow, step - 1)
    nebulaml.flush_persistence()
    assert all(holds(step) for step in (1, 2, 3))


# fault (Memory): Memory is full, and storage hangs.
# result: A save waits once, `NEBULA_MEMORY_WAIT` seconds. Later saves to the same path fail at once until a version
# has become durable there. Saves of other jobs wait for their own storage.
@pytest.mark.nightly("test_wait_holds_the_trainer_until_the_older_version_is_durable_and_loses_none")
def test_a_trainer_waits_once_for_storage_that_hangs_and_not_at_every_save(slow, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "2")  # as good as none, for twelve seconds
    monkeypatch.setenv("NEBULA_MEMORY_WAIT", "1")
    nebulaml.init(str(slow.storage), 0, 2, on_full="wait", on_error="raise")
    assert save(1)
    for step in (2, 3, 4):
        with pytest.raises(NebulaError, match="no version has become durable for too long"):
            save(step)
    log = (slow.runtime / "agent.log").read_text()
    assert log.count("waits for memory:") == 1 and not stored(slow, 1)
    until(lambda: stored(slow, 1), 60)
    nebulaml.flush_persistence()
    assert save(5) and holds(5) and holds(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_save_that_waits_for_memory_ends_at_a_signal_whose_handler_raises(slow, monkeypatch, number):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "1")
    trainer = slow.trainer(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        nm.init(sys.argv[1], 0, 2, on_full="wait")
        def save(step):
            with nm.Checkpoint(f"global_step{step}") as checkpoint:
                checkpoint.save("m.pt", torch.full((int(sys.argv[2]) // 4,), float(step)))
        save(1)
        say("saved")
        begun = time.monotonic()
        try:
            save(2), save(3)
        except BaseException as failure:
            say(type(failure).__name__, time.monotonic() - begun < 30)
        """,
        slow.storage,
        SIZE,
    )
    assert trainer.stdout.readline() == "saved\n"
    until(lambda: "waits for memory:" in (slow.runtime / "agent.log").read_text(), 60, "the wait")
    trainer.send_signal(number)
    assert trainer.communicate(timeout=100)[0] == ("KeyboardInterrupt" if number == signal.SIGINT else "SystemExit") + " True\n"


# fault: as test_wait_holds_the_trainer_until_the_older_version_is_durable_and_loses_none
def test_stream_goes_past_memory_and_loses_none(slow):
    nebulaml.init(str(slow.storage), 1000, 2, on_full="stream", on_error="raise")
    for step in (1, 2, 3):
        assert save(step) and slow.memory_bytes() <= BUDGET
    assert "waits for memory" not in (slow.runtime / "agent.log").read_text(), "a save waited for storage of 20 MB/s"
    assert not stored(slow, 2) and holds(3) and holds(1)
    nebulaml.flush_persistence()
    assert all(holds(step) for step in (1, 2, 3))
    until(lambda: not list(slow.storage.glob(".nebula-tmp-*")))  # the new agent sweeps while it answers


@pytest.mark.nightly("test_stream_goes_past_memory_and_loses_none")
def test_a_file_larger_than_all_memory_is_streamed(slow):
    nebulaml.init(str(slow.storage), 1000, 2, on_full="stream", on_error="raise")
    checkpoint = nebulaml.Checkpoint("global_step1")
    checkpoint.save("m.pt", torch.arange(2 * SIZE // 4))
    assert checkpoint.commit()
    checkpoint.wait("durable", 60)
    assert slow.memory_bytes() == 0
    assert torch.equal(torch.load(slow.storage / "global_step1" / "m.pt"), torch.arange(2 * SIZE // 4))


@pytest.mark.parametrize("where", ["below a file", pytest.param("/dev/shm", marks=pytest.mark.nightly("test_stream_without_a_usable_local_disk_waits_as_wait_does"))])
def test_stream_without_a_usable_local_disk_waits_as_wait_does(slow, monkeypatch, where):
    (slow.root / "file").write_text("x")
    monkeypatch.setenv("NEBULA_SPILL_DIR", where if where.startswith("/") else str(slow.root / "file" / "below"))
    nebulaml.init(str(slow.storage), 1000, 2, on_full="stream", on_error="raise")
    for step in (1, 2, 3):
        assert save(step) and slow.memory_bytes() <= BUDGET
        assert step == 1 or stored(slow, step - 1)
    assert "cannot be streamed to a local disk, so it waits for memory" in (slow.runtime / "agent.log").read_text()
    nebulaml.flush_persistence()
    assert all(holds(step) for step in (1, 2, 3))


def test_a_streamed_version_survives_its_trainer(slow):
    code = """
        nm.init(sys.argv[1], 1000, 2, on_full="stream", on_error="raise")
        for step in (1, 2):
            c = nm.Checkpoint(f"global_step{step}")
            c.save("m.pt", torch.full((int(sys.argv[2]) // 4,), float(step)))
            c.commit()
            c.wait("committed", 60)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    slow.run(code, slow.storage, SIZE, returncode=-9)
    nebulaml.init(str(slow.storage), 1000, 2, on_full="stream")
    assert nebulaml.get_latest_checkpoint().tag == "global_step2" and holds(2)


# fault (Memory): A version was streamed, and the agent dies before it is durable.
# result: That version is lost. The one before can be loaded.
def test_a_streamed_version_that_died_with_its_agent_leaves_no_debris_and_the_one_before(slow, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "2")  # 24 seconds in which to kill it
    monkeypatch.setenv("NEBULA_CAPTURE", "copy")  # else the trainer still copies when the agent dies, and saves once more
    nebulaml.init(str(slow.storage), 1000, 2, on_full="stream", on_error="raise")
    assert save(1) and save(2)
    assert not stored(slow, 2)
    slow.kill_agent()
    nebulaml._shutdown()
    monkeypatch.delenv("NEBULA_STORE_MBPS")
    nebulaml.init(str(slow.storage), 1000, 2, on_full="stream")
    assert nebulaml.get_latest_checkpoint().tag == "global_step1" and holds(1)
    until(lambda: not list(slow.storage.glob(".nebula-tmp-*")))  # the new agent sweeps while it answers


# fault: as test_wait_holds_the_trainer_until_the_older_version_is_durable_and_loses_none
def test_skip_fails_that_version_at_once_and_says_so(slow, monkeypatch, caplog):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "2")  # twelve seconds, in which there is no room
    nebulaml.init(str(slow.storage), 1000, 2, on_full="skip")
    assert save(1) and not save(2)
    assert not stored(slow, 1)  # nor waited
    assert "global_step2" in caplog.text or "m.pt" in caplog.text
    assert nebulaml.get_checkpoint("global_step2") is None and holds(1)
    rows = {row["tag"]: row for row in nebulaml.stats()}
    assert rows["global_step2"]["result"] == "failed" and "full" in rows["global_step2"]["error"]
    nebulaml.flush_persistence()
    assert save(3) and holds(3)  # there is room again


@pytest.mark.nightly("test_skip_fails_that_version_at_once_and_says_so")
def test_skip_saves_or_skips_each_version_and_storage_decides_which(slow):
    nebulaml.init(str(slow.storage), 1000, 2, on_full="skip")
    results = [save(step) for step in range(1, 6)]
    rows = {row["tag"]: row["result"] for row in nebulaml.stats()}
    assert [rows[f"global_step{step}"] != "failed" for step in range(1, 6)] == results
    assert results[0] and not all(results)  # 20 MB/s can take no version in the time that the next one takes to come
    nebulaml.flush_persistence()
    assert all(
        (nebulaml.get_checkpoint(f"global_step{step}") is not None) == kept for step, kept in enumerate(results, 1)
    )


def test_skip_raises_when_errors_are_to_be_raised(slow, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "1")
    nebulaml.init(str(slow.storage), 1000, 2, on_full="skip", on_error="raise")
    assert save(1)
    with pytest.raises(NebulaError, match="MiB"):
        save(2)


@pytest.mark.nightly
def test_slow_storage_with_room_in_memory_stalls_nothing(place, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "1")  # 24 seconds for each version
    nebulaml.init(str(place.storage), 0, 2)
    for step in range(1, 6):
        assert save(step) and not stored(place, step)
    assert not stored(place, 3) and holds(5)


@pytest.mark.nightly("python/test_lines.py::test_a_save_after_going_back_is_the_newest_in_memory_and_in_storage")
def test_a_run_that_was_rolled_back_writes_into_the_same_memory_again(place):
    nebulaml.init(str(place.storage), 0, 2)
    for step in (90, 91, 92):
        assert save(step)
        nebulaml.flush_persistence()
    images = []
    for step in range(1, 7):  # a new line of history
        assert save(step)
        nebulaml.flush_persistence()
        images.append({path.name for path in place.memory.glob("*.img")})
    assert len(images[2]) == 2  # they take turns
    assert images[2] == images[3] == images[4] == images[5]
    assert holds(92) and holds(6)


def test_retention_in_storage_spares_multiples_the_newest_and_what_is_being_loaded(place):
    nebulaml.init(str(place.storage), 0, 1, keep_last=1, keep_every=4)
    for step in range(1, 8):
        checkpoint = nebulaml.Checkpoint(f"global_step{step}")
        checkpoint.save("m.pt", torch.full((1000,), float(step)))
        checkpoint.commit()
        checkpoint.wait("durable", 60)
    until(lambda: sorted(nebulaml.list_checkpoints()) == ["global_step4", "global_step7"])
    nebulaml._shutdown()
    place.lose_memory()
    nebulaml.init(str(place.storage), 0, 1, keep_last=1)
    assert nebulaml.get_latest_checkpoint().tag == "global_step7"
    old = nebulaml.get_checkpoint("global_step4")
    value = old.load("m.pt")
    assert (value == 4).all() and Path(place.storage / "global_step4").exists()


def test_a_load_while_retention_removes_versions_is_right_or_finds_nothing(place):
    """One thread saves. Others load the oldest version in storage, which retention removes next."""
    nebulaml.init(str(place.storage), 0, 1, keep_last=2, on_error="raise")
    loaded, gone, wrong, ended = [], [], [], threading.Event()
    rounds = 30 if os.environ.get("NEBULA_TEST_NIGHTLY") else 12

    def load():
        while not ended.is_set():
            rows = [row for row in nebulaml.list_checkpoints().values() if row["source"] == ["storage"]]
            tag = min((row["tag"] for row in rows), key=lambda one: int(one[11:]), default=None)
            try:
                found = tag and nebulaml.get_checkpoint(tag)
                value = found.load("m.pt") if found else None
            except NebulaNotFound as failure:
                gone.append(str(failure))
            except Exception as failure:
                wrong.append(repr(failure))
            else:
                if value is not None:
                    (loaded if (value == int(tag[11:])).all() else wrong).append(tag)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 100
    for step in itertools.count(1):
        if (step > rounds and len(set(loaded)) > rounds // 6) or wrong or time.monotonic() > deadline:
            break
        checkpoint = nebulaml.Checkpoint(f"global_step{step}")
        checkpoint.save("m.pt", torch.full((1_000_000,), float(step)))
        checkpoint.commit()
        checkpoint.wait("durable", 60)
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong and len(set(loaded)) > 5, (wrong[:3], gone[:3], loaded)


@pytest.fixture
def cgroup():
    """Makes a memory cgroup of 640 MiB. Returns a function that moves a process into it, and one that counts the hits of its limit."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"nebula-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(640 * MIB))
        except OSError:
            group.rmdir()
            continue
        yield group
        deadline = time.monotonic() + 60
        while (group / "cgroup.procs").read_text().split():
            for pid in (group / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        group.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")


@pytest.mark.nightly("test_a_trainer_that_grows_to_its_cgroups_limit_gets_the_memory_of_durable_versions")
def test_a_budget_beyond_the_cgroups_limit_is_cut_to_what_it_leaves_and_nothing_is_killed(place, monkeypatch, cgroup):
    """Fourteen versions of 48 MiB are more than the limit, although the settings would keep them all."""
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "8G")
    code = """
        open(sys.argv[2] + "/cgroup.procs", "w").write(str(os.getpid()))
        nm.init(sys.argv[1], 0, 20, on_error="raise")
        value = torch.zeros(12 << 20)
        for step in range(14):
            c = nm.Checkpoint(f"global_step{step}")
            c.save("m.pt", value.fill_(step))
            c.commit()
        nm.flush_persistence()
        say(nm.get_checkpoint("global_step0").load("m.pt").sum().item(), len(nm.list_checkpoints()))
    """
    assert place.run(code, place.storage, cgroup).split() == ["0.0", "14"]
    program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    told = subprocess.run([program, "status", "--json"], capture_output=True, check=True, timeout=60).stdout
    assert 0 < json.loads(told)["agent"]["memory_budget"] < 640 * MIB


# fault: as durable_bytes_leave_while_the_machine_is_short_of_memory_and_the_newest_last
def test_a_trainer_that_grows_to_its_cgroups_limit_gets_the_memory_of_durable_versions(place, cgroup):
    """It takes all but 100 MiB, and what the agent gives back. Versions of 48 MiB then load from storage; the log and `nebula status` say why."""
    code = """
        open(sys.argv[2] + "/cgroup.procs", "w").write(str(os.getpid()))
        said = []
        import logging
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("nebulaml").addHandler(handler)
        nm.init(sys.argv[1], 0, 4, on_error="raise")
        for step in (1, 2, 3):
            with nm.Checkpoint(f"global_step{step}") as c:
                c.save("m.pt", torch.full((12 << 20,), step, dtype=torch.int32))
            c.wait("durable", 60)

        def left():
            for limit, used in (("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")):
                if os.path.exists(f"{sys.argv[2]}/{limit}"):
                    stat = dict(line.split() for line in open(f"{sys.argv[2]}/memory.stat"))
                    cache = int(stat["active_file"]) + int(stat["inactive_file"])
                    return int(open(f"{sys.argv[2]}/{limit}").read()) - int(open(f"{sys.argv[2]}/{used}").read()) + cache

        taken = []
        deadline = time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            if left() > 100 << 20:
                taken.append(torch.ones(1 << 20))
            else:
                time.sleep(0.05)
        say(said[0].split(": the machine")[0])
        taken.clear()
        say(*(nm.get_checkpoint(f"global_step{step}").load("m.pt").sum().item() >> 20 for step in (1, 2, 3)))
        sys.stdin.readline()
    """
    trainer = place.trainer(code, place.storage, cgroup, stdin=True)
    assert re.fullmatch(r"nebula: checkpoint 'global_step\d': it is durable, and left memory\n", trainer.stdout.readline())
    assert trainer.stdout.readline() == "12 24 36\n"
    program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    told = subprocess.run([program, "status", "--path", place.storage], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "it is durable, and left memory: the machine or the cgroup is short of memory: " in told, told
    trainer.kill()
    trainer.wait(timeout=60)
    trainer.stdout.close()


@pytest.mark.parametrize(("versions", "bound"), [pytest.param(1, 1, marks=pytest.mark.nightly("test_memory_has_as_many_versions_as_retention_says_once_they_are_durable")), (2, 2)])
def test_memory_has_as_many_versions_as_retention_says_once_they_are_durable(place, versions, bound):
    nebulaml.init(str(place.storage), 0, versions, on_error="raise")
    for step in (1, 2, 3, 4):
        assert save(step)
        nebulaml.flush_persistence()
    until(lambda: place.memory_bytes() <= bound * IMAGE)
    time.sleep(0.3)  # an image that is made for the next save would come now
    assert SIZE * bound <= place.memory_bytes() <= bound * IMAGE
    assert all(holds(step) for step in (1, 2, 3, 4))  # older ones come from storage
    assert save(5) and holds(5)


@pytest.mark.nightly("test_memory_has_as_many_versions_as_retention_says_once_they_are_durable")
def test_ranks_and_jobs_of_a_node_take_memory_for_one_version_each_and_load_it_while_they_save_the_next(place):
    code = f"""
        rank = int(sys.argv[2])
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", NEBULA_RUN="r")
        nm.init(sys.argv[1], 0, on_error="raise")
        for step in (1, 2, 3):
            with nm.Checkpoint(f"global_step{{step}}", -2) as c:
                c.save(f"r{{rank}}", torch.full(({SIZE // 8},), step))
            c.wait("durable", timeout=60)
        with nm.Checkpoint("global_step4", -2) as c:
            if rank == 0:
                c.save("r0", torch.full(({SIZE // 8},), 4))
            say("between")
            sys.stdin.readline()
            found = nm.get_latest_checkpoint()
            say(found.tag, found.load("r0")[0].item(), found.load("r1")[-1].item())
            sys.stdin.readline()
    """
    trainers = [place.trainer(code, place.root / job, rank, stdin=True) for job in ("a", "b") for rank in (0, 1)]
    assert [trainer.stdout.readline() for trainer in trainers] == ["between\n"] * 4
    assert 2 * SIZE <= place.memory_bytes() <= 4 * IMAGE
    for trainer in trainers:
        trainer.stdin.write("\n")
        trainer.stdin.flush()
    assert [trainer.stdout.readline() for trainer in trainers] == ["global_step3 3 3\n"] * 4
    for trainer in trainers:
        trainer.kill()
        trainer.wait(timeout=60)
        trainer.stdout.close()


def own_bytes():
    """Returns the bytes of mapped images that are this process's own by now."""
    own, is_image = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_image = line.endswith(".img") or "memfd:nebula" in line
        elif line.startswith("Anonymous:") and is_image:
            own += int(line.split()[1]) * 1024
    return own


def test_tensors_that_a_program_keeps_become_its_own_memory_before_it_writes_to_them(place):
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    assert save(1)
    nebulaml.get_checkpoint("global_step1").load("m.pt")  # and drops it
    assert own_bytes() < SIZE
    kept = nebulaml.get_checkpoint("global_step1").load("m.pt")
    until(lambda: own_bytes() >= SIZE)
    assert (kept == 1).all() and own_bytes() <= IMAGE
    kept.fill_(5)
    assert holds(1)
