"""A job of three nodes on this machine, of which two train and one is a spare, and the faults that befall it.

Each node has a network namespace, an agent and memory of its own; all share the storage. Its trainers import no torch, so that a restart is cheap: they
meet at each step over a connection to rank 0, which waits for ever and breaks as a collective does.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import fork_server
from networks import NODES, Networks
from waiting import until

TRAINER = """
import json, os, signal, socket, struct, sys, threading, time
import nebulaml as nm

began = time.monotonic()
place, node = sys.argv[1:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
log = open(f"{place}/{node}.log", "a", buffering=1)
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append("raise"))
signal.signal(signal.SIGUSR2, lambda *_: asked.append("hang"))

def say(**what):
    log.write(json.dumps(dict(what, at=time.monotonic(), world=world, rank=rank, size=size, pid=os.getpid())) + "\\n")

def exactly(one, count):
    read = b""
    while len(read) < count:
        piece = one.recv(count - len(read))
        if not piece:
            raise ConnectionError("a rank has gone")
        read += piece
    return read

others = []
if rank == 0:
    world = os.urandom(8).hex()
    listener = socket.create_server(address)
    while len(others) < size - 1:
        others.append(listener.accept()[0])
        others[-1].sendall(world.encode())
else:
    while True:
        try:
            others = [socket.create_connection(address)]
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    world = exactly(others[0], 16).decode()

def together(step):
    \"\"\"Waits for all ranks, which must be at the same step.\"\"\"
    for one in others:
        one.sendall(struct.pack("<q", step))
    for one in others:
        assert struct.unpack("<q", exactly(one, 8))[0] == step

def content(step):
    return b"%d " % step * 1000

nm.init(f"{place}/storage", 0, 2, on_error="raise")
latest = nm.get_latest_checkpoint()
step = latest.step if latest else 0
if latest:
    assert latest.read_bytes("r0") == content(step), latest
together(step)
say(begins=step, began=began)
saved, first = [], step
while not os.path.exists(f"{place}/stop"):
    step += 1
    if "raise" in asked:
        raise RuntimeError("the fault of this test")
    if "hang" in asked and step > first + 15:  # the agent knows how long a step takes
        threading.Event().wait()
    together(step)
    nm.progress(step)
    say(step=step)
    if step % 4 == 0:
        with nm.Checkpoint(f"global_step{step}", -2) as checkpoint:
            checkpoint.save_bytes(f"r{rank}", [content(step)])
        saved.append((step, checkpoint))
    if rank == 0 and saved and saved[0][1].state in ("durable", "failed"):  # it never waits: another node's agent may have died
        if saved[0][1].state == "durable":
            say(durable=saved[0][0])
        saved.pop(0)
    time.sleep(0.02)
"""

# A torchrun in a session and a network of its own. The process has one thread.
LAUNCHER = """
import ctypes, os, runpy, sys
os.setsid()
network = sys.argv.pop(1)
if network != "-":
    fd = os.open(f"/run/netns/{network}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")
    os.close(fd)
