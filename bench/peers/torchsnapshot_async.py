"""torchsnapshot: Snapshot.async_take."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..peer import Peer, State, own_environment


class TorchSnapshot(Peer):
    title = "torchsnapshot async_take"
    python = own_environment("torchsnapshot")
    packages = ("torchsnapshot",)
    durable = False

    def prepare(self) -> None:
        warnings.simplefilter("ignore")
        import torchsnapshot

        self.module = torchsnapshot
        self.pending: dict[str, Any] = {}

    def save(self, tag: str, state: State) -> None:
        app_state = {"state": self.module.StateDict(**state)}
        self.pending[tag] = self.module.Snapshot.async_take(str(self.folder / tag), app_state)

    def wait_durable(self, tag: str) -> None:
        self.pending.pop(tag).wait()

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        state = self.module.StateDict(**{name: torch.empty(size) for name, size in sizes.items()})
        self.module.Snapshot(str(self.folder / tag)).restore({"state": state})
        return dict(state)


PEER = TorchSnapshot
