"""Publishes checkpoints of torch.distributed.checkpoint as directories at the paths that a framework chose."""

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
from .._session import config, engine
from ..errors import NebulaError
from ..integrations import places as beside
from ..integrations import together
from . import NebulaStorageReader, NebulaStorageWriter, async_save
from .places import join

__all__ = ["NebulaDirectory", "find_directory", "save_directory"]

log = logging.getLogger("nebulaml")

STAGING = "-staging"


class _DirectoryWriter(NebulaStorageWriter):
    """A writer whose coordinator also saves plain files, and asks the agent to publish the directory."""

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
    """Asks the agent to publish the checkpoint as directory `target` when it is durable. Call it before the commit, on one rank.

    Returns False if the request failed.
    """
    parent, name = os.path.split(target)
    staging = os.path.join(beside.beside(parent, STAGING), name)
    os.makedirs(staging, exist_ok=True)
    beside.make(parent)
    return bool(checkpoint.publish_directory(staging, target))


def save_directory(state: STATE_DICT_TYPE, target: str, persist: str, tag: str, files: dict[str, Any]) -> bool:
    """Saves `state` in the background, as directory `target`. Call it on every rank. The values are fixed when it returns.

    target: the directory, which appears by one rename when the checkpoint is durable.
    persist, tag: the storage path and the tag of the checkpoint.
    files: plain objects by file name, which the directory also holds. Only those of rank 0 count.

    Returns False if the save failed on some rank and on_error is "warn"; the failure is logged. Raises NebulaError with on_error="raise".
    """
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
    """A checkpoint that save_directory() has saved, in memory or in storage."""

    def __init__(self, persist: str, tag: str) -> None:
        self.tag, self._persist = tag, persist
        self._path = join(persist, tag)

    def reader(self) -> NebulaStorageReader:
        """Returns a new reader. Each load needs its own."""
        return NebulaStorageReader(self._path)

    def load(self, state: STATE_DICT_TYPE) -> None:
        """Fills `state` in place, as ``dcp.load`` does. Call it on every rank."""
        dcp.load(state, storage_reader=self.reader())

    def load_file(self, name: str, **options: Any) -> Any:
        """Returns the object of a plain file, as ``Checkpoint.load`` does. Raises NebulaError if the checkpoint was removed meanwhile."""
        checkpoint = api.get_checkpoint(self.tag, self._persist)
        if checkpoint is None:
            raise NebulaError(f"checkpoint {self.tag!r} was removed while it was loaded")
        return checkpoint.load(name, **options)


def find_directory(target: str, broadcast: Callable[[Any], Any]) -> NebulaDirectory | None:
    """Returns the checkpoint that this run or an earlier one has saved as directory `target`. None: Nebula knows of no such checkpoint.

    Call it on every rank: only the node of rank 0 knows the checkpoint, and `broadcast` sends its place, or a failure, to the other ranks.
    """

    def look() -> tuple[str, str] | None:
        found = api.find_published(target) or api.find_published(os.path.realpath(target))
        return (_persist_path(found[0]), found[0].tag) if found is not None and found[1] == "" else None

    place = together.from_rank_0(look, not dist.is_initialized() or dist.get_rank() == 0, broadcast)
    return None if place is None else NebulaDirectory(*place)


def _persist_path(checkpoint: api.Checkpoint) -> str:
    """Returns the storage path of a version, as this program spells it if it is init()'s."""
    path, named = str(checkpoint._report()["persist_path"]), api.persist_path()
    return named if named is not None and ("://" in path or os.path.realpath(config.without_scheme(named)) == path) else path
