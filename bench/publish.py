"""How soon a follower has the weights that a trainer publishes.

    python -m bench.publish --gib 2 --shares 0.3 1 3 30

The weights are bfloat16 tensors; before each publication a share of the elements changes, in percent. `blocked`: how long the call holds up the
trainer. `on the node`, `another node`: from the call's return until a follower has staged and verified the weights; the second follower has an
agent of its own, as on another machine, and reads the directory. The other ways write all bytes and read them, one after the other, in the same
rounds. Times are medians in milliseconds. A second table shows the speed of the delta's code on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

TENSORS = 32
ROUNDS = 5

FOLLOWER = """
import json, os, sys, time
os.environ["NEBULA_MEMORY_DIR"] = sys.argv[3]
import nebulaml as nm
with nm.Subscriber(sys.argv[1], sys.argv[2], poll=0.05) as subscriber:
    print("ready", flush=True)
    while True:
        version = subscriber.prepare()
        staged = time.perf_counter()
        version.commit()
        print(json.dumps([version.step, staged, time.perf_counter() - staged, version.bytes_read]), flush=True)
"""


def change(state: dict[str, Any], percent: float, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        count = int(tensor.numel() * percent / 100)
        at = torch.randint(0, tensor.numel(), (count,), generator=generator)
        tensor.view(torch.int16)[at] ^= torch.randint(1, 8, (count,), generator=generator).to(torch.int16)


class Follower:
    """A process that follows. `elsewhere`: with an agent of its own."""

    def __init__(self, base: Path, storage: Path, elsewhere: bool) -> None:
        name = "elsewhere" if elsewhere else "here"
        memory = (base / "memory").resolve() / ("other" if elsewhere else "")
        memory.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, str(storage), str(memory / name), str(memory)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def has(self, step: int) -> tuple[float, float, int]:
        """Waits for a step. Returns when it was staged, seconds of the swap, and the bytes that were read."""
        assert self.process.stdout is not None
        while True:
            found, staged, swap, read = json.loads(self.process.stdout.readline())
            if found == step:
                return staged, swap, read

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def others(state: dict[str, Any], disk: Path) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """The other ways: how they write, and how a follower reads into tensors that it has."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file

    mine = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    def into(found: dict[str, Any]) -> None:
        for name, tensor in mine.items():
            tensor.copy_(found[name])

    def save_dcp() -> None:
        shutil.rmtree(disk / "dcp", ignore_errors=True)
        dcp.save(state, checkpoint_id=disk / "dcp", no_dist=True)

    return {
        "torch.save, torch.load": (lambda: torch.save(state, disk / "w.pt"), lambda: into(torch.load(disk / "w.pt", mmap=True))),
        "safetensors": (lambda: save_file(state, disk / "w.safetensors"), lambda: into(load_file(disk / "w.safetensors"))),
        "torch.distributed.checkpoint": (save_dcp, lambda: dcp.load(mine, checkpoint_id=disk / "dcp", no_dist=True)),
    }


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure(base: Path, gib: float, percent: float, rounds: int) -> list[str]:
    import nebulaml as nm
    import torch

    storage = base / f"published-{percent}"
    elements = int(gib * (1 << 30) / 2 / TENSORS)
    state = {f"layer.{index}.weight": torch.randn(elements).to(torch.bfloat16) for index in range(TENSORS)}
    size = 2 * elements * TENSORS
    ways = others(state, base)
    times: dict[str, list[float]] = {}
    note = lambda name, value: times.setdefault(name, []).append(value)  # noqa: E731
    flat, target = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    torch.set_num_threads(1)
    with nm.Publisher(state, storage) as publisher:
        followers = [Follower(base, storage, False), Follower(base, storage, True)]
        for step in range(rounds + 2):
            change(state, percent, step)
            begun = time.perf_counter()
            publisher.publish(step)
            returned = time.perf_counter()
            found = [follower.has(step) for follower in followers]
            publisher.wait()
            if step < 2:  # whole ones, one for each copy of a follower
                continue
            note("blocked", returned - begun)
            for name, (staged, swap, read) in zip(("here", "there"), found, strict=True):
                note(name, staged - returned)
                note("swap", swap)
                note("read", read)
            note("memcpy", timed(lambda: target.copy_(flat)))
            for name, (write, read_back) in ways.items():
                note(name + " write", timed(write))
                note(name + " read", timed(read_back))
        for follower in followers:
            follower.close()
    middle = {name: statistics.median(values) for name, values in times.items()}
    ms = lambda name: f"{1000 * middle[name]:,.0f}"  # noqa: E731
    rows = [
        f"| {percent} % | Nebula | {1000 * middle['blocked']:.1f} | {ms('here')} | {ms('there')} | {100 * middle['read'] / size:.2f} % | "
        f"{1000 * middle['swap']:.2f} | {middle['here'] / middle['memcpy']:.1f} |"
    ]
    for name in ways:
        both = middle[name + " write"] + middle[name + " read"]
        write, read = ms(name + " write"), ms(name + " read")
        rows.append(f"| | {name} | {write} | {read} | {read} | 100 % | | {both / middle['memcpy']:.1f} |")
    rows.append(f"| | one copy of memory, for comparison | | {ms('memcpy')} | | | | 1.0 |")
    return rows


