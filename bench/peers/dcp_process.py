"""torch.distributed.checkpoint.async_save with a process that writes, and with staging memory that is kept between saves."""

from __future__ import annotations

import os
import socket
import warnings
from typing import Any

import torch

from ..peer import Peer, State


class DistributedProcess(Peer):
    title = "DCP async_save (process)"

    def prepare(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import staging, state_dict_saver

        warnings.simplefilter("ignore")
        self.dcp, self.saver = dcp, state_dict_saver
        self.stager = staging.DefaultStager(
            staging.StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )
        self.pending: Any = None

    def open(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)

    def save(self, tag: str, state: State) -> None:
        # All saves share the staging memory, so the next save must wait until this version is written.
        if self.pending:
            self.pending.result()
        writer = self.dcp.FileSystemWriter(self.folder / tag, sync_files=True)
        self.pending = self.dcp.async_save(
            state,
            storage_writer=writer,
            async_checkpointer_type=self.saver.AsyncCheckpointerType.PROCESS,
            async_stager=self.stager,
        )

    def wait_durable(self, tag: str) -> None:
        self.pending.result()

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        state = {name: torch.empty(size) for name, size in sizes.items()}
        self.dcp.load(state, checkpoint_id=self.folder / tag)
        return state

    def close(self) -> None:
        self.stager.close()
        torch.distributed.destroy_process_group()


PEER = DistributedProcess
