"""checkpoint-<n>: the tags of checkpoints that a program does not name."""

from __future__ import annotations

import logging
import re
import threading
import weakref
from typing import TYPE_CHECKING

from ..errors import NebulaError

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["OwnTags"]

log = logging.getLogger("nebulaml")

WHOLE = ("committed", "replicated", "durable")

_OWN_TAG = re.compile(r"checkpoint-(\d+)")


class OwnTags:
    """Counts on from the largest n of all complete checkpoints. All ranks get the same n, because they make checkpoints in step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.proxy(engine)  # which owns this object
        self._lock = threading.RLock()  # guards all below; an RLock, because a signal handler may save while its thread holds it
        self._count = 0
        self._counted: tuple[str | None, str] | None = None  # the path and job for which _count holds

    def next(self) -> str:
        settings = self._engine.settings()
        with self._lock:
            if self._counted != (settings.persist_path, settings.job):
                self._count = 0
                try:
                    self._look()
                except NebulaError as failure:
                    log.warning("nebula: cannot look for earlier checkpoints, counting from 1: %s", failure)
                self._counted = (settings.persist_path, settings.job)
            self._count += 1
            return f"checkpoint-{self._count}"

    def _look(self) -> None:
        for version in self._engine.versions(None):
            match = _OWN_TAG.fullmatch(version["tag"])
            if match and version.get("state") in WHOLE:
                self._count = max(self._count, int(match[1]))

    def forget(self) -> None:
        """Makes the next tag look again for the largest n."""
        with self._lock:
            self._counted = None

    def after_fork(self) -> None:
        """Renews the lock in a forked child, where no other thread holds it."""
        self._lock = threading.RLock()
