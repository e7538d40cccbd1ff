"""Published weights: a trainer publishes, and followers have exactly what it had, whoever dies."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import nebulaml as nm
import pytest
import torch
from nebulaml._session import about
from nebulaml.errors import NebulaConfigError, NebulaCorrupt, NebulaError, NebulaTimeout
from nebulaml.weights.publication import About, Layout, number_of, tag_of, tensors_of
from processes import stop
from safetensors.torch import load_file
from waiting import until

KILLS, SEED = int(os.environ.get("NEBULA_TEST_KILLS", "12")), int(os.environ.get("NEBULA_TEST_SEED", "1"))  # a test has no such variables


def weights(elements: int = 200_000, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(elements)
    return {
        "layer.weight": torch.randn(elements // 100, 100, generator=generator).to(dtype),
        "layer.bias": torch.randn(37, generator=generator).to(dtype),
        "steps": torch.tensor(0),
        "none": torch.empty(0, 4, dtype=dtype),
    }


def train(state: dict[str, torch.Tensor], step: int, share: float = 0.01) -> None:
    generator = torch.Generator().manual_seed(step)
    changed = torch.rand(state["layer.weight"].shape, generator=generator) < share
    state["layer.weight"].add_(changed.to(state["layer.weight"].dtype) * 0.25)
    state["steps"].fill_(step)


def copy_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.fixture
def follower(place, tmp_path):
    with nm.Subscriber(place.storage, tmp_path / "engine", poll=0.2) as subscriber:
        yield subscriber


def test_a_follower_has_each_publication_exactly_and_reads_only_what_changed(place, follower):
    state = weights()
    size = sum(tensor.nbytes for tensor in state.values())
    with nm.Publisher(state, place.storage, files={"config.json": b'{"a": 1}'}) as publisher:
        for step in range(1, 6):
            train(state, step)
            assert publisher.publish(step)
            wanted = copy_of(state)
            for tensor in state.values():
                tensor.fill_(9)  # the values were fixed
            version = follower.prepare(60)
            assert version.step == step and same(version.tensors(), wanted)
            assert follower.current.exists() == (step > 1)
            version.commit()
            assert same(load_file(follower.current / "model.safetensors"), wanted)
            assert (follower.current / "config.json").read_bytes() == b'{"a": 1}'
            assert version.bytes_read > size if step == 1 else version.bytes_read < size * 0.03
            for name, tensor in state.items():
                tensor.copy_(wanted[name])


def test_weights_of_a_module_are_cast_and_tied_ones_stay_one(place, follower):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(50, 8)
            self.head = torch.nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.arange(8))

    net = Net()
    with nm.Publisher(net, place.storage, dtype=torch.bfloat16, name="weights.safetensors") as publisher:
        for step in (1, 2):
            with torch.no_grad():
                net.embed.weight.add_(0.5)
            assert publisher.publish(step)
            version = follower.prepare(60)
            found = version.tensors()
            assert set(found) == {"embed.weight", "scale"} and found["scale"].dtype == torch.int64
            assert torch.equal(found["embed.weight"], net.embed.weight.detach().to(torch.bfloat16))
            assert [path.name for path in version.directory.iterdir()] == ["weights.safetensors"]


def test_a_follower_that_comes_late_or_falls_behind_has_the_newest_and_never_goes_back(place, follower, tmp_path):
    state = weights()
    seen = []
    with nm.Publisher(state, place.storage, full_every=4) as publisher:
        for step in range(1, 12):
            train(state, step)
            publisher.publish(step)
            publisher.wait(60)
            if step in (1, 2, 7, 11):
                version = follower.prepare(60)
                assert version.step == step and same(version.tensors(), state)
                version.commit()
                seen.append(version.number)
        with nm.Subscriber(place.storage, tmp_path / "late", poll=0.2) as late:
            assert same(late.prepare(60).tensors(), state)
        assert follower.prepare(0.1) is None
        assert seen == sorted(seen) and seen[-1] - seen[0] == 10
        wholes = [path.name for path in place.storage.glob("publication-*/weights")]
        until(lambda: len(list(place.storage.glob("publication-*/weights"))) == 2, 60, f"two whole publications stay of {wholes}")


@pytest.mark.nightly("test_a_follower_that_comes_late_or_falls_behind_has_the_newest_and_never_goes_back")
def test_a_follower_that_comes_late_does_not_hold_a_chain_of_many_times_the_weights_in_memory(place, follower):
    state = weights(2_000_000)
    size = sum(tensor.nbytes for tensor in state.values())
    with nm.Publisher(state, place.storage) as publisher:
        for step in range(1, 9):  # as many deltas as one chain may have
            train(state, step, 0.3)
            publisher.publish(step)
            publisher.wait(60)
        tracemalloc.start()
        try:
            version = follower.prepare(60)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert version.step == 8 and same(version.tensors(), state)
        assert version.bytes_read > 3 * size and peak < 2 * size
        for step in (9, 10, 11):
            version.commit()
            train(state, step, 0.3)
            publisher.publish(step)
            version = follower.prepare(60)
            assert version.step == step and same(version.tensors(), state)


def test_the_publications_of_the_last_run_stay_until_the_next_run_has_made_a_second_whole_one(place):
    """A follower may still be reading them."""
    state, kept = weights(), []
    for _ in range(3):
        with nm.Publisher(state, place.storage) as publisher:
            for step in (1, 2):
                train(state, step)
                publisher.publish(step)
                publisher.wait(60)
        kept.append(sorted(path.name for path in place.storage.glob("publication-*") if (path / "weights").exists()))
    assert [len(wholes) for wholes in kept] == [1, 2, 2] and kept[2][0] == kept[1][1]
    assert len(list(place.storage.glob("publication-*"))) == 4


def test_a_publication_is_durable_before_a_follower_shows_it(place, tmp_path, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "1")  # storage takes 0.4 s for a whole one
    state = weights()
    with nm.Subscriber(place.storage, tmp_path / "engine", poll=0.2) as follower, nm.Publisher(state, place.storage, full_every=1) as publisher:
        for step in (1, 2, 3):
            publisher.publish(step)
            version = follower.prepare(60)
            assert version.step == step and numbers(place)[-1] == version.number and same(version.tensors(), state)


def test_a_timeout_of_0_looks_once(place, follower):
    assert follower.prepare(0) is None
    with nm.Publisher(weights(), place.storage) as publisher:
        publisher.publish(1)
        publisher.wait(60)
        assert same(follower.prepare(0).tensors(), weights())
        assert follower.prepare(0) is None


def test_a_publication_that_comes_late_has_the_rest_of_the_timeout_to_become_durable(place, follower, monkeypatch):
    given = []
    wait = nm.Checkpoint.wait
    monkeypatch.setattr(nm.Checkpoint, "wait", lambda self, state, timeout=None: (given.append(timeout), wait(self, state, timeout))[1])

    def look(search, poll, left):
        time.sleep(1)
        yield follower._reader.latest()

    with nm.Publisher(weights(), place.storage) as publisher:
        publisher.publish(1)
        publisher.wait(60)
        monkeypatch.setattr(follower._reader, "_follow", look)
        given.clear()
        assert follower.prepare(30) is not None
        assert len(given) == 1 and given[0] <= 29


def test_what_does_not_pay_as_a_delta_is_published_whole(place, follower):
    state = weights()
    with nm.Publisher(state, place.storage) as publisher:
        for step, share in ((1, 0.0), (2, 1.0)):
            state["layer.weight"].copy_(torch.randn(state["layer.weight"].shape) if share else state["layer.weight"])
            publisher.publish(step)
            version = follower.prepare(60)
            assert same(version.tensors(), state) and version.bytes_read > 400_000
            version.commit()
        state["layer.weight"] = torch.zeros(3, 5)  # another shape
        publisher.publish(3)
        assert same(follower.prepare(60).tensors(), state)


@pytest.mark.nightly("test_what_does_not_pay_as_a_delta_is_published_whole")
def test_large_deltas_do_not_add_up_to_many_times_the_weights_in_storage(place):
    state = weights()
    size = sum(tensor.nbytes for tensor in state.values())
    with nm.Publisher(state, place.storage) as publisher:
        for step in range(1, 31):
            train(state, step, 0.3)
            publisher.publish(step)
            publisher.wait(60)
    stored = [path.stat().st_size for path in place.storage.rglob("*") if path.is_file()]
    assert 3 * size < sum(stored) < 7 * size, sum(stored) / size  # two whole ones, each with deltas of a little more than twice its size


@pytest.mark.nightly("test_a_follower_that_comes_late_or_falls_behind_has_the_newest_and_never_goes_back")
def test_steps_that_follow_faster_than_the_maker_are_skipped(place, follower):
    state = weights(3_000_000)
    numbers = []
    with nm.Publisher(state, place.storage) as publisher:
        for step in range(1, 31):
            train(state, step)
            assert publisher.publish(step)
        wanted = copy_of(state)
        for version in follower.follow(timeout=60):
            numbers.append(version.number)
            if version.step == 30:
                break
        assert same(version.tensors(), wanted) and numbers == sorted(set(numbers))
        publisher.wait(60)


TRAINER = """
    os.environ.update(NEBULA_MEMORY_DIR=sys.argv[2], NEBULA_NODE_ID=sys.argv[3])
    state = {"w": torch.zeros(300_000, dtype=torch.bfloat16), "step": torch.tensor(0)}
    publisher = nm.Publisher(state, sys.argv[1])
    for line in sys.stdin:
        if line == "wait\\n":
            publisher.wait(60)
            continue
        step = int(line)
        state["w"][step % 1000 :: 1000] += 1
        state["step"].fill_(step)
        assert publisher.publish(step)
        say(step, publisher._maker.pid)
