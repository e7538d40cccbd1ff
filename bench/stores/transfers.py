"""Measures uploads and downloads of one object, by all clients in turn."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from .sinks import ACCOUNT, PROGRAMS, Sink

CLIENTS = Path(__file__).with_name("clients.py")
PYTHON = Path(".envs/peer-stores/bin/python")
PIECE = 8 << 20
WIDTHS = (2, 8)  # connections of the bare loop; its better result is the limit
TARGET_CPU = {"up": 0.6, "down": 0.4}  # seconds per GB


class Client(NamedTuple):
    title: str
    sums: dict[str, str]  # the checksums that the client checks, by direction
    package: str = ""


NEBULA = {"up": "CRC-64", "down": "CRC-64"}
OURS = {"nebula_s3": Client("Nebula, `s3://`", NEBULA), "nebula_azure": Client("Nebula, `az://`", NEBULA)}
LOOPS = {f"libcurl_{width}": Client(f"libcurl in a C loop, {width} connections", {}) for width in WIDTHS}
BARE = {
    **LOOPS,
    "curl": Client("curl --parallel, 8 connections", {}),
}
PYTHONS = {
    "azure": Client("azure-storage-blob", {}, "azure-storage-blob"),
    "boto3": Client("boto3", {"up": "CRC-32"}, "boto3"),
    "crt": Client("boto3 with awscrt", {"up": "CRC-32"}, "awscrt"),
    "s3torchconnector": Client("s3torchconnector", {"up": "CRC-32C"}, "s3torchconnector"),
    "s3dlio": Client("s3dlio", {}, "s3dlio"),
}
EVERYBODY = {**OURS, **BARE, **PYTHONS}

Figures = dict[str, float]


def ask(command: list[str | Path], sink: Sink) -> Figures:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, **sink.environment()}, timeout=300
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def by_curl(direction: str, sink: Sink, size: int, upload: str, piece: Path) -> Figures:
    """Transfers by the curl command, called once for all pieces. It drops the bytes that it fetches."""
    command = ["curl", "-sS", "--fail", "--noproxy", "*", "--parallel", "--parallel-max", "8", "--parallel-immediate"]
    for number, offset in enumerate(range(0, size, PIECE)):
        if direction == "up":
            command += ["-T", str(piece), "-H", "Expect:", "-o", "/dev/null", f"{upload}&partNumber={number + 1}"]
        else:
            command += [
                "-o",
                "/dev/null",
                "-r",
                f"{offset}-{offset + PIECE - 1}",
                f"{sink.endpoint}/bench/pattern-{size}",
            ]
        command.append("--next")
        command += ["-sS", "--fail", "--noproxy", "*"]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command[:-5], check=True, capture_output=True, timeout=300)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall_s": wall, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def transfer(name: str, direction: str, sink: Sink, size: int, upload: str, piece: Path) -> Figures:
    program = PROGRAMS / "bench-transfer"
    if name == "nebula_s3":
        return ask([program, "engine", direction, "s3://bench", str(size)], sink)
    if name == "nebula_azure":
        return ask([program, "engine", direction, f"az://{ACCOUNT}/bench", str(size)], sink)
    if name.startswith("libcurl_"):
        url = upload if direction == "up" else f"{sink.endpoint}/bench/pattern-{size}"
        return ask([program, "curl", direction, url, str(size), name.removeprefix("libcurl_")], sink)
    if name == "curl":
        return by_curl(direction, sink, size, upload, piece)
    if not PYTHON.exists():
        raise RuntimeError("it is not installed: scripts/peers.sh stores")
    return ask([PYTHON, CLIENTS, name, direction, str(size)], sink)


def measure(rounds: int, size: int, names: list[str]) -> dict[str, Any]:
    """Returns the figures of every transfer, by direction and client, with the sink's own processor time. The order changes each round."""
    found: dict[str, Any] = {direction: {name: [] for name in names} for direction in ("up", "down")}
    piece = Path("/dev/shm") / f"bench-piece-{os.getpid()}"
    piece.write_bytes(os.urandom(PIECE))
    try:
        for index in range(rounds):
            with Sink() as sink:
                upload = sink.begin_upload()
                for direction in ("up", "down"):
                    for name in names[:: -1 if index % 2 else 1]:
                        before = sink.counts()["cpu_s"]
                        try:
                            figures = transfer(name, direction, sink, size, upload, piece)
                            figures["sink_s"] = sink.counts()["cpu_s"] - before
                        except (RuntimeError, subprocess.SubprocessError) as error:
                            figures = {"failed": str(error)}
                        found[direction][name].append(figures)
                        said = figures.get("failed") or f"{size / 1e6 / figures['wall_s']:6.0f} MB/s"
                        print(f"round {index + 1}/{rounds} {direction:<4} {name:<18} {said}", file=sys.stderr)
    finally:
        piece.unlink()
    return found


