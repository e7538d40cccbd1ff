"""Several ranks, bad storage, damaged files, an agent inside the trainer: the messages for the user in each case."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import nebulaml
import pytest
import torch
from nebulaml.errors import NebulaConfigError, NebulaCorrupt, NebulaError

RANK = """
    os.environ.update(RANK=sys.argv[2], WORLD_SIZE="2", LOCAL_RANK=sys.argv[2], LOCAL_WORLD_SIZE="2")
    nm.init(sys.argv[1], 0, 2, on_error="raise")
    c = nm.Checkpoint("global_step1", -2)
    c.save(f"shard{sys.argv[2]}.pt", torch.full((1000,), float(sys.argv[2])))
    sys.stdin.readline()
    say(c.commit(), nm.get_latest_checkpoint() is None)
    sys.stdin.readline()
    found = nm.get_latest_checkpoint()
    say(found.tag, *sorted(found.files), *(float(found.load(name)[0]) for name in sorted(found.files)))
"""


def line_from(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_checkpoint_is_there_when_every_rank_has_committed_and_not_before(place):
    ranks = [place.trainer(RANK, place.storage, rank, stdin=True) for rank in (0, 1)]
    assert line_from(ranks[1]) == "True True"  # it waits for no other rank
    assert line_from(ranks[0]) == "True False"
    for process in ranks:
        assert line_from(process) == "global_step1 shard0.pt shard1.pt 0.0 1.0"
        process.stdin.close()
        process.stdout.close()
        assert process.wait(timeout=60) == 0


# fault (Storage): The path is not writable.
# result: The version stays in memory and can be loaded. The agent tries again, at growing intervals. `flush` and
# `wait` name the path.
def test_storage_that_cannot_be_written_stops_nothing_and_is_named(place, caplog):
    nebulaml.init(str(place.storage), 0)
    place.storage.write_text("a file where a directory should be")
    checkpoint = nebulaml.Checkpoint("global_step1")
    assert checkpoint.save("m.pt", torch.ones(10)) and checkpoint.commit()
    assert nebulaml.flush_persistence(timeout=1) is False
    assert "flush" in caplog.text and str(place.storage) in caplog.text
    with pytest.raises(NebulaError):
        checkpoint.wait("durable", timeout=1)
    assert (nebulaml.get_latest_checkpoint().load("m.pt") == 1).all()  # memory still has it


def forget_memory(place):
    """Ends the agent and removes the memory tier, as a reboot does."""
    nebulaml._shutdown()
    place.lose_memory()


def test_a_flipped_byte_in_storage_is_found_and_named(nm, place):
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", {"w": torch.arange(100_000)})
    checkpoint.commit()
    checkpoint.wait("durable", 60)
    path = place.storage / "global_step1" / "m.pt"
    forget_memory(place)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    nebulaml.init(str(place.storage), 0)
    found = nebulaml.get_checkpoint("global_step1")
    with pytest.raises(NebulaCorrupt, match=r"m\.pt"):
        found.load("m.pt")


def test_storage_alone_gives_everything_back(nm, place):
    for step in (1, 2):
        checkpoint = nm.Checkpoint(f"global_step{step}")
        checkpoint.save("m.pt", {"w": torch.full((3_000_000,), float(step))})
        checkpoint.commit()
    nm.flush_persistence()
    forget_memory(place)
    nebulaml.init(str(place.storage), 0)
    assert (nebulaml.get_latest_checkpoint().load("m.pt")["w"] == 2).all()
    assert (nebulaml.get_checkpoint("global_step1").load("m.pt")["w"] == 1).all()


def test_a_save_that_fails_is_reported_and_its_checkpoint_never_called_whole(place, monkeypatch, caplog):
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "8M")
    nebulaml.init(str(place.storage), 0, on_full="skip")
    checkpoint = nebulaml.Checkpoint("global_step1")
    assert checkpoint.save("small.pt", torch.ones(10))
    assert checkpoint.save("large.pt", torch.ones(20_000_000)) is False
    assert "large.pt" in caplog.text
    assert checkpoint.commit() is False
    assert nebulaml.get_latest_checkpoint() is None
    assert checkpoint.error


def test_a_save_that_raised_makes_its_checkpoint_no_whole_one_unless_it_is_repeated(place, monkeypatch):
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "8M")
    nebulaml.init(str(place.storage), 0, on_full="skip", on_error="raise")
    for repeated in (False, True):
        checkpoint = nebulaml.Checkpoint(f"tag{repeated}")
        checkpoint.save("small.pt", torch.ones(10))
        with pytest.raises(NebulaError):
            checkpoint.save("large.pt", torch.ones(20_000_000))
        if repeated:
            checkpoint.save("large.pt", torch.ones(20))
        assert checkpoint.commit() is repeated
    assert nebulaml.get_checkpoint("tagFalse") is None
    assert nebulaml.get_checkpoint("tagTrue").load("large.pt").sum() == 20


UNSAVEABLE = {
    "what cannot be pickled": lambda checkpoint, name: checkpoint.save(name, lambda: 0),
    "a part that is not contiguous": lambda checkpoint, name: checkpoint.save_bytes(name, [torch.zeros(4, 4).t()[1:]]),
    "a part that is no buffer": lambda checkpoint, name: checkpoint.save_bytes(name, ["text"]),
}


@pytest.mark.parametrize("wrong", UNSAVEABLE.values(), ids=UNSAVEABLE)
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_failed_save_leaves_no_older_file_in_its_place(nm, on_error, wrong):
    nm.init(on_error=on_error)
    with nm.Checkpoint("best") as first:
        first.save("model", 1)
        first.save("optimizer", 1)
    second = nm.Checkpoint("best")
    second.save("model", 2)
    with pytest.raises((TypeError, ValueError)) as raised:
        wrong(second, "optimizer")
    assert second.commit() is False and second.state == "failed"
    assert str(raised.value)[:40] in second.error or not isinstance(raised.value, NebulaError)
    found = nm.get_checkpoint("best")
    assert (found.load("model"), found.load("optimizer")) == (1, 1)
    third = nm.Checkpoint("best")
    third.save("model", 3)
    with pytest.raises((TypeError, ValueError)):
        wrong(third, "optimizer")
    third.save("optimizer", 3)
    assert third.commit() and third.error is None
    found = nm.get_checkpoint("best")
    assert (found.load("model"), found.load("optimizer")) == (3, 3)


def test_threads_may_save_at_the_same_time(nm):
    checkpoint = nm.Checkpoint("threads")

    def work(index):
        for turn in range(5):
            checkpoint.save(f"{index}-{turn}.pt", torch.full((20_000,), float(index)))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert checkpoint.commit() and len(checkpoint.files) == 20
    assert (checkpoint.load("3-4.pt") == 3).all()


def test_a_wait_can_be_interrupted(place):
    code = """
        nm.init(sys.argv[1], 0)
        c = nm.Checkpoint("open", -2)
        c.save("m.pt", 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
        try:
            say("waiting")
            c.wait("committed")
        except KeyboardInterrupt:
            say("interrupted")
    """
    process = place.trainer(code, place.storage)
    assert process.stdout.readline().strip() == "waiting"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().strip() == "interrupted"
    process.stdout.close()
    process.kill()
    process.wait(timeout=60)


# fault (Arguments of the caller): Two trainers use one path.
# result: The second is refused, and the error names both processes. `job=` keeps them apart.
def test_two_trainers_of_one_job_and_rank_are_told_apart(nm, place):
    nm.Checkpoint("mine").save("m.pt", 1)
    code = """
        try:
            nm.init(sys.argv[1], 0, on_error="raise")
        except ValueError as error:
            say("refused", "job" in str(error))
        nm.init(job="another")
        say(nm.Checkpoint("theirs").save("m.pt", 2))
    """
    assert place.run(code, place.storage).split() == ["refused", "True", "True"]


def test_a_job_name_must_be_text(place):
    with pytest.raises(NebulaConfigError):
        nebulaml.init(str(place.storage), job=b"bytes")


OTHER_RANK = """
nm.init(sys.argv[1], 3600, 2)
say("number", os.getpid())
checkpoint = nm.Checkpoint("step2")
checkpoint.save(f"{os.environ['RANK']}.pt", torch.ones(4))
say("saved")
sys.stdin.readline()
checkpoint.save("more.pt", torch.ones(4))
say(checkpoint.commit())
"""


def ranks_of_two_containers(place, monkeypatch, first_is_inside):
    """Starts two ranks of one node, one of them in its own pid namespace. Outside, no process has the number that it has there."""
    number = next(n for n in range(30000, 32000) if not os.path.exists(f"/proc/{n}"))
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", f'echo {number - 1} > /proc/sys/kernel/ns_last_pid; "$@"; exit $?', "sh"]
    if os.geteuid() or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("pid namespaces need root")
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("NEBULA_QUIET_S", "600")):
        monkeypatch.setenv(name, value)
    ranks = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(place.trainer(OTHER_RANK, place.storage, stdin=True, prefix=inside if (rank == 0) == first_is_inside else []))
        while (line := ranks[-1].stdout.readline()) != "saved\n":
            assert line, "the trainer has ended"
            if rank == (0 if first_is_inside else 1):
                assert line == f"number {number}\n"
    monkeypatch.setenv("RANK", "0")
    return ranks


# fault (Deaths): A rank or the agent runs in a pid namespace of its own (a container), and another rank looks for the
# newest version, or the agent is killed.
# result: The agent asks the kernel which process is behind a connection, and never trusts a number that a client
# gives. The open part of a rank that it cannot see stays open while the rank is connected. For a rank of an earlier
# agent it stays open `NEBULA_PERSIST_GIVE_UP` long. The agent tells two trainers with one number apart.
@pytest.mark.nightly("test_a_checkpoint_is_there_when_every_rank_has_committed_and_not_before")
@pytest.mark.parametrize("first_is_inside", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_search_closes_no_part_of_a_live_rank_in_another_pid_namespace(place, monkeypatch, first_is_inside):
    """The first rank has started the agent inside its namespace, where the agent cannot see the second rank."""
    ranks = ranks_of_two_containers(place, monkeypatch, first_is_inside)
    inside, outside = (0, 1) if first_is_inside else (1, 0)
    ranks[outside].stdin.write("\n")
    ranks[outside].stdin.flush()
    assert ranks[outside].stdout.readline() == "True\n" and ranks[outside].wait(60) == 0
    monkeypatch.setenv("RANK", str(outside))
    nebulaml.init(str(place.storage), 3600, 2)
    assert nebulaml.get_latest_checkpoint() is None  # the other rank uses it
    ranks[inside].stdin.write("\n")
    ranks[inside].stdin.flush()
    assert ranks[inside].stdout.readline() == "True\n" and ranks[inside].wait(60) == 0
    found = nebulaml.get_latest_checkpoint()
    assert found is not None and sorted(found.files) == ["0.pt", "1.pt", "more.pt"]
