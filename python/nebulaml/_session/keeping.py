"""The rules for versions that stay in storage. The agent applies them (src/store/order.h)."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from ..errors import NebulaConfigError

__all__ = ["Best", "is_count"]


def is_count(value: Any) -> bool:
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
        if not is_count(self.count):
            raise NebulaConfigError(f"Best({self.metric!r}, count={self.count!r}): the count is 1 or more")

    def order(self, metrics: dict[int, dict[str, float]]) -> list[int]:
        """Returns the steps from the best on, in the given order if they are equal. Steps without the metric, or with NaN, are left out."""
        known = {step: said[self.metric] for step, said in metrics.items() if not math.isnan(said.get(self.metric, math.nan))}
        sign = 1 if self.mode == "min" else -1
        return sorted(known, key=lambda step: sign * known[step])
