"""Loads of pytrees."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ..checkpoint import Checkpoint
from ..errors import NebulaConfigError, NebulaCorrupt, NebulaNotFound
from . import fitting, leaves

GROUP_BYTES = 64 << 20  # of leaves that are read at once


def load(checkpoint: Checkpoint, name: str, template: Any = None, *, cast: bool = False) -> Any:
    """Returns the tree ``name`` in the form of ``template``, with the template's shardings.

    template: a pytree of jax.Array, jax.ShapeDtypeStruct (with or without a sharding), NumPy arrays or plain values. It may be a part of the
    saved tree. None: the result has dicts and lists in the places of all containers, also of empty ones, arrays on the default device, and
    None for list items of another class without leaves. cast: values of another dtype are converted; otherwise they are refused. Raises
    NebulaConfigError for leaves that do not fit, with their paths, and NebulaNotFound for leaves or files that do not exist.
    """
    saved = Saved(checkpoint, name)
    if template is None:
        return saved.tree(saved.values([(path, None) for path in saved.leaves]))
    paths, structure = jax.tree_util.tree_flatten_with_path(template, is_leaf=leaves.is_none)
    return jax.tree_util.tree_unflatten(structure, fitting_values(saved, [(leaves.path_of(keys), leaf) for keys, leaf in paths], cast))


def fitting_values(saved: Saved, wanted: list[tuple[str, Any]], cast: bool) -> list[Any]:
    """Returns the values of leaves, if all fit their targets."""
    checkpoint, name = saved.checkpoint, saved.name
    missing = [path for path, _ in wanted if path not in saved.leaves]
    if missing:
        raise NebulaNotFound(f"{name!r} of {checkpoint.tag!r} has no {leaves.listed(missing)}; it has {len(saved.leaves)} leaves")
    wrong = [why for path, leaf in wanted if (why := fitting.mismatch(path, saved.leaves[path], leaf, cast))]
    if wrong:
        raise NebulaConfigError(f"{name!r} of {checkpoint.tag!r} does not fit: {'; '.join(wrong[:leaves.MOST_SHOWN])}")
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


class Saved:
    """The files of a tree: what all processes have written."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.checkpoint, self.name = checkpoint, name
        self._maps: dict[int, Any] = {}
        self._begins: dict[int, int] = {}  # of the shards in the file of a process
        self.leaves: dict[str, Any] = {}
        files = checkpoint._all_files()
        first = leaves.file_of(name, 0)
        if first not in files:
            raise NebulaNotFound(f"{checkpoint.tag!r} has no tree {name!r}; its files: {', '.join(sorted(files)) or 'none'}")
        indexes = [self._index(0)]
        count = indexes[0]["processes"]
        missing = [leaves.file_of(name, process) for process in range(count) if leaves.file_of(name, process) not in files]
        if missing:
            raise NebulaCorrupt(f"{checkpoint.tag!r} lacks {', '.join(missing[:leaves.MOST_SHOWN])} of the tree {name!r}")
        indexes += map(self._index, range(1, count))
        self.empty: dict[str, str] = indexes[0].get("empty", {})  # containers without leaves: their kinds
        for process, index in enumerate(indexes):
            for path, about in index["leaves"].items():
                shards = [(process, offset, [tuple(part) for part in box]) for offset, box in about["shards"]]
                known = self.leaves.get(path)
                if known is None or (process == jax.process_index() and shards and leaves.is_whole(about) and leaves.is_whole(known)):
                    self.leaves[path] = {**about, "shards": shards}
                elif not leaves.is_whole(known):  # else each process has an array of its own there
                    known["shards"] += shards

    def _index(self, process: int) -> dict[str, Any]:
        mapped = self._maps[process] = self.checkpoint._map(leaves.file_of(self.name, process), lazily=True)
        data = memoryview(mapped)
        mapped.fetch(0, min(leaves.LENGTH_BYTES, len(data)))
        length = int(bytes(data[:leaves.LENGTH_BYTES]))
        mapped.fetch(leaves.LENGTH_BYTES, length)
        self._begins[process] = leaves.begin_of(length)
        return json.loads(bytes(data[leaves.LENGTH_BYTES : leaves.LENGTH_BYTES + length]))

    def tree(self, values: list[Any]) -> Any:
        """Returns a tree of dicts and lists. values: one for each leaf."""
        empty: list[tuple[str, Any]] = [(path, {} if kind == "dict" else []) for path, kind in self.empty.items()]
        return _nested([*zip(self.leaves, values, strict=True), *empty])

    def values(self, wanted: list[tuple[str, Any]]) -> list[Any]:
        """Returns the values of leaves in the places of their targets. Leaves are put together while the next ones are read."""
        narrowed = [path for path, target in wanted if fitting.would_narrow(self.leaves[path], target)]
        if narrowed:
            why = f"JAX makes no array of 64 bits without jax_enable_x64: {leaves.listed(narrowed)}"
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
            size += sum(leaves.bytes_of(about, box) for _, _, box in about["shards"])
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
            if about["kind"] != "key" and (sharding := fitting.sharding_of(target)) is not None:
                boxes = [leaves.box_of(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()]
            for process, offset, shard in about["shards"]:
                if any(leaves.common(box, shard) for box in boxes):
                    needed.setdefault(process, set()).add((offset, leaves.bytes_of(about, shard)))
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
            value = leaves.value_of(*about["value"])
            return self._placed(np.asarray(value, target.dtype), target) if hasattr(target, "dtype") else value
        shape = tuple(about["shape"])
        if about["kind"] == "key":
            data = self._whole(about, shape)
            key = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=about["impl"])
            return key if (sharding := fitting.sharding_of(target)) is None else _spread(key, sharding)
        if (sharding := fitting.sharding_of(target)) is not None:
            def part(index: Any) -> np.ndarray[Any, Any]:
                return self._part(about, leaves.box_of(index, shape), shared=True).astype(target.dtype, copy=False)

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
        sharding = fitting.sharding_of(target)
        if sharding is None:
            return jax.numpy.asarray(value)
        return jax.make_array_from_callback((), sharding, lambda index: value, dtype=value.dtype)

    def _whole(self, about: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return self._part(about, [[0, size] for size in shape])

    def _part(self, about: dict[str, Any], box: list[list[int]], shared: bool = False) -> np.ndarray[Any, Any]:
        """Returns the elements of a box, put together from the shards that have some of them.

        shared: those of one shard lie in the mapped file, where JAX takes them over as they are. Its pages belong to this process alone.
        """
        dtype = leaves.dtype_of(about["dtype"])
        overlaps = [(each, common) for each in about["shards"] if (common := leaves.common(box, each[2])) is not None]
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
        data = np.frombuffer(self._maps[process], np.uint8, leaves.bytes_of(about, box), self._begins[process] + offset)
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
    memory = np.empty(size + leaves.ALIGNMENT, np.uint8)
    begin = -memory.__array_interface__["data"][0] % leaves.ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)