def speeds(percent: float, size: int = 512 << 20) -> str:
    """The row of one density: GB/s of one core, by its own time."""
    import torch
    from nebulaml import _nebula

    before = {"w": torch.randint(-30000, 30000, (size // 2,), dtype=torch.int16).view(torch.bfloat16)}
    after = {"w": before["w"].clone()}
    change(after, percent, 1)
    base, new = (bytearray(each["w"].view(torch.uint8).numpy()) for each in (before, after))
    parts = _nebula.delta_sums(base, [(0, size, 2, 0)])
    state = _nebula.delta_state_sum(parts)

    def speed(call: Callable[[], Any]) -> tuple[str, Any]:
        begun = time.process_time()  # of all threads
        result = call()
        return f"{size / 1e9 / (time.process_time() - begun):.1f}", result

    copied, _ = speed(lambda: bytes(new))
    made, (delta, _) = speed(lambda: _nebula.delta_make(base, new, parts, size))
    applied, _ = speed(lambda: _nebula.delta_apply(base, state, [delta]))
    difference = (before["w"].view(torch.int16) ^ after["w"].view(torch.int16)).view(torch.uint8)[: size // 8].numpy().tobytes()
    begun = time.process_time()
    packed = zlib.compress(difference, 1)
    deflate = len(difference) / 1e9 / (time.process_time() - begun)
    share, other = f"{100 * len(delta) / size:.2f} %", f"{100 * len(packed) / len(difference):.2f} %"
    return f"| {percent} % | {made} | {applied} | {share} | {deflate:.2f} | {other} | {copied} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 1, 3, 30])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="nebula-bench-", dir=os.environ.get("BENCH_DIR")))
    memory = Path(tempfile.mkdtemp(prefix="nebula-bench-", dir="/dev/shm"))
    (base / "memory").symlink_to(memory)
    os.environ.update(NEBULA_MEMORY_DIR=str(memory), NEBULA_RUNTIME_DIR=str(base / "run"), NEBULA_AGENT_LINGER="1")
    print(f"{options.gib} GiB of bfloat16 weights, {os.cpu_count()} cores, {platform.platform()}\n")
    try:
        print("| changed | way | blocked, ms | then staged on the node, ms | on another node, ms | bytes read | swap, ms | times a copy |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for share in options.shares:
            for row in measure(base, options.gib, share, options.rounds):
                print(row, flush=True)
        print("\n| changed | delta made, GB/s | applied and verified, GB/s | size | zlib-1 of the XOR, GB/s | size | memcpy, GB/s |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for share in options.shares:
            print(speeds(share), flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


if __name__ == "__main__":
    main()