runpy.run_module("nebulaml.elastic.run", run_name="__main__", alter_sys=True)
"""

OF_NETWORK = ("link down", "one way", "all ways to one")
OF_PROCESSES = ("worker", "exception", "hang", "launcher", "node", "silence", "launcher stands still", "agent", "agent stands still", "told to leave")


ENDING = ("worker", "exception", "hang", "launcher", "node", "told to leave")  # the world that they happen to


class Job:
    def __init__(self, networks: Networks | None, numbers: tuple[int, ...] = NODES) -> None:
        self.networks, self.numbers = networks, numbers
        self.place = Path(tempfile.mkdtemp(prefix="nb-", dir="/dev/shm"))
        (self.place / "train.py").write_text(TRAINER)
        self.nodes: dict[int, fork_server.Trainer] = {}
        self.read = dict.fromkeys(numbers, 0)  # bytes of each log
        self.history: list[dict[str, Any]] = []  # what the trainers say, in order of time
        self.worlds: dict[str, dict[int, int]] = {}  # of each world: its nodes, and the process of each trainer
        self.newest = ""  # the world that trains
        self.ended = ""  # the world that the last fault has ended
        for n in numbers:
            self.start(n)

    def address(self, n: int) -> str:
        return self.networks.address(n) if self.networks else f"127.0.0.{n}"

    def marks(self, n: int) -> dict[str, str]:
        return {"NEBULA_NODE_ID": f"node{n}", "NEBULA_RUNTIME_DIR": str(self.place / "run")}

    def start(self, n: int) -> None:
        memory = self.place / f"memory{n}"
        memory.mkdir(exist_ok=True, mode=0o700)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE", "MASTER_", "NEBULA_"))}
        environment |= self.marks(n) | {"NEBULA_MEMORY_DIR": str(memory), "NEBULA_AGENT_LINGER": "5", "NEBULA_HANG_S": "1", "NEBULA_TAKEOVER_S": "2"}
        environment |= {"NEBULA_LISTEN": self.address(n)}
        options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=100000", "--max-failures-without-progress=0", "--rdzv-id=failing"]
        options += ["--rdzv-backend=nebula-store", f"--rdzv-endpoint={self.place}/shared", f"--local-addr={self.address(n)}", "--warm=off"]
        options += ["--rdzv-conf=last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=3", "--on-hang=restart"]
        with open(self.place / f"node{n}.out", "ab") as output:
            self.nodes[n] = fork_server.start(
                LAUNCHER, self.networks.name(n) if self.networks else "-", *options, self.place / "train.py", self.place, f"node{n}",
                env=environment, stdout=output.fileno(), stderr=output.fileno(), cwd=self.place, modules=("torch.distributed.run",),
            )  # fmt: skip

    def pids(self, n: int) -> list[int]:
        """The processes of a node, its launcher last."""
        marks = {f"{name}={value}".encode() for name, value in self.marks(n).items()}
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if marks <= set(Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")):
                    found.append(int(entry))
        return [*found, self.nodes[n].pid]

    def agent(self, n: int) -> list[int]:
        found = []
        for pid in self.pids(n):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:2] == [b"agent"]:
                    found.append(pid)
        return found

    def signal(self, pids: list[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def look(self) -> list[dict[str, Any]]:
        """Reads what the trainers have said since the last look."""
        new = []
        for n in self.numbers:
            with contextlib.suppress(FileNotFoundError), open(self.place / f"node{n}.log") as log:
                log.seek(self.read[n])
                text = log.read()
                whole = text[: text.rfind("\n") + 1]
                self.read[n] += len(whole)
                new += [dict(json.loads(line), node=n) for line in whole.splitlines()]
        new.sort(key=lambda row: row["at"])
        self.history += new
        for row in new:
            if "begins" in row:
                self.worlds.setdefault(row["world"], {})[row["node"]] = row["pid"]
            elif "step" in row:
                self.newest = row["world"]
        return new

    def trainers(self) -> dict[int, int]:
        """The nodes of the newest world, and the process of each trainer."""
        self.look()
        return self.worlds.get(self.newest, {})

    def await_training(self, seconds: float = 120) -> None:
        """Waits until a world of two nodes makes new steps: another one, if the last fault ended the one before."""
        since = time.monotonic()

        def trains() -> bool:
            for n, node in self.nodes.items():
                assert node.poll() is None, f"node {n} has ended with {node.returncode}"
            self.look()
            return sum(row["at"] > since and row["size"] == 2 and "step" in row and row["world"] != self.ended for row in self.history[-200:]) >= 4

        until(trains, seconds, "training")

    # -- faults

    def befall(self, fault: str, chance: random.Random) -> str:
        """Lets a fault happen to a node, waits until it is noticed or some seconds have passed, and heals it. Returns what it was."""
        training = self.trainers()
        spare = [n for n in self.numbers if n not in training]
        n = chance.choice([*training, *training, *spare])
        seen = len(self.history)
        pids = [training[n]] if n in training else []
        if n in training and fault in ENDING:
            self.ended = self.newest
        lasts = chance.uniform(1.0, 5.0)
        if fault in ("worker", "exception", "hang"):
            self.signal(pids, {"worker": signal.SIGKILL, "exception": signal.SIGUSR1, "hang": signal.SIGUSR2}[fault])
        elif fault == "launcher":
            self.nodes[n].kill()
        elif fault == "node":
            for _ in range(2):
                self.signal(self.pids(n), signal.SIGKILL)
            shutil.rmtree(self.place / f"memory{n}", ignore_errors=True)
        elif fault == "told to leave":
            self.nodes[n].terminate()
        elif fault == "agent":
            self.signal(self.agent(n), signal.SIGKILL)
        elif fault in ("silence", "launcher stands still", "agent stands still"):
            stopped = self.pids(n) if fault == "silence" else self.agent(n) if fault == "agent stands still" else [self.nodes[n].pid]
            self.signal(stopped, signal.SIGSTOP)
            self.wait_for_another_world(seen, lasts)
            self.signal(stopped, signal.SIGCONT)
        else:
            assert self.networks
            if fault == "link down":
                self.networks.cut(n)
            elif fault == "one way":
                self.networks.lose(n)
            else:
                for other in NODES:
                    if other != n:
                        self.networks.lose(other, n)
            self.wait_for_another_world(seen, lasts)
            for each in NODES:
                self.networks.heal(each)
        if fault in ("launcher", "node", "told to leave"):
            self.nodes[n].wait(60)
            if fault != "node":  # a worker ends with its launcher
                until(lambda: not self.lives(pids), 60, "the end of the worker")
            self.start(n)
        return f"{fault} of node {n}{' (a spare)' if n in spare else ''}"

    def lives(self, pids: list[int]) -> bool:
        for pid in pids:
            with contextlib.suppress(OSError):
                return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        return False

    def wait_for_another_world(self, seen: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()
            if any("begins" in row for row in self.history[seen:]):
                return
            time.sleep(0.05)

    # -- promises

    def check(self) -> None:
        """No durable step is lost, and at no time do two worlds train.

        A world trains from its first step until one of its ranks has made its last one. A rank that stood still may finish the steps that the others had
        begun with it, and no other.
        """
        self.look()
        self.history.sort(key=lambda row: row["at"])
        durable = [(0.0, 0)]  # times, and the newest durable step at each
        begun: dict[str, float] = {}
        sizes: dict[str, int] = {}
        last: dict[str, dict[int, float]] = {}
        for row in self.history:
            if "durable" in row:
                durable.append((row["at"], max(durable[-1][1], row["durable"])))
            elif "begins" in row:
                before = durable[bisect.bisect(durable, (row["began"], 0)) - 1][1]
                assert row["begins"] >= before, f"step {before} was durable before {row}"
            else:
                begun.setdefault(row["world"], row["at"])
                sizes[row["world"]] = row["size"]
                last.setdefault(row["world"], {})[row["rank"]] = row["at"]
        worlds = sorted((world for world in begun if len(last[world]) == sizes[world]), key=lambda world: begun[world])
        for world, following in itertools.pairwise(worlds):
            assert min(last[world].values()) <= begun[following], f"the worlds {world} and {following} have trained at once"

    def end(self) -> None:
        (self.place / "stop").touch()
        for n in self.numbers:
            for _ in range(2):
                self.signal(self.pids(n), signal.SIGCONT)
                self.signal(self.pids(n), signal.SIGKILL)
            self.nodes[n].wait()
        shutil.rmtree(self.place, ignore_errors=True)
