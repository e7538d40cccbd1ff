"""One process of one competitor: ``python -m bench.worker save|load PEER WORKLOAD FOLDER MEMORY [options]``.

It reports each stage to its parent process as a line of JSON, and waits for a line of the parent before it continues.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from . import environment, loops, peers, report, watch, workloads
from .peer import Peer, State
from .workload import Workload

QUIET_CHANGES = 5
REST = 0.5  # seconds between two versions, for background work of the engine; its CPU time counts


def tell(at: str, **fields: Any) -> None:
    """Sends one line to the parent, and waits for its answer."""
    protocol.write(json.dumps({"at": at, **fields}) + "\n")
    protocol.flush()
    sys.stdin.readline()


def cpu_seconds(pids: list[int]) -> float:
    """Returns the user and system time of processes, with all their threads."""
    seconds = 0.0
    for pid in pids:
        # The id of another process's CPU clock, with nanoseconds: see clock_getcpuclockid(3).
        with contextlib.suppress(OSError):
            seconds += time.clock_gettime((~pid << 3) | 2)
    return seconds


def quiet_change(workload: Workload, state: State) -> tuple[float, float]:
    """Returns the median wall and CPU seconds of a change of every tensor while nothing else runs."""
    walls, cpus = [], []
    for _ in range(QUIET_CHANGES):
        wall, cpu = time.perf_counter(), time.process_time()
        workload.next_version(state)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return median(walls), median(cpus)


def run_save(peer: Peer, workload: Workload, count: int, seconds: float) -> None:
    peer.prepare()  # before the first tensor, like a program's imports
    state = workload.state()
    change_wall, change_cpu = quiet_change(workload, state)
    version = QUIET_CHANGES  # quiet_change() has changed every tensor this many times
    tell("baseline", versions=environment.versions(peer.packages))
    peer.open()
    peer.expect(state)
    helpers = peer.helpers()
    tell("opened", helpers=helpers)
    rounds: list[dict[str, Any]] = []
    started = time.monotonic()
    for index in range(count):
        # In every other version the tensors change only when it is durable. In the last version, which is compared at the end, they
        # change right after the save.
        waits = index >= report.WARMING and (count - index) % 2 == 0
        if waits and index > report.WARMING and time.monotonic() - started > seconds:
            break
        tag = f"step{index + 1}"
        cpu = cpu_seconds([os.getpid(), *helpers])
        begun = time.perf_counter()
        if peer.save(tag, state) is False:
            raise RuntimeError(f"{tag} was skipped")
        peer.before_change()
        blocked = time.perf_counter()
        if not waits:
            workload.next_version(state)
        changed = time.perf_counter()
        peer.wait_durable(tag)
        done = time.perf_counter()
        unsynced = watch.unsynced_bytes(peer.folder)
        syncing = time.perf_counter()
        if not peer.durable:
            os.sync()
        durable = done + time.perf_counter() - syncing
        if waits:
            workload.next_version(state)
        time.sleep(REST)
        # Some engines start their processes at the first save.
        helpers = sorted({*helpers, *watch.descendants(os.getpid())})
        rounds.append(
            {
                "blocked": blocked - begun,
                "quiet_change": change_wall,
                "cpu": cpu_seconds([os.getpid(), *helpers]) - cpu - change_cpu,
                "version": version + index,
                "unsynced": unsynced,
            }
        )
        if waits:
            rounds[-1]["durable"] = durable - begun
        else:  # a background save slows the next steps down: that is part of its cost
            rounds[-1] |= {
                "change": changed - blocked,
                "change_slower": (changed - blocked) - change_wall,
                "durable_changed": durable - begun,
            }
        if index + 1 == min(count, report.WARMING):
            tell("warm")
    idle = cpu_seconds(helpers)
    time.sleep(2)
    tell("saved", rounds=rounds, idle_cpu=(cpu_seconds(helpers) - idle) / 2)
    peer.close()


def run_torch_in_memory(workload: Workload) -> None:
    """Measures torch.save into memory: the median of seven runs."""
    state = workload.state()
    seconds = []
    for _ in range(7):
        begun = time.perf_counter()
        torch.save(state, io.BytesIO())
        seconds.append(time.perf_counter() - begun)
    tell("saved", seconds=median(seconds))


def evict(folder: Path) -> None:
    """Drops a directory's files from the page cache. As root, drops the whole page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def cache(folder: Path) -> None:
    """Has the page cache hold all files of a directory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                while file.read(1 << 24):
                    pass


def run_load(peer: Peer, workload: Workload, tag: str, version: int, cold: bool, cached: bool, into: bool) -> None:
    peer.prepare()
    peer.open()
    # The first tensor of a process starts torch's threads. That is not part of a load.
    torch.ones(1 << 20).sum()
    target = {name: torch.ones(size) for name, size in workload.sizes.items()} if into else None
    if cold:
        evict(peer.folder)
    if cached:
        cache(peer.folder)
    begun = time.perf_counter()
    if target is None:
        state = peer.load(tag, workload.sizes)
    else:
        peer.load_into(tag, target)
        state = target
    loaded = time.perf_counter()
    for tensor in state.values():
        tensor.sum()
    touched = time.perf_counter()
    wrong = workload.differs(state, version)
    tell("loaded", load=loaded - begun, touched=touched - begun, wrong=wrong)
    peer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["save", "load", "torch-in-memory", *loops.TASKS])
    parser.add_argument("peer")
    parser.add_argument("workload")
    parser.add_argument("folder", type=Path)
    parser.add_argument("memory", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--tag")
    parser.add_argument("--version", type=int)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--into", action="store_true")
    args = parser.parse_args()
    workload = workloads.load(args.workload)
    if args.quick:
        workload = workload.quick()
    workload = workload.scaled(args.scale)
    peer = peers.load(args.peer)(args.folder, args.memory)
    if args.task == "save":
        run_save(peer, workload, args.count, args.seconds)
    elif args.task == "torch-in-memory":
        run_torch_in_memory(workload)
    elif args.task in loops.TASKS:
        loops.TASKS[args.task](peer, workload, tell, args.scale)
    else:
        run_load(peer, workload, args.tag, args.version, args.cold, args.cached, args.into)


if __name__ == "__main__":
    # The output of a peer must not mix with the lines of the protocol.
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
