"""The rule for when a manager saves."""

from __future__ import annotations

import time
from collections.abc import Callable

from .._session.config import parse_seconds
from .._session.keeping import is_count
from ..errors import NebulaConfigError

__all__ = ["SaveEvery"]

OTHER = 3.0  # times an interval: another interval, which is said
COST = 0.01  # the most of a loop's time that saves take, where they come as soon as they can


class SaveEvery:
    """Decides whether to save a step: every ``steps`` steps, after ``seconds`` seconds, or both. With neither, each step.

    mode "free": when the last save is durable, and saves have cost at most COST of the time. Then ``steps`` is the least distance of two
    saves, and after ``seconds`` seconds one comes in any case.
    """

    def __init__(self, steps: int | None, seconds: float | str | None, mode: str | None = None) -> None:
        if steps is not None and not is_count(steps):
            raise NebulaConfigError(f"save_every_steps={steps!r:.200}: a whole number of steps, 1 or more")
        if mode not in (None, "free"):
            raise NebulaConfigError(f"save_every={mode!r:.200}: 'free' or None")
        self.steps = None if steps is None else int(steps)
        self.seconds = None if seconds is None else parse_seconds("save_every_s", seconds)
        self.is_free = mode == "free"
        self._last = time.monotonic()
        self._last_step: int | None = None
        self._cost_s = 0.0  # of the last save
        self._said_s: float | None = None  # the interval that was said last

    @property
    def asks_clock(self) -> bool:
        """Whether rank 0 decides, because ranks differ in what they see."""
        return self.is_free or self.seconds is not None

    def is_due_by_step(self, step: int) -> bool:
        """Returns the same answer on all ranks."""
        if self.is_free:
            return False
        if self.steps is None:
            return self.seconds is None
        return step % self.steps == 0

    def is_due_by_time(self, step: int, is_durable: Callable[[], bool]) -> bool:
        """Answers by what this process sees. is_durable: says whether its last save has become durable, or failed."""
        passed = time.monotonic() - self._last
        if self.seconds is not None and passed >= self.seconds:
            return True
        if not self.is_free:
            return False
        is_far = self._last_step is None or abs(step - self._last_step) >= (self.steps or 1)
        return is_far and passed * COST >= self._cost_s and is_durable()

    def saved(self, step: int, cost_s: float) -> str:
        """Notes a save, and the seconds for which it has held up the loop.

        Returns a sentence if saves come as soon as they can, and the interval is another one than the sentence before had; else "".
        """
        interval, is_first = time.monotonic() - self._last, self._last_step is None
        self._last, self._last_step, self._cost_s = time.monotonic(), step, cost_s
        before = self._said_s
        if not self.is_free or is_first or (before is not None and before < OTHER * interval and interval < OTHER * before):
            return ""
        self._said_s = interval
        then = "" if before is None else f", and before every {before:.3g} s"
        return f"saves come every {interval:.3g} s now{then}: the last one has held up the loop for {cost_s:.2g} s"
