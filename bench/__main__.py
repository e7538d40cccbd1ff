"""``make bench``: measures all competitors on all workloads, in rounds, so that a slow minute of the machine affects all of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from . import environment, peers, report, run, workloads
from .peers.nebula import RETENTION


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_workload(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs the rounds of one workload. A round measures the machine's limits and every competitor once."""
    workload = workloads.load(name)
    if args.quick:
        workload = workload.quick()
    bounds: list[dict[str, float]] = []
    rounds: dict[str, list[dict[str, Any]]] = {peer: [] for peer in args.peers}
    for index in range(args.rounds):
        bounds.append(run.limits(workload, args.dir))
        # Every second round runs in reverse order, so that no competitor always follows the same other one.
        for peer in args.peers[:: -1 if index % 2 else 1]:
            begun = time.monotonic()
            try:
                rounds[peer].append(run.measure(peer, workload, args.dir, args.quick, args.count))
            except (RuntimeError, OSError) as error:
                rounds[peer].append({"failed": str(error)})
                note(f"  {peer}: {error}")
            where = f"round {index + 1}/{args.rounds}, {workload.title}"
            note(f"{where:<40} {peers.load(peer).title:<22} {time.monotonic() - begun:5.1f} s")
    return {
        "title": workload.title,
        "bytes": workload.bytes,
        "limits": {key: median(bound[key] for bound in bounds) for key in bounds[0]},
        "results": {peer: report.figures(rounds[peer], bounds, workload.bytes) for peer in args.peers},
        "rounds": {"limits": bounds, **rounds},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, less data; the documentation is left alone")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--count", type=int, help="versions that each process saves, five at least")
    parser.add_argument("--peers", nargs="+", choices=peers.names(), default=peers.BASIC)
    parser.add_argument("--workloads", nargs="+", choices=workloads.names(), default=workloads.BASIC)
    parser.add_argument("--dir", type=Path, default=Path("out"), help="a directory of the file system to measure")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.count = max(args.count or (5 if args.quick else 7), report.WARMING + 2)
    args.dir.mkdir(parents=True, exist_ok=True)

    where = environment.describe(args.dir)
    found = {name: run_workload(name, args) for name in args.workloads}
    where["load when it ended"] = f"{os.getloadavg()[0]:.1f}"
    lines: list[str] = []
    for name, entry in found.items():
        workload = workloads.load(name)
        if args.quick:
            workload = workload.quick()
        lines += report.table(workload, entry["limits"], entry["results"])
        if name == "large":
            lines += report.targets(entry["results"], RETENTION, workload)
    lines += report.environment(where)

    results = Path("bench/results")
    results.mkdir(exist_ok=True)
    full = not args.quick and args.peers == peers.BASIC and args.workloads == workloads.BASIC
    path = results / ("latest.json" if full else "partial.json")
    path.write_text(json.dumps({"environment": where, "workloads": found}, indent=1) + "\n")
    if full:
        report.publish("bench", "make bench", "Against other ways to save", lines)
    print("\n".join(lines))
    print(f"All figures: {path}" + (", bench/results/bench.md" if full else ""))
    failed = [peer for entry in found.values() for peer, f in entry["results"].items() if f.get("gate") != "passed"]
    return 1 if "nebula" in failed else 0


if __name__ == "__main__":
    sys.exit(main())
