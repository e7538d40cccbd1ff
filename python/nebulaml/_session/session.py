"""Session: the settings of one use of Nebula, and the calls on it. The functions of the package are methods of a default session."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import _nebula
from ..checkpoint import Checkpoint, refuse_within_block
from ..elastic import worker
from ..errors import NebulaConfigError, NebulaCorrupt, NebulaError, NebulaNotFound, NebulaUnavailable
from ..integrations import guards
from . import agree, config, engine, late, progress, pulse
from .traced import traced
from .waits import interruptible, milliseconds, patiently

if TYPE_CHECKING:
    from .rows import Row, Rows

__all__ = ["Session", "default"]

_MARK = ".nebula.json"  # in each directory that was published


def _when(version: dict[str, Any]) -> int:
    """Returns when the version was committed or, if it was not, when it was begun: ns since 1970."""
    return int(version["sequence"] or version["moves"][0]["at"] * 1e9)


class Session:
    """One path, job and set of settings. A process may have several at once, each with checkpoints of its own.

    Takes the settings of ``init()``; the environment gives the others. All ranks of a job must make their sessions in the same
    order. A session that only one rank makes gets ``world=1``. ``close()``, or the end of a ``with`` block, waits for running
    copies in memory. The agent finishes committed versions by itself.
    """

    def __init__(self, persistent_storage_path: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        self._engine = engine.Engine()
        self._others: dict[tuple[str, bool], Session] = {}  # by storage path, and whether this process is alone there
        self._configure_first(persistent_storage_path, **settings)

    def _configure_first(self, persistent_storage_path: Any, **settings: Any) -> None:
        self.configure(persistent_storage_path, **settings)
        if not self._engine.settings().alone:
            self._engine.agreement.join()

    @classmethod
    def _of(cls, owner: engine.Engine) -> Session:
        self = cls.__new__(cls)
        self._engine, self._others = owner, {}
        return self

    def __repr__(self) -> str:
        if self._engine.is_closed:
            return "<nebulaml.Session, closed>"
        chosen = self._engine.outlook()
        return f"<nebulaml.Session {config.shown(chosen.persist_path or 'in memory')}{f' job={chosen.job!r}' if chosen.job else ''}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def configure(self, persistent_storage_path: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        """Sets new settings, which are those of ``init()``. Settings that are not given stay. A call that is refused changes nothing."""
        guards.check_framework()
        owner = self._engine
        before = owner.settings() if owner.is_initialized else None
        owner.configure(persistent_storage_path=persistent_storage_path, **settings)
        try:
            owner.guarded("init", lambda: owner.session(patient=True))
        except NebulaConfigError:
            owner.put_back(before)
            raise
        finally:
            now = owner.outlook()
            if before is not None and (before.persist_path, before.job) != (now.persist_path, now.job):
                owner.agreement.moved()

    @property
    def persist_path(self) -> str | None:
        """Where checkpoints are persisted: an absolute path, a URL, or None for memory only. Reading it fixes no setting."""
        return self._engine.outlook().persist_path

    def close(self) -> None:
        """Ends this session as the end of the program would: it closes open-ended checkpoints. Later calls raise NebulaUnavailable."""
        self._engine.is_closed = True
        self._forget()

    def _forget(self) -> None:
        """Forgets all settings and all that was found out."""
        while self._others:
            self._others.popitem()[1].close()
        self._engine.shutdown()

    def _at(self, path: str) -> Session:
        """Returns the session of the same settings for another storage path: this one, or one that lives as long as this one."""
        own = self.persist_path
        if own is not None and os.path.realpath(config.without_scheme(own)) == os.path.realpath(config.without_scheme(path)):
            return self
        chosen = self._engine.settings()
        return self._other(path, on_error=chosen.on_error, on_full=chosen.on_full)

    def _alone_in(self, path: str) -> Session:
        """Returns a session for checkpoints that this process alone keeps in a storage path. Each becomes durable at once."""
        return self._kept_in(path, 1)

    def _kept_in(self, path: str, world: int) -> Session:
        """_alone_in, or with 0 for the ranks of the launcher's world together. No rule removes their checkpoints."""
        return self._other(
            path, world=world, persistent_time_interval=0, num_of_version_in_retention=1, replicas=0, keep_last=0, keep_every=0, keep_hourly=0,
            keep_daily=0, keep_weekly=0, keep_within=0, keep_best="", keep_items={},
        )  # fmt: skip

    def _that_writes(self, path: str) -> Session:
        """Returns the session to read that path with: this one, or the one for that storage path."""
        return self._others.get((path, False), self)

    def _other(self, path: str, **settings: Any) -> Session:
        key = (path, "world" in settings)
        found = self._others.get(key)
        if found is None:
            found = self._others[key] = Session._of(engine.Engine())
            found._engine.put_back(self._engine.settings())
            found._configure_first(path, **settings)
        else:
            found.configure(path, **settings)
        return found

    # -- checkpoints

    def checkpoint(
        self,
        tag: str | None = None,
        N: int | None = None,  # noqa: N803
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Makes a checkpoint of this session to write, as ``Checkpoint(...)`` does with the same arguments."""
        return Checkpoint(tag, N, metrics=metrics, metadata=metadata, session=self)

    def get_latest_checkpoint(self, persist_path: str | None = None) -> Checkpoint | None:
        """Finds the newest complete checkpoint, in memory or storage, of this job or of another path. None: there is none.

        On several nodes, before this session has saved anything, it is the newest that every rank can load, and all ranks get
        the same one. So every rank must call it; otherwise it raises NebulaTimeout after NEBULA_AGREE_TIMEOUT seconds.
        After a save it waits up to 5 s to hear that the ranks of other nodes have saved as well. Without that news it returns an older
        version, whose ``passed_over`` names the missing ranks.
        """
        path, owner = config.clean_path(persist_path), self._engine
        if owner.agreement.needed():
            common = agree.of_all_ranks(owner, path)
            if common:
                found = self._exactly(common[0], path)
                return self._newest(found, owner.agreement.passed_over(path, common[0]))
        elif worker.passed_over():
            if owner.agreement.is_saving:
                with contextlib.suppress(NebulaNotFound):  # a search waits as below, an inventory does not
                    interruptible(owner.session(patient=True).latest, path)
            left = agree.of_all_ranks(owner, path)
            if left:
                found = self._exactly(left[0], path)
                return self._newest(found, [(tag, agree.POISON) for _, tag in worker.passed_over() if tag != found.tag])
        else:
            opened = owner.session(patient=True)
            owner.watch()  # the agent may report on the version that it finds
            try:
                with progress.waiting(owner, "looking for the newest checkpoint"):
                    found = self._agreed(Checkpoint._found(owner, interruptible(opened.latest, path), path), path)
                if found:
                    return self._newest(found, found.passed_over)
            except NebulaNotFound:
                pass
        guards.check_path(path or owner.settings().persist_path)
        return None

    def _newest(self, found: Checkpoint, passed_over: list[tuple[str, str]]) -> Checkpoint:
        found.passed_over = passed_over
        worker.tell(loaded=f"{found._known().sequence} {found.tag}")
        if self._engine.place().local_rank == 0:
            guards.log_passed_over(found.tag, passed_over)
        return found

    def _agreed(self, found: Checkpoint, path: str | None, tag: str | None = None) -> Checkpoint | None:
        """Returns the version, or, if it is of before this run and not all ranks can load it, the newest that they can. tag: of this tag."""
        agreement, agreed = self._engine.agreement, self._engine.agreement.agreed(path)
        if agreed is None or agreement.only(path, [{"tag": found.tag, "sequence": found._report().get("sequence")}]):
            return found
        for version in agreed:
            if tag in (None, version["tag"]):
                with contextlib.suppress(NebulaUnavailable):  # a rule has removed it since
                    return self._exactly(version, path)
        return None

    def _exactly(self, version: dict[str, Any], path: str | None) -> Checkpoint:
        """Returns exactly the version that all ranks agreed on, and no other version of its tag: this node may know a later one."""
        owner = self._engine
        try:
            return Checkpoint._found(owner, interruptible(owner.session(patient=True).find, version["tag"], path, version["sequence"]), path)
        except (NebulaNotFound, NebulaCorrupt) as failure:
            raise NebulaUnavailable(
                f"all ranks agreed on checkpoint {version['tag']!r}, and by now this one cannot load it: {failure}; start the "
                "job again, or ask for an older tag with get_checkpoint()"
            ) from failure

    def get_checkpoint(self, tag: str | None = None, persist_path: str | None = None) -> Checkpoint | None:
        """Finds the complete checkpoint of a tag; without a tag, the newest. It waits as get_latest_checkpoint() does. None: there is none."""
        if tag is None:
            return self.get_latest_checkpoint(persist_path)
        found = self._tagged(tag, persist_path)
        if found is None:
            guards.check_bare(tag, config.clean_path(persist_path) or self._engine.settings().persist_path)
        return found

    def _for_all_ranks(self, tag: str | None = None, persist_path: str | None = None) -> Checkpoint | None:
        """As get_checkpoint(), for a call that every rank makes: also after a save all ranks get the same version, or all fail.

        It finds no version of a tag that was removed from storage, though memory may still have it.
        """
        path, owner = config.clean_path(persist_path), self._engine
        if not owner.agreement.is_of_several_nodes():
            return self.get_checkpoint(tag, path)
        if owner.agreement.is_saving:
            with contextlib.suppress(NebulaError):  # the search waits for the ranks of other nodes; what it finds may be another version there
                opened = owner.session(patient=True)
                interruptible(opened.latest, path) if tag is None else interruptible(opened.find, tag, path)
        common, passed_over = agree.of_all_ranks_now(owner, path, "the newest" if tag is None else tag)
        for one in common:
            if tag is None:
                return self._newest(self._exactly(one, path), passed_over(one))
            if one["tag"] == tag and not one["was_removed"]:
                return self._exactly(one, path)
        root = path or owner.settings().persist_path
        if tag is None:
            guards.check_path(root)
        else:
            guards.check_missing(tag, path)
            guards.check_bare(tag, root)
        return None

    def _tagged(self, tag: str, persist_path: str | None) -> Checkpoint | None:
        """As get_checkpoint(), for a tag whose folder may be of another program."""
        _nebula.encode_name(config.check_text("a tag", tag))  # raises for a tag that storage cannot hold
        path, owner = config.clean_path(persist_path), self._engine
        if owner.agreement.needed():
            common = [one for one in agree.of_all_ranks(owner, path) if one["tag"] == tag]
            if common:
                return self._exactly(common[0], path)
        else:
            try:
                with progress.waiting(owner, f"looking for {tag}"):
                    found = self._agreed(Checkpoint._found(owner, interruptible(owner.session(patient=True).find, tag, path), path), path, tag)
                if found and owner.place().local_rank == 0:
                    guards.log_passed_over(f"an earlier {tag}", [one for one in found.passed_over if one[0] == tag])
                if found:
                    return found
            except NebulaNotFound:
                pass
        guards.check_missing(tag, path)
        return None

    def list_checkpoints(self, persist_path: str | None = None) -> dict[str, dict[str, Any]]:
        """Returns all checkpoints by tag, in memory and storage: state, step, size in bytes, times. json.dumps takes the result.

        Those in memory have their files, too.
        """
        result: dict[str, dict[str, Any]] = {}
        for version in self._engine.versions(config.clean_path(persist_path)):
            known = result.get(version["tag"])
            if known is None or _when(known) <= _when(version):
                result[version["tag"]] = version
        return result

    def checkpoints(self, persist_path: str | None = None) -> Rows[Row]:
        """Returns list_checkpoints() as typed rows, the newest first. They print as a table."""
        from .rows import listing

        return listing(self.list_checkpoints(persist_path).values())

    def get_latest_checkpoint_path(self, name: str, path: str | None = None) -> str | None:
        """Returns the path in storage of file ``name`` of the newest checkpoint, a plain torch file. None: there is none.

        If the checkpoint is still in memory only, it waits until it is durable. path: another storage path than init()'s.
        """
        config.check_text("a file name", name)
        root = config.clean_path(path) or self._engine.settings().persist_path
        if root is None:
            raise NebulaConfigError("files have paths in storage only: give persistent_storage_path to init(), or path")
        latest = self.get_latest_checkpoint(root)
        if latest is None or name not in latest._all_files():
            return None
        if latest._state() != "durable":
            latest.wait("durable")
        return config.below(config.without_scheme(root), _nebula.encode_name(latest.tag), _nebula.encode_name(name))

    def prepare(self, *objects: Any) -> None:
        """Makes memory for the first saves of these objects, in the background.

        objects: the arguments of later ``save`` calls, one for each file. For an optimizer of torch without state, it counts the
        state that its first step will make. Without this call the memory of the first save is made while it is copied, or before
        if their tensors lie on a GPU. Without torch it does nothing.
        """
        if not late.has_torch():
            return
        preparing = late.preparing
        for item in objects:
            state = item.state_dict() if callable(getattr(item, "state_dict", None)) else item
            self._engine.guarded("prepare", lambda state=state, item=item: preparing.prepare(self._engine, state, item))

    @traced("flush")
    def flush_persistence(self, tag: str | None = None, timeout: float | None = None) -> bool:
        """Waits until everything committed, or one tag, is durable. Returns False if it is not (and on_error is "warn").

        tag: with a tag it waits for that version, even if this rank has not committed it yet. None: it waits for all that this
            rank has committed. If other ranks have not committed it, this waits until nothing has come from them for 30 s. Then
            it returns False, or raises NebulaTimeout, and names the missing ranks.
        timeout: seconds; None sets no limit.
        Without a tag it also waits, 10 s at most, until the versions that no rule keeps are removed.
        Without a storage path it returns when all saves are whole in memory, where they survive this process. Raises
        NebulaConfigError for the tag of a `with` block that this thread is in.
        """
        limit_ms, owner = milliseconds(timeout), self._engine
        if tag is not None:
            _nebula.encode_name(config.check_text("a tag", tag))
            refuse_within_block(owner, tag)
        in_memory = owner.settings().persist_path is None
        if in_memory and not owner.has_session():  # nothing was saved: start no agent to learn that
            return True

        def flush() -> None:
            what = "a flush" if tag is None else f"a flush of {tag!r}"
            with progress.sending(owner, "saving checkpoints" if tag is None else f"saving {tag}", tag):
                patiently(what, lambda limit: owner.session().flush(None if in_memory else tag, limit), limit_ms)

        done = owner.guarded("flush" if tag is None else f"flush of {tag!r}", flush) is None
        owner.raise_late()
        if tag is None:  # begin the flush of all sessions, even if one fails
            pulse.rest()  # a program flushes when its steps are over
            done = all([done, *(other.flush_persistence(None, timeout) for other in list(self._others.values()))])
        return done

    def _await_storage(self, timeout: float) -> None:
        """Waits until everything committed is durable and has appeared. Raises NebulaTimeout, or why it cannot. For adapters."""
        owner = self._engine
        if owner.settings().persist_path is not None:
            patiently("a flush", lambda limit: owner.session().flush(None, limit), milliseconds(timeout))
        for other in list(self._others.values()):
            other._await_storage(timeout)

    def stats(self) -> list[dict[str, Any]]:
        """Returns the rows of checkpointHistories.csv as they are now, one per version."""
        report = json.loads(self._engine.session().report(_nebula.REPORT_HISTORY, None))
        if isinstance(report, dict):
            report = next((rows for rows in report.values() if isinstance(rows, list)), [])
        return list(report)

    # -- published files

    def find_published(self, path: str | os.PathLike[str]) -> tuple[Checkpoint, str] | None:
        """Finds the checkpoint that was published as ``path``, or will be, and the file's name ("" for a directory).

        None: Nebula knows of no publication there, though a plain file may exist.
        """
        try:
            target = config.local_path("a path", path)
        except NebulaConfigError:  # nothing can be published there
            return None
        try:
            handle, name = interruptible(self._engine.session(patient=True).find_published, target)
        except NebulaNotFound:
            return None
        return Checkpoint._found(self._engine, handle), name

    def unpublish(self, path: str | os.PathLike[str]) -> bool:
        """Removes a published file or directory, and cancels publications to ``path`` that are still to come.

        It waits until everything published before has appeared. With a published directory its checkpoint goes, too, from memory
        and storage. A directory that was not published is refused.
        """
        target = self._removable(path)

        def remove() -> None:
            is_directory = os.path.isdir(target) and not os.path.islink(target)
            if is_directory and not os.path.exists(os.path.join(target, _MARK)) and self.find_published(target) is None:
                raise NebulaConfigError(f"{target} stays: this directory was not published")
            self._engine.session().unpublish(target)

        return self._engine.guarded(f"removing {target}", remove) is None

    def _remove(self, path: str | os.PathLike[str]) -> bool:
        """As unpublish(), for adapters: their framework also removes directories that it wrote without Nebula."""
        target = self._removable(path)
        return self._engine.guarded(f"removing {target}", lambda: self._engine.session().unpublish(target)) is None

    def _removable(self, path: str | os.PathLike[str]) -> str:
        """Returns the absolute path. Raises if its removal would remove the working directory or the storage path."""
        target = config.local_path("a path", path)
        parent, name = os.path.split(target)
        gone = os.path.join(os.path.realpath(parent), name)  # the removal of a link leaves its target
        kept = {"the storage path": config.without_scheme(self.persist_path or "")}
        with contextlib.suppress(FileNotFoundError):  # the working directory may be gone
            kept["the working directory"] = os.getcwd()
        for what, place in kept.items():
            if os.path.isabs(place) and os.path.commonpath([gone, os.path.realpath(place)]) == gone:
                raise NebulaConfigError(f"{os.fspath(path)!r} stays: {what} {place} is that directory, or lies in it")
        return target


default = Session._of(engine.default)
