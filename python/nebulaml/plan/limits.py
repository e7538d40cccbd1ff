"""Reads the limits of a machine: from `nebula doctor --measure`, or from its saved output."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from .._session import locate
from ..errors import NebulaConfigError, NebulaNotFound, NebulaUnavailable

__all__ = ["measure", "read"]

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
    try:
        with open(file, encoding="utf-8") as opened:
            content = opened.read()
    except FileNotFoundError:
        raise NebulaNotFound(f"{file} does not exist: --limits takes the output of `nebula doctor --measure --json`") from None
    except (OSError, ValueError) as failure:
        raise NebulaConfigError(f"{file} cannot be read: {failure}") from failure
    return _limits(content, file)


def _limits(content: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(content)["limits"]
        if not isinstance(found, dict):
            raise TypeError("limits is not an object")
    except (ValueError, KeyError, TypeError) as failure:
        raise NebulaConfigError(f"{name} holds no limits ({failure!r}); `nebula doctor --measure --json` writes them") from failure
    return found
