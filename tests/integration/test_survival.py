"""The versions that survive each kind of death: the rows of the table in docs/durability.md, with real processes."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Iterator

import pytest
from world_nodes import ALL_RANKS, World, a_world, together, until
from world_rank import content

ONE, TWO = {"a": [0, 1, 2, 3]}, {"a": [0, 1], "b": [2, 3]}
SIZE = 1 << 20
HOUR = 3600.0  # an interval in which nothing is persisted by itself but the first version


@pytest.fixture
def world() -> Iterator[World]:
    with a_world(NEBULA_TAKEOVER_S="2") as one:
        yield one


def train(world, nodes, run, first, last, interval=HOUR, state="committed"):
    ranks = world.start(nodes, run, interval=interval)
    for step in range(first, last + 1):
        together(ranks, "save", f"global_step{step}", ALL_RANKS, 1, SIZE, run)
        together(ranks, "wait", f"global_step{step}", state, 30)
    return ranks


def kill(ranks, number=signal.SIGKILL):
    for rank in ranks:
        rank.kill(number)
    return [rank.end() for rank in ranks]


def resume(world, nodes, report, expected, tier, run="r1", steps=3):
    """Restarts the job. Every rank must find the newest version, with the saved bytes. Prints the row's figures."""
    started = time.monotonic()
    ranks = world.start(nodes, "resumed", interval=HOUR)
    connected = time.monotonic()
    found = together(ranks, "latest")
    tag = f"global_step{expected}"
    for rank, version in zip(ranks, found, strict=True):
        assert (version["tag"], tier in version["source"]) == (tag, True), version
        name = f"r{rank.rank}-0.bin"
        assert rank.ask("load", tag, [name]) == {
            name: hashlib.sha256(content(tag, rank.rank, 0, SIZE, run)).hexdigest()
        }
    loaded = time.monotonic()
    print(
        f"SURVIVAL {report}: {tag} from {tier}, {1e3 * (loaded - connected):.0f} ms for {len(ranks)} ranks after "
        f"{1e3 * (connected - started):.0f} ms of starting, {steps - expected} steps lost"
    )
    return ranks


@pytest.mark.nightly("test_sigkill_of_one_rank_in_the_middle_of_a_version")
def test_sigkill_of_one_rank(world):
    ranks = train(world, ONE, "r1", 1, 3)
    assert kill(ranks[1:2]) == [-signal.SIGKILL]
    kill([ranks[0], *ranks[2:]], signal.SIGTERM)  # as a launcher ends the rest
    resume(world, ONE, "one rank", 3, "memory")


def test_sigkill_of_one_rank_in_the_middle_of_a_version(world):
    ranks = train(world, ONE, "r1", 1, 3)
    together(ranks[:3], "save", "global_step4", ALL_RANKS, 1, SIZE, "r1")
    kill(ranks[3:])
    until(
        lambda: (
            ranks[0].ask("report", "global_step4")["state"] == "failed"
            or ranks[0].ask("latest")["tag"] == "global_step3"
        )
    )
    kill(ranks[:3])
    resume(world, ONE, "one rank before it committed", 3, "memory", steps=4)


@pytest.mark.nightly("test_sigkill_of_everything_at_once", "test_sigkill_of_one_rank_in_the_middle_of_a_version")
def test_sigkill_of_all_ranks(world):
    kill(train(world, ONE, "r1", 1, 3))
    resume(world, ONE, "all ranks", 3, "memory")
    until(lambda: world.manifest("global_step3"), what="the agent's own end of the work")


def test_sigkill_of_the_agent(world):
    ranks = train(world, ONE, "r1", 1, 3)
    world.kill_agents()
    together(ranks, "save", "global_step4", ALL_RANKS, 1, SIZE, "r1")
    together(ranks, "wait", "global_step4", "committed", 60)
    kill(ranks)
    resume(world, ONE, "the agent", 4, "memory", steps=4)


def test_sigkill_of_everything_at_once(world):
    ranks = train(world, ONE, "r1", 1, 3)
    world.kill_agents(wait=False)
    kill(ranks)
    resume(world, ONE, "everything", 3, "memory")


def test_power_loss_of_the_only_node(world):
    ranks = train(world, ONE, "r1", 1, 2, interval=0, state="durable")
    together(ranks, "save", "global_step3", ALL_RANKS, 0, 0)  # nothing was saved: it is not there to be found
    world.lose_memory("a")
    kill(ranks)
    resume(world, ONE, "the node with its memory", 2, "storage")


@pytest.mark.nightly("test_sigkill_of_everything_at_once", "test_one_of_two_nodes_with_its_memory_goes_back_to_what_is_durable")
def test_agent_and_ranks_of_one_of_two_nodes(world):
    ranks = train(world, TWO, "r1", 1, 3)
    world.kill_agents("b")
    kill(ranks[2:])
    kill(ranks[:2], signal.SIGTERM)
    resume(world, TWO, "agent and ranks of one node", 3, "memory")


def test_one_of_two_nodes_with_its_memory_goes_back_to_what_is_durable(world):
    ranks = train(world, TWO, "r1", 1, 2, interval=0, state="durable")
    kill(ranks)
    ranks = train(world, TWO, "r2", 3, 4)  # the first one is chosen to be persisted, the next is not
    together(ranks, "wait", "global_step3", "durable", 60)
    world.lose_memory("b")
    kill(ranks)
    again = world.start(TWO, "resumed", interval=HOUR)
    rows = together(again, "versions")
    from nebulaml._session import agree

    common = agree.choose(
        [
            agree.Inventory.of([
                {name: one.get(name, "") for name in ("tag", "sequence", "step", "run", "state")}
                | {"shared": True, "abandoned": False}
                for one in row
                if one["state"] in ("committed", "replicated", "durable") and one["source"]
            ])
            for row in rows
        ]
    )
    assert common[0]["tag"] == "global_step3"
    for rank in again:
        name = f"r{rank.rank}-0.bin"
        expected = hashlib.sha256(content("global_step3", rank.rank, 0, SIZE, "r2")).hexdigest()
        assert rank.ask("load", "global_step3", [name]) == {name: expected}


def test_sigterm_of_all_ranks(world):
    kill(train(world, ONE, "r1", 1, 3), signal.SIGTERM)
    until(lambda: world.manifest("global_step3"), what="durability")
    resume(world, ONE, "SIGTERM", 3, "memory")


@pytest.mark.nightly("test_sigterm_of_all_ranks", "test_a_normal_exit_with_work_in_the_queue")
def test_an_exception_in_the_loop(world):
    ranks = train(world, ONE, "r1", 1, 3)
    world.quiet = True
    for rank in ranks:
        rank.send("raise")
    assert [rank.end() for rank in ranks] == [1, 1, 1, 1]
    until(lambda: world.manifest("global_step3"), what="durability")
    resume(world, ONE, "an exception", 3, "memory")


def test_a_normal_exit_with_work_in_the_queue(world):
    ranks = train(world, TWO, "r1", 1, 3)
    assert world.manifest("global_step3") is None
    assert [rank.end() for rank in ranks] == [0, 0, 0, 0]
    until(lambda: world.manifest("global_step3"), what="durability")
    world.lose_memory("a")
    world.lose_memory("b")
    resume(world, TWO, "a normal exit, then power loss", 3, "storage")