"""


class Trainer:
    """Publishes for each step that it is given. `expected` has the same values."""

    def __init__(self, place, node: str = "") -> None:
        self.process = place.trainer(TRAINER, place.storage, place.memory / node, node, stdin=True)
        self.w = torch.zeros(300_000, dtype=torch.bfloat16)
        self.maker = 0

    def publish(self, step: int) -> torch.Tensor:
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        assert answer[:1] == [str(step)], answer
        self.maker = int(answer[1])
        self.w[step % 1000 :: 1000] += 1
        return self.w.clone()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def is_right(version: nm.Published, known: dict[int, list[torch.Tensor]]) -> bool:
    found = version.tensors()
    return any(torch.equal(found["w"], values) for values in known[version.step]) and int(found["step"]) == version.step


def test_what_a_trainer_has_published_comes_although_it_dies_and_the_next_run_goes_on_after_it(place, follower):
    trainer = Trainer(place)
    values = trainer.publish(100)
    trainer.kill()
    version = follower.prepare(60)
    assert version.step == 100 and torch.equal(version.tensors()["w"], values)
    version.commit()
    trainer = Trainer(place)  # from an older step
    values = trainer.publish(90)
    again = follower.prepare(60)
    assert again.step == 90 and again.number > version.number and torch.equal(again.tensors()["w"], values)
    trainer.kill()


# fault: as test_random_deaths_never_give_wrong_weights_and_never_go_back
@pytest.mark.nightly
def test_a_trainer_that_is_killed_before_its_values_are_copied_does_not_keep_the_next_run_from_publishing(place, follower):
    """Nothing completes that publication. Its maker must not wait as long as for a trainer that lives."""
    trainer = """
        state = {"w": torch.full((25_000_000,), float(sys.argv[2]))}
        publisher = nm.Publisher(state, sys.argv[1])
        publisher.publish(int(sys.argv[2]))
        publisher.wait(60)
        state["w"] += 10
        publisher.publish(int(sys.argv[2]) + 10)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    for step in (1, 2):
        place.run(trainer, place.storage, step, returncode=-signal.SIGKILL)  # waits less than LIVE_S
    for version in follower.follow(timeout=60):
        assert version.tensors()["w"].unique().tolist() == [version.step]
        if version.step in (2, 12):
            break
    else:
        pytest.fail("the second run has published nothing")


