"""DeepSpeed 0.18.4 and later, without its own Nebula support.

DeepSpeed up to 0.19.6 imports ``torch_nebula`` by itself if its JSON has a ``nebula`` section. Then this module is not
needed. 0.19.7 dropped that and refuses the section. Two ways bring it back, for any version:

* ``import nebulaml.deepspeed`` before ``deepspeed.initialize``: the ``nebula`` section of the configuration works again.
* ``nebulaml.attach(engine)`` after it: no section is needed; call ``nebulaml.init`` first, or set its environment.

Both put a checkpoint engine into DeepSpeed that follows its decoupled protocol: ``save_checkpoint`` returns when the
values are fixed, the commit comes before the optimizer changes anything, and ``latest`` is written after the commit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import logging
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import config as ds_config
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from .. import api
from .._session import config, documents, pulse
from .._session import engine as session_engine
from ..errors import NebulaConfigError, NebulaError, NebulaNotFound
from ..export import background
from ..export.background import HFExport
from ..integrations import guards, stand_in, together
from . import universal

__all__ = ["NebulaDeepSpeedEngine", "attach"]

log = logging.getLogger("nebulaml")

OLDEST = (0, 18, 4)
COMMIT_TIMEOUT_S = 60.0


def check_version() -> None:
    """Raises for DeepSpeed 0.17.1 to 0.18.3, which call commit() with the wrong arguments, and for older releases."""
    version = guards.numbers_of(deepspeed.__version__)
    if version is not None and version < OLDEST:
        raise NebulaConfigError(
            f"DeepSpeed {deepspeed.__version__} is too old for Nebula: 0.17.1 to 0.18.3 fail inside commit(). "
            "Install DeepSpeed 0.18.4 or later."
        )


class NebulaDeepSpeedEngine(CheckpointEngine):
    """The checkpoint engine that DeepSpeed calls on every rank.

    `load_path`: the directory to load from; None: the directory of the saves. `enable_load`: if False, it reads with
    ``torch.load`` from the directory that DeepSpeed gives. `overlap`: as in Checkpoint.save.
    """

    def __init__(
        self, config_params: Any = None, load_path: str | None = None, enable_load: bool = True, overlap: bool = False
    ) -> None:
        super().__init__(config_params)
        self.name = "NebulaDeepSpeedEngine"
        self.load_path = load_path
        self.enable_load = enable_load
        self.overlap = overlap
        self.export: HFExport | None = None  # of attach()
        self.model: Any = None
        self.patient = True
        self._warned = False
        self._info: Any = None
        self._checkpoint: Any = None
        self._resolved: dict[str, Any] = {}
        alive = weakref.ref(self)
        atexit.register(lambda: (engine := alive()) is not None and engine.cleanup())

    def create(self, info: Any) -> None:
        """Opens a checkpoint. If one is still open, it commits that first, without waiting for other ranks."""
        if self._info is not None:
            self._finish(patient=False)
        self._info = info
        self._warn_of_memory(getattr(info, "save_dir", None))
        self._checkpoint = api.Checkpoint(str(info.tag), -2)

    def _warn_of_memory(self, save_dir: Any) -> None:
        """Warns once if there is no storage path: files with the names of real ones will lie in save_dir, but their values never in
        storage.
        """
        if self._warned or api.persist_path() is not None or _rank() != 0:
            return
        self._warned = True
        log.warning(
            "nebula: no storage path is set: checkpoints live in this machine's memory only, and %s holds small files that stand "
            'for them. Give "persistent_storage_path" in the "nebula" section, or call nebulaml.init with it',
            save_dir or "DeepSpeed's directory",
        )

    def save(self, state_dict: Any, path: str) -> None:
        """Fixes the values of one file, and puts a small stand-in file into save_dir, where DeepSpeed looks for the name.

        It takes the place of a file that DeepSpeed has saved there without Nebula, whose older values would pass for these.
        """
        if self._checkpoint is None:
            self._checkpoint = api.Checkpoint(os.path.basename(os.path.dirname(path)), -2)
        is_saved = self._checkpoint.save(os.path.basename(path), state_dict, self.overlap)
        if not os.path.exists(path) or (is_saved and not _is_stored(path, api.persist_path()) and not stand_in.is_one(path)):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _put_stand_in(path, self._checkpoint.tag, api.persist_path())

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads one file of the checkpoint that all ranks agreed on."""
        tag, name = os.path.basename(os.path.dirname(path)), os.path.basename(path)
        if not self.enable_load:
            return torch.load(path, map_location=map_location, weights_only=False)
        checkpoint = self.resolve(tag)
        if checkpoint is None:
            state = torch.load(path, map_location=map_location, weights_only=False)
            if isinstance(state, str):
                raise NebulaNotFound(
                    f"checkpoint {tag!r} has no complete copy in memory or in storage, and {path} is only a placeholder for "
                    f"its file {name!r}; load another tag, or give the directory that Nebula persisted to"
                )
            return state
        return checkpoint.load(name, map_location=map_location)

    def resolve(self, tag: str | None) -> Any:
        """Returns the checkpoint of a tag (None: the newest). The answer stays the same until the next save."""
        key = tag or ""
        if key not in self._resolved:
            found = None
            if tag is not None:
                found = api.get_checkpoint(tag=tag, persist_path=self.load_path)
            else:
                found = api.get_latest_checkpoint(persist_path=self.load_path)
            self._resolved[key] = found
        return self._resolved[key]

    def resolve_together(self, tag: str | None) -> Any:
        """As resolve(), and the ranks of all nodes get the same version. All ranks call it."""
        self._resolved[tag or ""] = found = together.find(api.default, tag, self.load_path)
        return found

    def forget(self) -> None:
        """Ends a restore: the next one looks for checkpoints again."""
        self._resolved.clear()

    def commit(self, info: Any) -> bool:
        """Closes this rank's part.

        At the optimizer's step rank 0 waits until every rank has captured, so that `latest` does not name an incomplete checkpoint.
        Within ``save_checkpoint`` it does not wait for copies that still run.
        """
        checkpoint, self._checkpoint, self._info = self._checkpoint, None, None
        self.forget()
        if checkpoint is None:
            return True
        committed = bool(checkpoint.commit())
        if committed and self.patient and _rank() == 0:
            try:
                checkpoint.wait("committed", timeout=COMMIT_TIMEOUT_S)
            except NebulaError as error:
                log.warning("nebula: checkpoint %s is not committed by all ranks: %s", checkpoint.tag, error)
                committed = False
        if committed:
            background.begin(self.export, session_engine.default, model=self.model)
        if not committed and info is not None:
            info.save_latest = False  # DeepSpeed reads this next, and ignores the returned value
        return committed

    def _finish(self, patient: bool = True) -> None:
        """Commits the open checkpoint outside DeepSpeed's own order, and writes `latest` as DeepSpeed would."""
        info, self.patient = self._info, patient
        self.commit(info)
        self.patient = True
        if info is not None and getattr(info, "save_latest", False) and _rank() == 0:
            with open(os.path.join(info.save_dir, "latest"), "w", encoding="utf-8") as latest:
                latest.write(str(info.tag))

    def is_decoupled(self) -> bool:
        return True

    def get_commit_info(self) -> Any:
        return self._info

    def set_commit_info(self, info: Any) -> None:
        self._info = info

    def cleanup(self) -> None:
        """Commits the last checkpoint of a run. engine.destroy() calls it, and the end of the process."""
        if self._info is not None:
            self._finish(self.patient)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ.get("RANK", "0"))


