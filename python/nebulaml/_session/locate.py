"""Finds the parts of an installation: the agent's executable and, for ``NEBULA_AGENT=inline``, its library."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

__all__ = ["agent_path", "point_to_agent_library"]

_PACKAGE = Path(__file__).resolve().parents[1]


def agent_path() -> str | None:
    """Returns the path of this installation's ``nebula`` executable. None: the C library searches for it."""
    if os.environ.get("NEBULA_AGENT_PATH"):
        return None
    folders = [_PACKAGE.parent / "bin", Path(sysconfig.get_path("scripts")), Path(sys.prefix) / "bin"]
    for folder in folders:
        candidate = folder / "nebula"
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    return shutil.which("nebula")


def point_to_agent_library() -> None:
    """Tells the C library where a wheel keeps libnebula-agent.so, unless the user has set NEBULA_AGENT_LIBRARY."""
    if os.environ.get("NEBULA_AGENT") != "inline" or os.environ.get("NEBULA_AGENT_LIBRARY"):
        return
    for folder in (_PACKAGE / "lib", Path(sys.prefix) / "lib"):
        candidate = folder / "libnebula-agent.so"
        if candidate.is_file():
            os.environ["NEBULA_AGENT_LIBRARY"] = str(candidate)
            return
