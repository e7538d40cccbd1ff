"""Device memory into images: which copies, on which stream, and what the next optimizer step waits for.

An image is shared memory that C hands out while it saves. Its pages are registered with the device once, so that the
device writes into it by itself, on streams of its own that first wait for the work queued before the save. Small storages have
one stream, and large ones, in chunks, the other: the program waits for the small ones of a file, and not for the large ones of
the file before.

    save(...)                   returns when the copies are done
    save(..., overlap=True)     returns when they are queued; whoever steps an optimizer next queues a wait before it

A thread of the C library waits for the end of a copy and then tells the agent; it is also what flush, load and the end
of the interpreter wait for. Nothing here starts a thread.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
import sys
import threading
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _nebula
from .._session import waits

__all__ = ["PIECE", "Backend", "Filler", "covers", "find", "gate", "place", "plan", "takes_cuda", "use"]

log = logging.getLogger("nebulaml")

CHUNK_BYTES = 32 << 20  # so that what training itself copies from the device gets a turn
SMALL_BYTES = 1 << 20  # copied first: what a forward pass changes in place, statistics and counters, is small
STAGING_COUNT = 2  # one is filled by the device while the other is emptied by us
PIECE = struct.Struct("=QQQ")  # one copy as Ranges.pieces() packs it: to a host address, from a device's, bytes
_MOST = (1 << 64) - 1


class Backend(Protocol):
    """What capture needs of a kind of device. Each of them has a number, from 0 on."""

    def place(self, storage: torch.UntypedStorage) -> int | None:
        """The device that the storage lies on; None when it is not of this kind."""

    def register(self, place: int, address: int, size: int) -> bool:
        """Lets devices, that one among them, write to host memory while the program runs; False when that is refused."""

    def unregister(self, place: int, address: int) -> None:
        """Takes that back; any thread may call it."""

    def staging(self, size: int) -> tuple[int, Any]:
        """Host memory that devices write to well: its address, and what keeps it."""

    def target(self, location: torch.device) -> int | None:
        """The device of this kind that a load to there ends on; None when it is not of this kind, or not there."""

    def allocate(self, place: int, size: int) -> torch.UntypedStorage:
        """Device memory without values."""

    def lane(self, place: int) -> Any:
        """A stream for copies to that device; what is queued there now waits for what the program has queued."""

    def upload(self, stream: Any, storage: torch.UntypedStorage, offset: int, buffer: torch.Tensor, at: int, size: int) -> None:
        """Queues a copy from a staging buffer into device memory."""

    def side_streams(self, place: int) -> tuple[Any, Any]:
        """Those for small and for large copies from that device; what is queued there now waits for what the program has queued."""

    def copy(self, stream: Any, pieces: bytes) -> None:
        """Queues copies to host memory."""

    def keep(self, stream: Any, owners: list[Any]) -> None:
        """The memory of these storages and tensors is given to nobody else before what is queued on the stream is done."""

    def event(self, stream: Any) -> Any:
        """An event behind all that is queued on the stream."""

    def hold(self, place: int, event: Any) -> None:
        """What the program queues on that device from now on waits for the event; the host does not."""

    def is_recording(self, place: int) -> bool:
        """Whether what the program queues on that device now goes into a graph, and runs when that is replayed."""

    def wait(self, place: int, event: Any) -> None:
        """Returns when all before the event is done; raises what went wrong there. Any thread may call it."""


class _Cuda:
    """CUDA, and ROCm under torch's names for it.

    A thread that has never chosen a device, such as one of the C library, is on the first one, and most calls would make a context
    there: half a gigabyte of a device that may be another rank's.
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
        return code == 0  # also not when it is registered already: for a mapping that is gone, perhaps

    def unregister(self, place: int, address: int) -> None:
        with torch.cuda.device(place):
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                _discard_error()

    def staging(self, size: int) -> tuple[int, Any]:
        try:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")  # slower, and as right
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

    def upload(self, stream: Any, storage: torch.UntypedStorage, offset: int, buffer: torch.Tensor, at: int, size: int) -> None:
        with torch.cuda.stream(stream):
            target = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, (size,), (1,))
            target.copy_(buffer[at : at + size], non_blocking=True)

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
        event = torch.cuda.Event(blocking=True)  # whoever waits for it sleeps
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
    """An error that a call has returned is reported once more by the next kernel: let that be one of ours."""
    try:
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        pass


_lock = threading.RLock()  # guards all below; a signal handler may save while its thread is here
_backend: Backend | None = None
_registered: dict[int, tuple[Backend, int] | None] = {}  # images by address, and the device that asked; None: it was refused
_refusal_said = False
_pending: list[Filler] = []  # overlapped copies that may still be running
_has_hook = False
_watches = False

