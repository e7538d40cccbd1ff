"""Manager: decides when to save and which versions to keep, and restores them, for a training loop."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from .. import _nebula
from .._session import about, agree, config, late, notices, progress, pulse
from .._session.keeping import Best, is_count
from .._session.rows import Rows
from .._session.session import Session
from .._session.waits import beside_loop, milliseconds, patiently
from ..checkpoint import Checkpoint
from ..errors import NebulaConfigError, NebulaCorrupt, NebulaError, NebulaNotFound
from ..events import Event
from ..export import background
from ..export.background import HFExport
from .failures import Failures
from .far import Far, Look, Second
from .policy import SaveEvery

__all__ = ["Manager", "Restored", "Version"]

log = logging.getLogger("nebulaml")

LEAVE_MARGIN_S = 3.0  # part of the time after a notice that is left for the program's own end

INCOMPLETE = ("capturing", "captured")  # states of a version that cannot be loaded yet

EXTRA = "extra"  # the item whose value restore() returns


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of restore(): the step, metrics and metadata of the version, and the value of its item "extra" (None without one)."""

    step: int
    metrics: dict[str, float]
    metadata: dict[str, Any]
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Version:
    """One row of Manager.checkpoints(). size: bytes. pinned: the reason of the pin; None: not pinned."""

    step: int
    state: str
    size: int
    metrics: dict[str, float]
    metadata: dict[str, Any]
    pinned: str | None = None


