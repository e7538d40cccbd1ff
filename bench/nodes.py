"""A job of many nodes on one machine: an agent per node, ranks in C, one shared directory.

    python -m bench.nodes --nodes 128 --ranks 8                    how soon a version is committed and durable
    python -m bench.nodes --nodes 16 --replicas 1 --lose 2         how soon all ranks have their shards when two nodes were lost

Each rank saves 256 KiB, so the agreement between nodes is measured and not the disk. Times are seconds after the
slowest rank's commit had returned, over all ranks. Losing a node means SIGKILL for its ranks and its agent, and
removing its memory; then every rank of the next run loads its shard.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path(sysconfig.get_path("purelib")) / "nebulaml" / "lib"
NEBULA = Path(sys.executable).parent / "nebula"


@dataclass
class Step:
    """The times of one version: the duration of the slowest save, and the seconds from its end to each state."""

    save: float
    committed: float
    reached: float


def build(folder: Path) -> Path:
    program = folder / "nodes_rank"
    command = [os.environ.get("CC", "cc"), "-std=gnu17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}"]
    subprocess.run(
        [
            *command,
            str(ROOT / "bench/nodes_rank.c"),
            "-o",
            str(program),
            f"-L{LIBRARY}",
            "-l:libnebula.so",
            f"-Wl,-rpath,{LIBRARY}",
        ],
        check=True,
    )
    return program


class Job:
    def __init__(self, base: Path, memory: Path, nodes: int, ranks: int, replicas: int) -> None:
        self.base, self.memory, self.nodes, self.ranks, self.replicas = base, memory, nodes, ranks, replicas
        self.program = build(base)
        for node in range(nodes):
            self.lay(node)

    def lay(self, node: int) -> None:
        """Makes the empty directories of a new node."""
        for folder in (self.base / f"run{node}", self.memory / f"{node}"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700, parents=True)

    def words(self, node: int) -> list[object]:
        """What stands before the command of a process of this node."""
        return []

    def environment(self, node: int) -> dict[str, str]:
        return {
            **os.environ,
            "NEBULA_NODE_ID": f"node{node}",
            "NEBULA_RUNTIME_DIR": str(self.base / f"run{node}"),
            "NEBULA_MEMORY_DIR": str(self.memory / f"{node}"),
            "NEBULA_AGENT_PATH": str(NEBULA),
            "NEBULA_AGENT_LINGER": "60",
            "NEBULA_MEMORY_BUFFER_SIZE": "512M",
        }

    def start(self, verb: str, *more: object) -> list[subprocess.Popen[str]]:
        world = self.nodes * self.ranks
        return [
            subprocess.Popen(
                [
                    *self.words(rank // self.ranks),
                    self.program,
                    verb,
                    *map(str, (rank, world, rank % self.ranks, self.ranks, self.base / "store", self.replicas, *more)),
                ],
                env=self.environment(rank // self.ranks),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def save(self, steps: int, state: str) -> tuple[list[subprocess.Popen[str]], list[Step]]:
        """Starts all ranks. Returns when each has done all steps; the ranks still run then."""
        running = self.start("save", steps, state)
        rows: list[list[tuple[float, ...]]] = [[] for _ in range(steps)]
        for process in running:
            assert process.stdout
            for step in range(steps):
                word, *rest = process.stdout.readline().split(maxsplit=1) or ["nothing"]
                if word != "step":
                    raise SystemExit(f"a rank ended in step {step + 1}: {word} {' '.join(rest)}")
                rows[step].append(tuple(float(number) for number in rest[0].split()[1:]))
        found = []
        for row in rows:
            slowest = max(saved for _, saved, _, _ in row)
            found.append(
                Step(
                    max(saved - begun for begun, saved, _, _ in row),
                    max(committed for _, _, committed, _ in row) - slowest,
                    max(reached for *_, reached in row) - slowest,
                )
            )
        return running, found

    def agents(self, node: int) -> list[int]:
        wanted, found = f"NEBULA_RUNTIME_DIR={self.base / f'run{node}'}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                is_agent = entry.name.isdecimal() and b"agent" in (entry / "cmdline").read_bytes().split(b"\0")[1:2]
                if is_agent and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                pass
        return found

    def lose(self, node: int) -> None:
        for pid in self.agents(node):
            os.kill(pid, signal.SIGKILL)
        self.lay(node)

    def limit(self, steps: int) -> list[float]:
        """Returns for each step how many seconds a plain process per node takes to write and sync the same files."""
        folder = self.base / "plain"
        folder.mkdir()
        writers = [
            subprocess.Popen(
                [self.program, "write", folder / "step", f"{node}", f"{self.ranks}", f"{steps}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for node in range(self.nodes)
        ]
        times = []
        for _ in range(steps):
            began = time.time()
            for writer in writers:
                assert writer.stdin
                writer.stdin.write("go\n")
                writer.stdin.flush()
            ended = []
            for writer in writers:
                assert writer.stdout
                word, *rest = writer.stdout.readline().split() or ["nothing"]
                if word != "step":
                    raise SystemExit(f"a plain writer ended: {word} {' '.join(rest)}")
                ended.append(float(rest[1]))
            times.append(max(ended) - began)
        for writer in writers:
            writer.communicate()
        return times

    def load(self) -> tuple[set[int], list[float]]:
        """Starts all ranks again. Returns the steps that they loaded, and for each rank the seconds from the start until it had its shard."""
        began = time.time()
        steps, times = set(), []
        for process in self.start("load"):
            text = process.communicate()[0]
            if not text.startswith("loaded "):
                raise SystemExit(f"a rank could not load: {text.strip()}")
            _, step, at = text.split()
            steps.add(int(step))
            times.append(float(at) - began)
        return steps, times

    def end(self) -> None:
        for node in range(self.nodes):
            for pid in self.agents(node):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nodes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=8, help="of each node")
    parser.add_argument("--steps", type=int, default=6, help="versions; the first is not counted")
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--lose", type=int, default=0, help="so many nodes with their memory; needs --replicas")
    options = parser.parse_args()
    if (options.lose and not options.replicas) or options.lose >= options.nodes:
        parser.error("--lose needs --replicas, and nodes that are left")
    state = "replicated" if options.replicas else "durable"
    base, memory = (
        Path(tempfile.mkdtemp(prefix="nebula-nodes-")),
        Path(tempfile.mkdtemp(prefix="nebula-nodes-", dir="/dev/shm")),
    )
    job = Job(base, memory, options.nodes, options.ranks, options.replicas)
    running: list[subprocess.Popen[str]] = []
    try:
        running, steps = job.save(options.steps, state)
        counted = steps[1:] or steps
        print(f"{options.nodes} nodes of {options.ranks} ranks on {os.cpu_count()} cores, seconds; ", end="")
        print(f"steady: medians of {len(counted)} versions\n")
        print(f"| | save and commit, slowest rank | committed after | {state} after |\n|---|---:|---:|---:|")
        for name, some in (("first", steps[:1]), ("steady", counted)):
            cells = [statistics.median(getattr(s, part) for s in some) for part in ("save", "committed", "reached")]
            print(f"| {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
        if state == "durable":
            limit = statistics.median(job.limit(options.steps)[1:])
            print(f"\nThe machine: a plain process per node writes and syncs the same files in {limit:.3f} s.")
        if options.lose:
            for process in running:
                process.kill()
            for process in running:
                process.wait()
            lost = list(range(0, options.nodes, max(options.nodes // options.lose, 1)))[: options.lose]
            for node in lost:
                job.lose(node)
            found, times = job.load()
            print(
                f"\n{len(lost)} nodes lost: step {', '.join(map(str, sorted(found)))} of {options.steps} loaded by all ranks, ",
                end="",
            )
            print(f"{statistics.median(times):.2f} s (median) and {max(times):.2f} s (last) after their start")
    finally:
        for process in running:
            process.kill()
        job.end()
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


if __name__ == "__main__":
    main()
