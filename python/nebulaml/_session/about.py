"""The metrics and metadata that a program gives a version. They are a small file of the checkpoint and are committed with it."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

from ..errors import NebulaConfigError, NebulaCorrupt

__all__ = ["FILE", "About", "decode", "encode"]

FILE = "nebula-metadata.json"


@dataclasses.dataclass(frozen=True)
class About:
    """metrics: numbers by name; NaN stands for a value that was not finite. metadata: plain JSON values by name.

    items: for each item that a manager saved, whether each rank has its own. world: the number of ranks that saved them.
    """

    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    items: dict[str, bool] = dataclasses.field(default_factory=dict)
    world: int = 1


def check(metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None) -> About:
    """Returns the given values. Raises NebulaConfigError for one that a JSON file cannot hold."""
    return About(_numbers(metrics or {}), _plain(metadata or {}))


def encode(about: About) -> bytes:
    """Returns the content of the file."""
    finite = {name: value if math.isfinite(value) else None for name, value in about.metrics.items()}
    document = {"nebula": "metadata", "version": "1.0", **dataclasses.asdict(about), "metrics": finite}
    return json.dumps(document, allow_nan=False).encode()


def decode(content: bytes) -> About:
    """Returns what the file holds. Raises NebulaCorrupt for content that Nebula has not written."""
    try:
        document = json.loads(content)
        metrics = {str(name): math.nan if value is None else float(value) for name, value in document["metrics"].items()}
        items = {str(name): bool(each) for name, each in document.get("items", {}).items()}
        return About(metrics, dict(document["metadata"]), items, int(document.get("world", 1)))
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise NebulaCorrupt(f"{FILE} was not written by Nebula: {failure!r}") from failure


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    result = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise NebulaConfigError(f"a metric's name is a string, not {name!r}")
        if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:  # a tensor, or an array, of one number
            value = value.item()
        if not isinstance(value, numbers.Real):
            raise NebulaConfigError(f"metric {name!r} is a number, not {value!r} ({type(value).__name__})")
        result[name] = float(value)
    return result


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(json.loads(json.dumps(dict(metadata), allow_nan=False)))
    except (TypeError, ValueError) as failure:
        raise NebulaConfigError(f"metadata must be JSON values (dicts, lists, strings and numbers): {failure}") from failure
