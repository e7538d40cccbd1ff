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


def has_torch() -> bool:
    """Returns whether torch is installed. It imports nothing."""
    try:
        return "torch" in sys.modules or importlib.util.find_spec("torch") is not None
    except ImportError:
        return False


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own = name if name not in _OF_OBJECTS or has_torch() else "without_torch"
    found = globals()[name] = importlib.import_module(f"..tensors.{own}", __package__)
    return found
