"""Processor time of the agent to persist a version: without a look at its values, with the sample, with all. `python -m bench.values`."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = """
import os, sys, torch, nebulaml as nm
from pathlib import Path
root, mebibytes, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
nm.init(root + "/storage", 0, 2)
tensors = {f"layer{i}.weight": torch.randn(4 << 20) for i in range(mebibytes // 16)}
def agent():
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"NEBULA_RUNTIME_DIR={root}/run".encode() in path.read_bytes() and b"agent" in (path.parent / "cmdline").read_bytes():
                return path.parent
        except OSError:
            pass
def ticks():
    fields = (agent() / "stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])
before = 0
for step in range(count + 2):
    for tensor in tensors.values():
        tensor += 1
    if step == 2:  # the first two need new memory
        before = ticks()
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save("model.pt", tensors)
    checkpoint.wait("durable", 600)
print((ticks() - before) / os.sysconf("SC_CLK_TCK") / count)
"""


def measure(mode: str, mebibytes: int, count: int) -> float:
    """Returns seconds of the agent's processor time for one version."""
    from nebulaml._session import locate

    root = Path(tempfile.mkdtemp(prefix="nebula-values-"))
    environment = os.environ | {"NEBULA_RUNTIME_DIR": f"{root}/run", "NEBULA_MEMORY_DIR": f"/dev/shm/{root.name}", "NEBULA_CHECK_VALUES": mode}
    try:
        words = [sys.executable, "-c", JOB, str(root), str(mebibytes), str(count)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout)
    finally:
        subprocess.run([locate.agent_path(), "stop", "--now", "--yes"], env=environment, capture_output=True)
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(f"/dev/shm/{root.name}", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    modes = ("off", "sample", "all")
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(args.rounds):  # in turn: the machine may change meanwhile
        for mode in modes:
            found[mode].append(measure(mode, args.mebibytes, args.versions))
    middle = {mode: statistics.median(times) for mode, times in found.items()}
    lines = [
        "# The look at values\n",
        f"`{' '.join(['python -m bench.values', *sys.argv[1:]])}`: processor time of the agent for a version of {args.mebibytes} MiB of",
        f"float32, the median of {args.rounds} runs of {args.versions} versions.\n",
        "| `NEBULA_CHECK_VALUES` | processor time | beside `off` |\n| --- | --- | --- |",
        *(f"| `{mode}` | {1000 * middle[mode]:.0f} ms | {100 * (middle[mode] / middle['off'] - 1):+.1f} % |" for mode in modes),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
