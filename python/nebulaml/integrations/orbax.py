"""Orbax: reads its checkpoints, and is the handler through which an Orbax CheckpointManager writes with Nebula.

    import nebulaml.integrations.orbax as nebula_orbax

    manager = ocp.CheckpointManager(path, options, handler_registry=nebula_orbax.registry())
    manager.save(step, args=ocp.args.StandardSave(state))

Orbax decides when to save and what to keep. Nebula fixes the values and writes them to the directory ``nebula`` beside the steps. The item's
own directory has a file that names the version. docs/jax.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .. import _nebula
from .. import jax as trees
from .._session import documents
from .._session.session import Session
from ..checkpoint import Checkpoint
from ..errors import NebulaConfigError, NebulaCorrupt, NebulaError, NebulaNotFound
from ..jax import distributed, leaves, loading
from ..reader import Reader

try:
    import orbax.checkpoint as ocp
    from etils import epath
except ImportError as _failure:
    raise NebulaConfigError(f"Orbax's checkpoints are read and written by Orbax: pip install orbax-checkpoint ({_failure})") from _failure

__all__ = ["Handler", "NebulaRestore", "NebulaSave", "load", "registry"]

log = logging.getLogger("nebulaml")

FOLDER = "nebula"  # beside the steps
POINTER = "nebula.json"  # in an item's directory
TREE = "tree"
_UNFINISHED = ".orbax-checkpoint-tmp"
_ITEMS = ("default", "pytree", "state")  # names that Orbax's versions and programs give to the only item
_MOST_SHOWN = 10


# -- reading


def load(path: str | os.PathLike[str], template: Any, *, step: int | None = None, item: str | None = None, cast: bool = False) -> Any:
    """Returns a tree of an Orbax checkpoint in the form of ``template``, as nebulaml.jax.load() does of one of Nebula.

    path: the directory of a CheckpointManager, of one of its steps, or of an item. step: None is the newest. item: None is the only one.
    """
    place = _item_directory(_absolute(path), step, item)
    if (place / POINTER).exists():
        return _load_by_pointer(place, template, cast)
    reader = ocp.PyTreeCheckpointer()
    saved = _flat(reader.metadata(place).item_metadata.tree)
    wanted = _flat(template)
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise NebulaNotFound(f"{place} has no {_listed(missing)}; it has {len(saved)} leaves")
    wrong = [why for name, leaf in wanted.items() if (why := _mismatch(name, saved[name], leaf, cast))]
    if wrong:
        raise NebulaConfigError(f"{place} does not fit: {'; '.join(wrong[:_MOST_SHOWN])}")
    target = jax.tree.map(_with_sharding, template)
    how = ocp.args.PyTreeRestore(item=target, partial_restore=True, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    return reader.restore(place, args=how)


def _absolute(path: str | os.PathLike[str]) -> Any:
    text = os.fspath(path)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def _item_directory(path: Any, step: int | None, item: str | None) -> Any:
    if not path.exists():
        raise NebulaNotFound(f"there is no Orbax checkpoint in {path}")
    if _is_item(path):
        return path
    items = [each.name for each in path.iterdir() if each.is_dir() and _is_item(each)]
    if not items:
        steps = sorted(ocp.utils.checkpoint_steps(path)) if step is None else [step]
        if not steps or not (path / str(steps[-1])).exists():
            raise NebulaNotFound(f"there is no Orbax checkpoint in {path}" + ("" if step is None else f" of step {step}"))
        return _item_directory(path / str(steps[-1]), None, item)
    chosen = item or next((name for name in (*_ITEMS, *items[: len(items) == 1]) if name in items), None)
    if chosen not in items:
        raise NebulaNotFound(f"{path} has the items {', '.join(sorted(items))}: give one of them as item=")
    return path / chosen


def _is_item(path: Any) -> bool:
    return any((path / name).exists() for name in (POINTER, "_METADATA", "manifest.ocdbt"))


def _flat(tree: Any) -> dict[tuple[str, ...], Any]:
    return dict(ocp.tree.to_flat_dict(ocp.tree.serialize_tree(tree, keep_empty_nodes=False)))


def _listed(names: list[tuple[str, ...]]) -> str:
    return ", ".join(".".join(name) for name in names[:_MOST_SHOWN])


def _mismatch(name: tuple[str, ...], saved: Any, leaf: Any, cast: bool) -> str:
    """Returns why a leaf of the template cannot take the saved one; "": it can. Orbax would convert in silence, or fill up and cut off."""
    if leaves.is_key(leaf) or not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return ""
    shape, dtype = getattr(saved, "shape", None), getattr(saved, "dtype", None)
    if shape is not None and tuple(shape) != tuple(leaf.shape):
        return f"{'.'.join(name)} has the shape {tuple(shape)}, and the template {tuple(leaf.shape)}"
    if not cast and dtype is not None and np.dtype(dtype) != leaf.dtype:
        return f"{'.'.join(name)} is {np.dtype(dtype)}, and the template {leaf.dtype}: cast=True converts"
    return ""


def _with_sharding(leaf: Any) -> Any:
    """Orbax would look for the devices on which the tree was saved."""
    if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is not None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))


# -- Orbax's handler


class Handler(ocp.AsyncCheckpointHandler):
    """Writes pytrees through Nebula, for a CheckpointManager or a Checkpointer. One handler serves all items of a manager.

    settings: those of ``nebulaml.init()``, but for the storage path.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = {"on_error": "raise", "persistent_time_interval": 0, **settings}
        self._sessions: dict[str, Session] = {}

    async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> list[Any]:
        """Fixes the values. The future waits until they are durable on all processes."""
        return [self._begin(directory, args.item if args is not None else item)]

    def save(self, directory: Any, item: Any = None, args: Any = None) -> None:
        """Saves and waits."""
        self._begin(directory, args.item if args is not None else item).result()

    def restore(self, directory: Any, item: Any = None, args: Any = None, restore_args: Any = None) -> Any:
        """Returns a tree in the form of the template, with its shardings or those of restore_args. Without a template: as trees.load()."""
        if args is not None:
            item, restore_args = args.item, getattr(args, "restore_args", None)
        if restore_args is None:
            return _load_by_pointer(epath.Path(directory), item, False)
        with _opened(epath.Path(directory)) as (checkpoint, tree):
            return _load_by_arguments(loading.Saved(checkpoint, tree), item, restore_args)

    def metadata(self, directory: Any) -> Any:
        """Returns Orbax's metadata of an item's tree, in dicts and lists: the names, shapes and dtypes. No values are read.

        Shardings are not among them: a load takes those of its template.
        """
        from orbax.checkpoint._src.metadata.tree import build_default_tree_metadata

        place = epath.Path(directory)
        with _opened(place) as (checkpoint, tree):
            saved = loading.Saved(checkpoint, tree)
            return build_default_tree_metadata(saved.tree([_metadata_of(path, about, place) for path, about in saved.leaves.items()]))

    def close(self) -> None:
        """Ends the sessions."""
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _begin(self, directory: Any, tree: Any) -> _Saved:
        root, step = directory.parent.parent, directory.parent.name.partition(_UNFINISHED)[0]
        tag = f"{step}/{directory.name.partition(_UNFINISHED)[0]}"
        session = self._session(root / FOLDER)
        checkpoint = Checkpoint(tag, _nebula.FILES_ALL_RANKS, session=session)
        trees.save(checkpoint, TREE, tree)
        checkpoint.commit()
        if jax.process_index() == 0:
            _remove_orphans(session, root, tag)
        return _Saved(checkpoint, directory, tag)

    def _session(self, path: Any) -> Session:
        text = os.fspath(path)
        if text not in self._sessions:
            distributed.take_ranks()
            self._sessions[text] = Session(text, **self._settings)
        return self._sessions[text]


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class NebulaSave(ocp.args.CheckpointArgs):
    """What Orbax gives to a Handler for a save. A Handler takes StandardSave and PyTreeSave, too."""

    item: Any


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class NebulaRestore(ocp.args.CheckpointArgs):
    """What Orbax gives to a Handler for a restore. A Handler takes StandardRestore and PyTreeRestore, too."""

    item: Any = None
    restore_args: Any = None


