"""Measures jobs that persist to the sink: the reads of several ranks, the bytes that are sent again, and the effect of a slow store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from .. import compare, loops, run, workloads
from .sinks import Sink

JOB = Path(__file__).with_name("job.py")
RANKS = 8
LIMIT_MBPS = 20
POLICIES = ("wait", "stream", "skip")
MEMORY = 3  # versions that fit into memory
SPARE = 4 << 20  # bytes of an image beyond the tensors: headers, and rounding

Row = tuple[str, str, str, bool]  # name, target, measured, reached


class Node:
    """The directories of a new agent."""

    def __init__(self, folder: Path, memory: Path, sink: Sink, **more: str) -> None:
        self.memory = memory
        self.environment = {
            **os.environ,
            **sink.environment(),
            "NEBULA_RUNTIME_DIR": str(folder / "runtime"),
            "NEBULA_MEMORY_DIR": str(memory / "tier"),
            "NEBULA_OUTPUT_DIR": str(folder / "output"),
            **more,
        }

    def start(self, task: str, path: str, size: int, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", JOB, task, path, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**self.environment, **more},
        )

    def stop(self) -> None:
        command = Path(sys.executable).parent / "nebula"
        subprocess.run([command, "stop", "--now", "--yes"], env=self.environment, capture_output=True, check=False)

    def used(self) -> int:
        """Returns the bytes of memory that the tier uses."""
        return sum(path.stat().st_blocks * 512 for path in self.memory.rglob("*") if path.is_file())


@contextmanager
def node(root: Path, sink: Sink, **more: str) -> Iterator[Node]:
    with run.places(root) as (folder, memory):
        found = Node(folder, memory, sink, **more)
        try:
            yield found
        finally:
            found.stop()


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the job ended with {process.wait()}")
    return json.loads(line)


def end(process: subprocess.Popen[str]) -> None:
    process.stdin.close()
    process.wait(timeout=300)
    process.stdout.close()


def sharing(root: Path, size: int) -> list[Row]:
    """Saves two versions that differ in 1 % of their bytes; then eight ranks of a new node load the second."""
    rows: list[Row] = []
    with Sink("--keep") as sink:
        with node(root, sink) as first:
            job, sent = first.start("save", "s3://bench/run", size), []
            for _ in range(2):
                before = sink.counts()["in_bytes"]
                said(job)
                sent.append(sink.counts()["in_bytes"] - before)
                job.stdin.write("\n")
                job.stdin.flush()
            said(job)
            end(job)
        part = sent[1] / sent[0]
        rows.append(
            (
                f"{size >> 20} MiB of which 1 % changed: bytes sent, of the first version's",
                "≤ 2 %",
                f"{part:.1%}",
                part <= 0.02,
            )
        )
        with node(root, sink) as second:
            before = sink.counts()
            world = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
            ranks = [
                second.start("load", "s3://bench/run", size, RANK=str(rank), LOCAL_RANK=str(rank), **world)
                for rank in range(RANKS)
            ]
            found = [said(rank) for rank in ranks]
            for rank in ranks:
                end(rank)
            read = (sink.counts()["out_bytes"] - before["out_bytes"]) / size
        right = read <= 1.02 and not any(result["wrong"] for result in found)
        rows.append(
            (
                f"{RANKS} ranks of a node load one file: bytes read from the store, of the file's",
                "1",
                f"{read:.2f}",
                right,
            )
        )
    return rows


def limited(root: Path, size: int, policy: str) -> list[Row]:
    """Saves ten versions, one every half second, to a store that accepts 20 MB/s."""
    with (
        Sink("--keep", "--mbps", str(LIMIT_MBPS)) as sink,
        node(
            root,
            sink,
            BENCH_ON_FULL=policy,
            NEBULA_MEMORY_BUFFER_SIZE=str(MEMORY * (size + SPARE)),
            NEBULA_SPILL_DIR=str(root.resolve()),
        ) as place,
    ):
        job, peak, over = place.start("in_a_row", "s3://bench/slow", size), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.05):
                peak = max(peak, place.used())

        watcher = threading.Thread(target=watch)
        watcher.start()
        begun = time.perf_counter()
        try:
            result = said(job)
            end(job)
        finally:
            over.set()
            watcher.join()
        took = time.perf_counter() - begun
        command = Path(sys.executable).parent / "nebula"
        listed = subprocess.run(
            [command, "list", "--json", "--path", "s3://bench/slow"],
            env=place.environment,
            capture_output=True,
            text=True,
            check=True,
        )
    versions = json.loads(listed.stdout)["versions"]
    durable = sum("storage" in version["where"] for version in versions)
    taken, images = len(result["taken"]), peak / size
    name = f'10 versions of {size >> 20} MiB to {LIMIT_MBPS} MB/s, on_full="{policy}": '
    blocked = f"{median(result['blocked']) * 1e3:.0f} ms, {max(result['blocked']):.1f} s at most"
    whole = taken == durable and (policy == "skip" or taken == 10)
    return [
        (
            name + "saved, durable",
            "10, 10" if policy != "skip" else "as many as saved",
            f"{taken}, {durable}, within {took:.0f} s",
            whole,
        ),
        (
            name + "memory at its peak, in versions",
            f"≤ {(MEMORY * (size + SPARE) + SPARE) / size:.1f}",
            f"{images:.1f}",
            peak <= MEMORY * (size + SPARE) + SPARE,
        ),
        (name + "a save blocks", "", blocked, True),
    ]


def training(root: Path, scale: float) -> list[Row]:
    """Runs the training loop of `make bench-peers`, with files and with the store."""
    workload = replace(workloads.load("row"), title="training loop", huge=None, variables=loops.ALLOCATOR)
    args = Namespace(dir=root, scale=scale)
    found: dict[str, list[dict[str, Any]]] = {"nebula": [], "nebula_store": []}
    with Sink("--keep") as sink:
        os.environ.update(sink.environment())
        for name, results in found.items():
            results.append(compare.Runner(name, workload, args).measure(compare.train))
        store_counts = sink.counts()
    rows: list[Row] = []
    for key, what in (("blocked", "a save blocks, ms"), ("lost", "time lost per save, ms")):
        files, store = (median(middle(result[key]) for result in results) * 1e3 for results in found.values())
        error = (
            sum(max(result["error"] for result in results) for results in found.values()) * 1e3
            if key == "lost"
            else 0.1 * files
        )
        name, measured = f"a training loop, {what}: an object store, files", f"{store:.1f}, {files:.1f} (± {error:.1f})"
        rows.append((name, "no more than with files", measured, store <= files + error))
    gates = [result["gate"] for results in found.values() for result in results if result["gate"]]
    if gates:
        raise RuntimeError(gates[0])
    cpu = store_counts["cpu_s"] / store_counts["in_bytes"] * 1e9
    rows.append(("a training loop: CPU of the store itself, on the same cores, s per GB", "", f"{cpu:.2f}", True))
    return rows


def middle(value: float | list[float]) -> float:
    return median(value) if isinstance(value, list) else value
