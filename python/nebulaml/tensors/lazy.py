"""Tensors whose bytes are still in their file, for a program that copies them into tensors of its own.

``target.copy_(lazy)``, which load_state_dict() calls, reads the bytes straight into the target and compares their checksum there. Questions
about shape, dtype and the like read nothing. Any other use reads the bytes into the memory of the load, and the same object becomes an
ordinary tensor, as torch's own UninitializedParameter does.

Code in C++ that takes the tensor past __torch_function__ meets one without storage: it goes through __torch_dispatch__, or torch raises. So
no code sees bytes that were not compared.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from .. import _nebula
from . import device

__all__ = ["File", "LazyTensor", "is_raw", "is_raw_bytes", "ordinary"]

_METHODS = (
    *("__len__", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "is_inference", "is_signed", "ndimension"),
    *("nelement", "numel", "size", "storage_offset", "stride"),
)
_ATTRIBUTES = (
    *("device", "dtype", "grad", "grad_fn", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_quantized", "is_sparse", "itemsize"),
    *("layout", "nbytes", "ndim", "requires_grad", "shape"),
)

# These answer from the description of a tensor.
_DESCRIBES = {
    *(getattr(torch.Tensor, name) for name in _METHODS),
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
    *(torch.is_complex, torch.is_floating_point, torch.numel),
}


class File:
    """A file that this process reads from storage. ``storage`` is the memory for its bytes."""

    def __init__(self, mapped: _nebula.Map, storage: torch.UntypedStorage) -> None:
        self._mapped, self._storage, self._sums = mapped, storage, mapped.sums()
        self._lock, self._pid = threading.RLock(), os.getpid()

    def lock(self) -> threading.RLock:  # type: ignore[valid-type]
        """The lock for reads: a second read of a chunk must not replace what the program has written since the first one."""
        if self._pid != os.getpid():  # the thread that held the lock at the fork does not exist here
            self._lock, self._pid = threading.RLock(), os.getpid()
        return self._lock

    def tensor(self, plain: torch.Tensor) -> torch.Tensor:
        """Returns a lazy tensor in place of one that lies in the memory for the file."""
        offset, _ = self._place(plain.untyped_storage())
        return LazyTensor.of(self, plain) if plain.numel() and 0 <= offset < self._storage.nbytes() else plain

    def _place(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        """Returns offset and size of a storage in the file."""
        return storage.data_ptr() - self._storage.data_ptr(), storage.nbytes()

    def fetch(self, storage: torch.UntypedStorage) -> None:
        """Reads the bytes of a storage to where it lies."""
        self._mapped.fetch(*self._place(storage))

    def content(self, offset: int, size: int) -> bytes:
        """Returns the bytes of a record."""
        found = bytearray(size)
        with memoryview(found) as view:
            self._mapped.read_record(offset, size, _nebula.address_of(view), self._sums[offset])
        return bytes(found)

    def read(self, source: torch.Tensor, address: int) -> None:
        """Reads the values of a contiguous tensor to an address."""
        offset, size = source.data_ptr() - self._storage.data_ptr(), source.numel() * source.element_size()
        if self._place(source.untyped_storage()) == (offset, size):
            self._mapped.read_record(offset, size, address, self._sums[offset])
        else:
            self._mapped.read([(offset, size, address)])


class LazyTensor(torch.Tensor):
    """See the head of this file. It has no storage."""

    _lazy: tuple[File, torch.Tensor]  # the ordinary tensor, which has no values before a fetch

    @staticmethod
    def of(file: File, plain: torch.Tensor) -> LazyTensor:
        size, stride, offset = plain.size(), plain.stride(), plain.storage_offset()
        self: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            LazyTensor, size, strides=stride, storage_offset=offset, dtype=plain.dtype, device=plain.device
        )
        torch._C._set_throw_on_mutable_data_ptr(self)  # type: ignore[attr-defined]  # otherwise the address is 0
        self._lazy = file, plain
        return self

    @property
    def _is_param(self) -> bool:
        """isinstance(lazy, Parameter) asks this before load_state_dict(assign=True) makes a parameter, which needs an ordinary tensor."""
        ordinary(self)
        return False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DESCRIBES:
                return func(*args, **(kwargs or {}))
            if func is torch.Tensor.copy_ and len(args) > 1 and _copy(args[0], args[1]):
                return args[0]
        return func(*_each(args, ordinary), **_each(kwargs or {}, ordinary))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_each(args, _fetched), **_each(kwargs or {}, _fetched))


def _fetched(lazy: LazyTensor) -> torch.Tensor:
    """Returns the ordinary tensor, with its values. The lazy one stays as it is: code in C++ has references to it."""
    file, plain = lazy._lazy
    with file.lock():
        file.fetch(plain.untyped_storage())
    return plain


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a lazy tensor an ordinary one. It returns that object, or another one if torch has further references to the lazy one."""
    if type(tensor) is not LazyTensor:
        return tensor
    file, plain = tensor._lazy
    with file.lock():
        if type(tensor) is not LazyTensor:  # another thread was here
            return tensor
        _fetched(tensor)
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]
        try:
            torch._C._swap_tensor_impl(tensor, plain)  # type: ignore[attr-defined]
        except RuntimeError:
            tensor.__class__ = LazyTensor
            return plain
        del tensor._lazy
    return tensor


def _each(value: Any, change: Any) -> Any:
    """Replaces lazy tensors in arguments."""
    if type(value) is LazyTensor:
        return change(value)
    if isinstance(value, dict):
        return {key: _each(part, change) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_each(part, change) for part in value])
    return value


def _copy(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Reads the values straight into the target. False: its memory, or the copy, is of another kind."""
    if type(source) is not LazyTensor or type(target) is LazyTensor or torch._C._len_torch_dispatch_stack():  # type: ignore[attr-defined]
        return False
    file, plain = source._lazy
    if target.shape != plain.shape or target.dtype != plain.dtype or not is_raw_bytes(plain):
        return False
    if (target.requires_grad and torch.is_grad_enabled()) or target.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(target):
        return False
    if not is_raw(target) or target.untyped_storage().nbytes() < (target.storage_offset() + target.numel()) * target.element_size():
        return False
    with file.lock():
        if type(source) is not LazyTensor:
            return False
        file.read(plain, target.data_ptr())
    torch.autograd.graph.increment_version(target)
    return True


def is_raw(tensor: torch.Tensor) -> bool:
    """Returns True if its values are its bytes in order, in memory of this process."""
    return tensor.device.type == "cpu" and is_raw_bytes(tensor) and device.place(tensor.untyped_storage()) is None


def is_raw_bytes(tensor: torch.Tensor) -> bool:
    """The same, in any memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


# Without it, a queue would send the bytes and not the memory.
ForkingPickler.register(LazyTensor, lambda lazy: reductions.reduce_tensor(ordinary(lazy)))
