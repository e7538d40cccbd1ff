"""Nodes that share a storage path, on one machine. Each has an agent and memory of its own, and its trainers take turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Node:
    """One node, below the directories of a test's place (tests/python/conftest.py)."""

    def __init__(self, place: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = type(place)(place.root / name, Path(f"{place.memory}-{name}"))
        self.place.root.mkdir()
        self.storage, self.name, self._monkeypatch = place.storage, name, monkeypatch

    @contextmanager
    def here(self) -> Iterator[None]:
        """Trainers that start meanwhile are of this node."""
        with self._monkeypatch.context() as patch:
            patch.setenv("NEBULA_RUNTIME_DIR", str(self.place.runtime))
            patch.setenv("NEBULA_MEMORY_DIR", str(self.place.memory))
            patch.setenv("NEBULA_NODE_ID", self.name)
            yield

    def forget(self) -> None:
        """The agent dies, and its memory with it."""
        if self.place.agents():
            self.place.lose_memory()
        for path in self.place.memory.glob("*"):
            path.unlink()
