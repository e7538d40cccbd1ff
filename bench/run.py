"""Runs one round of one competitor, or of the machine's limits: starts the processes, drives them and watches their memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import peers
from .watch import Watch
from .workload import Workload

COPY_THREADS = min(os.cpu_count() or 1, 4)  # as many as Nebula's capture uses
LIMITS = Path("build/bench-limits")


class Worker:
    """A started worker, and its side of the protocol."""

    def __init__(self, arguments: list[str], python: str, environment: dict[str, str], log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [python, "-m", "bench.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(log, "a"),  # noqa: SIM115 - the process owns it
            text=True,
            # Waiting threads of torch sleep. If they spun, their CPU time would count as that of the save.
            env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},
        )

    def wait_for(self, at: str) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            lines = self.log.read_text().splitlines() or ["no reason given"]
            raise RuntimeError(f"it ended: {next((line for line in reversed(lines) if 'Error' in line), lines[-1])}")
        said = json.loads(line)
        assert said.pop("at") == at
        return said

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@contextmanager
def places(root: Path) -> Iterator[tuple[Path, Path]]:
    """Makes an empty directory in storage and one in shared memory, and removes both at the end."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=root)).resolve()
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    memory = Path(tempfile.mkdtemp(prefix="nebula-bench-", dir=shared))
    try:
        yield folder, memory
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def limits(workload: Workload, root: Path) -> dict[str, float]:
    """Returns the seconds that this machine needs to copy, write and read the workload's bytes."""
    with places(root) as (folder, memory):
        # All blocks have the same size: the mean of the workload's tensors.
        seconds = bench_limits(workload.bytes, len(workload.sizes), COPY_THREADS, memory, folder)
    return {
        **seconds,
        "write": min(value for key, value in seconds.items() if key.startswith("write_")),
        **fastest_reads(seconds),
    }


def read_limits(path: Path, memory: Path) -> dict[str, float]:
    """Returns the seconds that this machine needs to read a file: in the fastest way, and in the fastest way into new memory."""
    return fastest_reads(bench_limits("read", path, memory))


def bench_limits(*arguments: object) -> dict[str, float]:
    found = subprocess.run([LIMITS, *map(str, arguments)], capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(found.stderr.strip())
    return json.loads(found.stdout)


def fastest_reads(seconds: dict[str, float]) -> dict[str, float]:
    new = {key: value for key, value in seconds.items() if key.startswith("new_")}
    old = [value for key, value in seconds.items() if key.startswith("read_") or key == "buffered"]
    return {"read": min(old), "read_new": min(new.values())}


def measure(name: str, workload: Workload, root: Path, quick: bool, count: int) -> dict[str, Any]:
    """Measures one competitor once: one process saves ``count`` versions, and two others load the last one."""
    peer = peers.load(name)
    python = peer.python or sys.executable
    with places(root) as (folder, memory):
        flags = ["--quick"] if quick else []
        log = folder / "stderr.txt"
        kept = {**peer.environment(folder, memory, fresh=False), **workload.environment}
        fresh = {**peer.environment(folder, memory, fresh=True), **workload.environment}

        def worker(task: str, environment: dict[str, str], *more: str) -> Worker:
            return Worker(
                [task, name, workload.name, str(folder), str(memory), *flags, *more], python, environment, log
            )

        try:
            result = save(worker("save", kept, "--count", str(count)), memory)
            last = ["--tag", f"step{count}", "--version", str(result["rounds"][-1]["version"])]
            result["warm"] = load(worker("load", kept, *last))
            # Removes the peer's memory, as on another machine. The storage stays.
            peer.clean({**os.environ, **kept})
            result["cold"] = load(worker("load", fresh, *last, "--cold"))
            result["gate"] = result["warm"]["wrong"] or result["cold"]["wrong"]
        finally:
            peer.clean({**os.environ, **kept})
            peer.clean({**os.environ, **fresh})
    return result


def save(worker: Worker, memory: Path) -> dict[str, Any]:
    try:
        versions = worker.wait_for("baseline")["versions"]
        with Watch(worker.process.pid, memory) as watch:
            worker.go_on()
            watch.pids += worker.wait_for("opened")["helpers"]
            worker.go_on()
            worker.wait_for("warm")
        # The watch takes a processor for a millisecond, 50 times a second. So the timed saves run without it.
        worker.go_on()
        result = worker.wait_for("saved")
        result["memory"], result["versions"] = watch.peak, versions
        worker.go_on()
    finally:
        worker.end()
    return result


def load(worker: Worker) -> dict[str, Any]:
    try:
        result = worker.wait_for("loaded")
        worker.go_on()
    finally:
        worker.end()
    return result