def figures_of(rounds: list[Figures], size: int) -> dict[str, Any]:
    failed = [entry["failed"] for entry in rounds if "failed" in entry]
    if failed:
        return {"failed": failed[0]}
    gigabytes = size / 1e9
    return {
        "mb_per_s": median(size / 1e6 / entry["wall_s"] for entry in rounds),
        "cpu_per_gb": median(entry["cpu_s"] for entry in rounds) / gigabytes,
        "sink_per_gb": median(entry["sink_s"] for entry in rounds) / gigabytes,
    }


def ratio(found: dict[str, list[Figures]], ours: str, theirs: list[str]) -> float:
    """Returns the time of the fastest other client divided by ours: computed within each round, then the median."""
    ratios = []
    for index, mine in enumerate(found[ours]):
        times = [found[name][index]["wall_s"] for name in theirs if "wall_s" in found[name][index]]
        if times and "wall_s" in mine:
            ratios.append(min(times) / mine["wall_s"])
    return median(ratios) if ratios else float("nan")


def table(found: dict[str, Any], size: int) -> list[str]:
    lines = []
    for direction, title in (("up", "Up"), ("down", "Down")):
        lines += [
            f"### {title}: one object of {size >> 20} MiB",
            "",
            "| | MB/s | of the bare loop | CPU s per GB | of the sink, s per GB | compared on the way |",
            "|---|---:|---:|---:|---:|---|",
        ]
        for name, rounds in found[direction].items():
            client, figures = EVERYBODY[name], figures_of(rounds, size)
            if "failed" in figures:
                lines.append(f"| {client.title} | did not run: {figures['failed']} | | | | |")
                continue
            bare = ratio(found[direction], name, list(LOOPS))
            lines.append(
                f"| {client.title} | {figures['mb_per_s']:.0f} | {bare:.2f} | **{figures['cpu_per_gb']:.2f}** "
                f"| {figures['sink_per_gb']:.2f} | {client.sums.get(direction, 'nothing')} |"
            )
        lines.append("")
    return lines


def targets(found: dict[str, Any], size: int) -> list[tuple[str, str, float, bool]]:
    """Returns a row for each target: name, target, value, reached."""
    rows = []
    for direction in ("up", "down"):
        for name, client in OURS.items():
            figures = figures_of(found[direction][name], size)
            if "failed" in figures:
                rows.append((f"{client.title}, {direction}: {figures['failed']}", "", float("nan"), False))
                continue
            cpu, most = figures["cpu_per_gb"], TARGET_CPU[direction]
            rows.append((f"{client.title}, {direction}: client CPU per GB, s", f"≤ {most}", cpu, cpu <= most))
            best = ratio(found[direction], name, list(PYTHONS))
            rows.append((f"{client.title}, {direction}: speed / the fastest Python client's", "≥ 2", best, best >= 2))
            bare = ratio(found[direction], name, list(LOOPS))
            rows.append((f"{client.title}, {direction}: speed / the bare loop's", "≥ 0.8", bare, bare >= 0.8))
    return rows
