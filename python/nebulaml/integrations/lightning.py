"""Lightning 2.x: checkpoints that do not delay training.

``NebulaCheckpointIO`` is a plugin for either Trainer (``lightning`` or ``pytorch_lightning``). ``NebulaCallback`` is
a ModelCheckpoint whose saves use it. ``NebulaDeepspeedStrategy`` gives each checkpoint of a DeepSpeed run its own tag. When a
checkpoint is durable, its file appears at the path that Lightning chose, by one rename, and under ``<persist>/<tag>/``. Until
then Nebula loads that path from memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import os
import re
import sys
import zipfile
from collections.abc import Callable
from typing import Any

from .. import api
from .._session import config, documents, pulse, ranks
from ..errors import NebulaConfigError, NebulaError, NebulaNotFound
from ..export import background
from ..export.background import HFExport
from . import guards, places, together

__all__ = ["NebulaCallback", "NebulaCheckpointIO", "NebulaDeepspeedStrategy"]

log = logging.getLogger("nebulaml")

PARTITION = "checkpoint"
OPTIONS = ("is_best", "persist_path")
LISTED = ("last", "hpc")  # values of ckpt_path for which Lightning lists a directory
ATTACH = "for a transformers.Trainer no callback is needed: nebulaml.attach(trainer)"


def _modules(name: str, fabric: bool = False) -> list[Any]:
    """Returns the module of that name in each installed Lightning package: each has its own class tree."""
    found = []
    for package in ("lightning.fabric", "lightning_fabric") if fabric else ("lightning.pytorch", "pytorch_lightning"):
        try:
            found.append(importlib.import_module(f"{package}.{name}"))
        except ImportError:
            continue
    if not found:
        raise NebulaConfigError(f"this class is for Lightning: pip install lightning (or pytorch-lightning); {ATTACH}")
    return found


def _is_remote(path: Any) -> bool:
    return config.is_url(os.fspath(path))


def _key(path: Any) -> str:
    """Returns the absolute path, so that one file has one key."""
    return os.path.abspath(os.path.expanduser(config.without_scheme(os.fspath(path))))


def _stock_io() -> Any:
    """Returns Lightning's own plugin."""
    return _modules("plugins.io", fabric=True)[0].TorchCheckpointIO()


def _outside_of_fit() -> bool:
    """Returns True if the program itself called Trainer.save_checkpoint() before or after Trainer.fit().

    Then no end of a fit follows that would wait for the file.
    """
    asked, frame = False, sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").endswith(".trainer.trainer"):
            if frame.f_code.co_name == "fit":
                return False
            asked = asked or frame.f_code.co_name == "save_checkpoint"
        frame = frame.f_back  # type: ignore[assignment]
    return asked


_first: dict[str, str] = {}  # named storage path -> the first directory of this process that saved there


def _home(directory: str) -> tuple[api.Session, str]:
    """Returns the session that saves what Lightning puts into a directory, and what its tags end in.

    Lightning's directory has all checkpoints, so a storage path beside it keeps only the newest two. In a storage path that is named, the
    tags of the first directory are plain.
    """
    session, prefix = places.store(directory, keep_last=2)
    directory = os.path.realpath(directory)
    is_plain = not prefix or _first.setdefault(str(session.persist_path), directory) == directory
    return session, "" if is_plain else f"-{prefix.rstrip('/')}"


def _published(target: str) -> Any:
    """Finds the checkpoint published as that path, or as the target of that link (``save_last="link"``), even before the file exists."""
    return api.find_published(target) or api.find_published(os.path.realpath(target))


def _flush() -> None:
    """Waits for all saves. Without a storage path this module has saved nothing, so it starts no agent to ask."""
    if api.persist_path() is not None:
        api.flush_persistence()


def _tag(checkpoint: Any, target: str) -> str:
    """global_step<n> of what a Trainer saves; else, as with Fabric, the file's name without its ending: "step-4.ckpt" is "step-4"."""
    step = checkpoint.get("global_step") if isinstance(checkpoint, dict) else None
    name = os.path.basename(target)
    if isinstance(step, int):
        # A number is put after another run's file of that step, perhaps not durable yet, which keeps its tag.
        return f"global_step{step}-{name}" if _NUMBERED.search(target) else f"global_step{step}"
    return os.path.splitext(name)[0] or name


