"""Loads objects from mapped torch files, as torch.load would, but over memory that is mapped already.

For each tensor torch checks three times if it should be a fake one, and searches its place through a file. With many small tensors
that takes most of the time. This module checks once and reads the directory in C. It leaves unusual files to torch.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import functools
import gc
import io
import os
import pickle
import pickletools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import _nebula
from ..errors import NebulaError
from . import lazy, uploading, values

__all__ = ["MapFile", "NotPlain", "read", "read_lazily", "read_own", "read_plain", "read_tensors", "read_weights"]

# smaller storages are copied: a counter such as an optimizer's `step` may outlive the rest, and must not keep the file mapped
OWN_BYTES = 4 << 10

ALL_BYTES = sys.maxsize  # every storage is copied

_CPU = torch.device("cpu")

_Read = tuple[int, int, torch.UntypedStorage]  # offset and size in the file, and the memory

# Functions that build tensors without reading their values.
_REBUILD = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")

_TORCHS_REBUILD = torch._utils._rebuild_tensor_v2  # a program may replace it

# In each thread, torch keeps values here for the functions that rebuild objects. Torch 2.4 keeps them in another place.
_torch_state: Any = getattr(torch.serialization, "_serialization_tls", None) or getattr(torch._utils, "_thread_local_state", None)

# Torch's unpickler for untrusted files raises one of these when it refuses a file. Torch 2.4 raises a RuntimeError.
_REFUSALS = (pickle.UnpicklingError,) if hasattr(torch.serialization, "_serialization_tls") else (pickle.UnpicklingError, RuntimeError)

_RENAMED = {"torch.tensor": "torch._tensor"}  # modules that torch has renamed since old files were written


class MapFile(io.RawIOBase):
    """A map as a file object."""

    def __init__(self, mapped: _nebula.Map) -> None:
        self._mapped = mapped
        self.failure: NebulaError | None = None
        self._view = memoryview(mapped)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self._position, len(self._view))[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        part = self._view[self._position : self._position + len(target)]
        try:
            self._mapped.fetch(self._position, len(part))
        except NebulaError as failure:
            self.failure = failure  # readers in C++ turn this into other errors
            raise
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


class NotPlain(Exception):
    """The file holds more than read_plain can load."""


class _StorageAsValue(NotPlain):
    """A storage is more than the memory of tensors."""


class _Unusual(Exception):
    """The file, or the way to load it, is one that only torch knows."""


class _HoldsCode(pickle.UnpicklingError):
    """An untrusted file is an archive of torch.jit.save."""


class _Records:
    """The records of a file.

    is_whole: all bytes are there. own_bytes: larger storages lie in the map. reads: takes each storage, which then has no values yet.
    file: makes the tensors of read_lazily().
    """

    def __init__(
        self,
        mapped: _nebula.Map,
        storage: torch.UntypedStorage,
        is_whole: bool = False,
        own_bytes: int = OWN_BYTES,
        reads: list[_Read] | None = None,
        file: lazy.File | None = None,
    ) -> None:
        self._mapped, self._storage, self._address = mapped, storage, storage.data_ptr()
        self.file = file
        self.is_whole = is_whole
        self._own_bytes = own_bytes if is_whole or reads is not None else 0  # otherwise the bytes may not be there yet
        self._reads = reads
        try:
            self._places = mapped.records()
        except NebulaError as failure:
            raise _Unusual("not a zip file as torch.save writes it") from failure
        self._folder = next(iter(self._places), "").partition("/")[0]
        begin, self._data = f"{self._folder}/", f"{self._folder}/data/"
        if not all(name.startswith(begin) for name in self._places) or f"{begin}version" not in self._places:
            raise _Unusual("not a zip file as torch.save writes it")
        if f"{begin}constants.pkl" in self._places:
            raise _Unusual("a TorchScript archive")

    def _place(self, name: str) -> tuple[int, int]:
        place = self._places.get(f"{self._folder}/{name}")
        if place is None:
            raise pickle.UnpicklingError(f"the file has no record {name!r}")
        return place

    def has(self, name: str) -> bool:
        return f"{self._folder}/{name}" in self._places

    def content(self, name: str) -> bytes:
        offset, size = self._place(name)
        if self.file is not None:
            return self.file.content(offset, size)
        self._mapped.fetch(offset, size)
        return bytes(memoryview(self._mapped)[offset : offset + size])

    def _offset(self, key: str, size: int) -> int:
        offset, stored = self._places.get(self._data + key) or self._place(f"data/{key}")
        if not 0 <= size <= stored:
            raise pickle.UnpicklingError(f"{size} bytes are asked of data/{key}, which has {stored}")
        return offset

    def address(self, key: str, size: int) -> int:
        """The place in memory of the bytes of a storage."""
        return self._address + self._offset(key, size)

    def stored(self, key: str, dtype: torch.dtype, count: int) -> _Stored:
        return _Stored(self, key, self._offset(key, count * dtype.itemsize), dtype, count)

    def whole(self, offset: int, dtype: torch.dtype, count: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Does storage() for a storage of which a contiguous tensor has all elements, at least one, and returns that tensor."""
        size = count * dtype.itemsize
        if size <= self._own_bytes:
            made = torch.empty(shape, dtype=dtype, device=_CPU)
            if self._reads is None:
                ctypes.memmove(made.data_ptr(), self._address + offset, size)  # copy_ takes longer than all the rest of a small tensor
        else:
            made = torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=offset)
            if len(shape) != 1:
                made.resize_(shape)  # view() would make a view, with rules of its own for autograd
        if self._reads is not None:
            self._reads.append((offset, size, made.untyped_storage()))
        return made

    def forget(self) -> None:
        """Forgets the storages of an unpickler that gave up."""
        if self._reads is not None:
            self._reads.clear()

    def storage(self, key: str, size: int) -> torch.UntypedStorage:
        offset = self._offset(key, size)
        if self._reads is not None:
            is_own = size <= self._own_bytes
            self._reads.append((offset, size, torch.UntypedStorage(size) if is_own else self._storage[offset : offset + size]))
            return self._reads[-1][2]
        if 0 < size <= self._own_bytes:
            own = torch.UntypedStorage(size)
            ctypes.memmove(own.data_ptr(), self._address + offset, size)
            return own
        return self._storage[offset : offset + size]


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None) -> torch.Tensor:
    """Does the same as torch._utils._rebuild_tensor_v2, for a tensor that is not fake."""
    memory = storage._untyped_storage
    tensor = torch.empty((0,), dtype=storage.dtype, device=memory.device).set_(memory, offset, size, stride)
    return _dressed(tensor, grad, hooks, metadata)


