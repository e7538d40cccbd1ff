"""Reader: the checkpoints of a storage path for a program that does not train, such as an evaluator, a rollout engine or a server."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from . import _nebula
from ._session.engine import Engine
from ._session.keeping import Best
from ._session.rows import Row, Rows
from ._session.session import Session
from ._session.waits import interruptible
from .checkpoint import Checkpoint
from .errors import (
    NebulaConfigError,
    NebulaCorrupt,
    NebulaError,
    NebulaNotFound,
    NebulaStorageError,
    NebulaTimeout,
    NebulaUnavailable,
)

__all__ = ["Reader"]

log = logging.getLogger("nebulaml")
LOOK_S = 10.0  # that a look may take, also beyond a shorter timeout
LOADABLE = ("committed", "replicated", "durable")


class Reader:
    """Reads the checkpoints of all jobs of a storage path, beside trainers or on another machine.

    persist_path: a directory or a URL.
    It has no rank and changes nothing, so any number may run. It finds what the memory of this node has, and else what storage has.
    Memory and storage keep the checkpoint that it found last until it finds another one or ends, unless a save needs that memory.
    Raises NebulaError, whatever on_error is for others: there is no training that an error could disturb.
    """

    def __init__(self, persist_path: str | os.PathLike[str]) -> None:
        if not os.fspath(persist_path):
            raise NebulaConfigError("Reader('') names no storage path")
        owner = Engine(is_reader=True)
        owner.configure(persistent_storage_path=persist_path, job="", world=1, on_error="raise")
        owner.session(patient=True)
        self._engine, self._session = owner, Session._of(owner)

    def __repr__(self) -> str:
        return repr(self._session).replace("nebulaml.Session", "nebulaml.Reader")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the reader. Memory that was loaded stays valid."""
        self._session.close()

    def latest(self) -> Checkpoint | None:
        """Finds the newest complete checkpoint. None: there is none."""
        return self._session.get_latest_checkpoint()

    def get(self, which: str | int) -> Checkpoint | None:
        """Finds the complete checkpoint of a tag, or the newest one of a step. None: there is none."""
        if isinstance(which, str):
            return self._session.get_checkpoint(which)
        found = [row for row in self.versions() if row.step == which and row.state in LOADABLE]
        return self._session.get_checkpoint(found[0].tag) if found else None

    def versions(self) -> Rows[Row]:
        """Returns a row for each checkpoint, the newest first, also for those that are not complete yet."""
        return self._session.checkpoints()

    def follow(
        self, *, every: int | None = None, best: Best | tuple[str, str] | str | None = None, poll: float = 5.0, timeout: float | None = None
    ) -> Iterator[Checkpoint]:
        """Yields the newest complete checkpoint, then each newer one. It skips checkpoints that came and were replaced meanwhile.

        every: only steps that are multiples of it.
        best: only a checkpoint that is the best so far by a metric: ``Best("loss", "min")``, ``("loss", "min")``, or ``"loss"``, whose smallest
            value is the best. The first one is the best of those that are there.
        poll: seconds between looks at storage. A checkpoint of this node is noticed at once.
        timeout: ends the iteration if no such checkpoint has come for so many seconds. None: it never ends. If storage does not even answer
            until then, nor within 10 seconds, it raises NebulaTimeout.

        If storage fails after the first look, it goes on looking. It raises the failure if that lasts until the timeout.
        """
        return self._follow(self._search(every, _rule(best)), poll, timeout)

    def _search(self, every: int | None = None, best: Best | None = None) -> _Search:
        return _Search(self._session, every, best)

    def _follow(self, search: _Search, poll: float, timeout: float | None) -> Iterator[Checkpoint]:
        """Yields as follow() does, after the checkpoint that the search has yielded last."""
        failure: NebulaError | None = None
        has_looked = False
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            found = None
            try:
                watch = _nebula.Watch(self._engine.session(patient=True))  # before the look: it reports what comes after it
                found = search.next() if timeout is None else search.look(until)
                about = found._report() if found is not None else {}
                failure, has_looked = None, True
            except NebulaNotFound:  # it has just been replaced
                found, has_looked = None, True
            except (NebulaStorageError, NebulaTimeout, NebulaUnavailable) as error:
                if not has_looked or time.monotonic() >= until:
                    raise
                if failure is None:
                    log.warning("nebula: follow() cannot look for a newer checkpoint, and goes on trying: %s", error)
                failure = error
            if found is not None:
                if about.get("sequence", 0) > search.last:
                    search.taken(found, about)
                    yield found
                    until = math.inf if timeout is None else time.monotonic() + timeout
                    continue
            left = min(poll, until - time.monotonic())
            if left <= 0:
                if failure is not None:
                    raise failure
                return
            self._wait(watch, left)

    def _wait(self, watch: _nebula.Watch, seconds: float) -> None:
        """Returns when something was committed or became durable on this node, or after so many seconds."""
        end = time.monotonic() + seconds
        try:
            interruptible(watch.next, max(1, int(seconds * 1000)))
        except NebulaError:  # the agent has ended: the next look starts another one
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))


