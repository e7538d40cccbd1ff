"""Finds agents by their environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def agents(matches: Callable[[set[str]], bool]) -> list[int]:
    """Returns the processes `nebula agent` for whose environment, a set of NAME=value, this is true."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if b"agent" not in (entry / "cmdline").read_bytes().split(b"\0")[1:2]:
                continue
            variables = (entry / "environ").read_bytes()
        except OSError:  # it has ended, or belongs to another user
            continue
        if matches(set(variables.decode(errors="surrogateescape").split("\0"))):
            found.append(int(entry.name))
    return found
