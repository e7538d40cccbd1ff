"""``make bench-peaks``: the most memory that saves take, as a multiple of the state.

It counts all memory of the trainer, of the agent and of the memory tier, beyond what the trainer had before its first save. The table of
bench/results/peaks.md is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import environment, peers, report, run
from .watch import Watch

TENSORS = 20
SAVES = 5
REST_S = 0.5  # after each save: the copies end, and images go back
SLOW_S = 60  # a slow storage takes longer for one version than all saves
WAYS = {
    "all": "all weights trained",
    "frozen": "10 % trained, 90 % frozen",
    "two": "all weights trained, `num_of_version_in_retention=2`",
    "dcp": "DCP's cached stager",
}
COLUMNS = {"one": "one save", "quick": f"{SAVES} saves, each durable before the next", "slow": f"{SAVES} saves, none durable before the last"}


def child(folder: Path, way: str, column: str, mib: int) -> None:
    """Says when it is about to save, and when it has saved. Waits for a line on its input after each."""
    import nebulaml as nm
    import torch

    state = {str(i): torch.full(((mib << 18) // TENSORS,), float(i)) for i in range(TENSORS)}
    save = stager(state) if way == "dcp" else None
    if not save:
        nm.init(str(folder / "storage"), 0 if column == "quick" else None, 2 if way == "two" else None, on_error="raise")
        save = saver(nm, state, column == "quick")
    else:
        import torch.distributed.checkpoint.staging  # noqa: F401 - its memory is not that of a save
    print(flush=True)
    sys.stdin.readline()
    for step in range(1 if column == "one" else SAVES):
        save(step)
        time.sleep(REST_S)
        for i in range(0 if way != "frozen" else TENSORS * 9 // 10, TENSORS):
            state[str(i)].add_(1)
    print(flush=True)
    sys.stdin.readline()


def stager(state: dict[str, Any]) -> Any:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    options = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
    keeps = DefaultStager(options)
    return lambda _step: keeps.stage(state)


def saver(nm: Any, state: dict[str, Any], waits: bool) -> Any:
    def save(step: int) -> None:
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("state.pt", state)
        checkpoint.wait("durable" if waits else "captured", timeout=300)

    return save


def measure(root: Path, way: str, column: str, mib: int) -> float:
    """Returns the peak of one process's saves, as a multiple of the state."""
    nebula = peers.load("nebula")
    with run.places(root) as (folder, memory):
        variables = {**os.environ, **nebula.environment(folder, memory, fresh=False), "OMP_WAIT_POLICY": "passive"}
        if column == "slow":
            variables["NEBULA_STORE_MBPS"] = str(max(1, (mib << 20) // 10**6 // SLOW_S))
        command = [sys.executable, "-m", "bench.peaks", "--child", str(folder), way, column, str(mib)]
        process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            said = process.stdout.readline()
            with Watch(process.pid, memory) as watch:
                if way != "dcp":
                    status = nebula.command("status", "--json", environment=variables)
                    watch.pids.append(json.loads(status.stdout)["agent"]["pid"])
                process.stdin.write("\n")
                process.stdin.flush()
                said = said and process.stdout.readline()
            if not said:
                raise RuntimeError(f"the process that saves ended with {process.wait()}")
            process.stdin.close()
            if column != "slow":
                process.wait()
            return watch.peak / (mib << 20)
        finally:
            process.kill()
            process.wait()
            nebula.clean(variables)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peaks", description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--dir", type=Path, default=Path("out"), help="a directory of the file system to measure")
    parser.add_argument("--quick", action="store_true", help="a state of 64 MiB; the documentation is left alone")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, way, column, mib = args.child
        child(Path(folder), way, column, int(mib))
        return 0
    mib = 64 if args.quick else args.mib
    args.dir.mkdir(parents=True, exist_ok=True)
    where = environment.describe(args.dir)
    head = f"### Peaks of {mib} MiB in one file, as multiples of the state"
    lines = [head, "", "|  | " + " | ".join(COLUMNS.values()) + " |", "|---|---:|---:|---:|"]
    for way, title in WAYS.items():
        peaks = [measure(args.dir, way, column, mib) for column in COLUMNS]
        lines.append(f"| {title} | " + " | ".join(f"{peak:.2f}" for peak in peaks) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", *report.environment(where)]
    if not args.quick:
        report.publish("peaks", "make bench-peaks", "The memory of saves", lines)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
