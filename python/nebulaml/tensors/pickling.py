"""Converts objects to a pickle and a list of memory ranges.

The pickle equals torch.save's, byte for byte. The storages that it refers to stay where they are, so that C copies each once.
"""

from __future__ import annotations

import collections
import copyreg
import io
import logging
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from .. import _nebula
from ..errors import NebulaConfigError, NebulaError, NebulaPicklingError
from . import buffers, dense, device
from .buffers import Capture

__all__ = ["Capture", "capture", "file_parts", "outline", "ranges", "unprotectable"]

log = logging.getLogger("nebulaml")

PATH_PARTS = 100  # the longest path that an error names; no training state is as deep

UNPROTECTED_BYTES = 64 << 10  # smaller ranges are copied at once in any case (see COW_PART_BYTES)


MANY = 500  # tensors, from which on the way that is taken matters


_slow_said = False

_OWN = (torch.Tensor, torch.nn.Parameter, collections.OrderedDict)  # pickled here without Python's pickler

_REDUCTIONS = tuple(kind.__reduce_ex__ for kind in _OWN)

_SIMPLE = (str, bytes, int, float, bool, type(None))


def _describer() -> Any:
    copies: dict[int, Any] = {}

    def describe(obj: Any) -> tuple[Any, ...]:
        if isinstance(obj, torch.storage.TypedStorage):
            owner = obj._untyped_storage
            dtype = obj.dtype
            storage_type = getattr(torch, obj._pickle_storage_type())
            count = obj._size()
        else:
            owner = obj
            dtype = torch.uint8
            storage_type = torch.serialization.normalize_storage_type(type(obj))
            count = obj.nbytes()
        fake_device = getattr(obj, "_fake_device", None)
        location = str(fake_device) if fake_device is not None else torch.serialization.location_tag(owner)
        kind = owner.device.type
        if kind == "cpu" or device.covers(owner):
            return owner, owner, dtype, storage_type, location, count
        if owner._cdata not in copies:
            copies[owner._cdata] = owner.cpu()
        return owner, copies[owner._cdata], None if kind == "meta" else dtype, storage_type, location, count

    return describe


def _odd_part(obj: Any, takes_cuda: bool) -> tuple[str, str]:
    """The first part of a state that is not plain: the way to it, and its type."""
    path = ""
    for _ in range(PATH_PARTS):
        parts = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, (list, tuple)) else ()
        for key, value in parts:
            if _nebula.plain_dump(value, takes_cuda) is None:
                path, obj = f"{path}[{key!r}]", value
                break
        else:
            break
    return path, type(obj).__qualname__


def _say_slow(obj: Any, takes_cuda: bool, count: int) -> None:
    """Once, for a state so large that it costs milliseconds."""
    global _slow_said
    if _slow_said or count < MANY:
        return
    _slow_said = True
    try:
        path, kind = _odd_part(obj, takes_cuda)
    except Exception:  # the pickler says what is wrong with the state
        return
    log.info(
        "nebula: a state of %d tensors is pickled part by part, some microseconds for each, because of one part: state%s is a %s. Saved as "
        "a file of its own it would not slow the others down", count, path, kind,
    )  # fmt: skip


def _dump(obj: Any) -> Capture:
    takes_cuda = device.takes_cuda()
    plain = _nebula.plain_dump(obj, takes_cuda)
    found = _pickled(obj) if plain is None else plain
    if plain is None:
        _say_slow(obj, takes_cuda, len(found[1]))
    if plain is None or not takes_cuda:
        device.find(found[1])
    return Capture(*found, is_plain=plain is not None)


def _pickled(obj: Any) -> tuple[memoryview, _nebula.Ranges]:
    file = io.BytesIO()
    pickler = _nebula.TorchPickler(file, _describer())
    pickler.dump(obj)
    return file.getbuffer(), pickler.storages