def _rule(best: Best | tuple[str, str] | str | None) -> Best | None:
    rule = Best(best) if isinstance(best, str) else Best(*best) if isinstance(best, tuple) and len(best) == 2 else best
    if rule is not None and (not isinstance(rule, Best) or rule.count != 1):
        raise NebulaConfigError(f'follow(best={best!r}): give a metric, or ("loss", "min"), or nebulaml.Best("loss", "min")')
    return rule


class _Look:
    """One search on a thread of its own, which a storage that hangs may hold for minutes."""

    def __init__(self, search: _Search) -> None:
        self._found: Checkpoint | None = None
        self._failure: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(search,), name="nebula-follow", daemon=True).start()

    def _run(self, search: _Search) -> None:
        try:
            self._found = search.next()
        except BaseException as failure:
            self._failure = failure
        self._done.set()

    def is_over(self) -> bool:
        return self._done.is_set()

    def result(self, until: float) -> Checkpoint | None:
        if not self._done.wait(max(until - time.monotonic(), LOOK_S)):
            raise NebulaTimeout("storage does not answer, so nobody knows whether there is a newer checkpoint")
        if self._failure is not None:
            raise self._failure
        return self._found


class _Search:
    """Finds the checkpoint that follow() yields next."""

    def __init__(self, session: Session, every: int | None, best: Best | None) -> None:
        self._session, self._every, self._best = session, every, best
        self._values: dict[tuple[str, float], float] = {}  # of the checkpoints that are there, by tag and time of the commit
        self._limit: float | None = None  # the best value that was yielded
        self._held: str | None = None  # the tag of the checkpoint that was yielded last
        self.last = 0  # its sequence
        self._look: _Look | None = None

    def look(self, until: float) -> Checkpoint | None:
        """Does next() on a thread, of which there is one: a look that storage still holds goes on."""
        if self._look is None or self._look.is_over():
            self._look = _Look(self)
        return self._look.result(until)

    def next(self) -> Checkpoint | None:
        if self._every is None and self._best is None:
            return self._session.get_latest_checkpoint()
        rows = [row for row in self._session.checkpoints() if row.state in LOADABLE and not row.abandoned]
        if self._every is not None:
            rows = [row for row in rows if row.step is not None and row.step % self._every == 0]
        if self._best is not None:
            return self._better(rows, self._best)
        return self._session.get_checkpoint(rows[0].tag) if rows else None

    def _better(self, rows: list[Row], rule: Best) -> Checkpoint | None:
        """Returns the best checkpoint, if it is better than the one that was yielded last."""
        known, looked = {}, False
        for row in rows:
            key = (row.tag, row.committed_at)
            if key not in self._values:
                found, looked = self._session.get_checkpoint(row.tag), True
                try:
                    self._values[key] = found.metrics.get(rule.metric, math.nan) if found is not None else math.nan
                except NebulaNotFound:  # it has just been removed
                    continue
                except NebulaCorrupt:
                    self._values[key] = math.nan
            known[key] = self._values[key]
        self._values = known
        order = rule.order({index: {rule.metric: value} for index, value in enumerate(known.values())})
        if order:
            key = list(known)[order[0]]
            if self._limit is None or (known[key] < self._limit if rule.mode == "min" else known[key] > self._limit):
                return self._session.get_checkpoint(key[0])
        if looked and self._held is not None:  # the look at others has ended the lease of the one that the caller has
            self._session.get_checkpoint(self._held)
        return None

    def taken(self, found: Checkpoint, about: dict[str, Any]) -> None:
        self._held, self.last = found.tag, about["sequence"]
        if self._best is not None:
            self._limit = found.metrics.get(self._best.metric, self._limit)
