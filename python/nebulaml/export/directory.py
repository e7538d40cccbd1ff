"""Writes a Hugging Face directory: safetensors files of bounded size, their index, the configuration. It appears by one rename."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import _nebula
from ..errors import NebulaConfigError, NebulaCorrupt, NebulaError
from ..integrations.redirect import SAFETENSORS_DTYPES
from . import card
from .naming import CONFIG, Config
from .tensors import Tensor

__all__ = ["Scratch", "Shard", "Staging", "describe", "index_of", "shard_of", "shards_of", "write"]

INDEX = "model.safetensors.index.json"
Tied = list[tuple[str, Tensor, str]]  # name, tensor, and the name that the directory keeps
Small = list[tuple[str, bytes | Path]]  # the files beside the weights
Moved = Callable[[int], None]  # is called with the bytes that were written since the last call

SLICE_BYTES = 64 << 20  # of memory for one slice before its cast


@dataclasses.dataclass
class Shard:
    """One safetensors file. places: dtype, offset and size in bytes of each tensor, in the order of the file."""

    name: str
    header: bytes
    places: dict[str, tuple[torch.dtype, int, int]]
    size: int


def _dtype_of(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Only floats of 16 bits or more are cast: smaller ones have scales beside them."""
    return dtype if dtype is not None and tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 else tensor.dtype


def shards_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None, most: int) -> list[Shard]:
    """Divides the tensors, in their order, into files of at most `most` bytes. A tensor that is larger has a file of its own."""
    groups: list[dict[str, torch.dtype]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        kind = _dtype_of(tensor, dtype)
        more = tensor.count * kind.itemsize
        if groups[-1] and size + more > most:
            groups.append({})
            size = 0
        groups[-1][name] = kind
        size += more
    if len(groups) == 1:
        return [shard_of("model.safetensors", groups[0], tensors)]
    return [shard_of(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group, tensors) for i, group in enumerate(groups, 1)]


def shard_of(name: str, kinds: Mapping[str, torch.dtype], tensors: Mapping[str, Tensor], said: Mapping[str, str] | None = None) -> Shard:
    """Lays out one file. kinds: the dtype of each tensor in it. said: texts for its metadata."""
    for one, kind in kinds.items():
        if str(kind) not in SAFETENSORS_DTYPES:
            raise NebulaConfigError(f"{one} has the dtype {kind}, which safetensors cannot hold")
    ordered = sorted(kinds, key=lambda one: (-kinds[one].itemsize, one))  # by falling alignment, as the format's own writer does
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(said or {})}}
    places, at = {}, 0
    for one in ordered:
        size = tensors[one].count * kinds[one].itemsize
        header[one] = {"dtype": SAFETENSORS_DTYPES[str(kinds[one])], "shape": list(tensors[one].shape), "data_offsets": [at, at + size]}
        places[one] = (kinds[one], at, size)
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    return Shard(name, text, {one: (kind, len(text) + begin, size) for one, (kind, begin, size) in places.items()}, len(text) + at)


def describe(shards: list[Shard], config: Config) -> bytes | None:
    """Returns config.json, or None if there is no configuration."""
    kinds = {kind for shard in shards for kind, _, size in shard.places.values() if kind.is_floating_point and size}
    return None if config.values is None else config.text(kinds.pop() if len(kinds) == 1 else None)


def index_of(shards: list[Shard], tensors: Mapping[str, Tensor]) -> bytes | None:
    """Returns the index, or None for one file."""
    if len(shards) == 1:
        return None
    about = {
        "total_parameters": sum(tensor.count for tensor in tensors.values()),
        "total_size": sum(size for shard in shards for _, _, size in shard.places.values()),
    }
    names = {name: shard.name for shard in shards for name in shard.places}
    return json.dumps({"metadata": about, "weight_map": dict(sorted(names.items()))}, indent=2).encode() + b"\n"


