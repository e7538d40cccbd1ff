"""Engine: the settings of a session, its connection to the node's agent, and the handling of a missing agent.

Each ``Session`` has one ``Engine``. ``default`` is the engine of the package's functions, and the functions of this module use it.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import _nebula
from ..elastic import worker
from ..elastic.worker import RECORD
from ..errors import (
    NebulaConfigError,
    NebulaError,
    NebulaNotFound,
    NebulaPicklingError,
    NebulaStorageError,
    NebulaUnavailable,
    from_status,
)
from . import agree, config, ending, late, locate, pulse, ranks, tags, watching
from .waits import refuse_within_save, run_handlers

if TYPE_CHECKING:
    from ..events import Event

__all__ = ["Engine", "default", "is_initialized", "part", "place", "session", "settings"]

log = logging.getLogger("nebulaml")

LEAVE_MS = 300_000  # a copy in memory takes seconds; one that takes longer has lost its agent, its machine or its storage

MISSING_MS = 2_000  # the wait for other ranks at the end of this one: they end at the same time, and commit before that

LATE_MAX = 100  # failures that no call has raised yet

RETRY_S = (5.0, 60.0)  # first and longest pause between attempts to reach an agent


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # all engines of this process


class Engine:
    """The state of one session. Any thread may call its methods."""

    def __init__(self, is_reader: bool = False) -> None:
        self._lock = threading.RLock()  # guards all below
        self.is_reader = is_reader  # a reader has no rank, saves nothing, and reports on nobody's checkpoints
        self._inherited: _nebula.Session | None = None  # in a forked child: the session of its parent
        self.is_closed = False  # and never opens again
        self._clear()
        self.agreement = agree.Agreement(self)
        self.own_tags = tags.OwnTags(self)
        self.listeners: list[Callable[[Event], object]] = []  # called on the watcher's thread
        self._late: collections.deque[NebulaError] = collections.deque(maxlen=LATE_MAX)
        _engines.add(self)

    def _clear(self) -> None:
        self._settings: config.Settings | None = None
        self._session: _nebula.Session | None = None
        self.is_prepared = False  # memory for the first saves was prepared, or a save has made its own
        self._opened_with: tuple[config.Settings, ranks.Place, str] | None = None
        # the settings and the mark of the rank with which _opened_with was last checked
        self._opened_at: tuple[config.Settings, object] | None = None
        self._renews = False  # the program has given settings since: the agent may need new keys of the environment
        self._last_commit: _nebula.Checkpoint | None = None  # of this rank, if other ranks must commit it too
        self._logged_memory_only = False
        self._failure: NebulaError | None = None
        self._retry_at = 0.0
        self._pause = RETRY_S[0]
        self.watcher: watching.Watcher | None = None

    # -- settings

    @property
    def is_initialized(self) -> bool:
        """True if the program or an adapter has given settings, or a call has read them from the environment."""
        return self._settings is not None

    def settings(self) -> config.Settings:
        """Returns the settings that hold now. If none were given, it reads the environment."""
        found = self._settings  # each save asks several times: no lock if there is nothing to do
        if found is not None:
            return found
        with self._lock:
            if self._settings is None:
                self.configure()
            assert self._settings is not None
            return self._settings

    def outlook(self) -> config.Settings:
        """Returns the settings that hold, or would hold without further calls. Unlike settings(), it does not fix them."""
        with self._lock:
            return self._settings if self._settings is not None else config.resolve(None)

    def configure(self, **arguments: Any) -> None:
        """Sets new settings for everything that follows. Equal ones change nothing."""
        with self._lock:
            if self.is_closed:
                raise NebulaUnavailable("this session was closed: make another one with nebulaml.Session(...)")
            self._settings = config.resolve(self._settings, **arguments)
            self._renews = True

    def put_back(self, earlier: config.Settings | None) -> None:
        """Restores the earlier settings after new ones were refused."""
        with self._lock:
            self._settings = earlier

    def place(self) -> ranks.Place:
        """Returns the rank and world of this process."""
        return ranks.Place() if self.settings().alone else ranks.current()

    # -- the connection

    def session(self, patient: bool = False) -> _nebula.Session:
        """Returns the C library's session, and opens or updates it first if needed.

        After a failed attempt it raises at once for a while, instead of trying again. With ``patient`` it always tries.
        """
        refuse_within_save()
        with self._lock:
            chosen = self.settings()
            now = (chosen, ranks.mark())
            if self._session is not None and self._opened_at == now and not self._renews:
                return self._session
            here = self.place()
            wanted = (chosen, here, self._run_at(chosen, here))
            if self._session is not None and self._opened_with == wanted and not self._renews:
                self._opened_at = now
                return self._session
            if self._failure is not None and not patient and time.monotonic() < self._retry_at:
                raise NebulaUnavailable(f"{self._failure} (the next attempt is in {self._retry_at - time.monotonic():.0f} s)")
            try:
                self._connect(*wanted)
            except NebulaConfigError:
                raise
            except NebulaError as failure:
                self._failure, self._retry_at = failure, time.monotonic() + self._pause
                self._pause = min(2 * self._pause, RETRY_S[1])
                raise
            self._opened_with, self._opened_at, self._failure, self._pause = wanted, now, None, RETRY_S[0]
            self._renews = False
            assert self._session is not None
            return self._session

    def run(self) -> str:
        """Returns the name of this run, as the agent knows it."""
        return self._run_at(self.settings(), self.place())

    @staticmethod
    def _run_at(chosen: config.Settings, place: ranks.Place) -> str:
        return (chosen.run or ranks.run(place)) + ranks.start()

    def _connect(self, chosen: config.Settings, place: ranks.Place, run: str) -> None:
        if self._session is None:
            worker.join()
            ending.watch(_before_end)
            self._session = _nebula.Session(**_options(chosen, place, run), is_reader=self.is_reader)
            if not self.is_reader:
                pulse.offer(self)
                worker.tell()
                if sys.modules.get("torch"):
                    with contextlib.suppress(ImportError):  # a torch without hooks for all optimizers
                        late.foresight.follow(self)
        else:
            self._session.configure(**_options(chosen, place, run), is_reader=self.is_reader)
        if chosen.replica_count and chosen.persist_path is not None and not self.is_reader:
            worker.tell_spares(chosen.persist_path, chosen.job, chosen.memory_bytes)

    def has_session(self) -> bool:
        """True if a connection was opened."""
        return self._session is not None

    def versions(self, persist_path: str | None) -> list[dict[str, Any]]:
        """Returns all versions that the agent knows, in memory and in storage. NebulaStorageError: storage cannot be listed."""
        report = json.loads(self.session().report(_nebula.REPORT_VERSIONS, persist_path))
        if report["unread"]:  # a list of memory alone would pass for the whole one
            raise NebulaStorageError(report["unread"])
        return list(report["versions"])

    def watch(self) -> None:
        """Makes rank 0 log what becomes of this session's checkpoints in storage from now on."""
        opened, found = self._opened_with, self._session
        if opened is not None and not self.is_reader and found is not None and opened[0].persist_path is not None and opened[1].rank == 0:
            self.watcher = watching.follow(self.watcher, found, opened, _notifier(self))

    def guarded(self, what: str, call: Callable[..., Any], *arguments: Any) -> NebulaError | None:
        """Runs `call`. With on_error="warn" it logs a failure of Nebula as one error line and returns it.

        Errors of the caller are always raised.
        """
        try:
            refuse_within_save()
            with pulse.phase("save"):
                call(*arguments)
            pulse.beat()
        except (NebulaConfigError, NebulaPicklingError):
            raise
        except NebulaError as failure:
            if self.settings().on_error == "raise":
                raise
            log.error("nebula: %s failed: %s. Training goes on; older checkpoints are untouched.", what, failure)
            return failure
        return None

    # -- failures after a call had succeeded

    def note_late(self, failure: NebulaError) -> None:
        """Records that a promise of an earlier save or commit is lost. Any thread may call it."""
        self._late.append(failure)

    def forget_late(self, failure: NebulaError) -> None:
        """Removes a failure that the caller raises itself."""
        with contextlib.suppress(ValueError):
            self._late.remove(failure)

    def raise_late(self) -> None:
        """With on_error="raise": raises the oldest recorded failure, once. Callers use it where an exception loses nothing."""
        if self._late and self.settings().on_error == "raise":
            raise self._late.popleft()

    def take_late(self) -> list[NebulaError]:
        """Returns all recorded failures and forgets them."""
        taken = []
        while self._late:
            taken.append(self._late.popleft())
        return taken

    def hear(self, event: Event) -> None:
        """Handles an event. The watcher's thread calls it."""
        if event.kind == "lost":
            self.note_late(NebulaError(f"checkpoint {event.tag!r} is not durable, and will not be: {event.text}"))
        for listener in list(self.listeners):
            try:
                listener(event)
            except Exception:
                log.exception("nebula: a function that was given to on_event() failed")

    # -- ends

    def committed(self, handle: _nebula.Checkpoint) -> None:
        """Notes that this rank has closed its part of a version that others must close too, for say_what_is_missing()."""
        self._last_commit = handle if self.place().world > 1 else None

    def log_memory_only(self) -> None:
        """Logs once that there is no storage path: each call succeeds, and nothing outlives this machine's memory."""
        if self._logged_memory_only or self.settings().persist_path is not None:
            return
        self._logged_memory_only = True
        if self.place().rank == 0:
            log.warning("nebula: checkpoints are in memory only, because no storage path was given: nebulaml.init(persistent_storage_path=...)")

    def record_imports(self) -> None:
        """At the first commit, leaves the names of the modules for `--warm auto` (elastic/warm.py), if the launcher has asked for them."""
        path = os.environ.pop(RECORD, "")
        if path:
            from ..elastic import warm

            warm.record(path)

    def settle(self) -> None:
        """Waits for running copies: no other process can finish what lies in this process's memory."""
        if self._session is not None:
            try:
                self._session.settle(LEAVE_MS)
            except NebulaError as failure:
                log.error("nebula: the process ends while it saves: %s", failure)

    def say_what_is_missing(self) -> None:
        """Waits shortly for the other ranks' commits at the end of the process, and logs a warning if some are missing."""
        if self._last_commit is None or self._session in (None, self._inherited):
            return
        try:
            self._last_commit.wait("committed", MISSING_MS)
        except NebulaNotFound:  # a newer version has taken its place
            pass
        except NebulaError as failure:
            log.warning("nebula: the process ends, and its last checkpoint is not complete: %s", failure)

    def after_fork(self) -> None:
        """Resets the engine in a forked child.

        The thread that held the lock does not exist there. The next call opens anew what that thread was changing.
        """
        self._last_commit = self.watcher = None
        self._lock, self._inherited = threading.RLock(), self._session
        self.agreement.after_fork()
        self.own_tags.after_fork()

    def shutdown(self) -> None:
        """Waits for running copies, and forgets settings and connection. The agent finishes committed versions by itself."""
        self.settle()
        self._last_commit = None
        watching.end(self.watcher)
        with self._lock:
            opened = self._session if self._session is not self._inherited else None
            self._clear()
        if opened is not None:
            pulse.leave(opened)
            opened.leave()  # checkpoints and loaded tensors may keep it, and another process may want to be this rank
        self._late.clear()
        self.agreement.forget()
        self.own_tags.forget()


