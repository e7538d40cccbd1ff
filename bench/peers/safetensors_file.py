"""safetensors into a temporary file, fsync, rename, fsync of the directory."""

from __future__ import annotations

import os

from ..peer import Peer, State, sync_file


class Safetensors(Peer):
    title = "safetensors + fsync"
    packages = ("safetensors",)

    def prepare(self) -> None:
        import safetensors.torch

        self.module = safetensors.torch

    def save(self, tag: str, state: State) -> None:
        temporary = self.folder / "writing.tmp"
        self.module.save_file(state, temporary)
        sync_file(temporary)
        os.rename(temporary, self.folder / f"{tag}.safetensors")
        sync_file(self.folder / f"{tag}.safetensors")

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        return self.module.load_file(self.folder / f"{tag}.safetensors")


PEER = Safetensors
