"""torchtitan: its checkpoint manager, with saves and loads through Nebula.

Use ``config.checkpoint = NebulaCheckpointManager.Config(enable=True, interval=...)``. The checkpoint folder is the storage path. Each
``step-<n>`` in it is one checkpoint, with the same files as without Nebula.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable
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
from . import together

__all__ = ["NebulaCheckpointManager"]

log = logging.getLogger("nebulaml")


class NebulaCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's CheckpointManager. A save returns when the values are fixed, and a load reads from memory if the checkpoint is there.

    ``keep_latest_k`` limits the checkpoints in storage, like ``keep_last`` of ``nebulaml.init``. torchtitan itself writes a last checkpoint
    in Hugging Face's format. Raises NebulaConfigError if ``async_mode`` is set.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's settings, without ``async_mode``: saves with Nebula never wait."""

        overlap: bool = False
        """True: a save returns while the device still copies, and on the device the next optimizer step waits for these copies."""

    def __init__(self, config: Config, **parts: Any) -> None:
        if config.enable and config.async_mode != "disabled":
            raise NebulaConfigError(
                f"async_mode={config.async_mode!r} belongs to torchtitan's own saves: leave it out, because saves with Nebula never wait"
            )
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
        """torchtitan calls this for each checkpoint. A failure is logged, and raised with on_error="raise"."""
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
        """torchtitan calls this for each load, also of directories that Nebula did not write."""
        if from_hf or (filesystem.is_remote(checkpoint_id) and not NebulaStorageReader.validate_checkpoint_id(checkpoint_id)):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=NebulaStorageReader(checkpoint_id))
        if MODEL in self.states:  # the flat dict holds the model's names beside those of the other states
            self.states[MODEL].load_state_dict(state_dict)

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Loads a step, or the newest complete one, from memory or storage. Its directory may not exist yet. Returns False if there is none.

        All ranks load the same: also after saves, and if their nodes list the folder differently.
        """
        found = together.find(self._nebula, None if step == -1 else f"step-{step}")
        self._listed = together.from_rank_0(super()._find_load_step) if step == -1 else step
        if found is None or (step == -1 and self._listed > (found.step or 0)):  # a run without Nebula has continued in this folder
            return bool(super()._load(step))
        log.info("nebula: loading %s", found.tag)
        self.dcp_load(self._states_to_load(model_only=found.step == 0), self._create_checkpoint_id(found.step or 0), False, False)
        return True

    def _find_load_step(self, folder: str = "") -> int:
        """Returns the newest step that rank 0 has listed in the folder: other nodes may list other steps."""
        return int(super()._find_load_step(folder)) if folder else self._listed

    def _maybe_wait_for_staging(self) -> None:
        """torchtitan calls this before the optimizer's step. The device waits for its copies; the host does not."""
        device.gate()

    def _close(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """torchtitan calls this at the end of training. Waits until all checkpoints are durable.

        A manager that was not closed calls it when the interpreter ends: Nebula has waited for the copies then, and the agent does the rest.
        """
        super()._close()
        if hasattr(self, "_nebula") and not is_finalizing():
            self._nebula.flush_persistence()