default = Engine()


def is_initialized() -> bool:
    """Returns True if the program or an adapter has called init(), or another call has read its settings from the environment."""
    return default.is_initialized


def settings() -> config.Settings:
    """Returns the settings of the package's functions."""
    return default.settings()


def session(patient: bool = False) -> _nebula.Session:
    """Returns the C library's session behind the package's functions."""
    return default.session(patient)


def place() -> ranks.Place:
    """Returns the rank and world of this process, as the package's functions see them."""
    return default.place()


def _notifier(engine: Engine) -> Callable[[Event], None]:
    """Returns a function for the watcher's thread that keeps no session alive."""
    known = weakref.ref(engine)

    def notify(event: Event) -> None:
        found = known()
        if found is not None:
            found.hear(event)

    return notify


def _before_end() -> None:
    """Runs before the process ends at once, for example by os._exit(), or becomes another program."""
    if not _nebula.await_copies(LEAVE_MS):
        log.error("nebula: the process ends while it saves: copies in memory were not done within %d s", LEAVE_MS // 1000)


def _leave() -> None:
    """Ends all engines at the end of the interpreter, and keeps the threads of C out of it from then on.

    Other functions of atexit, or a __del__, may save later. Such a save copies before it returns. It cannot import anything
    then, so this function imports all that a save needs.
    """
    _nebula.end_is_near()
    engines = list(_engines)
    try:
        with contextlib.suppress(ImportError):  # a torch that cannot be imported stops no save that has begun
            if sys.modules.get("torch"):
                for name in ("device", "loading"):
                    getattr(late, name)
                late.pickling.capture({})
            elif any(engine.has_session() for engine in engines) and not late.has_torch():
                late.pickling.capture({})
        locate.agent_path()
        for step in (Engine.settle, Engine.say_what_is_missing):
            for engine in engines:
                step(engine)
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
        "keep_hourly": chosen.keep_hourly,
        "keep_daily": chosen.keep_daily,
        "keep_weekly": chosen.keep_weekly,
        "keep_within_s": int(chosen.keep_within_s),
        "replica_count": chosen.replica_count,
        "has_spares": int(bool(os.environ.get(worker.SPARES))),
        "keep_best": chosen.keep_best.metric if chosen.keep_best else None,
        "keep_items": chosen.keep_items or None,
        "keep_best_count": int(chosen.keep_best.count) if chosen.keep_best else 0,
        "keep_best_is_largest": chosen.keep_best is not None and chosen.keep_best.mode == "max",
        **place._asdict(),
    }


def _after_fork() -> None:
    """Resets all engines in a forked child, which mostly ends by os._exit.

    The C library asks the kernel whether the process was forked, but not every kernel says.
    """
    _nebula.end_is_near()
    for engine in list(_engines):
        engine.after_fork()


_nebula.set_error_factory(from_status)
_nebula.watch_waits(run_handlers)
atexit.register(_leave)
os.register_at_fork(after_in_child=_after_fork)
