"""What grows with a job: the work for one save beside more versions, files and jobs.

    python -m bench.growth [--only versions files jobs] [--plot docs/scale.png]

Each row is an agent and a program of their own, in a directory in memory.

versions: `make_version` of the C tests fills a storage path. Then one rank saves a file of 256 KiB again and again, each version as soon as the
    one before is durable, with keep_last=1 and keep_every=1: the agent applies the rules to all versions, and all stay.
files: one rank saves versions of so many files of 1 KiB.
jobs: one agent serves so many jobs, each with a storage path and a version. One of them saves a file of 1 KiB again and again.

Times are medians in milliseconds: how long a save and its commit hold up the trainer, and from their begin until the version is durable. The
CPU time of the agent is its mean for a save, or "for each" file of a version.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAKER = ROOT / "build/tests/unit/cli/make_version"
SIZES = {"versions": [10, 100, 1000, 10_000, 100_000], "files": [10, 100, 1000, 10_000], "jobs": [10, 100, 300, 1000]}
SAVES = 200  # of one file, so that the CPU time is many ticks of 10 ms
WARM = 3  # the first saves wait until the agent has read all manifests
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def agent_of(runtime: Path) -> Path:
    """Returns the directory of the agent in /proc."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (place / "comm").read_text() == "nebula\n" and f"NEBULA_RUNTIME_DIR={runtime}\0" in (place / "environ").read_text():
                return place
        except OSError:
            continue
    raise RuntimeError("there is no agent")


def cpu_ms(agent: Path) -> float:
    fields = (agent / "stat").read_text().rpartition(")")[2].split()
    return TICK_MS * (int(fields[11]) + int(fields[12]))


def saves(session: Any, first: int, count: int, save: Callable[[Any, int], None]) -> list[tuple[float, float]]:
    """Returns (blocked, durable) of each version, in ms."""
    times = []
    for step in range(first, first + count):
        begun = time.perf_counter()
        checkpoint = session.checkpoint(f"global_step{step}")
        save(checkpoint, step)
        checkpoint.commit()
        blocked = time.perf_counter()
        checkpoint.wait("durable", 600)
        times.append((1000 * (blocked - begun), 1000 * (time.perf_counter() - begun)))
    return times


def measured(what: str, size: int, storage: Path) -> dict[str, float]:
    """Runs in a process of its own."""
    import nebulaml as nm

    def open_session(path: Path, **settings: Any) -> Any:
        return nm.Session(path, persistent_time_interval=0, on_error="raise", world=1, **settings)

    def save(checkpoint: Any, step: int) -> None:
        content[:8] = step.to_bytes(8, "little")
        for number in range(each):
            checkpoint.save_bytes(f"shard{number}.bin", content)

    first, each = 1, 1
    content = bytearray(os.urandom(256 << 10 if what == "versions" else 1 << 10))
    if what == "versions":
        session, first = open_session(storage, keep_last=1, keep_every=1), size + 1
    elif what == "jobs":
        sessions = [open_session(storage / str(job)) for job in range(size)]
        for one in sessions:
            saves(one, 0, 1, save)
        session = sessions[0]
    else:
        session, each = open_session(storage, keep_last=2), size

    count = SAVES if each == 1 else max(3, SAVES // each)
    saves(session, first, WARM if each < 1000 else 1, save)
    agent = agent_of(Path(os.environ["NEBULA_RUNTIME_DIR"]))
    before = cpu_ms(agent)
    times = saves(session, first + WARM, count, save)
    blocked, durable = (statistics.median(column) for column in zip(*times, strict=True))
    memory = int((agent / "status").read_text().split("RssAnon:")[1].split()[0]) / 1024
    return {"blocked": blocked, "durable": durable, "cpu": (cpu_ms(agent) - before) / count / each, "memory": memory}


def measure(base: Path, what: str, size: int) -> dict[str, float]:
    place = base / f"{what}-{size}"
    storage, runtime, memory = (place / name for name in ("storage", "run", "memory"))
    for folder in (storage, runtime, memory):
        folder.mkdir(mode=0o700, parents=True)
    if what == "versions":
        subprocess.run([MAKER, storage, "global_step", "--count", str(size), "--threads", "2", "x.pt=4"], check=True)
    environment = {**os.environ, "NEBULA_RUNTIME_DIR": str(runtime), "NEBULA_MEMORY_DIR": str(memory), "NEBULA_AGENT_LINGER": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.growth", "--row", what, str(size), str(storage)],
        env=environment, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    shutil.rmtree(storage, ignore_errors=True)  # the agent may still remove versions
    return json.loads(done.stdout)


def plot(rows: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(1, len(rows), figsize=(4 * len(rows), 3.2), squeeze=False)
    for (what, found), axis in zip(rows.items(), axes[0], strict=True):
        axis.loglog(list(found), [one["cpu"] for one in found.values()], "o-", label="CPU time of the agent")
        if what != "files":
            axis.loglog(list(found), [one["blocked"] for one in found.values()], "s--", label="save and commit")
        axis.set_xlabel({"versions": "versions in the path", "files": "files of a version", "jobs": "jobs of the agent"}[what])
        axis.set_ylabel("ms for each file" if what == "files" else "ms for each save")
        axis.set_ylim(0.01, 100)
        axis.legend()
        axis.grid(alpha=0.3)
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--most", type=int, default=100_000, help="leave out larger sizes")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measured(args.row[0], int(args.row[1]), Path(args.row[2]))))
        return
    base, rows = Path(tempfile.mkdtemp(prefix="nebula-growth-", dir="/dev/shm")), {}
    try:
        for what in args.only:
            each = " for each" if what == "files" else ""
            print(f"| {what} | save and commit, ms | durable after, ms | CPU of the agent{each}, ms | memory of the agent, MiB |")
            print("| ---: | ---: | ---: | ---: | ---: |")
            rows[what] = {size: measure(base, what, size) for size in SIZES[what] if size <= args.most}
            for size, one in rows[what].items():
                print(f"| {size:,} | {one['blocked']:.2f} | {one['durable']:.1f} | {one['cpu']:.2f} | {one['memory']:.0f} |")
            print(flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
