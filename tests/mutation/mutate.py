"""Changes the rules of commit, removal and retention one place at a time, and looks whether a test notices.

    python tests/mutation/mutate.py [--count 60] [--seed 1] [--files src/store/order.c,...] [--seconds 900]

Each mutant differs from the sources in one place of one line: a comparison, a condition that is negated, a statement that is left out, a number that
is one off. All mutants of the sample are compiled at once, in a copy of the sources in build-mutants, and $NB_MUTANT chooses one when a program starts.
Each test first runs without a change: this shows which mutants' lines it executes, and it runs for those alone, the quickest test first. The tests are the C
tests of the mutant's file, 100 stories of a job that moves between nodes (tests/campaign/requeue.py), the tests of whole agents, and losses of power.
A mutant is killed if it does not compile, or if a test fails or takes four times as long as without it. A mutant that survives all tests must be in
survivors.txt, with the reason; else the exit code is 1.

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PLACE, BUILD = ROOT / "build-mutants", ROOT / "build-mutants/build"
LIST = Path(__file__).with_name("survivors.txt")
STORE = ["order_test", "writer_test", "tag_log_test", "thin_test", "remove_test", "sweep_test", "view_test", "commit_test"]
COMMIT = ["coverage_test", "files_test", "commit_test", "commit_test_mem", "search_test", "ancestry_test"]
RETAIN = ["retention_test", "retain_test", "thin_test", "commit_test"]
TESTS: dict[str, list[str]] = {  # of each file: the quickest and nearest first
    **dict.fromkeys(("src/store/order.c", "src/store/tag_log.c", "src/store/manifest_remove.c", "src/store/manifest_check.c", "src/store/thin.c"), STORE),
    **{path: ["writer_test", "commit_test", *STORE] for path in (f"src/store/writer{part}.c" for part in ("", "_manifest", "_sign"))},
    **dict.fromkeys((f"src/agent/commit/{part}.c" for part in ("ancestry", "carry_over", "commit", "commit_end", "commit_rule", "coverage", "lineage", "node_documents", "world", "world_end")), COMMIT),
    **dict.fromkeys((f"src/agent/persist/{part}.c" for part in ("retain", "retain_items", "retain_rules")), RETAIN),
    "src/agent/catalogue/retention.c": RETAIN,
    "src/agent/persist/retain_items.c": [*RETAIN, "test_keep_items.py"],  # in Python, with the agent of the build
    "src/agent/commit/lineage.c": [*COMMIT, "test_lines.py"],
}  # fmt: skip
LATER = [
    *("requeue-player", "find_test", "agent_test_mem", "world_test_mem", "removal_crash_test", "store_crash_test", "scan_test", "index_test", "rebuild_test"),
    *("mend_test", "waiting_test", "lanes_test", "known_test", "history_test", "verdict_test", "find_wait_test", "survival_log_test", "replica_test", "lease_test"),
]
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


HEAD = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int nb_mutant = -1;
static const char *nb_seen_path;

__attribute__((constructor)) static void nb_mutant_read(void)
{
        const char *number = getenv("NB_MUTANT");

        if (number)
                nb_mutant = atoi(number);
        nb_seen_path = getenv("NB_MUTANT_SEEN");
}

/* Writes at once, because many of these processes are killed. */
static inline __attribute__((unused)) int nb_seen(int number)
{
        static unsigned char is_seen[COUNT];
        char text[16];
        int fd;

        if (!nb_seen_path || is_seen[number])
                return 0;
        is_seen[number] = 1;
        fd = open(nb_seen_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        snprintf(text, sizeof text, "%d\n", number);
        if (fd < 0 || write(fd, text, strlen(text)) < 0 || close(fd))
                abort();
        return 0;
}
"""


