"""What can go wrong, as exceptions.

Every message names the object, what was expected, what was found and what to do. ``status`` groups failures by what
is lost (see ``enum nebula_status`` in ``nebula.h``); ``errno`` and ``http_status`` are 0 when they play no part.
"""

from __future__ import annotations

import pickle

__all__ = [
    "NebulaConfigError",
    "NebulaCorrupt",
    "NebulaError",
    "NebulaNotFound",
    "NebulaPicklingError",
    "NebulaStorageError",
    "NebulaTimeout",
    "NebulaUnavailable",
]


class NebulaError(RuntimeError):
    """Anything that Nebula could not do."""

    status: str = "failed"
    http_status: int = 0
    errno: int | None = 0

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class NebulaConfigError(NebulaError, ValueError):
    """A setting, tag or name that cannot be meant."""

    status = "invalid"


class NebulaNotFound(NebulaError, KeyError):
    """No such file in a checkpoint, or no such checkpoint; the message lists what there is."""

    status = "not-found"


class NebulaCorrupt(NebulaError):
    """Bytes that are not those that were written."""

    status = "corrupt"


class NebulaStorageError(NebulaError, OSError):
    """Storage refused, failed, or is full."""

    status = "storage"


class NebulaTimeout(NebulaError, TimeoutError):
    """Not reached within the given time; trying again may succeed."""

    status = "timeout"


class NebulaUnavailable(NebulaError):
    """No agent answers, or the package is not whole. Not an ImportError: DeepSpeed takes that for "not installed"."""

    status = "unavailable"


class NebulaPicklingError(NebulaError, TypeError, pickle.PicklingError):
    """An object that cannot be pickled; the message gives the path to the part that cannot."""

    status = "invalid"


_CLASSES: dict[str, type[NebulaError]] = {
    "timeout": NebulaTimeout,
    "busy": NebulaTimeout,
    "not-found": NebulaNotFound,
    "storage": NebulaStorageError,
    "no-space": NebulaStorageError,
    "corrupt": NebulaCorrupt,
    "unavailable": NebulaUnavailable,
    "internal": NebulaUnavailable,
    "invalid": NebulaConfigError,
}


def from_status(status: str, message: str, errno: int, http_status: int) -> NebulaError:
    """The exception for a failure of the C library."""
    status = status.lower().replace("_", "-").replace(" ", "-").removeprefix("nebula-")
    error = _CLASSES.get(status, NebulaError)(message)
    error.status = status
    error.errno = errno
    error.http_status = http_status
    return error
