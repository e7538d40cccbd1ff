"""Reader: the checkpoints of a storage path for a program that does not train, such as an evaluator, a rollout engine or a server."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from types import TracebackType

from . import _nebula
from ._session.engine import Engine
from ._session.rows import Row, Rows
from ._session.session import Session
from ._session.waits import interruptible
from .checkpoint import Checkpoint
from .errors import NebulaConfigError, NebulaError, NebulaNotFound

__all__ = ["Reader"]

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

    def follow(self, *, every: int | None = None, poll: float = 5.0, timeout: float | None = None) -> Iterator[Checkpoint]:
        """Yields the newest complete checkpoint, then each newer one. It skips checkpoints that came and were replaced meanwhile.

        every: only steps that are multiples of it.
        poll: seconds between looks at storage. A checkpoint of this node is noticed at once.
        timeout: ends the iteration if no newer checkpoint has come for so many seconds. None: it never ends.
        """
        last: tuple[str, int] | None = None
        newest = 0
        begun = time.monotonic()
        while True:
            watch = _nebula.Watch(self._engine.session(patient=True))  # before the look: it reports what comes after it
            found = self._next(every)
            if found is not None:
                with contextlib.suppress(NebulaNotFound):  # it has just been replaced
                    about = found._report()
                    this = (found.tag, about["generation"])
                    if this != last and about["sequence"] > newest:
                        last, newest = this, about["sequence"]
                        yield found
                        begun = time.monotonic()
                        continue
            left = poll if timeout is None else min(poll, begun + timeout - time.monotonic())
            if left <= 0:
                return
            self._wait(watch, left)

    def _next(self, every: int | None) -> Checkpoint | None:
        if every is None:
            return self.latest()
        rows = [row for row in self.versions() if row.state in LOADABLE and row.step is not None and row.step % every == 0]
        return self._session.get_checkpoint(rows[0].tag) if rows else None

    def _wait(self, watch: _nebula.Watch, seconds: float) -> None:
        """Returns when something was committed or became durable on this node, or after so many seconds."""
        end = time.monotonic() + seconds
        try:
            interruptible(watch.next, max(1, int(seconds * 1000)))
        except NebulaError:  # the agent has ended: the next look starts another one
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))
