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
import threading
import time

__all__ = ["LEFT_S", "Workers"]

LEFT_S = 10.0
LOOK_S = 0.1
KNOWN_S = 1.0  # torchrun looks at its workers every 0.1 s
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
        ends: dict[int, int] = {}  # of each worker, a descriptor that is readable when it has ended
        failed, since = 0, 0.0
        while True:
            ready = _readable(LOOK_S, self._woken.fileno(), *ends.values())
            told = self._woken.recv(4096) if self._woken.fileno() in ready else b""
            if any(number in told for number in TOLD):
                self.stopping()
            for pid, end in list(ends.items()):
                if end in ready:
                    del ends[pid]
                    os.close(end)
                    if not failed and _has_failed(pid):
                        failed, since = pid, time.monotonic()
            pids = self.pids()
            for pid in pids:
                if pid not in ends and not _has_ended(pid):
                    with contextlib.suppress(OSError):
                        ends[pid] = os.pidfd_open(pid)
            with self._lock:
                is_stopping = self._is_stopping
            if failed and is_stopping:
                failed = 0
            elif failed and (failed not in pids or time.monotonic() - since > KNOWN_S):
                failed = 0
                self.end()


def _readable(seconds: float, *descriptors: int) -> list[int]:
    poll = select.poll()  # select.select takes no descriptor above 1023
    for each in descriptors:
        poll.register(each, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(seconds * 1000)]


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return any(each.startswith(MARK) for each in file.read().split(b"\0"))
    return False


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def _has_failed(pid: int) -> bool:
    """Whether that child has ended with a failure that nobody asked for. It stays torchrun's to reap."""
    try:
        about = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return False
    if about is None:
        return False
    is_told = about.si_status == (128 + signal.SIGTERM if about.si_code == os.CLD_EXITED else signal.SIGTERM)
    return about.si_status != 0 and not is_told


def _kill(held: list[tuple[int, int]]) -> None:
    for pid, end in held:
        with contextlib.suppress(OSError):
            if not _readable(0.0, end):  # it lives, so the number is still its own
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                signal.pidfd_send_signal(end, signal.SIGKILL)
        os.close(end)
