"""The weights of a checkpoint of torch.distributed.checkpoint: FSDP2, FSDP with sharded state dicts, and others."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..dcp.places import METADATA, frame
from ..dcp.reader import _MetadataUnpickler
from ..errors import NebulaConfigError, NebulaCorrupt, NebulaError, NebulaNotFound
from .files import File, Files
from .sources import DICTS, Weights, whole_piece
from .tensors import Boxes, Held, Stored, Tensor

__all__ = ["is_in", "read"]

LIGHTNINGS = "meta.pt"  # beside sharded checkpoints of Lightning


def _metadata_files(files: Files) -> list[str]:
    found = [name for name in files.names if name.rpartition("/")[2] == METADATA]
    found = found or [name for name in files.names if name.endswith(METADATA) and name.rpartition("/")[2].startswith("__")]
    return sorted(name for name in found if not name.startswith("optimizer"))  # accelerate has a directory of it beside that of the model


def is_in(files: Files) -> bool:
    """Returns True if the files are those of torch.distributed.checkpoint."""
    return bool(_metadata_files(files))


def read(files: Files, key: str | None) -> Weights:
    names = _metadata_files(files)
    folders = {name.rpartition("/")[0] for name in names}
    if len(folders) > 1:
        raise NebulaConfigError(f"{files} has several checkpoints of torch.distributed.checkpoint: {', '.join(sorted(folders))}")
    folder = _Folder(files, folders.pop(), [_unpickled(name, files.content(name)) for name in names])
    chosen = _chosen(files, folder.paths, key)
    return Weights({name: folder.tensor(full) for name, full in chosen.items()}, has_prefix=LIGHTNINGS in files.names)


class _Folder:
    """The tensors that the metadata of one save describe. If the ranks have saved without collectives, each has metadata of its own."""

    def __init__(self, files: Files, folder: str, parts: list[Metadata]) -> None:
        self._files, self._folder = files, folder
        self._opened: dict[str, File] = {}
        self._described: dict[str, TensorStorageMetadata] = {}
        self._pieces: dict[str, dict[tuple[int, ...], tuple[Any, Any]]] = {}  # by name and offsets: the place and the shape
        self.paths: dict[tuple[str, ...], str] = {}  # the keys that lead to each tensor
        for part in parts:
            for name, described in part.state_dict_metadata.items():
                if isinstance(described, TensorStorageMetadata):
                    self._described[name] = described
                    self.paths[tuple(map(str, (part.planner_data or {}).get(name, name.split("."))))] = name
            for index, info in part.storage_data.items():
                described = part.state_dict_metadata.get(index.fqn)
                if isinstance(described, TensorStorageMetadata):
                    chunk = _chunk_of(described, index)
                    self._pieces.setdefault(index.fqn, {})[tuple(chunk.offsets)] = (info, chunk.sizes)

    def tensor(self, name: str) -> Tensor:
        described = self._described[name]
        dtype = described.properties.dtype
        pieces = self._pieces.get(name, {}).items()
        try:
            return Boxes(described.size, dtype, [(at, _Piece(self._file(name, info), info, shape, dtype)) for at, (info, shape) in pieces])
        except NebulaCorrupt as failure:
            raise NebulaCorrupt(f"{name}: {failure}") from failure

    def _file(self, name: str, info: Any) -> File:
        place = f"{self._folder}/{info.relative_path}" if self._folder else info.relative_path
        if place not in self._files.names:
            raise NebulaNotFound(f"{self._files} has no file {place!r}, in which a rank has saved its part of {name}")
        return self._opened.get(place) or self._opened.setdefault(place, self._files.file(place))


def _unpickled(name: str, content: bytes) -> Metadata:
    try:
        found = _MetadataUnpickler(io.BytesIO(content)).load()
    except (NebulaError, MemoryError):
        raise
    except Exception as failure:  # damaged bytes can ask the unpickler for anything
        raise NebulaCorrupt(f"{name} is damaged ({type(failure).__name__}: {failure})") from failure
    if not isinstance(found, Metadata):
        raise NebulaCorrupt(f"{name} holds a {type(found).__name__} and no metadata")
    return found


def _chunk_of(described: Any, index: Any) -> Any:
    for chunk in described.chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return chunk
    raise NebulaCorrupt(f"the metadata has no chunk at {index.offset} of {index.fqn}")


def _chosen(files: Files, paths: dict[tuple[str, ...], str], key: str | None) -> dict[str, str]:
    """Returns the weights, of a dict that may also hold an optimizer's tensors: {name in the model: name in the metadata}."""
    prefixes = [(key,), tuple(key.split("."))] if key is not None else [*DICTS, ()]
    for prefix in prefixes:  # a path of one part is a name with dots, of a state that was flat when it was saved: no prefix leads into it
        size = len(prefix)
        found = {".".join(path[size:]): name for path, name in paths.items() if path[:size] == prefix and len(path) > size}
        if not prefix:  # beside weights under their own names, other dicts hold what is not of the model
            found = {name: full for name, full in found.items() if (name,) in paths} or found
        if found:
            return found
    known = sorted({path[0] for path in paths})
    raise NebulaConfigError(f"{files} has no weights{f' under {key!r}' if key else ''}; it has: {', '.join(known[:20])}")


_last: tuple[Any, Tensor] | None = None  # the piece that was loaded whole last: its rows are read one after the other


class _Piece(Tensor):
    """One piece of a tensor. If Nebula has written it, its values lie at a known place. Another writer's piece is loaded whole."""

    def __init__(self, file: File, info: Any, shape: Any, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._file, self._info, self._found = file, info, None

    def _tensor(self) -> Tensor:
        if self._found is None:
            before, after = frame(torch.Size(self.shape), self.dtype)
            offset, length = self._info.offset, self._info.length
            if length == len(before) + self.count * self.dtype.itemsize + len(after) and self._file.bytes(offset, len(before)) == before:
                strides = torch.empty(self.shape, device="meta").stride()
                self._found = Stored(self._file, offset + len(before), self.shape, self.dtype, strides)
            else:
                return self._loaded()
        return self._found

    def _loaded(self) -> Tensor:
        global _last
        if _last is not None and _last[0] is self:
            return _last[1]
        _last = None
        try:
            tensor = whole_piece(self._file.bytes(self._info.offset, self._info.length))
        except (pickle.UnpicklingError, RuntimeError) as failure:
            raise NebulaCorrupt(f"{self._file.name}: the piece at byte {self._info.offset} cannot be read: {failure}") from failure
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise NebulaCorrupt(f"{self._file.name}: the piece at byte {self._info.offset} is not as its metadata say")
        _last = (self, Held(tensor))
        return _last[1]

    def read(self, first: int, count: int) -> torch.Tensor:
        return self._tensor().read(first, count)