class Manager:
    """The checkpoints of one path, numbered by steps. Each manager is a session of its own; several may live in one process.

    path: a directory or a URL. Step n is the checkpoint ``global_step<n>`` in it.
    save_every_steps, save_every_s: should_save() is True at multiples of save_every_steps, and when save_every_s seconds have
        passed since the last save. Without both it is True at each step. After SIGTERM it is True once: save, and then end
        the loop if ``stop_requested``.
    save_every: "free": a step is due when the last save is durable, and saves take at most 1 % of the loop's time. save_every_steps is then
        the least distance of two saves, and save_every_s the time after which one comes in any case.
    keep_last, keep_every, keep_best: the versions that stay in storage: the newest keep_last, those whose step is a multiple of
        keep_every, and the best by a metric. The newest and pinned versions always stay. Without any of these and of the next all stay.
    keep_hourly, keep_daily, keep_weekly, keep_within: also the newest version of each of the newest so many hours, days and weeks (UTC)
        that have one, and all that were committed within that time before the latest ("14d"). As `nebula prune` has them, which shows
        without --yes why each version would stay.
    keep_items: {item: count}, for example {"optimizer": 2}: only the newest count versions keep that item. Older ones keep the others, and
        their storage is freed.
    on_error: "raise": failures are raised, and the next call raises a failure that came later. "warn": failures are logged,
        and ``errors`` lists them.
    weights_only: False trusts all files of this path: loading them may run code.
    replicated: names of items that are the same on all ranks. Rank 0 alone saves them; of other items each rank saves its own.
    evictions: "azure", "aws" or "gce". If that cloud's metadata service announces the end of this machine, that is a notice
        like SIGTERM.
    export: a ``nebulaml.HFExport``: a process of low priority makes Hugging Face directories of durable versions.
    far: a ``nebulaml.Far``: a second storage, to which durable versions are copied in the background, and from which versions are loaded
        that the first one has lost.
    settings: those of ``init()``. Each version is persisted at once unless persistent_time_interval says otherwise.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        save_every_steps: int | None = None,
        save_every_s: float | str | None = None,
        save_every: str | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_hourly: int | None = None,
        keep_daily: int | None = None,
        keep_weekly: int | None = None,
        keep_within: float | str | None = None,
        keep_best: Best | None = None,
        keep_items: Mapping[str, int] | None = None,
        on_error: str = "raise",
        weights_only: bool = True,
        replicated: Sequence[str] = (),
        evictions: str | None = None,
        export: HFExport | None = None,
        far: Far | None = None,
        persistent_time_interval: float | str = 0,
        **settings: Any,
    ) -> None:
        config.check_names("Manager", settings, ["path", *_NAMES, *config.NAMES[1:]])
        self._due = SaveEvery(save_every_steps, save_every_s, save_every)
        self._best = keep_best
        self._weights_only = weights_only
        self._export = export
        if export is not None and not isinstance(export, HFExport):
            raise NebulaConfigError(f"export={export!r:.200}: give nebulaml.HFExport(directory, ...)")
        if far is not None and not isinstance(far, Far):
            raise NebulaConfigError(f"far={far!r:.200}: give nebulaml.Far(path, ...)")
        self._far = far
        self._replicated = _names_of("replicated", replicated)
        self._session = Session(
            path, on_error=on_error, persistent_time_interval=persistent_time_interval, keep_items=_patterns(keep_items),
            **_rule(keep_last, keep_every, keep_hourly, keep_daily, keep_weekly, keep_within, keep_best), **settings,
        )
        self._engine = self._session._engine
        self._second = None if far is None else Second(self._session, far)
        self._notices = notices.Notices(self._engine, evictions)
        self._failures = Failures(self._engine)
        # Versions saved by this object, newest last. Other threads add and remove some meanwhile: take a list before iterating.
        self._own: dict[int, Checkpoint] = {}
        self._saved: collections.deque[int] = collections.deque(maxlen=4)  # the newest steps saved on this line of history
        self._decided: tuple[int, bool] | None = None  # the step and the last answer of should_save()
        self._reached: int | None = None  # the last step that should_save() or save() got, the same on all ranks
        self._unasked: int | None = None  # the step of a save at which rank 0 has answered, and this rank has not looked yet
        self._known: dict[tuple[str, int], about.About] = {}  # by tag and sequence
        self._errors: list[NebulaError] = []
        self._missed_metric = False  # the log has said that a version lacks the metric of keep_best

    def __repr__(self) -> str:
        if self._engine.is_closed:
            return "<nebulaml.Manager, closed>"
        return f"<nebulaml.Manager {config.shown(self._session.persist_path or 'in memory')}>"

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None) -> None:
        if exception is None:
            self.close()
        else:
            with contextlib.suppress(NebulaError):
                self.close()

    # -- saving

    def prepare(self, items: Mapping[str, Any]) -> None:
        """Makes memory for the first save, in the background. Call it before training, when model and optimizer exist.

        Without it the memory of the first save is made while it is copied. For an optimizer of torch it counts the state that
        its first step will make. It saves and changes nothing. Without torch it does nothing.
        """
        _check_names(items)
        if not late.has_torch():
            return
        from ..tensors import loading, preparing  # noqa: F401 - loading: restore() needs it soon
        from . import items as kinds

        place = self._engine.place()
        for name, item in items.items():
            if place.rank == 0 or name not in self._replicated:
                self._guarded("preparing", lambda item=item: preparing.prepare(self._engine, kinds.state_of(item), item))

    @property
    def stop_requested(self) -> bool:
        """True if a notice, SIGTERM or an eviction, has come to a rank. Look at it after a save: then the program should end.

        On several ranks, after a save with ``force``, it waits until rank 0 has begun that save, so that all ranks see the same.
        """
        self._agree_on_notice()
        return self._notices.is_here

    def _agree_on_notice(self) -> None:
        step, self._unasked = self._unasked, None
        if step is not None:
            self._notices.agree(step, False, lambda: False)

    def leave(self, timeout: float | None = None) -> str | None:
        """Makes the newest version safe before the program ends, as far as the time allows. Call it after the save for a notice.

        It waits first for a copy on another node, if there are replicas, and then for storage. timeout: seconds; None: the time
        that the notice leaves, less a margin. Returns the state that was reached, which it also logs. None: nothing was saved here.

        After a notice of the cloud it sends SIGTERM to the torchrun that started this process, so that this node does not join again.
        """
        try:
            return self._make_safe(timeout)
        finally:
            self._notices.notify_launcher()

    def _make_safe(self, timeout: float | None) -> str | None:
        begun = time.monotonic()
        left = self._notices.left_s() - LEAVE_MARGIN_S if timeout is None else timeout
        saved = list(self._own.values())
        if not saved:
            return None
        checkpoint = saved[-1]
        chosen = self._engine.settings()
        wanted = ["committed"] + ["replicated"] * bool(chosen.replica_count) + ["durable"] * (chosen.persist_path is not None)
        for state in wanted:
            rest = left - (time.monotonic() - begun)
            try:
                checkpoint.wait(state, timeout=max(0.0, rest))
            except NebulaError as failure:
                log.warning("nebula: %s is not %s before this process ends: %s", checkpoint.tag, state, failure)
                break
        reached = checkpoint.state
        cause = f"{self._notices.reason}: " if self._notices.reason else ""
        log.warning("nebula: %s%s is %s after %.1f s, of %.1f s", cause, checkpoint.tag, reached, time.monotonic() - begun, max(0.0, left))
        return reached

    def should_save(self, step: int) -> bool:
        """Returns True if this step is due, or a notice has come. All ranks get the same answer; each must ask at each step."""
        self._reached = step = _whole_step(step)
        pulse.progress(step)
        self._notices.listen()
        if self._decided is None or self._decided[0] != step:
            agreed = self._notices.agree(step, self._due.asks_clock, lambda: self._due.is_due_by_time(step, self._is_durable))
            self._decided = (step, (agreed or self._due.is_due_by_step(step)) and step not in self._saved)
        return self._decided[1]

    def _is_durable(self) -> bool:
        """Whether the last save needs no more work of the agent."""
        last = next(reversed(list(self._own.values())), None)
        wanted = "durable" if self._engine.settings().persist_path is not None else "committed"
        return last is None or last.state in (wanted, "durable", "failed")

    def _listen(self, step: int) -> None:
        """Hears notices in a loop that decides by itself when to save. The ranks agree on them at each save, because all ranks save.

        Rank 0 answers now. The others look at the answer later: no rank waits for another one inside save().
        """
        self._notices.listen()
        if self._decided is None or self._decided[0] != step:
            self._unasked = step
            if self._engine.place().rank == 0:
                self._agree_on_notice()

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> Checkpoint | None:
        """Saves the items as version ``step`` if should_save(step), or if ``force``. Returns the checkpoint.

        items: modules, optimizers, other objects with a state_dict(), and plain values, by name. When save() returns, the values
        are fixed and training can go on. The version is complete when all ranks have called save(). Returns None if the step was
        not due, or if the save failed and on_error is "warn".
        """
        self._reached = step = _whole_step(step)
        if force:
            self._listen(step)
        # before anything that may raise: the answer of rank 0 is awaited by others
        if not (force or self.should_save(step)):
            self._raise_late()
            return None
        self._failures.begin(step)
        self._engine.agreement.begun_saving()  # on all ranks, also on one whose save fails
        begun = time.monotonic()
        try:
            self._raise_late()
            said = about.check(metrics, metadata)
            self._log_missing_metric(step, said)
            checkpoint = self._begin(step, items, said)
            is_committed = checkpoint.commit()
        except BaseException as failure:
            self._failures.report(step, f"{failure!r:.300}")
            raise
        if (text := self._due.saved(step, time.monotonic() - begun)) and self._engine.place().rank == 0:
            log.info("nebula: %s", text)
            self._engine.hear(Event("interval", checkpoint.tag, step, text=text))
        self._decided = (step, False)
        self._notices.answered()
        if not is_committed:
            self._failures.report(step, f"{checkpoint._failure!s:.300}")
            self._errors.append(checkpoint._failure or NebulaError(f"step {step} could not be saved: {checkpoint.error}"))
            return None
        self._own.pop(step, None)
        self._own[step] = checkpoint
        self._saved.append(step)
        self._forget_old()
        background.begin(self._export, self._engine)
        background.begin(self._far, self._engine)
        return checkpoint

    def _begin(self, step: int, items: Mapping[str, Any], said: about.About) -> Checkpoint:
        """Returns the checkpoint of a step, with this rank's items saved."""
        _check_names(items)
        place = self._engine.place()
        each = {name: place.world > 1 and name not in self._replicated for name in items}
        checkpoint = Checkpoint(_tag(step), _nebula.FILES_ALL_RANKS, session=self._session)
        checkpoint._about = said._replace(items=each, world=place.world)
        try:
            for name, item in items.items():
                if each[name] or place.rank == 0:
                    self._save_item(checkpoint, name, item, _file(name, each[name], place.rank))
        except BaseException as failure:
            checkpoint._give_up(f"a save failed: {failure!r:.400}")
            raise
        return checkpoint

    def _save_item(self, checkpoint: Checkpoint, name: str, item: Any, file: str) -> None:
        from . import items as kinds

        check = functools.partial(kinds.check_restorable, name) if self._weights_only else None
        checkpoint._save_object(file, kinds.state_of(item), check=check)

    def _forget_old(self) -> None:
        """Drops handles of versions that are complete or failed. They can be found again by their tags."""
        for step, checkpoint in list(self._own.items())[:-4]:
            if checkpoint.state not in INCOMPLETE:
                self._own.pop(step, None)

    # -- restoring

    def restore(
        self, targets: Mapping[str, Any], step: int | None = None, strict: bool = True, keys: Sequence[str] | str | None = None
    ) -> Restored | None:
        """Restores the targets in place from a version. Every rank must call it. Returns None if there is no checkpoint.

        step: the version; None: the newest. keys: patterns of the parts to restore, for example "model", "model.encoder.*" or "*";
        None: all. strict: names, shapes and types must fit; otherwise parts that do not fit stay as they are, and the log names
        them. Raises NebulaNotFound for a step or item that does not exist, NebulaConfigError for parts that do not fit. Then it has
        changed nothing, unless it is a load_state_dict() of the program that refuses. Before the first save, it also prepares memory for
        saves of the targets, as ``prepare`` does.
        """
        restored = self._restore(targets, step, strict, keys)
        if keys is None and late.has_torch():
            rank = self._engine.place().rank
            late.foresight.expect(self._engine, [each for name, each in targets.items() if rank == 0 or name not in self._replicated])
        return restored

    def _restore(self, targets: Mapping[str, Any], step: int | None, strict: bool, keys: Sequence[str] | str | None) -> Restored | None:
        from . import items as kinds

        self._raise_late()
        if not isinstance(targets, Mapping):
            raise NebulaConfigError(f"targets are a dict, as {{'model': model, 'optimizer': optimizer}}, not {type(targets).__name__}")
        patterns = kinds.check_keys(keys, list(targets))
        checkpoint = self._newest() if step is None else self._of_step(step, for_all_ranks=True)
        if checkpoint is None:
            return None
        said, files = checkpoint._said(), checkpoint._all_files()
        matched: set[str] = set()
        wanted = {name: select for name in targets if (select := kinds.selector(name, patterns, matched)) is not False}
        found = {name: self._find(checkpoint, name, said, files, strict) for name in wanted}
        extra = None
        size = sum(files[file] for file in found.values() if file is not None)
        with progress.fetching(self._engine, f"restoring {checkpoint.tag}", lambda: size if patterns is None else 0):
            if EXTRA not in targets and patterns is None:
                file = self._find(checkpoint, EXTRA, said, files, False)
                extra = None if file is None else kinds.load(checkpoint, file, self._weights_only)
            left_out: list[str] = [f"item {name!r} is not in the checkpoint" for name, file in found.items() if file is None]
            ready = [  # first all checks: if one item does not fit, no other one has changed
                kinds.plan(checkpoint, file, targets[name], wanted[name], strict, self._weights_only)
                for name, file in found.items()
                if file is not None
            ]
            unmatched = kinds.without_a_match(patterns, matched)
            if unmatched and strict:
                raise NebulaConfigError(f"{checkpoint.tag}: {config.in_lines(unmatched)}")
            left_out += unmatched
            for restore in ready:
                left_out += restore()
        self._goes_back_to(checkpoint.step)
        if left_out:
            log.warning("nebula: %s is restored, but for:\n  %s", checkpoint.tag, config.in_lines(left_out))
        return Restored(checkpoint.step or 0, dict(said.metrics), dict(said.metadata), extra)

    def _goes_back_to(self, step: int | None) -> None:
        """The program trains the steps after this one again, and its versions of them are new ones."""
        if step is not None:
            self._saved = collections.deque((saved for saved in list(self._saved) if saved <= step), self._saved.maxlen)
            if self._reached is not None and self._reached >= step:
                self._notices.goes_back()
            self._decided = self._reached = None

    def _newest(self) -> Checkpoint | None:
        """Finds the newest version. All ranks call it, and get the same."""
        # This manager's own save is newer than all of the far storage. On another node the save may have failed.
        if self._second is None or (self._own and not self._engine.agreement.is_of_several_nodes()):
            return self._session._for_all_ranks()
        return self._second.newest()

    def _find(self, checkpoint: Checkpoint, name: str, said: about.About, files: Mapping[str, int], strict: bool) -> str | None:
        """Returns the file of an item. None: it does not exist, and ``strict`` is False."""
        place = self._engine.place()
        owners = [rank for rank in range(said.world) if _file(name, True, rank) in files] if name not in said.items else []
        is_each = said.items.get(name, bool(owners))  # rank 0 lists its own items alone
        if is_each and said.world != place.world:
            raise NebulaConfigError(
                f"{checkpoint.tag}: each of {said.world} ranks has saved its own {name!r}, and this job has {place.world}. "
                f"Give an item that is the same on all ranks as Manager(..., replicated=[{name!r}]); nebulaml.dcp fits any number of ranks"
            )
        file = _file(name, is_each, place.rank)
        if file in files:
            return file
        if not strict:
            return None
        if owners:
            what = f"{checkpoint.tag} has no item {name!r} of rank {place.rank}"
            raise NebulaNotFound(f"{what}: {_ranks(owners)} saved it. strict=False leaves it out")
        if name in said.items:
            what = f"{checkpoint.tag} has no item {name!r} any more"
            raise NebulaNotFound(f"{what}: keep_items keeps it in newer versions. strict=False leaves it out")
        known = ", ".join(said.items or sorted(files)) or "nothing"
        raise NebulaNotFound(f"{checkpoint.tag} has no item {name!r}; it has: {known}. strict=False leaves it out")

    # -- looking

    def _versions(self, far: bool = True, look: Look = agree.of_all_ranks) -> Iterator[dict[str, Any]]:
        """Yields the versions that a look finds, newest first, with their steps. far: also those of the far storage."""
        for one in self._second.versions(look) if self._second is not None and far else look(self._engine, None):
            if _nebula.follows_step(one["tag"]) and not one["was_removed"]:
                yield one

    def all_steps(self) -> list[int]:
        """Returns, in ascending order, the steps that all ranks can load and those that this manager has saved and other ranks may still save.

        On several nodes, every rank must call this, ``latest_step`` and ``best_step`` until it has saved.
        """
        return sorted({one["step"] for one in self._versions()} | {step for step, _ in self._incomplete()})

    def _hear_failures(self) -> None:
        """Gives up the versions of which another rank has failed to save its part."""
        for step, checkpoint in list(self._own.items()):
            failure = self._failures.heard(step) if checkpoint.state in INCOMPLETE else None
            if failure is not None and checkpoint.state in INCOMPLETE:
                log.error("nebula: %s is given up: %s. Training goes on; older checkpoints are untouched.", checkpoint.tag, failure)
                checkpoint._give_up(failure)

    def _incomplete(self) -> list[tuple[int, Checkpoint]]:
        """Returns the versions saved here for which other ranks, or copies, are awaited, newest last. No search finds those yet."""
        self._hear_failures()
        return [(step, checkpoint) for step, checkpoint in list(self._own.items()) if checkpoint.state in INCOMPLETE]

    def latest_step(self) -> int | None:
        """Returns the step saved here last that is not complete yet, or else the newest that all ranks can load. None: there is none."""
        incomplete = self._incomplete()
        if incomplete:
            return incomplete[-1][0]
        newest = next(self._versions(far=not self._own), None)
        return int(newest["step"]) if newest else None

    def best_step(self, metric: str | None = None, mode: str | None = None) -> int | None:
        """Returns the best step by keep_best's metric, or by ``metric`` (the smallest, unless ``mode`` is "max"). None: no version has it."""
        rule = self._best
        if metric is not None and (rule is None or metric != rule.metric or mode is not None):
            rule = Best(metric, mode or "min")
        if rule is None:
            raise NebulaConfigError("best_step() needs a metric: give it, or give keep_best to the manager")
        best = rule.order(self._metrics())
        return best[0] if best else None

    def _metrics(self) -> dict[int, dict[str, float]]:
        """Returns the metrics of all versions by step, the newest first."""
        incomplete = {step: checkpoint._said().metrics for step, checkpoint in reversed(self._incomplete())}
        return incomplete | {one["step"]: self._about(one).metrics for one in self._versions() if one["step"] not in incomplete}

    def _about(self, version: dict[str, Any]) -> about.About:
        key = (version["tag"], version["sequence"])
        if key not in self._known:
            try:
                path = version.get("path")
                handle = self._engine.session(patient=True).find(version["tag"], path, version["sequence"])
                self._known[key] = Checkpoint._found(self._engine, handle, path)._said()
            except NebulaNotFound:  # another process has removed it since the version was listed
                return about.About({}, {}, {})
            except NebulaCorrupt as failure:  # one version must not hide the others
                log.warning("nebula: %s has no metrics and no metadata that can be read: %s", version["tag"], failure)
                self._known[key] = about.About({}, {}, {})
        return self._known[key]

    def checkpoint(self, step: int) -> Checkpoint:
        """Returns the version of a step. Raises NebulaNotFound, with the steps that exist, if there is none."""
        return self._of_step(step, for_all_ranks=False)

    def _of_step(self, step: int, for_all_ranks: bool) -> Checkpoint:
        step = _whole_step(step)
        find = self._session._for_all_ranks if for_all_ranks else self._session.get_checkpoint
        is_agreed = for_all_ranks and self._engine.agreement.is_of_several_nodes()
        was_removed = (lambda _: False) if is_agreed else self._was_removed  # the ranks have agreed on that, too
        if self._second is None:
            found = find(_tag(step), None)
            found = None if found is None or was_removed(found) else found
        else:
            found = self._second.tagged(_tag(step), find, was_removed)
        if found is None:
            raise self._missing(step, self.all_steps())
        return found

    def _here(self, step: int) -> Checkpoint:
        """Returns the version of a step in the near storage, as this node finds it: no other rank is asked."""
        own = self._own.get(step)
        if own is not None:
            return own
        known = {one["step"]: one for one in self._versions(False, agree.inventory)}
        with contextlib.suppress(KeyError, NebulaNotFound):  # the second: another process has removed it since
            opened = self._engine.session(patient=True)
            return Checkpoint._found(self._engine, opened.find(_tag(step), None, known[step]["sequence"]), None)
        raise self._missing(step, sorted(known.keys() - {step}))

    def _missing(self, step: int, known: list[int]) -> NebulaNotFound:
        steps = ", ".join(map(str, known)) or "none"
        return NebulaNotFound(f"there is no checkpoint of step {step} in {self._session.persist_path or 'memory'}; it has the steps: {steps}")

    def _was_removed(self, found: Checkpoint) -> bool:
        """True if memory alone has a version that was durable: another node's agent, or another program, may have removed it."""
        report = found._report()
        if self._session.persist_path is None or "memory" not in report["source"] or not report["durable_at"]:
            return False
        return "storage" not in report["source"] or found.step not in {one["step"] for one in self._versions(False, agree.inventory)}

    def checkpoints(self) -> Rows[Version]:
        """Returns a row for each version that this node can load, the newest first."""
        versions = list(self._versions(look=agree.inventory))
        states = {(path, one["tag"]): one for path in {one.get("path") for one in versions} for one in self._engine.versions(path)}
        pinned = self._pins()
        rows = []
        for one in versions:
            said, state = self._about(one), states.get((one.get("path"), one["tag"]), {})
            size = int(state.get("size", 0))
            rows.append(Version(one["step"], str(state.get("state", "")), size, said.metrics, said.metadata, pinned.get(one["tag"])))
        return Rows(rows)

    @property
    def errors(self) -> list[NebulaError]:
        """Failures that were not raised, the oldest first. It can be read after close(), too."""
        if self._engine.is_closed:
            return self._errors
        self._errors += self._engine.take_late() if self._engine.settings().on_error != "raise" else []
        return self._errors

    # -- waiting

    def wait(self, step: int | None = None, state: str = "durable", timeout: float | None = None) -> None:
        """Waits until one step, or all steps saved here, have reached ``state``: "captured", "committed", "replicated" or "durable".

        timeout: seconds; None sets no limit. Raises NebulaTimeout, or the error that made a version fail.
        """
        self._engine.settings()  # raises if the manager was closed
        with self._failures.listening(self._hear_failures):
            self._wait(step, state, timeout)
        self._raise_late()

    def _wait(self, step: int | None, state: str, timeout: float | None) -> None:
        if step is not None:
            step = _whole_step(step)
            (self._own.get(step) or self.checkpoint(step)).wait(state, timeout)
        elif state == "durable" and self._engine.has_session():
            with progress.sending(self._engine, "saving checkpoints"):
                patiently("a flush", lambda limit: self._engine.session().flush(None, limit), milliseconds(timeout))
        else:
            for checkpoint in list(self._own.values()):
                if checkpoint.state not in ("failed", "durable"):
                    checkpoint.wait(state, timeout)

    async def wait_async(self, step: int | None = None, state: str = "durable", timeout: float | None = None) -> None:
        """As wait(), without blocking the event loop of the program. A cancelled wait holds up neither the loop's end nor the program's."""
        await beside_loop(lambda: self.wait(step, state, timeout))

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Makes Nebula call ``callback(event)`` for events of versions in the background: on rank 0, on a thread of Nebula."""
        if not callable(callback):
            raise NebulaConfigError(f"on_event() takes a function of one event, not {callback!r:.200}")
        self._engine.listeners.append(callback)

    # -- keeping

    def pin(self, step: int, reason: str = "") -> None:
        """Keeps a version in spite of the rules, until unpin()."""
        config.check_text("the reason of a pin", reason)
        self._engine.session(patient=True).pin(self._here(_whole_step(step)).tag, reason)

    def unpin(self, step: int) -> None:
        """Removes the pin of a version, so that the rules apply to it again."""
        self._engine.session(patient=True).unpin(_tag(_whole_step(step)))

    def _pins(self) -> dict[str, str]:
        """Returns the reasons of pins by tag."""
        if self._session.persist_path is None:
            return {}
        report = json.loads(self._engine.session(patient=True).report(_nebula.REPORT_PINS, None))
        return {one["tag"]: one["reason"] for one in report["pins"]}

    def delete(self, step: int) -> None:
        """Removes a version from storage. Raises NebulaConfigError for a pinned version, and for the newest, which a restart would load."""
        step = _whole_step(step)
        if self._session.persist_path is None:
            raise NebulaConfigError(f"step {step} is in memory only: newer versions take its memory, and delete() removes from storage")
        self._here(step).wait("durable")
        self._engine.session(patient=True).remove(_tag(step))
        self._own.pop(step, None)

    def _log_missing_metric(self, step: int, said: about.About) -> None:
        """Warns once of a version that keep_best cannot judge: a misspelled metric would keep all versions."""
        if self._best is None or self._missed_metric or self._best.metric in said.metrics or self._engine.place().rank != 0:
            return
        self._missed_metric = True
        log.warning(
            "nebula: step %d has no value of the metric %r of keep_best, but of: %s. Until a version has one, all stay",
            step, self._best.metric, ", ".join(sorted(said.metrics)) or "none",
        )  # fmt: skip

    # -- failures and the end

    def _guarded(self, what: str, call: Callable[..., Any]) -> None:
        failure = self._engine.guarded(what, call)
        if failure is not None:
            self._errors.append(failure)

    def _raise_late(self) -> None:
        self._engine.raise_late()

    def close(self) -> None:
        """Waits for running copies in memory and closes the session. Raises a failure that was not raised yet.

        The agent makes committed versions durable without this process, and exports in the background go on.
        """
        if self._engine.is_closed:
            return
        self._notices.forget()
        background.end(self._export)
        background.end(self._far)
        self._engine.settle()
        late, raises = self._engine.take_late(), self._engine.settings().on_error == "raise"
        self._session.close()
        if late and raises:
            raise late[0]
        self._errors += late


_NAMES = tuple(name for name, one in inspect.signature(Manager.__init__).parameters.items() if one.kind is one.KEYWORD_ONLY)


def _rule(last: Any, every: Any, hourly: Any, daily: Any, weekly: Any, within: Any, best: Any) -> dict[str, Any]:
    """Returns the settings by which the agent removes versions. The newest always stays, so keep_last is 1 beside one of the others."""
    counts = {"keep_last": last, "keep_every": every, "keep_hourly": hourly, "keep_daily": daily, "keep_weekly": weekly}
    for name, value in counts.items():
        if value is not None and not is_count(value):
            raise NebulaConfigError(f"{name}={value!r:.200}: a whole number of 1 or more, or None")
    if best is not None and not isinstance(best, Best):
        raise NebulaConfigError(f"keep_best={best!r}: give nebulaml.Best(metric, mode, count)")
    has_any = any(value is not None for value in (*counts.values(), within, best))
    settings = {name: int(value or 0) for name, value in counts.items()}
    return settings | {"keep_last": int(last or 1) if has_any else 0, "keep_within": within or 0, "keep_best": best or ""}


def _patterns(items: Any) -> dict[str, Any]:
    """Returns keep_items by the names of files."""
    if items is not None and not isinstance(items, Mapping):
        raise NebulaConfigError(f"keep_items={items!r:.200}: give a dict, as {{'optimizer': 2}}")
    for name in items or ():
        if not isinstance(name, str) or not name or set(name) & set("*?["):
            raise NebulaConfigError(f"keep_items: {name!r:.200} is not the name of an item")
    return {f"{name}.*": count for name, count in (items or {}).items()}


def _tag(step: int) -> str:
    return f"global_step{step}"


def _ranks(some: list[int]) -> str:
    return f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some[:8]))}{', ...' * (len(some) > 8)}"


def _file(name: str, is_each: bool, rank: int) -> str:
    return f"{name}.{rank:05d}.pt" if is_each else f"{name}.pt"


def _whole_step(step: Any) -> int:
    """Returns the step as an int; numpy and torch have whole numbers of their own. Raises NebulaConfigError for anything else."""
    try:
        whole = -1 if isinstance(step, bool) else operator.index(step)
    except (TypeError, RuntimeError):  # torch raises the second for some tensors
        whole = -1
    if not 0 <= whole < 1 << 63:
        raise NebulaConfigError(f"a step is a whole number of 0 or more, not {step!r:.200} ({type(step).__name__})")
    return whole


def _names_of(setting: str, names: Any) -> frozenset[str]:
    found = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(name, str) for name in found):
        raise NebulaConfigError(f"{setting}={names!r:.200}: give the names of items, as ['model', 'optimizer']")
    return frozenset(found)


def _check_names(items: Any) -> None:
    if not isinstance(items, Mapping) or not items:
        found = f"an empty {type(items).__name__}" if isinstance(items, Mapping) else type(items).__name__
        raise NebulaConfigError(f"items are a dict, as {{'model': model, 'optimizer': optimizer}}, not {found}")
    for name in items:
        if not isinstance(name, str) or not name or "." in name or "/" in name:
            raise NebulaConfigError(f"an item's name is text without '.' and '/', not {name!r}")
