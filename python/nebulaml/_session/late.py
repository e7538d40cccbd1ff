"""Modules that import torch, for code that must not import it before it is needed.

They are kept, because an import statement no longer works when the interpreter ends.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tensors import device, foresight, loading, pickling, preparing

__all__ = ["device", "foresight", "loading", "pickling", "preparing"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = importlib.import_module(f"..tensors.{name}", __package__)
    return found
