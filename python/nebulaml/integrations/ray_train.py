"""Ray Train: checkpoints that workers save in memory, and that Ray registers when they are durable.

    from nebulaml.integrations import ray_train       # in the training function, on every worker

    found = ray_train.latest()                        # a nebulaml.Checkpoint, from memory if a worker was restarted; None: begin
    checkpoint = ray_train.checkpoint(f"step-{step}")
    checkpoint.save(f"model-{rank}.pt", model.state_dict())
    ray_train.report({"loss": loss}, checkpoint)      # as ray.train.report; returns before anything is stored

The storage path is the directory of Ray's run, and a tag is the name of a checkpoint's directory in it: nothing is copied for Ray.
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
    # Ray may have wrapped a local file system, whose type_name is then still "local".
    if not isinstance(storage.storage_filesystem, LocalFileSystem) and storage.storage_filesystem.type_name != "local":
        raise NebulaConfigError(
            f"the run's storage {storage.experiment_fs_path} is no directory that this machine mounts: give RunConfig a storage_path of "
            "that kind"
        )
    return str(storage.experiment_fs_path)


def init(**settings: Any) -> None:
    """As ``nebulaml.init``, with the directory of Ray's run as storage path. Without this call the first of the others makes it."""
    api.init(_run_directory(), **{"persistent_time_interval": 0, **settings})


def _ready() -> None:
    if not api.is_initialized() or api.persist_path() is None:
        init()


def checkpoint(tag: str) -> api.Checkpoint:
    """A checkpoint to save files in, the same tag on every worker: the name of a directory that the run does not have yet."""
    _ready()
    return api.Checkpoint(tag)


def latest() -> api.Checkpoint | None:
    """The newest complete checkpoint of this run, in memory or storage; None: there is none. To be called on every worker.

    It may be newer than what ``ray.train.get_checkpoint()`` names, which is durable.
    """
    _ready()
    return api.get_latest_checkpoint()


def report(metrics: dict[str, Any], checkpoint: api.Checkpoint | None = None, **options: Any) -> None:
    """``ray.train.report`` on every worker: commits the checkpoint, which Ray registers when all workers' files are durable.

    options: others of ``ray.train.report``. Raises what makes the commit fail; what fails later ends the worker, as with Ray's own upload.
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
        if ray.train.get_context().get_world_rank() == 0:  # what all have saved is one directory
            given = ray.train.Checkpoint(os.path.join(_run_directory(), checkpoint.tag))
    ray.train.report(metrics, checkpoint=given, **options)


class _Durable:
    """An upload function: the checkpoint is where it belongs as soon as it is durable."""

    def __init__(self, checkpoint: api.Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __call__(self, given: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        self._checkpoint.wait("durable")
        return given
