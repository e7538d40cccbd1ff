"""The ways to save that the demo compares, behind one interface."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol


class Engine(Protocol):
    """The interface between the training loop and a checkpoint engine."""

    def save(self, step: int, state: dict[str, Any], loss: float) -> None:
        """Saves the state. Training may change it when this returns; the checkpoint keeps the values of the call."""

    def load(self) -> dict[str, Any] | None:
        """Returns the newest complete checkpoint. None: there is none."""

    def source(self, step: int) -> str:
        """Returns the places of the checkpoint of that step. A load uses the first one."""

    def close(self) -> None:
        """Waits until everything saved is durable."""


class Nothing:
    """Saves nothing: the uninterrupted run, with which the others are compared."""

    def __init__(self, folder: Path) -> None:
        pass

    def save(self, step: int, state: dict[str, Any], loss: float) -> None:
        pass

    def load(self) -> None:
        return None

    def source(self, step: int) -> str:
        return "nowhere"

    def close(self) -> None:
        pass


class Nebula:
    """Each checkpoint is copied to memory that outlives this process, and made durable in the background."""

    def __init__(self, folder: Path) -> None:
        import nebulaml

        self.nm = nebulaml
        self.nm.init(
            persistent_storage_path=str(folder),
            persistent_time_interval=0,
            num_of_version_in_retention=2,
            on_error="raise",
        )

    def save(self, step: int, state: dict[str, Any], loss: float) -> None:
        checkpoint = self.nm.Checkpoint(f"global_step{step}", metrics={"loss": loss})
        checkpoint.save("state.pt", state)
        checkpoint.commit()

    def load(self) -> dict[str, Any] | None:
        latest = self.nm.get_latest_checkpoint()
        return None if latest is None else latest.load("state.pt")

    def source(self, step: int) -> str:
        return " and ".join(self.nm.list_checkpoints()[f"global_step{step}"]["source"])

    def close(self) -> None:
        self.nm.flush_persistence()


class TorchSave:
    """torch.save done right: a temporary file, fsync, rename, fsync of the directory."""

    def __init__(self, folder: Path) -> None:
        import torch

        self.torch = torch
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: dict[str, Any], loss: float) -> None:
        temporary, final = self.folder / "writing.tmp", self.folder / f"step{step:06d}.pt"
        with open(temporary, "wb") as file:
            self.torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, final)
        directory = os.open(self.folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        for old in sorted(self.folder.glob("step*.pt"))[:-2]:
            old.unlink()

    def load(self) -> dict[str, Any] | None:
        files = sorted(self.folder.glob("step*.pt"))
        return self.torch.load(files[-1], weights_only=False) if files else None

    def source(self, step: int) -> str:
        return "storage"

    def close(self) -> None:
        pass


ENGINES = {"nothing": Nothing, "nebula": Nebula, "torch": TorchSave}
