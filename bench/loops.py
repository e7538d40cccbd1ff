"""Tasks of a worker that save several times before they wait: ten saves in a row, and a training loop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from .peer import Peer, State
from .workload import Workload

Tell = Callable[..., None]

WARMING = 4  # versions saved and finished one by one before anything is measured
IN_A_ROW = 10
PERIOD = 0.5  # seconds between the beginnings of two saves
EVERY = 10  # steps between two saves of the training loop
# The C library keeps what a step frees for the next one, as the caching allocators do that torch's guides advise. As it comes it gives it back
# to the kernel, and the host of a virtual machine takes that: single steps then take three times as long, with a save or without.
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(16 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
WIDTH, DEPTH, BATCH = 1024, 4, 96  # ten steps take some two seconds: a save must be told from the noise of the machine


def warm(peer: Peer, change: Callable[[], None], state: State) -> None:
    """First saves, in which engines find the memory that they keep: what follows is their normal life."""
    for index in range(WARMING):
        peer.save(f"step{index + 1}", state)
        peer.before_change()
        change()
        peer.wait_durable(f"step{index + 1}")


def in_a_row(peer: Peer, workload: Workload, tell: Tell, scale: float) -> None:
    """Ten saves, one every half second; all tensors change right after each."""
    peer.prepare()
    state = workload.state()
    peer.open()
    warm(peer, lambda: workload.next_version(state), state)
    version, blocked, taken = WARMING, [], {}
    begun = time.perf_counter()
    for index in range(IN_A_ROW):
        # Who blocks for longer than a period saves late, as a training loop would.
        time.sleep(max(0.0, begun + index * PERIOD - time.perf_counter()))
        tag = f"step{version + 1}"
        asked = time.perf_counter()
        took = peer.save(tag, state) is not False
        peer.before_change()
        blocked.append(time.perf_counter() - asked)
        if took:
            taken[tag] = version
        workload.next_version(state)
        version += 1
    lasted = time.perf_counter() - begun
    for tag in taken:
        peer.wait_durable(tag)
    tell("saved", blocked=blocked, taken=taken, lasted=lasted, until_durable=time.perf_counter() - begun)
    peer.close()


def load_row(peer: Peer, workload: Workload, tell: Tell, scale: float) -> None:
    """Which of the versions are there and right; the tags and versions come from ``$BENCH_TAKEN``."""
    taken: dict[str, int] = json.loads(os.environ["BENCH_TAKEN"])
    peer.prepare()
    peer.open()
    bases = workload.state()
    right, wrong = 0, None
    for tag, version in taken.items():
        try:
            state = peer.load(tag, workload.sizes)
            differs = [name for name, base in bases.items() if not torch.equal(state[name], base + version)]
        except Exception as error:  # noqa: BLE001 - a version that is not there is a result
            wrong = wrong or f"{tag}: {error}"
            continue
        if differs:
            wrong = wrong or f"{tag}: {differs[0]} does not hold the values of version {version}"
        else:
            right += 1
    tell("loaded", right=right, wrong=wrong)
    peer.close()


def training(scale: float) -> tuple[Callable[[Callable[[], None]], None], State]:
    """A step of a real model and optimizer, and its flat state: weights and both moments, about 300 MB."""
    torch.manual_seed(0)
    width = max(16, int(WIDTH * scale**0.5))
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width), nn.LayerNorm(width)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(max(8, int(BATCH * scale**0.5)), width)

    def step(before_change: Callable[[], None]) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.roll(1, 0)).backward()
        before_change()
        optimizer.step()

    step(lambda: None)
    state: State = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"{name}.{key}"] = value
    return step, state


def lost_per_save(quiet: list[list[float]], saving: list[list[float]], blocked: list[float], slowed: int) -> tuple[float, float]:
    """Seconds that one save costs, and the standard error of that: the call to it, and how much longer the first ``slowed`` steps behind it
    take than steps beside them without a save."""
    windows = [
        call + sum(with_save[:slowed]) - slowed * median([*before, *with_save[slowed:], *after])
        for call, before, with_save, after in zip(blocked, quiet, saving, quiet[1:], strict=False)
    ]
    low, middle, high = quantiles(windows, n=4)
    return middle, 1.25 * (high - low) / 1.35 / len(windows) ** 0.5  # as of a normal distribution, whose tails single long steps would be


def train(peer: Peer, workload: Workload, tell: Tell, scale: float) -> None:
    """Ten steps without a save and ten behind one, in turns."""
    peer.prepare()
    step, state = training(scale)
    peer.open()
    warm(peer, lambda: step(lambda: None), state)

    def steps(before_change: Callable[[], None]) -> list[float]:
        took = []
        for _ in range(EVERY):
            begun = time.perf_counter()
            step(before_change)
            took.append(time.perf_counter() - begun)
        return took

    kept: State = {}
    quiet, saving, blocked, taken = [steps(lambda: None)], [], [], []
    for index in range(peer.trains):
        tag = f"step{WARMING + index + 1}"
        values = {name: tensor.clone() for name, tensor in state.items()}
        begun = time.perf_counter()
        took = peer.save(tag, state) is not False
        blocked.append(time.perf_counter() - begun)
        if took:
            kept = values
            taken.append(tag)
        saving.append(steps(peer.before_change))
        # What is still being written then is no cost of the quiet steps; nobody would have waited for it either.
        if took:
            peer.wait_durable(tag)
        quiet.append(steps(lambda: None))
    torch.save({"tag": taken[-1], "state": kept}, peer.memory / "expected.pt")
    step_time = median(took for window in quiet for took in window)
    ends = peer.ends_after(taken)
    # The step in which it ends, and one for what it leaves in the caches.
    slowed = EVERY if ends is None else min(EVERY, int(ends / step_time) + 2)
    lost, error = lost_per_save(quiet, saving, blocked, slowed)
    tell(
        "saved",
        step=step_time,
        lost=lost,
        error=error,
        slowed=slowed,
        saves=peer.trains,
        blocked=blocked,
        took=len(taken),
        copying_cpu=peer.copying_cpu(taken),
        bytes=sum(tensor.nbytes for tensor in state.values()),
    )
    peer.close()


def load_trained(peer: Peer, workload: Workload, tell: Tell, scale: float) -> None:
    """Whether the last version of the training loop is what it was when it was saved."""
    expected = torch.load(peer.memory / "expected.pt")
    peer.prepare()
    peer.open()
    sizes: dict[str, Any] = {name: tensor.shape for name, tensor in expected["state"].items()}
    state = peer.load(expected["tag"], sizes)
    wrong = [name for name, value in expected["state"].items() if not torch.equal(state[name], value)]
    tell("loaded", wrong=f"{wrong[0]} does not hold the values it was saved with" if wrong else None)
    peer.close()


TASKS: dict[str, Callable[[Peer, Workload, Tell, float], None]] = {
    "in-a-row": in_a_row,
    "load-row": load_row,
    "train": train,
    "load-trained": load_trained,
}
