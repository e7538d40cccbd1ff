"""Changes the rules of commit, removal and retention one place at a time, and looks whether a test notices.

    python tests/mutation/mutate.py [--count 60] [--seed 1] [--files src/store/order.c,...] [--seconds 900]

Each mutant differs from the sources in one place of one line: a comparison, a condition that is negated, a statement that is left out, a number that
is one off. Only what the change touches is compiled, in a copy of the sources in build-mutants. A mutant is killed if it does not compile, or if a test
fails or takes four times as long as without it. First the C tests of its file run; what survives meets 100 stories of a job that moves between nodes
(tests/campaign/requeue.py), the tests of whole agents, and losses of power. A mutant that survives all of them must be in survivors.txt, with the reason; else the exit code is 1.

Left out are lines about memory that is not there, messages and clean-up, whose changes no user can see.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PLACE, BUILD = ROOT / "build-mutants", ROOT / "build-mutants/build"
LIST = Path(__file__).with_name("survivors.txt")
STORE = ["order_test", "writer_test", "tag_log_test", "thin_test", "remove_test", "sweep_test", "view_test", "commit_test"]
COMMIT = ["coverage_test", "commit_test", "commit_test_mem", "search_test", "ancestry_test"]
RETAIN = ["retention_test", "thin_test", "commit_test"]
TESTS: dict[str, list[str]] = {  # of each file: the quickest and nearest first
    **dict.fromkeys(("src/store/order.c", "src/store/tag_log.c", "src/store/manifest_remove.c", "src/store/manifest_check.c", "src/store/thin.c"), STORE),
    **{path: ["writer_test", "commit_test", *STORE] for path in (f"src/store/writer{part}.c" for part in ("", "_manifest", "_sign"))},
    **dict.fromkeys((f"src/agent/commit/{part}.c" for part in ("ancestry", "carry_over", "commit", "commit_end", "commit_rule", "coverage", "lineage", "node_documents", "world", "world_end")), COMMIT),
    **dict.fromkeys((f"src/agent/persist/{part}.c" for part in ("retain", "retain_items", "retain_rules")), RETAIN),
    "src/agent/catalogue/retention.c": RETAIN,
}  # fmt: skip
LATER = ["requeue-player", "find_test", "agent_test_mem", "world_test_mem", "removal_crash_test", "store_crash_test"]
UNSEEN = re.compile(r"error_set|log_event|complain|NO_MEMORY|\bfree\(|_done\(|snprintf|calloc|malloc|strcpy|lock_take|lock_give|catalogue_(un)?lock|\bos_?->now|static const|^\s*(/?\*|//|#|case |default:|goto |break|continue|[a-z_]+:$)|^(static|enum|bool|void|int|struct|const)\b|^[^ ]")
SWAPS = [(" == ", " != "), (" != ", " == "), (" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" && ", " || "), (" || ", " && "), (" + 1", ""), (" - 1", "")]


class Mutant(NamedTuple):
    path: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.after}"


def mutants_of(path: str) -> list[Mutant]:
    found = []
    for number, line in enumerate((ROOT / path).read_text().splitlines()):
        text = line.split("/*")[0].rstrip()
        if UNSEEN.search(text) or not text.strip():
            continue
        changed = [text[:at] + new + text[at + len(old) :] for old, new in SWAPS for at in [m.start() for m in re.finditer(re.escape(old), text)]]
        if match := re.fullmatch(r"( +(?:\} )?(?:else )?if )(\(.*\))( \{)?", text):
            changed.append(f"{match[1]}(!{match[2]}){match[3] or ''}")
        if re.fullmatch(r" {8,}[a-z_>\-.\[\]*]+(\(.*\)| \+?= .*|\+\+);", text) and "return" not in text:
            changed.append(re.match(" *", text)[0] + ";")
        if match := re.fullmatch(r"( {8,}return )([^;]+);", text):
            changed += [f"{match[1]}!({match[2]});"] if re.search(r"[!=<>&|]|\bis_|\bhas_", match[2]) else []
        found += [Mutant(path, number, text.strip(), one.strip()) for one in dict.fromkeys(changed)]
    return found


def run(words: list[object], seconds: float) -> bool:
    """Returns whether the command succeeds in time."""
    process = subprocess.Popen(list(map(str, words)), cwd=BUILD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


class Bench:
    """A copy of the sources, its build, and how long each test takes without a change."""

    def __init__(self) -> None:
        PLACE.mkdir(exist_ok=True)
        for name in subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
            path, copy = ROOT / name, PLACE / name
            if path.is_file() and (not copy.exists() or copy.read_bytes() != path.read_bytes()):  # what has not changed is not compiled again
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        if not (BUILD / "build.ninja").exists():
            subprocess.run(["meson", "setup", BUILD, PLACE, "-Dpython=false", "-Dtests=true", "-Doptimization=0", "-Ddebug=false"], check=True, stdout=subprocess.DEVNULL)
        names = subprocess.run(["ninja", "-C", BUILD, "-t", "targets", "all"], check=True, capture_output=True, text=True).stdout
        self.programs = {Path(line.split(":")[0]).name: line.split(":")[0] for line in names.splitlines() if "c_LINKER" in line}
        self.usual: dict[str, float] = {}
        wanted = {test.removesuffix("_mem") for tests in [*TESTS.values(), LATER] for test in tests}
        subprocess.run(["ninja", "-C", BUILD, "--quiet", *(self.programs[name] for name in sorted(wanted))], check=True)

    def passes(self, test: str) -> bool:
        name, is_mem = test.removesuffix("_mem"), test.endswith("_mem")
        words: list[object] = ["env", *(["NEBULA_TEST_STORE=mem"] if is_mem else []), f"./{self.programs[name]}"]
        if test == "requeue-player":
            words = [sys.executable, ROOT / "tests/mutation/stories.py", BUILD / self.programs[name], 100]
        if test not in self.usual:
            begun = time.monotonic()
            assert run(words, 300), f"{test} fails without a change"
            self.usual[test] = time.monotonic() - begun
        return run(words, max(4 * self.usual[test], 10))

    def survives(self, mutant: Mutant) -> bool:
        path = PLACE / mutant.path
        lines = path.read_text().splitlines(keepends=True)
        sound = "".join(lines)
        lines[mutant.line] = lines[mutant.line].replace(mutant.before, mutant.after)
        tests = list(dict.fromkeys(TESTS[mutant.path]))
        for test in [*tests, *LATER]:  # how long each takes
            if test not in self.usual:
                self.passes(test)
        try:
            path.write_text("".join(lines))
            for test in [*tests, *LATER]:
                if not run(["ninja", "-C", BUILD, "--quiet", self.programs[test.removesuffix("_mem")]], 300) or not self.passes(test):
                    return False
            return True
        finally:
            path.write_text(sound)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", default=",".join(TESTS))
    parser.add_argument("--seconds", type=float, default=1e9, help="ends the sample early")
    parser.add_argument("--only", default="", help="mutants whose text has this, in place of a sample")
    given = parser.parse_args(arguments)
    known = dict(line.rsplit(" # ", 1) for line in LIST.read_text().splitlines() if line and not line.startswith("#"))
    everything = [mutant for path in given.files.split(",") for mutant in mutants_of(path)]
    sample = [one for one in everything if given.only in str(one)] if given.only else random.Random(given.seed).sample(everything, min(given.count, len(everything)))
    if stale := known.keys() - {str(one) for one in map(str, (mutant for path in TESTS for mutant in mutants_of(path)))}:
        sys.exit("survivors.txt names places that are not in the sources any more:\n" + "\n".join(sorted(stale)))
    bench, begun, ends, new = Bench(), time.monotonic(), Counter(), []
    for mutant in sample:
        if time.monotonic() - begun > given.seconds:
            break
        lives = bench.survives(mutant)
        ends["explained" if lives and str(mutant) in known else "survived" if lives else "killed"] += 1
        if lives and str(mutant) not in known:
            new.append(mutant)
            print(f"    survives: {mutant}", flush=True)
    print(f"{sum(ends.values())} of {len(everything)} mutants: {ends['killed']} killed, {ends['explained']} survive and are explained, {ends['survived']} survive; {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
