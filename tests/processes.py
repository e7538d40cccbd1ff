"""Finds agents by their environment, and stops processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from waiting import until


def stop(pid: int) -> None:
    """Stops the process, and returns when each of its threads stands still: SIGSTOP alone returns before, and a thread may answer once more."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: not _running(pid), 60, f"the stop of process {pid}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {_running(pid)}") from None


def _running(pid: int) -> list[str]:
    """Returns name, state and place in the kernel of each thread that does not stand still."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "TtZX":
                found.append(" ".join([(task / "comm").read_text().strip(), state, (task / "wchan").read_text(), (task / "syscall").read_text().strip()]))
        except OSError:  # the thread has ended
            continue
    return found


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