def run(words: list[object], seconds: float, **variables: object) -> bool:
    """Returns whether the command succeeds in time."""
    environment = os.environ | {"MALLOC_PERTURB_": "165"} | {name: str(value) for name, value in variables.items()}  # freed memory is overwritten
    process = subprocess.Popen(list(map(str, words)), cwd=BUILD, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def probed(lines: list[str], at: int, call: str) -> str | None:
    """The line with a call before it. None: it does not begin a statement."""
    before = next((text for text in (line.split("/*")[0].rstrip() for line in reversed(lines[:at])) if text), "{")
    line, indent = lines[at], re.match(" *", lines[at])[0]
    if match := re.match(r"( *(?:\} )?else if \()", line):
        return f"{match[1]}{call}, {line[match.end() :]}"
    if before[-1] in ";{}:" and line[len(indent)] not in "}{.":
        return f"{indent}{call}; {line[len(indent) :]}"
    if not re.match(r" *((\} )?else|(else )?(if|for|while) \(.*\))$", before):
        return None
    match = re.match(r" *(return |if \(|while \()?(?!for|if|while)", line)
    return f"{match[0]}{call}, {line[match.end() :]}"


class Function(NamedTuple):
    """The lines of a body, without its braces."""

    begin: int
    end: int
    is_void: bool


def function_at(lines: list[str], at: int) -> Function:
    begin = next(i for i in range(at, 0, -1) if lines[i] == "{")
    end = next(i for i in range(at, len(lines)) if lines[i] == "}")
    first = next(i for i in range(begin - 1, 0, -1) if re.match(r"\w", lines[i]))
    return Function(begin + 1, end, bool(re.match(r"(static |inline )*void \w", lines[first])))


def with_mutants(path: str, sample: dict[int, Mutant], dull: set[int]) -> tuple[str, list[int | None], list[int]]:
    """The text of a file that holds its mutants, and of each line the number of the mutant, or None, and the line that it was.

    The environment chooses one mutant when a program starts: a function has its body once more for each mutant in it. In the sound body nb_seen says which
    mutants' lines are executed. Of those in `dull` lines it says that the function is."""
    lines = (ROOT / path).read_text().splitlines()
    bodies: dict[int, tuple[Function, list[int]]] = {}
    sound, entered = list(lines), {}
    for number, mutant in sample.items():
        function = function_at(lines, mutant.line)
        bodies.setdefault(function.begin, (function, []))[1].append(number)
        one = None if mutant.line in dull else probed(sound, mutant.line, f"nb_seen({number})")
        sound[mutant.line] = one or sound[mutant.line]
        if not one:
            entered.setdefault(function.begin, []).append(number)
    text = HEAD.replace("COUNT", str(max(sample) + 1)).splitlines()
    owners: list[int | None] = [None] * len(text)
    places = [-1] * len(text)
    for at, line in enumerate(sound):
        function, numbers = bodies.get(at, (None, []))
        for number in numbers:
            body, mutant = lines[at : function.end], sample[number]
            labels = [label for label in re.findall(r"(?m)^ *([a-z_]+):$", "\n".join(body)) if label != "default"]
            body[mutant.line - at] = body[mutant.line - at].replace(mutant.before, mutant.after)
            opening = f"if (nb_mutant == {number}) {{" + "".join(f" __label__ {label};" for label in labels)
            text += [opening, *body, "return; }" if function.is_void else "__builtin_trap(); }"]
            owners += [number] * (len(body) + 2)
            places += [at] * (len(body) + 2)
        calls = "".join(f"nb_seen({number}); " for number in entered.get(at, []))
        text.append(calls + line)
        owners.append(None)
        places.append(at)
    return "\n".join(text) + "\n", owners, places


class Bench:
    """A copy of the sources with the mutants of a sample in it, its build, and how long each test takes without a change."""

    def __init__(self, sample: list[Mutant]) -> None:
        PLACE.mkdir(exist_ok=True)
        changed = {mutant.path for mutant in sample}
        self.sample, self.refused = sample, set()
        for name in subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
            if (ROOT / name).is_file() and not (name in changed and (PLACE / name).exists()):
                self.copy(name, (ROOT / name).read_bytes())
        if not (BUILD / "build.ninja").exists():
            linker = next((name for name in ("lld", "gold") if shutil.which(f"ld.{name}")), None)  # of scripts/build.sh
            subprocess.run(["meson", "setup", BUILD, PLACE, "-Dpython=false", "-Dtests=true", "-Dwerror=false", "-Doptimization=1", "-Ddebug=false"], env=os.environ | ({"CC_LD": linker} if linker else {}), check=True, stdout=subprocess.DEVNULL)
        for path in sorted(changed):
            self.compile(path)
        names = subprocess.run(["ninja", "-C", BUILD, "-t", "targets", "all"], check=True, capture_output=True, text=True).stdout
        self.programs = {Path(line.split(":")[0]).name: line.split(":")[0] for line in names.splitlines() if "c_LINKER" in line}
        self.tests = list(dict.fromkeys(test for path in sorted(changed) for test in [*TESTS[path], *LATER]))
        wanted = {"nebula", *(test.removesuffix("_mem") for test in self.tests if not test.endswith(".py"))}
        subprocess.run(["ninja", "-C", BUILD, "--quiet", *(self.programs[name] for name in sorted(wanted))], check=True)
        self.usual: dict[str, float] = {}
        self.seen: dict[str, set[int]] = {}
        for test in self.tests:
            self.look(test)

    def copy(self, name: str, content: bytes) -> None:
        """What has not changed is not compiled again."""
        copy = PLACE / name
        if not copy.exists() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)

    def compile(self, path: str) -> None:
        """Leaves out the mutants that do not compile."""
        dull: set[int] = set()
        while True:
            mutants = {number: mutant for number, mutant in enumerate(self.sample) if mutant.path == path and number not in self.refused}
            text, owners, places = with_mutants(path, mutants, dull) if mutants else ((ROOT / path).read_text(), [], [])
            self.copy(path, text.encode())
            done = subprocess.run(["ninja", "-C", BUILD, "--quiet", f"../{path}^"], capture_output=True, text=True)
            if done.returncode == 0:
                return
            wrong = [int(number) - 1 for number in re.findall(rf"{re.escape(path)}:(\d+):\d+: error:", done.stdout)]
            refused, lines = {owners[at] for at in wrong} - {None}, {places[at] for at in wrong if owners[at] is None}
            if not refused and not lines - dull:
                sys.exit(f"{path} with its mutants does not compile:\n{done.stdout[-4000:]}")
            self.refused |= refused
            dull |= lines

    def words(self, test: str) -> list[object]:
        name = test.removesuffix("_mem")
        if test.endswith(".py"):
            agent = f"NEBULA_AGENT_PATH={BUILD / self.programs['nebula']}"
            return ["env", "-C", ROOT, agent, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/python/{test}"]
        if test == "requeue-player":
            return [sys.executable, ROOT / "tests/mutation/stories.py", BUILD / self.programs[name], 100]
        return ["env", *(["NEBULA_TEST_STORE=mem"] if test != name else []), f"./{self.programs[name]}"]

    def look(self, test: str) -> None:
        """How long the test takes without a change, and which mutants' lines it executes."""
        seen = PLACE / f"seen-{test}"
        seen.unlink(missing_ok=True)
        begun = time.monotonic()
        if not run(self.words(test), 300, NB_MUTANT_SEEN=seen):
            sys.exit(f"{test} fails without a change")
        self.usual[test] = time.monotonic() - begun
        self.seen[test] = set(map(int, seen.read_text().split())) if seen.exists() else set()

    def survives(self, number: int) -> bool:
        """A test that never executes the mutant's line cannot notice it."""
        tests = dict.fromkeys([*TESTS[self.sample[number].path], *LATER])
        near = [test for test in tests if number in self.seen[test]]
        if number in self.refused:
            return False
        return all(run(self.words(test), max(4 * self.usual[test], 20), NB_MUTANT=number) for test in sorted(near, key=self.usual.__getitem__))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", default=",".join(TESTS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at once")
    parser.add_argument("--seconds", type=float, default=1e9, help="ends the sample early")
    parser.add_argument("--only", default="", help="mutants whose text has this, in place of a sample")
    given = parser.parse_args(arguments)
    known = dict(line.rsplit(" # ", 1) for line in LIST.read_text().splitlines() if line and not line.startswith("#"))
    everything = [mutant for path in given.files.split(",") for mutant in mutants_of(path)]
    sample = [one for one in everything if given.only in str(one)] if given.only else random.Random(given.seed).sample(everything, min(given.count, len(everything)))
    if stale := known.keys() - {str(one) for one in map(str, (mutant for path in TESTS for mutant in mutants_of(path)))}:
        sys.exit("survivors.txt names places that are not in the sources any more:\n" + "\n".join(sorted(stale)))
    begun, ends, new = time.monotonic(), Counter(), []
    bench = Bench(sample)

    def judge(number: int) -> bool | None:
        return bench.survives(number) if time.monotonic() - begun < given.seconds else None

    with ThreadPoolExecutor(given.jobs) as pool:
        for mutant, lives in zip(sample, pool.map(judge, range(len(sample))), strict=True):
            if lives is None:
                continue
            ends["explained" if lives and str(mutant) in known else "survived" if lives else "killed"] += 1
            if lives and str(mutant) not in known:
                new.append(mutant)
                print(f"    survives: {mutant.path}:{mutant.line + 1}: {mutant.before} -> {mutant.after}", flush=True)
    print(f"{sum(ends.values())} of {len(everything)} mutants: {ends['killed']} killed, {ends['explained']} survive and are explained, {ends['survived']} survive; {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