def is_weights_only(asked: bool | None) -> bool:
    """Returns what torch.load does with that argument. None is its own default: from torch 2.6 on it runs no code of a file."""
    import torch

    from ..tensors import values

    if asked is not None:
        return asked
    return (guards.numbers_of(torch.__version__) or (2, 6)) >= (2, 6) and not values.torch_switch("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")


class _NoFile(NebulaNotFound, FileNotFoundError):
    """A NebulaNotFound that is also the error of Lightning's own plugin."""


class NebulaCheckpointIO:
    """A CheckpointIO: ``Trainer(plugins=[NebulaCheckpointIO()])``.

    Saves return when the values are fixed. In the agent, a removal waits for the saves made before it.
    overlap: as in Checkpoint.save. It must not be combined with a callback that averages weights by hand.
    other: the CheckpointIO for remote paths, and for files that Nebula did not write. None: Lightning's own.
    export: a ``nebulaml.HFExport``, by which durable checkpoints become Hugging Face directories in the background.
    """

    def __init__(self, overlap: bool = False, other: Any = None, export: HFExport | None = None) -> None:
        self._overlap, self._export = overlap, export
        self._other = other
        self._names: dict[tuple[str, str], str] = {}  # (tag, path) -> the file's name in that tag
        self.removed: set[str] = set()  # paths that Lightning believes to be removed, though the files may still wait for it
        self._sound = True  # whether the last save was committed
        self._elsewhere: set[str] = set()  # other storage paths in which a save may not be durable yet
        self._directory: str | None = None  # of the first save: its store has the files of all directories
        self._held: list[str] = []  # paths to remove after the next good save: one may be the only good checkpoint
        self._file = ""  # the path whose file all ranks are loading: memory may have another version of it, on this node alone
        self.is_read = False  # a logger may read the file that is being saved, as soon as the save returns
        _show_to_callbacks()
        _show_to_loggers()
        _load_together()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Saves `checkpoint`, which appears as file `path` when it is durable.

        storage_options: None, or a dict with ``is_best`` and ``persist_path``; other keys are ignored.
        is_best: the file also appears as ``best.ckpt`` beside `path`. persist_path: it is also saved as file ``checkpoint`` of the same tag
            in
            that storage path, where ``get_latest_checkpoint_path("checkpoint", persist_path)`` finds it. That copies the values once more.
        """
        options = storage_options if isinstance(storage_options, dict) else {}
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            log.warning("storage_options of a checkpoint: %s are not supported by Nebula", ", ".join(map(repr, unknown)))
        if _is_remote(path):
            log.warning(
                "nebula: %s is not a path of this machine: Lightning saves it itself, and training waits for that. Give Lightning a directory, "
                "and the remote one to a tool that uploads it", path,
            )  # fmt: skip
            (self._other or _stock_io()).save_checkpoint(checkpoint, path)
            return
        target = _key(path)
        self._begin(target)
        self._end(self._save(checkpoint, target, options), target)

    def home(self, target: str) -> tuple[api.Session, str]:
        """Returns the session that saves a file of this plugin, and what its tags end in."""
        if self._directory is None:
            self._directory = os.path.dirname(target)
        return _home(self._directory)

    def _begin(self, target: str) -> None:
        """A save of that path begins."""
        self.removed.discard(target)
        if target in self._held:
            self._held.remove(target)
        self._sound = False

    def _end(self, is_saved: bool, target: str) -> None:
        self._sound = is_saved
        if self._sound:
            self._remove_held()
        # Slurm's requeue looks for hpc_ckpt files, perhaps on another node. No end of a fit waits for saves outside of it.
        if self._sound and (self.is_read or os.path.basename(target).startswith("hpc_ckpt_") or _outside_of_fit()):
            self._finish()

    def _save(self, checkpoint: dict[str, Any], target: str, options: dict[str, Any]) -> bool:
        session, ending = self.home(target)
        places.make(os.path.dirname(target))
        tag = _tag(checkpoint, target) + ending
        name = self._name(tag, target)
        saved = session.checkpoint(tag, 1)
        if not saved.save(name, checkpoint, self._overlap):
            return False  # the failure is logged; older checkpoints stay
        published = saved.publish(name, target)
        if options.get("is_best"):
            saved.publish(name, os.path.join(os.path.dirname(target), "best" + os.path.splitext(target)[1]))
        is_saved = bool(saved.commit() and published)
        if is_saved:
            background.begin(self._export, session._engine)
        self._save_elsewhere(checkpoint, tag, name, options.get("persist_path"), session.persist_path)
        return is_saved

    def _save_elsewhere(self, checkpoint: dict[str, Any], tag: str, name: str, path: Any, own: str | None) -> None:
        """Saves a whole checkpoint in another storage path (``storage_options={"persist_path": ...}``)."""
        if not path:
            return
        other = config.clean_path(path)
        if name == PARTITION and own and os.path.realpath(config.without_scheme(other)) == os.path.realpath(config.without_scheme(own)):
            return  # the checkpoint is already there
        if api._save_elsewhere(other, tag, PARTITION, checkpoint):
            self._elsewhere.add(other)

    def _name(self, tag: str, target: str) -> str:
        """Returns the name of a file in its tag.

        The first file of a step is called ``checkpoint``. Others of that step keep their own name, with a number if it is taken.
        """
        key = (tag, target)
        if key not in self._names:
            taken = {name for (known, _), name in self._names.items() if known == tag}
            if len(self._names) > 1000:
                self._names = {known: name for known, name in self._names.items() if known[0] == tag}
            stem, ending = os.path.splitext(os.path.basename(target))
            names = (f"{stem}-{number}{ending}" if number else stem + ending for number in itertools.count())
            self._names[key] = next(name for name in names if name not in taken) if taken else PARTITION
        return self._names[key]

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Loads the checkpoint that was last saved as `path`: from memory if it is still there, else from the file.

        If Nebula cannot load it but the file exists, the file is loaded. A Trainer or Fabric with ranks on several nodes waits for the
        file, and all ranks load that. weights_only: None is torch's own default, as in Lightning.
        Raises FileNotFoundError if there is neither.
        """
        import torch

        if map_location is None:
            map_location = lambda storage, location: storage  # noqa: E731
        given: dict[str, Any] = {"map_location": map_location, "weights_only": weights_only}
        if _is_remote(path):
            return self._load_by(self._other or _stock_io(), path, given)
        target, initialized = _key(path), api.is_initialized()
        try:
            found = None if target == self._file else _published(target)
            if found is not None:
                checkpoint, name = found
                return checkpoint.load(name, map_location=map_location, weights_only=is_weights_only(weights_only))
        except NebulaError as failure:
            if not os.path.exists(target):
                raise
            log.warning("nebula: %s is loaded from its file, because its checkpoint cannot be loaded otherwise: %s", target, failure)
        finally:
            if not initialized:
                api._shutdown()  # forget the settings: the first save of this program decides where it saves
        if not os.path.exists(target):
            raise _NoFile(f"Checkpoint file not found: {path}: neither in this run's memory nor on disk")
        if self._other is not None and not zipfile.is_zipfile(target):  # Nebula's files are zip files
            return self._load_by(self._other, path, given)
        return torch.load(target, **given)

    def _load_by(self, other: Any, path: Any, given: dict[str, Any]) -> Any:
        if given["weights_only"] is None:  # a plugin for an older Lightning does not know the argument
            given = {"map_location": given["map_location"]}
        return other.load_checkpoint(path, **given)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a published file once every save made before is durable. A save of it that is not durable yet does not appear.

        If the last save failed, the file stays until a save succeeds, because the failed one may have been its replacement.
        Raises NebulaConfigError, a ValueError as in stock Lightning, for the working directory, which "" also means.
        """
        if _is_remote(path):
            (self._other or _stock_io()).remove_checkpoint(path)
            return
        target = api._removable(_key(path) if os.fspath(path) else path)
        if not self._sound:
            log.warning("nebula: %s stays until a checkpoint is saved again: the last one failed", target)
            self._held.append(target)
            self.removed.add(target)
            return
        if self.home(target)[0]._remove(target):
            self.removed.add(target)

    def _remove_held(self) -> None:
        held, self._held = self._held, []
        for target in held:
            self.remove_checkpoint(target)

    def teardown(self) -> None:
        """Waits until everything saved is durable. It ends a fit, not the plugin: more saves may follow."""
        self._finish()
        if self._other is not None:
            self._other.teardown()

    def _finish(self) -> None:
        _flush()
        while self._elsewhere:
            api._flush_elsewhere(self._elsewhere.pop())


def _io_of(strategy: Any) -> NebulaCheckpointIO | None:
    """Returns the strategy's plugin if it is ours, perhaps inside a wrapper of Lightning. None: it is not ours."""
    try:
        io = getattr(strategy, "checkpoint_io", None)
    except NotImplementedError:  # sharded strategies of Fabric
        return None
    if not isinstance(io, NebulaCheckpointIO):
        io = getattr(io, "checkpoint_io", None)
    return io if isinstance(io, NebulaCheckpointIO) else None


