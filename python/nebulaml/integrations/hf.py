"""Hugging Face transformers and accelerate: the same checkpoint directories, written in the background.

``nebulaml.attach(trainer)`` takes over the instance's ``_save_checkpoint``: transformers' own routine runs, but its
writers only fix the values (see redirect.py). ``checkpoint-N`` appears by one rename, whole and durable.
``nebulaml.attach(accelerator)`` does the same for ``save_state``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import types
from collections.abc import Iterator
from typing import Any

from .. import api
from .._session import documents, pulse
from ..errors import NebulaConfigError, NebulaError
from ..export import background
from ..export.background import HFExport
from . import places, together
from .redirect import Capture, captured

__all__ = ["NebulaTrainerMixin", "attach_accelerator", "attach_trainer"]

log = logging.getLogger("nebulaml")

AGAIN = "~"  # before the number of a tag whose directory was removed since
LABEL = ".nebula.json"  # in a directory that was published
STAGING = "-staging"  # appended to the name of the directory in which the checkpoints appear
# Files that accelerate saves on every rank under one name, so that the last one counts. Rank 0 saves them: ranks of several nodes could not.
OF_ALL_RANKS = re.compile(r"scaler\.pt|dl_state_dict(_\d+)?\.bin")
# Options of transformers' own callbacks that read a checkpoint when it is saved.
SWITCHES = ("_log_model", "_log_artifacts", "_should_upload_checkpoint", "sync_checkpoints")


def _tags(session: api.Session, directory: str, prefix: str) -> dict[str, str]:
    """Returns the tags to save with in place of the usual ones, the same on all ranks. Every rank must call it.

    A person may have removed a checkpoint's directory and started anew. A save there must take over no file of the earlier writing.
    """
    return together.from_rank_0(lambda: _chosen(session, directory, prefix))


def _chosen(session: api.Session, directory: str, prefix: str) -> dict[str, str]:
    try:
        known = session.list_checkpoints()
    except NebulaError:  # no agent answers, or no storage: a save reports that
        return {}
    chosen = {}
    for tag in (one for one in known if one.startswith(prefix) and AGAIN not in one):
        target = os.path.join(directory, tag[len(prefix) :])
        there = _tag_in(target) if os.path.isdir(target) else ""
        if there is not None and there != tag and not there.startswith(f"{tag}{AGAIN}"):  # removed, or another checkpoint was copied there
            there = next(other for number in itertools.count(2) if (other := f"{tag}{AGAIN}{number}") not in known)
        if there is not None:
            chosen[tag] = there
    return chosen


def _tag_in(directory: str) -> str | None:
    """Returns the tag of what a directory holds. None: its label does not say."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        tag = documents.load(os.path.join(directory, LABEL))["tag"]
        return tag if isinstance(tag, str) else None
    return None


def _refuse_each_node(options: Any) -> None:
    """Raises if each of several nodes would save the same names: a version has one file of a name, so nothing would ever be stored."""
    if getattr(options, "save_on_each_node", False) and together.several():
        raise NebulaConfigError(
            "save_on_each_node=True: all nodes save one checkpoint with Nebula, and their files would have the same names. Leave it out, "
            "and give a directory that all nodes see"
        )


