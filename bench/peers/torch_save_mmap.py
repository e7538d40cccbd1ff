"""torch.save, whose file is loaded as a mapping: torch.load(mmap=True)."""

from __future__ import annotations

import torch

from ..peer import State
from .torch_save import TorchSave


class TorchSaveMapped(TorchSave):
    title = "torch.save + fsync, torch.load(mmap=True)"

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        return torch.load(self.folder / f"{tag}.pt", weights_only=True, mmap=True)


PEER = TorchSaveMapped