@pytest.mark.nightly
def test_a_publisher_that_waits_for_another_one_of_its_node_says_for_which_and_goes_on_when_that_has_ended(place, follower, caplog):
    state = weights()
    first, second = nm.Publisher(state, place.storage), nm.Publisher(state, place.storage)
    assert first.publish(1)
    first.wait(60)
    assert second.publish(2)

    def told() -> list[str]:
        with contextlib.suppress(NebulaTimeout):
            second.wait(0.2)
        return [record.getMessage() for record in caplog.records if "wait for another publisher's process" in record.getMessage()]

    until(told, 60, "the second publisher says that it waits")
    assert f"process {first._maker.pid} " in told()[0] and str(place.storage) in told()[0]
    first.close()
    second.wait(60)
    assert len(told()) == 1 and follower.prepare(60).step == 2
    second.close()


def test_a_second_process_does_not_get_the_directory_of_a_living_subscriber(place, tmp_path):
    """It would empty the directory that the first one's engine reads, and lead `current` to other weights."""
    program = "import sys, time, nebulaml as nm; nm.Subscriber(*sys.argv[1:]); print('there', flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", program, place.storage, tmp_path / "engine"], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "there\n"
    with pytest.raises(NebulaConfigError, match="another process has a subscriber there"):
        nm.Subscriber(place.storage, tmp_path / "engine")
    assert (tmp_path / "engine" / "0").is_dir()
    other.kill()
    other.wait()
    one = nm.Subscriber(place.storage, tmp_path / "engine")
    with pytest.raises(NebulaConfigError, match="this process has a subscriber there"):
        nm.Subscriber(place.storage, tmp_path / "engine" / ".." / "engine")
    refused = subprocess.run([sys.executable, "-c", program, place.storage, tmp_path / "engine"], stderr=subprocess.PIPE, text=True, timeout=100)
    assert "another process has a subscriber there" in refused.stderr  # the refusal here has not ended the lock
    one.close()
    nm.Subscriber(place.storage, tmp_path / "engine")  # forgotten
    gc.collect()
    nm.Subscriber(place.storage, tmp_path / "engine").close()
    other.stdout.close()


