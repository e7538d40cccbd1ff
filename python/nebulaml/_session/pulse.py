"""Steps and phases of this process, from which the agent of the node notices that the job hangs.

A step or a phase writes a page of memory that the agent reads about once a second. Before the first step nothing is watched.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

__all__ = ["beat", "offer", "phase", "progress", "rest"]

ON_HANG = "NEBULA_ON_HANG"
_SIGNALS = range(signal.SIGRTMAX - 4, signal.SIGRTMIN, -1)

_sessions: list[weakref.ref[Any]] = []  # those of this process that could count steps, the oldest first
_session: Any = None  # the one that does
_owner: weakref.ref[Any] | None = None  # its engine: a program may drop a session that it never closed
_step = 0
_phases: list[str] = []
_stacks: tuple[int, int] | None = None  # the signal that makes this process write its stacks, and the descriptor


def offer(engine: Any) -> None:
    """This engine has a session of a rank: it can count steps."""
    _sessions[:] = [ref for ref in _sessions if ref() not in (None, engine)] + [weakref.ref(engine)]


def progress(step: int | None = None) -> None:
    """Says that this process makes progress. The functions of this package that are called at each step do the same.

    step: for messages. Without a session it does nothing. If no rank of a node makes progress for much longer than usual, the agent says so,
    with the stacks of all threads (docs/elastic.md). The rank is watched from its first step on.
    """
    global _step
    if step is not None:
        _step = step
    if (_session is None or _owner is None or _owner() is None) and not _open():
        return
    _session.pulse_step(_step)


def beat(step: int | None = None) -> None:
    """``progress`` for the functions of this package: only a program that makes steps is watched."""
    if _session is not None or step is not None:
        progress(step)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Names work that takes another time than a step: ``with nm.phase("evaluate"):``. Use it on all ranks that wait for it.

    name: at most 31 bytes. A phase has limits of its own. Phases may lie in each other. Threads other than the main one have no phases.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _phases.append(name)
    if _session is not None:
        _session.pulse_phase(name)
    try:
        yield
    finally:
        _phases.pop()
        if _session is not None:
            _session.pulse_phase(_phases[-1] if _phases else None)


def rest() -> None:
    """Nothing is watched until the next step."""
    if _session is not None:
        _session.pulse_rest()


def leave(session: Any) -> None:
    """That session ends."""
    global _session
    if session is _session:
        _session.pulse_close()
        _session = None


def _open() -> bool:
    global _session, _owner
    if _session is not None:
        leave(_session)
    for engine in [ref() for ref in _sessions]:
        session = getattr(engine, "_session", None)
        if session is None:
            continue
        number, descriptor = _own_stacks()
        with contextlib.suppress(Exception):  # training goes on unwatched
            session.pulse_open(number, descriptor, os.environ.get(ON_HANG) == "restart")
            _session, _owner = session, weakref.ref(engine)
            if _phases:
                session.pulse_phase(_phases[-1])
            return True
    return False


def _own_stacks() -> tuple[int, int]:
    """Makes a signal write the stacks of all threads into a file in memory. (0, -1): no signal is free."""
    global _stacks
    if _stacks is None:
        _stacks = (0, -1)
        free = (number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_DFL)
        if (number := next(free, 0)) and hasattr(faulthandler, "register"):
            descriptor = os.memfd_create("nebula-stacks")
            faulthandler.register(number, file=descriptor, all_threads=True)
            _stacks = (number, descriptor)
    return _stacks


def _after_fork() -> None:
    """The page and the session are the parent's."""
    global _session
    _session = None
    _sessions.clear()
    _phases.clear()


os.register_at_fork(after_in_child=_after_fork)