def _dressed(tensor: torch.Tensor, grad: Any, hooks: Any, metadata: Any) -> torch.Tensor:
    """Gives a new tensor what its pickle has beside values."""
    if grad is not False:
        tensor.requires_grad = grad
    if metadata:
        torch._utils.set_tensor_metadata(tensor, metadata)
    if hooks:
        tensor._backward_hooks = hooks
    return tensor


@functools.lru_cache(4096)
def _elements(shape: tuple[Any, ...], stride: tuple[Any, ...]) -> int:
    """Returns the number of elements of a tensor that torch.empty() would make with this stride, else -1."""
    count = 1
    if len(shape) != len(stride) or not all(type(size) is int for size in shape):
        return -1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if step != count:
            return -1
        count *= max(size, 1)
    return count if all(shape) else 0


class _Stored:
    """A storage of the file on the CPU, in place of torch's object. The first tensor that needs its memory makes it: most tensors have one of
    their own, and one call of torch makes both."""

    __slots__ = ("__weakref__", "_count", "_dtype", "_first", "_key", "_memory", "_offset", "_records")

    def __init__(self, records: _Records, key: str, offset: int, dtype: torch.dtype, count: int) -> None:
        self._records, self._key, self._offset, self._dtype, self._count = records, key, offset, dtype, count
        self._first: torch.Tensor | None = None
        self._memory: torch.UntypedStorage | None = None

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a storage has no state")

    def tensor(self, offset: Any, shape: Any, stride: Any) -> torch.Tensor:
        if self._first is None and self._memory is None and offset == 0 and type(shape) is type(stride) is tuple:
            if _elements(shape, stride) == self._count:
                self._first = self._records.whole(self._offset, self._dtype, self._count, shape)
                return self._first
        return torch.empty((0,), dtype=self._dtype, device=_CPU).set_(self.memory(), offset, shape, stride)

    def memory(self) -> torch.UntypedStorage:
        if self._memory is None:
            whole = self._first
            self._memory = self._records.storage(self._key, self._count * self._dtype.itemsize) if whole is None else whole.untyped_storage()
        return self._memory

    def typed(self) -> torch.storage.TypedStorage:
        return torch.storage.TypedStorage(wrap_storage=self.memory(), dtype=self._dtype, _internal=True)


