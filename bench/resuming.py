"""One life of a training process that ``bench.loads`` kills: ``python -m bench.resuming ENGINE FOLDER LAYERS``.

It resumes from the newest checkpoint if there is one, trains, and saves every few steps. It says in JSON lines when it was ready and what
it did. Times are of CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

WIDTH = 2048
EVERY = 4  # steps between saves
Parts = dict[str, Any]


def say(**fields: Any) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())


def net(layers: int) -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


def make(layers: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose parameters have shapes and no values yet, and its optimizer."""
    with torch.device("meta"):
        model = net(layers)
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def assign(model: torch.nn.Module, optimizer: torch.optim.Optimizer, parts: Parts) -> torch.optim.Optimizer:
    """Gives both what was loaded, without a copy where torch allows that."""
    model.load_state_dict(parts["model"], assign=True)
    model.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    optimizer.load_state_dict(parts["optimizer"])
    return optimizer


class Nebula:
    def __init__(self, folder: Path) -> None:
        import nebulaml

        self.nm, self.folder = nebulaml, folder

    def open(self) -> None:
        self.nm.init(str(self.folder / "storage"), 0, 2, on_error="raise")

    def resume(self, layers: int) -> Parts | None:
        latest = self.nm.get_latest_checkpoint()
        return latest and latest.load("state.pt", weights_only=True)

    def save(self, step: int, parts: Parts) -> None:
        with self.nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("state.pt", parts)


class TorchSave:
    mapped = True

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.pt"

    def open(self) -> None:
        pass

    def resume(self, layers: int) -> Parts | None:
        return torch.load(self.path, weights_only=True, mmap=self.mapped) if self.path.exists() else None

    def save(self, step: int, parts: Parts) -> None:
        temporary = self.path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            torch.save(parts, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self.path)


class TorchSaveRead(TorchSave):
    mapped = False


class Distributed:
    def __init__(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        self.dcp, self.folder, self.pending = dcp, folder, None

    def open(self) -> None:
        pass

    def steps(self) -> list[int]:
        return sorted(int(path.parent.name) for path in self.folder.glob("*/.metadata"))

    def resume(self, layers: int) -> Parts | None:
        if not self.steps():
            return None
        with torch.device("meta"):
            model = net(layers)
        weights = model.to_empty(device="cpu").state_dict()
        moments = {
            i: {
                "step": torch.tensor(0.0),
                "exp_avg": torch.empty(WIDTH, WIDTH),
                "exp_avg_sq": torch.empty(WIDTH, WIDTH),
            }
            for i in range(layers)
        }
        groups = torch.optim.Adam(model.parameters(), lr=1e-4).state_dict()["param_groups"]
        parts = {"step": 0, "model": weights, "optimizer": {"state": moments, "param_groups": groups}}
        self.dcp.load(parts, checkpoint_id=self.folder / str(self.steps()[-1]), no_dist=True)
        return parts

    def save(self, step: int, parts: Parts) -> None:
        if self.pending:
            self.pending.result()
        writer = self.dcp.FileSystemWriter(self.folder / str(step), sync_files=True)
        self.pending = self.dcp.async_save(parts, storage_writer=writer, no_dist=True)


ENGINES = {"nebula": Nebula, "dcp": Distributed, "torch_save": TorchSaveRead, "torch_save_mmap": TorchSave}


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Sums that change with each step."""
    values = [*model.state_dict().values(), *[state["exp_avg"] for state in optimizer.state.values()]]
    return [float(value.double().sum()) for value in values]


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    begun = time.monotonic()
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    return time.monotonic() - begun


def start_torch() -> None:
    """What torch imports and starts at the first training step of a process: a part of Python's start."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    train_step(model, optimizer, torch.ones(1, 1))
    optimizer.load_state_dict(optimizer.state_dict())
    torch.ones(1 << 20).sum()


def main() -> None:
    name, folder, layers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    engine = ENGINES[name](folder)
    batch = torch.ones(8, WIDTH)
    start_torch()
    ready = time.monotonic()
    engine.open()
    model, optimizer = make(layers)
    parts = engine.resume(layers)
    step = 0
    if parts:
        optimizer, step = assign(model, optimizer, parts), parts["step"]
        parts = None
    else:
        model = net(layers)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loaded = time.monotonic()
    say(at="loaded", ready=ready, loaded=loaded, step=step, digest=digest(model, optimizer) if step else [])
    taken = []
    while True:
        taken.append(train_step(model, optimizer, batch))
        step += 1
        if step % EVERY == 0:
            engine.save(step, {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
            say(at="saved", step=step, digest=digest(model, optimizer))
        if len(taken) == 2 * EVERY:
            say(at="trained", taken=taken)


if __name__ == "__main__":
    main()
