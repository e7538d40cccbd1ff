"""Where adapters keep what nobody has named a place for: not in a framework's checkpoint directory, of which programs take each entry for
a checkpoint."""

from __future__ import annotations

import contextlib
import os

__all__ = ["beside", "make", "tidy"]

HIDDEN = ".nebula"
WITHIN = "_nebula"  # push_to_hub uploads all but what begins with "_"


def beside(directory: str, suffix: str = "") -> str:
    """``<parent>/.nebula/<name><suffix>`` for ``<parent>/<name>``.

    It is ``<parent>/<name>/_nebula<suffix>`` where the parent is closed to this user, or is another file system: a container's own, say,
    which goes with it, and from which nothing can be renamed to here.
    """
    directory = os.path.realpath(directory)
    parent, name = os.path.split(directory)
    hidden = os.path.join(parent, HIDDEN)
    above = _existing(hidden)
    if name and os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK) and os.stat(above).st_dev == os.stat(_existing(directory)).st_dev:
        return os.path.join(hidden, name + suffix)
    return os.path.join(directory, WITHIN + suffix)


def make(directory: str) -> None:
    """As a framework does that saves there, with this program's umask: what it does next may need the directory, if not the file. If it
    cannot be made, the agent says so when the file is due."""
    with contextlib.suppress(OSError):
        os.makedirs(directory, exist_ok=True)


def _existing(path: str) -> str:
    """The path, or what of it is there already."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def tidy(path: str) -> None:
    """Removes a directory of beside() that nothing lies in any more, and what held it alone."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
        if os.path.basename(os.path.dirname(path)) == HIDDEN:
            os.rmdir(os.path.dirname(path))
