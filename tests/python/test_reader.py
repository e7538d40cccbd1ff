"""Readers: programs that load what a job saves, beside its trainers or elsewhere, and change nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

import nebulaml as nebula
import pytest
import torch
from nebulaml._session import locate
from nebulaml.errors import NebulaConfigError, NebulaError, NebulaTimeout
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


@pytest.mark.parametrize("job", ["", pytest.param("named", marks=pytest.mark.nightly)])
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
        until(lambda: not any((place.storage / f"global_step{step}").is_dir() for step in (2, 3, 4)), 60, "the removal of versions that nobody reads")
        assert value(first) == 1 and (place.storage / "global_step1").is_dir()
        assert value(reader.latest()) == 5
        for step in (6, 7):
            trainer.save(step)
        until(lambda: not (place.storage / "global_step1").is_dir(), 60, "the removal of the version that no reader holds any more")
        assert (place.storage / "global_step5").is_dir()
    trainer.save(8)
    trainer.save(9)
    until(lambda: not (place.storage / "global_step5").is_dir(), 60, "the removal after the end of the reader")
    trainer.end()


@pytest.fixture
def elsewhere(place):
    """Another node of the same storage: with elsewhere(), new readers are there."""
    other = type(place)(place.root / "elsewhere", Path(f"{place.memory}-elsewhere"))
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


# Saves a step for each line of input, as a rank of a job that asks for copies. Only the first version goes to storage by itself.
RANK = """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nm.init(sys.argv[1], "1h", 2, replicas=1, job=sys.argv[2] or None, on_error="raise")
    for line in sys.stdin:
        step = int(line)
        with nm.Checkpoint(f"global_step{step}", world) as checkpoint:
            checkpoint.save("w.pt" if rank == 0 else f"w{rank}.pt", torch.full((1 << 18,), float(step)))
        checkpoint.wait(sys.argv[3], 60)
        say(step)
