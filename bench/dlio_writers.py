"""Writers for DLIO's checkpoint workload: Nebula, and torch.save. bench/mlperf.py names them to DLIO.

The writers of the suite make their bytes while they write. These have tensors of the same sizes in memory, as a trainer has. The values change
after each save, as in training, while DLIO waits for the next one.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import nebulaml as nm
import torch
from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing, get_torch_datatype
from dlio_benchmark.utils.utility import DLIOMPI


class InMemory(PyTorchCheckpointing):
    _made: InMemory | None = None

    @classmethod
    def get_instance(cls) -> InMemory:
        cls._made = cls._made or cls()
        return cls._made

    def get_tensor_core(self, length: int, datatype: str = "int8", randomize: bool = True) -> torch.Tensor:
        return torch.rand(length, dtype=get_torch_datatype(datatype))

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        BaseCheckpointing.save_checkpoint(self, epoch, step_number)
        threading.Thread(target=self._change).start()

    def _change(self) -> None:
        def change(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                value.mul_(1.5)
            elif isinstance(value, dict):
                for inner in value.values():
                    change(inner)

        change(self.layer_state)
        change(self.optimization_state)


class TorchSave(InMemory):
    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:
        with open(self.get_name(suffix), "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load_state(self, suffix: str, state: Any) -> None:
        assert len(torch.load(self.get_name(suffix))) == len(state)


class Nebula(InMemory):
    """BENCH_STATE: the state of the checkpoint at which a save returns. BENCH_STORAGE: the storage path."""

    def __init__(self) -> None:
        super().__init__()
        mpi = DLIOMPI.get_instance()
        os.environ.update(RANK=str(mpi.rank()), WORLD_SIZE=str(mpi.size()))
        os.environ.update(LOCAL_RANK=str(mpi.local_rank()), LOCAL_WORLD_SIZE=str(mpi.npernode()))
        nm.init(os.environ["BENCH_STORAGE"], 0, on_error="raise")
        self.saved: nm.Checkpoint | None = None

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        self.saved = nm.Checkpoint(f"global_epoch{epoch}_step{step_number}", -2)
        super().save_checkpoint(epoch, step_number)
        self.saved.commit()
        self.saved.wait(os.environ["BENCH_STATE"], 600)

    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:
        assert self.saved is not None
        self.saved.save(suffix.partition("/")[2] + ".pt", state)

    def load_state(self, suffix: str, state: Any) -> None:
        tag, _, name = suffix.partition("/")
        found = nm.get_checkpoint(tag)
        assert found is not None
        assert len(found.load(name + ".pt")) == len(state)

    def finalize(self) -> None:
        nm.flush_persistence()
        super().finalize()
