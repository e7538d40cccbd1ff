"""Checkpoints of torch.distributed.checkpoint that appear as a directory at a path which a framework chose."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata

from .. import api
from .._session import engine
from ..errors import NebulaError
from ..integrations import places as beside
from . import NebulaStorageReader, NebulaStorageWriter, async_save
from .places import join

__all__ = ["NebulaDirectory", "find_directory", "save_directory"]

log = logging.getLogger("nebulaml")

STAGING = "-staging"


class _DirectoryWriter(NebulaStorageWriter):
    """The coordinator also saves plain files, and asks for the directory."""

    def __init__(self, path: str, target: str, files: dict[str, Any]) -> None:
        super().__init__(path)
        self._target, self._files = target, files

    def _put_metadata(self, metadata: Metadata) -> bool:
        checkpoint = self._save.checkpoint
        done = super()._put_metadata(metadata)
        for name, value in self._files.items():
            done = checkpoint.save(name, value) and done
        return done and publish(checkpoint, self._target)


def publish(checkpoint: Any, target: str) -> bool:
    """The checkpoint appears as that directory when it is durable. To be called before the commit, on one rank."""
    parent, name = os.path.split(target)
    if os.path.isfile(target):
        os.unlink(target)
    staging = os.path.join(beside.beside(parent, STAGING), name)
    os.makedirs(staging, exist_ok=True)
    beside.make(parent)
    return bool(checkpoint.publish_directory(staging, target))


def save_directory(state: STATE_DICT_TYPE, target: str, tag: str, files: dict[str, Any]) -> bool:
    """Saves `state` with all ranks; it appears as directory `target`, with `files` {name: object} in it, when it is durable.

    The values are fixed on return. `files` are those of rank 0. False: it failed on some rank, which is logged, and on_error is "warn".
    """
    persist = api.persist_path()
    assert persist is not None  # each caller has named one
    path = join(persist, tag)
    try:
        async_save(state, checkpoint_id=path, storage_writer=_DirectoryWriter(path, target, files))
    except (CheckpointException, NebulaError) as failure:
        causes = [cause for cause, _ in failure.failures.values()] if isinstance(failure, CheckpointException) else [failure]
        if engine.default.settings().on_error == "raise" or not all(isinstance(cause, NebulaError) for cause in causes):
            raise
        log.error("nebula: %s is not saved: %s. Training goes on; older checkpoints are untouched.", target, causes[0])
        return False
    return True


class NebulaDirectory:
    """A checkpoint that was saved as a directory, in memory or in storage."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        persist = api.persist_path()
        assert persist is not None
        self._path = join(persist, tag)

    def reader(self) -> NebulaStorageReader:
        """A new one for each load."""
        return NebulaStorageReader(self._path)

    def load(self, state: STATE_DICT_TYPE) -> None:
        """Fills `state` in place, as ``dcp.load``: to be called on all ranks."""
        dcp.load(state, storage_reader=self.reader())

    def load_file(self, name: str, **options: Any) -> Any:
        """A plain file of it, as ``Checkpoint.load``."""
        checkpoint = api.get_checkpoint(self.tag)
        if checkpoint is None:
            raise NebulaError(f"checkpoint {self.tag!r} went away while it was loaded")
        return checkpoint.load(name, **options)


def find_directory(target: str, broadcast: Callable[[Any], Any]) -> NebulaDirectory | None:
    """What was saved as that directory, by this run or one before it; None: Nebula knows of nothing there.

    To be called on all ranks. Rank 0's node knows what was saved, `broadcast` tells the others.
    """
    tag = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        found = api.find_published(target) or api.find_published(os.path.realpath(target))
        tag = found[0].tag if found is not None and found[1] == "" else None
    tag = broadcast(tag)
    return None if tag is None else NebulaDirectory(tag)
