"""Makes torch put its tensors into huge pages, which a save can protect in microseconds (docs/capture.md).

THP_MEM_ALLOC_ENABLE is torch's own switch. torch reads it when it makes its first tensor. The variable is set only for that moment, so
child processes never see it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["ask"]

SWITCH = "THP_MEM_ALLOC_ENABLE"
LARGE_BYTES = 4 << 20  # torch asks for huge pages from 2 MiB on


def ask() -> None:
    """Turns the switch on at the import of this package, unless the program has set it or NEBULA_CAPTURE=copy."""
    if SWITCH in os.environ or os.environ.get("NEBULA_CAPTURE") == "copy":
        return
    torch = sys.modules.get("torch")
    if torch is None:
        sys.meta_path.insert(0, _BehindTorch())
    elif hasattr(torch, "UntypedStorage"):  # otherwise torch is still being imported, and its import imports us
        _switch_on(torch)


def _switch_on(torch: Any) -> None:
    if SWITCH in os.environ:  # the program has set it since
        return
    os.putenv(SWITCH, "1")  # not os.environ, which child processes inherit
    try:
        torch.UntypedStorage(LARGE_BYTES)  # its memory is never touched
    finally:
        os.unsetenv(SWITCH)


class _BehindTorch:
    """Turns the switch on as soon as torch is imported, once."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        others = [finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((spec for find in others if (spec := find(fullname, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            _switch_on(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