_staging_lock = threading.Lock()  # within a save only; held while the staging memory is in use
_staging: list[tuple[int, Any]] = []


def use(backend: Backend | None) -> None:
    """Another backend than CUDA's, for tests; None: what the machine has. Only while nothing is being saved."""
    global _backend, _refusal_said
    with _lock:
        _backend, _refusal_said = backend, False
        _registered.clear()
    with _staging_lock:
        _staging.clear()


def _active() -> Backend | None:
    """The backend, when there can be device memory at all."""
    global _backend
    if _backend is None and torch.cuda.is_initialized():
        _backend = _cuda
    return _backend


_cuda = _Cuda()


def is_in_use() -> bool:
    """Whether this program uses a device."""
    return _active() is not None


def loading() -> Backend:
    """The backend for loads, which may be the first that use a device."""
    return _active() or _cuda


def target(location: str | torch.device) -> int | None:
    """The device that a load to there ends on; None: no such device is known here."""
    try:
        return loading().target(torch.device(location))
    except RuntimeError:  # a name that torch does not know
        return None


def takes_cuda() -> bool:
    """Whether storages of CUDA are copied from here."""
    return isinstance(_active(), _Cuda)


def place(storage: Any) -> int | None:
    """The device that the storage is copied from here; None: it lies on the host, or torch copies it before the save."""
    backend = _active()
    return backend.place(storage) if backend is not None and isinstance(storage, torch.UntypedStorage) else None


def covers(storage: Any) -> bool:
    """Whether the storage is copied from here."""
    return place(storage) is not None


def find(ranges: _nebula.Ranges) -> None:
    """Notes which ranges lie on devices, for all whose owner is a storage, or a tensor that is the range."""
    backend = _active()
    if backend is None:
        return
    for index, (address, _, owner) in enumerate(ranges):
        where = place(owner.untyped_storage() if isinstance(owner, torch.Tensor) else owner)
        if where is not None and address is not None:
            ranges.put_on(where, index, address)


def plan(ranges: _nebula.Ranges, overlap: bool) -> Filler | None:
    """What copies the ranges that lie on devices, for _nebula's save; None when there are none."""
    backend = _active()
    places = ranges.devices() if backend is not None else []
    return Filler(backend, ranges, places, overlap) if backend is not None and places else None


class Filler:
    """The copies of one save. C calls start() within the save, and finish() in it or, with ``overlap``, after it."""

    def __init__(self, backend: Backend, ranges: _nebula.Ranges, places: list[int], overlap: bool) -> None:
        self.overlap = overlap
        self._backend, self._ranges, self._places = backend, ranges, places
        self._events: list[tuple[int, Any]] = []
        self._failure: BaseException | None = None

    def start(self, image: int, size: int, offsets: list[int]) -> None:
        """Queues all copies into the image at that address, of ``size`` bytes."""
        with waits.within_save():
            self._start(image, size, offsets)

    def _start(self, image: int, size: int, offsets: list[int]) -> None:
        self._events.clear()
        if not _is_registered(self._backend, self._places[0], image, size):
            self._copy_staged(image, offsets)
            return
        streams: dict[int, tuple[Any, Any]] = {}
        try:
            for place in self._places:
                small, large = streams[place] = self._backend.side_streams(place)
                self._backend.copy(small, self._ranges.pieces(place, image, offsets, 1, SMALL_BYTES, CHUNK_BYTES))
                self._events.append((place, self._backend.event(small)))
                if self.overlap:
                    self._backend.hold(*self._events[-1])
                self._backend.copy(large, self._ranges.pieces(place, image, offsets, SMALL_BYTES + 1, _MOST, CHUNK_BYTES))
                if self.overlap:  # else nothing is given back before the copies are done; nor are small ones, which the program waits for
                    self._backend.keep(large, [owner for _, owner in self._ranges.owners(place, SMALL_BYTES + 1)])
                self._events.append((place, self._backend.event(large)))
        except BaseException:
            self._drain(streams)
            raise
        if self.overlap:
            _gate(self)

    def finish(self) -> None:
        """Returns when every byte is there."""
        try:
            with waits.within_save():
                for place, event in self._events:
                    self._backend.wait(place, event)
            if self._failure is not None:
                raise self._failure
        finally:
            with _lock:
                if self in _pending:
                    _pending.remove(self)

    def hold(self) -> None:
        """The program's next work on these devices waits. Where even that fails, the file is not to be trusted.

        A graph that is being captured takes no wait for what is outside it; it changes nothing before its replay, which waits.
        """
        for place, event in self._events:
            try:
                if self._backend.is_recording(place):
                    continue
                self._backend.hold(place, event)
            except Exception as failure:
                self._failure = failure

    def _drain(self, streams: dict[int, tuple[Any, Any]]) -> None:
        """Nothing may write into an image that goes back to the agent."""
        for place, stream in [(place, stream) for place, pair in streams.items() for stream in pair]:
            try:
                self._backend.wait(place, self._backend.event(stream))
            except Exception:  # a device that reports errors writes no more
                log.debug("nebula: a device failed while its copies were given up", exc_info=True)

    def _copy_staged(self, image: int, offsets: list[int]) -> None:
        """Through a little memory that the device may write to; all of it is done on return."""
        with _staging_lock:
            if not _staging:
                _staging.extend(self._backend.staging(CHUNK_BYTES) for _ in range(STAGING_COUNT))
            running: list[tuple[int, Any, int, int, int]] = []  # device, event, staging address, target, size
            for place in self._places:
                streams = self._backend.side_streams(place)
                try:
                    for target, source, size in PIECE.iter_unpack(self._ranges.pieces(place, image, offsets, 1, _MOST, CHUNK_BYTES)):
                        if len(running) == STAGING_COUNT:
                            self._empty(running.pop(0))
                        used = {entry[2] for entry in running}
                        staging = next(address for address, _ in _staging if address not in used)
                        self._backend.copy(streams[1], PIECE.pack(staging, source, size))
                        running.append((place, self._backend.event(streams[1]), staging, target, size))
                    while running:
                        self._empty(running.pop(0))
                except BaseException:
                    self._drain({place: streams})
                    raise

    def _empty(self, entry: tuple[int, Any, int, int, int]) -> None:
        place, event, staging, target, size = entry
        self._backend.wait(place, event)
        ctypes.memmove(target, staging, size)


