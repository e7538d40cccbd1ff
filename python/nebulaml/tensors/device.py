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

import contextlib
import ctypes
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _nebula
from .._session import waits
from .device_backends import PIECE, Backend, Cuda

__all__ = ["Filler", "covers", "expect", "find", "gate", "loading", "place", "plan", "takes_cuda", "target", "use"]

log = logging.getLogger("nebulaml")

CHUNK_BYTES = 32 << 20  # small enough that training's own copies from the device get a turn
# storages up to this size are copied first: statistics and counters, which a forward pass changes in place, are small
SMALL_BYTES = 1 << 20
STAGING_COUNT = 2  # the device fills one while this process empties the other
_MOST = (1 << 64) - 1


class Filler:
    """The copies of one save. C calls start() within the save, and finish() within it or, with ``overlap``, after it."""

    def __init__(self, owner: _Devices, backend: Backend, ranges: _nebula.Ranges, places: list[int], overlap: bool) -> None:
        self.overlap = overlap
        self._owner, self._backend, self._ranges, self._places = owner, backend, ranges, places
        self._events: list[tuple[int, Any]] = []
        self._failure: BaseException | None = None

    def start(self, image: int, size: int, offsets: list[int]) -> None:
        """Queues all copies into the image of ``size`` bytes at address ``image``."""
        with waits.within_save():
            self._start(image, size, offsets)

    def _start(self, image: int, size: int, offsets: list[int]) -> None:
        self._events.clear()
        if not self._owner.images.register(self._backend, self._places[0], image, size):
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
            self._owner.steps.add(self)

    def finish(self) -> None:
        """Waits until every byte is in the image."""
        try:
            with waits.within_save():
                for place, event in self._events:
                    self._backend.wait(place, event)
            if self._failure is not None:
                raise self._failure
        finally:
            self._owner.steps.remove(self)

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
        with self._owner.staging.taken(self._backend) as buffers:
            running: list[tuple[int, Any, int, int, int]] = []  # device, event, staging address, target, size
            for place in self._places:
                streams = self._backend.side_streams(place)
                try:
                    for target, source, size in PIECE.iter_unpack(self._ranges.pieces(place, image, offsets, 1, _MOST, CHUNK_BYTES)):
                        if len(running) == STAGING_COUNT:
                            self._empty(running.pop(0))
                        used = {entry[2] for entry in running}
                        staging = next(address for address, _ in buffers if address not in used)
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


class _Images:
    """The images that devices can write to. An image is registered once, and stays so until it is unmapped."""

    def __init__(self) -> None:
        self._watches = False
        self.forget()

    def forget(self) -> None:
        """Forgets all images, in a forked child, which has no device. The two callbacks of the mappings stay."""
        self._lock = threading.RLock()  # a signal handler may save while its thread holds it
        self._registered: dict[int, tuple[Backend, int] | None] = {}  # by address: the device that registered it; None: the driver refused
        self._expected: tuple[Backend, int] | None = None  # a device whose tensors prepared files have
        self._refusal_said = False

    def __len__(self) -> int:
        return len(self._registered)

    def register(self, backend: Backend, place: int, image: int, size: int) -> bool:
        """Registers an image, unless that was done before. Returns False if the driver refused."""
        self._watch()
        with self._lock:
            if image in self._registered:
                return self._registered[image] is not None
        registered = backend.register(place, image, size)
        with self._lock:
            self._registered[image] = (backend, place) if registered else None
            say = not registered and not self._refusal_said
            self._refusal_said = self._refusal_said or say
        if say:
            log.warning(
                "nebula: shared memory of %d bytes cannot be registered with the device (is the limit of locked memory, "
                "ulimit -l, too low?): device tensors are copied through %d bytes of pinned memory, and overlap=True "
                "copies before it returns",
                size,
                STAGING_COUNT * CHUNK_BYTES,
            )
        return registered

    def expect(self, backend: Backend, place: int) -> None:
        """Registers spare images from now on, for files whose tensors lie on that device."""
        self._watch()
        self._expected = backend, place

    def _watch(self) -> None:
        with self._lock:
            if not self._watches:
                _nebula.watch_images(self._mapped, self._unmapping)
                self._watches = True

    def _mapped(self, image: int, size: int) -> None:
        """Registers a spare image, on a thread of C. A save that is lent the image waits for that."""
        if self._expected is not None:
            self.register(*self._expected, image, size)

    def _unmapping(self, image: int, _: int) -> None:
        with self._lock:
            found = self._registered.pop(image, None)
        if found is not None:
            backend, place = found
            backend.unregister(place, image)