def capture(obj: Any, name: str = "object", overlap: bool = False) -> Capture:
    """Returns the pickle and the storages of anything that torch.save takes. See device.py for ``overlap``.

    Raises NebulaPicklingError, with the path inside the object, if torch.save cannot write it either.
    """
    taken = outline(obj, name)
    if taken.whole:
        return taken
    return taken._replace(filler=device.plan(taken.storages, overlap), unprotectable=unprotectable(taken.storages))


def outline(obj: Any, name: str = "object") -> Capture:
    """Does the part of capture() that begins no copy. Raises like that."""
    if _is_overridden():
        try:
            return Capture(_file_of_torch(obj), _nebula.Ranges(), True)
        except Exception as failure:
            raise _explain(obj, name, failure) from failure
    try:
        return _dump(obj)
    except (RecursionError, MemoryError):
        raise
    except Exception as failure:
        # A storage is too small for its tensor: torch.save would write it, but torch.load fails on it.
        whole = None if isinstance(failure, BufferError) else _with_torch(obj)
        if whole is None:
            raise _explain(obj, name, failure) from failure
        return Capture(whole, _nebula.Ranges(), True)


def ranges(parts: Any, name: str) -> _nebula.Ranges:
    """Returns (address, size, owner) of each part, a bytes-like object or a contiguous tensor. The owner keeps the memory alive.

    The owner may be a copy of the part. The address is None if device.plan finds the tensor on a device.
    """
    found = _nebula.Ranges()
    for index, part in enumerate([parts] if isinstance(parts, torch.Tensor) else buffers.listed(parts, name)):
        if not isinstance(part, torch.Tensor):
            buffers.append(found, index, part, name)
            continue
        tensor = dense.to_dense(part, f"part {index} of {name!r} is a")
        if not tensor.is_contiguous():
            raise NebulaConfigError(f"part {index} of {name!r} is a tensor that is not contiguous: call .contiguous() on it")
        if tensor.device.type != "cpu" and not device.covers(tensor.untyped_storage()):
            tensor = tensor.cpu()
        found.append(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)
    device.find(found)
    return found


def file_parts(template: torch.Tensor, tensor: torch.Tensor) -> tuple[list[Any], int]:
    """Returns a complete torch file of ``template`` with the bytes of ``tensor``: (parts for save_bytes, size in bytes).

    Both are contiguous and have the same shape and dtype. ``template`` decides what is pickled; its memory is not touched. The CRC-32
    fields stay 0: torch ignores them, and the checkpoint's own checksums cover the bytes.
    """
    pickle, storages = _dump(template)[:2]
    size = tensor.numel() * tensor.element_size()
    if len(storages) != 1 or storages[0][1] != size:
        raise NebulaConfigError(f"a tensor with one storage of {size} bytes is expected, not {len(storages)} storages")
    before, after = _nebula.zip_frame(pickle, [size])
    return [before, tensor, after], len(before) + size + len(after)


def unprotectable(storages: _nebula.Ranges) -> bytes | None:
    """Returns a byte for each storage, 1 for pinned memory. None: no storage is pinned.

    Devices write to pinned memory past the page tables, so a copy-on-write capture would miss those writes.
    """
    if not torch.cuda.is_initialized():
        return None
    pinned = [index for index, owner in storages.owners(-1, UNPROTECTED_BYTES) if _is_pinned(owner)]
    if not pinned:
        return None
    flags = bytearray(len(storages))
    for index in pinned:
        flags[index] = 1
    return bytes(flags)


def _is_pinned(owner: Any) -> bool:
    if isinstance(owner, torch.UntypedStorage | torch.Tensor | torch.storage.TypedStorage):
        return owner.device.type == "cpu" and owner.is_pinned()
    return False


def _with_torch(obj: Any) -> memoryview | None:
    """Returns the file that torch.save makes, for objects that cannot be given as memory ranges. None: torch.save fails, too."""
    try:
        return _file_of_torch(obj)
    except Exception:
        return None


