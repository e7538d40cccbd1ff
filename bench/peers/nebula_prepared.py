"""Nebula with a program that calls `prepare` before its first save."""

from __future__ import annotations

import json
import time

from ..peer import State
from .nebula import Nebula

PREPARED_S = 30  # at most


class NebulaPrepared(Nebula):
    title = "Nebula, nm.prepare"

    def expect(self, state: State) -> None:
        self.nm.prepare(state)
        size = sum(tensor.nbytes for tensor in state.values())
        until = time.monotonic() + PREPARED_S
        while json.loads(self.command("status", "--json").stdout)["agent"]["memory_used"] < 2 * size and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(2)  # the agent counts an image before it has made all its pages; then this process maps and registers it


PEER = NebulaPrepared