def numbers(place) -> list[int]:
    """Those of the publications that are durable."""
    return sorted(number_of(path.parents[1].name) for path in place.storage.glob("publication-*/.nebula/manifest-*.json"))


# fault: as test_random_deaths_never_give_wrong_weights_and_never_go_back
@pytest.mark.parametrize("name", ["0/data", "1/data", "latest", "weight_v000001", "current"])
def test_a_subscriber_takes_no_directory_that_holds_files_of_another_program(place, tmp_path, name):
    mine = tmp_path / "mine"
    (mine / name).parent.mkdir(parents=True)
    (mine / name).write_text("mine")
    with pytest.raises(NebulaConfigError, match=f"no subscriber has made {name.split('/')[0]} there"):
        nm.Subscriber(place.storage, mine)
    assert (mine / name).read_text() == "mine" and len(list(mine.iterdir())) == 1
    (mine / name).rename(tmp_path / "moved")
    shutil.rmtree(mine / name.split("/")[0], ignore_errors=True)
    for _ in range(2):  # its own names are replaced
        nm.Subscriber(place.storage, mine, versions=True).close()


def test_the_maker_of_a_run_that_was_killed_and_the_next_run_on_another_node_take_different_numbers(place, follower, tmp_path):
    """Followers that look after the older one has completed its last publication have that of the next run, too."""
    busy, late = (nm.Subscriber(place.storage, tmp_path / name, poll=0.2) for name in ("busy", "late"))
    old = Trainer(place)
    old.publish(1)
    first = follower.prepare(60)
    assert busy.prepare(60).number == first.number
    stop(old.maker)
    old.publish(2)
    old.kill()
    new = Trainer(place, "other")
    values = new.publish(10)
    version = follower.prepare(60)
    assert version.step == 10 and torch.equal(version.tensors()["w"], values)
    os.kill(old.maker, signal.SIGCONT)  # it completes its last publication
    until(lambda: len(numbers(place)) == 3, 60, "three publications with a number each")
    assert numbers(place) == [first.number, first.number + 1, version.number]
    for subscriber in (busy, late):
        with subscriber:
            found = subscriber.prepare(60)
            assert found.number == version.number and torch.equal(found.tensors()["w"], values)
            assert subscriber.prepare(0) is None
    values = new.publish(11)
    version = follower.prepare(60)
    assert version.step == 11 and torch.equal(version.tensors()["w"], values)
    new.kill()


@pytest.mark.nightly("test_the_maker_of_a_run_that_was_killed_and_the_next_run_on_another_node_take_different_numbers")
def test_a_publisher_that_lives_on_beside_a_later_one_is_told_so_and_leaves_nothing(place, follower, caplog):
    with nm.Publisher(state := weights(), place.storage) as old:
        old.publish(1)
        old.wait(60)
        follower.prepare(60).commit()
        new = Trainer(place, "other")
        values = new.publish(10)
        version = follower.prepare(60)
        assert version.step == 10 and torch.equal(version.tensors()["w"], values)
        for step in range(2, 22):  # more than the numbers between the two
            train(state, step)
            old.publish(step)
            with pytest.raises(NebulaError, match=f"another process has made publication {version.number} of this path"):
                old.wait(60)
        values = new.publish(11)
        version = follower.prepare(60)
        assert version.step == 11 and torch.equal(version.tensors()["w"], values)
    with nm.Publisher(state, place.storage) as again:
        again.publish(6)
        version = follower.prepare(60)
        assert version.step == 6 and same(version.tensors(), state)
    new.kill()


@pytest.mark.nightly("test_what_a_trainer_has_published_comes_although_it_dies_and_the_next_run_goes_on_after_it")
def test_what_a_maker_that_died_had_not_made_another_one_makes(place, follower):
    state = weights()
    with nm.Publisher(state, place.storage) as publisher:
        publisher.publish(1)
        publisher.wait(60)
        follower.prepare(60).commit()
        os.kill(publisher._maker.pid, signal.SIGKILL)
        publisher._maker.wait()
        train(state, 2)
        publisher.publish(2)
        version = follower.prepare(60)
        assert version.step == 2 and same(version.tensors(), state)
        stop(publisher._maker.pid)
        train(state, 3)
        publisher.publish(3)
        os.kill(publisher._maker.pid, signal.SIGKILL)
        publisher.wait(60)  # another one has made it
        version = follower.prepare(60)
        assert version.step == 3 and same(version.tensors(), state)
        stop(publisher._maker.pid)
        publisher.publish(4)
        os.kill(publisher._maker.pid, signal.SIGKILL)
        publisher._hear(60)
        os.kill(publisher._maker.pid, signal.SIGKILL)
        with pytest.raises(NebulaError, match="background process has ended"):
            publisher.wait(60)


