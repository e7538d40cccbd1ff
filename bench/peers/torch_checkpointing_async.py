"""torch_checkpointing: a thread copies into shared memory, and another process writes."""

from __future__ import annotations

from typing import Any

import torch

from ..peer import Peer, State, own_environment


class TorchCheckpointing(Peer):
    title = "torch_checkpointing"
    python = own_environment("torch-checkpointing")
    packages = ("torch_checkpointing",)
    durable = False

    def prepare(self) -> None:
        import torch_checkpointing
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self.module = torch_checkpointing
        # The default, O_DIRECT with buffers of any size, fails with EINVAL on ext4 and xfs.
        self.storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.pending: dict[str, Any] = {}

    def open(self) -> None:
        self.manager = self.module.CheckpointManager(self.module.CheckpointManager.Config(storage_config=self.storage))

    def save(self, tag: str, state: State) -> None:
        self.pending[tag] = self.manager.save(str(self.folder / tag), {"state": state})

    def before_change(self) -> None:
        # The documentation asks to hold this lock for every change. The engine releases it when the copy is complete.
        with self.manager.lock():
            pass

    def wait_durable(self, tag: str) -> None:
        self.pending.pop(tag).result()

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        state = {name: torch.empty(size) for name, size in sizes.items()}
        return self.manager.load(str(self.folder / tag), into={"state": state})["state"]

    def close(self) -> None:
        self.manager.close()


PEER = TorchCheckpointing
