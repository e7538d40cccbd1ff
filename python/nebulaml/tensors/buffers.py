"""The parts of a file, for programs that have not imported torch."""

from __future__ import annotations

import _thread
import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .. import _nebula
from ..errors import NebulaConfigError

__all__ = ["Capture", "Copies", "append", "is_buffer", "listed", "ranges"]

PIECE_BYTES = 8 << 20  # that are copied at once
_PIECE = struct.Struct("=QQQ")  # to, from, bytes
_MOST = (1 << 64) - 1
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


class Copies:
    """The copies of parts that never change, for _nebula's save: a thread makes them after the save has returned."""

    overlap = True

    def __init__(self, found: _nebula.Ranges, constant: Sequence[int]) -> None:
        self._ranges = found
        self._copied: Any = None  # a lock that the thread holds
        self._process = 0  # which has the thread
        for index in constant:
            address, size, _ = found[index]
            if size:
                found.put_on(0, index, address)

    def start(self, image: int, size: int, offsets: list[int]) -> None:
        self.finish()  # of an earlier agent's image
        pieces = self._ranges.pieces(0, image, offsets, 1, _MOST, PIECE_BYTES)
        self._copied, self._process = _thread.allocate_lock(), os.getpid()
        self._copied.acquire()
        try:
            _thread.start_new_thread(_copy, (pieces, self._copied))  # a threading.Thread would wait until it runs
        except RuntimeError:  # there is none to be had
            _copy(pieces, self._copied)

    def finish(self) -> None:
        """Waits until every byte is in the image."""
        if self._copied is not None and self._process == os.getpid():  # a forked child does not have the thread
            with self._copied:
                pass


def _copy(pieces: bytes, copied: Any) -> None:
    try:
        for to, source, size in _PIECE.iter_unpack(pieces):
            ctypes.memmove(to, source, size)
    finally:
        copied.release()
