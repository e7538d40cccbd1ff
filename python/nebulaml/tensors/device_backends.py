"""The kinds of devices that a save can copy from and a load to: what capture needs of one, and CUDA's."""

from __future__ import annotations

import struct
from typing import Any, Protocol

import torch

from .. import _nebula

__all__ = ["PIECE", "Backend", "Cuda"]

PIECE = struct.Struct("=QQQ")  # one copy: the address to which it goes, the address from which it comes, bytes


class Backend(Protocol):
    """The operations that capture needs of a kind of device. Its devices are numbered from 0."""

    def place(self, storage: torch.UntypedStorage) -> int | None:
        """Returns the device that the storage lies on. None: it is not of this kind."""

    def register(self, place: int, address: int, size: int) -> bool:
        """Lets all devices write to host memory while the program runs. Returns False if the driver refuses."""

    def unregister(self, place: int, address: int) -> None:
        """Undoes register(). Any thread may call it."""

    def staging(self, size: int) -> tuple[int, Any]:
        """Returns the address of host memory that devices can write to fast, and the object that owns it."""

    def target(self, location: torch.device) -> int | None:
        """The device of this kind that a load to there ends on; None when it is not of this kind, or not there."""

    def allocate(self, place: int, size: int) -> torch.UntypedStorage:
        """Device memory without values."""

    def lane(self, place: int) -> Any:
        """A stream for copies to that device; what is queued there now waits for what the program has queued."""

    def upload(self, stream: Any, pieces: bytes, buffer: tuple[int, Any]) -> None:
        """Copies pieces of host memory into memory of staging(), and queues copies from there into device memory."""

    def side_streams(self, place: int) -> tuple[Any, Any]:
        """Returns the streams for small and for large copies from that device. They wait for the work that the program has queued."""

    def copy(self, stream: Any, pieces: bytes) -> None:
        """Queues copies to host memory."""

    def keep(self, stream: Any, owners: list[Any]) -> None:
        """Keeps the memory of these storages and tensors from being used again until the work queued on the stream is done."""

    def event(self, stream: Any) -> Any:
        """Returns an event after all work queued on the stream."""

    def hold(self, place: int, event: Any) -> None:
        """Makes the work that the program queues on that device from now on wait for the event. The host does not wait."""

    def is_recording(self, place: int) -> bool:
        """Returns True if the program's work on that device is being captured into a graph, which runs at its replay."""

    def wait(self, place: int, event: Any) -> None:
        """Waits until all work before the event is done, and raises its failure. Any thread may call it."""


class Cuda:
    """CUDA, and ROCm under torch's names for it.

    A thread that has chosen no device, for example one of the C library, uses the first one. Most calls would create a context there,
    which takes half a gigabyte of a device that may belong to another rank. So every call selects its device.
    """

    def __init__(self) -> None:
        self._streams: dict[int, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def place(self, storage: torch.UntypedStorage) -> int | None:
        device = storage.device
        return device.index if device.type == "cuda" else None

    def register(self, place: int, address: int, size: int) -> bool:
        with torch.cuda.device(place):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, 1))  # 1: portable, for all devices
            if code != 0:
                _discard_error()
        return code == 0  # False also if it is registered already: that may be for a mapping that is gone

    def unregister(self, place: int, address: int) -> None:
        with torch.cuda.device(place):
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                _discard_error()

    def staging(self, size: int) -> tuple[int, Any]:
        try:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")  # slower, but correct
        return buffer.data_ptr(), buffer

    def target(self, location: torch.device) -> int | None:
        if location.type != "cuda" or not torch.cuda.is_available():
            return None
        index = torch.cuda.current_device() if location.index is None else location.index
        return index if index < torch.cuda.device_count() else None

    def allocate(self, place: int, size: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(size, device=torch.device("cuda", place))

    def lane(self, place: int) -> Any:
        stream = torch.cuda.Stream(place)
        stream.wait_stream(torch.cuda.current_stream(place))
        return stream

    def upload(self, stream: Any, pieces: bytes, buffer: tuple[int, Any]) -> None:
        address, owner = buffer
        with torch.cuda.device(stream.device):
            _nebula.copy_to_device(stream.cuda_stream, pieces, address, owner.is_pinned())  # a list of copies needs pinned memory

    def side_streams(self, place: int) -> tuple[Any, Any]:
        if place not in self._streams:
            self._streams[place] = torch.cuda.Stream(place), torch.cuda.Stream(place)
        for stream in self._streams[place]:
            stream.wait_stream(torch.cuda.current_stream(place))
        return self._streams[place]

    def copy(self, stream: Any, pieces: bytes) -> None:
        with torch.cuda.device(stream.device):
            _nebula.copy_from_device(stream.cuda_stream, pieces)

    def keep(self, stream: Any, owners: list[Any]) -> None:
        for owner in owners:
            if isinstance(owner, torch.UntypedStorage):
                owner = torch.empty(0, dtype=torch.uint8, device=owner.device).set_(owner)
            owner.record_stream(stream)

    def event(self, stream: Any) -> Any:
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        event.record(stream)
        return event

    def hold(self, place: int, event: Any) -> None:
        torch.cuda.current_stream(place).wait_event(event)
        torch.cuda.default_stream(place).wait_event(event)

    def is_recording(self, place: int) -> bool:
        with torch.cuda.device(place):
            return torch.cuda.is_current_stream_capturing()

    def wait(self, place: int, event: Any) -> None:
        with torch.cuda.device(place):
            event.synchronize()


def _discard_error() -> None:
    """Clears the error of a failed call: CUDA reports it once more at the next kernel, so let that be ours."""
    try:
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        pass
