"""``make bench-stores``: measures clients in turn, in rounds, against one sink; then jobs that persist to it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .. import environment, report
from . import jobs, transfers

PACKAGES = tuple(client.package for client in transfers.PYTHONS.values() if client.package)


def job_rows(args: argparse.Namespace) -> list[jobs.Row]:
    size = (256 if args.quick else 1024) << 20
    parts: list[tuple[str, Callable[[], list[jobs.Row]]]] = [("sharing", lambda: jobs.sharing(args.dir, size))]
    parts += [
        (policy, lambda policy=policy: jobs.limited(args.dir, (16 if args.quick else 32) << 20, policy))
        for policy in jobs.POLICIES
    ]
    parts.append(("training", lambda: jobs.training(args.dir, 0.1 if args.quick else 1.0)))
    rows: list[jobs.Row] = []
    for name, measure in parts:
        if args.only and name not in args.only:
            continue
        print(f"job: {name}", file=sys.stderr)
        try:
            rows += measure()
        except (RuntimeError, OSError) as error:
            rows.append((name, "", f"did not run: {error}", False))
    return rows


def versions() -> dict[str, str]:
    """Returns the versions of the Python clients, from their environment."""
    if not transfers.PYTHON.exists():
        return dict.fromkeys(PACKAGES, "absent")
    text = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    done = subprocess.run([transfers.PYTHON, "-c", text, *PACKAGES], capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if not done.returncode else dict.fromkeys(PACKAGES, "absent")


def curl_version() -> str:
    return subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout.split(" (")[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stores", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds, less data; the documentation is left alone")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--only", nargs="+", choices=["transfers", "sharing", *jobs.POLICIES, "training"], help="some parts"
    )
    parser.add_argument("--dir", type=Path, default=Path("out"))
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    rounds, size = args.rounds or (2 if args.quick else 5), (64 if args.quick else 1024) << 20

    where = environment.describe(args.dir) | {"curl and libcurl": curl_version()} | versions()
    lines: list[str] = []
    rows: list[jobs.Row] = []
    found, smaller = {}, {}
    if not args.only or "transfers" in args.only:
        found = transfers.measure(rounds, size, list(transfers.EVERYBODY))
        smaller = transfers.measure(rounds, size // 4, [*transfers.OURS, *transfers.LOOPS])
        lines = transfers.table(found, size) + transfers.table(smaller, size // 4)
        rows = [
            (name, target, f"{value:.2f}", reached) for name, target, value, reached in transfers.targets(found, size)
        ]
    rows += job_rows(args)
    where["load when it ended"] = f"{os.getloadavg()[0]:.1f}"
    head = ["### Targets", "", "| | target | measured | reached |", "|---|---|---:|---|"]
    head += [
        f"| {name} | {target} | {value} | {'yes' if reached else '**no**'} |" for name, target, value, reached in rows
    ]
    lines = [*head, "", *lines, *report.environment(where)]

    results = Path("bench/results")
    full = not args.quick and not args.only
    path = results / ("stores.json" if full else "stores-partial.json")
    path.write_text(json.dumps({"environment": where, "rows": rows, "transfers": found, "smaller": smaller}, indent=1) + "\n")
    if full:
        report.publish("stores", "make bench-stores", "To an object store", lines)
    print("\n".join(lines))
    print(f"All figures: {path}" + (", bench/results/stores.md" if full else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
