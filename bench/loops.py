"""Tasks of a worker that save several times before they wait for storage: ten saves in a row, and a training loop."""

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

WARMING = 4  # versions that are saved and finished one by one before the measurement
IN_A_ROW = 10
PERIOD = 0.5  # seconds between the beginnings of two saves
EVERY = 10  # steps between two saves of the training loop
# With these settings the C library keeps freed memory for the next step, like the caching allocators that torch's guides recommend. By
# default it returns freed memory to the kernel, and on a virtual machine to the host. Some steps then take three times as long, with or
# without a save.
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(16 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
WIDTH, DEPTH, BATCH = 1024, 4, 96  # ten steps take about two seconds, so that the cost of a save stands out from the noise of the machine


def warm(peer: Peer, change: Callable[[], None], state: State) -> None:
    """Makes the first saves, in which engines allocate the memory that they keep. They are not measured."""
    for index in range(WARMING):
        peer.save(f"step{index + 1}", state)
        peer.before_change()
        change()
        peer.wait_durable(f"step{index + 1}")


def in_a_row(peer: Peer, workload: Workload, tell: Tell, scale: float) -> None:
    """Makes ten saves, one every half second. All tensors change right after each save."""
    peer.prepare()
    state = workload.state()
    peer.open()
    warm(peer, lambda: workload.next_version(state), state)
    version, blocked, taken = WARMING, [], {}
    begun = time.perf_counter()
    for index in range(IN_A_ROW):
        # If a save blocks for longer than a period, the next one is late, as in a training loop.
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
    """Reports which versions can be loaded with the right values. ``$BENCH_TAKEN`` has the tags and versions."""
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
    """Returns a step of a real model and optimizer, and their flat state: weights and both moments, about 300 MB."""
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
    """Returns the seconds that one save costs, and their standard error.

    The cost is the time of the call, and the additional time of the first ``slowed`` steps after it, compared with steps without a save.
    """
    windows = [
        call + sum(with_save[:slowed]) - slowed * median([*before, *with_save[slowed:], *after])
        for call, before, with_save, after in zip(blocked, quiet, saving, quiet[1:], strict=False)
    ]
    low, middle, high = quantiles(windows, n=4)
    return middle, 1.25 * (high - low) / 1.35 / len(windows) ** 0.5  # normal distribution, from quartiles: outliers do not count


def train(peer: Peer, workload: Workload, tell: Tell, scale: float) -> None:
    """Trains in turns: ten steps without a save, and ten steps after a save."""
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
        # The steps without a save must not pay for this save's writes. The wait itself is not measured.
        if took:
            peer.wait_durable(tag)
        quiet.append(steps(lambda: None))
    torch.save({"tag": taken[-1], "state": kept}, peer.memory / "expected.pt")
    step_time = median(took for window in quiet for took in window)
    ends = peer.ends_after(taken)
    # The steps until the save ends, the step in which it ends, and one more with cold caches.
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
    """Reports whether the last version of the training loop holds the values at the time of its save."""
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