def _on_cpu(engine: Any) -> bool:
    return torch.device(getattr(engine, "device", "cpu")).type == "cpu"


def _wrap_save(original: Any) -> Any:
    """Commits within save on a CPU: the values are fixed when save returns, so waiting for the next step gains nothing."""

    @functools.wraps(original)
    def save_checkpoint(self: Any, save_dir: str, *args: Any, **kwargs: Any) -> Any:
        engine = self.checkpoint_engine
        if isinstance(engine, NebulaDeepSpeedEngine) and "://" in str(save_dir):
            raise NebulaConfigError(
                f"save_checkpoint({config.shown(str(save_dir))!r}): give a directory of this machine, where DeepSpeed writes small files; "
                'the object store is the "persistent_storage_path"'
            )
        result = original(self, save_dir, *args, **kwargs)
        if isinstance(engine, NebulaDeepSpeedEngine) and engine.get_commit_info() is not None and _on_cpu(self):
            engine.patient = False
            if hasattr(self, "_commit_decoupled_checkpoint"):
                self._commit_decoupled_checkpoint()
            else:
                engine.cleanup()
            engine.patient = True
        return result

    return save_checkpoint


def _wrap_load(original: Any) -> Any:
    """Loads the newest complete checkpoint, where DeepSpeed alone would trust `latest` or find nothing."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(self: Any, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        engine = self.checkpoint_engine
        if not isinstance(engine, NebulaDeepSpeedEngine) or not engine.enable_load or self.load_universal_checkpoint():
            return original(self, load_dir, tag, *args, **kwargs)
        if "://" in str(load_dir):
            with _directory_for(engine, str(load_dir)) as directory:
                path, state = load_checkpoint(self, directory, tag, *args, **kwargs)
            return path and path.replace(directory, config.shown(str(load_dir)).rstrip("/")), state
        engine.forget()
        storage = engine.load_path or api.persist_path()
        wanted = tag if tag is not None else _latest_of_rank_0(load_dir)
        found = engine.resolve_together(wanted) if wanted is not None else None
        is_stocks = found is None and tag is None and together.from_rank_0(lambda: _has_values(load_dir, wanted, storage))
        if is_stocks:
            log.info("nebula: loading %s of %s, which DeepSpeed has saved without Nebula", wanted, load_dir)
        elif found is None and tag is None:
            found = engine.resolve_together(None)
            if found is not None and wanted is not None:
                log.warning("checkpoint %s was never completed by all ranks: loading %s instead", wanted, found.tag)
        if found is not None:
            wanted = found.tag
            given = signature.bind(self, load_dir, wanted, *args, **kwargs).arguments
            wants_optimizer = given.get("load_optimizer_states", True) and not given.get("load_module_only", False)
            if together.on_all(lambda: universal.is_needed(self, found, wants_optimizer)):
                return universal.load(self, original, found, *args, **kwargs)
            engine._resolved[wanted] = found
            together.on_all(lambda: _stand_in(load_dir, found, storage))
        try:
            return original(self, load_dir, wanted, *args, **kwargs)
        finally:
            engine.forget()

    return load_checkpoint


@contextlib.contextmanager
def _directory_for(engine: NebulaDeepSpeedEngine, url: str) -> Iterator[str]:
    """Gives a directory in which DeepSpeed finds names, while the engine loads from an object store. Removes it at the end."""
    before = engine.load_path
    with tempfile.TemporaryDirectory(prefix="nebula-names-") as directory:
        engine.load_path = url
        try:
            yield directory
        finally:
            engine.load_path = before


def _read_latest(load_dir: str) -> str | None:
    try:
        return documents.read(os.path.join(load_dir, "latest"), most=4096).decode().strip() or None
    except (OSError, ValueError):
        return None


def _latest_of_rank_0(load_dir: str) -> str | None:
    """Returns on all ranks what rank 0 reads: DeepSpeed writes `latest` on that rank alone, perhaps into a directory of its node."""
    return together.from_rank_0(lambda: _read_latest(load_dir))


def _stand_in(load_dir: str, checkpoint: Any, persist_path: str | None) -> None:
    """Puts a stand-in file for each missing one into load_dir/<tag>/: DeepSpeed searches it for names before it loads."""
    folder = os.path.join(load_dir, checkpoint.tag)
    os.makedirs(folder, exist_ok=True)
    for name in checkpoint._all_files():
        path = os.path.join(folder, name)
        if name.endswith(".pt") and not os.path.exists(path):
            _put_stand_in(path, checkpoint.tag, persist_path)


def _put_stand_in(path: str, tag: str, persist_path: str | None) -> None:
    temporary = f"{path}.{os.getpid()}"
    torch.save(stand_in.StandIn(stand_in.text_for(tag, os.path.basename(path), persist_path)), temporary)
    os.replace(temporary, path)


def _is_stored(path: str, persist_path: str | None) -> bool:
    """Returns True for a path in a storage path of Nebula, which a program may give to DeepSpeed as its directory, too."""
    root = config.without_scheme(persist_path or "")
    return bool(root) and "://" not in root and os.path.realpath(path).startswith(os.path.realpath(root) + os.sep)


def _has_values(load_dir: str, tag: str | None, persist_path: str | None) -> bool:
    """Returns True if DeepSpeed has saved the files of this tag without Nebula: they are no stand-ins, and in no storage path."""
    folder = os.path.join(load_dir, tag or "")
    if tag is None or _is_stored(folder, persist_path) or os.path.exists(os.path.join(folder, ".nebula")):
        return False
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        files = [one.path for one in entries if one.name.endswith(".pt")]
        return bool(files) and not any(map(stand_in.is_one, files))
    return False


def _patch_engine_class() -> None:
    for name, wrap in (("save_checkpoint", _wrap_save), ("load_checkpoint", _wrap_load)):
        original = getattr(ds_engine.DeepSpeedEngine, name)
        if not hasattr(original, "__nebula__"):
            wrapped = wrap(original)
            wrapped.__nebula__ = True
            setattr(ds_engine.DeepSpeedEngine, name, wrapped)


def _from_section(config_params: Any, section: dict[str, Any]) -> NebulaDeepSpeedEngine:
    """Makes the engine from `section`, the "nebula" object of DeepSpeed's JSON, as its documentation describes it."""
    api.init(
        persistent_storage_path=section.get("persistent_storage_path"),
        persistent_time_interval=section.get("persistent_time_interval", 100),
        num_of_version_in_retention=section.get("num_of_version_in_retention", 2),
    )
    return NebulaDeepSpeedEngine(
        config_params,
        load_path=section.get("nebula_load_path") or section.get("load_path"),
        enable_load=section.get("enable_nebula_load", True),
        overlap=section.get("overlap", False),
    )