def _register() -> None:
    for module in _modules("plugins.io.checkpoint_io", fabric=True):
        module.CheckpointIO.register(NebulaCheckpointIO)


_register()


def _is_taken(callback: Any, filepath: Any, trainer: Any) -> bool:
    """Returns True if a file has that name, or will have it when it is durable. Every rank gets the same answer."""
    target, io = _key(filepath), _io_of(trainer.strategy)
    io.home(target) if io is not None else _home(os.path.dirname(target))  # sets the storage path

    def look() -> bool:
        here = io is None or target not in io.removed
        return here and bool(callback._fs.exists(filepath) or api.find_published(target) is not None)

    return together.from_rank_0(look, trainer.is_global_zero, trainer.strategy.broadcast)


def _show_to_callbacks() -> None:
    """Makes ModelCheckpoint see files that are not durable yet, when it chooses a name."""
    for module in _modules("callbacks"):
        original = module.ModelCheckpoint.file_exists
        if hasattr(original, "__nebula__"):
            continue

        @functools.wraps(original)
        def file_exists(self: Any, filepath: Any, trainer: Any, original: Any = original) -> bool:
            if _io_of(trainer.strategy) is None or _is_remote(filepath):
                return original(self, filepath, trainer)
            return _is_taken(self, filepath, trainer)

        file_exists.__nebula__ = True  # type: ignore[attr-defined]
        module.ModelCheckpoint.file_exists = file_exists


