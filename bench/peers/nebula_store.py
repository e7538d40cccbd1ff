"""Nebula with an object store as storage path. Environment variables name the store."""

from __future__ import annotations

from .nebula import Nebula


class NebulaStore(Nebula):
    title = "Nebula, an object store"

    def open(self) -> None:
        self.nm.init(
            persistent_storage_path=f"s3://bench/{self.folder.name}",
            persistent_time_interval=0,
            keep_last=2,  # the benchmark's store then takes the memory of the versions that are gone
            on_error="raise",
        )


PEER = NebulaStore
