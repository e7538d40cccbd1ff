"""Saves and loads objects in a program that has no torch: plain values, NumPy arrays, anything that pickle takes.

The files are those that torch.save writes of the same objects. A program with torch loads them, and this module loads its files, if they hold
no tensors.
"""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
from collections.abc import Callable
from typing import Any

from .. import _nebula
from .._session import config
from ..errors import NebulaConfigError, NebulaError, NebulaPicklingError
from . import containers, values
from .buffers import Capture

__all__ = ["capture", "load", "load_into", "load_own", "plan_part", "refused"]

PROTOCOL = 2  # torch.save's
NEEDED = "pip install 'nebula-checkpoint[torch]'"


def capture(obj: Any, name: str = "object", overlap: bool = False) -> Capture:
    """Returns the pickle of an object. Raises NebulaPicklingError if it has none."""
    try:
        pickled = pickle.dumps(obj, PROTOCOL)
    except (RecursionError, MemoryError):
        raise
    except Exception as failure:
        raise NebulaPicklingError(f"{name} cannot be pickled ({type(failure).__name__}: {failure})") from failure
    return Capture(pickled, _nebula.Ranges())


def load(mapped: _nebula.Map, map_location: Any = None, weights_only: bool | None = None, name: str = "file") -> Any:
    """Returns the object of a file. map_location: of tensors, so of nothing here. Raises NebulaConfigError if it needs torch."""
    try:
        places = mapped.records()
    except NebulaError as failure:
        raise pickle.UnpicklingError(f"{name!r} is not a file that torch.load reads; read_bytes() gives its bytes") from failure
    offset, size = next((place for record, place in places.items() if record.endswith("/data.pkl")), (0, 0))
    mapped.fetch(offset, size)
    content = bytes(memoryview(mapped)[offset : offset + size])
    is_safe = values.is_weights_only(weights_only)
    if is_safe and not _nebula.pickle_is_torchs(content):
        raise pickle.UnpicklingError(f"{name!r} has opcodes that torch does not know, or a memo that is larger than the pickle")
    try:
        return values.resolved(_Safe(content, name).load()) if is_safe else _Trusting(content, name).load()
    except ModuleNotFoundError as failure:
        if (failure.name or "").partition(".")[0] != "torch":
            raise
        raise NebulaConfigError(f"{name!r} needs torch: {NEEDED}") from failure


def load_lazily(mapped: _nebula.Map, map_location: Any, weights_only: bool | None) -> None:
    """Returns None: without torch there are no tensors."""


def load_own(mapped: _nebula.Map, name: str, weights_only: bool | None = None) -> Any:
    """Does load() of a file whose bytes may still be in storage."""
    mapped.fetch_headers()
    return load(mapped, None, weights_only, name)


def load_into(mapped: _nebula.Map, target: Any, name: str, weights_only: bool | None = None) -> Any:
    """Puts the values of a file in the places of those of ``target``, a dict or list with the same keys. Returns ``target``."""
    plan_part(mapped, target, name, weights_only)()
    return target


def plan_part(
    mapped: _nebula.Map,
    target: Any,
    name: str,
    weights_only: bool | None = None,
    select: Callable[[str], bool] | None = None,
    strict: bool = True,
) -> Callable[[], list[str]]:
    """Does what loading.plan_part() does, without tensors."""
    source, root = load_own(mapped, name, weights_only), target
    if select is not None:
        if not isinstance(source, dict) or not isinstance(target, dict):
            raise NebulaConfigError(f"{name} is not a dict of names: it can only be restored as a whole")
        target, source = ({key: value for key, value in one.items() if select(str(key))} for one in (target, source))
    plan = containers.Plan()
    plan.container(source, target, name)
    if plan.problems and strict:
        raise NebulaConfigError(f"{name} does not fit what it is loaded into:\n  {config.in_lines(plan.problems)}")

    def run() -> list[str]:
        for container, key, value in plan.values:
            container[key] = value
        if root is not target:
            root.update(target)
        return plan.problems

    return run


def refused(content: bytes | memoryview) -> list[str]:
    """Returns the names in a pickle for which load() with weights_only=True would refuse it."""
    reader = values.NameReader(content)
    with contextlib.suppress(Exception):  # the file is loaded by the same rules: that names the fault
        reader.load()
    return sorted(f"{module}.{name}" for module, name in reader.names if _found(module, name) is None)


def _found(module: str, name: str) -> Any:
    return collections.OrderedDict if (module, name) == ("collections", "OrderedDict") else values.find(module, name)


class _Trusting(pickle.Unpickler):
    """Loads anything, but for tensors."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._name = name

    def persistent_load(self, saved: Any) -> Any:
        raise NebulaConfigError(f"{self._name!r} holds tensors: {NEEDED}")


class _Safe(_Trusting):
    """Loads plain values and NumPy arrays, and runs no code of the file."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "torch":
            raise NebulaConfigError(f"{self._name!r} holds tensors: {NEEDED}")
        found = _found(module, name)
        if found is None:
            raise pickle.UnpicklingError(f"{self._name!r} needs {module}.{name}: load it with weights_only=False if you trust it")
        return found