class _Saved:
    """Orbax's future of a save."""

    def __init__(self, checkpoint: Checkpoint, directory: Any, tag: str) -> None:
        self._checkpoint, self._directory, self._tag = checkpoint, directory, tag

    def result(self, timeout: float | None = None) -> None:
        self._checkpoint.wait("durable", timeout)
        if jax.process_index() == 0:
            said = {"nebula": "orbax-item", "version": "1.0", "path": f"../../{FOLDER}", "tag": self._tag, "tree": TREE}
            said["sequence"] = self._checkpoint._report()["sequence"]
            (self._directory / POINTER).write_text(json.dumps(said))


def _remove_orphans(session: Session, root: Any, current: str) -> None:
    """Removes the versions whose items Orbax has removed. A version stays if Nebula cannot read whether Orbax has its item."""
    for row in session.checkpoints():
        step, _, item = row.tag.partition("/")
        if row.tag == current or row.state != "durable" or not item:  # a tag without an item is none of Orbax
            continue
        try:
            if not _has_item(root, step, item):
                session._engine.session(patient=True).remove(row.tag)
        except OSError as failure:
            log.warning("nebula: %s stays in %s, because Nebula cannot see whether Orbax has its item: %s", row.tag, root / FOLDER, failure)
        except NebulaError as failure:
            log.warning("nebula: %s stays in %s, although Orbax has removed that step: %s", row.tag, root / FOLDER, failure)


