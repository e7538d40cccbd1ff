"""The rules for versions that stay in storage. The agent applies them (src/store/order.h)."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

from ..errors import NebulaConfigError

__all__ = ["Best", "is_count", "items_text"]

ITEMS_MOST = 8  # patterns, and the bytes of one and of all: store/thin.h, ipc.h
PATTERN_BYTES = 127
ITEMS_BYTES = 255


def is_count(value: Any) -> bool:
    """True for a whole number of 1 or more, also one of numpy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1


def items_text(items: Any) -> str:
    """Returns keep_items as the agent takes it. items: {pattern of file names: how many of the newest versions keep these files}."""
    if not isinstance(items, Mapping):
        raise NebulaConfigError(f"keep_items={items!r:.200}: give a dict, as {{'optimizer*': 2}}")
    for pattern, count in items.items():
        if not isinstance(pattern, str) or not pattern or set(pattern) & set(",=\0") or len(pattern.encode()) > PATTERN_BYTES:
            raise NebulaConfigError(f"keep_items: {pattern!r:.200} is no pattern of file names: text without ',' and '='")
        if not is_count(count):
            raise NebulaConfigError(f"keep_items: {pattern!r:.200} has the count {count!r:.50}: a whole number of 1 or more")
    text = ",".join(f"{pattern}={int(count)}" for pattern, count in items.items())
    if len(items) > ITEMS_MOST or len(text.encode()) > ITEMS_BYTES:
        raise NebulaConfigError(f"keep_items has {len(items)} patterns and {len(text)} bytes; {ITEMS_MOST} and {ITEMS_BYTES} are the most")
    return text


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
        if not is_count(self.count):
            raise NebulaConfigError(f"Best({self.metric!r}, count={self.count!r}): the count is 1 or more")

    def order(self, metrics: dict[int, dict[str, float]]) -> list[int]:
        """Returns the steps from the best on, in the given order if they are equal. Steps without the metric, or with NaN, are left out."""
        known = {step: said[self.metric] for step, said in metrics.items() if not math.isnan(said.get(self.metric, math.nan))}
        sign = 1 if self.mode == "min" else -1
        return sorted(known, key=lambda step: sign * known[step])
