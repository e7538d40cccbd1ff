"""Ends the workers of this torchrun when their world is broken.

torchrun stops workers by SIGTERM, and waits 30 s for a worker that catches it. A worker that waits in a collective for a lost rank never
answers. So:
* if a worker has failed, the others of its node are killed as soon as torchrun knows which one has failed;
* if a node is lost, the workers of the other nodes are killed at once; if a node has left, LEFT_S later, because they may be saving.

Workers that torchrun stops for another reason have their 30 s: a node joins, or torchrun itself was told to end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable

__all__ = ["LEFT_S", "Workers", "await_end"]

LEFT_S = 10.0
LOOK_S = 0.1
LEFT = (128 + signal.SIGTERM, -signal.SIGTERM)  # exit codes of workers that were told to leave: the others of the node were told, too
MARK = b"TORCHELASTIC_RUN_ID="
TOLD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Workers:
    """The workers that torchrun has started as children of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._seen: dict[int, bool] = {}  # children, and whether they are workers
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._woken, self._waker = socket.socketpair()
        for each in (self._woken, self._waker):
            each.setblocking(False)

    def begin(self) -> None:
        """torchrun is about to start workers."""
        with self._lock:
            self._is_stopping = False
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="NebulaWorkers", daemon=True)
            self._thread.start()

    def stopping(self) -> None:
        """torchrun is about to stop them, by SIGTERM."""
        with self._lock:
            self._is_stopping = True

    def end(self, after_s: float = 0.0) -> None:
        """Kills those that run now, after that time."""
        self.stopping()
        held = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                held.append((pid, os.pidfd_open(pid)))
        if after_s:
            timer = threading.Timer(after_s, _kill, (held,))
            timer.daemon = True
            timer.start()
        else:
            _kill(held)

    def pids(self) -> list[int]:
        children: list[int] = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
                children += [int(pid) for pid in file.read().split()]
        with self._lock:
            self._seen = {pid: self._seen.get(pid, False) or _is_worker(pid) for pid in children}
            return [pid for pid, is_worker in self._seen.items() if is_worker]

    def _watch(self) -> None:
        while True:
            told = self._woken.recv(4096) if _readable(LOOK_S, self._woken.fileno()) else b""
            if any(number in told for number in TOLD):
                self.stopping()
            with self._lock:
                is_stopping = self._is_stopping
            if not is_stopping and _stops_after_failure():
                self.end()


def await_end(pids: Iterable[int], seconds: float) -> None:
    """Waits until one of these children has ended, that long at most. On a kernel without pidfds it waits that long."""
    held = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, and was waited for
            held.append(os.pidfd_open(pid))
    try:
        _readable(seconds, *held)
    finally:
        for each in held:
            os.close(each)


def _stops_after_failure() -> bool:
    """Whether torchrun, in the main thread, waits for workers to end because one of them has failed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "_close" and "multiprocessing" in frame.f_code.co_filename:
            handlers = getattr(frame.f_locals.get("self"), "subprocess_handlers", {})
            codes = [handler.proc.returncode for handler in list(handlers.values())]
            return any(code not in (None, 0, *LEFT) for code in codes)
        frame = frame.f_back
    return False


def _readable(seconds: float, *descriptors: int) -> list[int]:
    poll = select.poll()  # select.select takes no descriptor above 1023
    for each in descriptors:
        poll.register(each, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(seconds * 1000)]


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return any(each.startswith(MARK) for each in file.read().split(b"\0"))
    return False


def _kill(held: list[tuple[int, int]]) -> None:
    for pid, end in held:
        with contextlib.suppress(OSError):
            if not _readable(0.0, end):  # it lives, so the number is still its own
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                signal.pidfd_send_signal(end, signal.SIGKILL)
        os.close(end)
