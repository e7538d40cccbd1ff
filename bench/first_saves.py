"""``python -m bench.first_saves``: how long the first three saves of a process block, against the median of its later ones.

Tensors lie in huge pages, in pages of 4 KiB, or were made before nebulaml was imported. Each without and with ``nm.prepare``, and with the
stager of torch.distributed.checkpoint, which keeps its memory. Between two saves the process changes all tensors. The table of
bench/results/first-saves.md is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from . import environment, peers, report, run

KINDS = {"huge": "huge pages", "small": "pages of 4 KiB", "late": "nebulaml imported late"}
WAYS = {"plain": "", "prepared": ", `nm.prepare`", "dcp": ", DCP's cached stager"}
SAVES, FIRST = 10, 3
TENSORS = 16
BOUND_MS, BOUND_TIMES = 3.0, 2.0
DCP_TIMES = 1.2  # the first save without a preparation, against that of DCP's stager
REST_S = 0.3  # between two saves
PREPARED_S = 60


def stage(state: dict[str, Any]) -> list[float]:
    """Returns how long each call of the stager blocked, in milliseconds."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    options = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
    stager, took = DefaultStager(options), []
    for _ in range(SAVES):
        begun = time.perf_counter()
        stager.stage(state)
        took.append((time.perf_counter() - begun) * 1e3)
        for tensor in state.values():
            tensor.add_(1)
        time.sleep(REST_S)
    return took


def child(folder: Path, kind: str, way: str, mib: int) -> None:
    """Saves, and says in milliseconds how long each save blocked."""
    import torch

    def tensors() -> dict[str, torch.Tensor]:
        return {str(i): torch.full(((mib << 18) // TENSORS,), float(i)) for i in range(TENSORS)}

    state = tensors() if kind == "late" else {}
    import nebulaml as nm

    state = state or tensors()
    if way == "dcp":
        print(json.dumps(stage(state)))
        return
    nm.init(str(folder / "storage"), 0, on_error="raise")
    if way == "prepared":
        nm.prepare(state)
        wait_for_memory(mib << 20)
    took = []
    for step in range(SAVES):
        begun = time.perf_counter()
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("state.pt", state)
        took.append((time.perf_counter() - begun) * 1e3)
        checkpoint.wait("durable", timeout=300)
        for tensor in state.values():
            tensor.add_(1)
        time.sleep(REST_S)
    print(json.dumps(took))


def wait_for_memory(size: int) -> None:
    """Waits until the agent has made the images, and for the pages of the last one."""
    nebula = peers.load("nebula")
    until = time.monotonic() + PREPARED_S
    while (
        json.loads(nebula.command("status", "--json").stdout)["agent"]["memory_used"] < size
        and time.monotonic() < until
    ):
        time.sleep(0.1)
    time.sleep(2)


def measure(root: Path, kind: str, way: str, mib: int) -> list[float]:
    nebula = peers.load("nebula")
    with run.places(root) as (folder, memory):
        variables = {**os.environ, **nebula.environment(folder, memory, fresh=False), "OMP_WAIT_POLICY": "passive"}
        variables.pop("THP_MEM_ALLOC_ENABLE", None)
        if kind == "small":
            variables["THP_MEM_ALLOC_ENABLE"] = "0"
        command = [
            sys.executable,
            "-m",
            "bench.first_saves",
            "--child",
            str(folder),
            kind,
            way,
            str(mib),
        ]
        try:
            done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError((done.stderr.splitlines() or ["no reason given"])[-1])
            return json.loads(done.stdout.splitlines()[-1])
        finally:
            nebula.clean(variables)


def row(title: str, runs: list[list[float]], dcp_runs: list[list[float]] | None) -> str:
    """One row of the table: medians over the processes. ``dcp_runs``: the first save is bounded by theirs. Empty: the row is theirs."""
    first = [median(one[i] for one in runs) for i in range(FIRST)]
    later = median(median(one[FIRST:]) for one in runs)
    cells = [report.seconds(value / 1e3) for value in (*first, later)]
    if dcp_runs == []:
        return "| " + " | ".join([title, *cells, "", "", ""]) + " |"
    bound = max(BOUND_TIMES * later, BOUND_MS)
    of_first = bound if dcp_runs is None else DCP_TIMES * median(one[0] for one in dcp_runs)
    reached = first[0] <= of_first and first[1] <= bound
    cells += [report.seconds(value / 1e3) for value in (of_first, bound)]
    return "| " + " | ".join([title, *cells, "yes" if reached else "**no**"]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.first_saves", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--dir", type=Path, default=Path("out"), help="a directory of the file system to measure")
    parser.add_argument("--quick", action="store_true", help="one round of 64 MiB; the documentation is left alone")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, kind, way, mib = args.child
        child(Path(folder), kind, way, int(mib))
        return 0
    rounds, mib = (1, 64) if args.quick else (args.rounds, args.mib)
    args.dir.mkdir(parents=True, exist_ok=True)
    where = environment.describe(args.dir)
    found: dict[tuple[str, str], list[list[float]]] = {(kind, way): [] for kind in KINDS for way in WAYS}
    for index in range(rounds):
        for kind, way in list(found)[:: -1 if index % 2 else 1]:
            found[kind, way].append(measure(args.dir, kind, way, mib))
            print(f"round {index + 1}/{rounds}: {kind}, {way}, ms: {found[kind, way][-1]}", file=sys.stderr)
    where["load when it ended"] = f"{os.getloadavg()[0]:.1f}"
    lines = [
        f"### {mib} MiB in {TENSORS} tensors, {rounds} round{'s' if rounds > 1 else ''}",
        "",
        "|  | first | second | third | median of the later | bound of the first | of the second | reached |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
        *[
            row(KINDS[kind] + WAYS[way], runs, {"plain": found[kind, "dcp"], "prepared": None, "dcp": []}[way])
            for (kind, way), runs in found.items()
        ],
        "",
        *report.environment(where),
    ]
    if not args.quick:
        report.publish("first-saves", "make bench-first", "The first saves of a process", lines)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