@pytest.mark.nightly
def test_more_publications_than_the_makers_pipe_holds_wait_for_the_maker(place, follower, caplog):
    state = {"weight": torch.zeros(16)}
    with nm.Publisher(state, place.storage) as publisher:
        assert publisher.publish(1)
        publisher.wait(60)
        maker = publisher._maker
        stop(maker.pid)
        for step in range(2, 3000):  # a request has some 100 bytes, the pipe 64 KiB
            state["weight"].fill_(step)
            assert publisher.publish(step)
        assert publisher._maker is maker and len(publisher._requests) > 1
        os.kill(maker.pid, signal.SIGCONT)
        publisher.wait(60)
        assert publisher._maker is maker and not caplog.records
    version = follower.prepare(60)
    assert version.step == step and same(version.tensors(), state)


@pytest.mark.nightly("test_a_follower_has_each_publication_exactly_and_reads_only_what_changed")
def test_a_follower_with_an_agent_of_its_own_reads_storage(place, tmp_path):
    """As on another machine."""
    follow = """
        os.environ["NEBULA_MEMORY_DIR"] = sys.argv[3]
        with nm.Subscriber(sys.argv[1], sys.argv[2], poll=0.2) as subscriber:
            for version in subscriber.follow(timeout=60):
                say(version.step, int(version.tensors()["w"].float().sum()), version.bytes_read)
                if version.step == 3:
                    break
    """
    trainer = Trainer(place)
    values = trainer.publish(1)
    process = place.trainer(follow, place.storage, tmp_path / "engine", place.memory / "other", stdin=True)
    try:
        for step in (1, 2, 3):
            answer = process.stdout.readline().split()
            assert answer[:2] == [str(step), str(int(values.float().sum()))] and (step == 1) == (int(answer[2]) > 100_000)
            values = trainer.publish(step + 1)
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    finally:
        trainer.kill()
        process.stdout.close()


@pytest.mark.parametrize("how", ["other", *(pytest.param(how, marks=pytest.mark.nightly("test_a_damaged_delta_gives_no_wrong_weights_and_the_next_whole_publication_is_followed")) for how in ("cut", "gone"))])
def test_a_damaged_delta_gives_no_wrong_weights_and_the_next_whole_publication_is_followed(place, follower, how, caplog):
    state = weights()
    with nm.Publisher(state, place.storage, full_every=3) as publisher:
        publisher.publish(1)
        first = follower.prepare(60)
        first.commit()
        publisher.publish(2)
        publisher.wait(60)
        second = place.storage / tag_of(first.number + 1) / "delta"
        if how == "cut":
            os.truncate(second, 20)
        elif how == "gone":
            shutil.rmtree(second.parent)
        else:
            second.write_bytes(bytes(reversed(second.read_bytes())))
        place.lose_memory()
        assert follower.prepare(1) is None and same(first.tensors(), weights())
        for step in (3, 4):
            train(state, step)
            publisher.publish(step)
            publisher.wait(60)
        version = follower.prepare(60)
        assert version.step == 4 and same(version.tensors(), state)


# fault (Deaths): The trainer that publishes weights, its background process, the agent or a subscriber is killed.
# result: The last publication is completed, unless SIGKILL came before its values were copied; the next run publishes
# after it, with a greater number. No subscriber has wrong weights or goes back. The next subscriber removes the
# directory in memory that the killed one made.
@pytest.mark.nightly("test_what_a_trainer_has_published_comes_although_it_dies_and_the_next_run_goes_on_after_it")
def test_random_deaths_never_give_wrong_weights_and_never_go_back(place, tmp_path):
    """Trainer, maker, agent and follower die at random moments. NEBULA_TEST_KILLS: how many."""
    rounds, seed, chance = KILLS, SEED, random.Random(SEED)
    trainer, step, known, newest = Trainer(place), 0, {}, 0
    subscriber = nm.Subscriber(place.storage, tmp_path / "engine", poll=0.1)
    for turn in range(rounds):
        for _ in range(chance.randrange(1, 4)):
            step += 1
            known.setdefault(step, []).append(trainer.publish(step))
        victim = chance.choice(["trainer", "maker", "agent", "follower"])
        if chance.random() < 0.5 and (version := subscriber.prepare(chance.random() * 0.3)) is not None:
            assert is_right(version, known) and version.number > newest, (seed, turn, version)
            version.commit()
            newest = version.number
        if victim == "trainer":
            trainer.kill()
            trainer, step = Trainer(place), step - chance.randrange(step)
        elif victim == "maker":
            os.kill(trainer.maker, signal.SIGKILL)
        elif victim == "agent":
            for pid in place.agents():
                with contextlib.suppress(ProcessLookupError):  # the one before was ending
                    os.kill(pid, signal.SIGKILL)
        else:
            subscriber.close()  # as its death: only the directory is left
            subscriber = nm.Subscriber(place.storage, tmp_path / "engine", poll=0.1)
            newest -= 1  # a new one shows the newest again
    step += 1
    known.setdefault(step, []).append(trainer.publish(step))
    trainer.process.stdin.write("wait\n")  # so it sees the death of the maker
    trainer.process.stdin.flush()
    for version in subscriber.follow(timeout=60):
        assert is_right(version, known) and version.number > newest, (seed, version)
        newest = version.number
        if version.step == step and torch.equal(version.tensors()["w"], trainer.w):
            break
    else:
        pytest.fail(f"seed {seed}: the last publication did not come")
    subscriber.close()
    trainer.kill()


