"""Nodes of an elastic job on one machine: each has a torchrun, an agent and memory of its own, and a test can remove all of them at once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from torch.distributed import TCPStore

HERE = Path(__file__).resolve().parent
CONF = "is_host=0,join_timeout=120,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


class Cluster:
    """The nodes, and the key-value store of their rendezvous, which runs on none of them."""

    def __init__(self, node, script, *arguments, python=sys.executable):
        self.node, self.python = node, python
        self.place = node.base / "job"
        self.place.mkdir()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.command = [str(HERE / script), "--persist", str(node.persist), "--place", str(self.place), *map(str, arguments)]
        self.processes = {}

    def start(self, *names, rendezvous=None, **more):
        """rendezvous: other options than those of the key-value store. more: environment variables."""
        for name in names:
            memory = self.node.memory / name
            memory.mkdir(exist_ok=True)
            environment = {
                **self.node.environment,
                "NEBULA_NODE_ID": name,
                "NEBULA_MEMORY_DIR": str(memory),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **more,
            }
            address = f"127.0.0.{2 + int(name.removeprefix('node'))}"
            command = [self.python, "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=50"]
            command += rendezvous or ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.store.port}"]
            command += ["--rdzv-id=job", f"--rdzv-conf={CONF}"]
            log = open(self.node.base / f"{name}-rank.log", "ab")  # noqa: SIM115
            self.processes[name] = subprocess.Popen(
                [*command, f"--local-addr={address}", *self.command], env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def pids(self, name, agents=True):
        """Returns the processes of a node: torchrun, the workers and the agent."""
        wanted = {f"NEBULA_NODE_ID={name}".encode(), f"NEBULA_RUNTIME_DIR={self.node.runtime}".encode()}
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    if agents or b"agent" not in (entry / "cmdline").read_bytes().split(b"\0")[1:2]:
                        found.append(int(entry.name))
            except OSError:
                continue
        return found

    def worker(self, name):
        torchrun = self.processes[name].pid
        (found,) = (child.pid for child in psutil.Process(torchrun).children() if self.command[0] in child.cmdline())
        return found

    def kill_worker(self, name):
        os.kill(self.worker(name), signal.SIGKILL)

    def agent(self, name):
        return next(iter(set(self.pids(name)) - set(self.pids(name, agents=False))))

    def lose(self, name, keeps_memory=False):
        """Kills all processes of a node at once and removes its memory, as a power loss would. A node that was only stopped keeps its memory."""
        while pids := self.pids(name):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.processes[name].poll()
            time.sleep(0.05)
        if not keeps_memory:
            shutil.rmtree(self.node.memory / name)

    def open_gate(self, step, world):
        temporary = self.place / "gate.tmp"
        temporary.write_text(f"{step} {world}")
        temporary.replace(self.place / "gate")

    def said(self):
        try:
            return [json.loads(line) for line in (self.place / "said.jsonl").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def until(self, condition, what, timeout=120):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = condition(self.said())
            if found:
                return found
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {timeout} s\n{self.said()[-8:]}\n{self.node.logs()}")

    def train(self, step, world):
        """Trains to that step with that many ranks. Returns the output of each rank when all of them wait there."""
        self.open_gate(step, world)

        def arrived(said):
            found = {one["node"]: one for one in said if one.get("waits") == step and one["world"] == world}
            return list(found.values()) if len(found) == world else None

        return self.until(arrived, f"step {step} with {world} ranks")

    def finish(self, step, world):
        self.open_gate(step, world)
        self.until(lambda said: sum("end" in one for one in said) >= world, f"the end, step {step}")

    def resumes(self, world):
        return [one for one in self.said() if "resumed" in one and one["world"] == world]

    def close(self):
        for name, process in self.processes.items():
            for pid in self.pids(name):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait(timeout=30)
