"""Mapped files to objects.

A map is memory of this process's own, verified: its tensors lie in it, may be written to, and keep it alive. Nothing
is copied.
"""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import torch

from . import _nebula
from .errors import NebulaConfigError, NebulaError

__all__ = ["load", "load_into"]


class _MapFile(io.RawIOBase):
    """A map as a file, for readers that want one."""

    def __init__(self, mapped: _nebula.Map) -> None:
        self._view = memoryview(mapped)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self._position, len(self._view))[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        part = self._view[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


def load(mapped: _nebula.Map, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """What torch.load makes of the file.

    weights_only None: False, unless NEBULA_WEIGHTS_ONLY=1.
    """
    if weights_only is None:
        weights_only = os.environ.get("NEBULA_WEIGHTS_ONLY", "") == "1"
    file = _MapFile(mapped)
    is_zip = bytes(memoryview(mapped)[:4]) == b"PK\3\4"
    if not is_zip or not hasattr(torch.serialization, "_load"):
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    # What torch.load(path, mmap=True) does, over memory instead of a path.
    storage = torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
    module = torch._weights_only_unpickler if weights_only else pickle
    reader = torch.serialization._open_zipfile_reader(file)
    try:
        with reader as archive:
            return torch.serialization._load(archive, map_location, module, overall_storage=storage, encoding="utf-8")
    except pickle.UnpicklingError as failure:
        if not weights_only:
            raise
        raise pickle.UnpicklingError(
            f"{failure}. The file holds more than tensors and plain values; load it with weights_only=False if you "
            "trust it, or allow the class with torch.serialization.add_safe_globals"
        ) from None


def load_into(source: Any, target: Any, name: str) -> Any:
    """Copies loaded values into existing tensors, in place.

    Containers must have the same keys and lengths, tensors the same shape and dtype; all is checked before anything
    is changed. Values that are not tensors replace those of ``target``. Returns ``target``.
    """
    root = target
    if isinstance(target, torch.nn.Module):
        target = target.state_dict()
        if isinstance(source, torch.nn.Module):
            source = source.state_dict()
    plan = _Plan()
    if isinstance(target, torch.Tensor):
        plan.tensor(source, target, name)
    else:
        plan.container(source, target, name)
    if plan.problems:
        shown = "\n  ".join(plan.problems[:20])
        more = f"\n  and {len(plan.problems) - 20} more" if len(plan.problems) > 20 else ""
        raise NebulaConfigError(f"{name} does not fit what it is loaded into:\n  {shown}{more}")
    plan.run()
    return root


class _Plan:
    """Everything that load_into will do, so that it can refuse before it does anything."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.values: list[tuple[Any, Any, Any]] = []

    def container(self, source: Any, target: Any, path: str) -> None:
        if isinstance(target, dict) and isinstance(source, dict):
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
        if isinstance(old, torch.Tensor):
            self.tensor(source, old, path)
        elif isinstance(old, (dict, list, tuple)):
            self.container(source, old, path)
        elif isinstance(source, torch.Tensor):
            self.problems.append(f"{path}: {type(old).__name__} expected, the checkpoint has a tensor")
        elif not isinstance(target, tuple):
            self.values.append((target, key, source))
        elif not _equal(old, source):
            self.problems.append(f"{path}: {old!r} in a tuple cannot be replaced by {source!r}")

    def tensor(self, source: Any, target: torch.Tensor, path: str) -> None:
        if not isinstance(source, torch.Tensor):
            self.problems.append(f"{path}: a tensor expected, the checkpoint has {type(source).__name__}")
        elif source.shape != target.shape:
            self.problems.append(
                f"{path}: shape {tuple(target.shape)} expected, the checkpoint has {tuple(source.shape)}"
            )
        elif source.dtype != target.dtype:
            self.problems.append(f"{path}: {target.dtype} expected, the checkpoint has {source.dtype}")
        else:
            self.copies.append((target, source))

    def run(self) -> None:
        with torch.no_grad():
            for target, source in self.copies:
                target.copy_(source)
        for container, key, value in self.values:
            container[key] = value


def _equal(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except Exception as failure:
        raise NebulaError(f"cannot compare {type(first).__name__} values: {failure}") from failure