"""


@contextlib.contextmanager
def nodes(place, count: int, job: str = "", state: str = "committed"):
    """The ranks of a job, each on a node of its own: (save a step on all, kill the agent of one). A save returns in that state."""
    with pytest.MonkeyPatch.context() as patch:
        places, ranks = [place], []
        for rank in range(count):
            if rank:
                places.append(type(place)(place.root / f"node{rank}", Path(f"{place.memory}-node{rank}")))
                places[-1].root.mkdir()
            patch.setenv("NEBULA_RUNTIME_DIR", str(places[rank].runtime))
            patch.setenv("NEBULA_MEMORY_DIR", str(places[rank].memory))
            for name, its in {"NEBULA_NODE_ID": f"node{rank}", "RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}.items():
                patch.setenv(name, str(its))
            ranks.append(place.trainer(RANK, place.storage, job, state, stdin=True))

    def save(step: int) -> None:
        for rank in ranks:
            rank.stdin.write(f"{step}\n")
            rank.stdin.flush()
        for rank in ranks:
            assert rank.stdout.readline().strip() == str(step)

    try:
        yield save, lambda rank: places[rank].kill_agent()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        for one in places[1:]:
            one.close()


@pytest.mark.parametrize("job", [pytest.param("", marks=pytest.mark.nightly), "named"])
def test_a_reader_on_another_node_loads_from_the_memory_of_a_trainers_node_what_storage_lacks(place, elsewhere, monkeypatch, job):
    place.storage.mkdir()
    with nodes(place, 1, job) as (save, kill_agent), elsewhere() as there:
        monkeypatch.setenv("NEBULA_NODE_ID", "elsewhere")
        for step in (1, 2, 3):
            save(step)
        with nebula.Reader(place.storage) as reader:
            until(lambda: (found := reader.latest()) and found.tag == "global_step3", 60, "the trainer's newest")
            assert value(reader.latest()) == value(reader.get(3)) == value(reader.get("global_step3")) == 3
            assert not (place.storage / "global_step3").exists()
            follows = reader.follow(every=5, poll=0.2)
            save(4)
            save(5)
            assert value(next(follows)) == 5
            [record] = (place.storage / ".nebula/nodes").iterdir()
            until(lambda: (place.storage / "global_step1").is_dir(), 60, "the first version in storage")
            kill_agent(0)
            until(lambda: reader.latest().tag == "global_step1", 60, "what storage has")
            assert value(reader.latest()) == 1 and record.exists(), "a reader removes nothing"
        assert there.agents()


@pytest.mark.parametrize("has_copies", [True, False])
def test_a_reader_takes_a_checkpoint_from_other_nodes_only_if_they_have_all_of_it(place, elsewhere, monkeypatch, has_copies):
    place.storage.mkdir()
    if not has_copies:
        monkeypatch.setenv("NEBULA_PEER_MEMORY", "0")
    with nodes(place, 2, state="replicated" if has_copies else "committed") as (save, kill_agent), elsewhere():
        monkeypatch.setenv("NEBULA_NODE_ID", "elsewhere")
        save(1)
        with nebula.Reader(place.storage) as reader:
            until(lambda: (place.storage / "global_step1").is_dir(), 60, "the first version in storage")
            save(2)
            until(lambda: (found := reader.latest()) and found.tag == "global_step2", 60, "the trainers' newest")
            if not has_copies:
                found = reader.latest()
                assert value(found) == 2 and float(found.load("w1.pt")[0]) == 2
            kill_agent(1)
            until(lambda: reader.latest().tag == ("global_step2" if has_copies else "global_step1"), 60, "what is whole")
            found = reader.latest()
            assert value(found) == float(found.load("w1.pt")[0]) == (2 if has_copies else 1)


def test_a_reader_makes_no_secret_for_peers(place, elsewhere):
    place.storage.mkdir()
    trainer = Trainer(place, "0")
    trainer.save(1)
    with elsewhere(), nebula.Reader(place.storage) as reader:
        assert value(reader.latest()) == 1 and reader.versions()
    assert not (place.storage / ".nebula/secret").exists() and not (place.storage / ".nebula/nodes").exists()
    trainer.end()


# fault (Storage): Retention runs while a reader of another node has an old version; the reader's agent dies.
# result: The version stays while the agent's lease in storage is young, and goes at the next removal after that.
def test_retention_leaves_the_checkpoint_that_a_reader_of_another_node_holds_until_its_lease_ends(place, elsewhere):
    place.storage.mkdir()
    trainer = Trainer(place, "0", keep=1)
    trainer.save(1)
    with elsewhere() as there, nebula.Reader(place.storage) as reader:
        first = reader.latest()
        until(lambda: [one.parent.name for one in leases(place)] == ["global_step1"], 60, "the lease")
        for step in (2, 3):
            trainer.save(step)
        until(lambda: not (place.storage / "global_step2").is_dir(), 60, "the removal of the version that nobody reads")
        assert value(first) == 1 and (place.storage / "global_step1").is_dir()
        command = [locate.agent_path() or os.environ["NEBULA_AGENT_PATH"], "prune", "--path", place.storage, "--tag", "global_step1", "--yes"]
        told = subprocess.run(command, capture_output=True, text=True)
        assert told.returncode and "a reader on another node has it" in told.stderr
        assert value(reader.latest()) == 3
        until(lambda: [one.parent.name for one in leases(place)] == ["global_step3"], 60, "the lease of the version that it holds now")
        trainer.save(4)
        until(lambda: not (place.storage / "global_step1").is_dir(), 60, "the removal of the version that no reader holds any more")
        there.kill_agent()  # its lease stays
        assert leases(place) and (place.storage / "global_step3").is_dir()
        for one in leases(place):
            os.utime(one, (one.stat().st_mtime - 1000,) * 2)
        trainer.save(5)
        trainer.save(6)
        until(lambda: not (place.storage / "global_step3").is_dir() and not leases(place), 60, "the end of the dead agent's lease")
    trainer.end()


# fault: as test_a_reader_whose_storage_goes_away_waits_for_it_and_gives_nothing_twice
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
    # without torch, whose import takes 2 s: the first number of torch.save's file
    code = "import sys, zipfile; z = zipfile.ZipFile(sys.argv[1] + '/w.pt'); [name] = [n for n in z.namelist() if n.endswith('data/0')]; "
    code += "print(int(memoryview(z.read(name)).cast('f')[0]), sys.argv[1], flush=True)"
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
    until(lambda: not any(map(os.path.exists, directories)), 60, "the removal of the directories")
    follow.terminate()
    follow.wait(timeout=60)
    follow.stdout.close()
    follow.stderr.close()
    once = subprocess.run([nebula_command, "follow", "--path", place.storage, "--once", "--exec", "ls {}; exit 3"], capture_output=True, text=True)
    assert once.returncode == 1 and once.stdout == "w.pt\n" and "ended with status 3" in once.stderr
    trainer.end()


# `nebula follow` may be killed while `nebula restore` puts a checkpoint's files into /dev/shm, or while its command reads them.
def test_the_next_follow_removes_what_a_killed_one_has_left(place, tmp_path):
    session = nebula.Session(str(place.storage), world=1, persistent_time_interval=0, on_error="raise")
    with session.checkpoint("first") as checkpoint:
        checkpoint.save_bytes("w.pt", b"values")
    checkpoint.wait("durable", 60)
    nebula_command = locate.agent_path() or os.environ["NEBULA_AGENT_PATH"]
    gate, planted = tmp_path / "gate", Path(f"/dev/shm/nebula-follow-{os.getpid()}0000")
    os.mkfifo(gate)
    kept, linked = tmp_path / "kept", planted.with_name(planted.name + "1")

    def next_follow():
        done = subprocess.run([nebula_command, "follow", place.storage, "--once", "--exec", "ls {}"], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "w.pt\n", "")

    # killed while its command reads, whose shell is killed later
    words = [nebula_command, "follow", place.storage, "--exec", f"echo $$; cat {gate}; ls {{}} || echo lost; cat {gate}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as follow:
        shell = int(follow.stdout.readline())
        directory = Path(f"/dev/shm/nebula-follow-{follow.pid}")
        follow.kill()
        follow.wait()
        next_follow()
        gate.write_bytes(b"")
        assert follow.stdout.readline() == "w.pt\n", "the command had lost its files"
        reader = int(Path(f"/proc/{shell}/task/{shell}/children").read_text())  # `cat` has the lock, too
        for process in (shell, reader):
            os.kill(process, signal.SIGKILL)
    assert directory.exists()
    # a lock that no process has is all that the next one looks at; it follows no link
    planted.mkdir()
    (planted / "left").write_bytes(b"by a restore")
    kept.mkdir()
    linked.symlink_to(kept)
    try:
        next_follow()
        assert not directory.exists() and not planted.exists() and kept.exists() and linked.is_symlink()
    finally:
        linked.unlink()


# fault (Storage): `nebula follow` cannot put the files of a checkpoint into its directory, for example because that is full.
# result: It says so once, and tries again until it can, or until there is a newer one.
def test_the_command_follow_tries_again_what_it_could_not_put_there(place, tmp_path):
    place.storage.mkdir()
    trainer = Trainer(place)
    trainer.save(1)
    directory = tmp_path / "in"
    directory.write_text("in the way")
    words = [locate.agent_path() or os.environ["NEBULA_AGENT_PATH"], "follow", place.storage, "--in", directory, "--exec", "ls {}; echo done"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follow:
        try:
            line = follow.stderr.readline()
            assert f"the files of global_step1 cannot be put into {directory}/global_step1 yet: " in line
            assert line.endswith(f"yet: cannot make the directory {directory}/global_step1: Not a directory\n"), line
            directory.unlink()
            assert [follow.stdout.readline() for _ in range(2)] == ["w.pt\n", "done\n"]
        finally:
            follow.kill()
    trainer.end()


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("$(touch planted)`touch planted`", "%24%28touch%20planted%29%60touch%20planted%60"),
        ("'; touch planted; '", "%27%3B%20touch%20planted%3B%20%27"),
        ("a&touch planted|touch planted>planted", "a%26touch%20planted%7Ctouch%20planted%3Eplanted"),
        ('it\'s "100 %"', "it%27s%20%22100%20%25%22"),
        ("-rf", "-rf"),
    ],
)
@pytest.mark.parametrize("braces", ["{}", "'{}'"])  # Nebula's own quotes end those around the braces
def test_no_tag_gives_the_command_follow_words_for_the_shell(place, tag, name, braces, tmp_path):
    session = nebula.Session(str(place.storage), world=1, persistent_time_interval=0, on_error="raise")
    with session.checkpoint(tag) as checkpoint:
        checkpoint.save_bytes("w.pt", b"values")
    checkpoint.wait("durable", 60)
    nebula_command = locate.agent_path() or os.environ["NEBULA_AGENT_PATH"]
    work, directory = tmp_path / "work", tmp_path / "in"
    work.mkdir()
    words = [nebula_command, "follow", place.storage, "--once", "--in", directory, "--exec", f"cat {braces}/*; printf ' %s' {braces}"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=work)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"values {directory}/{name}")
    assert not list(work.iterdir()) and not directory.exists()


# Saves a step and its loss for each line of input. "load" begins a new line of steps at step 1.
MEASURED = """
    nm.init(sys.argv[1], 0, 2, on_error="raise")
    for line in sys.stdin:
        words = line.split()
        if words[0] == "load":
            nm.get_checkpoint("global_step1").load("w.pt")
            say("loaded")
            continue
        step, metrics = int(words[0]), {"loss": float(words[1])} if len(words) > 1 else {}
        checkpoint = nm.Checkpoint(f"global_step{step}", metrics=metrics)
        with checkpoint:
            checkpoint.save("w.pt", torch.full((1 << 10,), float(step)))
        checkpoint.wait("durable", 60)
        say(step)