def test_what_cannot_be_published_or_followed_is_refused_with_a_sentence(place, tmp_path):
    for options in ({"full_every": 0}, {"name": "a/b"}, {"files": {"../x": b""}}, {"files": {"model.safetensors": b"of the base model"}}):
        with pytest.raises(NebulaConfigError):
            nm.Publisher(weights(), place.storage, **options)
    for value in ("", 5):
        with pytest.raises((NebulaConfigError, TypeError)):
            nm.Publisher(weights(), value)
    with pytest.raises(NebulaConfigError, match="give a module"):
        nm.Publisher(5, place.storage)
    with nm.Publisher(weights(), place.storage) as publisher:
        for step in (-1, 1.5, True):
            with pytest.raises(NebulaConfigError, match="a step is"):
                publisher.publish(step)
    with pytest.raises(NebulaConfigError):
        nm.Subscriber(place.storage, tmp_path / "x", poll=0)
    with nm.Subscriber(place.storage, tmp_path / "x", poll=0.1) as subscriber, nm.Publisher(weights(), place.storage) as publisher:
        publisher.publish(1)
        first = subscriber.prepare(60)
        publisher.publish(2)
        subscriber.prepare(60)
        with pytest.raises(NebulaConfigError, match="not staged any more"):
            first.commit()


def test_publish_keeps_one_publisher_for_a_model(place, follower):
    net = torch.nn.Linear(4, 4)
    for step in (1, 2):
        with torch.no_grad():
            net.weight.add_(1)
        assert nm.publish(net, place.storage, step)
        version = follower.prepare(60)
        assert version.step == step and torch.equal(version.tensors()["weight"], net.weight.detach())


@pytest.mark.nightly("test_publish_keeps_one_publisher_for_a_model")
def test_publish_takes_the_options_of_a_later_call_and_keeps_the_others(place, follower):
    net = torch.nn.Linear(4, 4)
    for step, options, dtype in ((1, {"name": "a.safetensors"}, torch.float32), (2, {"dtype": torch.bfloat16}, torch.bfloat16), (3, {}, torch.bfloat16)):
        assert nm.publish(net, place.storage, step, **options)
        version = follower.prepare(60)
        assert version.step == step and version.tensors()["weight"].dtype == dtype
        assert [path.name for path in version.directory.iterdir()] == ["a.safetensors"]


# fault: as test_random_deaths_never_give_wrong_weights_and_never_go_back
@pytest.mark.nightly("test_a_second_process_does_not_get_the_directory_of_a_living_subscriber")
def test_the_memory_of_a_follower_that_was_killed_is_freed_by_the_next_one_and_that_of_a_living_one_is_not(place):
    follow = """
        subscriber = nm.Subscriber(sys.argv[1], poll=0.2)
        subscriber.prepare(60).commit()
        say(subscriber.current.parent)
        sys.stdin.readline()
    """
    with nm.Publisher(weights(), place.storage) as publisher:
        publisher.publish(1)
        processes = [place.trainer(follow, place.storage, stdin=True) for _ in range(2)]
        killed, living = [Path(process.stdout.readline().strip()) for process in processes]
        try:
            processes[0].kill()
            processes[0].wait()
            assert (killed / "current").is_dir()
            with nm.Subscriber(place.storage) as subscriber:
                assert not killed.exists() and (living / "current/model.safetensors").exists()
                assert same(subscriber.prepare(60).tensors(), weights())
        finally:
            processes[1].kill()
            processes[1].wait()
            for process in processes:
                process.stdin.close()
                process.stdout.close()
    nm.Subscriber(place.storage).close()
    assert not living.exists()


@pytest.mark.nightly
def test_what_an_engine_makes_in_the_directory_does_not_keep_the_next_weights_from_it(place, follower, tmp_path, caplog):
    state, kept = weights(), tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(b"of the engine")
    with nm.Publisher(state, place.storage, full_every=2) as publisher:
        for step in range(1, 7):  # each slot is copied to, copied from, and emptied
            train(state, step)
            publisher.publish(step)
            version = follower.prepare(60)
            assert version is not None and version.step == step and same(version.tensors(), state), caplog.text
            version.commit()
            (version.directory / "cache" / "deep").mkdir(parents=True, exist_ok=True)
            (version.directory / "cache" / "deep" / "file").write_bytes(b"x")
            if not (version.directory / "link").is_symlink():
                (version.directory / "link").symlink_to(kept)
    assert "cannot be staged" not in caplog.text and (kept / "file").read_bytes() == b"of the engine"


