"""``make demo``: three runs of one training job, a table, and out/demo.png."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nebulaml._session import locate

from .job import KILL_DELAY, UNREST, Job, Runner
from .table import lines, verdicts

EVERY = 5


def environment(work: Path, memory: Path) -> dict[str, str]:
    """Returns the environment of the demo's own agent, which no other job on this machine shares."""
    return {
        "NEBULA_RUNTIME_DIR": str(work / "runtime"),
        "NEBULA_MEMORY_DIR": str(memory),
        "NEBULA_OUTPUT_DIR": str(work / "output"),
        "OMP_NUM_THREADS": str(min(os.cpu_count() or 1, 8)),
        # Waiting threads sleep. If they spun, they would slow down everything else on a busy machine.
        "OMP_WAIT_POLICY": "passive",
    }


def stop_agent(variables: dict[str, str]) -> None:
    """Ends the demo's agent. All figures were collected before."""
    command = os.environ.get("NEBULA_AGENT_PATH") or str(locate.agent_path())
    subprocess.run([command, "stop", "--now", "--yes"], env={**os.environ, **variables}, capture_output=True)


def gather(reference: Job, jobs: list[Job]) -> dict:
    """Returns all figures of the table and of the picture."""
    plain = reference.summary(EVERY)
    figures: dict = {"reference": plain, "checkpoint_bytes": reference.checkpoint_bytes, "kill_delay_s": KILL_DELAY}
    figures["unrest"] = reference.unrest(EVERY)
    for job in jobs:
        run = job.summary(EVERY)
        run["inflation"] = run["step_ms"] / plain["step_ms"] - 1
        run["equal"] = verdicts(reference, job)
        figures[job.engine] = run
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    begun = time.monotonic()
    kill_at = args.steps // 2 // EVERY * EVERY + EVERY

    args.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="demo-", dir=args.out)).resolve()
    # If /dev/shm is missing, the agent finds another place.
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    memory = Path(tempfile.mkdtemp(prefix="nebula-demo-", dir=shared))
    variables = environment(work, memory)
    try:
        runner = Runner(work, args.steps, EVERY, variables)
        print(f"A GPT learns Python from the standard library's sources: {args.steps} steps, saved every {EVERY}.\n")
        reference = runner.run("nothing", "uninterrupted, no saves")
        nebula = runner.run("nebula", "Nebula", kill_at)
        torch = runner.run("torch", "torch.save + fsync", kill_at)
        figures = gather(reference, [nebula, torch])
    finally:
        stop_agent(variables)
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)

    (args.out / "demo.json").write_text(json.dumps(figures, indent=1) + "\n")
    from . import picture

    picture.draw(args.out / "demo.png", figures, reference, nebula, torch)
    size = figures["checkpoint_bytes"] / 1e6
    print(f"\n{size:.0f} MB per checkpoint (weights and Adam), on {os.cpu_count()} cores\n")
    print("\n".join(lines(figures)))
    print(f"\nBoth were killed {KILL_DELAY * 1e3:.0f} ms after the save of step {nebula.killed_at_step} began. A kill")
    print("between two saves costs both the same: the steps since the last one.")
    print(f"\nThe picture: {args.out / 'demo.png'}   ({time.monotonic() - begun:.0f} s in all)")
    if figures["unrest"] > UNREST:
        spread = f"{figures['unrest']:.0%}"
        print(f"\nThis machine was busy: step times were spread by {spread} even without saves. Repeat the demo on a")
        print("quiet one before you compare times; what is lost and what is equal does not depend on it.")
    exact = all(all(figures[name]["equal"].values()) for name in ("nebula", "torch"))
    if not exact:
        print("\nThe resumed run differs from the uninterrupted one: this is a bug; please report it.", file=sys.stderr)
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
