"""The rules for when a manager saves and which versions it keeps."""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .._session.config import parse_seconds
from ..errors import NebulaConfigError

__all__ = ["Best", "Keep", "SaveEvery", "Stored", "kept"]


def _is_count(value: Any) -> bool:
    """True for a whole number of 1 or more, also one of numpy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1


@dataclasses.dataclass(frozen=True)
class Best:
    """Keep the ``count`` versions whose ``metric`` is the smallest (``mode="min"``) or largest (``"max"``)."""

    metric: str
    mode: str = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            raise NebulaConfigError(f"Best({self.metric!r:.200}): a metric is named by text, as in Best('val_loss')")
        if self.mode not in ("min", "max"):
            raise NebulaConfigError(f"Best({self.metric!r}, mode={self.mode!r}): the mode is 'min' or 'max'")
        if not _is_count(self.count):
            raise NebulaConfigError(f"Best({self.metric!r}, count={self.count!r}): the count is 1 or more")

    def order(self, metrics: dict[int, dict[str, float]]) -> list[int]:
        """Returns the steps from the best on; of equal ones the later step first. Steps without the metric, or with NaN, are left out."""
        known = {step: said[self.metric] for step, said in metrics.items() if not math.isnan(said.get(self.metric, math.nan))}
        sign = 1 if self.mode == "min" else -1
        return sorted(known, key=lambda step: (sign * known[step], -step))


class SaveEvery:
    """Decides whether to save a step: every ``steps`` steps, after ``seconds`` seconds, or both. With neither, each step."""

    def __init__(self, steps: int | None, seconds: float | str | None) -> None:
        if steps is not None and not _is_count(steps):
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


@dataclasses.dataclass(frozen=True)
class Keep:
    """The rules: a version stays if one of them names it. Without any rule all stay."""

    last: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.last), ("keep_every", self.every)):
            if value is not None and not _is_count(value):
                raise NebulaConfigError(f"{name}={value!r:.200}: a whole number of 1 or more, or None")
        if self.best is not None and not isinstance(self.best, Best):
            raise NebulaConfigError(f"keep_best={self.best!r}: give nebulaml.Best(metric, mode, count)")

    @property
    def all(self) -> bool:
        return self.last is None and self.every is None and self.best is None

    def __str__(self) -> str:
        said = {"keep_last": self.last, "keep_every": self.every, "keep_best": self.best}
        return ", ".join(f"{name}={value}" for name, value in said.items() if value is not None)


class Stored(NamedTuple):
    """A version in storage, as the rules see it."""

    step: int
    sequence: int  # of its commit
    abandoned: bool
    metrics: dict[str, float]


def kept(rules: Keep, newest_first: Sequence[Stored], pinned: Iterable[int]) -> set[int]:
    """Returns the steps that stay. The newest always does, because a restart loads it.

    An abandoned version stays for its metric, for a pin, and until keep_last versions of the line that goes on were committed
    after it. If no version has the metric of keep_best, all stay: then the rule cannot tell the best.
    """
    present = {one.step for one in newest_first}
    best = rules.best.order({one.step: one.metrics for one in newest_first}) if rules.best is not None else []
    if rules.all or (rules.best is not None and not best):
        return present
    last = rules.last or 1
    current = [one for one in newest_first if not one.abandoned]
    stay = {one.step for one in current[:last]} | set(pinned) | {one.step for one in newest_first[:1]}
    stay |= {one.step for one in newest_first if one.abandoned and sum(other.sequence > one.sequence for other in current) < last}
    if rules.every is not None:
        stay |= {one.step for one in current if one.step % rules.every == 0}
    if rules.best is not None:
        stay |= set(best[: rules.best.count])
    return stay & present
