"""A spare node holds copies while it waits.

Rank 0 leaves the place of its checkpoints in a file in memory (worker.py). The ``nebula run`` of its node writes it into the store of the
rendezvous. The ``nebula run`` of a spare node reads it there, and opens a session without a rank: from then on its node's agent is the first
choice for the copies of the job's versions. The session stays open when the node takes part in the job: otherwise the agent could end before
the workers come, and its copies with it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from .. import _nebula
from .._session import locate

__all__ = ["KEY", "Waiting"]

_LOGGER = logging.getLogger("nebulaml.elastic")
KEY = "checkpoints"
LOOKS_S = (0.5, 8.0)  # pauses until the place is known
KEPT_S = 8.0  # then the session looks again: the agent may have ended, or the job has another place
END_S = 10.0  # the thread may be reading storage


class Waiting:
    """Opens a session when is_spare() is True in a ``with`` block, and another one in each block that follows. close() ends the last one."""

    def __init__(self, store: Any, is_spare: Callable[[], bool]) -> None:
        self._store, self._is_spare = store, is_spare
        self._session: Any = None
        self._place: dict[str, Any] = {}

    def __enter__(self) -> Waiting:
        self._place = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait, args=(self._over,), name="NebulaSpare", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(END_S)

    def close(self) -> None:
        if self._session is not None:
            self._session.leave()
            self._session = None

    def _wait(self, over: threading.Event) -> None:
        pause, said = LOOKS_S[0], ""
        while not over.wait(pause):
            try:
                if self._is_spare():
                    self._look()
            except Exception as failure:
                if str(failure) != said:
                    _LOGGER.warning("this spare node holds no copies of the job's checkpoints: %s", failure)
                said = str(failure)
            pause = KEPT_S if self._place else min(2 * pause, LOOKS_S[1]) if self._is_spare() else LOOKS_S[0]

    def _look(self) -> None:
        if not self._store.check([KEY]):
            return
        place = json.loads(self._store.get(KEY))
        wanted = {
            "persist_path": str(place["path"]), "job": str(place["job"]), "memory_bytes": int(place["memory_bytes"]),
            "agent_path": locate.agent_path(), "is_spare": 1,
        }  # fmt: skip
        if wanted != self._place:
            before, self._session = self._session, _nebula.Session(**wanted)
            if before is not None:
                before.leave()
            self._place = wanted
        self._session.report(_nebula.REPORT_STATUS, None)  # connects again if the agent has ended