class _Rebuild:
    """A function that a pickle may call, but not change: BUILD sets attributes."""

    __slots__ = ("__weakref__", "_function")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def is_of(self, function: Callable[..., Any]) -> bool:
        return self._function is function

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a function has no state")


class _Unpickler(pickle.Unpickler):
    """Python's own unpickler, in C, with torch's additions."""

    def __init__(self, records: _Records, content: bytes, map_location: Any) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._records = records
        self._restore = torch.serialization._get_restore_location(map_location)
        self._storages: dict[str, torch.storage.TypedStorage] = {}

    def persistent_load(self, saved: Any) -> Any:
        if type(saved) is not tuple or len(saved) != 5 or saved[0] != "storage":
            raise pickle.UnpicklingError(f"a storage is referred to by a {type(saved).__name__} of another form")
        _, storage_type, key, location, count = saved
        found = self._storages.get(key)
        if found is None:
            dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
            storage = self._stored(key, count * dtype.itemsize, location)
            found = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
            if count and found._data_ptr():  # for an empty one torch makes another for each reference, perhaps with another dtype
                self._storages[key] = found
        return found

    def _stored(self, key: str, size: int, location: Any) -> Any:
        """The storage where it belongs."""
        return self._restore(self._records.storage(key, size), location)

    def find_class(self, module: str, name: str) -> Any:
        if "Storage" in name:
            with contextlib.suppress(KeyError):
                return torch.serialization.StorageType(name)
        return self.find(_RENAMED.get(module, module), name)

    def find(self, module: str, name: str) -> Any:
        return super().find_class(module, name)


