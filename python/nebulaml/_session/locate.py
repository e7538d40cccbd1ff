"""Finds the agent's executable of this installation."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

__all__ = ["agent_path"]

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
