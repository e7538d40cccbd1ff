"""``make bench-mpi``: a mini-app of MPI that saves every few steps, with Nebula beside VELOC, SCR and plain files.

Each library has its recommended form for one node: VELOC's and SCR's scratch is /dev/shm, as Nebula's memory is; both copy to storage in the
background. SCR tells no program when its background copy is done: its durable column is of a run whose saves wait for the copy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .nodes import LIBRARY, NEBULA, ROOT

PEERS = ROOT / ".envs/mpi"
FLAGS = ["-std=gnu17", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror"]


@dataclass
class Engine:
    title: str
    flags: list[str] = field(default_factory=list)
    rpath: Path | None = None

    def build(self, folder: Path) -> Path:
        program = folder / f"miniapp-{self.title.split()[0]}"
        link = [f"-L{self.rpath}", f"-Wl,-rpath,{self.rpath}"] if self.rpath else []
        flags = [flag for flag in self.flags if not flag.startswith("-l")]
        libraries = [flag for flag in self.flags if flag.startswith("-l")]
        subprocess.run(["mpicc", *FLAGS, *flags, ROOT / "bench/miniapp.c", *link, *libraries, "-o", program], check=True)
        return program


ENGINES = {
    "nebula": Engine("Nebula", ["-DWITH_NEBULA", f"-I{ROOT / 'include'}", "-l:libnebula.so"], LIBRARY),
    "veloc": Engine("VELOC 1.8", ["-DWITH_VELOC", f"-I{PEERS / 'include'}", "-lveloc-client"], PEERS / "lib"),
    "scr": Engine("SCR 3.1", ["-DWITH_SCR", f"-I{PEERS / 'include'}", "-lscr"], PEERS / "lib"),
    "files": Engine("plain files, one for each rank"),
}


class Places:
    """The storage and the memory of one job, and the settings of its library."""

    def __init__(self, base: Path, engine: str, program: Path, ranks: int) -> None:
        self.storage = Path(tempfile.mkdtemp(prefix=f"{engine}-", dir=base))
        self.memory = Path(tempfile.mkdtemp(prefix="nebula-bench-mpi-", dir="/dev/shm"))
        self.engine, self.program, self.ranks = engine, program, ranks
        veloc = self.memory / "veloc.cfg"
        scratch = {"SCR_PREFIX": self.storage, "SCR_CACHE_BASE": self.memory, "SCR_CNTL_BASE": self.memory / "control"}
        how = {"COPY_TYPE": "SINGLE", "CACHE_SIZE": 2, "CACHE_BYPASS": 0, "FLUSH": 1, "FLUSH_ASYNC": 1, "FLUSH_TYPE": "PTHREAD"}
        names = {"JOB_ID": 1, "USER_NAME": "bench", "JOB_NAME": "bench"}
        settings = {
            "NEBULA_MEMORY_DIR": self.memory, "NEBULA_RUNTIME_DIR": tempfile.mkdtemp(prefix="nb-"), "NEBULA_AGENT_PATH": NEBULA,
            "VELOC_CONFIG": veloc, "VELOC_BIN": PEERS / "bin", "VELOC_LOG": self.memory,
            "OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1,
            **scratch, **{f"SCR_{key}": value for key, value in (how | names).items()},
        }  # fmt: skip
        self.environment = {**os.environ, **{key: str(value) for key, value in settings.items()}}
        (self.memory / "scratch").mkdir()
        veloc.write_text(
            f"scratch = {self.memory}/scratch\npersistent = {self.storage}\nmode = async\nec_interval = -1\n"
            "scratch_versions = 2\nmax_versions = 2\n"
        )

    def start_background(self) -> None:
        """Starts VELOC's background process, and again if it hangs: a rank that starts it itself would wait for it without end."""
        for _ in range(5):
            command = [PEERS / "bin/veloc-backend", self.environment["VELOC_CONFIG"], "--disable-ec"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended = subprocess.run(command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=10)
                if ended.returncode in (0, -signal.SIGUSR1):  # its daemon's word, which may come before it is awaited
                    return
            self.end_background()
        raise RuntimeError("VELOC's background process does not start")

    def end_background(self) -> None:
        """Ends VELOC's background process, which stays when the job has ended, and removes its socket."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 5
            while (running := self.background()) and time.monotonic() < deadline:
                for process in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
                time.sleep(0.1)
        for left in Path("/dev/shm").glob(f"veloc-*-{os.getuid()}*"):
            left.unlink(missing_ok=True)

    def background(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.environment["VELOC_CONFIG"].encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def run(self, edge: int, steps: int, every: int, waits: bool = False, crash_at: int = 0, ranks: int = 0) -> dict[str, Any]:
        if self.engine == "veloc":
            self.start_background()
        environment = self.environment | ({"SCR_FLUSH_ASYNC": "0"} if waits else {})
        command = ["mpirun", "--oversubscribe", "-n", ranks or self.ranks, self.program, self.storage, edge, steps, every, int(waits), crash_at]
        ran = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, timeout=300)
        found = [line for line in ran.stdout.splitlines() if line.startswith("{")]
        if bool(found) == bool(crash_at):
            raise RuntimeError(f"{self.program.name}: {ran.stderr[-2000:]}")
        return json.loads(found[0]) if found else {}

    def close(self) -> None:
        subprocess.run([NEBULA, "stop", "--now", "--yes"], env=self.environment, capture_output=True)
        self.end_background()
        for place in (self.storage, self.memory, Path(self.environment["NEBULA_RUNTIME_DIR"])):
            shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def places(*arguments: Any) -> Iterator[Places]:
    made = Places(*arguments)
    try:
        yield made
    finally:
        made.close()


def measure(base: Path, name: str, program: Path, chosen: argparse.Namespace) -> dict[str, float]:
    """One round of an engine: saves in the middle of the computation, and saves that wait until they are durable."""
    steps = chosen.every * chosen.saves
    with places(base, name, program, chosen.ranks) as job:
        running = job.run(chosen.edge, steps, chosen.every)
    with places(base, name, program, chosen.ranks) as job:
        waiting = job.run(chosen.edge, 2 * chosen.saves, 2, waits=True)
    blocked, durable = statistics.median(running["blocked"][3:]), statistics.median(waiting["durable"][3:])
    return {"blocked": blocked, "durable": durable}


def resumes(base: Path, name: str, program: Path, chosen: argparse.Namespace, wanted: str, ranks: int) -> str:
    """Kills a rank between two saves, and says where the job goes on, and whether it ends as one that was not killed."""
    steps = 3 * chosen.every
    with places(base, name, program, chosen.ranks) as job:
        job.run(chosen.edge, steps, chosen.every, crash_at=steps - chosen.every // 2)
        try:
            found = job.run(chosen.edge, steps, chosen.every, ranks=ranks)
        except (RuntimeError, subprocess.TimeoutExpired):
            return "no"
    return f"from step {found['from']}{'' if found['sum'] == wanted else ', with other values'}" if found["resumed"] else "no"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mpi", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--edge", type=int, default=144, help="cells of each edge of the grid")
    parser.add_argument("--every", type=int, default=20, help="steps from save to save")
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="nebula-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        built = {}
        for name, engine in ENGINES.items():
            if name in ("veloc", "scr") and not (PEERS / f".{name}").exists():
                print(f"bench-mpi: no {engine.title}: scripts/mpi_peers.sh says why", file=sys.stderr)
                continue
            built[name] = engine.build(base)
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in built}
        for number in range(chosen.rounds):
            for name in list(built) if number % 2 == 0 else reversed(built):
                rows[name].append(measure(base, name, built[name], chosen))
        with places(base, "files", built["files"], chosen.ranks) as job:
            whole = job.run(chosen.edge, 3 * chosen.every, 0)
        size = chosen.edge**3 * 5 * 8
        print(f"{size / 2**20:.0f} MiB of {chosen.ranks} ranks, saved every {chosen.every} steps ({whole['seconds'] / 3:.1f} s), ", end="")
        print(f"{os.cpu_count()} cores, {platform.platform()}\n")
        other = chosen.ranks - 1 or 2
        fewer = f"on {other} rank{'s' * (other > 1)}"
        print(f"| | blocked, ms | durable, s | after SIGKILL of a rank | {fewer} |")
        print("| --- | --- | --- | --- | --- |")
        for name, program in built.items():
            blocked, durable = (statistics.median(row[key] for row in rows[name]) for key in ("blocked", "durable"))
            same, less = (resumes(base, name, program, chosen, whole["sum"], ranks) for ranks in (chosen.ranks, other))
            print(f"| {ENGINES[name].title} | {1000 * blocked:.0f} | {durable:.2f} | {same} | {less} |", flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
