"""Checkpoint: the object through which a training loop saves, commits and loads one version."""

from __future__ import annotations

import functools
import logging
import numbers
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from . import _nebula
from ._session import about, config, engine, late, version
from ._session.traced import traced
from .elastic import worker
from .errors import NebulaConfigError, NebulaError
from .integrations import guards
from .tensors import buffers

__all__ = ["Checkpoint"]

log = logging.getLogger("nebulaml")

_blocks_lock = threading.RLock()  # guards _blocks; an RLock, because a signal handler may save while its thread holds it
_blocks: list[tuple[Checkpoint, int]] = []  # checkpoints inside their `with` block, and the thread of each block


def _after_fork() -> None:
    """Resets the blocks in a forked child: a block of one of the parent's threads never ends here."""
    global _blocks_lock
    _blocks_lock = threading.RLock()
    _blocks.clear()


def refuse_within_block(owner: engine.Engine, tag: str) -> None:
    """Raises NebulaConfigError if this thread is inside a `with` block of this tag.

    Only the end of the block closes the tag, so a wait inside the block would never return.
    """
    with _blocks_lock:
        if any(block._is_of(owner, tag) and thread == threading.get_ident() for block, thread in _blocks):
            raise NebulaConfigError(f"checkpoint {tag!r} is whole at the end of its `with` block: flush it after that")


def _place(path_and_job: tuple[str | None, str] | None) -> str:
    path, job = path_and_job or (None, "")
    return (path or "memory") + (f" as job {job!r}" if job else "")


