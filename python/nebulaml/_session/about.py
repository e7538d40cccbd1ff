"""The metrics and metadata that a program gives a version. They are a small file of the checkpoint and are committed with it."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import NebulaConfigError, NebulaCorrupt
from . import documents

__all__ = ["FILE", "About", "decode", "encode"]

FILE = "nebula-metadata.json"

_NOT_FINITE = {"nan": None, "inf": "inf", "-inf": "-inf"}  # in the file: JSON has no such numbers

DEPTH = 100  # levels of containers in metadata; Python's own coder of JSON ends at its recursion limit


class About(NamedTuple):
    """metrics: numbers by name. metadata: plain JSON values by name.

    items: for each item that a manager saved, whether each rank has its own. world: the number of ranks that saved them.
    """

    metrics: dict[str, float]
    metadata: dict[str, Any]
    items: dict[str, bool]
    world: int = 1


def check(metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None) -> About:
    """Returns the given values. Raises NebulaConfigError for one that a JSON file cannot hold."""
    for what, said, example in (("metrics", metrics, "{'loss': 0.5}"), ("metadata", metadata, "{'data': 'v3'}")):
        if said is not None and not isinstance(said, Mapping):
            raise NebulaConfigError(f"{what} are values by name, as {example}, not {type(said).__name__}")
    return About(_numbers(metrics or {}), _plain(metadata or {}), {})


def encode(about: About) -> bytes:
    """Returns the content of the file."""
    metrics = {name: value if math.isfinite(value) else _NOT_FINITE[str(value)] for name, value in about.metrics.items()}
    document = {"nebula": "metadata", "version": "1.0", **about._asdict(), "metrics": metrics}
    return json.dumps(document, allow_nan=False).encode()


def decode(content: bytes) -> About:
    """Returns what the file holds. Raises NebulaCorrupt for content that Nebula has not written."""
    try:
        document = documents.parse(content)
        metrics = {str(name): math.nan if value is None else float(value) for name, value in document["metrics"].items()}
        items = {str(name): bool(each) for name, each in document.get("items", {}).items()}
        return About(metrics, dict(document["metadata"]), items, documents.whole(document.get("world", 1)))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as failure:
        raise NebulaCorrupt(f"{FILE} was not written by Nebula: {failure!r}") from failure


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    result = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise NebulaConfigError(f"a metric's name is a string, not {name!r}")
        _check_text(f"the name of metric {name!r}", name)
        try:
            if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:  # a tensor, or an array, of one number
                value = value.item()
            number = float(value) if isinstance(value, numbers.Real) else None
        except (ArithmeticError, RuntimeError, ValueError) as failure:  # too large, or a tensor without values
            raise NebulaConfigError(f"metric {name!r} is a number, and {type(value).__name__} gives none: {failure}") from failure
        if number is None:
            raise NebulaConfigError(f"metric {name!r} is a number, not {value!r:.200} ({type(value).__name__})")
        result[name] = number
    return result


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain = dict(json.loads(json.dumps(dict(metadata), allow_nan=False)))
        _check_parts(plain)
    except (TypeError, ValueError, RecursionError) as failure:
        if isinstance(failure, NebulaConfigError):
            raise
        raise NebulaConfigError(f"metadata must be JSON values (dicts, lists, strings and numbers): {failure}") from failure
    return plain


def _check_parts(value: Any, depth: int = 0) -> None:
    """Raises for text that other readers of JSON refuse, and for values that encode() could not write."""
    if depth > DEPTH:
        raise NebulaConfigError(f"metadata may have {DEPTH} levels of dicts and lists, and this has more")
    if isinstance(value, str):
        _check_text("a text of the metadata", value, "")
    elif isinstance(value, dict):
        for name, part in value.items():
            _check_text(f"the name {name!r:.100} in the metadata", name)
            _check_parts(part, depth + 1)
    elif isinstance(value, list):
        for part in value:
            _check_parts(part, depth + 1)


def _check_text(what: str, text: str, refused: str = "\0") -> None:
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        raise NebulaConfigError(f"{what} cannot be written as UTF-8: {failure}") from failure
    if refused and refused in text:
        raise NebulaConfigError(f"{what} contains a NUL character")