class _Staging:
    """A little host memory that devices write to fast."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, Any]] = []  # kept in a forked child, which must not give them back to its parent's device
        self.forget()

    def forget(self) -> None:
        """For a forked child, whose parent may have held the lock."""
        self._lock = threading.Lock()  # only saves take it; held while the memory is in use

    def clear(self) -> None:
        self._buffers = []

    @contextlib.contextmanager
    def taken(self, backend: Backend) -> Iterator[list[tuple[int, Any]]]:
        """The addresses and owners of STAGING_COUNT buffers, for one save at a time."""
        with self._lock:
            if not self._buffers:
                self._buffers.extend(backend.staging(CHUNK_BYTES) for _ in range(STAGING_COUNT))
            yield self._buffers


class _Steps:
    """The optimizer steps of this process: on the device, the next one waits for the copies that overlap."""

    def __init__(self) -> None:
        self._has_hook = False
        # once torch.compile is in use, a version hidden from it: otherwise it would become a part of the step's graph
        self._hold: Callable[[], None] = self._hold_all
        self.forget()

    def forget(self) -> None:
        self._lock = threading.RLock()  # a signal handler may save while its thread holds it
        self.pending: list[Filler] = []  # overlapped copies that may still be running

    def add(self, filler: Filler) -> None:
        compiler = sys.modules.get("torch._dynamo")
        with self._lock:
            if not self._has_hook:
                register_optimizer_step_pre_hook(self._before_step)
                self.gate_replays(getattr(torch.cuda, "CUDAGraph", None))
                self._has_hook = True
            if compiler and self._hold == self._hold_all:
                self._hold = compiler.disable(self._hold_all)
            self.pending.append(filler)

    def remove(self, filler: Filler) -> None:
        with self._lock:
            if filler in self.pending:
                self.pending.remove(filler)

    def gate(self) -> None:
        """For a framework that says when its step begins: the next work of the streams waits, on the device, for the copies that overlap."""
        if self.pending:
            self._hold()

    def gate_replays(self, graph: Any) -> None:
        """Makes replays of captured graphs wait, too: a captured optimizer step runs by a replay, without the optimizer's hook."""
        replay = getattr(graph, "replay", None)
        if replay is None:
            return

        @functools.wraps(replay)
        def held(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self.gate()
            return replay(graph, *args, **kwargs)

        graph.replay = held

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Runs before a step of any torch optimizer in this process, also one inside another library, or a compiled one."""
        self.gate()

    def _hold_all(self) -> None:
        with self._lock:
            running = list(self.pending)
        for filler in running:
            filler.hold()


class _Devices:
    """The devices of this process."""

    def __init__(self) -> None:
        self.images, self.staging, self.steps = _Images(), _Staging(), _Steps()
        self._cuda = Cuda()
        self._backend: Backend | None = None

    def use(self, backend: Backend | None) -> None:
        """Sets another backend than CUDA's, for tests. None: the machine's own. Call it only while no save runs."""
        self._backend = backend
        self.images.forget()
        self.staging.clear()

    def forget(self) -> None:
        """Resets everything in a forked child, which has no device and none of the parent's copies."""
        for part in (self.images, self.staging, self.steps):
            part.forget()

    def _active(self) -> Backend | None:
        """Returns the backend, if there can be device memory at all."""
        if self._backend is None and torch.cuda.is_initialized():
            self._backend = self._cuda
        return self._backend

    def loading(self) -> Backend:
        """The backend for loads, which may be the first that use a device."""
        return self._active() or self._cuda

    def target(self, location: str | torch.device) -> int | None:
        """The device that a load to there ends on; None: no such device is known here."""
        try:
            return self.loading().target(torch.device(location))
        except RuntimeError:  # a name that torch does not know
            return None

    def takes_cuda(self) -> bool:
        """Returns True if this module copies the storages of CUDA."""
        return isinstance(self._active(), Cuda)

    def place(self, storage: Any) -> int | None:
        """Returns the device from which this module copies the storage. None: it lies on the host, or torch copies it before the save."""
        backend = self._active()
        return backend.place(storage) if backend is not None and isinstance(storage, torch.UntypedStorage) else None

    def covers(self, storage: Any) -> bool:
        """Returns True if this module copies the storage."""
        return self.place(storage) is not None

    def find(self, ranges: _nebula.Ranges) -> None:
        """Records which ranges lie on devices. The owner of such a range is a storage, or a tensor that is the range."""
        if self._active() is None:
            return
        for index, (address, _, owner) in enumerate(ranges):
            where = self.place(owner.untyped_storage() if isinstance(owner, torch.Tensor) else owner)
            if where is not None and address is not None:
                ranges.put_on(where, index, address)

    def plan(self, ranges: _nebula.Ranges, overlap: bool) -> Filler | None:
        """Returns the Filler for the ranges that lie on devices, for _nebula's save. None: there are none."""
        backend = self._active()
        places = ranges.devices() if backend is not None else []
        return Filler(self, backend, ranges, places, overlap) if backend is not None and places else None

    def expect(self, ranges: _nebula.Ranges) -> None:
        """Has spare images registered if ranges of a prepared file lie on a device."""
        backend = self._active()
        places = ranges.devices() if backend is not None else []
        if backend is not None and places:
            self.images.expect(backend, places[0])


_devices = _Devices()
use, loading, target = _devices.use, _devices.loading, _devices.target
takes_cuda, place, covers = _devices.takes_cuda, _devices.place, _devices.covers
find, plan, expect, gate = _devices.find, _devices.plan, _devices.expect, _devices.steps.gate

os.register_at_fork(after_in_child=_devices.forget)