def _has_item(root: Any, step: str, item: str) -> bool:
    """Returns whether Orbax has an item or is about to. The name changes when it is done: the one that it has first is asked for first.

    Raises OSError if a directory cannot be read.
    """
    if "://" in os.fspath(root):
        unfinished = (*root.glob(f"{glob.escape(step)}{_UNFINISHED}*"), *(root / step).glob(f"{glob.escape(item)}{_UNFINISHED}*"))
        return bool(unfinished) or (root / step / item).exists()
    # Not glob() and exists(): for them a directory that cannot be read is absent.
    inside = os.path.join(root, step)
    unfinished_names = (*_names(os.fspath(root), f"{step}{_UNFINISHED}"), *_names(inside, f"{item}{_UNFINISHED}"))
    return bool(unfinished_names) or item in _names(inside, item)


def _names(folder: str, start: str) -> list[str]:
    """Returns the names in a directory that begin so. []: there is no directory."""
    try:
        return [name for name in os.listdir(folder) if name.startswith(start)]
    except FileNotFoundError:
        if os.path.islink(folder):  # the directory is elsewhere, perhaps on a disk that is not mounted
            raise
        return []


@contextlib.contextmanager
def _opened(place: Any) -> Iterator[tuple[Checkpoint, str]]:
    """Gives the version of an item, and the name of its tree."""
    folder, pointer = place.parent.parent / FOLDER, place / POINTER
    try:
        said = documents.parse(pointer.read_text())
        tag, tree, sequence = str(said["tag"]), str(said["tree"]), documents.whole(said["sequence"])
    except (ValueError, KeyError, TypeError) as failure:
        raise NebulaCorrupt(f"{pointer} is damaged, so Nebula does not know which version of {folder} this item is") from failure
    with Reader(os.fspath(folder)) as reader:
        checkpoint = reader.get(tag)
        if checkpoint is None:
            raise NebulaNotFound(f"{folder} has no {tag!r}, which {pointer} names")
        if checkpoint._report()["sequence"] != sequence:
            raise NebulaCorrupt(f"{pointer} is damaged, or {tag!r} of {folder} has been written again: the item names another version")
        yield checkpoint, tree


