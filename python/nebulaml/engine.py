"""This process's settings and its session with the node's agent, and what happens when there is none."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from sys import is_finalizing
from typing import Any, TypeVar

from . import _nebula, config, ending, locate, ranks, watching
from .errors import (
    NebulaConfigError,
    NebulaError,
    NebulaNotFound,
    NebulaPicklingError,
    NebulaTimeout,
    NebulaUnavailable,
    from_status,
)

__all__ = [
    "another_session",
    "committed",
    "configure",
    "guarded",
    "has_session",
    "interruptible",
    "is_initialized",
    "outlook",
    "part",
    "patiently",
    "put_back",
    "refuse_within_save",
    "session",
    "settings",
    "shutdown",
    "watch",
    "within_save",
]

log = logging.getLogger("nebulaml")

T = TypeVar("T")

LEAVE_MS = 300_000  # a copy in memory takes seconds; if one takes longer, it has lost its agent, its machine or its storage

SAY_AFTER_MS = 30_000  # a wait that has lasted so long says in the log what for
MISSING_MS = 2_000  # at the end of a rank: its neighbours end with it, and commit before that

RETRY_S = (5.0, 60.0)  # first and longest pause between attempts to reach an agent

_lock = threading.RLock()  # guards all below
_settings: config.Settings | None = None
_session: _nebula.Session | None = None
_opened_with: tuple[config.Settings, ranks.Place, str] | None = None
_opened_at: tuple[config.Settings, object] | None = None  # settings and mark of the rank when that was found to hold
_last_commit: _nebula.Checkpoint | None = None  # of this rank, where others are to commit too
_inherited: _nebula.Session | None = None  # in a forked child: its parent's
_failure: NebulaError | None = None
_retry_at = 0.0
_pause = RETRY_S[0]

_parts: dict[str, Any] = {}

_in_save: set[int] = set()  # threads that run Python code within a save, which holds the session until it is done


def part(name: str) -> Any:
    """A module of this package that imports torch. By name, and kept: when the interpreter ends, no import statement works any more."""
    found = _parts.get(name)
    if found is None:
        found = _parts[name] = importlib.import_module(f".{name}", __package__)
    return found


def is_initialized() -> bool:
    """Whether init() was called, by the program or an adapter, or another call has read the environment in its place."""
    return _settings is not None


def settings() -> config.Settings:
    """What holds now; reads the environment when nobody called init()."""
    found = _settings  # each save asks several times: no lock where there is nothing to do
    if found is not None:
        return found
    with _lock:
        if _settings is None:
            configure()
        assert _settings is not None
        return _settings


def outlook() -> config.Settings:
    """What holds, or would hold if nobody said more: unlike settings() it settles nothing."""
    with _lock:
        return _settings if _settings is not None else config.resolve(None)


def configure(**arguments: Any) -> None:
    """New settings for everything that follows; equal ones change nothing."""
    global _settings
    with _lock:
        _settings = config.resolve(_settings, **arguments)


def put_back(earlier: config.Settings | None) -> None:
    """After new settings were refused: what held before holds on."""
    global _settings
    with _lock:
        _settings = earlier


def place() -> ranks.Place:
    """Which rank this process is."""
    return ranks.Place() if settings().alone else ranks.current()


@contextlib.contextmanager
def within_save() -> Iterator[None]:
    """For what a save calls and waits for: a signal handler that runs meanwhile would wait for the save that it interrupts."""
    thread = threading.get_ident()
    _in_save.add(thread)
    try:
        yield
    finally:
        _in_save.discard(thread)


def refuse_within_save() -> None:
    """Raises NebulaUnavailable in such a signal handler."""
    if _in_save and threading.get_ident() in _in_save:  # each save asks several times: no thread-local, which is slow to find
        raise NebulaUnavailable(
            "this signal handler has interrupted a save that waits for a device, and that one is to end first: leave the work to the "
            "program, for example by a flag that it looks at after each step"
        )


def session(patient: bool = False) -> _nebula.Session:
    """The session, opened or brought up to date if need be.

    After a failure nobody is held up by another attempt for a while, unless ``patient``: then this raises at once.
    """
    global _session, _opened_with, _opened_at, _failure, _retry_at, _pause
    refuse_within_save()
    with _lock:
        chosen = settings()
        now = (chosen, ranks.mark())
        if _session is not None and _opened_at == now:
            return _session
        here = place()
        wanted = (chosen, here, chosen.run or ranks.run(here))
        if _session is not None and _opened_with == wanted:
            _opened_at = now
            return _session
        if _failure is not None and not patient and time.monotonic() < _retry_at:
            raise NebulaUnavailable(f"{_failure} (the next attempt is in {_retry_at - time.monotonic():.0f} s)")
        try:
            if _session is None:
                locate.point_to_agent_library()
                ending.watch(_before_end)
                _session = _nebula.Session(**_options(*wanted))
            else:
                _session.configure(**_options(*wanted))
        except NebulaConfigError:
            raise
        except NebulaError as failure:
            _failure, _retry_at = failure, time.monotonic() + _pause
            _pause = min(2 * _pause, RETRY_S[1])
            raise
        _opened_with, _opened_at, _failure, _pause = wanted, now, None, RETRY_S[0]
        return _session


def another_session(persist_path: str) -> _nebula.Session:
    """One more, for a checkpoint that this process alone keeps in another storage path; whoever asks drops it."""
    refuse_within_save()
    chosen = dataclasses.replace(
        settings(), persist_path=persist_path, persist_interval_s=0.0, retention_count=1, keep_last=0, keep_every=0, replica_count=0
    )
    locate.point_to_agent_library()
    return _nebula.Session(**_options(chosen, ranks.Place(), chosen.run or ranks.run(place())))


def has_session() -> bool:
    """Whether a session was opened."""
    return _session is not None


def watch() -> None:
    """From now on rank 0's log says what becomes of the checkpoints of the session in storage."""
    opened, found = _opened_with, _session
    if opened is not None and found is not None and opened[0].persist_path is not None and opened[1].rank == 0:
        watching.follow(found, opened)