"""


class Measured(Trainer):
    def __init__(self, place):
        self.process = place.trainer(MEASURED, place.storage, stdin=True)

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() in (line.split()[0], "loaded")


@pytest.mark.parametrize("is_elsewhere", [False, pytest.param(True, marks=pytest.mark.nightly("test_follow_gives_a_checkpoint_when_it_is_the_best_so_far"))])
def test_follow_gives_a_checkpoint_when_it_is_the_best_so_far(place, elsewhere, is_elsewhere):
    place.storage.mkdir()
    trainer = Measured(place)
    for line in ("1 5.0", "2 3.0", "3 4.0", "4", "5 nan"):
        trainer.tell(line)
    with elsewhere() if is_elsewhere else contextlib.nullcontext(), nebula.Reader(place.storage) as reader:
        follows = reader.follow(best=("loss", "min"), poll=0.1)
        assert value(next(follows)) == 2
        for line in ("6 3.0", "7 2.0", "8 1.0", "9 1.5"):  # equal is not better
            trainer.tell(line)
        assert value(next(follows)) == 8
        assert not list(reader.follow(best="accuracy", timeout=0.3))
        assert [one.tag for one in reader.follow(best=nebula.Best("loss", "max"), timeout=0.3)] == ["global_step1"]
        assert [one.tag for one in reader.follow(best="loss", every=3, timeout=0.3)] == ["global_step9"]
        with pytest.raises(NebulaConfigError, match="give a metric"):
            next(reader.follow(best=3))
    command = [locate.agent_path() or os.environ["NEBULA_AGENT_PATH"], "follow", place.storage, "--once", "--best"]
    for best, tag in (("loss", "global_step8"), ("loss:max", "global_step1")):
        assert subprocess.run([*command, best], capture_output=True, text=True).stdout == f"{tag}\n"
    wrong = subprocess.run([*command, "loss:largest"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "min" in wrong.stderr
    trainer.end()


# fault: as test_a_reader_whose_storage_goes_away_waits_for_it_and_gives_nothing_twice
@pytest.mark.parametrize("is_elsewhere", [pytest.param(False, marks=pytest.mark.nightly("test_readers_follow_a_trainer_that_goes_on_from_an_older_step_and_none_goes_back")), True])
def test_readers_follow_a_trainer_that_goes_on_from_an_older_step_and_none_goes_back(place, elsewhere, is_elsewhere):
    place.storage.mkdir()
    trainer = Measured(place)
    for line in ("1 1", "2 2", "3 3"):
        trainer.tell(line)
    with elsewhere() if is_elsewhere else contextlib.nullcontext(), nebula.Reader(place.storage) as reader, nebula.Reader(place.storage) as other:
        first, second = reader.follow(poll=0.1), other.follow(every=2, poll=0.1)
        assert value(next(first)) == 3 and value(next(second)) == 2
        trainer.tell("load")
        trainer.tell("2 7")  # a new line: step 3 is abandoned
        assert next(first).tag == next(second).tag == "global_step2"
        assert [one.tag for one in reader.follow(every=3, timeout=0.3)] == []
        trainer.tell("4 8")
        assert value(next(first)) == value(next(second)) == 4
        with pytest.raises(StopIteration):
            next(reader.follow(every=5, timeout=0.1))
    trainer.end()


# fault (Storage): A reader follows while its storage goes away, its agent is killed, or the trainer goes on from an
# older step.
# result: It goes on when it can, or raises the failure at its timeout. It gives no checkpoint twice and none of an
# abandoned line. It makes no directory in place of the storage.
def test_a_reader_whose_storage_goes_away_waits_for_it_and_gives_nothing_twice(place, elsewhere):
    place.storage.mkdir()
    trainer = Measured(place)
    trainer.tell("1 1")
    with elsewhere(), nebula.Reader(place.storage) as reader:
        follows = reader.follow(poll=0.1)
        assert value(next(follows)) == 1
        away = place.storage.with_name("unmounted")
        place.storage.rename(away)
        short = reader.follow(poll=0.1, timeout=1)
        with pytest.raises((StopIteration, NebulaError)):
            print(next(short))
        shutil.rmtree(place.storage, ignore_errors=True)  # a lease that was being written when the path went may have made it again
        away.rename(place.storage)
        trainer.tell("2 2")
        assert value(next(follows)) == 2
    trainer.end()


@pytest.mark.nightly("test_a_reader_on_another_node_loads_from_the_memory_of_a_trainers_node_what_storage_lacks")
def test_a_reader_of_another_node_loads_parts_into_its_own_tensors(place, elsewhere):
    place.storage.mkdir()
    trainer = place.trainer(
        """
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        with nm.Checkpoint("global_step1", metrics={"loss": 2.5}) as checkpoint:
            checkpoint.save("w.pt", {"a": torch.full((1 << 21,), 1.0), "b": torch.full((1 << 21,), 2.0)})
        checkpoint.wait("durable", 60)
        """,
        place.storage,
    )
    assert trainer.wait(timeout=60) == 0
    with elsewhere(), nebula.Reader(place.storage) as reader:
        found, own = reader.latest(), {"a": torch.zeros(1 << 21), "b": torch.zeros(1 << 21)}
        found.load_into("w.pt", own)
        assert (own["a"] == 1).all() and (own["b"] == 2).all() and found.metrics == {"loss": 2.5}


# fault: as test_a_reader_whose_storage_goes_away_waits_for_it_and_gives_nothing_twice
def test_a_storage_that_does_not_answer_holds_no_follow_beyond_its_timeout(place, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("nebulaml.reader.LOOK_S", 0.1)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        with nebula.Reader("s3://nebula/run") as reader:
            with pytest.raises(NebulaTimeout, match="does not answer, so nobody knows"):
                next(reader.follow(timeout=0.5))
            search = reader._search()  # a subscriber asks again and again
            for _ in range(5):
                with pytest.raises(NebulaTimeout):
                    next(reader._follow(search, 0.1, 0.0))
            assert len([thread for thread in threading.enumerate() if thread.name == "nebula-follow"]) <= 2
