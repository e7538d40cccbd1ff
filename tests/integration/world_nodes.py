"""Nodes simulated on one machine: each has its own agent, socket and memory; they share the storage."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nebulaml
import processes
from waiting import until

HERE = Path(__file__).resolve().parent
PACKAGE = Path(nebulaml.__file__).resolve().parent.parent
OPEN, ALL_RANKS = -1, -2


class RankFailed(Exception):
    """A rank has answered with an error."""


class RankProcess:
    def __init__(
        self, world: World, node: str, rank: int, count: int, local: int, run: str, interval: float, job: str, replicas: int
    ) -> None:
        arguments = [str(world.storage) if world.persist else "", rank, count, local, run, interval, job, replicas]
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(HERE / "world_rank.py"), *map(str, arguments)],
            env=world.environment(node),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if world.quiet else None,
        )

    def send(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(command) + "\n").encode())
        self.process.stdin.flush()

    def answer(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RankFailed(f"rank {self.rank} ended with {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RankFailed(answer["error"])
        return answer["ok"]

    def ask(self, *command: object) -> object:
        self.send(*command)
        return self.answer()

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self) -> int:
        """Ends the process, by a kill or as a program that comes to its end."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return self.process.wait(timeout=60)


class World:
    """Storage, and the nodes by name ("": the only one)."""

    def __init__(self, **environment: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="nw-"))
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.memory = Path(tempfile.mkdtemp(prefix="nebula-world-", dir=shared))
        self.storage = self.root / "storage"
        self.persist, self.quiet = True, False
        self.settings = {"NEBULA_AGENT_LINGER": "300", **environment}
        self.ranks: list[RankProcess] = []

    def environment(self, node: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NEBULA_")}
        for name in ("NEBULA_AGENT_PATH",):
            if name in os.environ:
                kept[name] = os.environ[name]
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE), str(HERE), kept.get("PYTHONPATH")])),
            "NEBULA_RUNTIME_DIR": str(self.root / f"run-{node}"),
            "NEBULA_MEMORY_DIR": str(self.memory / f"node-{node}"),
            "NEBULA_OUTPUT_DIR": str(self.root / "output"),
            "NEBULA_NODE_ID": node,
            "NEBULA_MEMORY_BUFFER_SIZE": "256M",
            **self.settings,
        }

    def start(
        self,
        nodes: dict[str, list[int]],
        run: str,
        *,
        interval: float = 0,
        job: str = "",
        world: int | None = None,
        replicas: int = 0,
    ) -> list[RankProcess]:
        """Starts a run of the job. Returns its ranks, in order, connected."""
        count = world or sum(map(len, nodes.values()))
        started = [
            RankProcess(self, node, rank, count, len(ranks), run, interval, job, replicas)
            for node, ranks in nodes.items()
            for rank in ranks
        ]
        self.ranks += started
        for rank in started:
            rank.answer()
        return sorted(started, key=lambda one: one.rank)

    def agents(self, node: str | None = None) -> list[int]:
        prefix = f"NEBULA_RUNTIME_DIR={self.root}/run-"
        return processes.agents(lambda variables: any(one == prefix + node if node is not None else one.startswith(prefix) for one in variables))

    def kill_agents(self, node: str | None = None, wait: bool = True) -> None:
        pids = self.agents(node)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if wait:
            until(lambda: not set(pids) & set(self.agents(node)), what="the agent's end")  # a rank may have started the next one already

    def lose_memory(self, node: str) -> None:
        """Simulates a reboot of that node. The agent stops first: a rank that starts the next one at once leaves it no memory to adopt."""
        for pid in self.agents(node):
            processes.stop(pid)
        shutil.rmtree(self.memory / f"node-{node}", ignore_errors=True)
        self.kill_agents(node)

    def manifest(self, tag: str) -> dict[str, object] | None:
        """Returns the version that storage has under a tag."""
        paths = sorted((self.storage / tag / ".nebula").glob("manifest-*.json"), key=lambda path: int(path.stem.removeprefix("manifest-")))
        found = json.loads(paths[-1].read_text()) if paths else None
        return found if found and found["nebula"] == "manifest" else None

    def log(self, node: str) -> str:
        return "".join(path.read_text() for path in sorted(self.root.glob(f"run-{node}*/agent.log")))

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.end()
        self.kill_agents()
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.root, ignore_errors=True)


@contextlib.contextmanager
def a_world(**environment: str) -> Iterator[World]:
    world = World(**environment)
    try:
        yield world
    finally:
        world.close()


def together(ranks: list[RankProcess], *command: object) -> list[object]:
    """Sends the same command to all ranks at once."""
    for rank in ranks:
        rank.send(*command)
    return [rank.answer() for rank in ranks]
