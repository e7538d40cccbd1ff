"""torch.distributed.checkpoint.async_save, in one process."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..peer import Peer, State


class DistributedCheckpoint(Peer):
    title = "DCP async_save (thread)"

    def prepare(self) -> None:
        import torch.distributed.checkpoint as dcp

        warnings.simplefilter("ignore")
        self.dcp = dcp
        self.pending: Any = None

    def save(self, tag: str, state: State) -> None:
        # Staging memory that is kept between saves would be faster, but torch pins it, and that needs a GPU.
        writer = self.dcp.FileSystemWriter(self.folder / tag, sync_files=True)
        self.pending = self.dcp.async_save(state, storage_writer=writer, no_dist=True)

    def wait_durable(self, tag: str) -> None:
        self.pending.result()

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        state = {name: torch.empty(size) for name, size in sizes.items()}
        self.dcp.load(state, checkpoint_id=self.folder / tag, no_dist=True)
        return state


PEER = DistributedCheckpoint
