"""Writes a Hugging Face directory to an object store: one file at a time on this machine, then as an object. config.json comes last."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from .. import _nebula
from .._session import config
from ..elastic.store_cells import StoreProcess
from ..errors import NebulaCorrupt, NebulaStorageError
from .directory import INDEX, Moved, Scratch, Shard, Small, Tied, refusal, write_file, write_shard
from .naming import CONFIG
from .tensors import Tensor

__all__ = ["write"]

LIMIT_S = 7 * 86400.0  # of one file: the drivers give up long before, if the store does not answer


def _identity(told: dict[str, Any]) -> tuple[str, int]:
    """Returns what identifies an object: two of the same bytes can have one stamp. Some lists have the time in ms, other answers in s."""
    return told["stamp"], told["time_ns"] // 10**9


class _Store:
    def __init__(self, url: str) -> None:
        self._process, self._url = StoreProcess(config.clean_path(url) or "", LIMIT_S), url
        self._made: dict[str, tuple[str, int]] = {}  # the objects of this export

    def names(self) -> set[str]:
        """Returns the names of the objects that are files of this directory."""
        return {entry["key"] for entry in self._process.ask(do="list", prefix="")["entries"] if "/" not in entry["key"]}

    def remove(self, names: list[str]) -> None:
        if names:
            self._process.ask(do="remove", keys=names)

    def take(self, folder: str, name: str) -> None:
        """Moves a file there, and compares what the store has with it."""
        path = os.path.join(folder, name)
        size = os.path.getsize(path)
        [wanted] = _nebula.read_sums(path, [(0, size)])
        made = self._process.ask(do="upload", key=name, file=path)
        self._made[name] = _identity(made)
        os.unlink(path)
        found = self._process.ask(do="sum", key=name)
        if (found["size"], found["crc64"]) != (size, f"{wanted:016x}"):
            what = f"the checksum is {found['crc64']}, it should be {wanted:016x}"
            raise NebulaCorrupt(f"{name} in {config.shown(self._url)} is not as it was sent: {what}")

    def _there(self) -> dict[str, tuple[str, int]]:
        """Returns what identifies each object."""
        return {entry["key"]: _identity(entry) for entry in self._process.ask(do="list", prefix="")["entries"]}

    def check(self) -> None:
        """Raises NebulaError if another export into the same directory has removed or replaced an object of this one."""
        there = self._there()
        for name, (stamp, _) in self._made.items():
            if there.get(name, ("", 0))[0] != stamp:
                raise NebulaStorageError(
                    f"{name} in {config.shown(self._url)} is not this export's any more: another export writes there, too"
                )

    def give_up(self, names: list[str]) -> None:
        """Removes the objects of this export. Beside objects of another one, it removes the last one of `names` alone, if that is its own."""
        there = self._there()
        ours = [name for name, made in self._made.items() if there.get(name) == made]
        if len(ours) < len(self._made) or any(name in there for name in set(names) - set(ours)):
            ours = [name for name in ours if name == names[-1]]
        if ours:
            self._process.ask(do="remove", keys=ours, stamps=[self._made[name][0] for name in ours])

    def close(self) -> None:
        self._process.close()


def write(
    target: str, shards: list[Shard], tensors: Mapping[str, Tensor], tied: Tied, small: Small, replace: bool, moved: Moved
) -> None:
    """The last object makes the directory count: without it, the others are what an export has left that was killed.

    Raises NebulaError. Then the objects of this export are removed as far as the store lets it. Of two exports at once at most one succeeds.
    """
    last = [one for one in small if one[0] in (INDEX, CONFIG)]
    first = [one for one in small if one not in last]
    names = [*(name for name, _ in first), *(shard.name for shard in shards), *(name for name, _ in last)]
    store = _Store(target)
    try:
        there = store.names()
        if names[-1] in there and not replace:
            raise refusal(config.shown(target))
        ours = [name for name in there if name in names or name.endswith((".safetensors", ".safetensors.index.json"))]
        store.remove([name for name in names[:-2:-1] if name in there])  # first the one that a reader looks for
        store.remove(sorted(set(ours) - {names[-1]}))
        try:
            _write(store, first, shards, tensors, tied, last, moved)
        except BaseException:
            store.give_up(names)
            raise
    finally:
        store.close()


def _write(
    store: _Store, first: Small, shards: list[Shard], tensors: Mapping[str, Tensor], tied: Tied, last: Small, moved: Moved
) -> None:
    sums: dict[str, int] = {}
    with Scratch(tempfile.gettempdir()) as folder:
        for name, content in first:
            write_file(folder, name, content)
            store.take(folder, name)
        for shard in shards:
            write_shard(folder, shard, tensors, tied, sums, moved)
            store.take(folder, shard.name)
        store.check()  # no config.json over files of two exports
        for name, content in last:
            write_file(folder, name, content)
            store.take(folder, name)
        store.check()
