"""Failures of all kinds over a running job of three nodes: no durable step is lost, no two worlds train, and the job goes on.

    NEBULA_TEST_FAILURES=200 pytest -s tests/integration/test_random_failures.py      (`make nightly` does it)
"""

from __future__ import annotations

import collections
import os
import random
import time
from collections.abc import Iterator

import pytest
from failing_job import OF_NETWORK, OF_PROCESSES, Job
from networks import NODES, Networks, NoNetworks
from waiting import until

MANY = int(os.environ.get("NEBULA_TEST_FAILURES") or (200 if os.environ.get("NEBULA_TEST_NIGHTLY") == "1" else 0))


@pytest.fixture
def networks() -> Iterator[Networks | None]:
    """None: this machine does not permit network namespaces, so nodes are addresses of it."""
    try:
        made = Networks()
    except NoNetworks as failure:
        print(f"no network is cut: {failure}")
        yield None
        return
    yield made
    made.close()


def befall(job: Job, fault: str, chance: random.Random) -> float:
    """Returns the seconds from the end of the fault to the training of a whole world."""
    what = job.befall(fault, chance)
    begun = time.monotonic()
    try:
        job.await_training()
        job.check()
    except AssertionError as failure:
        logs = "\n".join(f"-- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(job.place.glob("*.out")))
        agents = "\n".join(f"-- {path}\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(job.place.glob("run*/agent.log")))
        raise AssertionError(f"{what}: {failure}\n{job.history[-12:]}\n{logs}\n{agents}") from failure
    return time.monotonic() - begun


# fault: as test_one_way_loss_and_partitions_never_let_two_worlds_train
@pytest.mark.nightly
def test_a_cut_network_one_way_loss_and_a_stopped_launcher_never_let_two_worlds_train(networks):
    if networks is None:
        pytest.skip("this machine does not permit network namespaces")
    chance = random.Random(7)
    job = Job(networks)
    try:
        job.await_training()
        for fault in (*OF_NETWORK, "launcher stands still"):
            befall(job, fault, chance)
    finally:
        job.end()


@pytest.mark.nightly("integration/test_elastic_nodes.py::test_the_first_node_is_killed_the_other_goes_on_and_one_returns")
def test_of_two_nodes_that_cannot_reach_each_other_one_trains_on_and_the_other_waits(networks):
    if networks is None:
        pytest.skip("this machine does not permit network namespaces")
    job = Job(networks, NODES[:2])
    try:
        job.await_training()
        before = set(job.worlds)

        def trains_alone(steps: int) -> bool:
            job.look()
            return any(
                world not in before and sum(row["world"] == world and "step" in row for row in job.history) >= steps for world in job.worlds
            )

        networks.cut(NODES[0])
        until(lambda: trains_alone(1), 60, "a node that trains alone")
        until(lambda: any("it waits until it does" in path.read_text() for path in job.place.glob("*.out")), 60, "a node that waits")
        until(lambda: trains_alone(100), 60, "a hundred steps")
        assert len(job.worlds) == len(before) + 1, "the node that waits has begun no round"
        networks.heal(NODES[0])
        job.await_training()
        job.check()
    finally:
        job.end()


# fault (Elastic jobs): 200 random failures of 13 kinds come: kills, exceptions, hangs, nodes that vanish or stand
# still, cut networks, agents, nodes that leave.
# result: No durable step is lost, at no time do two worlds train, and the job goes on.
@pytest.mark.skipif(not MANY, reason="one of the long ones: make nightly")
@pytest.mark.timeout(60 + 60 * MANY)
def test_random_failures_of_all_kinds_lose_no_step_and_stop_no_job(networks):
    seed = int(os.environ.get("NEBULA_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    chance, counts, seconds = random.Random(seed), collections.Counter(), []
    job = Job(networks)
    try:
        job.await_training()
        for n in range(MANY):
            fault = chance.choice(OF_PROCESSES + (OF_NETWORK if networks else ()))
            try:
                seconds.append(befall(job, fault, chance))
            except AssertionError as failure:
                raise AssertionError(f"NEBULA_TEST_SEED={seed}, failure {n}: {failure}") from failure
            counts[fault] += 1
            print(n, fault, f"{seconds[-1]:.1f} s", flush=True)
            time.sleep(chance.choice((0, 0, 0.5, 2.0)))  # the next one may come while the job still begins
    finally:
        job.end()
    steps = max(row.get("step", 0) for row in job.history)
    print(f"{MANY} failures, seed {seed}: {dict(counts)}; step {steps}, {len(job.worlds)} worlds; no durable step lost, no two worlds, no stuck job")
