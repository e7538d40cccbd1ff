#!/usr/bin/env python3
"""Prints what ninja has to build for the C tests outside some suites: test_programs.py BUILD SUITE..."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

build, *left_out = sys.argv[1:]
meson = Path(sys.executable).with_name("meson")
tests = json.loads(subprocess.run([meson, "introspect", "--tests", build], check=True, stdout=subprocess.PIPE).stdout)
here = Path(build).resolve()
programs = set()
for test in tests:
    if not {suite.rpartition(":")[2] for suite in test["suite"]} & {*left_out, "long", "localstack"}:
        programs |= {word for word in map(Path, test["cmd"]) if word.is_relative_to(here) and ".." not in word.parts}
print(*sorted(program.relative_to(here) for program in programs))