class _Rotation:
    """Applies save_total_limit to directories that are durable and to those that are still to appear."""

    def __init__(self, pattern: str, by_time: bool) -> None:
        self.pattern = re.compile(pattern)
        self.by_time = by_time  # order by the time of the save, not by the step: a run that went on from an older step counts lower again
        self.pending: dict[str, Any] = {}  # path -> checkpoint, in the order of the saves

    def saved(self, path: str, checkpoint: Any) -> None:
        self.pending.pop(path, None)
        self.pending[path] = checkpoint

    def directories(self, parent: str) -> list[str]:
        """Returns absolute paths, oldest first."""
        self.pending = {path: checkpoint for path, checkpoint in self.pending.items() if not _has_failed(checkpoint)}
        saved = [path for path in self.pending if os.path.dirname(path) == parent]
        times = {path: _changed_at(path) for path in _names_in(parent) if path not in saved}
        steps = {path: self._step(path) for path in (*saved, *(path for path in times if times[path]))}
        known = sorted((path for path in steps if steps[path] >= 0), key=steps.__getitem__)
        if not self.by_time:
            return known
        there = [path for path in known if path not in saved]
        # transformers also goes by steps otherwise
        if there and max(times[path] for path in there) - min(times[path] for path in there) >= 1:
            there.sort(key=times.__getitem__)
        return there + [path for path in saved if path in known]

    def _step(self, path: str) -> int:
        match = self.pattern.fullmatch(os.path.basename(path))
        return int(match.group(1)) if match else -1

    def rotate(self, session: api.Session, parent: str, limit: int | None, keep: set[str]) -> None:
        """Removes the oldest until `limit` are left. Each removal waits for the saves made so far.

        Call it only after a commit that succeeded: the agent would not wait for a save that failed.
        """
        if not limit or limit <= 0:
            return
        directories = self.directories(parent)
        protected = {directories[-1]} | keep if directories else set()
        left = len(directories)
        for path in directories:
            if left <= max(limit, len(protected)):
                break
            if path not in protected:
                _remove(session, path)
                self.pending.pop(path, None)
                left -= 1


def _names_in(directory: str) -> list[str]:
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory)]
    except FileNotFoundError:
        return []


def _newest_in(directory: str) -> str | None:
    """Returns the directory that accelerate takes for the newest. None: there is none."""
    numbered = [(int(number[0]), path) for path in _names_in(directory) if (number := re.search(r"\d+", os.path.basename(path)))]
    return max(numbered)[1] if numbered else None


def _changed_at(path: str) -> float:
    """Returns the time of the last change of a directory. 0: there is no directory, or it is being removed."""
    try:
        return os.stat(path).st_mtime if os.path.isdir(path) else 0
    except FileNotFoundError:
        return 0


def _remove(session: api.Session, path: str) -> None:
    try:
        session._remove(path)
    except NebulaConfigError as failure:  # the working directory or the storage path: no reason to stop training
        log.warning("nebula: %s", failure)


def _has_failed(checkpoint: Any) -> bool:
    try:
        return bool(checkpoint._state() == "failed")
    except NebulaError:  # no agent answers
        return False


