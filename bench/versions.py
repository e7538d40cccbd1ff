"""What a save costs beside the versions that a storage path has.

    python -m bench.versions --counts 10 1000 100000

For each count, `make_version` of the C tests fills a directory in memory. Then one rank saves a file of 256 KiB again and again, each
version as soon as the one before is durable, with keep_last=1 and keep_every=1: the agent applies the rules to all versions, and all
stay. Times are medians in milliseconds: how long the save and commit hold up the trainer, and from their begin until the version is
committed and durable.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAKER = ROOT / "build/tests/unit/cli/make_version"
BYTES = 256 << 10
STEPS = 40
WARM = 3  # the first one waits until the agent has read all manifests


def agent_mib(runtime: Path) -> float:
    pid = int((runtime / "pid").read_text()) if (runtime / "pid").exists() else 0
    for status in [Path(f"/proc/{pid}/status")] if pid else Path("/proc").glob("[0-9]*/status"):
        try:
            environment = (status.parent / "environ").read_bytes()
            text = status.read_text()
        except OSError:
            continue
        if f"NEBULA_RUNTIME_DIR={runtime}".encode() in environment and text.startswith("Name:\tnebula"):
            return int(text.split("VmRSS:")[1].split()[0]) / 1024
    return 0.0


def save_all(storage: Path, count: int) -> list[tuple[float, float, float]]:
    """Runs in a process of its own. Returns (blocked, committed, durable) of each version, in ms."""
    import nebulaml as nm
    from nebulaml._session import engine

    nm.init(str(storage), 0, on_error="raise", keep_last=1, keep_every=1)
    session, content, times = engine.session(), bytearray(os.urandom(BYTES)), []
    for step in range(count + 1, count + WARM + STEPS + 1):
        begun = time.perf_counter()
        checkpoint = session.begin(f"global_step{step}", -2)
        checkpoint.save_bytes("shard.bin", content)
        checkpoint.commit()
        blocked = time.perf_counter()
        checkpoint.wait("committed", 600_000)
        committed = time.perf_counter()
        checkpoint.wait("durable", 600_000)
        times.append(tuple(1000 * (at - begun) for at in (blocked, committed, time.perf_counter())))
    return times[WARM:]


def measure(base: Path, count: int) -> None:
    storage, runtime, memory = base / "storage", base / "run", base / "memory"
    for folder in (storage, runtime, memory):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    subprocess.run([MAKER, storage, "global_step", "--count", str(count), "--threads", "2", "x.pt=4"], check=True)
    environment = {**os.environ, "NEBULA_RUNTIME_DIR": str(runtime), "NEBULA_MEMORY_DIR": str(memory), "NEBULA_AGENT_LINGER": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.versions", "--save-in", str(storage), "--counts", str(count)],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    print(f"| {count:,} | {done.stdout.strip()} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.versions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 1000, 100_000])
    parser.add_argument("--save-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.save_in:
        times = save_all(args.save_in, args.counts[0])
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        print(" | ".join(f"{one:.2f}" for one in medians), f"| {agent_mib(Path(os.environ['NEBULA_RUNTIME_DIR'])):.0f}")
        return
    print("| versions in the path | save and commit, ms | committed after, ms | durable after, ms | memory of the agent, MiB |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    base = Path(tempfile.mkdtemp(prefix="nebula-versions-", dir="/dev/shm"))
    try:
        for count in args.counts:
            measure(base, count)
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
