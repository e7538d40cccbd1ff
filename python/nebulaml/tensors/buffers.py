"""The parts of a file, for programs that have not imported torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .. import _nebula
from ..errors import NebulaConfigError

__all__ = ["Capture", "append", "is_buffer", "listed", "ranges"]

_SAVE_OBJECTS = "save it with Checkpoint.save()"


class Capture(NamedTuple):
    """``storages[k]`` is (address, size in bytes, owner) of the storage with key k."""

    pickle: bytes | memoryview
    storages: _nebula.Ranges
    whole: bool = False  # `pickle` is a finished file instead
    filler: Any = None  # a device.Filler, which copies the storages whose address is None
    unprotectable: bytes | None = None
    is_plain: bool = False  # tensors and plain values alone


def ranges(parts: Any, name: str, copied: Callable[[Any], Any] | None = None) -> _nebula.Ranges:
    """Returns (address, size, owner) of each part, a bytes-like object. The owner keeps the memory alive.

    copied: gives the bytes of a part that has no contiguous ones itself. None: such a part is refused.
    """
    found = _nebula.Ranges()
    parts = list(listed(parts, name))
    while (index := len(found) + found.extend(parts[len(found) :])) < len(parts):
        append(found, index, parts[index] if copied is None else copied(parts[index]), name)
    return found


def listed(parts: Any, name: str) -> Iterable[Any]:
    """Returns the parts; one alone is a list of one."""
    if is_buffer(parts):
        return [parts]
    if isinstance(parts, str) or not isinstance(parts, Iterable):
        advice = "encode() the text" if isinstance(parts, str) else "give bytes-like objects and tensors"
        raise NebulaConfigError(f"{name!r} is to hold bytes, not a {type_name(parts)}: {advice}")
    return parts


def append(found: _nebula.Ranges, index: int, part: Any, name: str) -> None:
    """Adds a bytes-like object. Its view is the owner: while it lives, the bytes cannot move or be resized."""
    try:
        data = memoryview(part)
    except (TypeError, ValueError, BufferError) as failure:
        raise NebulaConfigError(f"part {index} of {name!r} is a {type_name(part)}, which has no bytes to save: {failure}") from failure
    if not data.c_contiguous:
        raise NebulaConfigError(f"part {index} of {name!r} is a buffer that is not contiguous")
    if "O" in data.format:  # its bytes are addresses of this process
        raise NebulaConfigError(f"part {index} of {name!r} is a {type_name(part)} of Python objects: {_SAVE_OBJECTS}")
    found.append(_nebula.address_of(data), data.nbytes, data)


def is_buffer(obj: Any) -> bool:
    """Whether the object has bytes."""
    try:
        memoryview(obj).release()
    except (TypeError, ValueError, BufferError):
        return False
    return True


def type_name(obj: Any) -> str:
    """Returns the name of the object's type with its module."""
    kind = type(obj)
    return f"{kind.__module__}.{kind.__qualname__}"
