"""The functions of the package; see docs/python.md."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from . import _nebula, agree, config, engine, guards
from .checkpoint import Checkpoint, forget_counter, milliseconds, refuse_within_block, versions
from .engine import is_initialized
from .errors import NebulaConfigError, NebulaNotFound, NebulaUnavailable

__all__ = [
    "Checkpoint",
    "find_published",
    "flush_persistence",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "init",
    "is_initialized",
    "list_checkpoints",
    "persist_path",
    "stats",
    "unpublish",
]

_MARK = ".nebula.json"  # in each directory that was published


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

    persistent_storage_path: directory that need not exist; without one checkpoints live in memory only.
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
        no other rank is then waited for, neither to complete a checkpoint nor to agree on one.

    May be called again: what is not given stays, what is given holds from then on. A call that is refused changes
    nothing. Numbers may carry K, M or G.
    """
    guards.check_framework()
    before = engine.settings() if engine.is_initialized() else None
    engine.configure(
        persistent_storage_path=persistent_storage_path,
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
    try:
        engine.guarded("init", lambda: engine.session(patient=True))
    except NebulaConfigError:
        engine.put_back(before)
        raise
    finally:
        now = engine.outlook()
        if before is not None and (before.persist_path, before.job) != (now.persist_path, now.job):
            agree.moved()


def get_latest_checkpoint(persist_path: str | None = None) -> Checkpoint | None:
    """The newest complete checkpoint, in memory or storage, of this job or of another path; None when there is none.

    On several nodes, before this process has saved anything, it is the newest that every rank can load, and the same
    on all: to be called on every rank. Raises NebulaTimeout when some rank does not, within NEBULA_AGREE_TIMEOUT.
    """
    path = config.clean_path(persist_path)
    if agree.needed():
        common = engine.interruptible(agree.answer, path)
        if common:
            found = _exactly(common[0], path)
            return _newest(found, agree.passed_over(path, common[0]))
    else:
        session = engine.session(patient=True)
        engine.watch()  # the agent may have something to say of what it finds
        try:
            found = Checkpoint._found(engine.interruptible(session.latest, path), path)
            return _newest(found, found.passed_over)
        except NebulaNotFound:
            pass
    guards.check_path(path or engine.settings().persist_path)
    return None


def _newest(found: Checkpoint, passed_over: list[tuple[str, str]]) -> Checkpoint:
    found.passed_over = passed_over
    if engine.place().local_rank == 0:
        guards.tell_passed_over(found.tag, passed_over)
    return found


def _exactly(version: dict[str, Any], path: str | None) -> Checkpoint:
    """What all ranks agreed on, and never another version of that tag: this node may know a later one."""
    find, numbers = engine.session(patient=True).find, (version["generation"], version["sequence"])
    try:
        return Checkpoint._found(engine.interruptible(find, version["tag"], path, *numbers), path)
    except NebulaNotFound as failure:
        raise NebulaUnavailable(
            f"all ranks agreed on checkpoint {version['tag']!r}, and by now this one cannot load it: {failure}; start the "
            "job again, or ask for an older tag with get_checkpoint()"
        ) from failure


def get_checkpoint(tag: str | None = None, persist_path: str | None = None) -> Checkpoint | None:
    """The complete checkpoint of that tag; None when there is none. Without a tag: the newest."""
    if tag is None:
        return get_latest_checkpoint(persist_path)
    _nebula.encode_name(config.check_text("a tag", tag))  # refuses what no checkpoint can be called
    path = config.clean_path(persist_path)
    if agree.needed():
        common = [one for one in engine.interruptible(agree.answer, path) if one["tag"] == tag]
        if common:
            return _exactly(common[0], path)
    else:
        try:
            return Checkpoint._found(engine.interruptible(engine.session(patient=True).find, tag, path), path)
        except NebulaNotFound:
            pass
    guards.check_missing(tag, path)
    guards.check_bare(tag, path or engine.settings().persist_path)
    return None


def list_checkpoints(persist_path: str | None = None) -> dict[str, dict[str, Any]]:
    """All checkpoints by tag, in memory and storage: state, step, size in bytes, files, times; fit for json.dumps."""
    result: dict[str, dict[str, Any]] = {}
    for version in versions(config.clean_path(persist_path)):
        known = result.get(version["tag"])
        if known is None or known.get("generation", 0) <= version.get("generation", 0):
            result[version["tag"]] = version
    return result


def get_latest_checkpoint_path(name: str, path: str | None = None) -> str | None:
    """The newest checkpoint's file ``name`` as the path of a plain torch file in storage; None when there is none.

    What is still in memory only is made durable first. ``path``: another storage path than the one of init().
    """
    config.check_text("a file name", name)
    root = config.clean_path(path) or engine.settings().persist_path
    if root is None:
        raise NebulaConfigError("files have paths in storage only: give persistent_storage_path to init(), or path")
    latest = get_latest_checkpoint(root)
    if latest is None or name not in latest._all_files():
        return None
    if latest._state() != "durable":
        latest.wait("durable")
    folder = os.path.join(root.removeprefix("file://"), _nebula.encode_name(latest.tag))
    generation = latest._report().get("generation", 0)
    plain = _nebula.encode_name(name)
    waiting = os.path.join(folder, ".nebula", f"g{generation}", plain)
    return waiting if os.path.exists(waiting) else os.path.join(folder, plain)


def flush_persistence(tag: str | None = None, timeout: float | None = None) -> bool:
    """Returns when everything committed, or one tag, is durable. False: it is not (and on_error is "warn").

    What this rank has committed, and other ranks have not, is waited for; without a tag until nothing has come from them for 30 s. Then
    False, or NebulaTimeout, names the ranks that are missing. What this rank has still to commit is left out, unless it is the one tag.
    timeout: seconds; None sets no limit. Without a storage path it returns when all that was saved is whole in memory, where it
    survives this process. Raises NebulaConfigError for the tag of a `with` block that this thread is in.
    """
    limit_ms = milliseconds(timeout)
    if tag is not None:
        _nebula.encode_name(config.check_text("a tag", tag))
        refuse_within_block(tag)
    in_memory = engine.settings().persist_path is None
    if in_memory and not engine.has_session():  # nothing was saved: no agent is started to hear that
        return True

    def flush() -> None:
        what = "a flush" if tag is None else f"a flush of {tag!r}"
        engine.patiently(what, lambda limit: engine.session().flush(None if in_memory else tag, limit), limit_ms)

    return engine.guarded("flush" if tag is None else f"flush of {tag!r}", flush) is None


def persist_path() -> str | None:
    """Where checkpoints are persisted: an absolute path or a URL; None: in memory only. Asking settles nothing."""
    return engine.outlook().persist_path


def _persist_in(path: str, keep_last: int | None = None) -> None:
    """The path of an adapter, for a program that has named none, also not by the environment. What it said of other things stays."""
    if persist_path() is not None:
        return
    said = engine.settings() if engine.is_initialized() else None
    if said is not None and (said.keep_last or said.keep_every):
        keep_last = None
    init(path, None if said else 0, keep_last=keep_last)


def _save_elsewhere(path: str, tag: str, name: str, obj: Any) -> bool:
    """One file as a whole checkpoint in another storage path than that of init(). It is copied when this returns, and durable soon."""
    saved = []

    def save() -> None:
        session = engine.another_session(path)
        checkpoint = Checkpoint._found(session.begin(tag, 1), path)
        if checkpoint.save(name, obj) and checkpoint.commit():
            session.settle(engine.LEAVE_MS)
            saved.append(checkpoint)

    return engine.guarded(f"saving {name!r} of checkpoint {tag!r} in {path}", save) is None and bool(saved)


def _flush_elsewhere(path: str) -> bool:
    """Returns when what was saved there is durable."""
    return engine.guarded(f"flush of {path}", lambda: engine.interruptible(engine.another_session(path).flush, None, -1)) is None


def unpublish(path: str | os.PathLike[str]) -> bool:
    """Removes a file or directory once everything published before has appeared, and cancels what was to appear there.

    A directory that was published takes its checkpoint in memory and storage with it; one that was not is refused.
    """
    target = _removable(path)

    def remove() -> None:
        is_directory = os.path.isdir(target) and not os.path.islink(target)
        if is_directory and not os.path.exists(os.path.join(target, _MARK)) and find_published(target) is None:
            raise NebulaConfigError(f"{target} stays: this directory was not published")
        engine.session().unpublish(target)

    return engine.guarded(f"removing {target}", remove) is None


def _remove(path: str | os.PathLike[str]) -> bool:
    """unpublish() for adapters: their framework also removes directories that it wrote without Nebula."""
    target = _removable(path)
    return engine.guarded(f"removing {target}", lambda: engine.session().unpublish(target)) is None


def _removable(path: str | os.PathLike[str]) -> str:
    """The absolute path; refused where the working directory or the storage path would go with it."""
    target = config.local_path("a path", path)
    parent, name = os.path.split(target)
    gone = os.path.join(os.path.realpath(parent), name)  # of a link only the link goes
    kept = {"the storage path": (persist_path() or "").removeprefix("file://")}
    with contextlib.suppress(FileNotFoundError):  # it may be gone
        kept["the working directory"] = os.getcwd()
    for what, place in kept.items():
        if os.path.isabs(place) and os.path.commonpath([gone, os.path.realpath(place)]) == gone:
            raise NebulaConfigError(f"{os.fspath(path)!r} stays: {what} {place} is that directory, or lies in it")
    return target


def find_published(path: str | os.PathLike[str]) -> tuple[Checkpoint, str] | None:
    """What was published as ``path``, there already or still on its way: the checkpoint and the file's name ("" for a
    directory). None: nothing that Nebula knows of, though a plain file may be there."""
    try:
        target = config.local_path("a path", path)
    except NebulaConfigError:  # nothing can be published there
        return None
    try:
        handle, name = engine.interruptible(engine.session(patient=True).find_published, target)
    except NebulaNotFound:
        return None
    return Checkpoint._found(handle), name


def stats() -> list[dict[str, Any]]:
    """What checkpointHistories.csv holds, live: one row per version."""
    report = json.loads(engine.session().report(_nebula.REPORT_HISTORY, None))
    if isinstance(report, dict):
        report = next((rows for rows in report.values() if isinstance(rows, list)), [])
    return list(report)


def _shutdown() -> None:
    """Disconnects and forgets all settings. Waits for running copies only: the agent finishes what was committed."""
    engine.shutdown()
    agree.forget()
    forget_counter()