class NebulaTrainerMixin:
    """For subclasses: ``class MyTrainer(NebulaTrainerMixin, Trainer)``.

    nebula_sync_on_save: True waits until each checkpoint is durable, so that callbacks find the directory in ``on_save`` as they do
        without Nebula. None: it waits only if a callback may look there. nebula_overlap: as ``overlap`` of Checkpoint.save.
    nebula_export: a ``nebulaml.HFExport``, by which durable checkpoints become Hugging Face directories in the background.
    """

    nebula_sync_on_save: bool | None = None
    nebula_overlap: bool = False
    nebula_export: HFExport | None = None

    def _nebula(self) -> Any:
        state = self.__dict__.get("_nebula_state")
        if state is None:
            state = self.__dict__["_nebula_state"] = types.SimpleNamespace(
                rotation=_Rotation(r"checkpoint-(\d+)", by_time=True), there=(), ending=False, tags={}
            )
        return state

    def _get_output_dir(self, trial: Any) -> str:
        directory = super()._get_output_dir(trial)
        if self.__dict__.get("_nebula_staging"):
            return self._nebula_staging_of(directory)
        return os.path.join(self._nebula_staging_of(directory), "nothing") if self._nebula_best_is_missing() else directory

    def _nebula_staging_of(self, directory: str) -> str:
        """Returns the staging directory of the output directory, or of a trial's directory in it."""
        output = os.path.abspath(self.args.output_dir)
        trial = os.path.relpath(os.path.abspath(directory), output)
        return os.path.normpath(os.path.join(places.beside(output, STAGING), trial))

    def _nebula_best_is_missing(self) -> bool:
        """Returns True at the end of training if storage has failed and the best checkpoint is missing.

        transformers would compare its directories with the missing one, and raise.
        """
        state, best = self.__dict__.get("_nebula_state"), self.state.best_model_checkpoint
        return state is not None and state.ending and best is not None and not os.path.isdir(best)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Waits for all checkpoints before the end of training.

        transformers logs the summary of the run before it looks for the best model and removes old directories. From then on the
        directories must exist.
        """
        super().log(logs, *args, **kwargs)
        state = self.__dict__.get("_nebula_state")
        if state is not None and "train_runtime" in logs:
            together.flush()
            state.ending = True
            parents = {os.path.dirname(path) for path in state.rotation.pending}
            state.there = {path for parent in parents for path in state.rotation.directories(parent) if os.path.isdir(path)}

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        state = self._nebula()
        session, prefix = places.store(self.args.output_dir)
        run = super()._get_output_dir(trial)
        parent = os.path.abspath(run)
        folder = f"checkpoint-{self.state.global_step}"
        target, staging = os.path.join(parent, folder), os.path.join(self._nebula_staging_of(parent), folder)
        tag = prefix + _below(self.args.output_dir, target)
        merge = os.path.isdir(target)
        limit, push = self.args.save_total_limit, self.args.push_to_hub
        plain = super()._save_checkpoint

        def save() -> Capture:
            self._nebula_staging = True
            try:
                with (
                    captured(Capture(state.tags.get(tag, tag), staging, -2, self.nebula_overlap, session)) as capture,
                    _with_values(self.args, save_total_limit=None, push_to_hub=False),
                ):
                    self._nebula_args = {"save_total_limit": limit, "push_to_hub": push}
                    plain(model, trial, *args, **kwargs)
                    state.rotation.saved(target, capture.checkpoint)
                    self._repair_state(run, staging)
            finally:
                self._nebula_staging, self._nebula_args = False, {}
            return capture

        capture = together.stages(session, staging, target, save)
        if capture is None:
            return
        published = True
        if self.args.should_save:
            places.make(parent)
            published = capture.checkpoint.publish_directory(staging, target)
        if not capture.checkpoint.commit() or not published:
            return  # the failure is logged; older checkpoints stay, in spite of save_total_limit
        root = os.path.abspath(self.args.output_dir)
        background.begin(self.nebula_export, session._engine, prefix, root, self.accelerator.unwrap_model(self.model))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            state.rotation.rotate(session, parent, limit, {os.path.abspath(best)} if best else set())
        is_there = (merge or push or self._nebula_must_sync()) and session.flush_persistence(capture.tag)
        if push and is_there:  # else the hub would get what an earlier save has left, as this step's
            self._push_from_checkpoint(target)

    def save_model(self, *args: Any, **kwargs: Any) -> Any:
        """Saves with the arguments that the user gave, because it writes them into training_args.bin."""
        with _with_values(self.args, **self.__dict__.get("_nebula_args", {})):
            return super().save_model(*args, **kwargs)

    def _repair_state(self, parent: str, staging: str) -> None:
        """Makes the trainer's state name the final directory, as without Nebula: the routine ran below the staging directory.

        Every rank does this, because each loads the best model. Only the writing rank rewrites the file.
        """
        before, step = self.state.best_model_checkpoint, getattr(self.state, "best_global_step", None)
        if step:
            best = os.path.join(parent, f"checkpoint-{step}")
            if os.path.abspath(best) in self._nebula().rotation.directories(os.path.abspath(parent)):
                self.state.best_model_checkpoint = best
        elif before and os.path.abspath(before).startswith(os.path.dirname(staging) + os.sep):  # transformers before 4.51
            self.state.best_model_checkpoint = os.path.join(parent, os.path.basename(before))
        written = os.path.join(staging, "trainer_state.json")
        if self.args.should_save and self.state.best_model_checkpoint != before and os.path.exists(written):
            self.state.save_to_json(written)

    def _nebula_must_sync(self) -> bool:
        if self.nebula_sync_on_save is not None:
            return self.nebula_sync_on_save
        return any(map(_may_read, self.callback_handler.callbacks))

    def _load_best_model(self) -> None:
        together.flush()
        super()._load_best_model()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().training_step(*args, **kwargs)  # type: ignore[misc]
        pulse.progress(self.state.global_step)
        return result

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().prediction_step(*args, **kwargs)  # type: ignore[misc]
        pulse.beat()
        return result

    def train(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_each_node(self.args)
        session, prefix = places.store(self.args.output_dir)
        together.flush()  # the last checkpoint of a run that was killed may not be durable yet
        self._nebula().tags = _tags(session, self.args.output_dir, prefix)
        args, kwargs = _resuming(self.args.output_dir, args, kwargs)
        try:
            return super().train(*args, **kwargs)
        finally:
            state = self._nebula()
            state.ending = False
            if self.args.should_save:
                for path in (path for path in state.there if not os.path.isdir(path)):
                    _remove(session, path)  # transformers has removed it: remove it from storage, too
            api.flush_persistence()
            if self.args.should_save:
                places.tidy(self._nebula_staging_of(self.args.output_dir))
            state.there = ()
            state.rotation.pending.clear()


def _resuming(directory: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of train() with the checkpoint that rank 0 finds, if they ask for the newest.

    The agent of a node that has left the job may put a newer one in place while the ranks list the directory one after the other.
    """
    from transformers.trainer_utils import get_last_checkpoint

    if (args[0] if args else kwargs.get("resume_from_checkpoint")) is not True:
        return args, kwargs
    found = together.from_rank_0(lambda: get_last_checkpoint(directory)) or True  # True: transformers refuses
    return ((found, *args[1:]), kwargs) if args else (args, {**kwargs, "resume_from_checkpoint": found})