class Checkpoint(version.Version):
    """One version of a program's state: a tag and some files.

    tag: any string. Tags ``global_step<n>`` are ordered by n, other tags by the time of their commit. Without a tag the
        checkpoint is named ``checkpoint-<n>``, where n is one more than the largest that exists.
    N: the number of files, over all ranks, that makes the checkpoint complete. -2: it is complete when every rank has
        committed. None: this rank's part closes at commit(), at the first save to the next tag, at flush_persistence()
        or at exit.
    metrics: numbers by name. metadata: values that JSON can hold, by name. Rank 0 writes both at commit() into a small
        file of the checkpoint, ``nebula-metadata.json``, which N does not count. Either all ranks give them or none.
    session: the ``Session`` of the checkpoint; without one, the session of ``init()``.

    A second object for the same tag adds files to the same checkpoint. Saving a name again replaces that file. A commit
    of either object closes the checkpoint, with the files that both have saved.

    As a context manager the object commits on success, and gives the checkpoint up on an exception. Until the block ends,
    no commit of another object closes this tag. In a job of one process, neither a save to the next tag nor the death of
    the process closes it.
    """

    def __init__(
        self,
        tag: str | None = None,
        N: int | None = None,  # noqa: N803
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        session: Any = None,
    ) -> None:
        owner: engine.Engine = engine.default if session is None else session._engine
        owner.raise_late()
        if tag is not None:
            config.check_text("a tag", tag)
        if N is None:
            count = _nebula.FILES_OPEN
        elif isinstance(N, bool) or not isinstance(N, numbers.Integral) or not (0 < N < 1 << 63 or N == _nebula.FILES_ALL_RANKS):
            raise NebulaConfigError(f"Checkpoint({tag!r}, {N!r}): N is a positive number of files, or -2 for all ranks")
        else:
            count = int(N)
        given = about.check(metrics, metadata) if metrics or metadata else None
        count += given is not None and count > 0
        if count == _nebula.FILES_ALL_RANKS and tag is not None:
            guards.check_tag(tag)
        super().__init__(owner, owner.own_tags.next() if tag is None else tag, None, None)
        self._about = given
        self._saves_nothing_yet(count)
        _nebula.encode_name(self._tag)  # raises for a tag that storage cannot hold, even if no agent answers
        self._failure = self._engine.guarded(f"starting checkpoint {self._tag!r}", self._open)

    def _saves_nothing_yet(self, count: int) -> None:
        self._count = self._goal = count  # _goal: the count for the next handle
        self._is_block_over = False  # the block has ended and nothing was saved since: the handle is still the block's
        self._begun_at: tuple[str | None, str] | None = None  # path and job
        self._newest: dict[str, object | None] = {}  # the last save of each name: failures of earlier saves no longer matter
        self._lost_files: set[str] = set()  # names whose last save failed: with one of them the checkpoint must not count as complete
        self._late_failure: NebulaError | None = None  # the failure of a save that had already returned
        self._given_up: set[object | None] = set()  # saves of a checkpoint that was given up: their copies may fail

    @classmethod
    def _found(cls, owner: engine.Engine, handle: _nebula.Checkpoint, persist_path: str | None = None) -> Checkpoint:
        """Makes the object of a version that a search has found.

        persist_path: the path of the search; None: that of the session.
        """
        self = cls.__new__(cls)
        super(Checkpoint, self).__init__(owner, handle.tag, handle, persist_path or owner.settings().persist_path)
        self._saves_nothing_yet(_nebula.FILES_OPEN)
        return self

    def _is_of(self, owner: engine.Engine, tag: str) -> bool:
        return self._engine is owner and self._tag == tag

    def _open(self) -> _nebula.Checkpoint:
        settings = self._engine.settings()
        here = (settings.persist_path, settings.job)
        if self._handle is None:
            self._handle, self._begun_at = self._engine.session().begin(self._tag, self._goal), here
            self._persist_path = settings.persist_path
            self._engine.watch()
            self._engine.agreement.begun_saving()
        elif self._begun_at not in (None, here):  # the checkpoint's files would lie in two places
            raise NebulaError(
                f"checkpoint {self._tag!r} was begun in {_place(self._begun_at)}, and init() has named {_place(here)} since: begin it again"
            )
        return self._handle

    def _begin_again(self) -> None:
        self._open()
        self._handle = self._engine.session().begin(self._tag, self._goal)

    def _open_for_save(self) -> _nebula.Checkpoint:
        if self._is_block_over:
            self._begin_again()
            self._is_block_over = False
        return self._open()

    @traced("save")
    def save(self, name: str, obj: Any, overlap: bool = False) -> bool:
        """Saves ``obj``, anything that torch.save takes, as file ``name``.

        When save() returns, the values are fixed: the program may change every tensor. Returns False if the save failed and
        on_error is "warn".
        overlap: save() returns while tensors on a GPU are still being copied. The next step of any torch optimizer waits for
            the copy, on the device. Until then the program must not change a storage of more than 1 MiB in any other way.
        Raises NebulaPicklingError for an object that cannot be pickled, NebulaConfigError for a name that is not allowed.
        """
        return self._save_object(name, obj, overlap)

    def _save_object(self, name: str, obj: Any, overlap: bool = False, check: Callable[[Any], None] | None = None) -> bool:
        """As save(). check: gets the Capture before anything is saved, and raises if the object shall not be saved."""
        config.check_text("a file name", name)
        try:
            taken = late.pickling.capture(obj, name, overlap)
            if check is not None:
                check(taken)
        except BaseException as failure:
            self._count_as_lost(name, failure)
            raise
        return self._attempt(name, self._save, taken)

    def _attempt(self, name: str, save: Callable[..., None], argument: Any) -> bool:
        """Tries once to save a file. If a later try for the same name succeeds, the failure of an earlier one no longer counts."""
        self._engine.is_prepared = True
        newest_before = self._newest.get(name)
        self._lost_files.discard(name)
        self._newest[name] = object()
        failure: BaseException | None = None
        try:
            failure = self._engine.guarded(f"saving {name!r} of checkpoint {self._tag!r}", save, name, argument)
        except BaseException as error:  # Ctrl-C, too: the file may or may not have been saved
            failure = error
            raise
        finally:
            if failure is not None:
                self._newest[name] = newest_before
                self._count_as_lost(name, failure)
        return failure is None

    def _count_as_lost(self, name: str, failure: BaseException) -> None:
        """Marks the file as lost, whatever the cause: otherwise an older file of that name, or none, would pass for this save."""
        if isinstance(failure, NebulaError):
            self._failure = failure
        self._lost_files.add(name)

    def _save(self, name: str, taken: Any) -> None:
        if taken.whole:
            self._open_for_save().save_bytes(name, taken.pickle)
        else:
            lost = functools.partial(self._lost, name, self._newest[name])
            self._open_for_save().save_pickle(name, taken.pickle, taken.storages, lost, taken.unprotectable, taken.filler)

    def _save_constants(self, name: str, parts: Any, constant: list[int], copied: Callable[[Any], Any]) -> bool:
        """Does save_bytes() for parts of which those with the numbers ``constant`` never change: the call waits for no copy of them.

        copied: gives the bytes of a part that has none itself.
        """
        ranges = buffers.ranges(parts, name, copied)

        def save(name: str, constant: list[int]) -> None:
            self._open_for_save().save_constants(name, ranges, constant, functools.partial(self._lost, name, self._newest[name]))

        return self._attempt(name, save, constant)

    def _save_ranges(self, name: str, taken: tuple[_nebula.Ranges, bool]) -> None:
        ranges, overlap = taken
        lost = functools.partial(self._lost, name, self._newest[name])
        if not sys.modules.get("torch"):  # nothing lies on a device that torch knows, and no memory is pinned
            self._open_for_save().save_ranges(name, ranges, lost)
            return
        filler = late.device.plan(ranges, overlap)
        self._open_for_save().save_ranges(name, ranges, lost, late.pickling.unprotectable(ranges), filler)

    def _lost(self, name: str, save: object, failure: BaseException) -> None:
        """Notes that the bytes of a save that had returned could not be copied. Any thread may call it."""
        if self._newest.get(name) is not save:
            log.info("nebula: a save of %r failed, and a later save has replaced it: %s", name, failure)
            return
        if save in self._given_up:
            log.info("nebula: the copy of %r ended, because checkpoint %r was given up: %s", name, self._tag, failure)
            return
        what = f"file {name!r} of checkpoint {self._tag!r}"
        log.error("nebula: %s is lost: %s. Training goes on; older checkpoints are untouched.", what, failure)
        if isinstance(failure, NebulaError):
            self._failure = self._late_failure = failure
            self._engine.note_late(failure)
        self._lost_files.add(name)

    @traced("save")
    def save_bytes(self, name: str, parts: Any, overlap: bool = False) -> bool:
        """Saves the concatenation of ``parts``, bytes-like objects and contiguous tensors, as file ``name``; or one of them alone.

        The values are fixed on return, False means failure, and ``overlap`` works as in save(). C copies each part once.
        """
        config.check_text("a file name", name)
        try:
            ranges = (late.pickling if sys.modules.get("torch") else buffers).ranges(parts, name)
        except BaseException as failure:
            self._count_as_lost(name, failure)
            raise
        return self._attempt(name, self._save_ranges, (ranges, overlap))

    def publish(self, name: str, path: str | os.PathLike[str]) -> bool:
        """Makes file ``name`` appear at ``path`` as soon as the checkpoint is durable, even if this process has died by then.

        The file appears whole. It is a copy, which shares blocks with the stored file if the file system supports that. Call
        this after the save. wait("durable") also waits for the published file. Returns False if it failed and on_error is "warn".
        """
        return self._publish(name, path, None)

    def publish_directory(self, staging: str | os.PathLike[str], path: str | os.PathLike[str]) -> bool:
        """Makes the whole checkpoint appear as directory ``path``, by one rename, as soon as it is durable.

        ``staging`` is a directory on the same file system as ``path``. The agent adds all files of the checkpoint to those
        that already lie in ``staging``, a file ``sub/x`` in a sub-directory, and renames ``staging`` to ``path``. If ``path``
        exists, the files join it one by one. Returns False if it failed and on_error is "warn".
        """
        return self._publish(None, path, config.local_path("a staging directory", staging))

    def _publish(self, name: str | None, path: str | os.PathLike[str], staging: str | None) -> bool:
        target = config.local_path("a path", path)
        failure = self._engine.guarded(
            f"publishing checkpoint {self._tag!r} as {target}", lambda: self._open().publish(name, target, staging)
        )
        if failure is not None:
            self._failure = failure
        return failure is None

    def _save_about(self) -> None:
        """Saves metrics and metadata once. The commit notices a failure, because the save marks the file as lost."""
        if self._about is not None and about.FILE not in self._newest and self._engine.place().rank == 0:
            self.save_bytes(about.FILE, about.encode(self._about))

    @traced("commit")
    def commit(self) -> bool:
        """Closes this rank's part, and never waits for another rank. Returns True on success, also if other ranks alone have saved files.

        Returns False if a save of this object failed or raised, and no later save of that name succeeded. Then the
        checkpoint is given up, because it would not be complete. It also returns False if the checkpoint has no file at all.
        If another object of this tag is inside its `with` block, commit() leaves the closing to the end of that block, which
        closes the files of both.
        """
        self._save_about()
        if self._lost_files:
            if self._handle is not None:
                self._give_up(f"a save failed before the commit: {self._failure or 'it ended with an exception'}")
            if self._late_failure is not None and self._engine.settings().on_error == "raise":
                self._engine.forget_late(self._late_failure)
                raise self._late_failure
            return False
        with _blocks_lock:
            if _blocks and any(other is not self and other._is_of(self._engine, self._tag) for other, _ in _blocks):
                return True
        self._engine.watch()  # the agent may have changed since this checkpoint began
        failure = self._engine.guarded(f"committing checkpoint {self._tag!r}", self._commit)
        self._failure = failure
        self._engine.raise_late()
        return failure is None

    def _commit(self) -> None:
        handle = self._open()
        handle.commit()
        if not self._newest and handle.state() == "failed":  # no rank has saved anything, or the version had failed before
            raise NebulaError(self._report().get("error") or f"checkpoint {self._tag!r} has failed")
        self._engine.log_memory_only()
        self._engine.record_imports()
        worker.tell(_nebula.step_of(self._tag))
        if self._count != _nebula.FILES_OPEN:
            self._engine.committed(handle)

    def _give_up(self, reason: str) -> None:
        self._given_up |= set(self._newest.values())  # first: another thread may hear of a failed copy at once
        try:
            self._known().fail(reason)
        except NebulaError as failure:
            log.warning("nebula: could not mark checkpoint %r as failed: %s", self._tag, failure)

    def _begin_block(self) -> None:
        """Makes the handle of a block in a job of one process stay open until the block ends.

        An open-ended part closes when its only rank dies, and a death inside the block would leave half a checkpoint that
        looks complete. With several ranks the block keeps an open-ended part: one rank may never enter its block, and the
        others would wait for it. A handle that already has files is kept.
        """
        is_unused = self._is_block_over or not self._newest
        is_found = self._handle is not None and self._begun_at is None
        if self._count != _nebula.FILES_OPEN or not is_unused or is_found or self._engine.place().world > 1:
            return
        self._goal, self._is_block_over = _nebula.FILES_ALL_RANKS, False
        if self._handle is not None:
            self._failure = self._engine.guarded(f"starting checkpoint {self._tag!r}", self._begin_again) or self._failure

    def __enter__(self) -> Checkpoint:
        self._begin_block()
        with _blocks_lock:
            _blocks.append((self, threading.get_ident()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _blocks_lock:
            for block in reversed(_blocks):  # the list is empty in a child that was forked inside the block
                if block[0] is self:
                    _blocks.remove(block)
                    break
        was_raised, self._goal = self._goal != self._count, self._count
        if exception is None:
            self._is_block_over = self.commit() and was_raised
        elif self._handle is not None:
            reason = f"{type(exception).__name__}: {exception}"[:400].replace("\0", "")
            self._give_up(reason.encode(errors="replace").decode())

os.register_at_fork(after_in_child=_after_fork)
