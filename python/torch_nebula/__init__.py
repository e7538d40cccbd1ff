"""The old name of nebulaml: the same modules, with the same state.

``import torch_nebula`` gives the module ``nebulaml`` itself, and ``import torch_nebula.api`` the module ``nebulaml.api``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nebulaml import *  # noqa: F403


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports nebulaml.x for torch_nebula.x, so that no module is loaded twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("torch_nebula."):
            return None
        original = "nebulaml" + fullname[len("torch_nebula") :]
        if importlib.util.find_spec(original) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module("nebulaml" + spec.name[len("torch_nebula") :])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just replaced the module's own __spec__: restore it.
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


sys.meta_path.insert(0, _Alias())
sys.modules[__name__] = importlib.import_module("nebulaml")
