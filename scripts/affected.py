"""Runs the tests of what has changed since a commit, and always the faults, the crashes and one kill.

    affected.py [COMMIT]        COMMIT: the last one, so that the changes are those not committed; build and package must be up to date

The tree of tests/unit mirrors src: a change of src/store/x.c runs the tests of tests/unit/store. A change of python/nebulaml/room/x.py runs the
files of tests/python that are named for the module or its room, or import it. A changed test runs itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
ALWAYS = "tests/integration/test_survival.py::test_sigkill_of_everything_at_once"
NEEDS_MORE = ("tests/frameworks/", "tests/model/", "tests/studio/")  # environments of their own, or minutes


def changed(base: str) -> set[Path]:
    """Returns the files that differ from the commit, and those that git does not know yet."""
    commands = (["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"])
    return {Path(line) for command in commands for line in subprocess.check_output(command, cwd=ROOT, text=True).split()}


def c_tests(files: set[Path]) -> list[str]:
    """Returns the names of meson's tests: those in the rooms of the changed files.."""
    rooms = {str(file.parent.relative_to("src")) for file in files if file.parts[0] == "src" and len(file.parts) > 2}
    rooms |= {str(file.parent.relative_to("tests/unit")) for file in files if file.parts[:2] == ("tests", "unit") and len(file.parts) > 3}
    named = {path.stem for room in rooms for path in (ROOT / "tests/unit" / room).glob("*_test.c")}
    suites = json.loads(subprocess.check_output(["meson", "introspect", str(BUILD), "--tests"], text=True))
    return [
        test["name"] for test in suites
        if any(suite.endswith((":fault", ":crash")) for suite in test["suite"])
        or (any(suite.endswith(":unit") for suite in test["suite"]) and test["name"].removesuffix("_mem") in named)
    ]  # fmt: skip


def python_tests(files: set[Path]) -> list[str]:
    """Returns files for pytest."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests/python").glob("test_*.py"))}
    chosen = {ROOT / file for file in files if file.name.startswith("test_") and file.suffix == ".py" and not str(file).startswith(NEEDS_MORE)}
    for file in files:
        if file.parts[:2] != ("python", "nebulaml") or file.suffix != ".py":
            continue
        names = {file.stem, file.parent.name, file.parent.name.lstrip("_")} - {"nebulaml", "__init__"}
        module = ".".join(file.with_suffix("").parts[1:]).removesuffix(".__init__")
        imports = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(module.rpartition('.')[0])} import .*\b{re.escape(file.stem)}\b")
        chosen |= {path for path, text in texts.items() if path.stem.removeprefix("test_") in names or imports.search(text)}
    return [str(path.relative_to(ROOT)) for path in sorted(chosen) if path.exists()]


def main() -> int:
    os.chdir(ROOT)
    files = changed(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
    native, python = c_tests(files), python_tests(files)
    print(f"affected: {len(files)} files, {len(native)} C tests, {len(python)} files of Python tests")
    failed = subprocess.run(["meson", "test", "-C", str(BUILD), "--no-rebuild", "--print-errorlogs", *native]).returncode
    return failed | subprocess.run([sys.executable, "-m", "pytest", "--timeout=300", "-q", ALWAYS, *python]).returncode


if __name__ == "__main__":
    sys.exit(main())
