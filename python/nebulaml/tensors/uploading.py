"""Copies loaded bytes onto devices, through pinned memory.

A device reads memory that is not pinned at a fraction of its speed, and one thread copies slower than a device reads. So a few
threads, the lanes, each have a stream and two pinned buffers: the thread fills one while the device empties the other.

    uploads = Uploads(map_location)
    place = uploads.place(location)         the device on which a storage of the file belongs; None: no device that this module knows
    uploads.add(address, storage, offset, size)   as often as needed; `storage` lies on that device
    uploads.run()                           returns when the values are there
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from . import device
from .device_backends import PIECE

__all__ = ["Uploads"]

BUFFER_BYTES = 8 << 20  # pinned memory takes long to make: 64 MiB in all
LANES = 4
Piece = tuple[int, int, int]  # address on the device, address on the host, bytes


class Uploads:
    """The copies of one load."""

    def __init__(self, map_location: Any = None) -> None:
        self._map_location = map_location
        self._pieces: dict[int, list[Piece]] = {}  # by device
        self._targets: list[torch.UntypedStorage] = []  # the pieces hold only their addresses
        self._places: dict[str, int | None] = {}  # by location: a file has few, and many storages

    def place(self, location: str) -> int | None:
        if location not in self._places:
            wanted = location if self._map_location is None else self._map_location
            self._places[location] = device.target(wanted) if isinstance(wanted, (str, torch.device)) else None
        return self._places[location]

    def empty(self, place: int, size: int) -> torch.UntypedStorage:
        """Returns a storage of that device without values."""
        return device.loading().allocate(place, size)

    def add(self, place: int, address: int, storage: torch.UntypedStorage, offset: int, size: int) -> None:
        """Adds a copy. Host memory and storage must stay as they are until run() returns."""
        self._pieces.setdefault(place, []).append((storage.data_ptr() + offset, address, size))
        self._targets.append(storage)

    def run(self) -> None:
        for place, pieces in self._pieces.items():
            _Run(place, _batches(pieces)).run()
        self._pieces.clear()
        self._targets.clear()


def _batches(pieces: list[Piece]) -> list[bytes]:
    """Packs the pieces, in batches that each fit into a buffer. It splits large pieces."""
    batches: list[bytearray] = [bytearray()]
    room = BUFFER_BYTES
    for target, address, size in pieces:
        while size:
            if not room:
                batches.append(bytearray())
                room = BUFFER_BYTES
            part = min(size, room)
            batches[-1] += PIECE.pack(target, address, part)
            target, address, size, room = target + part, address + part, size - part, room - part
    return [bytes(batch) for batch in batches if batch]


class _Run:
    def __init__(self, place: int, batches: list[bytes]) -> None:
        self._place, self._batches = place, batches
        self._lock = threading.Lock()  # guards the next two
        self._next = 0
        self._failure: BaseException | None = None

    def run(self) -> None:
        wanted = min(LANES, len(self._batches), max(1, len(os.sched_getaffinity(0))))
        # on this thread, because each thread has a current stream of its own
        streams = [device.loading().lane(self._place) for _ in range(wanted)]
        threads = [threading.Thread(target=self._lane, args=(stream,), name="nebula-upload", daemon=True) for stream in streams[1:]]
        try:
            for thread in threads:
                thread.start()
            self._lane(streams[0])
        except BaseException as failure:  # Ctrl-C: no thread may write into tensors that are given up
            self._fail(failure)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or failure

    def _take(self) -> bytes | None:
        with self._lock:
            if self._failure is not None or self._next == len(self._batches):
                return None
            self._next += 1
            return self._batches[self._next - 1]

    def _lane(self, stream: Any) -> None:
        backend = device.loading()
        waits: list[Any] = [None, None]  # for each buffer, an event after the last copy from it
        try:
            buffers: list[tuple[int, Any]] = []
            turn = 0
            try:
                while (batch := self._take()) is not None:
                    if turn == len(buffers):
                        buffers.append(backend.staging(BUFFER_BYTES))
                    if waits[turn] is not None:
                        backend.wait(self._place, waits[turn])
                    backend.upload(stream, batch, buffers[turn])
                    waits[turn] = backend.event(stream)
                    turn = 1 - turn
            finally:
                backend.wait(self._place, backend.event(stream))
        except BaseException as failure:
            self._fail(failure)
