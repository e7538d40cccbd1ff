"""Makes the rendezvous handlers of ``--rdzv-backend=nebula-store`` and ``nebula-azure-table`` (nebula_rendezvous.py)."""

from __future__ import annotations

import logging
import os
from typing import Any

from . import worker

__all__ = ["create_azure_table", "create_store"]

_LOGGER = logging.getLogger("nebulaml.elastic")


def create_store(params: Any) -> Any:
    from .store_cells import open_cells

    if not params.endpoint:
        raise ValueError(
            "--rdzv-backend=nebula-store needs --rdzv-endpoint: a directory that all nodes see, or a URL such as az://account/container/prefix"
        )
    if "/" not in params.endpoint:  # as a directory, each node could have its own, and be a job of its own
        raise ValueError(
            f"--rdzv-endpoint={params.endpoint} looks like a host: nebula-store needs a directory that all nodes see, or a URL. "
            f"If it is a directory, give ./{params.endpoint}"
        )
    return _create(params, open_cells(params.endpoint))


def create_azure_table(params: Any) -> Any:
    from .table_cells import open_cells

    return _create(params, open_cells(params.endpoint))


def _create(params: Any, cells: Any) -> Any:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    from .backend import Backend
    from .keys import KeyStore
    from .state import View

    backend = Backend(params.backend, cells, params.run_id, closed_ttl_s=params.get_as_int("closed_ttl", 60))
    handler = create_handler(KeyStore(backend), backend, params)
    backend.view = View(handler._this_node, handler.settings.keep_alive_interval)
    _prepare(params)
    _remove_at_end(handler, backend)
    return handler


def _prepare(params: Any) -> None:
    os.environ[worker.TORCHRUN] = str(os.getpid())
    # With a shared TCPStore both agents hang when a node joins (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if params.min_nodes < params.max_nodes and "last_call_timeout" not in params.config:
        _LOGGER.warning(
            "every round with fewer than %d nodes waits 30 s for more of them; --rdzv-conf=last_call_timeout=5 makes that 5 s",
            params.max_nodes,
        )


def _remove_at_end(handler: Any, backend: Any) -> None:
    """Removes the job's data from storage after the job. torchrun calls ``shutdown`` on each node; the last one removes them."""
    shut_down = handler.shutdown

    def shutdown() -> bool:
        closed = bool(shut_down())
        settings = handler.settings
        try:
            backend.leave(
                handler._this_node, settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt
            )
        except Exception as failure:  # the job itself has ended well
            _LOGGER.warning("the rendezvous could not remove its state from storage: %s", failure)
        backend.close()
        return closed

    handler.shutdown = shutdown
