"""How soon a worker that was killed trains again, on one node.

    python -m bench.recover [--rounds 5] [--mib 64] [--imports torch,torch._dynamo]

Each round kills the worker of each way by SIGKILL, one way after the other. The time goes from the kill to the end of the first step after it.
`nebula run` restores from memory, and its template imports what the job imports, as it would from the second run on. torchrun's job saves by
torch.save into a directory in memory, and loads from there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = """
import os, sys, time
for name in sys.argv[4].split(","):
    __import__(name)
import torch
way, base, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = torch.nn.Linear(1024, mib * 256, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
done = 0
if way == "torch":
    path = f"{base}/checkpoint.pt"
    if os.path.exists(path):
        found = torch.load(path)
        model.load_state_dict(found["model"])
        done = found["step"]
else:
    import nebulaml as nm
    manager = nm.Manager(f"{base}/storage", keep_last=1)
    found = manager.restore({"model": model, "optimizer": optimizer})
    done = found.step if found else 0
while True:
    optimizer.zero_grad()
    model(torch.ones(1, 1024)).square().mean().backward()
    optimizer.step()
    done += 1
    with open(f"{base}/steps", "a") as steps:
        print(done, os.getpid(), time.time(), file=steps)
    if done % 5 == 0 and way == "torch":
        torch.save({"model": model.state_dict(), "step": done}, path + ".new")
        os.replace(path + ".new", path)
    elif done % 5 == 0:
        manager.save(done, {"model": model, "optimizer": optimizer})
    time.sleep(0.05)
"""

WAYS = {
    "`nebula run`": ("nebula", ["-m", "nebulaml.elastic.run", "--warm", "IMPORTS"]),
    "`nebula run --warm off`": ("nebula", ["-m", "nebulaml.elastic.run", "--warm", "off"]),
    "`torchrun`, torch.save": ("torch", ["-m", "torch.distributed.run"]),
}


def steps_of(base: Path) -> list[tuple[int, int, float]]:
    try:
        rows = [line.split() for line in (base / "steps").read_text().split("\n") if line]
    except FileNotFoundError:
        return []
    return [(int(step), int(pid), float(at)) for step, pid, at in (row for row in rows if len(row) == 3)]


def await_step(base: Path, least: int, not_pid: int = 0) -> tuple[int, int, float]:
    """Waits for a step of a process other than `not_pid`, which has done so many."""
    while True:
        rows = [row for row in steps_of(base) if row[1] != not_pid]
        if len(rows) >= least:
            return rows[0]
        time.sleep(0.02)


def one(way: str, options: argparse.Namespace) -> float:
    kind, command = WAYS[way]
    command = [options.imports if word == "IMPORTS" else word for word in command]
    base = Path(tempfile.mkdtemp(prefix="recover-", dir="/dev/shm"))
    environment = {**os.environ, "NEBULA_RUNTIME_DIR": str(base / "run"), "NEBULA_MEMORY_DIR": str(base / "memory"), "NEBULA_AGENT_LINGER": "1"}
    (base / "memory").mkdir()
    (base / "job.py").write_text(JOB)
    job = subprocess.Popen(
        [sys.executable, *command, "--standalone", "--nproc_per_node=1", "--max_restarts=9", base / "job.py", kind, base, str(options.mib),
         options.imports],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        await_step(base, 21)
        pid = steps_of(base)[-1][1]
        os.kill(pid, signal.SIGKILL)
        killed = time.time()
        return await_step(base, 1, pid)[2] - killed
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        job.wait()
        shutil.rmtree(base, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.recover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--imports", default="torch,torch._dynamo")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            seconds[way].append(one(way, options))
    print(f"{options.mib} MiB of state, imports {options.imports}, {os.cpu_count()} cores, {options.rounds} rounds\n")
    print("| way | from the kill to the next step, s | least | most |\n| --- | --- | --- | --- |")
    for way, found in seconds.items():
        print(f"| {way} | **{statistics.median(found):.2f}** | {min(found):.2f} | {max(found):.2f} |")


if __name__ == "__main__":
    main()
