"""Other projects' ways to hand weights to another process, for bench.publish, which runs this module with the Python of each one's environment.

    python -m bench.publishers NAME DIRECTORY GIB PERCENT

It makes the weights of bench.publish, and changes and publishes them for each line on stdin. It answers with a line of JSON: "seconds" that
the trainer was blocked, and from then until a follower had all values in tensors of its own; or "failure", why it does not run here.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from .weights import change, make

Seconds = tuple[float, float]


class Way(abc.ABC):
    """One way. Its follower has tensors of its own, which hold the newest values after ``hand_over``."""

    title: ClassVar[str]

    def __init__(self, directory: Path, gib: float, percent: float) -> None:
        import torch

        self.directory, self.percent = directory, percent
        self.state = make(gib)
        self.mine = {name: torch.empty_like(tensor).fill_(1) for name, tensor in self.state.items()}  # its pages exist

    def change(self, seed: int) -> None:
        change(self.state, self.percent, seed)

    @abc.abstractmethod
    async def open(self) -> None:
        """Does what a program does once."""

    @abc.abstractmethod
    async def hand_over(self, turn: int) -> Seconds:
        """Hands the values over. Returns the seconds that the trainer was blocked, and those from then until the follower had the values."""

    async def is_exact(self) -> bool:
        """Whether the follower has the trainer's values."""
        import torch

        return all(torch.equal(self.mine[name], tensor) for name, tensor in self.state.items())

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends what it has started."""


class TorchCheckpointing(Way):
    """A thread copies into shared memory, another process writes, and the follower reads the file."""

    title = "torch_checkpointing"

    async def open(self) -> None:
        import torch_checkpointing
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # The default, O_DIRECT with buffers of any size, fails with EINVAL on ext4 and xfs.
        config = torch_checkpointing.CheckpointManager.Config(storage_config=LocalFileSystemStorageConfig(use_direct_io=False))
        self.manager = torch_checkpointing.CheckpointManager(config)

    async def hand_over(self, turn: int) -> Seconds:
        place = str(self.directory / f"{turn}")
        begun = time.perf_counter()
        written = self.manager.save(place, {"state": self.state})
        with self.manager.lock():  # the documentation asks to hold it for every change
            pass
        returned = time.perf_counter()
        written.result()
        self.manager.load(place, into={"state": self.mine})
        staged = time.perf_counter()
        shutil.rmtree(place)
        return returned - begun, staged - returned

    async def close(self) -> None:
        self.manager.close()


class Stitch(Way):
    """stitch moves versions that its user's framework writes. Here that writes a whole one with safetensors, into a mounted store.

    Its reconciler calls an engine to stage and to commit. This one reads the file into the tensors that it does not serve.
    """

    title = "stitch, of whole safetensors"

    async def open(self) -> None:
        from safetensors.torch import load_file
        from stitch.engines.base import Engine
        from stitch.publisher import Publisher
        from stitch.stores.modal_volume import ModalVolumeStore
        from stitch.sync import Reconciler

        way = self

        class Replica(Engine):
            async def stage(self, manifest: Any, source_dir: str) -> None:
                found = load_file(Path(source_dir) / manifest.files[0])
                for name, tensor in way.mine.items():
                    tensor.copy_(found[name])

            async def commit(self, manifest: Any, *, flush_cache: bool = False) -> None:
                way.committed = manifest.ref.version

            async def pause(self) -> None: ...

            async def resume(self) -> None: ...

        self.committed = 0
        self.root = self.directory / "store"
        self.publisher = Publisher(ModalVolumeStore(self.root, run_id="bench"), run_id="bench")
        self.publisher.claim()
        self.replica = Reconciler(store=ModalVolumeStore(self.root, run_id="bench"), engine=Replica(), run_id="bench", reconcile_interval=0)
        await self.replica.startup()

    async def hand_over(self, turn: int) -> Seconds:
        from safetensors.torch import save_file

        place = self.root / "updates" / f"weight_v{turn + 1:06d}"
        place.mkdir(parents=True)
        index = {"metadata": {"version": turn + 1}, "weight_map": dict.fromkeys(self.state, "model.safetensors")}
        begun = time.perf_counter()
        save_file(self.state, place / "model.safetensors")
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
        self.publisher.publish(str(place))
        returned = time.perf_counter()
        await self.replica.reconcile()  # as its wake would, without the HTTP request
        staged = time.perf_counter()
        if self.committed != turn + 1:
            raise RuntimeError(self.replica.last_error)
        shutil.rmtree(place)
        return returned - begun, staged - returned

    async def close(self) -> None:
        await self.replica.shutdown()


class TorchStore(Way):
    """The trainer puts its state into a volume in shared memory, from which the follower, another process, copies."""

    title = "TorchStore"

    def __init__(self, directory: Path, gib: float, percent: float) -> None:
        self.gib, self.percent = gib, percent

    def change(self, seed: int) -> None:
        self.seed = seed

    async def open(self) -> None:
        import torchstore
        from monarch.actor import Actor, endpoint, this_host

        class Side(Actor):
            def __init__(self, gib: float, percent: float, is_trainer: bool) -> None:
                import torch

                self.state, self.percent = make(gib), percent
                if not is_trainer:
                    self.state = {name: torch.empty_like(tensor).fill_(1) for name, tensor in self.state.items()}

            @endpoint
            async def put(self, seed: int) -> tuple[float, float]:
                change(self.state, self.percent, seed)
                begun = time.perf_counter()
                await torchstore.put_state_dict(self.state, "weights")
                return begun, time.perf_counter()

            @endpoint
            async def get(self) -> float:
                await torchstore.get_state_dict("weights", self.state)
                return time.perf_counter()

            @endpoint
            async def sums(self) -> list[int]:
                import torch

                return [int(tensor.view(torch.int16).sum(dtype=torch.int64)) for tensor in self.state.values()]

        await torchstore.initialize()
        for name, is_trainer in (("trainer", True), ("follower", False)):
            process = this_host().spawn_procs(per_host={"processes": 1})
            setattr(self, name, process.spawn(name, Side, self.gib, self.percent, is_trainer))

    async def hand_over(self, turn: int) -> Seconds:
        begun, returned = await self.trainer.put.call_one(self.seed)
        return returned - begun, await self.follower.get.call_one() - returned

    async def is_exact(self) -> bool:
        return bool(await self.trainer.sums.call_one() == await self.follower.sums.call_one())

    async def close(self) -> None:
        import torchstore

        await torchstore.shutdown()


class CheckpointEngine(Way):
    """MoonshotAI's server of parameters broadcasts them from pinned memory to the devices of the engines, and refuses CPUs."""

    title = "checkpoint-engine"

    async def open(self) -> None:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        from checkpoint_engine.ps import ParameterServer

        self.server = ParameterServer()
        self.server.register_checkpoint("weights", named_tensors=self.state)

    async def hand_over(self, turn: int) -> Seconds:
        raise NotImplementedError("this benchmark measures CPUs")

    async def close(self) -> None:
        self.server.unregister_checkpoint("weights", force=True)


WAYS: dict[str, type[Way]] = {
    "torch-checkpointing": TorchCheckpointing, "stitch": Stitch, "torchstore": TorchStore, "checkpoint-engine": CheckpointEngine,
}  # fmt: skip


async def serve(name: str, directory: str, gib: str, percent: str) -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # what the packages print

    def say(**about: Any) -> None:
        os.write(out, json.dumps(about).encode() + b"\n")

    import torch

    torch.set_num_threads(1)
    try:
        way = WAYS[name](Path(directory), float(gib), float(percent))
        await way.open()
    except Exception as failure:
        say(failure=f"{type(failure).__name__}: {failure}")
        return
    say(failure=None)
    for turn, line in enumerate(sys.stdin):
        way.change(int(line))
        say(seconds=await way.hand_over(turn), exact=await way.is_exact())
    with contextlib.suppress(Exception):
        await way.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
    os._exit(0)  # threads of the packages may run on
