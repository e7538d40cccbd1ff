"""Modules that import torch, for code that must not import it before it is needed. Without torch another module does what these do.

They are kept, because an import statement no longer works when the interpreter ends.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tensors import device, foresight, loading, pickling, preparing, unpickling

__all__ = ["device", "foresight", "has_torch", "loading", "pickling", "preparing", "unpickling"]

_OF_OBJECTS = ("loading", "pickling", "unpickling")


_without: list[ModuleType] = []  # what does without torch; torch may be installed and imported later


def has_torch() -> bool:
    """Returns whether torch is installed. It imports nothing."""
    if "torch" in sys.modules:
        return getattr(sys.modules["torch"], "__file__", None) is not None  # None: its import is forbidden
    try:
        spec = importlib.util.find_spec("torch")
    except ImportError:
        return False
    return spec is not None and spec.origin is not None  # a directory of that name in the program's has none


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _OF_OBJECTS and not (sys.modules.get("torch") if _without else has_torch()):
        if not _without:
            _without.append(importlib.import_module("..tensors.without_torch", __package__))
        return _without[0]
    found = globals()[name] = importlib.import_module(f"..tensors.{name}", __package__)
    return found