def _settle() -> None:
    """Lets running copies end: nobody else can finish what lies in this process's memory."""
    if _session is not None:
        try:
            _session.settle(LEAVE_MS)
        except NebulaError as failure:
            log.error("nebula: the process ends while it saves: %s", failure)


def _outlive() -> None:
    """An agent that is a part of this process ends with it: the newest version must be durable before."""
    if _session in (None, _inherited) or os.environ.get("NEBULA_AGENT") != "inline" or settings().persist_path is None:
        return
    try:
        interruptible(_session.flush, None, LEAVE_MS)
    except NebulaError as failure:
        log.error("nebula: the process ends, its agent with it, before all that it saved is durable: %s", failure)


def _before_end() -> None:
    """This process is about to end at once, by os._exit() for one, or to become another program."""
    if not _nebula.await_copies(LEAVE_MS):
        log.error("nebula: the process ends while it saves: copies in memory were not done within %d s", LEAVE_MS // 1000)
    _outlive()


def committed(handle: _nebula.Checkpoint) -> None:
    """This rank has closed its part, and others have theirs to close: should they not, the end of the process says so."""
    global _last_commit
    _last_commit = handle if place().world > 1 else None


def _say_what_is_missing() -> None:
    if _last_commit is None or _session in (None, _inherited):
        return
    try:
        _last_commit.wait("committed", MISSING_MS)
    except NebulaNotFound:  # a newer one has taken its place
        pass
    except NebulaError as failure:
        log.warning("nebula: the process ends, and its last checkpoint is not complete: %s", failure)


def _leave() -> None:
    """At the end of the interpreter: keeps the threads of C out of it from then on.

    What is saved later, by other functions of atexit or in a __del__, is copied before its save returns. Nothing can be imported then,
    so that what a save needs is imported here.
    """
    _nebula.end_is_near()
    try:
        if "torch" in sys.modules:
            for name in ("device", "loading"):
                part(name)
            part("pickling").capture({})
            locate.agent_path()
        _settle()
        _say_what_is_missing()
        _outlive()
    finally:
        _nebula.leave()


def _options(chosen: config.Settings, place: ranks.Place, run: str) -> dict[str, Any]:
    return {
        "persist_path": chosen.persist_path,
        "job": chosen.job,
        "output_dir": config.history_dir(chosen),
        "run": run,
        "agent_path": locate.agent_path(),
        "persist_interval_s": chosen.persist_interval_s,
        "retention_count": chosen.retention_count,
        "memory_bytes": chosen.memory_bytes,
        "on_full": config.ON_FULL.index(chosen.on_full),
        "keep_last": chosen.keep_last,
        "keep_every": chosen.keep_every,
        "replica_count": chosen.replica_count,
        **place._asdict(),
    }


def _after_fork() -> None:
    """In the child: the thread that held the lock is not there, and what it was changing is opened anew by the next call.

    It ends by os._exit as a rule. The C library asks the kernel whether it was forked, and not every kernel says so.
    """
    global _lock, _inherited, _last_commit
    _last_commit = None
    _nebula.end_is_near()
    _lock, _inherited = threading.RLock(), _session
    watching.forget()


def shutdown() -> None:
    """Forgets settings and session, once running copies have ended. The agent finishes what was committed by itself."""
    global _settings, _session, _opened_with, _opened_at, _failure, _last_commit
    _settle()
    _last_commit = None
    watching.forget()
    with _lock:
        _settings = _session = _opened_with = _opened_at = _failure = None


def guarded(what: str, call: Callable[..., Any], *arguments: Any) -> NebulaError | None:
    """Runs `call`. With on_error="warn" a failure of Nebula is one loud line and is returned; the caller's own errors
    are raised always."""
    try:
        refuse_within_save()
        call(*arguments)
    except (NebulaConfigError, NebulaPicklingError):
        raise
    except NebulaError as failure:
        if settings().on_error == "raise":
            raise
        log.error("nebula: %s failed: %s. Training goes on; older checkpoints are untouched.", what, failure)
        return failure
    return None


def interruptible(call: Callable[..., T], *arguments: Any) -> T:
    """Runs a call that may wait for long so that Ctrl-C still works."""
    refuse_within_save()
    if threading.current_thread() is not threading.main_thread() or is_finalizing():  # then a new thread would never run
        return call(*arguments)
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call(*arguments))
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="nebula-wait", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread begins any more at the end of the interpreter, from Python 3.12 on
        return call(*arguments)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def patiently(what: str, call: Callable[[int], T], limit_ms: int) -> T:
    """As interruptible(), for a call that takes a limit in ms (< 0: none). What it waits for is a line of the log after a while."""
    if not 0 <= limit_ms <= SAY_AFTER_MS:
        begun = time.monotonic()
        try:
            return interruptible(call, SAY_AFTER_MS)
        except NebulaTimeout as failure:
            if time.monotonic() - begun < 0.9 * SAY_AFTER_MS / 1000:  # the agent has given up; its clock ends a slice a little early
                raise
            log.warning("nebula: %s is still waited for: %s", what, failure)
        limit_ms = max(limit_ms - SAY_AFTER_MS, -1) if limit_ms > 0 else -1
    return interruptible(call, limit_ms)


_nebula.set_error_factory(from_status)
atexit.register(_leave)
os.register_at_fork(after_in_child=_after_fork)