def _show_to_loggers() -> None:
    """Makes ModelCheckpoint wait until its files are there, where a logger looks for them: after a save, and before the end of a run."""
    for module in _modules("callbacks"):
        kind = module.ModelCheckpoint
        if hasattr(kind._save_checkpoint, "__nebula__"):
            continue
        save, teardown = kind._save_checkpoint, kind.teardown

        @functools.wraps(save)
        def _save_checkpoint(self: Any, trainer: Any, filepath: Any, save: Any = save) -> None:
            io = _io_of(trainer.strategy)
            if io is None:
                save(self, trainer, filepath)
                return
            io.is_read = any(_may_read(logger, self) for logger in trainer.loggers)
            try:
                save(self, trainer, filepath)
            finally:
                io.is_read = False

        @functools.wraps(teardown)
        def teardown_and_wait(self: Any, trainer: Any, *args: Any, teardown: Any = teardown, **kwargs: Any) -> None:
            teardown(self, trainer, *args, **kwargs)
            if _io_of(getattr(trainer, "strategy", None)) is not None:
                _flush()

        _save_checkpoint.__nebula__ = True  # type: ignore[attr-defined]
        kind._save_checkpoint, kind.teardown = _save_checkpoint, teardown_and_wait


def _may_read(logger: Any, callback: Any) -> bool:
    """Returns True if a logger may read a file when ModelCheckpoint tells it of the save. Lightning's own loggers do so by their settings."""
    kind = type(logger)
    if getattr(kind, "after_save_checkpoint", None) in (None, *(module.Logger.after_save_checkpoint for module in _modules("loggers.logger"))):
        return False
    if not kind.__module__.startswith(("lightning.pytorch.loggers.", "pytorch_lightning.loggers.")):
        return True
    wanted = getattr(logger, "_log_model", getattr(logger, "_log_model_checkpoints", False) and "all")
    return bool(wanted == "all" or (wanted is True and callback.save_top_k == -1))


def _load_together() -> None:
    """Makes the loads of a Trainer and of Fabric, which run on all ranks, load the same file on all of them."""
    for module in _modules("trainer.connectors.checkpoint_connector"):
        _remember_asked(module._CheckpointConnector)
        _replace_load(module._CheckpointConnector, "resume_start", lambda connector: connector.trainer.strategy)
    for module in _modules("fabric", fabric=True):
        for name in ("load", "load_raw"):
            _replace_load(module.Fabric, name, lambda fabric: fabric._strategy)


