"""A trainer of the benchmark: ``job.py TASK PATH BYTES``. Prints one JSON object. Environment variables name the agent's directories and the
store."""

from __future__ import annotations

import json
import os
import sys
import time

import nebulaml as nm
import torch

VERSIONS = 10


def tensors(size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {f"w{index}": torch.rand(size // 16 // 4) for index in range(16)}


def save(path: str, size: int) -> dict[str, object]:
    """Saves two versions. They differ in 1 % of their bytes: in one of 100 equal ranges of each tensor."""
    nm.init(path, 0, 2, on_error="raise")
    state = tensors(size)
    for step in (1, 2):
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("model.pt", state)
        checkpoint.wait("durable", 600)
        print(json.dumps({"saved": step}), flush=True)
        sys.stdin.readline()
        first = next(iter(state.values()))
        changed = size // 100 // 4
        first[:changed] += 1  # one contiguous range, like a part of a model that is trained while the rest is frozen
    return {}


def load(path: str, size: int) -> dict[str, object]:
    nm.init(path, 0, 2, on_error="raise")
    begun = time.perf_counter()
    state = nm.get_latest_checkpoint().load("model.pt")
    took = time.perf_counter() - begun
    wanted = tensors(size)
    wrong = [name for name in list(wanted)[1:] if not torch.equal(state[name], wanted[name])]
    return {"load_s": took, "wrong": wrong}


def in_a_row(path: str, size: int) -> dict[str, object]:
    """Saves ten versions. Each save begins half a second after the previous one began, or when that call has returned, if later."""
    nm.init(path, 0, 2, keep_last=VERSIONS, on_error="raise", on_full=os.environ["BENCH_ON_FULL"])
    state = tensors(size)
    blocked, failed, taken = [], [], []
    for step in range(1, VERSIONS + 1):
        begun = time.perf_counter()
        checkpoint = nm.Checkpoint(f"global_step{step}")
        try:
            checkpoint.save("model.pt", state)
            checkpoint.commit()
            taken.append(step)
        except nm.NebulaError as error:
            failed.append(str(error))
        blocked.append(time.perf_counter() - begun)
        for tensor in state.values():
            tensor += 1
        time.sleep(max(0.0, begun + 0.5 - time.perf_counter()))
    nm.flush_persistence()
    return {"blocked": blocked, "failed": failed, "taken": taken}


if __name__ == "__main__":
    print(json.dumps({"save": save, "load": load, "in_a_row": in_a_row}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))))
