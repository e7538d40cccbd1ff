"""Equality of saved and loaded objects; tensors are compared bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch


def savable(*dtypes: torch.dtype) -> list[torch.dtype]:
    """Those dtypes that this torch saves: torch 2.4 has uint16, uint32 and uint64, but does not save them."""
    known = {*torch.storage._new_dtypes(), *torch.storage._dtype_to_storage_type_map()}
    return [dtype for dtype in dtypes if dtype in known]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(dense.numel(), dtype=dense.dtype)
    flat.view(dense.shape).copy_(dense)
    return flat.view(torch.uint8)


def assert_same(first: Any, second: Any, path: str = "root") -> None:
    assert type(first) is type(second), path
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype and first.shape == second.shape, path
        assert first.layout == second.layout and first.requires_grad == second.requires_grad, path
        if first.device.type == "meta":
            return
        if first.is_quantized:
            assert first.qscheme() == second.qscheme(), path
            assert torch.equal(first.int_repr(), second.int_repr()), path
            assert torch.equal(first.dequantize(), second.dequantize()), path
        elif first.layout != torch.strided:
            assert torch.equal(first.to_dense(), second.to_dense()), path
        else:
            assert first.stride() == second.stride(), path
            assert torch.equal(bits(first), bits(second)), path
    elif isinstance(first, dict):
        assert list(first) == list(second), path
        for key in first:
            assert_same(first[key], second[key], f"{path}[{key!r}]")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), path
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    elif isinstance(first, np.ndarray):
        assert first.dtype == second.dtype and np.array_equal(first, second, equal_nan=first.dtype.kind == "f"), path
    elif isinstance(first, torch.nn.Module):
        assert_same(first.state_dict(), second.state_dict(), path)
    elif isinstance(first, float) and math.isnan(first):
        assert math.isnan(second), path
    else:
        assert first == second, path
