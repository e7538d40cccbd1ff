"""Places in which adapters keep their files if the program has named none.

They are not in a framework's checkpoint directory, because programs take each entry there for a checkpoint.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["beside", "make", "tidy"]

HIDDEN = ".nebula"
WITHIN = "_nebula"  # push_to_hub uploads all names except those that begin with "_"


def beside(directory: str, suffix: str = "") -> str:
    """Returns ``<parent>/.nebula/<name><suffix>`` for ``<parent>/<name>``.

    If this user cannot write to the parent, or the parent is another file system, it returns ``<parent>/<name>/_nebula<suffix>``. Such
    a file system can be a container's own, which is lost with it, and a rename from there to the directory is not possible.
    """
    directory = os.path.realpath(directory)
    parent, name = os.path.split(directory)
    hidden = os.path.join(parent, HIDDEN)
    above = _existing(hidden)
    if name and os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK) and os.stat(above).st_dev == os.stat(_existing(directory)).st_dev:
        return os.path.join(hidden, name + suffix)
    return os.path.join(directory, WITHIN + suffix)


def make(directory: str) -> None:
    """Makes a directory with this program's umask, as a framework does that saves there: its next steps may need the directory.

    If that fails, the agent reports it when it writes the file.
    """
    with contextlib.suppress(OSError):
        os.makedirs(directory, exist_ok=True)


def _existing(path: str) -> str:
    """Returns the path, or its nearest ancestor that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def tidy(path: str) -> None:
    """Removes a directory of beside() if it is empty, and then its parent .nebula if that is empty."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
        if os.path.basename(os.path.dirname(path)) == HIDDEN:
            os.rmdir(os.path.dirname(path))
