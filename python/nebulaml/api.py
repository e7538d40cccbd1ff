"""The functions of the package: those of its default session; see docs/python.md."""

from __future__ import annotations

import os
from typing import Any

from ._session.engine import is_initialized
from ._session.session import Session, default
from .checkpoint import Checkpoint

__all__ = [
    "Checkpoint",
    "Session",
    "checkpoints",
    "find_published",
    "flush_persistence",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "init",
    "is_initialized",
    "list_checkpoints",
    "persist_path",
    "prepare",
    "stats",
    "unpublish",
]

checkpoints = default.checkpoints
find_published = default.find_published
flush_persistence = default.flush_persistence
get_checkpoint = default.get_checkpoint
get_latest_checkpoint = default.get_latest_checkpoint
get_latest_checkpoint_path = default.get_latest_checkpoint_path
list_checkpoints = default.list_checkpoints
prepare = default.prepare
stats = default.stats
unpublish = default.unpublish
_remove = default._remove
_removable = default._removable


def init(
    persistent_storage_path: str | os.PathLike[str] | None = None,
    persistent_time_interval: float | str | None = None,
    num_of_version_in_retention: int | str | None = None,
    *,
    on_full: str | None = None,
    on_error: str | None = None,
    replicas: int | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    job: str | None = None,
    world: int | None = None,
) -> None:
    """Says where checkpoints go, and connects to this node's agent, starting it if there is none.

    persistent_storage_path: directory that need not exist; without one, or with "", checkpoints live in memory only.
        Environment: NEBULA_PERSISTENT_STORAGE_PATH.
    persistent_time_interval: seconds (or text such as "15m") between two starts of persisting, 100 by default; 0 persists every version.
        Environment: NEBULA_PERSISTENT_TIME_INTERVAL.
    num_of_version_in_retention: versions kept in memory, 2 by default.
    on_full: when memory is full, "wait" until something durable can go, "stream" straight to storage, or "skip".
    on_error: "warn": a failure of Nebula is logged, and save() and commit() return False; "raise": it is raised.
    replicas: copies of each version in memory, each on another node; 8 at most.
    keep_last, keep_every: versions kept in storage: the newest so many, and those whose step is a multiple; all
        without keep_last, which keep_every needs.
    job: tells apart two jobs that share a path.
    world: 1 when only this process of a distributed job uses Nebula (``if rank == 0: nebulaml.init(..., world=1)``):
        no other rank is then waited for, neither to complete a checkpoint nor to agree on one. 0: all ranks again.

    May be called again: what is not given stays, what is given holds from then on. A call that is refused changes
    nothing. Numbers may carry K, M or G.
    """
    default.configure(
        persistent_storage_path,
        persistent_time_interval=persistent_time_interval,
        num_of_version_in_retention=num_of_version_in_retention,
        on_full=on_full,
        on_error=on_error,
        replicas=replicas,
        keep_last=keep_last,
        keep_every=keep_every,
        job=job,
        world=world,
    )


def persist_path() -> str | None:
    """Where checkpoints are persisted: an absolute path or a URL; None: in memory only. Asking settles nothing."""
    return default.persist_path


def _persist_in(path: str, keep_last: int | None = None) -> None:
    """The path of an adapter, for a program that has named none, also not by the environment. What it said of other things stays."""
    if persist_path() is not None:
        return
    said = default._engine.settings() if is_initialized() else None
    if said is not None and (said.keep_last or said.keep_every):
        keep_last = None
    init(path, None if said else 0, keep_last=keep_last)


def _save_elsewhere(path: str, tag: str, name: str, obj: Any) -> bool:
    """One file as a whole checkpoint in another storage path than that of init(). It is durable soon."""
    checkpoint = default._alone_in(path).checkpoint(tag, 1)
    return checkpoint.save(name, obj) and checkpoint.commit()


def _flush_elsewhere(path: str) -> bool:
    """Returns when what was saved there is durable."""
    return default._alone_in(path).flush_persistence()


def _shutdown() -> None:
    """Disconnects and forgets all settings. Waits for running copies only: the agent finishes what was committed."""
    default._forget()
