"""nm.Manager and its neighbours with one version, with many, and on two nodes: nothing has a limit of versions, and the agent removes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_server
import nebulaml as nm
import pytest
import torch
import torch.distributed.checkpoint as dcp
from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter
from waiting import until

MANY = 1000
COUNTS = [65, *(pytest.param(count, marks=pytest.mark.nightly) for count in (1, 64, 1000))]


def loss(step: int, count: int) -> float:
    return float(abs(step - best_of(count)))


def best_of(count: int) -> int:
    return (count + 2) // 3


@pytest.fixture
def storage(place: Any) -> Iterator[Path]:
    """A directory in memory: a thousand versions are a thousand times some syncs."""
    path = Path(f"{place.memory}-storage")
    path.mkdir()
    yield path
    shutil.rmtree(path)


def fill(storage: Path, count: int) -> None:
    """Makes `count` versions, as a job of one rank."""
    with nm.Manager(storage) as manager:
        for step in range(1, count + 1):
            manager.save(step, {"model": {"w": torch.full((8,), float(step))}}, metrics={"loss": loss(step, count)})
        manager.wait()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", COUNTS)
def test_a_manager_is_right_with_any_number_of_versions(place, storage, count):
    fill(storage, count)
    place.kill_agent()  # the next one knows what storage and the last versions in memory say
    target = {"w": torch.zeros(8)}
    with nm.Manager(storage, keep_last=2, keep_best=nm.Best("loss")) as manager:
        assert manager.all_steps() == list(range(1, count + 1)) and manager.latest_step() == count
        assert manager.best_step() == best_of(count) and manager.best_step("loss", "max") == (count if count > 1 else 1)
        for step in {1, best_of(count), count}:
            assert manager.checkpoint(step).load("model.pt")["w"][0] == step
        assert manager.restore({"model": target}, step=1).step == 1 and target["w"][0] == 1
        assert manager.restore({"model": target}).step == count and target["w"][0] == count
        assert nm.get_checkpoint("global_step1", str(storage)).load("model.pt")["w"][0] == 1
        manager.save(count + 1, {"model": target}, metrics={"loss": 9e9})
        manager.wait()
        stay = sorted({best_of(count), count, count + 1})
        until(lambda: manager.all_steps() == stay, 120, f"{stay} stay")
        assert manager.best_step() == best_of(count)


@pytest.mark.nightly("test_a_manager_is_right_with_any_number_of_versions")
def test_an_agent_that_comes_after_another_ends_its_removals(place, storage):
    """No version becomes durable after that, and the trainer has saved, so it is not about to load."""
    for attempt in range(5):  # on a busy machine all removals may end before this process looks
        path = storage / str(attempt)
        fill(path, MANY)
        with nm.Manager(path, keep_last=2) as manager:
            manager.save(MANY + 1, {"model": {"w": torch.zeros(8)}}).wait("durable", 60)
            until(lambda path=path: len(list(path.glob("global_step*"))) < MANY - 10, 120, "the removals begin")
            place.kill_agent()
            if len(list(path.glob("global_step*"))) > 2:
                until(lambda: manager.all_steps() == [MANY, MANY + 1], 60, "two versions stay")
                return
    pytest.fail("each agent ended its removals before it was killed")


RANK = """
    import json, os, sys, datetime
    import torch, torch.distributed as dist
    import nebulaml as nm
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, path, count = dist.get_rank(), sys.argv[1], int(sys.argv[2])
    target = {"w": torch.zeros(8)}

    def say(*what):
        os.write(1, (json.dumps(what) + chr(10)).encode())

    manager = nm.Manager(path, keep_last=2, keep_best=nm.Best("loss"), replicated=["model"])
    found = [manager.restore({"model": target}, step=1).step, int(target["w"][0])]
    newest = manager.restore({"model": target}).step
    say(manager.all_steps() == list(range(1, count + 1)), manager.best_step(), *found, newest,
        int(manager._session.get_checkpoint("global_step1").load("model.pt")["w"][0]))
    manager.save(count + 1, {"model": target}, metrics={"loss": 9e9})
    manager.wait()
    for line in sys.stdin:
        say(manager.all_steps(), manager.best_step())
"""


class TwoNodes:
    """Two ranks of one job, each with an agent of its own."""

    def __init__(self, place: Any, storage: Path, count: int) -> None:
        self.ranks = []
        for rank in (0, 1):
            environment = {
                **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port), "RANK": str(rank), "WORLD_SIZE": "2",
                "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NEBULA_NODE_ID": f"n{rank}", "NEBULA_MEMORY_DIR": str(place.memory / f"node{rank}"),
            }  # fmt: skip
            self.ranks.append(
                fork_server.start(textwrap.dedent(RANK), storage, count, env=environment, stdin=subprocess.PIPE)
            )

    def hear(self) -> list[Any]:
        return [json.loads(rank.stdout.readline()) for rank in self.ranks]

    def ask(self) -> list[Any]:
        for rank in self.ranks:
            rank.stdin.write("?\n")
            rank.stdin.flush()
        return self.hear()

    def end(self) -> None:
        for rank in self.ranks:
            rank.stdin.close()
            rank.stdout.read()
            rank.stdout.close()
            assert rank.wait(timeout=60) == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", COUNTS)
def test_managers_on_two_nodes_are_right_with_any_number_of_versions(place, storage, count):
    fill(storage, count)
    both = TwoNodes(place, storage, count)
    assert both.hear() == [[True, best_of(count), 1, 1, count, 1]] * 2
    wanted = [sorted({best_of(count), count, count + 1}), best_of(count)]
    deadline = time.monotonic() + 500
    while (said := both.ask()) != [wanted] * 2:
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    both.end()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [65, pytest.param(1, marks=pytest.mark.nightly("test_a_framework_finds_the_oldest_of_many_by_its_directory"))])
def test_a_framework_finds_the_oldest_of_many_by_its_directory(place, storage, count):
    """DCP asks for a tag in a directory, as DeepSpeed does."""
    state, found = {"w": torch.full((8,), 7.0)}, {"w": torch.zeros(8)}
    dcp.save(state, storage_writer=NebulaStorageWriter(storage / "step-0"))
    nm.flush_persistence()
    fill(storage, count)
    place.kill_agent()
    dcp.load(found, storage_reader=NebulaStorageReader(storage / "step-0"))
    assert torch.equal(found["w"], state["w"])
    assert nm.get_checkpoint(tag="global_step1", persist_path=str(storage)).load("model.pt")["w"][0] == 1
