"""checkpoint-<n>: the tags of checkpoints that a program does not name."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import weakref
from typing import TYPE_CHECKING

from ..errors import NebulaError
from . import ranks

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["OwnTags"]

log = logging.getLogger("nebulaml")

WHOLE = ("committed", "replicated", "durable")

_OWN_TAG = re.compile(r"checkpoint-(\d+)")


class OwnTags:
    """Counts on from the largest n of all complete checkpoints of earlier runs.

    All ranks get the same n: they make checkpoints in step, and begin at one number. The first rank of a process group says it. Without one,
    the ranks of a node leave out what this run has made, and what was made since the first of them looked.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.proxy(engine)  # which owns this object
        self._lock = threading.RLock()  # guards all below; an RLock, because a signal handler may save while its thread holds it
        self._count = 0
        self._counted: tuple[str | None, str] | None = None  # the path and job for which _count holds
        self._made: dict[tuple[str | None, str], int] = {}  # the last n of this process, by path and job
        self._looks = 0

    def next(self) -> str:
        settings = self._engine.settings()
        here = (settings.persist_path, settings.job)
        with self._lock:
            if self._counted != here:
                self._count = found = 0
                try:
                    found = self._look()
                except NebulaError as failure:
                    log.warning("nebula: cannot look for earlier checkpoints, counting from 1: %s", failure)
                made = self._made.get(here, 0) if self._engine.place().world > 1 else 0
                self._count = max(self._count, self._of_first_rank(found), made)  # a signal handler may have counted meanwhile
                self._counted = here
            self._count += 1
            self._made[here] = self._count
            return f"checkpoint-{self._count}"

    def _look(self) -> int:
        found, own = 0, self._engine.run() if self._engine.place().world > 1 else None
        for version in self._engine.versions(None):
            match = _OWN_TAG.fullmatch(version["tag"])
            if match and version.get("state") in WHOLE and not version.get("late") and (own is None or version.get("run") != own):
                found = max(found, int(match[1]))
        return found

    def _of_first_rank(self, found: int) -> int:
        """Returns the number that the first rank of the process group has found. No rank waits. Without a group: this rank's own."""
        shared, self._looks = ranks.store(), self._looks + 1
        if shared is None or self._engine.place().world == 1:
            return found
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the job
            return int(shared.compare_set(f"nebula/own-tags/{self._engine.agreement.number}/{self._looks}", "", str(found)))
        return found

    def forget(self) -> None:
        """Makes the next tag look again for the largest n."""
        with self._lock:
            self._counted = None

    def after_fork(self) -> None:
        """Renews the lock in a forked child, where no other thread holds it."""
        self._lock = threading.RLock()
