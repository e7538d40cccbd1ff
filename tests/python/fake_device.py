"""A device made of threads: its memory is marked CPU memory, its streams run late, and its copies really copy.

A program queues work for the device with enqueue(). Copies from it are held up until let_go(). So a call that should have
waited for a copy, and did not, leads to a wrong value in the copy.
"""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from nebulaml.tensors.device_backends import PIECE


class Event:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.failure: BaseException | None = None

    def synchronize(self) -> None:
        assert self.done.wait(60), "the fake device hangs"
        if self.failure is not None:
            raise self.failure


class Stream:
    """Runs the queued work in order. A failure stays, as on a real device."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            step = self.work.get()
            try:
                step()
            except BaseException as failure:
                self.failure = failure

    def event(self) -> Event:
        event = Event()

        def reach() -> None:
            event.failure = self.failure
            event.done.set()

        self.work.put(reach)
        return event


class Device:
    """The backend of device.py, and the interface of the device for programs."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.marked: set[int] = set()
        self.kept: list[Any] = []
        self.current, self.small, self.side = Stream(), Stream(), Stream()
        self.held_least = 0
        self.open = threading.Event()
        self.open.set()
        self.registered: dict[int, int] = {}
        self.registrations: list[int] = []
        self.refuses = self.copy_fails = self.queue_fails = self.records = False
        self.copied: list[tuple[int, int]] = []  # (source's address, bytes), as they were queued
        self.uploaded: list[int] = []  # bytes of each copy to it, as they were queued
        self.ended = 0  # copies that were queued and write no more
        self.at_wait: list[Callable[[], object]] = []  # called when the next waits begin

    # -- the program's side

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.marked.add(storage.data_ptr())
        self.kept.append(storage)
        return tensor

    def enqueue(self, work: Callable[[], object]) -> None:
        self.current.work.put(work)

    def hold_up(self, least: int = 0) -> None:
        """Makes copies of so many bytes wait until let_go()."""
        self.held_least = least
        self.open.clear()

    def let_go(self) -> None:
        self.open.set()

    def synchronize(self) -> None:
        self.current.event().synchronize()

    # -- the backend

    def place(self, storage: torch.UntypedStorage) -> int | None:
        return self.number if storage.data_ptr() in self.marked else None

    def register(self, place: int, address: int, size: int) -> bool:
        self.registrations.append(address)
        if self.refuses:
            return False
        assert address not in self.registered
        self.registered[address] = size
        return True

    def unregister(self, place: int, address: int) -> None:
        del self.registered[address]

    def staging(self, size: int) -> tuple[int, Any]:
        buffer = torch.empty(size, dtype=torch.uint8)
        self.registered[buffer.data_ptr()] = size
        return buffer.data_ptr(), buffer

    def target(self, location: torch.device) -> int | None:
        return self.number if location.type == "cuda" and location.index in (None, self.number) else None

    def allocate(self, place: int, size: int) -> torch.UntypedStorage:
        assert place == self.number
        storage = torch.UntypedStorage(size).fill_(0xAA)
        self.marked.add(storage.data_ptr())
        self.kept.append(storage)
        return storage

    def lane(self, place: int) -> Stream:
        stream = Stream()
        stream.work.put(self.current.event().synchronize)
        return stream

    def upload(self, stream: Stream, pieces: bytes, buffer: tuple[int, Any]) -> None:
        at = buffer[0]
        end = at + self.registered[at]
        for target, source, size in PIECE.iter_unpack(pieces):
            assert at + size <= end and any(
                storage.data_ptr() <= target and target + size <= storage.data_ptr() + storage.nbytes() for storage in self.kept
            )
            if self.queue_fails and self.uploaded:
                raise RuntimeError("the fake device takes no more work")
            ctypes.memmove(at, source, size)
            self.uploaded.append(size)
            stream.work.put(functools.partial(self._upload, target, at, size))
            at += size

    def _upload(self, target: int, source: int, size: int) -> None:
        assert size < self.held_least or self.open.wait(60)
        self.ended += 1
        if self.copy_fails:
            raise RuntimeError("the fake device failed")
        ctypes.memmove(target, source, size)

    def side_streams(self, place: int) -> tuple[Stream, Stream]:
        before = self.current.event()
        for stream in (self.small, self.side):
            stream.work.put(before.synchronize)
        return self.small, self.side

    def copy(self, stream: Stream, pieces: bytes) -> None:
        for address, source, size in PIECE.iter_unpack(pieces):
            self._copy(stream, source, size, address)

    def keep(self, stream: Stream, owners: list[Any]) -> None:
        self.kept += owners

    def _copy(self, stream: Stream, source: int, size: int, address: int) -> None:
        if self.queue_fails and self.copied:
            raise RuntimeError("the fake device takes no more work")
        assert any(begin <= address and address + size <= begin + room for begin, room in self.registered.items())
        self.copied.append((source, size))

        def run() -> None:
            assert size < self.held_least or self.open.wait(60)
            self.ended += 1
            if self.copy_fails:
                raise RuntimeError("the fake device failed")
            ctypes.memmove(address, source, size)

        stream.work.put(run)

    def event(self, stream: Stream) -> Event:
        return stream.event()

    def is_recording(self, place: int) -> bool:
        return self.records

    def hold(self, place: int, event: Event) -> None:
        assert not self.records, "a graph takes no wait for what is outside it"
        self.current.work.put(event.done.wait)

    def wait(self, place: int, event: Event) -> None:
        if self.at_wait:
            self.at_wait.pop()()
        event.synchronize()


class SGD(torch.optim.Optimizer):
    """An optimizer that queues its changes on the device."""

    def __init__(self, parameters: Any, device: Device, lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr})
        self.device = device

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.device.enqueue(lambda p=parameter, lr=group["lr"]: p.data.sub_(lr))
