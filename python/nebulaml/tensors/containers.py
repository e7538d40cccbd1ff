"""Compares the containers of a file with those that it is loaded into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import NebulaError
from . import named_states

__all__ = ["Plan"]


class Plan:
    """All that load_into() will change, collected first so that it can refuse before it changes anything."""

    is_tensor: Callable[[Any], bool] = staticmethod(lambda value: False)

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.values: list[tuple[Any, Any, Any]] = []
        self._seen: set[tuple[int, int]] = set()  # pairs of containers, which may contain themselves

    def container(self, source: Any, target: Any, path: str) -> None:
        if (id(source), id(target)) in self._seen:
            return
        self._seen.add((id(source), id(target)))
        if isinstance(target, dict) and isinstance(source, dict):
            source, problems = named_states.in_order_of(source, target, path)
            self.problems += problems
            for key in (key for key in target if key not in source):
                self.problems.append(f"{path}[{key!r}] is missing in the checkpoint")
            for key in (key for key in source if key not in target):
                self.problems.append(f"{path}[{key!r}] is in the checkpoint only")
            for key in target:
                if key in source:
                    self.item(source[key], target, key, path)
        elif isinstance(target, (list, tuple)) and isinstance(source, (list, tuple)):
            if len(source) != len(target):
                self.problems.append(f"{path}: {len(target)} elements expected, the checkpoint has {len(source)}")
                return
            for index in range(len(target)):
                self.item(source[index], target, index, path)
        else:
            expected, found = type(target).__name__, type(source).__name__
            self.problems.append(f"{path}: {expected} expected, the checkpoint has {found}")

    def item(self, source: Any, target: Any, key: Any, path: str) -> None:
        old, path = target[key], f"{path}[{key!r}]"
        if self.is_tensor(old):
            self.tensor(source, old, path)
        elif isinstance(old, (dict, list, tuple)):
            self.container(source, old, path)
        elif self.is_tensor(source):
            self.problems.append(f"{path}: {type(old).__name__} expected, the checkpoint has a tensor")
        elif not isinstance(target, tuple):
            self.values.append((target, key, source))
        elif not _equal(old, source):
            self.problems.append(f"{path}: {old!r} in a tuple cannot be replaced by {source!r}")

    def tensor(self, source: Any, target: Any, path: str) -> None:
        """Plans the copy of a tensor."""
        raise NotImplementedError


def _equal(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except Exception as failure:
        raise NebulaError(f"cannot compare {type(first).__name__} values: {failure}") from failure
