"""The competitors. Every module here that defines PEER takes part."""

from __future__ import annotations

import importlib
import pkgutil

from ..peer import Peer

VARIANTS = ["nebula_cow", "nebula_interval", "nebula_lazy", "nebula_prepared", "nebula_store", "torch_save_mmap"]  # for some workloads
LIMITS = ["bare_write"]  # of the machine, measured like a peer
BASIC = ["nebula", "nebula_prepared", "dcp_async", "safetensors_file", "torch_save"]  # of `make bench`; they need no environment


def names() -> list[str]:
    """Returns the names of all peers' modules, Nebula first."""
    found = {module.name for module in pkgutil.iter_modules(__path__)} - set(LIMITS)
    return sorted(found, key=lambda name: (name != "nebula", name))


def others() -> list[str]:
    """Returns Nebula with default settings, and all other engines."""
    return [name for name in names() if name not in VARIANTS]


def load(name: str) -> type[Peer]:
    return importlib.import_module(f"{__name__}.{name}").PEER
