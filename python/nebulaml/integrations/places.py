"""Places in which adapters keep their files if the program has named none.

They are not in a framework's checkpoint directory, because programs take each entry there for a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import zlib

from .. import api

__all__ = ["beside", "is_of_storage", "make", "refusal", "store", "tidy"]

HIDDEN = ".nebula"
OF_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
PROBE_BYTES = 1 << 20  # more than a framework's small files take, tokenizers left aside
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


def store(directory: str, keep_last: int | None = None) -> tuple[api.Session, str]:
    """Returns the session that saves what a framework puts into a directory, and what its tags begin with.

    If no storage path is named, each directory has a storage path of its own. In a path that is named, the tags of each directory begin
    with its name and the checksum of its path: without that, equal tags of two directories would be writings of one version.
    """
    session, is_own = api._session_in(beside(directory), keep_last)
    directory = os.path.realpath(directory)
    return session, "" if is_own else f"{os.path.basename(directory)}-{zlib.crc32(os.fsencode(directory)):08x}/"


def make(directory: str) -> None:
    """Makes a directory with this program's umask, as a framework does that saves there: its next steps may need the directory.

    If that fails, the agent reports it when it writes the file.
    """
    with contextlib.suppress(OSError):
        os.makedirs(directory, exist_ok=True)


def refusal(directory: str) -> str:
    """Returns why a framework could not write its small files into a directory, which this makes. "": it could."""
    try:
        os.makedirs(directory, exist_ok=True)
        # no fsync, which could take as long as all that the agent writes there; NFS reports at the close that it is full
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as failure:
        with contextlib.suppress(OSError):
            os.rmdir(directory)
        return str(failure)
    return ""


def is_of_storage(failure: OSError) -> bool:
    """Returns True if storage is the reason: it is full, cannot be written, or is broken."""
    return failure.errno in OF_STORAGE


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
