"""The leaves of a pytree: their paths, their kinds, and the shards that a process writes of them."""

from __future__ import annotations

import collections
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

ALIGNMENT = 64  # bytes; of each shard in its file
LENGTH_BYTES = 16  # of a file: the length of its index in digits, and a new line
MOST_SHOWN = 10
BUFFERS = {f"{kind}{bits}" for kind, most in (("int", 8), ("uint", 8), ("float", 16)) for bits in (8, 16, 32, 64) if bits >= most} | {
    "bool", "complex64", "complex128",
}  # dtypes of which a JAX array on the host gives its own bytes, unless it has another layout  # fmt: skip
_MOST_KNOWN = 1 << 14  # shardings of a shape, and paths, of which the next save need not think again
_KNOWN_KEYS = (str, int, bool, type(None))  # equal ones of one type have one text: (1,) and (True,) have two
_NAMED_KEYS = (jax.tree_util.GetAttrKey, jax.tree_util.SequenceKey)  # equal ones have one text
_DICT_KEY = jax.tree_util.DictKey  # and equal ones of these, if their keys are text
NUMBERS = ("bool", "int", "float", "complex")  # each holds those before it
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = {dict: dict, collections.OrderedDict: dict, collections.defaultdict: dict, list: list, tuple: list}  # and namedtuples, as dicts


def is_none(leaf: Any) -> bool:
    return leaf is None


def _is_end(node: Any) -> bool:
    """Whether no leaf of JAX is below a node, though a tree without a template has something in its place: None, and empty containers."""
    return node is None or is_empty(node)


def is_empty(node: Any) -> bool:
    return isinstance(node, dict | list | tuple) and not node and (type(node) in _CONTAINERS or hasattr(node, "_fields"))


def leaves_of(tree: Any) -> Iterator[tuple[str, Any]]:
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_end)[0]:
        yield path_of(keys), leaf


def path_of(keys: tuple[Any, ...]) -> str:
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


def shown(path: str) -> str:
    return "".join(f".{value}" if kind == "name" else f"[{value!r}]" for kind, value in json.loads(path)) or "the tree"


def listed(paths: list[str]) -> str:
    """Returns the first paths of leaves, for an error."""
    return ", ".join(map(shown, paths[:MOST_SHOWN]))


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_known(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        return _is_named(leaf.dtype) and not isinstance(leaf, np.ma.MaskedArray)
    return isinstance(leaf, (jax.Array, *_PLAIN)) or is_empty(leaf)


def kind_of(leaf: Any) -> str:
    """Describes a leaf that cannot be saved."""
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return f"{kind} of {leaf.dtype}" if isinstance(leaf, np.ndarray | np.generic) else kind


def _is_named(dtype: np.dtype[Any]) -> bool:
    """Returns whether the bytes of a dtype's elements are their values, and its name gives it back: that of a structured one does not."""
    try:
        return not dtype.hasobject and dtype_of(str(dtype)) == dtype
    except (TypeError, SyntaxError, ValueError):
        return False


def described(leaf: Any, process: int) -> tuple[dict[str, Any], list[tuple[Any, list[list[int]]]]]:
    """Returns the index entry of a leaf, and what this process writes of it: (array, index)."""
    if isinstance(leaf, jax.Array):
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        arrays = arrays_of(data)
        return about_array(leaf), [(np.asarray(arrays[number]), box) for number, box in own_shards(data.sharding, data.shape)]
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.ascontiguousarray(leaf)
        about = {"kind": "numpy", "dtype": str(array.dtype), "shape": list(np.shape(leaf)), "shards": []}
        return about, [(array, [[0, size] for size in np.shape(leaf)])] if process == 0 else []
    if is_empty(leaf):
        return {"kind": "empty", "value": _CONTAINERS.get(type(leaf), dict).__name__, "shards": []}, []
    return {"kind": "plain", "value": _plain(leaf), "shards": []}, []


def about_array(leaf: jax.Array) -> dict[str, Any]:
    """Returns the index entry of an array or of PRNG keys, still without shards."""
    extra: dict[str, Any] = {}
    if is_key(leaf):
        extra, leaf = {"impl": str(jax.random.key_impl(leaf))}, jax.random.key_data(leaf)
    if leaf.weak_type:
        extra["weak"] = True
    return {"kind": "key" if "impl" in extra else "array", "dtype": str(leaf.dtype), "shape": list(leaf.shape), "shards": [], **extra}


def arrays_of(leaf: jax.Array) -> list[Any]:
    """Returns the arrays of this process's devices, without what addressable_data() asks of each: that takes longer than its copy."""
    found = getattr(leaf, "arrays_of", None)
    return found if found is not None else [leaf.addressable_data(number) for number in range(len(leaf.sharding.addressable_devices))]


def flat(array: Any) -> np.ndarray[Any, Any]:
    """Returns the bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@functools.lru_cache(_MOST_KNOWN)
def own_shards(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> list[tuple[int, list[list[int]]]]:
    """Returns the shards that this process writes: their numbers among its own, and their boxes. The first device that has a box writes it."""
    writers: dict[str, Any] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        writers.setdefault(str(box_of(index, shape)), device)
    own = [(box_of(index, shape), device) for device, index in sharding.addressable_devices_indices_map(shape).items()]
    return [(number, box) for number, (box, device) in enumerate(own) if writers[str(box)] is device]


@functools.lru_cache(_MOST_KNOWN)
def is_on_host(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def _plain(leaf: Any) -> list[Any]:
    """Returns a plain value with its type, exact in JSON."""
    kind = next(kind for kind in _PLAIN if isinstance(leaf, kind))
    texts = {float: float.hex, int: str, complex: lambda value: [value.real.hex(), value.imag.hex()], bytes: bytes.hex}
    return [kind.__name__, texts[kind](leaf) if kind in texts else leaf]


def value_of(kind: str, text: Any) -> Any:
    if kind == "complex":
        return complex(float.fromhex(text[0]), float.fromhex(text[1]))
    return {"float": float.fromhex, "int": int, "bytes": bytes.fromhex}[kind](text) if kind in ("float", "int", "bytes") else text


def box_of(index: Any, shape: Any) -> list[list[int]]:
    """Returns (start, stop) for each dimension of a shard."""
    return [list(part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)]


def framed(index: bytes) -> bytes:
    """Returns the begin of a file: the length of its index, the index, and zeros up to the shards, whose offsets count from there."""
    return b"%015d\n" % len(index) + index + b"\0" * (begin_of(len(index)) - LENGTH_BYTES - len(index))


def begin_of(length: int) -> int:
    return -(-(LENGTH_BYTES + length) // ALIGNMENT) * ALIGNMENT


def file_of(name: str, process: int, ending: str = "tree") -> str:
    return f"{name}.{process:05d}.{ending}"


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(jax.numpy.dtype(name))


def common(box: Any, other: Any) -> list[tuple[int, int]] | None:
    """Returns what two boxes have in common; None: nothing."""
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True)]
    return None if any(start >= stop for start, stop in common) else common


def bytes_of(about: dict[str, Any], box: Any) -> int:
    return math.prod(stop - start for start, stop in box) * dtype_of(about["dtype"]).itemsize


def is_whole(about: dict[str, Any]) -> bool:
    """Returns whether a leaf is a plain value, or its shards, which do not overlap, are all of it."""
    written = sum(math.prod(stop - start for start, stop in shard[-1]) for shard in about["shards"])
    return about["kind"] == "plain" or written == math.prod(about["shape"])