def _is_registered(backend: Backend, place: int, image: int, size: int) -> bool:
    """Registers an image that is seen for the first time; it stays so until its mapping goes."""
    global _refusal_said, _watches
    with _lock:
        if image in _registered:
            return _registered[image] is not None
        if not _watches:
            _nebula.watch_images(_unmapping)
            _watches = True
    registered = backend.register(place, image, size)
    with _lock:
        _registered[image] = (backend, place) if registered else None
        say = not registered and not _refusal_said
        _refusal_said = _refusal_said or say
    if say:
        log.warning(
            "nebula: shared memory of %d bytes cannot be registered with the device (is the limit of locked memory, "
            "ulimit -l, too low?): device tensors are copied through %d bytes of pinned memory, and overlap=True "
            "copies before it returns",
            size,
            STAGING_COUNT * CHUNK_BYTES,
        )
    return registered


def _unmapping(image: int) -> None:
    with _lock:
        found = _registered.pop(image, None)
    if found is not None:
        backend, place = found
        backend.unregister(place, image)


def _gate(filler: Filler) -> None:
    global _has_hook, _hold_pending
    compiler = sys.modules.get("torch._dynamo")
    with _lock:
        if not _has_hook:
            register_optimizer_step_pre_hook(_before_step)
            _gate_replays(getattr(torch.cuda, "CUDAGraph", None))
            _has_hook = True
        if compiler and _hold_pending is _hold_all:
            _hold_pending = compiler.disable(_hold_all)
        _pending.append(filler)


def gate() -> None:
    """What the program's streams do next waits, on the device, for the copies that overlap: for a framework that says when its step begins."""
    if _pending:
        _hold_pending()


def _gate_replays(graph: Any) -> None:
    """A step that was captured runs by a replay, of which the optimizer is not told."""
    replay = getattr(graph, "replay", None)
    if replay is None:
        return

    @functools.wraps(replay)
    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _pending:
            _hold_pending()
        return replay(self, *args, **kwargs)

    graph.replay = held


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before a step of any torch optimizer in this process, also one inside another library's, and a compiled one."""
    if _pending:
        _hold_pending()


def _hold_all() -> None:
    with _lock:
        running = list(_pending)
    for filler in running:
        filler.hold()


_hold_pending = _hold_all  # hidden from torch.compile, once that is in use, which would make it a part of the step's graph


def _forget_in_child() -> None:
    """A forked child has no device and none of the parent's copies."""
    global _lock, _staging_lock
    _lock, _staging_lock = threading.RLock(), threading.Lock()
    _pending.clear()
    _registered.clear()


os.register_at_fork(after_in_child=_forget_in_child)
