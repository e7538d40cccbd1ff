"""News between the ranks: a rank whose save fails notifies the others, which would wait for its part of the version."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from .._session import engine, ranks

__all__ = ["Failures"]

LOOK_S = 0.5  # between two looks while a call waits


class Failures:
    """The saves of one manager that failed on some rank. The news goes through the store of the process group; without one there is none."""

    def __init__(self, owner: engine.Engine) -> None:
        self._engine = owner
        self.tries: Counter[int] = Counter()  # saves by step: a step may be saved again

    def begin(self, step: int) -> None:
        self.tries[step] += 1

    def _key(self, step: int) -> str:
        return f"nebula/failed/{self._engine.agreement.number}/{step}/{self.tries[step]}"

    def report(self, step: int, reason: str) -> None:
        """Tells the other ranks that this one has no part of the version."""
        place, shared = self._engine.place(), ranks.store()
        if place.world > 1 and shared is not None:
            with contextlib.suppress(RuntimeError):  # no store, no news
                shared.set(self._key(step), json.dumps({"rank": place.rank, "reason": reason}))

    def heard(self, step: int) -> str | None:
        """Returns the sentence of a rank that has failed to save the step. None: no rank has said so."""
        place, shared = self._engine.place(), ranks.store()
        if place.world == 1 or shared is None:
            return None
        with contextlib.suppress(RuntimeError):
            if shared.check([self._key(step)]):
                reported = json.loads(shared.get(self._key(step)))
                return f"rank {reported['rank']} has failed to save it: {reported['reason']}"
        return None

    @contextlib.contextmanager
    def listening(self, look: Callable[[], None]) -> Iterator[None]:
        """Calls ``look()`` now, and again and again on a thread while the block waits."""
        look()
        if self._engine.place().world == 1 or ranks.store() is None or sys.is_finalizing():
            yield
            return
        done = threading.Event()

        def run() -> None:
            while not done.wait(LOOK_S):
                look()

        thread = threading.Thread(target=run, name="nebula-listen", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
