"""Nebula with the default settings of `init`: it keeps each version in memory, and persists one every 100 s and the last one."""

from __future__ import annotations

from .nebula import Nebula


class NebulaInterval(Nebula):
    title = "Nebula, persisting every 100 s"
    durable = False
    last_event = "captured"

    def open(self) -> None:
        self.nm.init(
            persistent_storage_path=str(self.folder / "storage"),
            on_error="raise",
        )

    def wait_durable(self, tag: str) -> None:
        """Waits until the agent has the version, which then survives the program, but not the machine."""
        self.checkpoint.wait("captured", timeout=300)

    def close(self) -> None:
        self.nm.flush_persistence()


PEER = NebulaInterval
