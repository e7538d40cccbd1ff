"""torchtitan: ``config.checkpoint = NebulaCheckpointManager.Config(enable=True, interval=...)``.

Its own checkpoint manager with saves and loads through Nebula. The folder is the storage path, and ``step-<n>`` a checkpoint in it, with the
files that torchtitan itself would write.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import MODEL, CheckpointManager
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.tools import filesystem

from .._session import engine
from ..dcp import NebulaStorageReader, NebulaStorageWriter, async_save
from ..dcp.places import session_for
from ..errors import NebulaConfigError, NebulaError
from ..tensors import device

__all__ = ["NebulaCheckpointManager"]

log = logging.getLogger("nebulaml")


class NebulaCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """A save returns when the values are fixed; what is loaded comes from memory while it is there.

    ``keep_latest_k`` holds in storage, as ``keep_last`` of ``nebulaml.init``. A last checkpoint in Hugging Face's format is written as without
    Nebula.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's own, of which ``async_mode`` must be left out."""

        overlap: bool = False
        """Whether a save returns while the device still copies; the next optimizer step waits on the device."""

    def __init__(self, config: Config, **parts: Any) -> None:
        if config.enable and config.async_mode != "disabled":
            raise NebulaConfigError(f"async_mode={config.async_mode!r} is of torchtitan's own saves: leave it out, those of Nebula never wait")
        super().__init__(dataclasses.replace(config, keep_latest_k=0), **parts)  # its thread would remove what the agent removes
        if not self.enable:
            return
        if not filesystem.is_remote(self.folder):
            self.folder = os.path.abspath(self.folder)
        self._nebula = session_for(self.folder)
        self._nebula.configure(keep_last=config.keep_latest_k)
        self._writer = NebulaStorageWriter(overlap=config.overlap)

    @torch.no_grad()
    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode, *args: Any, to_hf: bool = False, **kwargs: Any
    ) -> Any:
        """Called by torchtitan for each checkpoint."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, *args, to_hf=to_hf, **kwargs)
        try:
            async_save(state_dict, checkpoint_id=checkpoint_id, storage_writer=self._writer)
        except (CheckpointException, NebulaError) as failure:
            causes = [cause for cause, _ in failure.failures.values()] if isinstance(failure, CheckpointException) else [failure]
            if engine.settings().on_error == "raise" or not all(isinstance(cause, NebulaError) for cause in causes):
                raise
            log.error("nebula: %s is not saved: %s. Training goes on; older checkpoints are untouched.", checkpoint_id, causes[0])
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Called by torchtitan for what it loads: also for directories that Nebula did not write."""
        if from_hf or (filesystem.is_remote(checkpoint_id) and not NebulaStorageReader.validate_checkpoint_id(checkpoint_id)):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=NebulaStorageReader(checkpoint_id))
        if MODEL in self.states:  # the model's names are among those of the other states
            self.states[MODEL].load_state_dict(state_dict)

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """The newest step that is complete, in memory or storage, which may have no directory yet."""
        found = self._nebula.get_latest_checkpoint() if step == -1 else self._nebula.get_checkpoint(f"step-{step}")
        if found is None or (step == -1 and self._find_load_step() > (found.step or 0)):  # a run without Nebula went on here
            return bool(super()._load(step))
        log.info("nebula: loading %s", found.tag)
        self.dcp_load(self._states_to_load(model_only=found.step == 0), self._create_checkpoint_id(found.step or 0), False, False)
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Called before the optimizer's step: the device, and not the host, waits for its copies."""
        device.gate()

    def _close(self) -> None:
        """The end of training: all that was saved becomes durable."""
        super()._close()
        if hasattr(self, "_nebula"):
            self._nebula.flush_persistence()