def _patch_create() -> None:
    """Makes releases of DeepSpeed that refuse the section accept it again, and build our engine from it."""
    removed = getattr(ds_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", None)
    if removed is None or "nebula" not in removed:
        return
    removed.pop("nebula")
    original = ds_engine.create_checkpoint_engine

    @functools.wraps(original)
    def create_checkpoint_engine(config_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        section = (getattr(config_params, "_param_dict", None) or {}).get("nebula") or {}
        if section.get("enabled"):
            return _from_section(config_params, section)
        return original(config_params, *args, **kwargs)

    ds_engine.create_checkpoint_engine = create_checkpoint_engine


def attach(engine: Any, overlap: bool | None = None, export: HFExport | None = None) -> Any:
    """Gives a DeepSpeedEngine Nebula's checkpoint engine, and returns the DeepSpeedEngine. Call it on every rank.

    overlap: as in Checkpoint.save; the step of DeepSpeed's own optimizer waits like any other. None: unchanged, at first False.
    export: makes Hugging Face directories of durable checkpoints in the background. None: unchanged.
    """
    if not isinstance(engine, ds_engine.DeepSpeedEngine):
        raise NebulaConfigError(f"attach() got a {type(engine).__name__}; give it what deepspeed.initialize returned first")
    if not isinstance(engine.checkpoint_engine, NebulaDeepSpeedEngine):
        engine.checkpoint_engine = NebulaDeepSpeedEngine(getattr(engine, "_config", None))
    _count_steps(engine)
    if overlap is not None:
        engine.checkpoint_engine.overlap = overlap
    if export is not None:
        engine.checkpoint_engine.export, engine.checkpoint_engine.model = export, _of_transformers(engine.module)
    return engine


def _count_steps(engine: Any) -> None:
    """Makes this DeepSpeedEngine's steps progress of this process. A pipeline has train_batch in place of step."""
    name = "train_batch" if hasattr(engine, "train_batch") else "step"
    plain = getattr(engine, name)
    if hasattr(plain, "__nebula__"):
        return

    @functools.wraps(plain)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        pulse.progress(engine.global_steps)
        return result

    counted.__nebula__ = True  # type: ignore[attr-defined]
    setattr(engine, name, counted)


def _of_transformers(module: Any) -> Any:
    """Returns the module if it is a model of transformers, else None."""
    return module if hasattr(getattr(module, "config", None), "to_json_string") else None


check_version()
_patch_engine_class()
_patch_create()
