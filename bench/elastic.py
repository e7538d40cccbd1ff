"""How soon a job of two nodes goes on after the loss of node 0, beyond torchrun's own timeouts.

    python -m bench.elastic [--rounds 5] [--mib 64]

A round is one job: node 0 is lost (SIGKILL for torchrun, worker and agent; its memory is removed), and node 1 trains alone. `--mib` is
the size of the state, which comes from the memory of node 1. The time from the loss to the first step of node 1 has four parts:

    timeouts    torchrun's: keep_alive_interval x keep_alive_max_attempt, then last_call_timeout
    torchrun    the rest of the time until the worker's process begins
    Python      until the worker has imported torch, with what DistributedDataParallel imports
    job         process group, model, restore and the first step

"Beyond" is torchrun + job.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples/elastic-cifar"))
TIMEOUTS_S = 3 * 1 + 3  # of nodes.CONF

JOB = """
import os, sys, time
from pathlib import Path
import torch, torch._dynamo  # DistributedDataParallel imports the latter
import nebulaml as nm
import torch.distributed as dist
imported = time.time()
path, mib = sys.argv[sys.argv.index("--path") + 1], int(sys.argv[sys.argv.index("--mib") + 1])
with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
    started = time.time() - float(uptime.read().split()[0]) + int(stat.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
dist.init_process_group("gloo")
group = time.time()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, mib * 256, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer}
manager = nm.Manager(path, save_every_steps=5, replicated=list(state), replicas=1)
built = time.time()
found = manager.restore(state)
done = 0 if found is None else found.step
restored = time.time()
metrics = nm.MetricsLog(Path(path) / "metrics.jsonl")
metrics.rewind(done)
while not manager.stop_requested:
    optimizer.zero_grad()
    model(torch.ones(1, 1024)).square().mean().backward()
    optimizer.step()
    done += 1
    times = dict(at=time.time(), started=started, imported=imported, group=group, built=built, restored=restored)
    metrics.log(done, world=dist.get_world_size(), **times)
    if manager.should_save(done):
        manager.save(done, state)
    time.sleep(0.02)
manager.leave()
raise SystemExit(143)
"""


def one_round(base: Path, memory: Path, mib: int) -> dict[str, float]:
    """Runs a job that loses node 0. Returns the seconds of each part."""
    from nodes import Nodes

    script = base / "job.py"
    script.write_text(JOB)
    job = Nodes(base, memory, "job", script, ["--mib", str(mib)], offset=4)
    try:
        job.start(0)
        job.start(1)
        job.until_step(20, world=2)
        job.lose(0)
        lost = time.time()
        job.until(lambda: any(row["world"] == 1 and row["at"] > lost for row in job.rows()), "a step of node 1 alone")
        row = next(row for row in job.rows() if row["world"] == 1 and row["at"] > lost)
    finally:
        job.close()
    return {
        "whole": row["at"] - lost,
        "torchrun": row["started"] - lost - TIMEOUTS_S,
        "Python": row["imported"] - row["started"],
        "process group": row["group"] - row["imported"],
        "model": row["built"] - row["group"],
        "restore": row["restored"] - row["built"],
        "step": row["at"] - row["restored"],
        "resumed at step": row["step"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the nodes end, too
    rounds = []
    for _ in range(options.rounds):
        base, memory = (
            Path(tempfile.mkdtemp(prefix="elastic-")),
            Path(tempfile.mkdtemp(prefix="elastic-", dir="/dev/shm")),
        )
        try:
            rounds.append(one_round(base, memory, options.mib))
            print(json.dumps(rounds[-1]), flush=True)
        finally:
            shutil.rmtree(base, ignore_errors=True)
            shutil.rmtree(memory, ignore_errors=True)
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    beyond = [one["whole"] - TIMEOUTS_S - one["Python"] for one in rounds]
    print(f"| part | median of {len(rounds)} |\n| --- | --- |")
    for name in ("whole", "torchrun", "Python", "process group", "model", "restore", "step"):
        print(f"| {name} | {middle[name]:.2f} s |")
    print(
        f"beyond torchrun's timeouts ({TIMEOUTS_S} s) and Python's start: {statistics.median(beyond):.2f} s ({os.cpu_count()} CPUs)"
    )


if __name__ == "__main__":
    main()
