"""How soon a follower has the weights that a trainer publishes.

    python -m bench.publish --gib 2 --shares 0.3 1 3 30

The weights are bfloat16 tensors; before each publication a share of the elements changes, in percent. `blocked`: how long the call holds up the
trainer. `on the node`, `another node`: from the call's return until a follower has staged and verified the weights; the second follower has an
agent of its own, as on another machine, and reads the directory. The other ways write all bytes and read them, one after the other, in the same
rounds. Those of bench.publishers run in environments that scripts/peers.sh makes. Times are medians in milliseconds. A second table shows the
speed of the delta's code on one core, a third one a training loop that publishes to 0, 1 and 4 followers.
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

from .peer import own_environment
from .publishers import WAYS
from .weights import change, make

ROUNDS = 5
WARM = 1  # turns of another project's process before the one that counts
STEPS, EVERY = 10, 5  # of the training loop: steps in a row, and from one publication to the next

FOLLOWER = """
import json, os, sys, threading, time
def obey():
    for line in sys.stdin:
        (follows.set if line == "follow\\n" else follows.clear)()
    os._exit(0)
follows = threading.Event()
follows.set()
threading.Thread(target=obey, daemon=True).start()
os.environ["NEBULA_MEMORY_DIR"] = sys.argv[3]
import nebulaml as nm
with nm.Subscriber(sys.argv[1], sys.argv[2], poll=0.05) as subscriber:
    print("ready", flush=True)
    while follows.wait():
        version = subscriber.prepare(0.5)
        if version is None:
            continue
        staged = time.perf_counter()
        version.commit()
        print(json.dumps([version.step, staged, time.perf_counter() - staged, version.bytes_read]), flush=True)
"""


class Follower:
    """A process that follows. `elsewhere`: with an agent of its own."""

    def __init__(self, base: Path, storage: Path, elsewhere: bool, number: int = 0) -> None:
        name = f"{'elsewhere' if elsewhere else 'here'}-{number}"
        memory = (base / "memory").resolve() / ("other" if elsewhere else "")
        memory.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, str(storage), str(memory / name), str(memory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def has(self, step: int) -> tuple[float, float, int]:
        """Waits for a step. Returns when it was staged, seconds of the swap, and the bytes that were read."""
        assert self.process.stdout is not None
        while True:
            found, staged, swap, read = json.loads(self.process.stdout.readline())
            if found == step:
                return staged, swap, read

    def follow(self, does: bool) -> None:
        """Lets it follow, or rest after the publication that it works on."""
        assert self.process.stdin is not None
        self.process.stdin.write("follow\n" if does else "rest\n")
        self.process.stdin.flush()

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


def of_project(name: str, base: Path, gib: float, percent: float, seed: int) -> tuple[float, float] | str:
    """Returns the seconds that another project's way has blocked its trainer, and those from then on until its follower had the values.

    A text says why it does not run here.
    """
    if not Path(own_environment(name)).exists():
        return "scripts/peers.sh has not made its environment"
    directory = base / "peer"
    directory.mkdir()
    with open(base / "peer.log", "w") as said:
        process = subprocess.Popen(
            [own_environment(name), "-m", "bench.publishers", name, directory, str(gib), str(percent)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        if failure := json.loads(process.stdout.readline())["failure"]:
            return str(failure)
        for turn in range(WARM + 1):
            process.stdin.write(f"{seed + turn}\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            if not answer["exact"]:
                raise SystemExit(f"{name}: the follower has other values than the trainer")
        process.stdin.close()
        process.wait(60)
        return answer["seconds"][0], answer["seconds"][1]
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure(base: Path, gib: float, percent: float, rounds: int) -> list[str]:
    import nebulaml as nm
    import torch

    storage = base / f"published-{percent}"
    state = make(gib)
    size = sum(tensor.nbytes for tensor in state.values())
    ways = others(state, base)
    refusals: dict[str, str] = {}
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
            for name in WAYS.keys() - refusals.keys():
                found_seconds = of_project(name, base, gib, percent, step)
                if isinstance(found_seconds, str):
                    refusals[name] = found_seconds
                else:
                    note(name + " write", found_seconds[0])
                    note(name + " read", found_seconds[1])
        for follower in followers:
            follower.close()
    middle = {name: statistics.median(values) for name, values in times.items()}
    ms = lambda name: f"{1000 * middle[name]:,.0f}"  # noqa: E731
    rows = [
        f"| {percent} % | Nebula | {1000 * middle['blocked']:.1f} | {ms('here')} | {ms('there')} | {100 * middle['read'] / size:.2f} % | "
        f"{1000 * middle['swap']:.2f} | {middle['here'] / middle['memcpy']:.1f} |"
    ]
    for name, title in {**dict(zip(ways, ways, strict=True)), **{name: way.title for name, way in WAYS.items()}}.items():
        if name in refusals:
            rows.append(f"| | {title} | does not run: {refusals[name]} | | | | | |")
            continue
        both = middle[name + " write"] + middle[name + " read"]
        write, read = ms(name + " write"), ms(name + " read")
        rows.append(f"| | {title} | {write} | {read} | {read} | 100 % | | {both / middle['memcpy']:.1f} |")
    rows.append(f"| | one copy of memory, for comparison | | {ms('memcpy')} | | | | 1.0 |")
    return rows


class Training:
    """A training loop on one core, whose weights are published as bfloat16."""

    def __init__(self, base: Path) -> None:
        import nebulaml as nm
        import torch

        torch.set_num_threads(1)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-6)
        self.publisher = nm.Publisher(self.model, base / "trained", dtype=torch.bfloat16)
        self.step = 0

    def steps(self, count: int, publishes: bool) -> tuple[float, float]:
        """Returns the seconds of a step, and those of the process's CPU time."""
        import torch

        begun, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.step += 1
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 2048)).square().mean().backward()
            self.optimizer.step()
            if publishes and self.step % EVERY == 0:
                self.publisher.publish(self.step)
        return (time.perf_counter() - begun) / count, (time.process_time() - cpu) / count


