"""Checkpoints of JAX programs: pytrees of sharded arrays, without torch.

    import nebulaml as nm, nebulaml.jax as nj

    nj.init("/scratch/run7")                             # as nm.init(), with the ranks of jax.distributed
    with nm.Checkpoint(f"global_step{step}", -2) as checkpoint:
        nj.save(checkpoint, "state", state)              # each shard is written once in the whole job
    latest = nm.get_latest_checkpoint()
    state = nj.load(latest, "state", template)           # onto the shardings of the template

Or with a manager, which decides when to save and what to keep:

    manager = nj.Manager("/scratch/run7", save_every_steps=100, keep_last=3)
    restored = manager.restore({"state": state})
    ...
        manager.save(step, {"state": state}, metrics={"loss": loss})

Each process writes one file: an index, and the shards that it has with replica number 0. A load reads the ranges that its own shards
need, from the files of all processes, so the number of processes and devices and the mesh may differ. docs/jax.md.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from . import api
from ._session import config, ranks
from .checkpoint import Checkpoint
from .errors import NebulaConfigError, NebulaCorrupt, NebulaNotFound
from .manager import manager

__all__ = ["Manager", "Restored", "init", "load", "load_orbax", "save", "settings_of"]

ALIGNMENT = 64  # bytes; of each shard in its file
LENGTH_BYTES = 16  # of a file: the length of its index in digits, and a new line
GROUP_BYTES = 64 << 20  # of leaves that are read at once
_MOST_SHOWN = 10
_STORE_MS = 300_000  # as torch's stores
_MOST_LAYOUTS = 16  # of files that are remembered
_BUFFERS = {f"{kind}{bits}" for kind, most in (("int", 8), ("uint", 8), ("float", 16)) for bits in (8, 16, 32, 64) if bits >= most} | {
    "bool", "complex64", "complex128",
}  # dtypes of which a JAX array on the host gives its own bytes, unless it has another layout  # fmt: skip
_MOST_KNOWN = 1 << 14  # shardings of a shape, and paths, of which the next save need not think again
_KNOWN_KEYS = (str, int, bool, type(None))  # equal ones of one type have one text: (1,) and (True,) have two
_NAMED_KEYS = (jax.tree_util.GetAttrKey, jax.tree_util.SequenceKey)  # equal ones have one text
_DICT_KEY = jax.tree_util.DictKey  # and equal ones of these, if their keys are text
_NUMBERS = ("bool", "int", "float", "complex")  # each holds those before it
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = {dict: dict, collections.OrderedDict: dict, collections.defaultdict: dict, list: list, tuple: list}  # and namedtuples, as dicts


def init(persistent_storage_path: str | os.PathLike[str] | None = None, *arguments: Any, **settings: Any) -> None:
    """Does nm.init() with the ranks of jax.distributed, unless a launcher has named others. Call it after jax.distributed.initialize()."""
    _take_ranks()
    api.init(persistent_storage_path, *arguments, **settings)


def _take_ranks() -> None:
    if jax.process_count() > 1 and "RANK" not in os.environ:
        local = os.environ.get("LOCAL_WORLD_SIZE", str(jax.process_count() if _is_one_machine() else 1))
        os.environ.update(RANK=str(jax.process_index()), WORLD_SIZE=str(jax.process_count()), LOCAL_WORLD_SIZE=local)
        os.environ.setdefault("LOCAL_RANK", str(jax.process_index() % int(local)))
    client = jax._src.distributed.global_state.client
    if client is not None and ranks.current().world == jax.process_count() > 1:
        ranks.shared = _Store(client)


class _Store:
    """The key-value service of jax.distributed, with the methods of torch.distributed.Store that Nebula calls."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        """Waits until the key has a value, as torch's stores do."""
        return str(self._client.blocking_key_value_get(key, _STORE_MS)).encode()

    def add(self, key: str, amount: int) -> int:
        return int(self._client.key_value_increment(key, amount))

    def check(self, keys: list[str]) -> bool:
        return all(self._has(key) for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Sets a key that has no value yet. Returns its value. Nebula expects nothing else."""
        assert expected == ""
        try:
            self._client.key_value_set(key, value)
        except jax.errors.JaxRuntimeError as failure:
            if not str(failure).startswith("ALREADY_EXISTS"):
                raise
        return self.get(key)

    def delete_key(self, key: str) -> bool:
        self._client.key_value_delete(key)
        return True

    def _has(self, key: str) -> bool:
        try:
            self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as failure:
            if not str(failure).startswith("NOT_FOUND"):
                raise
            return False
        return True


def _is_one_machine() -> bool:
    address = str(getattr(jax._src.distributed.global_state, "coordinator_address", "") or "")
    return address.rpartition(":")[0] in ("localhost", "127.0.0.1", "::1", "[::1]")


def save(checkpoint: Checkpoint, name: str, tree: Any) -> bool:
    """Saves a pytree as ``name``. When it returns, the values are fixed: the program may donate or delete every array.

    Leaves: jax.Array of any dtype and sharding, typed PRNG keys, NumPy arrays, Python numbers, text, bytes and None. NumPy arrays and plain
    values are those of process 0. If each process has an array of its own on its devices, each saves it and gets it back. Every process must
    call it. Returns False if the save failed and on_error is "warn". Raises NebulaConfigError for a leaf of another type.
    """
    process, found = jax.process_index(), list(_leaves(tree))
    file = _file(name, process)
    layout = _layouts.pop(file, None)
    pieces = layout.pieces(found) if layout is not None else None
    if layout is None or pieces is None:
        _check(name, found)
        layout = _Layout(found, process)
        pieces = layout.pieces(found)
        assert pieces is not None
    parts = [layout.index(), *pieces]
    _layouts[file] = layout  # the newest is the last. From here on another thread may take it
    if len(_layouts) > _MOST_LAYOUTS:
        _layouts.pop(next(iter(tuple(_layouts))), None)
    return checkpoint._save_constants(file, parts, layout.constant, _flat)


def _check(name: str, found: list[tuple[str, Any]]) -> None:
    """Raises NebulaConfigError for leaves that cannot be saved."""
    refused = [f"{_shown(path)} is a {_kind(leaf)}" for path, leaf in found if not _is_known(leaf)]
    if refused:
        raise NebulaConfigError(f"{name!r} has leaves that cannot be saved: {'; '.join(refused[:_MOST_SHOWN])}")
    if len({path for path, _ in found}) < len(found):  # keys of a program's own classes with one text
        twice = [path for path, count in collections.Counter(path for path, _ in found).items() if count > 1]
        raise NebulaConfigError(f"{name!r} has several leaves that would have one name: {', '.join(map(_shown, twice[:_MOST_SHOWN]))}")


class _Leaf:
    """A leaf of a layout. aval: the shape, dtype and weak type of an array; None: the leaf is described anew by each save."""

    __slots__ = ("about", "aval", "boxes", "is_copied", "is_direct", "numbers", "pads", "path", "sharding", "type")

    def __init__(self, path: str, leaf: Any, process: int) -> None:
        self.path, self.type = path, type(leaf)
        self.aval = self.sharding = None
        self.is_direct = self.is_copied = False
        self.numbers: list[int] = []  # of an array's shards
        if isinstance(leaf, jax.Array) and not _is_key(leaf):
            self.aval, self.sharding = leaf.aval, leaf.sharding
            self.is_direct = str(leaf.dtype) in _BUFFERS
            self.about, own = _about_array(leaf), _own_shards(leaf.sharding, leaf.shape)
            self.numbers, self.boxes = [number for number, _ in own], [box for _, box in own]
            self.is_copied = self.numbers == [0] and leaf.sharding.is_fully_replicated  # on each device
        else:
            self.about, others = _described(leaf, process)
            self.boxes = [box for _, box in others]
        self.pads: list[bytes] = []  # before each shard

    def is_same(self, leaf: Any) -> bool:
        """Whether an array has the type, shape, dtype, weak type and sharding of this one. Steps of one program share most of these objects."""
        aval, sharding = leaf.aval, leaf.sharding
        known = self.aval
        if aval is not known and (aval.shape, aval.dtype, aval.weak_type) != (known.shape, known.dtype, known.weak_type):  # type: ignore[attr-defined]
            return False
        return sharding is self.sharding or sharding == self.sharding


class _Layout:
    """The index of a file, and the places of the shards. It is the one of the next save, too, unless a leaf has become another one.

    constant: the numbers of the parts that never change: JAX never writes to an array that somebody else holds.
    """

    def __init__(self, found: list[tuple[str, Any]], process: int) -> None:
        self._process = process
        self._leaves = [_Leaf(path, leaf, process) for path, leaf in found]
        self.constant: list[int] = []
        at, part = 0, 1  # the first part is the index
        for leaf in self._leaves:
            for box in leaf.boxes:
                leaf.pads.append(b"\0" * (-at % ALIGNMENT))
                at, part = at + len(leaf.pads[-1]), part + bool(leaf.pads[-1])
                leaf.about["shards"].append([at, box])
                if leaf.aval is not None or leaf.about["kind"] == "key":
                    self.constant.append(part)
                at, part = at + _bytes(leaf.about, box), part + 1
        self._framed: bytes | None = None

    def pieces(self, found: list[tuple[str, Any]]) -> list[Any] | None:
        """Returns the parts after the index, of a tree with this layout. None: the tree has another one."""
        if len(found) != len(self._leaves):
            return None
        others = {}  # by the number of the leaf
        for number, (known, (path, leaf)) in enumerate(zip(self._leaves, found, strict=True)):
            if path != known.path or type(leaf) is not known.type:
                return None
            if known.aval is None:
                others[number] = about, pieces = _described(leaf, self._process)
                if about["kind"] == "plain":
                    self._framed = self._framed if about["value"] == known.about["value"] else None
                    known.about["value"] = about["value"]
                elif {**about, "shards": known.about["shards"]} != known.about or [box for _, box in pieces] != known.boxes:
                    return None
            elif not known.is_same(leaf):
                return None
        for known, (_, leaf) in zip(self._leaves, found, strict=True):  # all copies begin before the first is awaited
            if known.aval is not None and not _is_on_host(known.sharding):
                leaf.copy_to_host_async()
        parts: list[Any] = []
        for number, (known, (_, leaf)) in enumerate(zip(self._leaves, found, strict=True)):
            if known.aval is None:
                arrays: Any = [_flat(piece) for piece, _ in others[number][1]]
            elif known.numbers:
                arrays = [leaf.addressable_data(0)] if known.is_copied else _arrays(leaf)
                arrays = [arrays[at] if known.is_direct else _flat(arrays[at]) for at in known.numbers]
            else:
                continue
            for pad, array in zip(known.pads, arrays, strict=True):
                if pad:
                    parts.append(pad)
                parts.append(array)
        return parts

    def index(self) -> bytes:
        """Returns the first part."""
        if self._framed is None:
            leaves = {leaf.path: leaf.about for leaf in self._leaves if leaf.about["kind"] != "empty"}
            empty = {leaf.path: leaf.about["value"] for leaf in self._leaves if leaf.about["kind"] == "empty"}
            head = {"nebula": "jax-tree", "version": "1.0", "process": self._process, "processes": jax.process_count()}
            self._framed = _framed(json.dumps({**head, "leaves": leaves, "empty": empty}).encode())
        return self._framed


_layouts: dict[str, _Layout] = {}  # of the last saves, by the names of their files


def load(checkpoint: Checkpoint, name: str, template: Any = None, *, cast: bool = False) -> Any:
    """Returns the tree ``name`` in the form of ``template``, with the template's shardings.

    template: a pytree of jax.Array, jax.ShapeDtypeStruct (with or without a sharding), NumPy arrays or plain values. It may be a part of the
    saved tree. None: the result has dicts and lists in the places of all containers, also of empty ones, arrays on the default device, and
    None for list items of another class without leaves. cast: values of another dtype are converted; otherwise they are refused. Raises
    NebulaConfigError for leaves that do not fit, with their paths, and NebulaNotFound for leaves or files that do not exist.
    """
    saved = _Saved(checkpoint, name)
    if template is None:
        return saved.tree(saved.values([(path, None) for path in saved.leaves]))
    paths, structure = jax.tree_util.tree_flatten_with_path(template, is_leaf=_is_none)
    return jax.tree_util.tree_unflatten(structure, _fitting(saved, [(_path(keys), leaf) for keys, leaf in paths], cast))


def _fitting(saved: _Saved, wanted: list[tuple[str, Any]], cast: bool) -> list[Any]:
    """Returns the values of leaves, if all fit their targets."""
    checkpoint, name = saved.checkpoint, saved.name
    missing = [_shown(path) for path, _ in wanted if path not in saved.leaves]
    if missing:
        raise NebulaNotFound(f"{name!r} of {checkpoint.tag!r} has no {', '.join(missing[:_MOST_SHOWN])}; it has {len(saved.leaves)} leaves")
    wrong = [why for path, leaf in wanted if (why := _mismatch(path, saved.leaves[path], leaf, cast))]
    if wrong:
        raise NebulaConfigError(f"{name!r} of {checkpoint.tag!r} does not fit: {'; '.join(wrong[:_MOST_SHOWN])}")
    return saved.values(wanted)


def _nested(found: list[tuple[str, Any]]) -> Any:
    """Returns a tree of dicts and lists with these leaves."""
    root: dict[Any, Any] = {}
    for path, value in found:
        inner = root
        *before, last = [(), *((kind == "index", str(key) if isinstance(key, list) else key) for kind, key in json.loads(path))]
        for step in before:
            inner = inner.setdefault(step, {})
        inner[last] = [value]
    return _plain_tree(root[()]) if root else {}


def _plain_tree(node: Any) -> Any:
    if isinstance(node, list):
        return node[0]
    if not all(is_index for is_index, _ in node):
        return {key: _plain_tree(inner) for (_, key), inner in node.items()}
    items = {key: _plain_tree(inner) for (_, key), inner in node.items()}
    return [items.get(index) for index in range(max(items) + 1)]


def load_orbax(path: str | os.PathLike[str], template: Any, *, step: int | None = None, item: str | None = None, cast: bool = False) -> Any:
    """Does load() of a checkpoint that Orbax has written. Orbax reads it, and must be installed.

    path: the directory of a CheckpointManager, of a step or of an item. step: None: the newest. item: None: the only one.
    """
    from .integrations import orbax

    return orbax.load(path, template, step=step, item=item, cast=cast)


# -- leaves


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_end(node: Any) -> bool:
    """Whether no leaf of JAX is below a node, though a tree without a template has something in its place: None, and empty containers."""
    return node is None or _is_empty(node)


def _is_empty(node: Any) -> bool:
    return isinstance(node, dict | list | tuple) and not node and (type(node) in _CONTAINERS or hasattr(node, "_fields"))


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_end)[0]:
        yield _path(keys), leaf


def _path(keys: tuple[Any, ...]) -> str:
    """Returns the path of a leaf as JSON: each step with its kind, so that 1 and "1" differ."""
    kinds = None
    for key in keys:
        if type(key) not in _NAMED_KEYS and (type(key) is not _DICT_KEY or type(key.key) is not str):
            kinds = tuple((type(key), type(getattr(key, "key", None))) for key in keys)
            break
    try:
        return _known_path(keys, kinds) if kinds is None or all(kind in _KNOWN_KEYS for _, kind in kinds) else _json_path(keys)
    except TypeError:  # a key that has no hash
        return _json_path(keys)


@functools.lru_cache(_MOST_KNOWN)
def _known_path(keys: tuple[Any, ...], types: tuple[Any, ...] | None) -> str:
    """types: of the keys, because 1 equals True and 1.0. They are a part of what is remembered. None: names and numbers of items alone."""
    return _json_path(keys)


def _json_path(keys: tuple[Any, ...]) -> str:
    tree = jax.tree_util
    steps: list[Any] = []
    for key in keys:
        if isinstance(key, tree.SequenceKey):
            steps.append(["index", key.idx])
        elif isinstance(key, tree.GetAttrKey):
            steps.append(["name", key.name])
        elif isinstance(key, tree.DictKey | tree.FlattenedIndexKey):
            plain = key.key if isinstance(key.key, str | int) and not isinstance(key.key, bool) else [type(key.key).__name__, repr(key.key)]
            steps.append(["key", plain])
        else:
            steps.append([type(key).__name__, str(key)])
    return json.dumps(steps)


def _shown(path: str) -> str:
    return "".join(f".{value}" if kind == "name" else f"[{value!r}]" for kind, value in json.loads(path)) or "the tree"


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_known(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        return _is_named(leaf.dtype) and not isinstance(leaf, np.ma.MaskedArray)
    return isinstance(leaf, (jax.Array, *_PLAIN)) or _is_empty(leaf)


def _kind(leaf: Any) -> str:
    """Describes a leaf that cannot be saved."""
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return f"{kind} of {leaf.dtype}" if isinstance(leaf, np.ndarray | np.generic) else kind


def _is_named(dtype: np.dtype[Any]) -> bool:
    """Returns whether the bytes of a dtype's elements are their values, and its name gives it back: that of a structured one does not."""
    try:
        return not dtype.hasobject and _dtype(str(dtype)) == dtype
    except (TypeError, SyntaxError, ValueError):
        return False


def _described(leaf: Any, process: int) -> tuple[dict[str, Any], list[tuple[Any, list[list[int]]]]]:
    """Returns the index entry of a leaf, and what this process writes of it: (array, index)."""
    if isinstance(leaf, jax.Array):
        data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        arrays = _arrays(data)
        return _about_array(leaf), [(np.asarray(arrays[number]), box) for number, box in _own_shards(data.sharding, data.shape)]
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.ascontiguousarray(leaf)
        about = {"kind": "numpy", "dtype": str(array.dtype), "shape": list(np.shape(leaf)), "shards": []}
        return about, [(array, [[0, size] for size in np.shape(leaf)])] if process == 0 else []
    if _is_empty(leaf):
        return {"kind": "empty", "value": _CONTAINERS.get(type(leaf), dict).__name__, "shards": []}, []
    return {"kind": "plain", "value": _plain(leaf), "shards": []}, []


def _about_array(leaf: jax.Array) -> dict[str, Any]:
    """Returns the index entry of an array or of PRNG keys, still without shards."""
    extra: dict[str, Any] = {}
    if _is_key(leaf):
        extra, leaf = {"impl": str(jax.random.key_impl(leaf))}, jax.random.key_data(leaf)
    if leaf.weak_type:
        extra["weak"] = True
    return {"kind": "key" if "impl" in extra else "array", "dtype": str(leaf.dtype), "shape": list(leaf.shape), "shards": [], **extra}


def _arrays(leaf: jax.Array) -> list[Any]:
    """Returns the arrays of this process's devices, without what addressable_data() asks of each: that takes longer than its copy."""
    found = getattr(leaf, "_arrays", None)
    return found if found is not None else [leaf.addressable_data(number) for number in range(len(leaf.sharding.addressable_devices))]


def _flat(array: Any) -> np.ndarray[Any, Any]:
    """Returns the bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@functools.lru_cache(_MOST_KNOWN)
def _own_shards(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> list[tuple[int, list[list[int]]]]:
    """Returns the shards that this process writes: their numbers among its own, and their boxes. The first device that has a box writes it."""
    writers: dict[str, Any] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        writers.setdefault(str(_box(index, shape)), device)
    own = [(_box(index, shape), device) for device, index in sharding.addressable_devices_indices_map(shape).items()]
    return [(number, box) for number, (box, device) in enumerate(own) if writers[str(box)] is device]


@functools.lru_cache(_MOST_KNOWN)
def _is_on_host(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def _plain(leaf: Any) -> list[Any]:
    """Returns a plain value with its type, exact in JSON."""
    kind = next(kind for kind in _PLAIN if isinstance(leaf, kind))
    texts = {float: float.hex, int: str, complex: lambda value: [value.real.hex(), value.imag.hex()], bytes: bytes.hex}
    return [kind.__name__, texts[kind](leaf) if kind in texts else leaf]


def _value(kind: str, text: Any) -> Any:
    if kind == "complex":
        return complex(float.fromhex(text[0]), float.fromhex(text[1]))
    return {"float": float.fromhex, "int": int, "bytes": bytes.fromhex}[kind](text) if kind in ("float", "int", "bytes") else text


def _box(index: Any, shape: Any) -> list[list[int]]:
    """Returns (start, stop) for each dimension of a shard."""
    return [list(part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)]


def _framed(index: bytes) -> bytes:
    """Returns the begin of a file: the length of its index, the index, and zeros up to the shards, whose offsets count from there."""
    return b"%015d\n" % len(index) + index + b"\0" * (_begin(len(index)) - LENGTH_BYTES - len(index))


def _begin(length: int) -> int:
    return -(-(LENGTH_BYTES + length) // ALIGNMENT) * ALIGNMENT


def _file(name: str, process: int, ending: str = "tree") -> str:
    return f"{name}.{process:05d}.{ending}"


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(jax.numpy.dtype(name))


def _mismatch(path: str, about: dict[str, Any], leaf: Any, cast: bool) -> str:
    """Returns why a leaf of the template cannot take the saved one; "": it can."""
    has_shape = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)
    if has_shape and not _is_key(leaf) and isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and _is_narrowed(leaf.dtype):
        return f"{_shown(path)} would lose bits: JAX makes no array of {leaf.dtype} without jax_enable_x64"
    if about["kind"] == "plain":
        kind, text = about["value"]
        if not has_shape or (tuple(leaf.shape) == () and kind in _NUMBERS and _holds(leaf.dtype, kind, text, cast)):
            return ""
        other = f", and the template {leaf.dtype} of the shape {tuple(leaf.shape)}" if kind in _NUMBERS else ""
        return f"{_shown(path)} is a Python {kind}{other}"
    shape = tuple(about["shape"])
    if not has_shape:
        is_fine = shape == () and isinstance(leaf, bool | int | float | complex)
        return "" if is_fine else f"{_shown(path)} has the shape {shape}, and the template a {type(leaf).__name__}"
    if about["kind"] == "key" or _is_key(leaf):
        return "" if about["kind"] == "key" and _is_key(leaf) else f"{_shown(path)} is a PRNG key on one side alone"
    if shape != tuple(leaf.shape):
        return f"{_shown(path)} has the shape {shape}, and the template {tuple(leaf.shape)}"
    if not cast and str(leaf.dtype) != about["dtype"]:
        return f"{_shown(path)} is {about['dtype']}, and the template {leaf.dtype}: cast=True converts"
    return ""


def _is_narrowed(dtype: Any) -> bool:
    return bool(jax.dtypes.canonicalize_dtype(dtype) != dtype)


def _would_narrow(about: dict[str, Any], target: Any) -> bool:
    """Returns whether JAX would cut the numbers of a leaf for which the template names no dtype."""
    return about["kind"] == "array" and not hasattr(target, "dtype") and _is_narrowed(_dtype(about["dtype"]))


def _holds(dtype: Any, kind: str, text: Any, cast: bool) -> bool:
    """Returns whether a dtype takes a Python number as JAX's arithmetic would: a float may be rounded, but is no whole number."""
    if kind == "int" and jax.numpy.issubdtype(dtype, jax.numpy.integer):
        limits = jax.numpy.iinfo(dtype)
        return int(limits.min) <= int(text) <= int(limits.max)
    classes = (jax.numpy.bool_, jax.numpy.integer, jax.numpy.floating, jax.numpy.complexfloating)
    return any(jax.numpy.issubdtype(dtype, each) for each in classes[0 if cast and kind != "complex" else _NUMBERS.index(kind) :])


def _sharding_of(target: Any) -> Any:
    """Returns where the template wants a leaf. None: nowhere, as an array that JAX may move to the device of another one."""
    is_placed = isinstance(target, jax.Array | jax.ShapeDtypeStruct) and getattr(target, "committed", True)
    if not is_placed or isinstance(getattr(target.sharding, "mesh", None), jax.sharding.AbstractMesh):  # as eval_shape gives: it has no devices
        return None
    return target.sharding


class _Saved:
    """The files of a tree: what all processes have written."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.checkpoint, self.name = checkpoint, name
        self._maps: dict[int, Any] = {}
        self._begins: dict[int, int] = {}  # of the shards in the file of a process
        self.leaves: dict[str, Any] = {}
        files = checkpoint._all_files()
        first = _file(name, 0)
        if first not in files:
            raise NebulaNotFound(f"{checkpoint.tag!r} has no tree {name!r}; its files: {', '.join(sorted(files)) or 'none'}")
        indexes = [self._index(0)]
        count = indexes[0]["processes"]
        missing = [_file(name, process) for process in range(count) if _file(name, process) not in files]
        if missing:
            raise NebulaCorrupt(f"{checkpoint.tag!r} lacks {', '.join(missing[:_MOST_SHOWN])} of the tree {name!r}")
        indexes += map(self._index, range(1, count))
        self.empty: dict[str, str] = indexes[0].get("empty", {})  # containers without leaves: their kinds
        for process, index in enumerate(indexes):
            for path, about in index["leaves"].items():
                shards = [(process, offset, [tuple(part) for part in box]) for offset, box in about["shards"]]
                known = self.leaves.get(path)
                if known is None or (process == jax.process_index() and shards and _is_whole(about) and _is_whole(known)):
                    self.leaves[path] = {**about, "shards": shards}
                elif not _is_whole(known):  # else each process has an array of its own there
                    known["shards"] += shards

    def _index(self, process: int) -> dict[str, Any]:
        mapped = self._maps[process] = self.checkpoint._map(_file(self.name, process), lazily=True)
        data = memoryview(mapped)
        mapped.fetch(0, min(LENGTH_BYTES, len(data)))
        length = int(bytes(data[:LENGTH_BYTES]))
        mapped.fetch(LENGTH_BYTES, length)
        self._begins[process] = _begin(length)
        return json.loads(bytes(data[LENGTH_BYTES : LENGTH_BYTES + length]))

    def tree(self, values: list[Any]) -> Any:
        """Returns a tree of dicts and lists. values: one for each leaf."""
        empty: list[tuple[str, Any]] = [(path, {} if kind == "dict" else []) for path, kind in self.empty.items()]
        return _nested([*zip(self.leaves, values, strict=True), *empty])

    def values(self, wanted: list[tuple[str, Any]]) -> list[Any]:
        """Returns the values of leaves in the places of their targets. Leaves are put together while the next ones are read."""
        narrowed = [_shown(path) for path, target in wanted if _would_narrow(self.leaves[path], target)]
        if narrowed:
            why = f"JAX makes no array of 64 bits without jax_enable_x64: {', '.join(narrowed[:_MOST_SHOWN])}"
            raise NebulaConfigError(f"{self.name!r} of {self.checkpoint.tag!r} would lose bits, because {why}")
        made: list[Any] = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy copies without the lock of the interpreter
            for group in self._groups(wanted):
                self._fetch(group)
                made += [pool.submit(self._leaf, *one) for one in group]
        return [each.result() for each in made]

    def _groups(self, wanted: list[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
        group, size = [], 0
        for path, target in wanted:
            about = self.leaves[path]
            group.append((path, target))
            size += sum(_bytes(about, box) for _, _, box in about["shards"])
            if size >= GROUP_BYTES:
                yield group
                group, size = [], 0
        yield group

    def _fetch(self, wanted: list[tuple[str, Any]]) -> None:
        """Reads and verifies the shards that the leaves need, many at a time."""
        needed: dict[int, set[tuple[int, int]]] = {}
        for path, target in wanted:
            about = self.leaves[path]
            shape = tuple(about.get("shape", ()))
            boxes = [[[0, size] for size in shape]]
            if about["kind"] != "key" and (sharding := _sharding_of(target)) is not None:
                boxes = [_box(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()]
            for process, offset, shard in about["shards"]:
                if any(_common(box, shard) for box in boxes):
                    needed.setdefault(process, set()).add((offset, _bytes(about, shard)))
        for process, ranges in needed.items():
            begin = self._begins[process]
            self._maps[process].fetch_parts(sorted((begin + offset, size) for offset, size in ranges if size))

    def _leaf(self, path: str, target: Any) -> Any:
        """Returns the value of a leaf, in the place that the template's leaf names, and with a weak type if that has one."""
        value = self._strong(path, target)
        is_weak = getattr(target, "weak_type", target is None and self.leaves[path].get("weak", False))
        return _weakened(value) if is_weak and isinstance(value, jax.Array) else value

    def _strong(self, path: str, target: Any) -> Any:
        about = self.leaves[path]
        if about["kind"] == "plain":
            value = _value(*about["value"])
            return self._placed(np.asarray(value, target.dtype), target) if hasattr(target, "dtype") else value
        shape = tuple(about["shape"])
        if about["kind"] == "key":
            data = self._whole(about, shape)
            key = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=about["impl"])
            return key if (sharding := _sharding_of(target)) is None else _spread(key, sharding)
        if (sharding := _sharding_of(target)) is not None:
            def part(index: Any) -> np.ndarray[Any, Any]:
                return self._part(about, _box(index, shape), shared=True).astype(target.dtype, copy=False)

            return jax.make_array_from_callback(shape, sharding, part, dtype=target.dtype)
        found = self._whole(about, shape)
        if isinstance(target, np.ndarray | np.generic):
            return found.astype(target.dtype, copy=False)
        if about["kind"] == "numpy" and not hasattr(target, "dtype"):
            return found
        return jax.numpy.asarray(found, dtype=getattr(target, "dtype", None))

    def _placed(self, value: np.ndarray[Any, Any], target: Any) -> Any:
        if isinstance(target, np.ndarray | np.generic):
            return value
        sharding = _sharding_of(target)
        if sharding is None:
            return jax.numpy.asarray(value)
        return jax.make_array_from_callback((), sharding, lambda index: value, dtype=value.dtype)

    def _whole(self, about: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return self._part(about, [[0, size] for size in shape])

    def _part(self, about: dict[str, Any], box: list[list[int]], shared: bool = False) -> np.ndarray[Any, Any]:
        """Returns the elements of a box, put together from the shards that have some of them.

        shared: those of one shard lie in the mapped file, where JAX takes them over as they are. Its pages belong to this process alone.
        """
        dtype = _dtype(about["dtype"])
        overlaps = [(each, common) for each in about["shards"] if (common := _common(box, each[2])) is not None]
        for each, _ in overlaps:
            if shared and list(map(list, each[2])) == box:
                return self._read(about, each, dtype)
        result = _empty([stop - start for start, stop in box], dtype)
        missing = result.size
        for each, common in overlaps:
            inside = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(common, each[2], strict=True))
            into = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(common, box, strict=True))
            result[into] = self._read(about, each, dtype)[inside]
            missing -= math.prod(stop - start for start, stop in common)
        if missing:
            raise NebulaCorrupt(f"{missing} elements of a leaf of {self.name!r} are in no file")
        return result

    def _read(self, about: dict[str, Any], shard: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Returns the elements of a shard that was fetched, without a copy."""
        process, offset, box = shard
        data = np.frombuffer(self._maps[process], np.uint8, _bytes(about, box), self._begins[process] + offset)
        return data.view(dtype).reshape([stop - start for start, stop in box])


def _weakened(value: jax.Array) -> jax.Array:
    """Returns the array with a weak type, as a Python number has. JAX has no public function for that: without its own one it stays strong."""
    try:
        from jax._src.lax.lax import _convert_element_type
    except ImportError:
        return value
    if value.sharding.memory_kind not in (None, next(iter(value.devices())).default_memory().kind):  # it would move there
        return value
    return _convert_element_type(value, weak_type=True)


def _spread(key: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns PRNG keys with a sharding. device_put() refuses one with devices of other processes, and may wait for these."""
    parts = [jax.device_put(key[index], device) for device, index in sharding.addressable_devices_indices_map(key.shape).items()]
    return jax.make_array_from_single_device_arrays(key.shape, sharding, parts, dtype=key.dtype)


def _empty(shape: list[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns an array that JAX takes over on the CPU: it copies others."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    begin = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _common(box: Any, other: Any) -> list[tuple[int, int]] | None:
    """Returns what two boxes have in common; None: nothing."""
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True)]
    return None if any(start >= stop for start, stop in common) else common


def _bytes(about: dict[str, Any], box: Any) -> int:
    return math.prod(stop - start for start, stop in box) * _dtype(about["dtype"]).itemsize


def _is_whole(about: dict[str, Any]) -> bool:
    """Returns whether a leaf is a plain value, or its shards, which do not overlap, are all of it."""
    written = sum(math.prod(stop - start for start, stop in shard[-1]) for shard in about["shards"])
    return about["kind"] == "plain" or written == math.prod(about["shape"])


# -- the manager


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of Manager.restore(): the step, metrics and metadata of the version, and the new trees by the names of the items."""

    step: int
    metrics: dict[str, float]
    metadata: dict[str, Any]
    items: dict[str, Any]


class Manager(manager.Manager):
    """``nebulaml.Manager`` for pytrees. All settings and methods are those of that class, but for these two:

    save(step, items): the items are pytrees, as save() of this module takes them, or iterators with get_state() and set_state(), such as
        Grain's, of which each process saves its own. All processes call it, and none waits for another one.
    restore(items): the items are templates, as load() takes them, and iterators, which it sets back. It returns new trees.
    """

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        _take_ranks()
        if "replicated" in settings:
            raise NebulaConfigError("nebulaml.jax.Manager(replicated=...): each shard of a tree is written once in any case")
        super().__init__(path, **settings)

    def prepare(self, items: Mapping[str, Any]) -> None:
        """Does nothing: the first save of a tree makes its memory."""

    def _save_item(self, checkpoint: Checkpoint, name: str, item: Any, file: str) -> None:
        if not _is_iterator(item):
            save(checkpoint, name, item)
            return
        state = item.get_state()
        said = {"bytes": base64.b64encode(state).decode()} if isinstance(state, bytes) else {"json": state}
        try:
            text = json.dumps({"nebula": "jax-iterator", "version": "1.0", "processes": jax.process_count(), **said})
        except TypeError as failure:
            raise NebulaConfigError(f"the state of the iterator {name!r} is neither bytes nor JSON: {failure}") from failure
        checkpoint.save_bytes(_file(name, jax.process_index(), "iterator"), text.encode())

    def _begin(self, step: int, items: Mapping[str, Any], said: Any) -> Checkpoint:
        if jax.process_count() > 1 and self._engine.place().world != jax.process_count():
            raise NebulaConfigError(f"this job has {self._engine.place().world} ranks, and JAX {jax.process_count()} processes")
        return super()._begin(step, items, said)

    def restore(  # type: ignore[override]
        self, targets: Mapping[str, Any], step: int | None = None, *, cast: bool = False
    ) -> Restored | None:
        """Returns new trees in the form of the templates, with their shardings. Every process must call it. None: there is no checkpoint.

        step: the version; None: the newest. cast: as for load(). Raises NebulaNotFound for a step, item or leaf that does not exist, and
        NebulaConfigError for what does not fit; iterators are set back last.
        """
        self._raise_late()
        if not isinstance(targets, Mapping) or not targets:
            raise NebulaConfigError("targets are a dict, as {'state': state}")
        checkpoint = self._newest() if step is None else self._of_step(step, for_all_ranks=True)
        if checkpoint is None:
            return None
        said = checkpoint._said()
        found = {name: load(checkpoint, name, target, cast=cast) for name, target in targets.items() if not _is_iterator(target)}
        states = {name: self._state_of(checkpoint, name) for name, target in targets.items() if _is_iterator(target)}
        for name, state in states.items():
            targets[name].set_state(state)
        self._goes_back_to(checkpoint.step)
        return Restored(checkpoint.step or 0, dict(said.metrics), dict(said.metadata), {**found, **{name: targets[name] for name in states}})

    def _state_of(self, checkpoint: Checkpoint, name: str) -> Any:
        file = _file(name, jax.process_index(), "iterator")
        if file not in checkpoint._all_files():
            raise NebulaNotFound(f"{checkpoint.tag} has no state of the iterator {name!r} of process {jax.process_index()}")
        said = json.loads(checkpoint.read_bytes(file))
        if said["processes"] != jax.process_count():
            raise NebulaConfigError(
                f"{checkpoint.tag}: the iterator {name!r} is that of {said['processes']} processes, and this job has {jax.process_count()}"
            )
        return base64.b64decode(said["bytes"]) if "bytes" in said else said["json"]


def _is_iterator(item: Any) -> bool:
    return callable(getattr(item, "get_state", None)) and callable(getattr(item, "set_state", None))


_TRANSLATED = {"save_interval_steps": "save_every_steps", "max_to_keep": "keep_last", "keep_period": "keep_every"}
# Options that change nothing here, with the values that do so; None: all.
_FITTING: dict[str, tuple[Any, ...] | None] = dict.fromkeys((
    "best_mode", "keep_checkpoints_without_metrics", "cleanup_tmp_directories", "enable_background_delete", "num_deletion_threads",
    "async_options", "multiprocessing_options", "file_options", "atomicity_options", "save_root_metadata", "single_host_load_and_broadcast",
    "enable_per_process_directory_creation", "lightweight_initialize", "temporary_path_class", "prevent_write_metrics",
    "enable_should_save_is_saving_in_progress_check",
)) | {"create": (True,), "enable_async_checkpointing": (True,)}  # fmt: skip
# Options in whose place Orbax takes a policy, if there is one.
_BY_POLICY = {
    "save_decision_policy": ("save_interval_steps", "save_on_steps", "should_save_fn"),
    "preservation_policy": ("max_to_keep", "keep_time_interval", "keep_period", "best_fn"),
}
# Orbax's policies: the attribute with the value, and the setting that takes it. None: the policy needs no setting.
_POLICIES: dict[str, tuple[str, str] | None] = {
    "FixedIntervalPolicy": ("interval", "save_every_steps"),
    "PreemptionCheckpointingPolicy": None,  # a manager saves after a notice in any case
    "PreserveAll": None,
    "LatestN": ("n", "keep_last"),
    "EveryNSteps": ("interval_steps", "keep_every"),
    "LatestDuration": ("duration", "keep_within"),
}
_FREE = {"exact_interval": True, "max_to_keep": None}  # attributes of policies, with the values that need no counterpart


def settings_of(options: Any) -> dict[str, Any]:
    """Returns the settings of ``Manager`` for an orbax.checkpoint.CheckpointManagerOptions.

    Options at their defaults are left out. Raises NebulaConfigError for an option without a counterpart. One is best_fn: a rule of the agent
    needs the name of a metric, so give Manager(keep_best=nebulaml.Best(...)).
    """
    plain, given = type(options)(), vars(options)
    settings: dict[str, Any] = {}
    refused = []
    replaced = {name for policy, names in _BY_POLICY.items() if given.get(policy) is not None for name in names}
    for name, value in given.items():
        default = getattr(plain, name, None)
        if name in replaced:
            continue
        if name in _TRANSLATED:
            if value is not None:
                settings[_TRANSLATED[name]] = value
        elif name in _BY_POLICY and value is not None:
            refused += [f"{name}={each}" for each in _add_policy(value, settings)]
        elif value == default or (name in _FITTING and value in (_FITTING[name] or (value,))):
            continue
        else:
            refused.append(f"{name}={value!r:.80}")
    if refused:
        raise NebulaConfigError(f"nebulaml.jax.Manager has no counterpart of {config.in_lines(sorted(refused))} (docs/jax.md)")
    if "keep_every" in settings and "keep_last" not in settings and given.get("preservation_policy") is None:
        del settings["keep_every"]  # Orbax keeps all then
    return settings


def _add_policy(policy: Any, settings: dict[str, Any]) -> list[str]:
    """Adds the settings for one of Orbax's policies. Returns the policies that have no counterpart."""
    kind = type(policy).__name__
    if kind in ("AnyPreservationPolicy", "AnySavePolicy"):
        if any(type(part).__name__ == "PreserveAll" for part in policy.policies):
            return []
        return [each for part in policy.policies for each in _add_policy(part, settings)]
    if kind not in _POLICIES:
        return [f"{policy!r:.80}"]
    values, translated = dict(vars(policy)), _POLICIES[kind]
    value = values.pop(translated[0]) if translated is not None else None
    if any(each != _FREE.get(name) for name, each in values.items()) or (translated is not None and translated[1] in settings):
        return [f"{policy!r:.80}"]
    if translated is not None and value is not None:
        settings[translated[1]] = value.total_seconds() if hasattr(value, "total_seconds") else value
    return []