def _remember_asked(kind: Any) -> None:
    """Makes a connector remember what a path was chosen by. Lightning lists directories for "last" before there is a process group."""
    original = kind._parse_ckpt_path
    if hasattr(original, "__nebula__"):
        return

    @functools.wraps(original)
    def parse(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        self._nebula_asked = functools.partial(original, self, state_fn, ckpt_path, *args, **kwargs) if ckpt_path in LISTED else None
        return original(self, state_fn, ckpt_path, *args, **kwargs)

    parse.__nebula__ = True  # type: ignore[attr-defined]
    kind._parse_ckpt_path = parse


def _list_again(connector: Any, given: Any) -> Any:
    """Returns the path for "last" when the saves of all nodes have appeared. The listing before knew only this node's, perhaps none."""
    asked = connector.__dict__.pop("_nebula_asked", None)
    if asked is None:
        return given
    for directory in (getattr(one, "dirpath", None) for one in connector.trainer.checkpoint_callbacks):
        if directory and not _is_remote(directory):
            _home(_key(directory))  # sets the storage path
    if api.persist_path() is not None:
        together.flush()
    return together.on_all(asked)


def _replace_load(kind: type, name: str, strategy_of: Any) -> None:
    original = getattr(kind, name)
    if hasattr(original, "__nebula__"):
        return
    key = list(inspect.signature(original).parameters)[1]  # of the path

    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        io = getattr(strategy, "_nebula_io", None) or _io_of(strategy)
        if io is not None:
            ranks.take_nodes(getattr(strategy, "num_nodes", 1))
        if io is None or not together.has_others():
            return original(self, *args, **kwargs)
        given, is_several = args[0] if args else kwargs.pop(key, None), together.several()
        given = _list_again(self, given) if is_several else given
        path = together.of_rank_0(given)
        if not path or _is_remote(path) or not (is_several or together.of_rank_0(_is_of_another_node(path))):
            return original(self, path, *args[1:], **kwargs)
        try:
            is_file = not is_several or _await_file(path)
            if given and path != given and not os.path.exists(path):
                path = given  # a node may have a copy of the file elsewhere
            elif path != given:  # it has listed a directory before a file appeared there
                log.warning("nebula: this rank would have loaded %s, and loads %s as rank 0 does", given, path)
            io._file = _key(path)
            if is_file:
                return together.load_file(io._file, lambda: original(self, path, *args[1:], **kwargs), not _is_sharded(strategy))
            return original(self, path, *args[1:], **kwargs)
        finally:
            io._file = ""

    load.__nebula__ = True  # type: ignore[attr-defined]
    setattr(kind, name, load)


def _await_file(path: Any) -> bool:
    """Waits on all ranks until the saves of a path on all nodes have appeared there.

    Returns False for a directory that rank 0's node has saved: all ranks load it from one version, which need not have appeared.
    """
    target, initialized = _key(path), api.is_initialized()

    def wait(seconds: float) -> None:
        found = _published(target)
        if found is not None:  # it has a storage path, though this program may not have named one yet
            found[0]._persist_path = found[0]._persist_path or found[0]._report().get("persist_path")
            found[0].wait("durable", timeout=seconds)

    try:
        if together.of_rank_0(_sees(target, lambda found: found is not None and not found[1])):
            return False
        together.await_all(wait)
    finally:
        if not initialized:
            api._shutdown()
    return True


def _is_of_another_node(path: Any) -> bool:
    """Returns True for a file that this node's agent does not know: the agent of a node that has left the job may replace it meanwhile."""
    initialized = api.is_initialized()
    try:
        return _sees(_key(path), lambda found: found is None)
    finally:
        if not initialized:
            api._shutdown()


def _sees(target: str, fits: Callable[[Any], bool]) -> bool:
    """Returns what fits() says of the version that is published at a path. False: it cannot be found, and the load tries again."""
    with contextlib.suppress(NebulaError):
        return fits(_published(target))
    return False


def _make_callback() -> type:
    bases = tuple(dict.fromkeys(module.ModelCheckpoint for module in _modules("callbacks")))

    class NebulaCallback(*bases):  # type: ignore[misc]
        """A ModelCheckpoint (all its arguments) that saves through Nebula.

        config_params: the arguments of ``nebulaml.init`` as a dict. Without it the environment decides. Without both, checkpoints are
        persisted beside `dirpath`. overlap, export: those of the NebulaCheckpointIO that it makes.
        """

        def __init__(
            self, *args: Any, config_params: dict[str, Any] | None = None, overlap: bool = False, export: HFExport | None = None,
            **kwargs: Any,
        ) -> None:
            super().__init__(*args, **kwargs)
            self._config_params, self._overlap, self._export = config_params, overlap, export
            _load_together()  # Lightning chooses a path before setup() makes the plugin
            if config_params is not None:
                api.init(**config_params)

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            super().setup(trainer, pl_module, stage)
            if self.dirpath and _is_remote(self.dirpath):
                raise NebulaConfigError(
                    f"NebulaCallback saves to directories that this machine mounts, and {self.dirpath} is none: give it a dirpath of that "
                    "kind, or use ModelCheckpoint for that path"
                )
            spawned = not api.is_initialized() or api.persist_path() is None
            if self._config_params is not None and spawned:
                api.init(**self._config_params)
            strategy = trainer.strategy
            if _io_of(strategy) is not None:
                return
            if type(strategy).__name__ in ("FSDPStrategy", "ModelParallelStrategy") or _is_deepspeed(strategy):
                if type(strategy).__name__ != "NebulaDeepspeedStrategy":  # that strategy has warned when it was made
                    _warn_about(strategy)
                return
            strategy.checkpoint_io = NebulaCheckpointIO(self._overlap, _others_io(strategy), self._export)

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            pulse.progress(trainer.global_step)
            super().on_train_batch_end(trainer, *args, **kwargs)

        def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
            pulse.beat()
            super().on_validation_batch_end(*args, **kwargs)

        def on_init_end(self, *args: Any, **kwargs: Any) -> None:
            """Raises: transformers' Trainer calls this, Lightning's never does."""
            raise NebulaConfigError(f"NebulaCallback is for Lightning's Trainer; {ATTACH}")

        def file_exists(self, filepath: Any, trainer: Any) -> bool:
            """Counts files that are saved but not durable yet, and ignores those that wait for removal, so version suffixes equal stock
            Lightning's.
            """
            if _is_remote(filepath):
                return super().file_exists(filepath, trainer)
            return _is_taken(self, filepath, trainer)

        def _find_last_checkpoints(self, trainer: Any) -> set[str]:
            """Waits for checkpoints of a run that was killed, because ``ckpt_path="last"`` lists the directory."""
            if self.dirpath and not _is_remote(self.dirpath):
                _home(_key(self.dirpath))
            _flush()
            return super()._find_last_checkpoints(trainer)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            """Waits for all saves: after this, Lightning notifies loggers that the run is over, and they look for the files to upload."""
            super().teardown(trainer, pl_module, stage)
            _flush()

        @property
        def state_key(self) -> str:
            """The key of a stock ModelCheckpoint: a file that was saved with one class can be resumed with the other."""
            return super().state_key.replace(type(self).__qualname__, "ModelCheckpoint", 1)

    _show_parameters(NebulaCallback, bases[0])
    NebulaCallback.__qualname__ = "NebulaCallback"
    NebulaCallback.__module__ = __name__
    return NebulaCallback


def _show_parameters(kind: type, base: type) -> None:
    """Shows editors and command-line tools, through inspect, the arguments that `kind` passes on to `base`."""
    own = [one for one in inspect.signature(kind.__init__).parameters.values() if one.kind is one.KEYWORD_ONLY]  # type: ignore[misc]
    theirs = inspect.signature(base.__init__)  # type: ignore[misc]
    parameters = list(theirs.parameters.values())
    at = next((place for place, one in enumerate(parameters) if one.kind is one.VAR_KEYWORD), len(parameters))
    kind.__init__.__signature__ = theirs.replace(parameters=[*parameters[:at], *own, *parameters[at:]])  # type: ignore[misc]


def _others_io(strategy: Any) -> Any:
    """Returns the CheckpointIO that the user gave the Trainer, which NebulaCallback replaces. None: there was none."""
    io = getattr(strategy, "checkpoint_io", None)
    if io is None or type(io) in (module.TorchCheckpointIO for module in _modules("plugins.io", fabric=True)):
        return None
    log.warning(
        "nebula: NebulaCallback takes the place of the plugin %s: Nebula saves the checkpoints, and the plugin only handles remote paths and "
        "files that are not torch files. To save with the plugin, use ModelCheckpoint in place of NebulaCallback", type(io).__name__,
    )  # fmt: skip
    return io


def _is_sharded(strategy: Any) -> bool:
    """Returns True for a strategy whose own loads and saves the ranks do together, without a CheckpointIO."""
    names = {kind.__name__ for kind in type(strategy).__mro__}
    return not names.isdisjoint({"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"})


def _is_deepspeed(strategy: Any) -> bool:
    return any(kind.__name__ == "DeepSpeedStrategy" for kind in type(strategy).__mro__)


def _warn_about(strategy: Any) -> None:
    if _is_deepspeed(strategy):
        config = getattr(strategy, "config", None)
        section = config.get("nebula") if isinstance(config, dict) else None
        is_ours = type(strategy).__name__ == "NebulaDeepspeedStrategy"
        if not (isinstance(section, dict) and section.get("enabled")):
            log.warning(
                "%s has no \"nebula\" section that is enabled in its configuration: Nebula is not in use, and checkpoints are saved as "
                'without it. Use nebulaml.NebulaDeepspeedStrategy(config={..., "nebula": {"enabled": True, '
                '"persistent_storage_path": ...}})',
                type(strategy).__name__,
            )
        elif not is_ours:
            log.warning(
                "%s gives every checkpoint the same tag, so that only the newest is kept: use nebulaml.NebulaDeepspeedStrategy(config=...)",
                type(strategy).__name__,
            )
        return
    log.warning(
        "%s writes its checkpoints without CheckpointIO, so Nebula does not save them. Use strategy=nebulaml.Nebula%s(...), "
        "which takes the same arguments",
        type(strategy).__name__,
        type(strategy).__name__,
    )


def _make_strategy() -> type:
    module = _modules("strategies")[0]
    base = module.DeepSpeedStrategy

    class NebulaDeepspeedStrategy(base):  # type: ignore[misc, valid-type]
        """DeepSpeedStrategy with one tag per checkpoint. `config`: as for DeepSpeedStrategy, with a ``nebula`` section."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            import nebulaml.deepspeed  # noqa: F401  accepts the section on every DeepSpeed version

            super().__init__(*args, **kwargs)
            _warn_about(self)

        def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            filepath = self.broadcast(filepath)
            if storage_options is not None and self.is_global_zero:
                log.warning("storage_options are not supported by NebulaDeepspeedStrategy, which has no CheckpointIO: %r", storage_options)
            exclude = ["state_dict", "optimizer_states"]
            state = {key: value for key, value in checkpoint.items() if key not in exclude}
            self.deepspeed_engine.save_checkpoint(
                filepath,
                client_state=state,
                tag=checkpoint_tag(filepath, checkpoint.get("global_step")),
                exclude_frozen_parameters=getattr(self, "exclude_frozen_parameters", False),
            )

        def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
            if self.load_full_weights and self.zero_stage_3:  # one file, and no DeepSpeed directory
                given = {} if weights_only is None else {"weights_only": weights_only}  # Lightning before 2.6 does not know the argument
                return super().load_checkpoint(checkpoint_path, **given)
            # One rank looks, because other nodes may not have that directory or `latest`.
            tag, problem = together.from_rank_0(lambda: _look_into(checkpoint_path), self.is_global_zero, self.broadcast)
            if problem:
                raise NebulaNotFound(problem)
            if tag is None and not self.deepspeed_engine.load_universal_checkpoint():
                tags = together.from_rank_0(lambda: _candidates(os.fspath(checkpoint_path)), self.is_global_zero, self.broadcast)
                tag = _chosen(self.deepspeed_engine.checkpoint_engine, tags)
            path, client_state = self.deepspeed_engine.load_checkpoint(
                os.fspath(checkpoint_path),
                tag=tag,
                load_optimizer_states=self.lightning_module.trainer.state.fn == "fit",
                load_lr_scheduler_states=False,
                load_module_strict=getattr(self.lightning_module, "strict_loading", True),  # Lightning before 2.2 has no such attribute
            )
            if path is None:
                raise NebulaNotFound(f"no complete DeepSpeed checkpoint belongs to {checkpoint_path}")
            return client_state

    _show_parameters(NebulaDeepspeedStrategy, base)
    NebulaDeepspeedStrategy.__qualname__ = "NebulaDeepspeedStrategy"
    NebulaDeepspeedStrategy.__module__ = __name__
    return NebulaDeepspeedStrategy


def _look_into(path: Any) -> tuple[str | None, str]:
    """Returns the tag to load from a DeepSpeed directory (None: the tag in its `latest`), and a problem of the directory, or "".

    Without this check a mistyped path would load the newest checkpoint.
    """
    folder = os.fspath(path)
    try:
        names = os.listdir(folder)
        if {"latest", "latest_universal"} & set(names):
            return None, ""
        # The run ended before DeepSpeed wrote `latest`, but the stand-in files of the tag exist.
        tags = [os.path.join(folder, name) for name in names if os.path.isdir(os.path.join(folder, name))]
        times = {tag: time for tag in tags if (time := _time_of_tag(tag)) is not None}
        if times:
            return os.path.basename(max(times, key=times.__getitem__)), ""
    except OSError as failure:
        return None, f"there is no DeepSpeed checkpoint {folder}: {failure.strerror}"
    return None, f"{folder} is not a DeepSpeed checkpoint: it has neither `latest` nor the files of a tag"


def _candidates(folder: str) -> list[str]:
    """Returns the tags that a DeepSpeed directory stands for, the newest first. DeepSpeed alone would take the newest of the storage path.

    They include the tag of the same step's other file: its checkpoint may be complete where that of last.ckpt is not.
    """
    times = {name: _time_of_tag(os.path.join(folder, name)) or 0.0 for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name))}
    tags = sorted((name for name in times if times[name]), key=times.__getitem__, reverse=True)
    with contextlib.suppress(OSError, ValueError):
        latest = documents.read(os.path.join(folder, "latest"), most=4096).decode().strip()
        tags = [latest, *(tag for tag in tags if tag != latest)] if latest else tags
    others = (_STEP.match(tag) for tag in tags)
    return list(dict.fromkeys(one for tag, other in zip(tags, others, strict=True) for one in (tag, *([other[0]] if other else []))))


def _chosen(engine: Any, tags: list[str]) -> str | None:
    """Returns the first tag that all ranks can load. None: DeepSpeed chooses.

    If they can load none, it chooses an older checkpoint, but none of a later step than that of the first tag, which is returned then.
    """
    if not tags or not hasattr(engine, "resolve_together") or not engine.enable_load:
        return None
    found = next((tag for tag in tags if engine.resolve_together(tag) is not None), None)
    if found is None:
        newest = engine.resolve_together(None)
        return tags[0] if newest is not None and _step_in(newest.tag) > _step_in(tags[0]) else None
    if found != tags[0]:
        log.warning("checkpoint %s was never completed by all ranks, or was removed: loading %s instead", tags[0], found)
    return found


def _step_in(tag: str) -> int:
    match = _STEP.match(tag)
    return int(match[1]) if match else -1


def _time_of_tag(folder: str) -> float | None:
    """Returns when the files of a DeepSpeed tag were made. None: it is another directory, or cannot be read, or has gone."""
    with contextlib.suppress(OSError):
        if any(name.endswith(".pt") for name in os.listdir(folder)):
            return os.path.getmtime(folder)
    return None


# Lightning adds a number to the name of a file that exists already, for example from another run.
_NUMBERED = re.compile(r"-v\d+(\.[A-Za-z_]\w*)?$")
_STEP = re.compile(r"global_step(\d+)")  # the begin of a tag


def checkpoint_tag(filepath: Any, global_step: int | None) -> str:
    """Returns the tag global_stepN. If the file name does not contain the step (last.ckpt), or Lightning has numbered it, the name follows.

    So all files have different tags.
    """
    name = os.path.basename(os.fspath(filepath).rstrip("/"))
    if global_step is None:
        return name
    tag = f"global_step{int(global_step)}"
    is_named = re.search(rf"step={int(global_step)}(?!\w|\.\d)", name) and not _NUMBERED.search(name)
    return tag if is_named else f"{tag}-{name}"


def __getattr__(name: str) -> Any:
    makers = {"NebulaCallback": _make_callback, "NebulaDeepspeedStrategy": _make_strategy}
    if name not in makers:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = makers[name]()
    globals()[name] = value
    return value
