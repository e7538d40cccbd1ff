"""Readers: programs that load what a job saves, beside its trainers or elsewhere, and change nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import nebulaml as nebula
import pytest
import torch
from nebulaml._session import locate
from nebulaml.errors import NebulaConfigError, NebulaError
from waiting import until

# Saves a step for each line of input. An interval of an hour: only the first version goes to storage by itself.
TRAINER = """
    nm.init(sys.argv[1], sys.argv[2], job=sys.argv[3] or None, keep_last=int(sys.argv[4]), num_of_version_in_retention=2, on_error="raise")
    for line in sys.stdin:
        step = int(line)
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("w.pt", torch.full((1 << 18,), float(step)))
        checkpoint.wait("committed" if sys.argv[2] == "1h" else "durable", 60)
        say(step)
"""


class Trainer:
    def __init__(self, place, interval="1h", job="", keep=0):
        self.process = place.trainer(TRAINER, place.storage, interval, job, keep, stdin=True)

    def save(self, step: int) -> None:
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == str(step)

    def end(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(timeout=60) == 0
        self.process.stdout.close()


def value(checkpoint) -> float:
    loaded = checkpoint.load("w.pt")
    assert (loaded == loaded[0]).all()
    return float(loaded[0])


@pytest.mark.parametrize("job", ["", "named"])
def test_readers_load_the_newest_from_memory_while_the_trainer_goes_on(place, job):
    place.storage.mkdir()
    trainer = Trainer(place, job=job)
    with nebula.Reader(place.storage) as reader, nebula.Reader(place.storage) as other:
        assert reader.latest() is None and reader.get("global_step1") is None and reader.get(1) is None
        for step in (1, 2, 3):
            trainer.save(step)
            for one in (reader, other):
                found = one.latest()
                assert found.tag == f"global_step{step}" and value(found) == step
        assert value(reader.get("global_step3")) == value(reader.get(3)) == 3
        assert not (place.storage / "global_step3").exists()
        assert reader.versions()[0].tag == "global_step3"
        trainer.end()


def test_a_reader_follows_without_going_back_and_skips_what_was_replaced(place):
    place.storage.mkdir()
    trainer = Trainer(place)
    with nebula.Reader(place.storage) as reader:
        trainer.save(1)
        follows = reader.follow(poll=0.5)
        assert next(follows).tag == "global_step1"
        for step in (2, 3, 4):
            trainer.save(step)
        assert value(next(follows)) == 4
        trainer.save(2)  # again, as a loop does that repeats a step
        trainer.save(5)
        assert value(next(follows)) == 5
        assert [one.tag for one in reader.follow(every=5, timeout=0.1)] == ["global_step5"]
        assert not list(reader.follow(every=7, timeout=0.1))
        trainer.end()


def test_a_reader_saves_and_removes_nothing_and_is_no_rank(place):
    place.storage.mkdir()
    trainer = Trainer(place)
    trainer.save(1)
    with nebula.Reader(place.storage) as reader:
        found = reader.latest()
        with pytest.raises(NebulaConfigError, match="a reader saves"):
            found.save("more.pt", torch.ones(3))
        with pytest.raises(NebulaConfigError, match="a reader saves"):
            reader._session.checkpoint("mine").save("w.pt", torch.ones(3))
        with pytest.raises(NebulaError, match="a reader saves"):
            reader._session.unpublish(place.root / "nothing")
        trainer.process.kill()
        trainer.process.wait()
        trainer.process.stdout.close()
        again = Trainer(place)  # the same rank again, while the reader lives
        again.save(2)
        assert value(reader.latest()) == 2
        again.end()


def test_retention_leaves_the_checkpoint_that_a_reader_found_last(place):
    place.storage.mkdir()
    trainer = Trainer(place, "0", keep=1)
    trainer.save(1)
    with nebula.Reader(place.storage) as reader:
        first = reader.latest()
        for step in (2, 3, 4, 5):
            trainer.save(step)
        assert value(first) == 1 and (place.storage / "global_step1").is_dir()
        assert not (place.storage / "global_step2").is_dir() and not (place.storage / "global_step3").is_dir()
        assert value(reader.latest()) == 5
        for step in (6, 7):
            trainer.save(step)
        until(lambda: not (place.storage / "global_step1").is_dir(), 30, "the removal of the version that no reader holds any more")
        assert (place.storage / "global_step5").is_dir()
    trainer.save(8)
    trainer.save(9)
    until(lambda: not (place.storage / "global_step5").is_dir(), 30, "the removal after the end of the reader")
    trainer.end()


@pytest.fixture
def elsewhere(place, tmp_path):
    """Another node of the same storage: with elsewhere(), new readers are there."""
    other = type(place)(tmp_path / "elsewhere", Path(f"{place.memory}-elsewhere"))
    other.root.mkdir()

    @contextlib.contextmanager
    def there():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NEBULA_RUNTIME_DIR", str(other.runtime))
            patch.setenv("NEBULA_MEMORY_DIR", str(other.memory))
            yield other

    yield there
    other.close()


def leases(place) -> list[Path]:
    return [one for one in (place.storage / ".nebula/leases").glob("*/*") if not one.name.startswith(".")]


def test_a_reader_on_another_node_follows_storage(place, elsewhere):
    place.storage.mkdir()
    trainer = Trainer(place, "0")
    trainer.save(1)
    with elsewhere(), nebula.Reader(place.storage) as reader:
        follows = reader.follow(poll=0.1)
        assert value(next(follows)) == 1
        trainer.save(2)
        assert value(next(follows)) == 2
    trainer.end()


def test_retention_leaves_the_checkpoint_that_a_reader_of_another_node_holds_until_its_lease_ends(place, elsewhere):
    place.storage.mkdir()
    trainer = Trainer(place, "0", keep=1)
    trainer.save(1)
    with elsewhere() as there, nebula.Reader(place.storage) as reader:
        first = reader.latest()
        until(lambda: [one.parent.name for one in leases(place)] == ["global_step1"], 30, "the lease")
        for step in (2, 3):
            trainer.save(step)
        until(lambda: not (place.storage / "global_step2").is_dir(), 30, "the removal of the version that nobody reads")
        assert value(first) == 1 and (place.storage / "global_step1").is_dir()
        command = [locate.agent_path() or os.environ["NEBULA_AGENT_PATH"], "prune", "--path", place.storage, "--tag", "global_step1", "--yes"]
        told = subprocess.run(command, capture_output=True, text=True)
        assert told.returncode and "a reader on another node has it" in told.stderr
        assert value(reader.latest()) == 3
        until(lambda: [one.parent.name for one in leases(place)] == ["global_step3"], 30, "the lease of the version that it holds now")
        trainer.save(4)
        until(lambda: not (place.storage / "global_step1").is_dir(), 30, "the removal of the version that no reader holds any more")
        there.kill_agent()  # its lease stays
        assert leases(place) and (place.storage / "global_step3").is_dir()
        for one in leases(place):
            os.utime(one, (one.stat().st_mtime - 1000,) * 2)
        trainer.save(5)
        trainer.save(6)
        until(lambda: not (place.storage / "global_step3").is_dir() and not leases(place), 30, "the end of the dead agent's lease")
    trainer.end()


def test_a_reader_goes_on_when_the_agent_was_killed(place):
    place.storage.mkdir()
    trainer = Trainer(place)
    trainer.save(1)
    with nebula.Reader(place.storage) as reader:
        follows = reader.follow(poll=0.2)
        assert value(next(follows)) == 1
        place.kill_agent()
        trainer.save(2)
        assert value(next(follows)) == 2
    trainer.end()


def test_the_command_follow_runs_a_program_with_each_checkpoints_files(place):
    place.storage.mkdir()
    trainer = Trainer(place)
    trainer.save(1)
    nebula_command = locate.agent_path() or os.environ["NEBULA_AGENT_PATH"]
    code = "import sys, torch; print(int(torch.load(sys.argv[1] + '/w.pt')[0]), sys.argv[1], flush=True)"
    follow = subprocess.Popen(
        [nebula_command, "follow", place.storage, "--exec", f'{shutil.which("python3")} -c "{code}" {{}}'],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    directories = []
    for step in (1, 2):
        if step == 2:
            trainer.save(2)
        number, directory = follow.stdout.readline().split()
        assert number == str(step) and directory.startswith("/dev/shm/")
        directories.append(directory)
    until(lambda: not any(map(os.path.exists, directories)), 30, "the removal of the directories")
    follow.terminate()
    follow.wait(timeout=30)
    follow.stdout.close()
    follow.stderr.close()
    once = subprocess.run([nebula_command, "follow", "--path", place.storage, "--once", "--exec", "ls {}; exit 3"], capture_output=True, text=True)
    assert once.returncode == 1 and once.stdout == "w.pt\n" and "ended with status 3" in once.stderr
    trainer.end()