class _PlainUnpickler(_Unpickler):
    """Loads tensors in plain containers. It reaches nothing else, and builds no object that has read the values of a tensor.

    A function that rebuilds tensors may also be a value of the file: torch's own loader gives torch's.
    """

    _is_fit = staticmethod(_nebula.pickle_is_modest)

    def __init__(self, records: _Records, content: bytes, map_location: Any, is_typed: bool = False) -> None:
        """is_typed: each storage is torch's own object from the start."""
        if not self._is_fit(content):
            raise NotPlain("a memo that is larger than the pickle, or opcodes that torch does not know")
        super().__init__(records, content, map_location)
        self._functions: list[weakref.ref[_Rebuild]] = []
        self._uploads = uploading.Uploads(map_location) if records.is_whole else None
        self._later: dict[str, _Stored] = {}
        self._stays: dict[str, bool] | None = None if is_typed or callable(map_location) else {}  # by location

    def persistent_load(self, saved: Any) -> Any:
        if self._stays is not None and type(saved) is tuple and len(saved) == 5 and type(saved[2]) is type(saved[3]) is str:
            name, kind, key, location, count = saved
            found = self._later.get(key)
            if found is not None:
                return found
            if name == "storage" and type(count) is int and count > 0 and key not in self._storages and kind is not torch.UntypedStorage:
                if self._stays.get(location) or self._is_staying(self._stays, location):
                    self._later[key] = found = self._records.stored(key, kind.dtype, count)
                    return found
        return super().persistent_load(saved)

    def _is_staying(self, known: dict[str, bool], location: str) -> bool:
        """Returns True if storages of that location are loaded into ordinary memory."""
        if location not in known:
            probe = torch.UntypedStorage(0, device="meta")
            known[location] = False
            with contextlib.suppress(Exception):  # the way of all other storages says what is wrong
                known[location] = self._restore(probe, location) is probe and (self._uploads is None or self._uploads.place(location) is None)
        return known[location]

    def _stored(self, key: str, size: int, location: Any) -> Any:
        place = self._uploads.place(location) if self._uploads is not None and isinstance(location, str) else None
        if self._uploads is None or place is None:
            return super()._stored(key, size, location)
        storage = self._uploads.empty(place, size)
        if size:
            self._uploads.add(place, self._records.address(key, size), storage, 0, size)
        return storage

    def load(self) -> Any:
        found = super().load()
        self.memo = {}
        if any(function() is not None for function in self._functions):
            raise NotPlain("a function as a value")
        self._storages, stored, self._later = {}, [weakref.ref(one) for one in self._later.values()], {}
        if any(one() is not None for one in stored):
            raise _StorageAsValue("a storage as a value")
        if self._uploads is not None:
            self._uploads.run()
        return found

    def find(self, module: str, name: str) -> Any:
        found = _plain(module, name)
        if isinstance(found, _Rebuild):
            found = self._rebuild(name, found)
            self._functions.append(weakref.ref(found))
        return found

    def _rebuild(self, name: str, function: _Rebuild) -> _Rebuild:
        """Returns the function that rebuilds a tensor, in place of torch's of that name."""
        if function.is_of(_rebuild_tensor):
            return _Rebuild(self._tensor)
        return _Rebuild(lambda *args: function(*[arg.typed() if type(arg) is _Stored else arg for arg in args]))

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None) -> torch.Tensor:
        if type(storage) is not _Stored:
            return _rebuild_tensor(storage, offset, size, stride, grad, hooks, metadata)
        return _dressed(storage.tensor(offset, size, stride), grad, hooks, metadata)


def _plain(module: str, name: str) -> Any:
    """Returns what a pickle of tensors in plain containers needs by a name."""
    if module == "torch._utils" and name in _REBUILD:
        function = getattr(torch._utils, name)
        return _Rebuild(_rebuild_tensor if function is _TORCHS_REBUILD else function)
    if (module, name) == ("collections", "OrderedDict"):
        return OrderedDict
    found = vars(torch).get(name) if module == "torch" else None  # getattr would import parts of torch by their names
    if found is torch.Size or isinstance(found, torch.dtype):
        return found
    raise NotPlain(f"{module}.{name}")


class _SafeUnpickler(_PlainUnpickler):
    """As safe as torch's unpickler for weights_only, which is written in Python: the limits of that one apply here, too."""

    _is_fit = staticmethod(_nebula.pickle_is_torchs)


class _LazyUnpickler(_PlainUnpickler):
    """Loads tensors on the CPU, most of which have no values yet. The bytes of all others are read at the end."""

    def __init__(self, records: _Records, content: bytes, map_location: Any) -> None:
        super().__init__(records, content, map_location)
        self._handles: list[weakref.ref[Any]] = []

    def _stored(self, key: str, size: int, location: Any) -> Any:
        probe = torch.UntypedStorage(size, device="meta")  # the program's function must not see memory without values
        try:
            stays = self._restore(probe, location) is probe
        except Exception as failure:  # torch's own loader has the last word
            raise NotPlain(str(failure)) from failure
        if not stays:
            raise NotPlain("not on the CPU")
        return self._records.storage(key, size)

    def persistent_load(self, saved: Any) -> Any:
        found = super().persistent_load(saved)
        self._handles.append(weakref.ref(found))
        return found

    def _rebuild(self, name: str, function: _Rebuild) -> _Rebuild:
        if name == "_rebuild_tensor_v2":
            return _Rebuild(self._tensor)
        raise NotPlain(name)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None) -> torch.Tensor:
        if grad or hooks or metadata:
            raise NotPlain("a tensor with more than values")
        plain = super()._tensor(storage, offset, size, stride, grad, hooks)
        assert self._records.file is not None
        return self._records.file.tensor(plain)

    def load(self) -> Any:
        found = super().load()
        if any(handle() is not None for handle in self._handles):
            raise NotPlain("a storage as a value")
        return found