@pytest.mark.nightly
def test_a_follower_without_room_says_so_and_goes_on_when_there_is_some(place, follower, caplog):
    state = weights()
    with nm.Publisher(state, place.storage) as publisher:
        publisher.publish(1)
        publisher.wait(60)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            assert follower.prepare(1) is None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "cannot be staged yet" in caplog.text and "File too large" in caplog.text
        assert same(follower.prepare(60).tensors(), state)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}"[:9], b"\x04\0\0\0\0\0\0\0[1] ",
        b'\x3b\0\0\0\0\0\0\0{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0,9]}}',
        b'\x40\0\0\0\0\0\0\0{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0,4.0]}}1234',
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_header_that_names_no_tensors_of_the_file_is_damage(text):
    with pytest.raises(NebulaCorrupt):
        Layout.of(memoryview(text))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ({"shape": [3]}, "does not fit its 8 bytes"), ({"shape": [-1]}, "no list of lengths"), ({"shape": [2.0]}, "no list of lengths"),
        ({"shape": "2"}, "no list of lengths"), ({"shape": [2**70, 2]}, "does not fit"), ({"shape": [0]}, "does not fit"), ({"dtype": "F31"}, "the type 'F31'"),
        ({"dtype": []}, "the type"), ({"data_offsets": [8, 16]}, "at "), ({"data_offsets": [-8, 0]}, "at "), ({"dtype": "F64"}, "does not fit"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_its_bytes_is_damage_with_its_name(tmp_path, tensor, reason):
    head = json.dumps({"layer.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | tensor}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(NebulaCorrupt, match=f"layer.weight.*{re.escape(reason)}"):
        tensors_of(file)
    file.write_bytes(b"")
    with pytest.raises(NebulaCorrupt, match="is empty"):
        tensors_of(file)


def test_tags_and_metadata_of_other_checkpoints_are_not_taken_for_publications():
    assert number_of(tag_of(12)) == 12 and number_of("publication-x") is None and number_of("global_step7") is None
    publication = About(5, 7, 3, 2**63, "model.safetensors")
    assert About.read(publication.stored()) == publication
    changes = ({"name": "../x"}, {"name": "x\0"}, {"name": "\ud800"}, {"name": 5}, {"name": ""}, {"first": 9}, {"total": "x"}, {"step": math.inf})
    for wrong in ({}, {"number": 1}, *({**publication.stored(), **change} for change in changes)):
        assert About.read(wrong) is None, wrong


@pytest.mark.parametrize("document", [b"[" * 100_000, b'{"metrics": {}, "metadata": {}, "world": 1e999}'])
def test_a_document_beside_a_checkpoint_that_is_no_nebulas_is_damage(document):
    with pytest.raises(NebulaCorrupt):
        about.decode(document)


def test_a_directory_of_a_model_gives_its_files_without_its_weights(place, tmp_path, follower):
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"old")
    (source / "model.weights").write_bytes(b"old")
    (source / "deep").mkdir()
    with nm.Publisher(weights(), place.storage, files=source, name="model.weights") as publisher:
        publisher.publish(1)
        version = follower.prepare(60)
        assert sorted(path.name for path in Path(version.directory).iterdir()) == ["config.json", "model.weights"]


def pull(local: Path, source: Path, target: int) -> None:
    """The published rules of slime's receiver for a whole version (sglang's /pull_weights, sgl-project/sglang pull request 30366).

    A version is a directory weight_v<at least six digits>. It is whole if it has no index, or its index names no delta_encoding. Then each of its
    plain files is copied, and other files of the local directory go.
    """
    version = source / f"weight_v{target:06d}"
    assert version.is_dir() and not (version / "model.safetensors.index.json").exists()
    local.mkdir(exist_ok=True)
    for entry in os.scandir(version):
        assert entry.is_file()
        shutil.copy2(entry.path, local / entry.name)


def test_receivers_of_slimes_directories_find_each_version_whole(place, tmp_path):
    state, root = weights(), tmp_path / "engine"
    with nm.Subscriber(place.storage, root, poll=0.2, versions=True) as follower, nm.Publisher(state, place.storage, files={"a.json": b"{}"}) as publisher:
        for step in range(1, 5):
            train(state, step)
            publisher.publish(step)
            version = follower.prepare(60)
            version.commit()
            assert (root / "latest").read_text() == f"weight_v{version.number:06d}"
            pull(tmp_path / "local", root, version.number)
            assert same(load_file(tmp_path / "local" / "model.safetensors"), state) and (tmp_path / "local" / "a.json").exists()
            assert len(list(root.glob("weight_v*"))) == min(step, 2)
    with nm.Subscriber(place.storage, root):
        assert not list(root.glob("weight_v*")) and not (root / "latest").exists()


@pytest.mark.nightly("test_values_that_cannot_be_taken_leave_the_publication_before_them_to_its_maker")
def test_a_failed_request_leaves_no_values_for_the_next_publication(place, follower, monkeypatch):
    state = weights()
    with nm.Publisher(state, place.storage) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "_send", lambda *_: (_ for _ in ()).throw(OSError("no process")))
            assert not publisher.publish(1)
        before = {row.tag for row in publisher._session.checkpoints()}
        train(state, 2)
        assert publisher.publish(2)
        assert len({row.tag for row in publisher._session.checkpoints()} - before) == 1  # not the tag of the first one
        version = follower.prepare(60)
        assert version.step == 2 and same(version.tensors(), state)


def test_values_that_cannot_be_taken_leave_the_publication_before_them_to_its_maker(place, follower, monkeypatch):
    state = weights()
    with nm.Publisher(state, place.storage) as publisher:
        publisher.publish(1)
        publisher.wait(60)
        maker = publisher._maker
        stop(maker.pid)
        try:
            train(state, 2)
            assert publisher.publish(2)
            with monkeypatch.context() as patch:
                patch.setattr(publisher, "_parts", lambda: (_ for _ in ()).throw(NebulaError("no memory")))
                for step in range(3, 6):
                    assert not publisher.publish(step)
            assert publisher._maker is maker and maker.poll() is None
        finally:
            os.kill(maker.pid, signal.SIGCONT)
        publisher.wait(60)
        version = follower.prepare(60)
        assert version.step == 2 and same(version.tensors(), state)


def test_a_thread_that_waits_for_a_publication_does_not_keep_another_one_from_publishing(place, follower):
    state = weights()
    with nm.Publisher(state, place.storage) as publisher:
        publisher.publish(1)
        publisher.wait(60)
        maker, published = publisher._maker, threading.Event()
        stop(maker.pid)
        try:
            publisher.publish(2)
            waiting = threading.Thread(target=publisher.wait)
            waiting.start()
            train(state, 3)
            publishing = threading.Thread(target=lambda: publisher.publish(3) and published.set())
            publishing.start()
            assert published.wait(60)
        finally:
            os.kill(maker.pid, signal.SIGCONT)
        for thread in (waiting, publishing):
            thread.join()
        assert not publisher._requests and follower.prepare(60).step == 3


def test_a_forked_child_does_not_keep_the_maker_from_noticing_the_end_of_the_trainer(place):
    trainer = """
        publisher = nm.Publisher({"w": torch.zeros(1000)}, sys.argv[1])
        publisher.publish(1)
        publisher.wait(60)
        child = os.fork()
        if not child:
            os.closerange(0, 3)  # the test waits for the end of these streams
            time.sleep(1000)
        say(publisher._maker.pid, child)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    maker, child = map(int, place.run(trainer, place.storage, returncode=-signal.SIGKILL).split())
    try:
        until(lambda: not Path(f"/proc/{maker}").exists() or "Z" in Path(f"/proc/{maker}/stat").read_text(), 60, "the end of the maker")
    finally:
        os.kill(child, signal.SIGKILL)


# fault (Deaths): A child that the program has forked ends by sys.exit(), and so leaves the blocks of a publisher and a subscriber.
# result: It ends at once. The subscriber's directory and the publication that is being made stay as they are.
@pytest.mark.nightly("test_a_forked_child_does_not_keep_the_maker_from_noticing_the_end_of_the_trainer")
def test_the_end_of_a_forked_child_closes_nothing_of_its_parents(place):
    state = weights()
    with nm.Publisher(state, place.storage) as publisher, nm.Subscriber(place.storage, poll=0.2) as follower:
        publisher.publish(1)
        follower.prepare(60).commit()
        train(state, 2)
        stop(publisher._maker.pid)
        publisher.publish(2)
        child = os.fork()
        if not child:
            try:
                follower.close()
                publisher.close()
            finally:
                os._exit(0)
        try:
            until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT), 60, "the end of the child")
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.kill(publisher._maker.pid, signal.SIGCONT)
        assert (follower.current / "model.safetensors").exists()
        version = follower.prepare(60)
        assert version.step == 2 and same(version.tensors(), state)


def test_a_module_whose_state_dict_takes_no_options_is_published(place, follower):
    class Own(torch.nn.Linear):
        def state_dict(self):
            return {"own.weight": self.weight.detach()}

    with nm.Publisher(Own(3, 2), place.storage) as publisher:
        assert publisher.publish(1)
        assert list(follower.prepare(60).tensors()) == ["own.weight"]
