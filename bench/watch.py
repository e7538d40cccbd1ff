"""Measures the memory of a competitor while it works, from another process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import threading
from pathlib import Path

LIBC = ctypes.CDLL(None)
CACHESTAT = 451  # the same number on all architectures
PERIOD = 0.02  # seconds between two measurements


def private_bytes(pid: int) -> int:
    """Returns the bytes of a process's anonymous memory, without files and shared memory."""
    return status_bytes(pid, "RssAnon:")


def status_bytes(pid: int, key: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def descendants(pid: int) -> list[int]:
    """Returns the child processes of a process, and their child processes."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


class Pages(ctypes.Structure):
    """The result of cachestat(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


def unsynced_bytes(folder: Path) -> int | None:
    """Returns the bytes of a directory's files that are in memory only. None: the kernel is older than 6.5 and cannot tell."""
    total = 0
    whole, pages = (ctypes.c_uint64 * 2)(0, 0), Pages()
    for path in folder.rglob("*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                if LIBC.syscall(CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(pages), 0):
                    return None
                total += (pages.dirty + pages.writeback) * os.sysconf("SC_PAGE_SIZE")
        finally:
            os.close(fd)
    return total


def shared_bytes(memory: Path, pids: list[int]) -> int:
    """Returns the bytes of files in shared memory, each counted once: named files, and files that only a descriptor refers to."""
    blocks: dict[tuple[int, int], int] = {}
    for path in memory.rglob("*"):
        note(blocks, path)
    for pid in pids:
        try:
            for link in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(link.path).startswith("/memfd:"):
                    note(blocks, Path(link.path))
        except OSError:
            continue
    # A file that a process only maps shows in its resident shared pages.
    return max([sum(blocks.values()) * 512] + [status_bytes(pid, "RssShmem:") for pid in pids])


def note(blocks: dict[tuple[int, int], int], path: Path) -> None:
    try:
        found = path.stat()
    except OSError:
        return
    blocks[(found.st_dev, found.st_ino)] = found.st_blocks


class Watch:
    """Records the peak of all memory, minus the trainer's memory before it opened its engine."""

    def __init__(self, trainer: int, memory: Path) -> None:
        self.pids = [trainer]
        self.memory = memory
        self.baseline = private_bytes(trainer)
        self.peak = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.ended.wait(PERIOD):
            pids = sorted({*self.pids, *descendants(self.pids[0])})
            private = sum(private_bytes(pid) for pid in pids) - self.baseline
            self.peak = max(self.peak, private + shared_bytes(self.memory, pids))

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
