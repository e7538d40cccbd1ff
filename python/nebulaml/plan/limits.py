"""Reads what was measured: the limits of a machine by `nebula doctor --measure`, and how a job spent its time by `nebula goodput`."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from .._session import documents, locate
from ..errors import NebulaConfigError, NebulaNotFound, NebulaUnavailable

__all__ = ["measure", "read", "read_goodput", "seconds_of"]

LIMIT_S = 600


def measure(path: str | None) -> dict[str, Any]:
    """Measures this machine and the storage path. Returns bytes per second, and None for what was not measured."""
    command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    if command is None:
        raise NebulaUnavailable("the `nebula` command, which measures the machine, is not found: install the package again")
    line = [command, "doctor", "--measure", "--json", *(["--path", path] if path else [])]
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise NebulaUnavailable(f"the machine cannot be measured by {command}: {failure}") from failure
    found = _limits(done.stdout, f"the answer of {command} doctor --measure")
    if found.get("reason"):
        raise NebulaUnavailable(f"the storage cannot be measured: {found['reason']}")
    return found


def read(file: str) -> dict[str, Any]:
    """Reads a saved output of `nebula doctor --measure --json`, of this machine or another one."""
    return _limits(_content(file, "--limits takes the output of `nebula doctor --measure --json`"), file)


def read_goodput(file: str) -> dict[str, Any]:
    """Reads a saved output of `nebula goodput --json`, for seconds_of()."""
    content = _content(file, "--goodput takes the output of `nebula goodput --json`")
    try:
        return seconds_of(documents.parse(content))
    except (ValueError, KeyError, TypeError) as failure:
        raise NebulaConfigError(f"{file} holds no ledger ({failure!r}); `nebula goodput --json` writes one") from failure


def seconds_of(ledger: dict[str, Any]) -> dict[str, float]:
    """Returns seconds from the answer of `nebula goodput`: mtbf, notice, restart, blocked, step. What is not known is missing."""
    restarts, saves, spent = ledger["restarts"], ledger["saves"], ledger["spent"]
    seconds = {
        "notice": ledger["notice_seconds"],
        "restart": ledger["restart_seconds"] if restarts else None,
        "mtbf": (ledger["wall_seconds"] - spent["paused"]) / restarts if restarts else None,
        "blocked": spent["blocked"] / saves if saves else None,
        "step": ledger["step_seconds"] or None,
    }
    return {name: value for name, value in seconds.items() if value is not None}


def _content(file: str, takes: str) -> str:
    try:
        return documents.read(file).decode()
    except FileNotFoundError:
        raise NebulaNotFound(f"{file} does not exist: {takes}") from None
    except (OSError, ValueError) as failure:
        raise NebulaConfigError(f"{file} cannot be read: {failure}") from failure


def _limits(content: str, name: str) -> dict[str, Any]:
    try:
        found = documents.parse(content)["limits"]
        if not isinstance(found, dict):
            raise TypeError("limits is not an object")
    except (ValueError, KeyError, TypeError) as failure:
        raise NebulaConfigError(f"{name} holds no limits ({failure!r}); `nebula doctor --measure --json` writes them") from failure
    return found
