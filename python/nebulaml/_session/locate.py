"""Finds the agent's executable of this installation."""

from __future__ import annotations

import functools
import os
import sys

__all__ = ["agent_path"]


def agent_path() -> str | None:
    """Returns the path of this installation's ``nebula`` executable. None: the C library searches for it."""
    if os.environ.get("NEBULA_AGENT_PATH"):
        return None
    return _installed()


@functools.cache  # its imports fail when the interpreter ends: engine._leave() calls it before
def _installed() -> str | None:
    import shutil
    import sysconfig  # these two take a fifth of the time of `import nebulaml`

    packages = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    for folder in (os.path.join(packages, "bin"), sysconfig.get_path("scripts"), os.path.join(sys.prefix, "bin")):
        candidate = os.path.join(folder, "nebula")
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return shutil.which("nebula")
