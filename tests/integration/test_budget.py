"""All ranks of a node share one memory budget, which holds little more than one version."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from world_nodes import ALL_RANKS, World, a_world, together

MIB = 1 << 20
STEPS = 6
BUDGET = 40 * MIB


@pytest.fixture
def world() -> Iterator[World]:
    """Makes a world with slow storage, so that versions wait for one another."""
    with a_world(NEBULA_MEMORY_BUFFER_SIZE=str(BUDGET), NEBULA_STORE_MBPS="60") as one:
        yield one


class Watch(threading.Thread):
    """Records the largest size of the memory directory, in bytes. A size counts if a second look finds each file as the first one did."""

    def __init__(self, world: World) -> None:
        super().__init__(daemon=True)
        self.world, self.most, self.ended = world, 0, False
        self.start()

    def run(self) -> None:
        while not self.ended:
            if (sizes := self.look()) == self.look():  # else one file has shrunk and another has grown between their two looks
                self.most = max(self.most, sum(sizes.values()))
            time.sleep(0.005)

    def look(self) -> dict[str, int]:
        sizes = {}
        for path in (self.world.memory / "node-a").glob("*.img"):
            with contextlib.suppress(FileNotFoundError):
                sizes[path.name] = path.stat().st_blocks * 512
        return sizes


def test_all_ranks_of_a_node_keep_to_one_budget_and_lose_no_version(world):
    """Files grow from step to step, so that no image can be used again: each must be removed before the next one is made."""
    ranks = world.start({"a": [0, 1]}, "r1")
    watch = Watch(world)
    for step in range(STEPS):
        together(ranks, "save", f"global_step{step}", ALL_RANKS, 1, (6 + 2 * step) * MIB)
    for step in range(STEPS):
        together(ranks, "wait", f"global_step{step}", "durable", 60)
    watch.ended = True
    watch.join()
    assert MIB < watch.most <= BUDGET
    assert all(world.manifest(f"global_step{step}") for step in range(STEPS))


@pytest.mark.nightly("test_all_ranks_of_a_node_keep_to_one_budget_and_lose_no_version")
def test_ranks_that_wait_for_the_same_memory_all_get_their_share(world):
    """One large file makes room for two. While one rank returns its pages, the other has no image that it could return."""
    ranks = world.start({"a": [0, 1]}, "r1")
    for step in range(0, 2 * STEPS, 2):
        ranks[0].ask("save", f"global_step{step}", ALL_RANKS, 1, 38 * MIB)
        ranks[1].ask("save", f"global_step{step}", ALL_RANKS, 0, 0)
        together(ranks, "save", f"global_step{step + 1}", ALL_RANKS, 1, 16 * MIB)
    together(ranks, "wait", f"global_step{2 * STEPS - 1}", "durable", 60)
    assert all(world.manifest(f"global_step{step}") for step in range(2 * STEPS))
