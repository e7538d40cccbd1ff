"""Nebula as `init` is by default: each version is kept in memory, one in 100 s and the last are persisted."""

from __future__ import annotations

from .nebula import RETENTION, Nebula


class NebulaInterval(Nebula):
    title = "Nebula, persisting every 100 s"
    durable = False
    last_event = "captured"

    def open(self) -> None:
        self.nm.init(
            persistent_storage_path=str(self.folder / "storage"),
            num_of_version_in_retention=RETENTION,
            on_error="raise",
        )

    def wait_durable(self, tag: str) -> None:
        """The agent has it, which survives the death of the program, and not that of the machine."""
        self.checkpoint.wait("captured", timeout=300)

    def close(self) -> None:
        self.nm.flush_persistence()


PEER = NebulaInterval
