"""Writers for DLIO's checkpoint workload: Nebula, and DLIO's own with what its settings leave out. bench/mlperf.py names them to DLIO.

DLIO saves the same values again and again. Here they change after each save, as in training, while DLIO waits for the next one.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import nebulaml as nm
import torch
from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing
from dlio_benchmark.utils.utility import DLIOMPI


class Changing(PyTorchCheckpointing):
    _made: Changing | None = None

    @classmethod
    def get_instance(cls) -> Changing:
        cls._made = cls._made or cls()
        return cls._made

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


class Stock(Changing):
    """DLIO's writer for PyTorch. It ignores `fsync: True` of the workload, so this one syncs if BENCH_SYNC is 1."""

    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:
        super().save_state(suffix, state, fsync=os.environ["BENCH_SYNC"] == "1")


class Nebula(Changing):
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
        assert len(found.load(name + ".pt")) > 0

    def finalize(self) -> None:
        nm.flush_persistence()
        super().finalize()