class _LazySafe(_LazyUnpickler, _SafeUnpickler):
    pass


class _ValueUnpickler(_SafeUnpickler):
    """Loads the values of values.py, too."""

    def find(self, module: str, name: str) -> Any:
        found = values.find(module, name)
        return super().find(module, name) if found is None else found

    def load(self) -> Any:
        try:
            return values.resolved(super().load())
        except (NebulaError, MemoryError, NotPlain):
            raise
        except Exception as failure:  # whatever a file makes of the stand-ins, torch's loader has the last word
            raise NotPlain(str(failure)) from failure


_TENSOR = object()  # stands for the class torch.Tensor


def _rebuild_data(data: Any, *_: Any) -> Any:
    return data


def _rebuild_typed(function: Any, kind: Any, arguments: tuple[Any, ...], *_: Any) -> Any:
    return function(*arguments) if kind is _TENSOR and isinstance(function, _Rebuild) else values.Unknown()


class _TensorUnpickler(_PlainUnpickler):
    """Loads tensors and plain values, and builds nothing else."""

    _ATTRIBUTED = {  # of tensors that have attributes of a framework, which are left out
        ("torch._utils", "_rebuild_parameter_with_state"): _Rebuild(_rebuild_data),
        ("torch._tensor", "_rebuild_from_type_v2"): _Rebuild(_rebuild_typed),
        ("torch", "Tensor"): _TENSOR,
    }

    def find(self, module: str, name: str) -> Any:
        if (module, name) in self._ATTRIBUTED:
            return self._ATTRIBUTED[module, name]
        try:
            return super().find(module, name)
        except NotPlain:
            return values.Unknown


