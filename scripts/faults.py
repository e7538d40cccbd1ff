"""Makes the page of faults: what happens after each, the tests that show it, and where these run. Comments of the tests are its only source.

    faults.py        prints the page, as Markdown

Above a test, or at the head of a file whose tests show it together:

    # fault (Storage): The path is not writable.
    # result: The version stays in memory and can be loaded.
    def test_storage_that_cannot_be_written_stops_nothing_and_is_named(place): ...

    # fault: as test_storage_that_cannot_be_written_stops_nothing_and_is_named
    def test_another_that_shows_it(place): ...
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
GROUPS = ("Storage", "Object stores", "Memory", "Deaths", "Elastic jobs", "Arguments of the caller", "The machine and other users", "Reports")
LEADER = re.compile(r"^\s*(?:#|/?\*+/?)?\s?")
HEAD = re.compile(r"fault(?: \(([^)]*)\))?: (.*)")
DEFINED = re.compile(r"^ *def (test_\w+)\(|^static void (\w+)\(|^[A-Z_]+\((\w+)\)$")
BEGUN = re.compile(r"#include|import |from ")
SKIPPED = re.compile(r"skipif\(.*(?:NIGHTLY|MANY|LONG)|^@pytest\.mark\.nightly(?:\(.*\))?$|^@full$", re.M)


@dataclasses.dataclass
class Fault:
    group: str
    text: str
    result: str
    tests: list[tuple[Path, str]]


class Wrong(Exception):
    """A comment that is not of the form above."""


def blocks(path: Path) -> Iterator[tuple[list[str], str]]:
    """Yields each run of comment lines that is about faults, with the name of the test below it; "": it is about the file."""
    lines = path.read_text().splitlines()
    begun = next((at for at, line in enumerate(lines) if BEGUN.match(line)), 0)
    at = 0
    while at < len(lines):
        if not HEAD.fullmatch(LEADER.sub("", lines[at]).removesuffix(" */")) or not lines[at].lstrip().startswith(("#", "/*", "*")):
            at += 1
            continue
        comment = []
        while lines[at].lstrip().startswith(("#", "/*", "*")) and not lines[at].startswith("#include"):
            comment.append(LEADER.sub("", lines[at]).removesuffix("*/").strip())
            if lines[at].rstrip().endswith("*/"):  # what follows is another comment
                at += 1
                break
            at += 1
        found = "" if at <= begun else next(filter(None, (DEFINED.match(line) for line in lines[at:])), "")
        yield comment, next(filter(None, found.groups())) if found else ""


def faults() -> list[Fault]:
    """Returns all faults, in the order of the page. Raises Wrong if a comment names no test or group."""
    found: dict[tuple[Path, str], list[Fault]] = {}
    others: list[tuple[Path, str, str]] = []
    for path in sorted(path for path in TESTS.rglob("*") if path.suffix in (".c", ".py")):
        for comment, name in blocks(path):
            fault = None
            for line in comment:
                head = HEAD.fullmatch(line)
                if head and head[2].startswith("as ") and not head[1]:
                    others.append((path, name, head[2].removeprefix("as ")))
                    fault = None
                elif head:
                    if head[1] not in GROUPS:
                        raise Wrong(f"{path}: a fault of {head[1]!r}: the groups are {', '.join(GROUPS)}")
                    fault = Fault(head[1], head[2], "", [(path, name)])
                    found.setdefault((path, name), []).append(fault)
                elif fault and line.startswith("result: "):
                    fault.result = line.removeprefix("result: ")
                elif fault and line:
                    if fault.result:
                        fault.result += f" {line}"
                    else:
                        fault.text += f" {line}"
    for path, name, main in others:
        named = [each for (file, test), each in found.items() if main == (test or str(file.relative_to(TESTS)))]
        if len(named) != 1:
            raise Wrong(f"{path}: `fault: as {main}` names {len(named)} tests")
        for fault in named[0]:
            fault.tests.append((path, name))
    every = [fault for each in found.values() for fault in each]
    for fault in every:
        if not fault.result:
            raise Wrong(f"{fault.tests[0][0]}: the fault {fault.text!r} has no result")
    return sorted(every, key=lambda fault: GROUPS.index(fault.group))


def where(path: Path, name: str) -> str:
    """Returns the command that runs a test."""
    text = path.read_text()
    short = re.search(r"^SHORT_TESTS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    above = text.split(f"def {name}(")[0].rpartition("\n\n")[2] if name else ""
    if SKIPPED.search(above) or (path.parent.name == "frameworks" and not (short and any(part in name for part in short[1].split(" or ")))):
        return "`make nightly`"
    return "`make test`, longer in `make nightly`" if "NEBULA_TEST_NIGHTLY" in text or "mark.nightly" in above else "`make test`"


def page() -> str:
    lines = [
        "# Faults, and the tests of each", "",
        "This page is made from comments of the tests (`scripts/faults.py`). [durability.md](durability.md) says what each state promises.", "",
        "`fault/` fails every k-th system call of a whole persist, recovery and retention with EIO, ENOSPC, ENOMEM, EINTR and short",
        "transfers; `make test` fails each with EIO, and each fourth in the other ways. At each",
        "such point `crash/` loses, tears and reorders all data that was not synced.",
    ]  # fmt: skip
    group = ""
    for fault in faults():
        if fault.group != group:
            group = fault.group
            lines += ["", f"## {group}", "| fault | result | tests | run by |", "| --- | --- | --- | --- |"]
        tests = [f"`{path.relative_to(TESTS)}{f'::{name}' if name else ''}`" for path, name in fault.tests]
        runs = dict.fromkeys(where(path, name) for path, name in fault.tests)
        lines.append(f"| {fault.text} | {fault.result} | {', '.join(tests)} | {'; '.join(runs)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.stdout.write(page())
