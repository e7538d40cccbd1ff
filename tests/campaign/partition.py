"""A job of 32 nodes with 8 ranks each, in C, whose nodes are network namespaces, and half of whose network is cut.

    python tests/campaign/partition.py [--nodes 32] [--ranks 8]

It needs root and the command ip. Storage is a directory that all nodes share; what is cut is between the agents: copies, and reading them. In turn:
* versions are committed and copied to another node;
* half of the nodes lose the other half, and all ranks begin anew;
* then a node is lost, too, with its memory: all ranks begin anew, though the copy may lie beyond the cut;
* the job goes on, saves while the network is cut, heals while it saves, and copies again;
* two nodes are lost, and all ranks load the newest version from copies.

Each time all ranks must load the same version, with its own values, and none may wait longer than docs/scale.md says for nodes that do not answer. The
last lines compare the documents and bytes of a version with that page.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from networks import Networks  # noqa: E402

from bench.nodes import Job  # noqa: E402

ASKING_S = 10  # docs/scale.md: a node that has lost its memory asks the members for at most that long
START_S = 120  # hundreds of processes begin on a few cores
SHARD = 256 << 10


class Cut(Job):
    """Node n of the job is namespace n + 1."""

    def __init__(self, networks: Networks, *rest: object) -> None:
        self.networks, self.run = networks, "none"
        super().__init__(*rest)

    def words(self, node: int) -> list[object]:
        return ["ip", "netns", "exec", self.networks.name(node + 1)]

    def environment(self, node: int) -> dict[str, str]:
        return {**super().environment(node), "NEBULA_LISTEN": self.networks.address(node + 1), "NODES_RUN": self.run}

    def cut(self) -> None:
        names = list(self.networks.nodes)
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        for mine, others in (halves, halves[::-1]):
            for n in mine:
                self.networks.lose(n, *others)

    def heal(self) -> None:
        for n in self.networks.nodes:
            self.networks.heal(n)


def phase(what: str, begun: float, result: str) -> None:
    print(f"{what:<64} {time.monotonic() - begun:6.1f} s  {result}", flush=True)


def saved(job: Cut, run: str, steps: str, state: str, what: str, meanwhile: object = None) -> None:
    begun, job.run = time.monotonic(), run
    count = int(steps.split("-")[1]) - int(steps.split("-")[0]) + 1
    running = job.start("save", steps, state)
    try:
        for step in range(count):
            for process in running:
                line = process.stdout.readline()
                assert line.startswith("step "), f"{what}: {line}"
            if not step and callable(meanwhile):
                meanwhile()
    finally:
        for process in running:  # as a job whose processes are killed
            process.kill()
        for process in running:
            process.wait()
    phase(what, begun, f"versions {steps}, each {state}")


def loaded(job: Cut, run: str, what: str, may: set[int]) -> int:
    begun, job.run = time.monotonic(), run
    steps, times = job.load()
    assert len(steps) == 1, f"{what}: the ranks have loaded {sorted(steps)}"
    assert steps <= may, f"{what}: the ranks have loaded {steps}, and may load {may}"
    assert max(times) < ASKING_S + START_S, f"{what}: a rank has waited {max(times):.0f} s"
    phase(what, begun, f"all ranks load version {min(steps)}, the last one after {max(times):.1f} s")
    return steps.pop()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=8, help="of each node")
    given = parser.parse_args(arguments)
    networks = Networks(range(1, given.nodes + 1))
    base, memory = Path(tempfile.mkdtemp(prefix="partition-")), Path(tempfile.mkdtemp(prefix="partition-", dir="/dev/shm"))
    try:
        job = Cut(networks, base, memory, given.nodes, given.ranks, 1)
        try:
            saved(job, "one", "1-4", "replicated", "a whole network")
            loaded(job, "two", "begin anew", {4})
            job.cut()
            loaded(job, "three", "begin anew, half of the network is cut off", {4})
            job.lose(given.nodes // 4)
            loaded(job, "four", "begin anew, and a node is lost", {1, 4})
            saved(job, "five", "5-6", "durable", "saves while half is cut off, and heals", job.heal)
            loaded(job, "six", "begin anew in a whole network", {6})
            before = sum(1 for path in (base / "store").rglob("*") if path.is_file())
            saved(job, "seven", "7-8", "durable", "saves in a whole network")
            report(job, base / "store", before)
            saved(job, "eight", "9-10", "replicated", "copies in a whole network")
            for node in (0, given.nodes // 2):
                job.lose(node)
            loaded(job, "nine", "begin anew, and two nodes are lost", {10})
        finally:
            job.end()
    finally:
        networks.close()
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    return 0


def report(job: Cut, store: Path, before: int) -> None:
    """Compares what a version has left in storage with docs/scale.md: a file for each rank, a record for each node, and three documents."""
    version = [path for path in (store / "global_step8").rglob("*") if path.is_file()]
    documents = [path for path in version if path.parent.name == ".nebula"]
    shards = [path for path in version if path not in documents]
    size, own = sum(path.stat().st_size for path in shards), sum(path.stat().st_size for path in documents)
    added = sum(1 for path in store.rglob("*") if path.is_file()) - before
    print(f"version 8: {len(shards)} files with {size} bytes, {len(documents)} documents with {own} bytes; two versions have added {added} objects", flush=True)
    assert len(shards) == job.nodes * job.ranks and len(documents) <= job.nodes + 3, [str(path) for path in documents]
    assert added <= 2 * (job.nodes * job.ranks + job.nodes + 4) + 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