def _load_by_pointer(place: Any, template: Any, cast: bool) -> Any:
    with _opened(place) as (checkpoint, tree):
        return trees.load(checkpoint, tree, template, cast=cast)


def _load_by_arguments(saved: loading.Saved, item: Any, restore_args: Any) -> Any:
    """Returns a tree whose leaves Orbax's arguments describe. item: its form; None: that of the saved one, with dicts and lists."""
    described = jax.tree_util.tree_flatten_with_path(restore_args, is_leaf=lambda leaf: isinstance(leaf, ocp.RestoreArgs))[0]
    how = {leaves.path_of(keys): leaf for keys, leaf in described}
    if item is None:
        values = saved.values([(path, _target(how, saved, path, None)) for path in saved.leaves])
        return saved.tree(values)
    paths, structure = jax.tree_util.tree_flatten_with_path(item, is_leaf=lambda leaf: leaf is None)
    wanted = [(leaves.path_of(keys), leaf) for keys, leaf in paths]
    targets = [(path, _target(how, saved, path, leaf)) for path, leaf in wanted if leaf is not ...]
    found = iter(loading.fitting_values(saved, targets, cast=True))
    return jax.tree_util.tree_unflatten(structure, [... if leaf is ... else next(found) for _, leaf in wanted])


def _target(how: dict[str, Any], saved: loading.Saved, path: str, leaf: Any) -> Any:
    """Returns what a leaf is to become: what its arguments say, else the template's leaf, else what was saved."""
    args, about = how.get(path), saved.leaves.get(path, {"kind": "plain"})
    if about["kind"] in ("plain", "key") or args is None:
        return leaf
    dtype = args.dtype or getattr(leaf, "dtype", None) or leaves.dtype_of(about["dtype"])
    if args.restore_type is np.ndarray or (args.restore_type is None and about["kind"] == "numpy"):
        return np.empty(tuple(about["shape"]), dtype)
    sharding = getattr(args, "sharding", None)
    if sharding is None and getattr(args, "mesh", None) is not None:
        sharding = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
    shape = getattr(args, "global_shape", None) or getattr(leaf, "shape", None) or about["shape"]
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def _metadata_of(path: str, about: dict[str, Any], place: Any) -> Any:
    """Returns Orbax's metadata of a leaf."""
    from orbax.checkpoint._src.metadata import value

    name = ".".join(str(key) for _, key in json.loads(path))
    if about["kind"] != "plain":
        shape, dtype = tuple(about["shape"]), leaves.dtype_of(about["dtype"])
        if about["kind"] == "key":
            key = jax.eval_shape(lambda data: jax.random.wrap_key_data(data, impl=about["impl"]), jax.ShapeDtypeStruct(shape, dtype))
            shape, dtype = key.shape, key.dtype
        return value.ArrayMetadata(name=name, directory=place, shape=shape, sharding=None, dtype=dtype)
    kind = about["value"][0]
    if kind in leaves.NUMBERS:
        return value.ScalarMetadata(name=name, directory=place, dtype=jax.numpy.dtype(kind))
    return None if kind == "NoneType" else value.StringMetadata(name=name, directory=place)


def registry(*items: str, **settings: Any) -> Any:
    """Returns what ocp.CheckpointManager takes as handler_registry: trees go through Nebula. settings: as Handler() takes them.

    items: names of items whose metadata the manager gives before it has saved or restored one, such as "default".
    """
    made, handler = ocp.handlers.DefaultCheckpointHandlerRegistry(), Handler(**settings)
    for args in (ocp.args.StandardSave, ocp.args.StandardRestore, ocp.args.PyTreeSave, ocp.args.PyTreeRestore, NebulaSave, NebulaRestore):
        for item in (None, *items):
            made.add(item, args, handler)
    for args in (ocp.args.JsonSave, ocp.args.JsonRestore):  # of metrics, and of a program's own items
        made.add(None, args)
    return made
