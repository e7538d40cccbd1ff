"""The entry points of torchrun for ``--rdzv-backend=nebula-store`` and ``nebula-azure-table``.

torch loads this module in every process that imports its rendezvous, for example a trainer with DeepSpeed. So this
module imports nothing of nebulaml until torchrun makes a handler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["azure_table", "store"]


def store() -> Callable[[Any], Any]:
    return _create_store


def azure_table() -> Callable[[Any], Any]:
    return _create_azure_table


def _create_store(params: Any) -> Any:
    from nebulaml.elastic import handlers

    return handlers.create_store(params)


def _create_azure_table(params: Any) -> Any:
    from nebulaml.elastic import handlers

    return handlers.create_azure_table(params)
