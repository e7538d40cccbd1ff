"""The workloads. Every module here that defines WORKLOAD takes part."""

from __future__ import annotations

import importlib
import pkgutil

from ..workload import Workload

BASIC = ["large", "small"]  # the workloads of `make bench`


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Workload:
    return importlib.import_module(f"{__name__}.{name}").WORKLOAD
