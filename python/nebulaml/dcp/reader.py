"""NebulaStorageReader: reads checkpoints of torch.distributed.checkpoint, written by Nebula or by torch, range by range."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import logging
import mmap
import os
import pickle
import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future as TorchFuture

from .. import _nebula
from .._session import config, progress
from ..errors import NebulaConfigError, NebulaCorrupt, NebulaError, NebulaNotFound, NebulaStorageError
from ..integrations import guards, together
from .places import METADATA, frame, is_place, is_stock, reading_session, split

__all__ = ["NebulaStorageReader"]

log = logging.getLogger("nebulaml")

_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard"

# All names that torch's own writers put into metadata. A class outside this list could run any code when it is built.
_NAMES = {
    *((f"{_CHECKPOINT}.metadata", name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    *((f"{_CHECKPOINT}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    (f"{_CHECKPOINT}.planner", "WriteItemType"), (f"{_CHECKPOINT}.planner", "LoadItemType"),
    (f"{_SHARDED}.metadata", "ShardMetadata"), (f"{_SHARDED}.sharded_tensor.metadata", "TensorProperties"),
    (f"{_SHARDED}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"), (f"{_SHARDED}.sharded_tensor.metadata", "ShardedTensorMetadata"),
    ("torch.distributed.remote_device", "_remote_device"),
    ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath"), ("builtins", "set"),
}  # fmt: skip


class _Standing(type):
    """The type of a class that stands for one of torch in a pickle. Calls make torch's objects; a pickle cannot change torch's class."""

    _of: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._of(*args, **kwargs)

    def __setattr__(cls, name: str, value: Any) -> None:
        raise NebulaCorrupt(f"checkpoint metadata changes {cls._of.__qualname__}.{name}, which torch's writers never do: it is not loaded")


def _standing_for(found: Any) -> Any:
    """Returns what a pickle may have in place of a class or a function: one opcode sets attributes of whatever it has."""
    if not callable(found):
        return found

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return found.__new__(found, *args, **kwargs)

    return _Standing("_Standing", (), {"_of": staticmethod(found), "__new__": __new__, "__slots__": ()})


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles metadata, which comes from storage: it builds only what torch's own writers put there, and changes nothing else."""

    def __init__(self, file: io.BytesIO) -> None:
        content = file.read()
        if not _nebula.pickle_is_modest(content):
            raise pickle.UnpicklingError("a memo that is larger than the pickle, or opcodes that torch does not know")
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _standing_for(_enum_member)
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and (module, name) not in _NAMES:
            raise NebulaCorrupt(f"checkpoint metadata names {module}.{name}, which torch's writers never put there: it is not loaded")
        return _standing_for(super().find_class(module, name))


def _enum_member(owner: Any, name: str) -> Any:
    """Returns an enum's member: old pickles name it by getattr. Raises NebulaCorrupt for other objects."""
    owner = owner._of if isinstance(owner, _Standing) else owner
    if isinstance(owner, type) and issubclass(owner, enum.Enum):
        return owner[name]
    raise NebulaCorrupt("checkpoint metadata asks for an attribute of a class that is not an enum: it is not loaded")


class _NebulaFiles:
    """The files of a checkpoint of Nebula, verified, from the fastest place that has them."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint

    def key(self) -> tuple[Any, ...]:
        """Returns what distinguishes this version from others, on all nodes."""
        return together.key_of(self._checkpoint)

    def read_metadata(self, name: str) -> bytes:
        """Returns a file of metadata. A save that wrote the other kind has taken over this one, which names places in older files."""
        written = {one["name"]: one["sequence"] for one in self._checkpoint._report().get("files", []) if one["name"].endswith(METADATA)}
        content = b"" if name in written and written[name] < max(written.values()) else bytes(self._checkpoint.read_bytes(name))
        if not content:  # or an empty file in its place, for torch's own reader
            raise NebulaNotFound(f"{name} of {self._checkpoint.tag!r} is that of an earlier save: the last one has written other metadata")
        return content

    def fetching(self, size: int) -> contextlib.AbstractContextManager[None]:
        """Shows the progress of a load of so many bytes."""
        return progress.fetching(self._checkpoint._engine, f"loading {self._checkpoint.tag}", lambda: size)

    def open(self, name: str) -> _nebula.Map:
        found: _nebula.Map = self._checkpoint._map(name, lazily=True)
        return found


class _PlainFile:
    """A file as a private map: a page is read at its first access, and a write changes only this process's copy."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self.data: Any = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) if size else bytearray()

    def fetch(self, offset: int, size: int) -> None:
        """Does nothing: the system reads pages at their first access."""

    def fetch_parts(self, parts: list[tuple[int, int]]) -> None:
        """Does nothing either."""


