"""Checkpoints of JAX programs: pytrees of sharded arrays, without torch.

    import nebulaml as nm, nebulaml.jax as nj

    nj.init("/scratch/run7")                             # as nm.init(), with the ranks of jax.distributed
    with nm.Checkpoint(f"global_step{step}", -2) as checkpoint:
        nj.save(checkpoint, "state", state)              # each shard is written once in the whole job
    latest = nm.get_latest_checkpoint()
    state = nj.load(latest, "state", template)           # onto the shardings of the template

Or with a manager, which decides when to save and what to keep:

    manager = nj.Manager("/scratch/run7", save_every_steps=100, keep_last=3)
    restored = manager.restore({"state": state})
    ...
        manager.save(step, {"state": state}, metrics={"loss": loss})

Each process writes one file: an index, and the shards that it has with replica number 0. A load reads the ranges that its own shards
need, from the files of all processes, so the number of processes and devices and the mesh may differ. docs/jax.md.
"""

from __future__ import annotations

import os
from typing import Any

from .. import api
from .distributed import take_ranks
from .loading import load
from .manager import Manager, Restored
from .options import settings_of
from .saving import save

__all__ = ["Manager", "Restored", "init", "load", "load_orbax", "save", "settings_of"]


def init(persistent_storage_path: str | os.PathLike[str] | None = None, *arguments: Any, **settings: Any) -> None:
    """Does nm.init() with the ranks of jax.distributed, unless a launcher has named others. Call it after jax.distributed.initialize()."""
    take_ranks()
    api.init(persistent_storage_path, *arguments, **settings)


def load_orbax(path: str | os.PathLike[str], template: Any, *, step: int | None = None, item: str | None = None, cast: bool = False) -> Any:
    """Does load() of a checkpoint that Orbax has written. Orbax reads it, and must be installed.

    path: the directory of a CheckpointManager, of a step or of an item. step: None: the newest. item: None: the only one.
    """
    from ..integrations import orbax

    return orbax.load(path, template, step=step, item=item, cast=cast)
