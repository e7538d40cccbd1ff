"""Reads the numbers of `nebula plan`. An error names the option, its value, the fault, and the values that are accepted."""

from __future__ import annotations

import dataclasses
import math
import re

from ..errors import NebulaConfigError

__all__ = [
    *("COPIES", "PARAMETERS", "PRICE", "RATE", "SHARE", "SIZE", "SIZE_OR_NONE", "SPEED_MBIT", "STAGE", "TIME", "TIME_OR_NONE", "WHOLE"),
    "Quantity",
]

MOST_SHOWN = 40  # characters of a value
_FORM = re.compile(r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)(E[+-]?[0-9]+)?\s*([A-Z]*)", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(NAN|INF|INFINITY)", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A kind of number. units: the suffixes that it may have, in capitals, and their factors.

    bare_least: a smaller number needs a unit: 80 is hardly meant as 80 bytes.
    """

    least: float
    most: float
    accepted: str
    units: dict[str, float] = dataclasses.field(default_factory=lambda: {"": 1.0})
    is_whole: bool = False
    bare_least: float = 0.0

    def read(self, name: str, text: str, is_measured: bool = False) -> float:
        """Returns the number in the base unit. A measured one needs no unit. Raises NebulaConfigError."""
        text_upper = text.strip().upper()
        value, fault = self._parse(text_upper)
        if not fault and self.is_whole and value != int(value):
            fault = "is not a whole number"
        if not fault and not self.least <= value <= self.most:
            fault = "is negative" if value < 0 else "is too small" if value < self.least else "is too large"
        if not fault and 0 < value < self.bare_least and not text_upper[-1].isalpha() and not is_measured:
            fault = "has no unit"
        if fault:
            shown = text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."
            raise NebulaConfigError(f"{name} {shown!r} {fault}: give {self.accepted}")
        return value

    def _parse(self, text: str) -> tuple[float, str]:
        """Returns the number, and the fault if it is none."""
        if not text:
            return 0.0, "is empty"
        if _NOT_FINITE.fullmatch(text):
            return 0.0, "is not finite"
        if text in self.units:
            return 0.0, "is a unit without a number"
        found = _FORM.fullmatch(text)
        if found is None:
            return 0.0, "is not a number"
        if found[4] not in self.units:
            return 0.0, f"has the unknown unit {found[4][:MOST_SHOWN]!r}" if len(self.units) > 1 else "has a unit"
        value = float("".join(found.group(1, 2)) + (found[3] or "")) * self.units[found[4]]
        return (value, "") if math.isfinite(value) else (0.0, "is negative" if value < 0 else "is too large")


def _bytes() -> dict[str, float]:
    powers = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}
    return {unit + end: factor for unit, factor in powers.items() for end in ("", "B", "IB") if unit or end != "IB"}


_SECONDS = {"": 1.0, "S": 1.0, "MS": 1e-3, "M": 60.0, "H": 3600.0, "D": 86400.0}
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

PARAMETERS = Quantity(1, 1e15, "a number of parameters from 1 to 1000T, such as 350M, 7B or 6738415616", _COUNTS)
BARE_LEAST = 2.0**20
SIZE = Quantity(1, 2.0**70, "a size of 1 byte or more, such as 512M, 80G or 1T", _bytes(), bare_least=BARE_LEAST)
SIZE_OR_NONE = Quantity(0, 2.0**70, "a size of 0 or more, such as 512M or 16G", _bytes(), bare_least=BARE_LEAST)
RATE = Quantity(1, 2.0**70, "bytes per second, 1 or more, such as 500M or 4G", _bytes(), bare_least=BARE_LEAST)
SPEED_MBIT = Quantity(1e-3, 1e15, "Mbit/s, 0.001 or more, such as 100000")
TIME = Quantity(1e-6, 1e12, "a time of 0.001ms or more, such as 250ms, 100 or 15m", _SECONDS)
TIME_OR_NONE = Quantity(0, 1e12, "a time of 0 or more, such as 250ms, 100 or 15m", _SECONDS)
SHARE = Quantity(0, 1, "a number from 0 to 1, such as 0.02")
PRICE = Quantity(0, 1e9, "azure, s3, gcs, none, or dollars of a GB and month, 0 or more, such as 0.02")
WHOLE = Quantity(1, 1e6, "a whole number from 1 to 1000000", is_whole=True)
COPIES = Quantity(0, 8, "a whole number from 0 to 8", is_whole=True)
STAGE = Quantity(0, 3, "a whole number from 0 to 3", is_whole=True)
