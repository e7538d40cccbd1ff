"""Copies from device memory into images: the streams of the copies, and the wait of the next optimizer step.

An image is shared memory that C hands out during a save. Its pages are registered with the device once, so that the device can
write into it directly. It does so on streams of its own, which first wait for the work queued before the save. Small storages use
one stream and large ones, in chunks, the other: the program then waits for the small copies of a file without waiting for the
large copies of the file before it.

    save(...)                   returns when the copies are done
    save(..., overlap=True)     returns when they are queued; the next optimizer step queues a wait before its work

A thread of the C library waits for the end of a copy and then reports it to the agent. flush, load and the end of the interpreter wait
for that thread, too. This module starts no thread.
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

CHUNK_BYTES = 32 << 20  # small enough that training's own copies from the device get a turn
# storages up to this size are copied first: statistics and counters, which a forward pass changes in place, are small
SMALL_BYTES = 1 << 20
STAGING_COUNT = 2  # the device fills one while this process empties the other
PIECE = struct.Struct("=QQQ")  # one copy: the address to which it goes, the address from which it comes, bytes
_MOST = (1 << 64) - 1


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


class _Cuda:
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


_lock = threading.RLock()  # guards all below; an RLock, because a signal handler may save while its thread holds it
_backend: Backend | None = None
_registered: dict[int, tuple[Backend, int] | None] = {}  # by address of the image: the device that registered it; None: the driver refused
_refusal_said = False
_expected: int | None = None  # a device whose tensors prepared files have; None: there is none
_pending: list[Filler] = []  # overlapped copies that may still be running
_has_hook = False
_watches = False

_staging_lock = threading.Lock()  # taken only within a save; held while the staging memory is in use
_staging: list[tuple[int, Any]] = []


def use(backend: Backend | None) -> None:
    """Sets another backend than CUDA's, for tests. None: the machine's own. Call it only while no save runs."""
    global _backend, _refusal_said, _expected
    with _lock:
        _backend, _refusal_said, _expected = backend, False, None
        _registered.clear()
    with _staging_lock:
        _staging.clear()


def _active() -> Backend | None:
    """Returns the backend, if there can be device memory at all."""
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
    """Returns True if this module copies the storages of CUDA."""
    return isinstance(_active(), _Cuda)


def place(storage: Any) -> int | None:
    """Returns the device from which this module copies the storage. None: it lies on the host, or torch copies it before the save."""
    backend = _active()
    return backend.place(storage) if backend is not None and isinstance(storage, torch.UntypedStorage) else None


def covers(storage: Any) -> bool:
    """Returns True if this module copies the storage."""
    return place(storage) is not None


def find(ranges: _nebula.Ranges) -> None:
    """Records which ranges lie on devices. The owner of such a range is a storage, or a tensor that is the range."""
    backend = _active()
    if backend is None:
        return
    for index, (address, _, owner) in enumerate(ranges):
        where = place(owner.untyped_storage() if isinstance(owner, torch.Tensor) else owner)
        if where is not None and address is not None:
            ranges.put_on(where, index, address)


def plan(ranges: _nebula.Ranges, overlap: bool) -> Filler | None:
    """Returns the Filler for the ranges that lie on devices, for _nebula's save. None: there are none."""
    backend = _active()
    places = ranges.devices() if backend is not None else []
    return Filler(backend, ranges, places, overlap) if backend is not None and places else None


def expect(ranges: _nebula.Ranges) -> None:
    """Makes _mapped() register spare images if ranges of a prepared file lie on a device."""
    global _expected
    places = ranges.devices() if _active() is not None else []
    if places:
        _watch_images()
        _expected = places[0]


class Filler:
    """The copies of one save. C calls start() within the save, and finish() within it or, with ``overlap``, after it."""

    def __init__(self, backend: Backend, ranges: _nebula.Ranges, places: list[int], overlap: bool) -> None:
        self.overlap = overlap
        self._backend, self._ranges, self._places = backend, ranges, places
        self._events: list[tuple[int, Any]] = []
        self._failure: BaseException | None = None

    def start(self, image: int, size: int, offsets: list[int]) -> None:
        """Queues all copies into the image of ``size`` bytes at address ``image``."""
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
                # without overlap, no memory is given back before the copies are done; small ones need no keep, because the program waits
                # for them
                if self.overlap:
                    self._backend.keep(large, [owner for _, owner in self._ranges.owners(place, SMALL_BYTES + 1)])
                self._events.append((place, self._backend.event(large)))
        except BaseException:
            self._drain(streams)
            raise
        if self.overlap:
            _gate(self)

    def finish(self) -> None:
        """Waits until every byte is in the image."""
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
        """Makes the program's next work on these devices wait. If that fails, the file must not be trusted: finish() raises.

        A graph that is being captured cannot wait for work outside of it. It changes nothing before its replay, which waits.
        """
        for place, event in self._events:
            try:
                if self._backend.is_recording(place):
                    continue
                self._backend.hold(place, event)
            except Exception as failure:
                self._failure = failure

    def _drain(self, streams: dict[int, tuple[Any, Any]]) -> None:
        """Waits until no copy can write into the image any more, before the image goes back to the agent."""
        for place, stream in [(place, stream) for place, pair in streams.items() for stream in pair]:
            try:
                self._backend.wait(place, self._backend.event(stream))
            except Exception:  # a device that reports errors writes no more
                log.debug("nebula: a device failed while Nebula cancelled its copies", exc_info=True)

    def _copy_staged(self, image: int, offsets: list[int]) -> None:
        """Copies through a little memory that the device may write to. All copies are done on return."""
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
    """Registers an image, unless that was done before. It stays registered until it is unmapped. Returns False if the driver refused."""
    global _refusal_said
    _watch_images()
    with _lock:
        if image in _registered:
            return _registered[image] is not None
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


def _watch_images() -> None:
    global _watches
    with _lock:
        if not _watches:
            _nebula.watch_images(_mapped, _unmapping)
            _watches = True


def _mapped(image: int, size: int) -> None:
    """Registers a spare image, on a thread of C. A save that is lent the image waits for that."""
    backend = _active()
    if backend is not None and _expected is not None:
        _is_registered(backend, _expected, image, size)


def _unmapping(image: int, _: int) -> None:
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
    """For a framework that says when its step begins: the next work of the streams waits, on the device, for the copies that overlap."""
    if _pending:
        _hold_pending()


def _gate_replays(graph: Any) -> None:
    """Makes replays of captured graphs wait, too: a captured optimizer step runs by a replay, without the optimizer's hook."""
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
    """Runs before a step of any torch optimizer in this process, also one inside another library, or a compiled one."""
    if _pending:
        _hold_pending()


def _hold_all() -> None:
    with _lock:
        running = list(_pending)
    for filler in running:
        filler.hold()


_hold_pending = _hold_all  # once torch.compile is in use, a version hidden from it: otherwise it would become a part of the step's graph


def _forget_in_child() -> None:
    """Resets this module in a forked child, which has no device and none of the parent's copies."""
    global _lock, _staging_lock, _expected
    _lock, _staging_lock = threading.RLock(), threading.Lock()
    _pending.clear()
    _registered.clear()
    _expected = None


os.register_at_fork(after_in_child=_forget_in_child)
