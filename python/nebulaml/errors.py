"""The exceptions of the package.

Each message names the object, the expected value, the found value and the remedy. ``status`` groups failures by what
is lost (see ``enum nebula_status`` in ``nebula.h``). ``errno`` and ``http_status`` are 0 if they do not apply.
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
    """The base class of all failures of Nebula."""

    status: str = "failed"
    http_status: int = 0
    errno: int | None = 0

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class NebulaConfigError(NebulaError, ValueError):
    """A setting, tag or name that is not allowed."""

    status = "invalid"


class NebulaNotFound(NebulaError, KeyError):
    """There is no such checkpoint, or no such file in it. The message lists those that exist."""

    status = "not-found"


class NebulaCorrupt(NebulaError):
    """Bytes differ from those that were written."""

    status = "corrupt"


class NebulaStorageError(NebulaError, OSError):
    """Storage refused a request, failed, or is full."""

    status = "storage"


class NebulaTimeout(NebulaError, TimeoutError):
    """A wait ran out of time. Trying again may succeed."""

    status = "timeout"


class NebulaUnavailable(NebulaError):
    """No agent answers, or the package is not complete. This is no ImportError, which DeepSpeed would take for "not installed"."""

    status = "unavailable"


class NebulaPicklingError(NebulaError, TypeError, pickle.PicklingError):
    """An object that cannot be pickled. The message gives the path to the part that cannot."""

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
    """Returns the exception for a failure of the C library."""
    status = status.lower().replace("_", "-").replace(" ", "-").removeprefix("nebula-")
    error = _CLASSES.get(status, NebulaError)(message)
    error.status = status
    error.errno = errno
    error.http_status = http_status
    return error