@contextlib.contextmanager
def _with_values(target: Any, **values: Any) -> Iterator[None]:
    """Sets attributes for the duration of the block."""
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def _may_read(callback: Any) -> bool:
    """Returns True if this callback may read the checkpoint's directory in its ``on_save``."""
    import transformers

    if type(callback).on_save is transformers.TrainerCallback.on_save:
        return False
    if type(callback).__module__ != "transformers.integrations.integration_utils":
        return True
    values = (getattr(callback, name, None) for name in SWITCHES)
    return any(str(getattr(value, "value", value)).lower() in ("1", "true", "all", "checkpoint") for value in values)


def _below(directory: str, target: str) -> str:
    """Returns the path of a checkpoint in a directory: checkpoint-N, in a hyperparameter search with the trial's directory before it."""
    return os.path.relpath(target, os.path.abspath(directory))


def attach_trainer(
    trainer: Any, sync_on_save: bool | None = None, overlap: bool | None = None, export: HFExport | None = None
) -> Any:
    """Gives one Trainer (or any subclass) background checkpoints, and returns it.

    Works without ``init()``, or with one that names no path: checkpoints are then persisted beside ``args.output_dir``. sync_on_save,
    overlap, export: as in NebulaTrainerMixin. None: unchanged.
    """
    kind = type(trainer)
    if not isinstance(trainer, NebulaTrainerMixin):
        trainer.__class__ = type(
            kind.__name__,
            (NebulaTrainerMixin, kind),
            {"__module__": kind.__module__, "__qualname__": kind.__qualname__},
        )
    if sync_on_save is not None:
        trainer.nebula_sync_on_save = sync_on_save
    if overlap is not None:
        trainer.nebula_overlap = overlap
    if export is not None:
        trainer.nebula_export = export
    return trainer


