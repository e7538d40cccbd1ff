"""Each target of tests/fuzz searches for inputs that crash, hang or break its rules, for as long as asked of CPU time.

    python tests/campaign/fuzz.py [--minutes 60] [--jobs 2] [--keep] [TARGET ...]

It builds build-fuzz with clang's libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer. A search begins with the inputs of tests/fuzz/corpus and with those that
earlier searches have found, which stay in build-fuzz/found. With --keep, the inputs that add coverage are copied to tests/fuzz/corpus at the end, as few as
cover the same, each of at most 4 KiB. Each target prints one line; a crash ends it, and the line names the file of the input.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build-fuzz"
SOURCES = ROOT / "tests/fuzz"
LARGEST_KEPT = 4096  # bytes of an input in the tree
SLICE = 300  # seconds after which the CPU time is looked at
CHECKS = "-fsanitize=fuzzer-no-link -fno-sanitize-recover=undefined -g1"


class Searched(NamedTuple):
    cpu: float
    executions: int
    failed: str  # libFuzzer's last lines, "" if nothing was found


def build(targets: list[str]) -> None:
    """libFuzzer needs the sanitizer in the program, not in a library of its own as scripts/build.sh has it."""
    meson = Path(sys.executable).with_name("meson")
    if not (BUILD / "build.ninja").exists():
        options = ("-Dpython=false", "-Dtests=true", "-Db_sanitize=address,undefined", "-Db_lundef=false", f"-Dc_args={CHECKS}")
        subprocess.run([meson, "setup", BUILD, *options], cwd=ROOT, env={**os.environ, "CC": "clang"}, check=True, stdout=subprocess.DEVNULL)
    names = [f"tests/fuzz/fuzz_{target}" for target in targets]
    subprocess.run([meson.with_name("ninja"), "-C", BUILD, "--quiet", *names], check=True)


def libfuzzer(target: str, *arguments: str) -> tuple[int, str, float]:
    """Runs the target. Returns its exit status, its messages and the CPU seconds that it took."""
    with tempfile.TemporaryFile() as log:
        fuzzer = subprocess.Popen([BUILD / f"tests/fuzz/fuzz_{target}", *arguments], stdout=subprocess.DEVNULL, stderr=log, preexec_fn=os.setpgrp)
        _, status, used = os.wait4(fuzzer.pid, 0)
        log.seek(0)
        return os.waitstatus_to_exitcode(status), log.read().decode(errors="replace"), used.ru_utime + used.ru_stime


def search(target: str, seconds: float) -> Searched:
    found, crashes = BUILD / "found" / target, BUILD / "crashes"
    found.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(exist_ok=True)
    cpu, executions, seed = 0.0, 0, time.time_ns() % 2**31
    while cpu < seconds:
        status, said, used = libfuzzer(
            target, f"-max_total_time={max(1, round(min(SLICE, seconds - cpu)))}", f"-seed={seed}", "-max_len=65536", "-timeout=60", "-rss_limit_mb=2048",
            "-print_final_stats=1", f"-artifact_prefix={crashes}/{target}-", str(found), str(SOURCES / "corpus" / target),
        )  # fmt: skip
        cpu, seed = cpu + used, seed + 1
        done = re.search(r"stat::number_of_executed_units: (\d+)", said)
        executions += int(done[1]) if done else 0
        if status:
            return Searched(cpu, executions, "\n".join(said.splitlines()[-40:]))
    return Searched(cpu, executions, "")


def keep(target: str) -> int:
    """Copies the found inputs that add coverage to those of the tree. Returns their number."""
    kept = SOURCES / "corpus" / target
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as merged:
        for one in [*kept.iterdir(), *(BUILD / "found" / target).iterdir()]:
            if one.stat().st_size <= LARGEST_KEPT:
                shutil.copy(one, small)
        status, said, _ = libfuzzer(target, "-set_cover_merge=1", merged, str(kept), small)
        if status:
            raise SystemExit(said)
        for one in Path(merged).iterdir():
            shutil.copy(one, kept / one.name[:12])
        return len(list(Path(merged).iterdir()))


def main() -> int:
    every = sorted(path.stem.removeprefix("fuzz_") for path in SOURCES.glob("fuzz_*.c"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[*every, []], metavar="TARGET", help=f"of {', '.join(every)}; without one, all")
    parser.add_argument("--minutes", type=float, default=60, help="of CPU time, for each target")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="targets at a time")
    parser.add_argument("--keep", action="store_true", help="add what was found to tests/fuzz/corpus")
    given = parser.parse_args()
    targets = given.targets or every
    build(targets)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    failed = False
    with ThreadPoolExecutor(given.jobs) as pool:
        for target, searched in zip(targets, pool.map(lambda target: search(target, given.minutes * 60), targets), strict=True):
            inputs = len(list((BUILD / "found" / target).iterdir()))
            print(f"{target}: {searched.executions:,} executions in {searched.cpu / 60:.1f} min of CPU time, {inputs} inputs", flush=True)
            if searched.failed:
                failed = True
                print(searched.failed, flush=True)
            elif given.keep:
                print(f"{target}: {keep(target)} more in {SOURCES / 'corpus' / target}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