def followed(base: Path, rounds: int) -> list[str]:
    """The rows of a training loop with a number of followers, which take turns."""
    training = Training(base)
    training.steps(EVERY, True)
    followers = [Follower(base, base / "trained", False, number) for number in range(4)]
    kinds: list[tuple[str, int, bool]] = [("does not publish", 0, False), *((f"{count} followers", count, True) for count in (0, 1, 4))]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in kinds}
    for turn in range(rounds):
        for name, count, publishes in kinds if turn % 2 else reversed(kinds):
            training.publisher.wait()
            for index, follower in enumerate(followers):
                follower.follow(index < count)
            training.steps(EVERY, True)
            for follower in followers[:count]:
                follower.has(training.step)
            training.publisher.wait()
            times[name].append(training.steps(STEPS, publishes))
    for follower in followers:
        follower.close()
    training.publisher.close()
    rows = []
    for name, found in times.items():
        step, cpu = (statistics.median(value) for value in zip(*found, strict=True))
        pairs = list(zip(found, times["0 followers"], strict=True))
        more = [statistics.median(one[part] / none[part] for one, none in pairs) - 1 for part in range(2)]
        rows.append(f"| {name} | {1000 * step:.0f} | {100 * more[0]:+.1f} % | {1000 * cpu:.0f} | {100 * more[1]:+.1f} % |")
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

    into = torch.empty_like(after["w"]).fill_(0)  # its pages exist
    torch.set_num_threads(1)
    copied, _ = speed(lambda: into.copy_(after["w"]))
    summed, _ = speed(lambda: _nebula.delta_sums(new, [(0, size, 2, 0)]))
    made, (delta, _) = speed(lambda: _nebula.delta_make(base, new, parts, size))
    applied, _ = speed(lambda: _nebula.delta_apply(base, state, [delta]))
    difference = (before["w"].view(torch.int16) ^ after["w"].view(torch.int16)).view(torch.uint8)[: size // 8].numpy().tobytes()
    begun = time.process_time()
    packed = zlib.compress(difference, 1)
    deflate = len(difference) / 1e9 / (time.process_time() - begun)
    share, other = f"{100 * len(delta) / size:.2f} %", f"{100 * len(packed) / len(difference):.2f} %"
    return f"| {percent} % | {made} | {applied} | {summed} | {share} | {deflate:.2f} | {other} | {copied} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 1, 3, 30])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=["weights", "speeds", "training"], nargs="+", default=["weights", "speeds", "training"])
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="nebula-bench-", dir=os.environ.get("BENCH_DIR")))
    memory = Path(tempfile.mkdtemp(prefix="nebula-bench-", dir="/dev/shm"))
    (base / "memory").symlink_to(memory)
    os.environ.update(NEBULA_MEMORY_DIR=str(memory), NEBULA_RUNTIME_DIR=str(base / "run"), NEBULA_AGENT_LINGER="1")
    print(f"{options.gib} GiB of bfloat16 weights, {os.cpu_count()} cores, {platform.platform()}\n")
    try:
        if "weights" in options.only:
            print("| changed | way | blocked, ms | then staged on the node, ms | on another node, ms | bytes read | swap, ms | times a copy |")
            print("| --- | --- | --- | --- | --- | --- | --- | --- |")
            for share in options.shares:
                for row in measure(base, options.gib, share, options.rounds):
                    print(row, flush=True)
        if "speeds" in options.only:
            print("\nOn one core, in GB/s:\n")
            print("| changed | delta made | applied and verified | checksum alone | size | zlib-1 of the XOR | size | memcpy |")
            print("| --- | --- | --- | --- | --- | --- | --- | --- |")
            for share in options.shares:
                print(speeds(share), flush=True)
        if "training" in options.only:
            print("\n| a training loop | step, ms | than with 0 followers | CPU time of the trainer, ms | than with 0 followers |")
            print("| --- | --- | --- | --- | --- |")
            for row in followed(base, 4 * options.rounds):
                print(row, flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


if __name__ == "__main__":
    main()