def _file_of_torch(obj: Any) -> memoryview:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(obj, file)
    return file.getbuffer()


def _is_overridden() -> bool:
    """Returns True if a program has its own rules for what this module pickles itself: torch.save alone applies them."""
    reductions = tuple(kind.__reduce_ex__ for kind in _OWN)
    return reductions != _REDUCTIONS or any(kind in copyreg.dispatch_table for kind in _OWN)


def _explain(obj: Any, name: str, failure: Exception) -> NebulaError:
    """Returns an error that names the part that cannot be pickled.

    It runs only code of a part that pickling the part has already run.
    """
    path, part = _find_culprit(obj, name)
    nowhere = dense.without_memory(part) if issubclass(type(part), torch.Tensor) else None
    if nowhere is not None:
        return NebulaPicklingError(f"{path}: a {nowhere[0]} cannot be saved: {nowhere[1]}")
    reason = _text_of(failure)
    if "view the same data as different types" in reason:
        return NebulaPicklingError(f"{path}: {reason}")
    return NebulaPicklingError(
        f"{path}: an object of type {_type_name(part)} cannot be pickled "
        f"({type(failure).__name__}: {reason}); leave it out, or give its class __getstate__"
    )


def _text_of(failure: Exception) -> str:
    try:
        return str(failure)
    except Exception:
        return "its text cannot be had"


def _of_class(kind: type, name: str) -> Any:
    """Returns the value that `type` has for a class, even if its metaclass overrides that name."""
    return vars(type)[name].__get__(kind)


def _type_name(obj: Any) -> str:
    return f"{_of_class(type(obj), '__module__')}.{_of_class(type(obj), '__qualname__')}"


def _shown(value: Any) -> str:
    """Returns the text of a key in a path."""
    parts = value if type(value) is tuple and len(value) < 10 else (value,)
    return f"{value!r:.80}" if all(type(part) in _SIMPLE for part in parts) else f"a {_type_name(value)}"


def _fails(obj: Any) -> bool:
    try:
        _dump(obj)
    except Exception:
        return True
    return False


def _find_culprit(obj: Any, path: str) -> tuple[str, Any]:
    """Returns the innermost part that cannot be pickled by itself, and the path to it."""
    seen = {id(obj)}
    for _ in range(PATH_PARTS):  # an object that makes new parts each time has no innermost one
        try:
            found = next((each for each in _parts(obj) if id(each[1]) not in seen and _fails(each[1])), None)
        except Exception:  # the part cannot even list its own parts
            found = None
        if found is None:
            break
        step, obj = found
        path += step
        seen.add(id(obj))
    return path, obj


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    kind = type(obj)
    if issubclass(kind, dict):
        for key, value in dict.items(obj):
            yield f"[key {_shown(key)}]", key
            yield f"[{_shown(key)}]", value
    elif issubclass(kind, (list, tuple)):
        for index, value in enumerate((list if issubclass(kind, list) else tuple).__iter__(obj)):
            yield f"[{index}]", value
    elif issubclass(kind, (set, frozenset)):
        for value in (set if issubclass(kind, set) else frozenset).__iter__(obj):
            yield f"{{{_shown(value)}}}", value
    state = _state(obj)
    if type(state) is dict:
        for key, value in state.items():
            yield f".{key if type(key) is str else _shown(key)}", value


def _state(obj: Any) -> Any:
    try:
        reduced = obj.__reduce_ex__(2)
    except Exception:
        return _attributes(obj)
    state = reduced[2] if type(reduced) is tuple and len(reduced) > 2 else None
    if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
        return {**(state[0] or {}), **state[1]}
    return state


def _attributes(obj: Any) -> Any:
    """Returns the `__dict__` of an object, even if its class overrides that name."""
    for kind in _of_class(type(obj), "__mro__"):
        descriptor = _of_class(kind, "__dict__").get("__dict__")
        if type(descriptor) is types.GetSetDescriptorType:
            return descriptor.__get__(obj)
    return None
