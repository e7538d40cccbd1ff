"""Nebula, as a training script uses it: init, save, commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import ClassVar

from ..peer import Peer, State

RETENTION = 1


class Nebula(Peer):
    title = "Nebula"
    packages = ("nebula-checkpoint",)
    verified = True
    trains = 48
    last_event: ClassVar[str] = "durable"  # of a version
    overlap: ClassVar[bool] = False

    @classmethod
    def environment(cls, folder: Path, memory: Path, fresh: bool) -> dict[str, str]:
        place = "fresh" if fresh else "kept"
        return {
            "NEBULA_RUNTIME_DIR": str(folder / f"runtime-{place}"),
            "NEBULA_MEMORY_DIR": str(memory / place),
            "NEBULA_OUTPUT_DIR": str(folder / "output"),
        }

    def prepare(self) -> None:
        import nebulaml

        self.nm = nebulaml

    def open(self) -> None:
        self.nm.init(
            persistent_storage_path=str(self.folder / "storage"),
            persistent_time_interval=0,
            on_error="raise",
        )

    def helpers(self) -> list[int]:
        status = json.loads(self.command("status", "--json").stdout)
        return [status["agent"]["pid"]]

    def save(self, tag: str, state: State) -> None:
        self.checkpoint = self.nm.Checkpoint(tag)
        self.checkpoint.save("state.pt", state, overlap=self.overlap)
        self.checkpoint.commit()

    def copying_cpu(self, tags: list[str]) -> float:
        return median(row["capture_cpu_ms"] for row in self.nm.stats() if row["tag"] in tags) / 1e3

    def ends_after(self, tags: list[str]) -> float:
        return median(row[self.last_event] - row["begun"] for row in self.nm.stats() if row["tag"] in tags)

    def wait_durable(self, tag: str) -> None:
        self.checkpoint.wait("durable", timeout=300)

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        return self.nm.get_checkpoint(tag=tag).load("state.pt", weights_only=True)

    def load_into(self, tag: str, target: State) -> None:
        self.nm.get_checkpoint(tag=tag).load_into("state.pt", target, weights_only=True)

    @classmethod
    def stored(cls, folder: Path, tag: str) -> Path | None:
        return folder / "storage" / tag / "state.pt"

    @classmethod
    def clean(cls, environment: dict[str, str]) -> None:
        cls.command("stop", "--now", "--yes", environment=environment)

    @staticmethod
    def command(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = Path(sys.executable).parent / "nebula"
        return subprocess.run(
            [command, *arguments], env=environment or os.environ, capture_output=True, text=True, check=False
        )


PEER = Nebula
