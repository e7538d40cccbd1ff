"""Nebula with copy-on-write for pages of every size."""

from __future__ import annotations

from pathlib import Path

from .nebula import Nebula


class NebulaCow(Nebula):
    title = "Nebula, NEBULA_CAPTURE=cow"

    @classmethod
    def environment(cls, folder: Path, memory: Path, fresh: bool) -> dict[str, str]:
        return {**super().environment(folder, memory, fresh), "NEBULA_CAPTURE": "cow"}


PEER = NebulaCow