class _PlainFiles:
    """The files of a directory that torch's own writer has made. Nothing can verify them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def key(self) -> tuple[Any, ...]:
        """Nothing is known of the directory."""
        return ()

    def _path(self, name: str) -> str:
        if os.path.isabs(name) or ".." in name.split("/"):  # the name comes from the metadata
            raise NebulaCorrupt(f"checkpoint metadata name {name!r}, which lies outside {self._folder}: not read")
        return os.path.join(self._folder, name)

    def read_metadata(self, name: str) -> bytes:
        with open(self._path(name), "rb") as file:
            return file.read()

    def fetching(self, size: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def open(self, name: str) -> _PlainFile:
        return _PlainFile(self._path(name))


class NebulaStorageReader(StorageReader):
    """Reads `path` = <persist>/<tag> from the fastest place that has it: memory, a peer or storage.

    It verifies the bytes and reads only the ranges that this rank needs. It reads a directory of torch's own FileSystemWriter as
    FileSystemReader would. _extension_registry: that of FileSystemReader, for pieces that an extension of torch's writer has transformed.
    """

    def __init__(self, path: Any = None, *, _extension_registry: Any = None) -> None:
        super().__init__()
        self._extensions = _extension_registry
        self._path = None if path is None else os.fspath(path)
        self._files: _NebulaFiles | _PlainFiles | None = None
        self._failure: Exception | None = None  # of the search
        self._metadata: Metadata | None = None
        self._load_id = str(uuid.uuid4())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return is_place(checkpoint_id)

    @property
    def checkpoint_id(self) -> Any:
        return self._path

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)
        self._files = self._metadata = self._failure = None
        self._load_id = str(uuid.uuid4())
        if self._path is None:
            return
        try:
            self._open()  # every rank calls this, so the ranks agree here; torch calls read_metadata on the coordinator alone
        except Exception as failure:
            if not dist.is_initialized() or dist.get_world_size() == 1:
                raise
            self._failure = failure  # torch awaits all ranks after this, and tells all of them what read_metadata raises

    def _open(self) -> _NebulaFiles | _PlainFiles:
        if self._failure is not None:
            raise self._failure
        if self._files is None:
            if self._path is None:
                raise NebulaConfigError("NebulaStorageReader has no path: give one, or a checkpoint_id to the load")
            persist, tag = split(self._path)
            checkpoint = reading_session(persist)._tagged(tag, persist)
            if checkpoint is not None:
                self._files = _NebulaFiles(checkpoint)
            elif is_stock(folder := os.path.join(config.without_scheme(persist), tag)):
                config.refuse_unsigned(folder)
                self._files = _PlainFiles(folder)
            else:
                guards.check_bare(tag, persist)
                raise NebulaNotFound(f"no complete checkpoint {tag!r} in memory or in {config.shown(persist)}")
        return self._files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of all ranks, or of one `rank`. torch asks for those of a rank if there are none of all."""
        rank = kwargs.get("rank")
        name = METADATA if rank is None else f"__{rank}{METADATA}"
        content = self._open().read_metadata(name)
        try:
            metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        except (NebulaError, MemoryError):
            raise
        except Exception as failure:  # damaged bytes can ask the unpickler for anything
            raise NebulaCorrupt(f"{name} of {self._path} is damaged ({type(failure).__name__}: {failure})") from failure
        if not isinstance(metadata, Metadata):
            raise NebulaCorrupt(f"{name} of {self._path} holds a {type(metadata).__name__} and no metadata")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._open().key())

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuses to load different versions of the tag: after a save a search does not wait longer than 5 s for the other ranks."""
        other = next((rank for rank, plan in enumerate(plans) if plan.storage_data != plans[0].storage_data), None)
        if other is not None:
            raise NebulaStorageError(
                f"rank {other} has found another version of {self._path} than rank 0, because not all ranks have saved the newest yet: no rank "
                "loads it. Wait for the save, or start the job again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        assert self._metadata is not None
        places = self._metadata.storage_data
        pieces = {item.storage_index for item in plan.items}  # several items may be parts of one
        with self._open().fetching(sum(places[piece].length for piece in pieces)):
            self._read_files(plan, planner)
        future: TorchFuture[None] = TorchFuture()
        future.set_result(None)
        return future

    def _read_files(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        assert self._metadata is not None
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._metadata.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            file = self._open().open(name)
            whole = memoryview(file.data if isinstance(file, _PlainFile) else file)
            items.sort(key=lambda item: self._metadata.storage_data[item.storage_index].offset)  # type: ignore[union-attr]
            file.fetch_parts([part for item in items for part in self._needed(item, len(whole))])
            for item in items:
                self._read_item(item, file, whole, planner)

    def _needed(self, item: ReadItem, size: int) -> list[tuple[int, int]]:
        """Returns offset and size of the parts of its file that an item needs, if the piece has Nebula's form."""
        assert self._metadata is not None
        info = self._metadata.storage_data[item.storage_index]
        if not 0 <= info.offset <= info.offset + info.length <= size:
            raise NebulaCorrupt(f"{item.storage_index} lies outside {info.relative_path}, which has {size} bytes")
        is_plain = item.type != LoadItemType.BYTE_IO and not _transforms_of(info)
        described = self._form_of(item, info.length) if is_plain else None
        if described is None:
            return [(info.offset, info.length)]
        shape, dtype, before, after = described
        frames = [(info.offset, len(before)), (info.offset + info.length - len(after), len(after))]
        begin, length = _span(_cut(torch.empty(shape, dtype=dtype, device="meta"), item))
        return [*frames, (info.offset + len(before) + begin, length)]

    def _read_item(self, item: ReadItem, file: Any, whole: memoryview, planner: LoadPlanner) -> None:
        assert self._metadata is not None
        info = self._metadata.storage_data[item.storage_index]
        data = whole[info.offset : info.offset + info.length]
        if _transforms_of(info):
            file.fetch(info.offset, info.length)
            self._take_transformed(item, io.BytesIO(data), planner)
            return
        if item.type == LoadItemType.BYTE_IO:
            file.fetch(info.offset, info.length)
            planner.load_bytes(item, io.BytesIO(data))
            return
        target = planner.resolve_tensor(item).detach()
        tensor = self._framed(item, file, data, info.offset)
        if tensor is None:
            file.fetch(info.offset, info.length)
            tensor = _loaded(io.BytesIO(data), item)
        self._fill(item, target, tensor, planner)

    def _take_transformed(self, item: ReadItem, stream: io.BytesIO, planner: LoadPlanner) -> None:
        """Takes a piece that extensions of torch's writer have transformed, by the extensions that its metadata name."""
        # torch 2.4 has no such class, and its metadata name no extensions
        from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms

        assert self._metadata is not None
        names = _transforms_of(self._metadata.storage_data[item.storage_index])
        try:
            plain = io.BytesIO(_StorageReaderTransforms(self._extensions).transform_load_stream(item, names, stream).read(-1))
        except ValueError as failure:  # an extension that is not registered here, or whose package is missing
            raise NebulaConfigError(f"{item.storage_index.fqn} of {self._path} was saved through {names}: {failure}") from failure
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, plain)
        else:
            self._fill(item, planner.resolve_tensor(item).detach(), _loaded(plain, item), planner)

    def _fill(self, item: ReadItem, target: torch.Tensor, tensor: torch.Tensor, planner: LoadPlanner) -> None:
        if target.size() != tensor.size():
            raise NebulaCorrupt(f"{item.storage_index}: stored piece has shape {tuple(tensor.size())}, wanted {tuple(target.size())}")
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _framed(self, item: ReadItem, file: Any, data: memoryview, offset: int) -> torch.Tensor | None:
        """Returns the wanted part of a tensor that has the form in which Nebula writes it, and fetches only that part. Otherwise None."""
        described = self._form_of(item, len(data))
        if described is None:
            return None
        shape, dtype, before, after = described
        for at, text in ((0, before), (len(data) - len(after), after)):
            file.fetch(offset + at, len(text))
            if data[at : at + len(text)] != text:
                return None
        payload = torch.frombuffer(data, dtype=torch.uint8, count=shape.numel() * dtype.itemsize, offset=len(before))
        tensor = _cut(payload.view(dtype).view(shape), item)
        begin, length = _span(tensor)
        file.fetch(offset + len(before) + begin, length)
        return tensor

    def _form_of(self, item: ReadItem, length: int) -> tuple[torch.Size, torch.dtype, bytes, bytes] | None:
        """Returns shape, dtype and the frame of a piece of `length` bytes, or None if Nebula would write it in another length."""
        described = self._chunk_of(item)
        if described is None:
            return None
        shape, dtype = described
        before, after = frame(shape, dtype)
        if shape.numel() == 0 or length != len(before) + shape.numel() * dtype.itemsize + len(after):
            return None
        return shape, dtype, before, after

    def _chunk_of(self, item: ReadItem) -> tuple[torch.Size, torch.dtype] | None:
        """Returns shape and dtype of the stored piece, from the metadata."""
        index = item.storage_index
        assert self._metadata is not None
        found = self._metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(found, TensorStorageMetadata) or found.properties.layout != torch.strided:
            return None
        for chunk in found.chunks:
            if index.offset is None or chunk.offsets == index.offset:
                return torch.Size(chunk.sizes), found.properties.dtype
        return None


def _transforms_of(info: Any) -> Any:
    """Returns the names of the extensions through which a piece was written. torch had none at first."""
    return getattr(info, "transform_descriptors", None) or ()


def _loaded(stream: io.BytesIO, item: ReadItem) -> torch.Tensor:
    return _cut(torch.load(stream, map_location="cpu", weights_only=True), item)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns offset and size in bytes of the part of its storage in which a tensor lies."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.storage_offset() * tensor.element_size(), (last + 1) * tensor.element_size()


def _cut(tensor: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    return tensor
