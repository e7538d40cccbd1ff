"""Megatron-Core: sharded checkpoints (``torch_dist``) whose asynchronous save copies nothing to a second process.

    from nebulaml.integrations.megatron import NebulaSaveStrategy, use
    use()                                                             # Megatron-LM then saves with Nebula's strategy
    dist_checkpointing.save(                                          # or give the strategy; up to 0.16 without async_strategy
        state, folder, NebulaSaveStrategy(), async_sharded_save=True, async_strategy="mcore"
    )

The folder gets the files of ``torch_dist``, and Megatron's own load reads them. When the files of all ranks are durable, Megatron's own
finalization writes ``metadata.json`` and the tracker of Megatron-LM.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from typing import Any

from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from ..dcp import async_save

__all__ = ["NebulaSaveStrategy", "use"]

BACKEND, VERSION = "torch_dist", 1
POLL_S = 0.05
QUEUES = hasattr(torch_dist, "get_async_strategy")  # Megatron-Core 0.17 and later: more than one queue of saves


class NebulaSaveStrategy(torch_dist.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's strategy for sharded saves, through Nebula. The values are fixed when async_save returns.

    It ignores thread_count, cached_metadata and separation_hint.
    """

    def __init__(self, backend: str = BACKEND, version: int = VERSION, keep_only_main_replica: bool = True, **own: Any) -> None:
        super().__init__(backend, version, keep_only_main_replica, **own)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        """Returns a request that is done when the checkpoint is durable or has failed.

        The request's finalization raises CheckpointException or NebulaError if the checkpoint has failed. async_strategy names the queue that
        runs the request: Megatron's ("mcore") or, from Megatron-Core 0.17 on, that of NVIDIA's resiliency extension ("nvrx").
        """
        request = _request_class(async_strategy)
        state, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        future = async_save(
            torch_dist.mcore_to_pyt_state_dict(state, False), checkpoint_id=os.fspath(checkpoint_dir), planner=planner
        )
        marker = os.path.join(tempfile.mkdtemp(prefix="nebula-megatron-"), "done")
        future.add_done_callback(lambda _: _make(marker))

        def finalize() -> None:
            try:
                future.result()
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(marker)
                    os.rmdir(os.path.dirname(marker))

        return request(_until, (marker,), [finalize])


def _request_class(async_strategy: str) -> Any:
    """Returns the class of the requests that a queue takes. Each queue takes only its own."""
    return torch_dist.get_async_strategy(async_strategy, "AsyncRequest")[1] if QUEUES else AsyncRequest


def _make(path: str) -> None:
    with contextlib.suppress(OSError), open(path, "w"):
        pass


def _until(marker: str) -> None:
    """Waits until the save or the trainer has ended. Megatron runs it in a child process, which has no session."""
    parent = os.getppid()
    while not os.path.exists(marker) and os.getppid() == parent:
        time.sleep(POLL_S)


def use() -> None:
    """Makes Megatron-LM, and ``dist_checkpointing.save`` up to Megatron-Core 0.16, save with Nebula's strategy.

    Megatron has no setting for that: it names its own class in one place, and gets this one from there.
    """
    place = torch_dist
    if QUEUES:
        from megatron.training import checkpointing as place
    place.TorchDistSaveShardedStrategy = NebulaSaveStrategy