_rest_lock = threading.RLock()  # guards the next two; an RLock, because a signal handler may load while its thread holds it
_resting = 0  # number of running loads that have turned the cycle collector off
_was_enabled = False  # before the first of them


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Turns the cycle collector off: it would search again and again through objects that are all in use."""
    global _resting, _was_enabled
    is_counted = False
    try:
        with _rest_lock:
            if not _resting:
                _was_enabled = gc.isenabled()
            _resting += 1
            is_counted = True
            gc.disable()
        yield
    finally:
        with _rest_lock:
            _resting -= is_counted
            if not _resting and _was_enabled:
                gc.enable()


def _after_fork() -> None:
    """Resets the state in a forked child, which has none of the threads that load."""
    global _rest_lock, _resting
    _rest_lock = threading.RLock()
    if _resting and _was_enabled:
        gc.enable()
    _resting = 0


def _unpickle(kind: type[_Unpickler], records: _Records, map_location: Any) -> Any:
    content = records.content("data.pkl")
    with _uncollected():
        try:
            return kind(records, content, map_location).load()
        except _StorageAsValue:
            if not issubclass(kind, _PlainUnpickler) or records.file is not None:
                raise
            records.forget()
            return kind(records, content, map_location, is_typed=True).load()


def _unpickled(kind: type[_Unpickler], mapped: _nebula.Map, map_location: Any, storage: torch.UntypedStorage, **how: Any) -> Any:
    """how: the further arguments of _Records."""
    if (  # not every torch has the first three
        _torch_state is None
        or not hasattr(torch.serialization, "_get_restore_location")
        or not hasattr(torch.serialization, "StorageType")
        or getattr(_torch_state, "skip_data", False)
        or torch._guards.detect_fake_mode(None) is not None
        or map_location in ("meta", torch.device("meta"))
    ):
        raise _Unusual("the pickle holds no tensors with values")
    records = _Records(mapped, storage, **how)
    if not records.has("byteorder") or records.content("byteorder") != sys.byteorder.encode():
        raise _Unusual("other byte order")
    _torch_state.map_location = map_location  # for objects that other functions rebuild
    compiler = sys.modules.get("torch._dynamo")  # it cannot trace this code; if it was never imported, nothing is compiled
    load = compiler.disable(_unpickle) if compiler else _unpickle
    try:
        return load(kind, records, map_location)
    finally:
        _torch_state.map_location = None


def read(mapped: _nebula.Map, map_location: Any, storage: torch.UntypedStorage, own_bytes: int = OWN_BYTES) -> Any:
    """Returns the object of a trusted file. Storages of more than ``own_bytes`` lie in the map."""
    if own_bytes != ALL_BYTES:  # of most files: faster, and onto a device by several streams
        with contextlib.suppress(NotPlain):
            return _read_plain(_PlainUnpickler, mapped, map_location, storage, is_whole=True, own_bytes=own_bytes)
    try:
        found = _unpickled(_Unpickler, mapped, map_location, storage, is_whole=True, own_bytes=own_bytes)
    except _Unusual:
        return _with_torch(pickle, mapped, map_location, _shared(storage, own_bytes))
    torch._utils._validate_loaded_sparse_tensors()
    return found


def read_plain(mapped: _nebula.Map, map_location: Any, storage: torch.UntypedStorage) -> Any:
    """Returns the object of a file of tensors and plain values in plain containers. Raises NotPlain before it builds anything else.

    The bytes of tensors may still be in storage: all tensors lie in ``storage``.
    """
    try:
        return _read_plain(_PlainUnpickler, mapped, map_location, storage, is_whole=False)
    except NotPlain:
        return _read_plain(_ValueUnpickler, mapped, map_location, storage, is_whole=False)


def read_own(mapped: _nebula.Map, storage: torch.UntypedStorage) -> Any:
    """Does read_plain() on the CPU, with tensors in memory of their own. It reads each of their bytes once, from memory or storage."""
    reads: list[_Read] = []
    try:
        found = _read_plain(_PlainUnpickler, mapped, "cpu", storage, reads=reads, own_bytes=ALL_BYTES)
    except NotPlain:
        reads.clear()
        found = _read_plain(_ValueUnpickler, mapped, "cpu", storage, reads=reads, own_bytes=ALL_BYTES)
    mapped.read(_parts(reads))
    return found


def read_lazily(mapped: _nebula.Map, map_location: Any, storage: torch.UntypedStorage, is_safe: bool) -> Any:
    """Does what read() does, or read_weights(), with tensors of lazy.py. Raises NotPlain if the file holds more than these can be."""
    reads: list[_Read] = []
    file = lazy.File(mapped, storage)
    found = _read_plain(_LazySafe if is_safe else _LazyUnpickler, mapped, map_location, storage, reads=reads, file=file)
    mapped.read([(offset, size, address) for offset, size, address in _parts(reads) if address != storage.data_ptr() + offset])
    return found


def _parts(reads: list[_Read]) -> list[tuple[int, int, int]]:
    """Returns the reads for Map.read()."""
    parts, end = [], 0
    for offset, size, memory in sorted((read for read in reads if read[1]), key=lambda read: read[0]):
        if offset < end:
            raise NotPlain("records that overlap")
        parts.append((offset, size, memory.data_ptr()))
        end = offset + size
    return parts


def _read_plain(kind: type[_Unpickler], mapped: _nebula.Map, map_location: Any, storage: torch.UntypedStorage, **how: Any) -> Any:
    if copyreg._extension_registry:  # its codes are looked up without find_class
        raise NotPlain("copyreg")
    try:
        return _unpickled(kind, mapped, map_location, storage, **how)
    except _Unusual as failure:
        raise NotPlain(str(failure)) from failure


def read_tensors(mapped: _nebula.Map, storage: torch.UntypedStorage, is_whole: bool = True) -> Any:
    """Returns the tensors and plain values of a file, on the CPU. It looks up no class and runs no code of the file. Raises NotPlain.

    is_whole: all bytes are there. Otherwise all tensors lie in ``storage``.
    """
    return _read_plain(_TensorUnpickler, mapped, "cpu", storage, is_whole=is_whole)


def read_weights(mapped: _nebula.Map, map_location: Any, storage: torch.UntypedStorage, own_bytes: int = OWN_BYTES) -> Any:
    """Returns the object of a file that is not trusted, as torch.load does with weights_only=True. own_bytes: as in read()."""
    try:
        return _read_plain(_SafeUnpickler, mapped, map_location, storage, is_whole=True, own_bytes=own_bytes)
    except NotPlain:
        pass
    try:
        return _with_torch(torch._weights_only_unpickler, mapped, map_location, _shared(storage, own_bytes))
    except (NebulaError, _HoldsCode):
        raise
    except _REFUSALS as failure:
        needed = _needed(mapped, storage)
        more = f"It needs {', '.join(needed)}: allow them by torch.serialization.add_safe_globals([...]), or load" if needed else "Load"
        raise pickle.UnpicklingError(
            f"{str(failure).rstrip('.')}. The file holds more than tensors and plain values. {more} it with weights_only=False if you trust it"
        ) from None


def refused(content: bytes | memoryview) -> list[str]:
    """Returns the names in a pickle for which neither read_plain() nor torch's unpickler for untrusted files would load it."""
    reader = values.NameReader(content)
    try:
        reader.load()
        unpickler = torch._weights_only_unpickler
        known = {*unpickler._get_allowed_globals(), *unpickler._get_user_allowed_globals()}
    except Exception:  # parts of torch that are not in every release
        return []
    is_value = {f"{module}.{name}": "Storage" in name or _is_value(module, name) for module, name in reader.names}
    beyond_torch = {name for name in is_value if name not in known and "Storage" not in name}
    if all(is_value.values()) or not beyond_torch:
        return []
    return sorted({name for name in beyond_torch if not is_value[name]} or beyond_torch)


