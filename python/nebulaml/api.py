"""The functions of the package: methods of its default session. See docs/python.md."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._session.engine import is_initialized
from ._session.pulse import phase, progress
from ._session.session import Session, default
from .checkpoint import Checkpoint

if TYPE_CHECKING:
    from ._session.keeping import Best

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
    "phase",
    "prepare",
    "progress",
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
    keep_hourly: int | None = None,
    keep_daily: int | None = None,
    keep_weekly: int | None = None,
    keep_within: float | str | None = None,
    keep_best: Best | None = None,
    keep_items: Mapping[str, int] | None = None,
    job: str | None = None,
    world: int | None = None,
    signatures: str | None = None,
) -> None:
    """Sets where checkpoints go, and connects to this node's agent. If there is no agent, it starts one.

    persistent_storage_path: a directory, which need not exist, or a URL. Without one, or with "", checkpoints live in
        memory only. Environment: NEBULA_PERSISTENT_STORAGE_PATH.
    persistent_time_interval: seconds (or text such as "15m") between two starts of persisting, 100 by default. 0 persists every version.
        Environment: NEBULA_PERSISTENT_TIME_INTERVAL.
    num_of_version_in_retention: the number of versions kept in memory, 1 by default. A save takes the place of the oldest one. Versions that
        storage does not have yet stay in any case.
    on_full: the action when memory is full. "wait": wait until a durable version can be dropped; "stream": keep
        the version in a file on disk; "skip": give this checkpoint up.
    on_error: "warn": Nebula logs its failures, and save() and commit() return False. "raise": it raises them.
    replicas: the number of copies of each version in the memory of other nodes, at most 8.
    keep_last, keep_every: the versions kept in storage: the newest keep_last, and those whose step is a multiple of
        keep_every. Without keep_last all are kept. The others need keep_last.
    keep_hourly, keep_daily, keep_weekly, keep_within, keep_best: also kept are the newest version of each of the newest so many hours, days
        and weeks (UTC) that have one, all that were committed within that time before the latest ("14d"), and the best by a metric.
    keep_items: {pattern: count}, for example {"optim*": 2}: only the newest count versions keep the files of that name in storage. Loads
        of other files of older versions work as before. {}: all versions keep all files.
    job: a name that distinguishes two jobs that share a path.
    world: 1 if only this process of a distributed job uses Nebula (``if rank == 0: nebulaml.init(..., world=1)``). Then
        Nebula waits for no other rank, neither to complete a checkpoint nor to agree on one. 0: all ranks again.
    signatures: "require": only versions that a trusted key has signed are loaded; "prefer": a signed version must be as it was signed;
        "off". It becomes NEBULA_SIGNATURES of this process. See docs/security.md.

    init() may be called again. Settings that the new call does not give stay as they are. A call that is refused changes
    nothing. Numbers may carry K, M or G. Raises NebulaConfigError for a setting that is not allowed.
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
        keep_hourly=keep_hourly,
        keep_daily=keep_daily,
        keep_weekly=keep_weekly,
        keep_within=keep_within,
        keep_best=keep_best,
        keep_items=keep_items,
        job=job,
        world=world,
        signatures=signatures,
    )


def persist_path() -> str | None:
    """Returns where checkpoints are persisted: an absolute path, a URL, or None for memory only. It fixes no setting."""
    return default.persist_path


_adopted: str | None = None  # the storage path that an adapter has set for the default session


def _session_in(path: str, keep_last: int | None = None) -> tuple[Session, bool]:
    """Returns the session for an adapter's own storage path, and True. Other settings are those of the program.

    If the program or the environment has named a storage path, it returns the default session, which has that one, and False.
    """
    global _adopted
    named = persist_path()
    if named is not None and named != _adopted:
        return default, False
    if named is None:
        said = default._engine.settings() if is_initialized() else None
        if said is not None and (said.keep_last or said.keep_every):
            keep_last = None
        init(path, None if said else 0, keep_last=keep_last)
        _adopted = persist_path()
    return default._at(path), True


def _save_elsewhere(path: str, tag: str, name: str, obj: Any) -> bool:
    """Saves one object as a checkpoint of one file in another storage path than init()'s. It becomes durable at once."""
    checkpoint = default._alone_in(path).checkpoint(tag, 1)
    return checkpoint.save(name, obj) and checkpoint.commit()


def _flush_elsewhere(path: str) -> bool:
    """Waits until all that _save_elsewhere() saved there is durable. Returns False if it is not (and on_error is "warn")."""
    return default._alone_in(path).flush_persistence()


def _shutdown() -> None:
    """Disconnects and forgets all settings. It waits only for running copies: the agent finishes committed versions by itself."""
    default._forget()
