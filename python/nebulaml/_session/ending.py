"""Keeps the promises of commits if the process ends by a call that skips Python's own end.

``os._exit`` and ``signal.raise_signal`` are wrapped, because CPython raises no audit event for them. For ``os.exec...`` and
``os.kill`` CPython calls the audit hook in C. The C library handles all other ends (src/os/ending.h).
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from .. import _nebula

__all__ = ["watch"]

_GROUPS = (0, -1)  # os.kill() of one of these signals this process, too

_before: Callable[[], None] | None = None


def watch(before: Callable[[], None]) -> None:
    """Calls ``before`` before each such end from now on."""
    global _before
    if _before is None:
        os._exit = _wrapped_exit(os._exit)
        signal.raise_signal = _wrapped_raise(signal.raise_signal)
        _nebula.audit_ends(_audited)
    _before = before


def _end() -> None:
    if _before is not None:
        _before()


def _wrapped_exit(exit_now: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    @functools.wraps(exit_now)
    def _exit(status: int) -> NoReturn:
        try:
            _end()
        finally:
            exit_now(status)

    return _exit


def _wrapped_raise(raise_now: Callable[[int], None]) -> Callable[[int], None]:
    @functools.wraps(raise_now)
    def raise_signal(signalnum: int) -> None:
        if _nebula.signal_would_end(signalnum):
            _end()
        raise_now(signalnum)

    return raise_signal


def _audited(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.exec":
        _end()
        return
    target, number = arguments[:2]
    if event == "os.killpg":
        is_own = target in (0, os.getpgrp())
    else:
        is_own = target == os.getpid() or target in _GROUPS or target == -os.getpgrp()
    if is_own and _nebula.signal_would_end(number):
        _end()
