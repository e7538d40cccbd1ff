"""Tensors as bytes: finds out if a tensor's memory holds its values, copies it if that helps, and refuses it otherwise.

The memory of a conjugate or negative view differs from its values. A zero tensor has no memory. A tensor subclass may have either fault.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..errors import NebulaConfigError
from . import lazy

__all__ = ["dtensor_class", "fills_memory", "kind_of", "refusal", "to_dense", "without_memory"]

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_SAVE = "or save it with Checkpoint.save()"
_dense_kinds: set[int | str] = set()  # dispatch keys of tensors that to_dense() returns unchanged; torch has few of them
_text_of_keys: Any = getattr(torch._C.DispatchKeySet, "raw_repr", repr)  # torch 2.4 has no raw_repr


def _class_of(module: str, name: str) -> Any:
    """Returns a class of a loaded module. If the module is not loaded, returns (), which has no instances."""
    return getattr(sys.modules.get(module), name, ())


def dtensor_class() -> Any:
    """Returns torch's class DTensor; (), which has no instances, if it is not loaded. Before torch 2.5 its module was a private one."""
    return _class_of("torch.distributed.tensor", "DTensor") or _class_of("torch.distributed._tensor", "DTensor")


def without_memory(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Returns the kind of this tensor and advice, if its values lie in no memory that could be read. None: they do.

    It applies to pickles and to bytes.
    """
    if torch.nn.parameter.is_lazy(tensor):
        return None  # a pickle records that it is lazy
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        return "tensor inside a transform of torch.func", "it has no memory of its own: save it outside the transform"
    if isinstance(tensor, _class_of("torch._subclasses.fake_tensor", "FakeTensor")):
        return "FakeTensor", "it has no values: save a tensor that was made outside FakeTensorMode"
    if tensor._is_zerotensor():
        return "zero tensor of torch's own, without memory", "save its clone()"
    missing = _missing(tensor)
    if missing:
        return "tensor whose storage was resized", f"{missing} bytes of its values have no memory any more: save it before that"
    return None


def _missing(tensor: torch.Tensor) -> int:
    """Returns how many bytes of a tensor lie after the end of its storage, for example after storage.resize_(0)."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.numel() == 0 or not _is_own(tensor):
        return 0
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max((last + 1) * tensor.element_size() - tensor.untyped_storage().nbytes(), 0)


def kind_of(tensor: Any) -> int | str | None:
    """Returns torch's dispatch keys of a tensor, which tell its kind and its device. None: a class of its own may decide more."""
    return _text_of_keys(torch._C._dispatch_keys(tensor)) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None


def fills_memory(tensor: torch.Tensor) -> bool:
    """Returns True if the values of a strided tensor lie one after the other, and its storage has all of them."""
    return tensor.is_contiguous() and (tensor.storage_offset() + tensor.numel()) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def _is_own(tensor: torch.Tensor) -> bool:
    """Returns True if torch's own operators apply, and no Python class replaces them."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def refusal(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Returns the kind of this tensor and advice, if its values cannot be saved as bytes. None: to_dense() takes it."""
    if torch.nn.parameter.is_lazy(tensor):
        return "parameter that is not initialized", "it has no values before the first forward pass"
    with torch._C.DisableTorchFunctionSubclass():
        found = without_memory(tensor)
        if found is not None:
            return found
        if isinstance(tensor, dtensor_class()):
            return "DTensor", "a rank has a part of it: give its to_local(), or use nebulaml.dcp"
        if tensor.is_nested:
            return "nested tensor", f"give its values() and offsets(), {_SAVE}"
        if tensor.layout in _SPARSE:
            return f"tensor of layout {tensor.layout}", f"make it dense with to_dense(), {_SAVE}"
        if tensor.layout != torch.strided:
            return f"tensor of layout {tensor.layout}", "make it dense with to_dense()"
        if tensor.is_quantized:
            return "quantized tensor", f"give its int_repr() or dequantize(), {_SAVE}"
        if tensor.is_meta:
            return "tensor on the meta device", "it has no values: give it memory first, with to_empty()"
        if not _is_own(tensor):
            return type(tensor).__name__, f"its class decides where its values are: give the plain tensors that it is made of, {_SAVE}"
    return None


def to_dense(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Returns a tensor without graph whose memory holds its values: the detached tensor, or a copy.

    It keeps the layout in memory, which may be neither dense nor contiguous. where: the begin of the error, for example "part 1 of 'x' is
    a".
    Raises NebulaConfigError if the values cannot be bytes.
    """
    tensor = lazy.ordinary(tensor)
    kind = kind_of(tensor)
    if kind in _dense_kinds and fills_memory(tensor):
        return tensor.detach()
    if kind is None and isinstance(tensor, _class_of("torch.distributed._functional_collectives", "AsyncCollectiveTensor")):
        tensor = tensor.wait()  # waits for the data of other ranks
    if not torch.nn.parameter.is_lazy(tensor) and tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    found = refusal(tensor)
    if found is not None:
        raise NebulaConfigError(f"{where} {found[0]}: {found[1]}")
    with torch._C.DisableTorchFunctionSubclass():
        detached = tensor.detach()
        resolved = detached.resolve_conj().resolve_neg()
    if kind is not None and resolved is detached:
        _dense_kinds.add(kind)
    return resolved
