"""Ray Train: workers save checkpoints in memory, and Ray registers each one when it is durable.

    from nebulaml.integrations import ray_train       # in the training function, on every worker

    found = ray_train.latest()                        # a nebulaml.Checkpoint, from memory after a worker's restart; None: there is none
    checkpoint = ray_train.checkpoint(f"step-{step}")
    checkpoint.save(f"model-{rank}.pt", model.state_dict())
    ray_train.report({"loss": loss}, checkpoint)      # as ray.train.report; returns before anything is stored

The storage path is the directory of Ray's run, and a tag is the name of a checkpoint's directory in it, so Ray needs no copy.
"""

from __future__ import annotations

import os
from typing import Any

import ray.train
from pyarrow.fs import LocalFileSystem
from ray.train import CheckpointUploadMode

from .. import api
from ..errors import NebulaConfigError

__all__ = ["checkpoint", "init", "latest", "report"]


def _run_directory() -> str:
    storage = ray.train.get_context().get_storage()
    # Ray may have wrapped a local file system. The wrapper's type_name is then still "local".
    if not isinstance(storage.storage_filesystem, LocalFileSystem) and storage.storage_filesystem.type_name != "local":
        raise NebulaConfigError(
            f"the run's storage {storage.experiment_fs_path} is not a directory that this machine mounts: give RunConfig a storage_path of "
            "that kind"
        )
    return str(storage.experiment_fs_path)


def init(**settings: Any) -> None:
    """Calls ``nebulaml.init`` with the directory of Ray's run as storage path. The other functions call it if the program did not.

    settings: other arguments of ``nebulaml.init``. Raises NebulaConfigError if Ray's storage is not a mounted directory.
    """
    api.init(_run_directory(), **{"persistent_time_interval": 0, **settings})


def _ready() -> None:
    if not api.is_initialized() or api.persist_path() is None:
        init()


def checkpoint(tag: str) -> api.Checkpoint:
    """Returns a checkpoint to save files in. Call it on every worker with the same tag.

    tag: the name of a directory that Ray's run does not have yet.
    """
    _ready()
    return api.Checkpoint(tag)


def latest() -> api.Checkpoint | None:
    """Returns the newest complete checkpoint of this run, from memory or storage. None: there is none. Call it on every worker.

    It may be newer than ``ray.train.get_checkpoint()``, which returns the newest durable one.
    """
    _ready()
    return api.get_latest_checkpoint()


def report(metrics: dict[str, Any], checkpoint: api.Checkpoint | None = None, **options: Any) -> None:
    """Commits the checkpoint and calls ``ray.train.report``. Ray registers the checkpoint when the files of all workers are durable.

    Call it on every worker. options: other arguments of ``ray.train.report``. Raises NebulaError if the commit fails. A failure after that
    ends the worker, as with Ray's own upload.
    """
    given = None
    if checkpoint is not None:
        if not checkpoint.commit():
            raise checkpoint._failure or NebulaConfigError(f"checkpoint {checkpoint.tag!r} could not be committed: {checkpoint.error}")
        options.update(
            checkpoint_dir_name=checkpoint.tag,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=_Durable(checkpoint),
            delete_local_checkpoint_after_upload=False,
        )
        if ray.train.get_context().get_world_rank() == 0:  # the files of all workers are in one directory, so one worker reports it
            given = ray.train.Checkpoint(os.path.join(_run_directory(), checkpoint.tag))
    ray.train.report(metrics, checkpoint=given, **options)


class _Durable:
    """An upload function for Ray. It only waits until the checkpoint is durable: the agent writes it to its place in storage."""

    def __init__(self, checkpoint: api.Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __call__(self, given: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        self._checkpoint.wait("durable")
        return given
