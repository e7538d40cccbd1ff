"""Damages checkpoints of several libraries in the same way, and counts what each loads without a word.

    .envs/jax/bin/python tests/campaign/corruption_peers.py [--trials 200] [--seed 1]

Each library saves the same tensors once. A trial damages one place of one file, as corruption.py does, and loads. The load ends with the exact
values, with an error, with other values (the library has accepted the damage), or with the end of the process.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "power")]

from corruption import damage  # noqa: E402

COUNT, SIZE = 8, 12_000  # tensors, and float32 values of each


def values() -> dict[str, Any]:
    import torch

    chance = torch.Generator().manual_seed(1)
    return {f"layer{n}.weight": torch.randn(SIZE, generator=chance) for n in range(COUNT)}


def torch_save(path: Path) -> Callable[[], dict[str, Any]]:
    import torch

    if not path.exists():
        path.mkdir()
        torch.save(values(), path / "state.pt")
    return lambda: torch.load(path / "state.pt", weights_only=True)


def safetensors(path: Path) -> Callable[[], dict[str, Any]]:
    from safetensors.torch import load_file, save_file

    if not path.exists():
        path.mkdir()
        save_file(values(), path / "state.safetensors")
    return lambda: load_file(path / "state.safetensors")


def dcp(path: Path) -> Callable[[], dict[str, Any]]:
    import torch
    import torch.distributed.checkpoint as dist_cp

    if not path.exists():
        dist_cp.save(values(), checkpoint_id=path, no_dist=True)

    def load() -> dict[str, Any]:
        state = {name: torch.zeros(SIZE) for name in values()}
        dist_cp.load(state, checkpoint_id=path, no_dist=True)
        return state

    return load


def orbax(path: Path) -> Callable[[], dict[str, Any]]:
    import orbax.checkpoint as ocp
    import torch

    if not path.exists():
        with ocp.StandardCheckpointer() as writer:
            writer.save(path, {name: tensor.numpy() for name, tensor in values().items()})

    def load() -> dict[str, Any]:
        with ocp.StandardCheckpointer() as reader:
            found = reader.restore(path, {name: tensor.numpy() * 0 for name, tensor in values().items()})
        return {name: torch.from_numpy(array.copy()) for name, array in found.items()}

    return load


def nebula(path: Path) -> Callable[[], dict[str, Any]]:
    import nebulaml as nm

    own = Path(tempfile.mkdtemp(prefix="np-"))
    os.environ |= {
        "NEBULA_RUNTIME_DIR": str(own / "run"),
        "NEBULA_MEMORY_DIR": str(own / "memory"),
        "NEBULA_AGENT_LINGER": "1",
    }
    if not path.exists():
        nm.init(str(path), 0)
        checkpoint = nm.Checkpoint("global_step1", -2)
        checkpoint.save("state", values())
        checkpoint.commit()
        checkpoint.wait("durable", 60)

    def load() -> dict[str, Any]:
        nm.init(str(path), 0)
        found = nm.get_checkpoint("global_step1")
        if found is None:
            raise nm.NebulaNotFound("global_step1")
        return found.load("state")

    return load


WAYS = {"Nebula": nebula, "torch.save": torch_save, "torch DCP": dcp, "safetensors": safetensors, "Orbax": orbax}


def trials(way: str, pristine: Path, place: Path, seeds: list[int], results: Any) -> None:
    """In a process of its own: it may crash."""
    import torch

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    right = values()
    for seed in seeds:
        path = place / f"trial-{seed}"
        shutil.copytree(pristine, path)
        damage(path, None, random.Random(seed))
        try:
            found = WAYS[way](path)()
            same = found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)
            end = "exact" if same else "accepted"
        except BaseException:  # DCP raises one that is no Exception
            end = "error"
        results.send((seed, end))
        shutil.rmtree(path, ignore_errors=True)  # an agent may write into it


def play(way: str, count: int, first: int) -> collections.Counter[str]:
    context, ends = multiprocessing.get_context("spawn"), collections.Counter()
    with tempfile.TemporaryDirectory(prefix="corruption-") as name:
        place, left = Path(name), list(range(first * 1_000_000, first * 1_000_000 + count))
        maker = context.Process(target=make, args=(way, place / "pristine"))
        maker.start()
        maker.join()
        while left:
            ours, theirs = context.Pipe(False)
            process = context.Process(target=trials, args=(way, place / "pristine", place, left, theirs))
            process.start()
            theirs.close()
            while left and (ours.poll(60) or process.is_alive()):
                if not ours.poll(0):
                    process.kill()  # it hangs
                try:
                    seed, end = ours.recv()
                except EOFError:
                    break
                left.remove(seed)
                ends[end] += 1
            process.join()
            if left:
                ends["crash" if process.exitcode != -9 else "hang"] += 1
                left.pop(0)
    return ends


def make(way: str, path: Path) -> None:
    WAYS[way](path)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", default=",".join(WAYS))
    given = parser.parse_args(arguments)
    print(
        f"| of {given.trials} damages | exact values | error | other values, without a word | crash or hang |\n| --- | ---: | ---: | ---: | ---: |",
        flush=True,
    )
    for way in given.ways.split(","):
        ends = play(way, given.trials, given.seed)
        print(
            f"| {way} | {ends['exact']} | {ends['error']} | {ends['accepted']} | {ends['crash'] + ends['hang']} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
