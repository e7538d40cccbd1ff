"""The rule for when a manager saves."""

from __future__ import annotations

import time

from .._session.config import parse_seconds
from .._session.keeping import is_count
from ..errors import NebulaConfigError

__all__ = ["SaveEvery"]


class SaveEvery:
    """Decides whether to save a step: every ``steps`` steps, after ``seconds`` seconds, or both. With neither, each step."""

    def __init__(self, steps: int | None, seconds: float | str | None) -> None:
        if steps is not None and not is_count(steps):
            raise NebulaConfigError(f"save_every_steps={steps!r:.200}: a whole number of steps, 1 or more")
        self.steps = None if steps is None else int(steps)
        self.seconds = None if seconds is None else parse_seconds("save_every_s", seconds)
        self._last = time.monotonic()

    def is_due_by_step(self, step: int) -> bool:
        """Returns the same answer on all ranks."""
        if self.steps is None:
            return self.seconds is None
        return step % self.steps == 0

    def is_due_by_time(self) -> bool:
        """Answers by this process's clock."""
        return self.seconds is not None and time.monotonic() - self._last >= self.seconds

    def saved(self) -> None:
        self._last = time.monotonic()
