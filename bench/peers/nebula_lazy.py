"""Nebula with a program that calls `load(lazy=True)`, and copies the tensors itself, as load_state_dict() does."""

from __future__ import annotations

from ..peer import Peer, State
from .nebula import Nebula


class NebulaLazy(Nebula):
    title = "Nebula, load(lazy=True)"
    load_into = Peer.load_into

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        return self.nm.get_checkpoint(tag=tag).load("state.pt", weights_only=True, lazy=True)


PEER = NebulaLazy