def attach_accelerator(accelerator: Any, overlap: bool | None = None, export: HFExport | None = None) -> Any:
    """Makes ``save_state`` of one Accelerator asynchronous, and returns the Accelerator. ``load_state`` reads the same directories.

    overlap: as in Checkpoint.save. None: unchanged, at first False.
    export: makes Hugging Face directories of durable checkpoints in the background. None: unchanged.
    """
    if overlap is not None:
        accelerator._nebula_overlap = overlap
    if export is not None:
        accelerator._nebula_export = export
    if getattr(accelerator, "_nebula_attached", False):
        return accelerator
    rotation = _Rotation(r"checkpoint_(\d+)", by_time=False)
    tags: dict[str, dict[str, str]] = {}  # by the directory of the store
    plain_save, plain_load = accelerator.save_state, accelerator.load_state

    def home_of(parent: str) -> str:
        """Returns the directory whose store a checkpoint in ``parent`` belongs to."""
        project = os.path.abspath(accelerator.project_dir or parent)
        return project if os.path.commonpath([project, parent]) == project else parent

    @functools.wraps(plain_save)
    def save_state(output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        configuration = accelerator.project_configuration
        _refuse_each_node(configuration)
        automatic = configuration.automatic_checkpoint_naming
        if automatic:
            target = os.path.join(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
            if os.path.exists(target) or os.path.abspath(target) in rotation.pending:
                raise ValueError(
                    f"checkpoint directory {target} already exists: set save_iteration to the one to start with"
                )
        elif output_dir is None:
            raise NebulaConfigError("save_state needs output_dir, unless automatic_checkpoint_naming is set")
        else:
            target = os.path.expanduser(output_dir)
        target = os.path.abspath(target)
        parent, folder = os.path.split(target)
        home = home_of(parent)
        session, prefix = places.store(home)
        if home not in tags:
            session.flush_persistence()  # what a run that was killed has saved has its directory then
            tags[home] = _tags(session, home, prefix)
        staging = os.path.join(places.beside(parent, STAGING), folder)
        places.make(parent)

        def save() -> Capture:
            configuration.automatic_checkpoint_naming = False
            try:
                overlap = getattr(accelerator, "_nebula_overlap", False)
                tag = prefix + _below(home, target)
                left_out = None if accelerator.is_main_process else OF_ALL_RANKS
                with captured(Capture(tags[home].get(tag, tag), staging, -2, overlap, session, left_out)) as capture:
                    plain_save(staging, *args, **kwargs)
            finally:
                configuration.automatic_checkpoint_naming = automatic
            return capture

        capture = together.stages(session, staging, target, save)
        if capture is None:
            return target
        rotation.saved(target, capture.checkpoint)
        published = not accelerator.is_main_process or capture.checkpoint.publish_directory(staging, target)
        committed = capture.checkpoint.commit() and published
        if committed:
            background.begin(getattr(accelerator, "_nebula_export", None), session._engine, prefix, home)
        if committed and automatic and accelerator.is_main_process:
            rotation.rotate(session, parent, configuration.total_limit, set())
        return target

    @functools.wraps(plain_load)
    def load_state(input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if input_dir is not None:
            parent = os.path.dirname(os.path.abspath(os.path.expanduser(input_dir)))
        else:
            parent = os.path.join(os.path.abspath(accelerator.project_dir or ""), "checkpoints")
        # The last checkpoint of a run that was killed may not be durable yet.
        initialized = api.is_initialized()
        own = [api.default] if initialized and api.persist_path() is not None else []
        is_staged = os.path.isdir(places.beside(parent, STAGING)) or together.several()
        together.flush(own + ([places.store(home_of(parent))[0]] if is_staged else []))
        if is_staged and not initialized:
            api._shutdown()  # forget the settings: the first save of this program decides where it saves
        if accelerator.is_main_process:
            places.tidy(places.beside(parent, STAGING))
        if input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming:
            input_dir = together.from_rank_0(lambda: _newest_in(parent))  # as _resuming()
        return plain_load(input_dir, *args, **kwargs)

    accelerator.save_state, accelerator.load_state = save_state, load_state
    accelerator._nebula_attached = True
    return accelerator
