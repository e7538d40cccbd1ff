"""Nodes of an elastic job on one machine: each is a torchrun with an address of its own."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fork_server
import psutil

MODULES = ("torch.distributed.run",)  # of the server whose forks are torchruns and trainers

# torchrun starts this program. It has a server fork the trainer from a Python that has imported torch, and ends the trainer with itself.
WORKER = f"""
import os, subprocess, sys, time
begun = time.time()
sys.path.append({str(Path(fork_server.__file__).parent)!r})
import fork_server
place = sys.argv[1]
with open(f"{{place}}/trains.py") as program:
    trainer = fork_server.start(program.read(), *sys.argv[1:], os.getpid(), begun, stdin=subprocess.PIPE, stdout=None, modules={MODULES!r})
sys.exit(abs(trainer.wait()))
"""

# Trains until the file `stop` is there; each rank says in a file of its own how far it is.
TRAINS = """
import json, os, sys, threading, time
import torch
import torch.distributed as dist

place, name, pid, begun = sys.argv[1:]
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
dist.init_process_group("gloo")
step = 0
with open(f"{place}/{name}.said", "a") as said:
    while True:
        stop = torch.tensor([float(os.path.exists(f"{place}/stop"))])
        dist.all_reduce(stop)
        step += 1
        world, rank = dist.get_world_size(), dist.get_rank()
        said.write(json.dumps({"world": world, "rank": rank, "step": step, "pid": int(pid), "begun": float(begun), "time": time.time()}) + "\\n")
        said.flush()
        if stop.item():
            break
        time.sleep(0.05)
dist.destroy_process_group()
"""

# In place of `nebula`: writes down when which request came, and passes them on.
COUNTING = """#!{python}
import subprocess, sys, time
with open({log!r}, "ab", buffering=0) as log:
    child = subprocess.Popen([{nebula!r}, *sys.argv[1:]], stdin=subprocess.PIPE)
    for line in iter(sys.stdin.buffer.readline, b""):
        log.write(b"%f %s\\n" % (time.time(), line[:300].strip()))
        child.stdin.write(line)
        child.stdin.flush()
    child.stdin.close()
    sys.exit(child.wait())
"""


# A torchrun in a session of its own.
TORCHRUN = """
import os, runpy, sys
os.setsid()
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class Node:
    """One torchrun and its worker."""

    def __init__(
        self,
        place: Path,
        number: int,
        options: list[str],
        environment: dict[str, str],
        module: str = "torch.distributed.run",
    ) -> None:
        self.place, self.name = place, f"node{number}"
        worker = place / "worker.py"
        worker.write_text(WORKER)
        (place / "trains.py").write_text(TRAINS)
        self.output = (place / f"{self.name}.out").open("ab")
        self.process = fork_server.start(
            TORCHRUN,
            module,
            *options,
            f"--local-addr=127.0.0.{number}",
            worker,
            place,
            self.name,
            env=environment,
            stdout=self.output.fileno(),
            stderr=self.output.fileno(),
            cwd=place,
            modules=MODULES,
        )

    def said(self) -> list[dict[str, float]]:
        file = self.place / f"{self.name}.said"
        return (
            [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
        )

    def workers(self) -> list[psutil.Process]:
        try:
            return [
                child
                for child in psutil.Process(self.process.pid).children()
                if "worker.py" in " ".join(child.cmdline())
            ]
        except psutil.NoSuchProcess:
            return []

    def lose(self) -> None:
        """Kills torchrun, its worker, and all processes that they have started, as if the machine was gone."""
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def wait_for(self, condition: Callable[[dict[str, float]], bool], seconds: float = 90) -> dict[str, float]:
        """Waits until the job prints a step for which the condition is true."""
        deadline = time.monotonic() + seconds
        while True:
            said = self.said()
            if said and condition(said[-1]):
                return said[-1]
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"{self.name} ({self.process.poll()}): {said[-1:]}\n{self.told()[-4000:]}")
            time.sleep(0.05)

    def told(self) -> str:
        return (self.place / f"{self.name}.out").read_text(errors="replace")

    def end(self) -> None:
        if self.process.poll() is None:
            self.lose()
        self.output.close()


class Job:
    """Starts nodes, and ends them all."""

    def __init__(self, place: Path, *options: str, **environment: str) -> None:
        self.place, self.options = place, list(options)
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE", "MASTER_"))
        }
        self.environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment}
        self.nodes: list[Node] = []

    def start(self, number: int, *options: str, module: str = "torch.distributed.run", **environment: str) -> Node:
        node = Node(self.place, number, [*self.options, *options], self.environment | environment, module)
        self.nodes.append(node)
        return node

    def stop(self) -> None:
        (self.place / "stop").touch()

    def end(self) -> None:
        for node in self.nodes:
            node.end()


def counting(nebula: str, place: Path, name: str) -> dict[str, str]:
    """Returns an environment in which `nebula store` logs its requests."""
    script, log = place / f"{name}-nebula", place / f"{name}.requests"
    script.write_text(COUNTING.format(python=sys.executable, log=str(log), nebula=nebula))
    script.chmod(0o755)
    return {"NEBULA_AGENT_PATH": str(script)}


def counted(place: Path, name: str) -> list[tuple[float, str]]:
    lines = (place / f"{name}.requests").read_text().splitlines()
    return [(float(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in lines]
