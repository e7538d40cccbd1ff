"""Documents of JSON at places where another program may have put anything: each read ends with a value, an OSError or a ValueError."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any

__all__ = ["load", "parse", "read", "whole"]

MOST = 32 << 20  # bytes; as for a document of the agent


def read(path: str | os.PathLike[str], most: int = MOST) -> bytes:
    """Returns the content of a regular file. Does not wait for a FIFO. Raises OSError, also if there are more than `most` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return content


def parse(text: str | bytes) -> Any:
    """As json.loads(), but raises ValueError also for lists and objects that are nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as failure:
        raise ValueError("lists or objects are nested too deep") from failure


def load(path: str | os.PathLike[str], most: int = MOST) -> Any:
    """Returns the value in a file."""
    return parse(read(path, most))


def whole(value: Any) -> int:
    """Returns a number of JSON as an int. Raises ValueError or TypeError for another value, and for an infinite number."""
    try:
        return int(value)
    except OverflowError as failure:
        raise ValueError(str(failure)) from failure