def _is_value(module: str, name: str) -> bool:
    try:
        return values.find(module, name) is not None or _plain(module, name) is not None
    except NotPlain:
        return False


def _needed(mapped: _nebula.Map, storage: torch.UntypedStorage) -> list[str]:
    """Returns the names beyond tensors and plain values that a file needs, as far as torch knows."""
    try:
        unpickler = torch._weights_only_unpickler
        content = _Records(mapped, storage).content("data.pkl")
        known = {*unpickler._get_allowed_globals(), *unpickler._get_user_allowed_globals()}
        if hasattr(unpickler, "get_globals_in_pkl"):
            return sorted(set(unpickler.get_globals_in_pkl(io.BytesIO(content))) - known)
        # torch 2.4, whose unpickler knows no other opcode that looks up a name
        return sorted({name.replace(" ", ".") for opcode, name, _ in pickletools.genops(content) if opcode.name == "GLOBAL"} - known)
    except Exception:  # this is only a hint, made with parts of torch that are not in every release
        return []


class _Slices:
    """The memory in which torch's own loader shall leave the tensors. An empty part has no address, as torch expects."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def __getitem__(self, part: slice) -> torch.UntypedStorage:
        return self._storage[part] if part.stop > part.start else torch.UntypedStorage(0)


def _shared(storage: torch.UntypedStorage, own_bytes: int) -> _Slices | None:
    """Returns that memory. None: torch's loader copies each storage."""
    return None if own_bytes == ALL_BYTES else _Slices(storage)


def _with_torch(module: Any, mapped: _nebula.Map, map_location: Any, storage: _Slices | None) -> Any:
    """Does the same as torch.load(path, mmap=True), over memory instead of a path; without ``storage``, as torch.load(path)."""
    file = MapFile(mapped)
    try:
        with torch.serialization._open_zipfile_reader(file) as archive:
            if not torch.serialization._is_torchscript_zip(archive):
                return torch.serialization._load(archive, map_location, module, overall_storage=storage, encoding="utf-8")
        if module is not pickle:
            raise _HoldsCode("the file is a TorchScript archive, which holds code: load it with weights_only=False if you trust it")
        file.seek(0)
        return torch.jit.load(file, map_location=map_location)
    except Exception:
        if file.failure:
            raise file.failure from None
        raise


os.register_at_fork(after_in_child=_after_fork)
