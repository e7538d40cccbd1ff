"""Pipes to the processes that a trainer has started."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["without_sigpipe"]


@contextlib.contextmanager
def without_sigpipe() -> Iterator[None]:
    """In this block a write to a process that has ended raises BrokenPipeError, although the program dies of SIGPIPE elsewhere.

    The kernel sends that signal to the thread that writes, so it is blocked in this thread, and taken away before it is unblocked.
    """
    was_waiting = signal.SIGPIPE in signal.sigpending()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPIPE,))
    try:
        yield
    finally:
        while not was_waiting and signal.sigtimedwait((signal.SIGPIPE,), 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
