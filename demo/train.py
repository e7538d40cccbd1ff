"""One training process: ``python -m demo.train --engine nebula --folder DIR --events FILE --steps 100 --every 5``.

It continues from the newest checkpoint that its engine finds, and writes one JSON line per event. Times are of the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from .engines import ENGINES
from .gpt import CONTEXT, GPT
from .text import batch, corpus

BATCH = 8
RATE = 4e-4
WARMUP = 20


class Events:
    """A file of JSON lines that another process follows."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 - open for the life of the process

    def write(self, kind: str, **fields: Any) -> None:
        self.file.write(json.dumps({"kind": kind, "at": time.monotonic(), **fields}) + "\n")


def digest(state: Any, into: Any = None) -> str:
    """Returns the SHA-256 of all tensors of a nested state, in order."""
    into = into or hashlib.sha256()
    if isinstance(state, torch.Tensor):
        into.update(state.detach().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(state, dict):
        for key in state:
            digest(state[key], into)
    elif isinstance(state, (list, tuple)):
        for value in state:
            digest(value, into)
    return into.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    args = parser.parse_args()

    events = Events(args.events)
    # The number of threads decides the order of sums, so it must be the same in each run.
    torch.set_num_threads(min(os.cpu_count() or 1, 8))
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1234)
    text = corpus()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / WARMUP))

    events.write("ready", pid=os.getpid())
    engine = ENGINES[args.engine](args.folder)
    events.write("opened")
    begun, first = time.monotonic(), 1
    state = engine.load()
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        first = state["step"] + 1
        seconds = time.monotonic() - begun
        events.write("resumed", step=state["step"], source=engine.source(state["step"]), seconds=seconds)
        del state

    for step in range(first, args.steps + 1):
        begun = time.monotonic()
        inputs, targets = batch(text, BATCH, CONTEXT)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        trained = time.monotonic() - begun
        blocked = None
        if step % args.every == 0 and args.engine != "nothing":
            events.write("saving", step=step)
            begun = time.monotonic()
            engine.save(
                step,
                {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "random": torch.get_rng_state(),
                },
                loss.item(),
            )
            blocked = time.monotonic() - begun
        # The loss as text of its exact value, because losses are compared bit for bit.
        events.write("step", step=step, loss=loss.item().hex(), trained=trained, blocked=blocked)

    engine.close()
    final = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    size = sum(t.nbytes for t in model.parameters()) * 3
    events.write("ended", digest=digest(final), bytes=size)


if __name__ == "__main__":
    main()
