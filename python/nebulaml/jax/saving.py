"""Saves of pytrees."""

from __future__ import annotations

import collections
import json
from typing import Any

import jax

from ..checkpoint import Checkpoint
from ..errors import NebulaConfigError
from . import leaves

_MOST_LAYOUTS = 16  # of files that are remembered


def save(checkpoint: Checkpoint, name: str, tree: Any) -> bool:
    """Saves a pytree as ``name``. When it returns, the values are fixed: the program may donate or delete every array.

    Leaves: jax.Array of any dtype and sharding, typed PRNG keys, NumPy arrays, Python numbers, text, bytes and None. NumPy arrays and plain
    values are those of process 0. If each process has an array of its own on its devices, each saves it and gets it back. Every process must
    call it. Returns False if the save failed and on_error is "warn". Raises NebulaConfigError for a leaf of another type.
    """
    process, found = jax.process_index(), list(leaves.leaves_of(tree))
    file = leaves.file_of(name, process)
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
    return checkpoint._save_constants(file, parts, layout.constant, leaves.flat)


def _check(name: str, found: list[tuple[str, Any]]) -> None:
    """Raises NebulaConfigError for leaves that cannot be saved."""
    refused = [f"{leaves.shown(path)} is a {leaves.kind_of(leaf)}" for path, leaf in found if not leaves.is_known(leaf)]
    if refused:
        raise NebulaConfigError(f"{name!r} has leaves that cannot be saved: {'; '.join(refused[:leaves.MOST_SHOWN])}")
    if len({path for path, _ in found}) < len(found):  # keys of a program's own classes with one text
        twice = [path for path, count in collections.Counter(path for path, _ in found).items() if count > 1]
        raise NebulaConfigError(f"{name!r} has several leaves that would have one name: {leaves.listed(twice)}")


class _Leaf:
    """A leaf of a layout. aval: the shape, dtype and weak type of an array; None: the leaf is described anew by each save."""

    __slots__ = ("about", "aval", "boxes", "is_copied", "is_direct", "numbers", "pads", "path", "sharding", "type")

    def __init__(self, path: str, leaf: Any, process: int) -> None:
        self.path, self.type = path, type(leaf)
        self.aval = self.sharding = None
        self.is_direct = self.is_copied = False
        self.numbers: list[int] = []  # of an array's shards
        if isinstance(leaf, jax.Array) and not leaves.is_key(leaf):
            self.aval, self.sharding = leaf.aval, leaf.sharding
            self.is_direct = str(leaf.dtype) in leaves.BUFFERS
            self.about, own = leaves.about_array(leaf), leaves.own_shards(leaf.sharding, leaf.shape)
            self.numbers, self.boxes = [number for number, _ in own], [box for _, box in own]
            self.is_copied = self.numbers == [0] and leaf.sharding.is_fully_replicated  # on each device
        else:
            self.about, others = leaves.described(leaf, process)
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
                leaf.pads.append(b"\0" * (-at % leaves.ALIGNMENT))
                at, part = at + len(leaf.pads[-1]), part + bool(leaf.pads[-1])
                leaf.about["shards"].append([at, box])
                if leaf.aval is not None or leaf.about["kind"] == "key":
                    self.constant.append(part)
                at, part = at + leaves.bytes_of(leaf.about, box), part + 1
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
                others[number] = about, pieces = leaves.described(leaf, self._process)
                if about["kind"] == "plain":
                    self._framed = self._framed if about["value"] == known.about["value"] else None
                    known.about["value"] = about["value"]
                elif {**about, "shards": known.about["shards"]} != known.about or [box for _, box in pieces] != known.boxes:
                    return None
            elif not known.is_same(leaf):
                return None
        for known, (_, leaf) in zip(self._leaves, found, strict=True):  # all copies begin before the first is awaited
            if known.aval is not None and not leaves.is_on_host(known.sharding):
                leaf.copy_to_host_async()
        parts: list[Any] = []
        for number, (known, (_, leaf)) in enumerate(zip(self._leaves, found, strict=True)):
            if known.aval is None:
                arrays: Any = [leaves.flat(piece) for piece, _ in others[number][1]]
            elif known.numbers:
                arrays = [leaf.addressable_data(0)] if known.is_copied else leaves.arrays_of(leaf)
                arrays = [arrays[at] if known.is_direct else leaves.flat(arrays[at]) for at in known.numbers]
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
            listed = {leaf.path: leaf.about for leaf in self._leaves if leaf.about["kind"] != "empty"}
            empty = {leaf.path: leaf.about["value"] for leaf in self._leaves if leaf.about["kind"] == "empty"}
            head = {"nebula": "jax-tree", "version": "1.0", "process": self._process, "processes": jax.process_count()}
            self._framed = leaves.framed(json.dumps({**head, "leaves": listed, "empty": empty}).encode())
        return self._framed


_layouts: dict[str, _Layout] = {}  # of the last saves, by the names of their files
