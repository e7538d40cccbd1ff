"""torch.save into a temporary file, fsync, rename, fsync of the directory."""

from __future__ import annotations

import os

import torch

from ..peer import Peer, State, sync_file


class TorchSave(Peer):
    title = "torch.save + fsync"

    def save(self, tag: str, state: State) -> None:
        temporary = self.folder / "writing.tmp"
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self.folder / f"{tag}.pt")
        sync_file(self.folder / f"{tag}.pt")

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        return torch.load(self.folder / f"{tag}.pt", weights_only=True)


PEER = TorchSave