def slices(tensor: Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the elements of a tensor, a slice at a time, with the number of the first."""
    step = max(1, SLICE_BYTES // (tensor.dtype.itemsize * tensor.unit)) * tensor.unit
    for first in range(0, tensor.count, step):
        yield first, tensor.read(first, min(step, tensor.count - first))


def cast(found: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Rounds to the nearest value of the dtype, ties to even. A double goes to 16 bits in one step."""
    if found.dtype == torch.float64 and kind in (torch.bfloat16, torch.float16):
        found = _to_odd(found)
    return found.to(kind).contiguous()


def _to_odd(found: torch.Tensor) -> torch.Tensor:
    """Returns floats that round to the same 16 bits as these doubles: a float that is not exact gets an odd last bit."""
    near = found.to(torch.float32)
    back = near.to(torch.float64)
    bits = near.view(torch.int32)
    is_even = (bits & 1) == 0
    is_finite = torch.isfinite(near) & torch.isfinite(found)
    grows = (found.abs() > back.abs()) & is_even & is_finite
    shrinks = (found.abs() < back.abs()) & is_even & is_finite
    return (bits + grows.to(torch.int32) - shrinks.to(torch.int32)).view(torch.float32)


def sum_of(tensor: Tensor, kind: torch.dtype) -> int:
    """Returns the CRC-64 of a tensor as it would be written with that dtype."""
    total = 0
    for _, found in slices(tensor):
        made = cast(found, kind)
        total = _nebula.sum_bytes(_bytes(made), total)
    return total


def _bytes(tensor: torch.Tensor) -> Any:
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""


def write(folder: str, shard: Shard, tensors: Mapping[str, Tensor], moved: Moved) -> dict[str, int]:
    """Writes one file, syncs it, and compares what the disk has with what was written. Returns the CRC-64 of each tensor."""
    path = os.path.join(folder, shard.name)
    output = _nebula.Output(path, shard.size)
    head = output.write(0, shard.header, 0)
    sums = {}
    for name, (kind, offset, _) in shard.places.items():
        total = 0
        for first, found in slices(tensors[name]):
            made = cast(found, kind)
            total = output.write(offset + first * kind.itemsize, _bytes(made), total)
            moved(made.numel() * kind.itemsize)
        sums[name] = total
    output.sync()
    read = _nebula.read_sums(path, [(0, len(shard.header)), *((offset, size) for _, offset, size in shard.places.values())])
    for name, wanted, found in zip(["the header", *sums], [head, *sums.values()], read, strict=True):
        if wanted != found:
            raise NebulaCorrupt(f"{name} of {path} is not as it was written: the checksum is {found:016x}, it should be {wanted:016x}")
    return sums


def write_file(folder: str, name: str, content: bytes | Path) -> None:
    content = content.read_bytes() if isinstance(content, Path) else content
    path = os.path.join(folder, name)
    output = _nebula.Output(path, len(content))
    total = output.write(0, content, 0)
    output.sync()
    if _nebula.read_sums(path, [(0, len(content))]) != [total]:
        raise NebulaCorrupt(f"{path} is not as it was written")


class Scratch:
    """A directory in `parent` for files that are being made. It goes at the end of the block.

    If the process dies, the next export into the same parent removes it.
    """

    def __init__(self, parent: str) -> None:
        self._parent = parent

    def __enter__(self) -> str:
        for path, lock in _nebula.staging_left(self._parent):
            shutil.rmtree(path, ignore_errors=True)
            _nebula.staging_end(path, lock)
        self._path, self._lock = _nebula.staging_make(self._parent)
        return self._path

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: Any) -> None:
        try:
            if failure is None:
                self._finish()
        finally:
            shutil.rmtree(self._path, ignore_errors=True)  # also what it has replaced
            _nebula.staging_end(self._path, self._lock)

    def _finish(self) -> None:
        pass


class Staging(Scratch):
    """A directory beside the final one, which takes its name at the end of the block, unless the block fails."""

    def __init__(self, target: str, replace: bool) -> None:
        super().__init__(os.path.dirname(target))
        self._target, self._replace = target, replace

    def _finish(self) -> None:
        _nebula.staging_place(self._path, self._target, self._parent, self._replace and os.path.isdir(self._target))


def refusal(target: str) -> NebulaError:
    failure = NebulaConfigError(f"{target} exists already; remove it, or ask to replace it")
    failure.status = "busy"
    return failure


def check_target(target: str, replace: bool) -> None:
    """Raises before any work if the directory exists. An empty one is none."""
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.path.islink(target) and (replace or not os.listdir(target))):
        raise refusal(target)


def small_files(config: Config, described: bytes | None, index: bytes | None, readme: bytes | None) -> Small:
    """Returns the files beside the weights, in the order in which a store shall get them: a reader that sees config.json sees all."""
    made = [(card.FILE, readme), (INDEX, index), (CONFIG, described)]
    return [*config.files.items(), *((name, content) for name, content in made if content is not None)]


def write_shard(
    folder: str, shard: Shard, tensors: Mapping[str, Tensor], tied: Tied, sums: dict[str, int], moved: Moved
) -> None:
    """Writes one file, and compares tied tensors of it with those that they stand for. `sums`: of all tensors that were written."""
    sums.update(write(folder, shard, tensors, moved))
    for left, tensor, kept in tied:
        if kept not in shard.places or (tensor.identity is not None and tensor.identity == tensors[kept].identity):
            continue
        if tensor.shape != tensors[kept].shape or sum_of(tensor, shard.places[kept][0]) != sums[kept]:
            raise NebulaConfigError(f"{left} is tied to {kept} in the model, and the checkpoint has other values of it: the model's "
                                    "configuration must say that they are not tied")  # fmt: skip


def write_directory(
    target: str, shards: list[Shard], tensors: Mapping[str, Tensor], tied: Tied, small: Small, replace: bool, moved: Moved
) -> None:
    sums: dict[str, int] = {}
    with Staging(target, replace) as folder:
        for shard in shards:
            write_shard(folder, shard, tensors, tied, sums, moved)
        for name, content in small:
            write_file(folder, name, content)
