"""Tensors of a checkpoint that are not in memory: each reads its elements, a slice at a time, from the places where they lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from ..errors import NebulaConfigError, NebulaCorrupt

__all__ = ["Boxes", "Computed", "Flat", "Held", "Ranges", "Replicated", "Tensor"]


class Ranges(Protocol):
    """The bytes of a file (files.py)."""

    def read(self, offset: int, size: int, address: int) -> None: ...


class Tensor:
    """A tensor by its shape and dtype. ``identity``: equal for several names of the same elements; None: not known.

    unit: how many elements, by their order in a contiguous tensor, can be read at the least. Reads begin and end at multiples.
    """

    unit = 1

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, identity: Hashable = None) -> None:
        self.shape, self.dtype, self.identity = tuple(int(size) for size in shape), dtype, identity

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def read(self, first: int, count: int) -> torch.Tensor:
        """Returns elements [first, first + count) of the contiguous tensor, in one dimension."""
        raise NotImplementedError


class Held(Tensor):
    """A tensor in memory, or in a map of a file."""

    def __init__(self, tensor: torch.Tensor, identity: Hashable = None) -> None:
        super().__init__(tensor.shape, tensor.dtype, identity)
        self._tensor = tensor
        self.unit = 1 if tensor.is_contiguous() else max(1, self.count)

    def read(self, first: int, count: int) -> torch.Tensor:
        return self._tensor.detach().reshape(-1)[first : first + count]


class Stored(Tensor):
    """A tensor whose bytes lie in a file, in order or with strides."""

    def __init__(self, file: Ranges, offset: int, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int], identity: Hashable = None):
        super().__init__(shape, dtype, identity)
        self._file, self._offset = file, offset
        self._strides = None if _is_contiguous(self.shape, strides) else tuple(strides)
        self.unit = 1 if self._strides is None else max(1, self.count)

    def read(self, first: int, count: int) -> torch.Tensor:
        span = count
        if self._strides is not None and self.count:
            first, span = 0, 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self._strides, strict=True))
        found = torch.empty(span, dtype=self.dtype)
        if span:
            self._file.read(self._offset + first * self.dtype.itemsize, span * self.dtype.itemsize, found.data_ptr())
        return found if self._strides is None else found.as_strided(self.shape, self._strides).reshape(-1)


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return math.prod(shape) == 0
        expected *= size
    return True


class Flat(Tensor):
    """A tensor whose elements, in order, are those of parts of other tensors, one after the other: (tensor, first, count)."""

    def __init__(self, shape: Sequence[int], parts: Sequence[tuple[Tensor, int, int]]) -> None:
        super().__init__(shape, parts[0][0].dtype if parts else torch.float32)
        self._parts = parts
        if sum(count for _, _, count in parts) != self.count:
            raise NebulaCorrupt(f"{sum(part[2] for part in parts)} elements are there for a tensor of shape {self.shape}")

    def read(self, first: int, count: int) -> torch.Tensor:
        found, at = [], 0
        for tensor, begin, size in self._parts:
            low, high = max(first, at), min(first + count, at + size)
            if low < high:
                found.append(tensor.read(begin + low - at, high - low))
            at += size
        return found[0] if len(found) == 1 else torch.cat([torch.empty(0, dtype=self.dtype), *found])


class Boxes(Tensor):
    """A tensor that consists of boxes, each with its offsets in the tensor. One read gives whole rows of the first dimension."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        super().__init__(shape, dtype)
        self._boxes = [(tuple(offsets), box) for offsets, box in boxes]
        self.unit = max(1, math.prod(self.shape[1:]))
        inside = all(
            len(offsets) == len(self.shape) and all(at + size <= most for at, size, most in zip(offsets, box.shape, self.shape, strict=True))
            for offsets, box in self._boxes
        )
        if not inside or sum(box.count for _, box in self._boxes) != self.count or _overlap(self._boxes):
            raise NebulaCorrupt(f"the {len(self._boxes)} pieces that the checkpoint has are not all of a tensor of shape {self.shape}")

    def read(self, first: int, count: int) -> torch.Tensor:
        if not self.shape or not self.count:
            return self._boxes[0][1].read(first, count) if count else torch.empty(0, dtype=self.dtype)
        begin, rows = first // self.unit, count // self.unit
        found = torch.empty((rows, *self.shape[1:]), dtype=self.dtype)
        for offsets, box in self._boxes:
            low, high = max(begin, offsets[0]), min(begin + rows, offsets[0] + box.shape[0])
            if low >= high or not box.count:
                continue
            place = (slice(low - begin, high - begin), *(slice(at, at + size) for at, size in zip(offsets[1:], box.shape[1:], strict=True)))
            row = box.count // box.shape[0]
            found[place] = _rows(box, low - offsets[0], high - low, row)
        return found.reshape(-1)


def _rows(tensor: Tensor, first: int, count: int, row: int) -> torch.Tensor:
    """Returns rows of a tensor, which may only be readable in larger units."""
    begin, end = first * row, (first + count) * row
    low, high = begin // tensor.unit * tensor.unit, min(-(-end // tensor.unit) * tensor.unit, tensor.count)
    return tensor.read(low, high - low)[begin - low : end - low].reshape((count, *tensor.shape[1:]))


def _overlap(boxes: Sequence[tuple[Sequence[int], Tensor]]) -> bool:
    """Returns True if two of the boxes begin at one place: together with equal sizes and sums, that is what a damaged list looks like."""
    return len({offsets for offsets, box in boxes if box.count}) < sum(1 for _, box in boxes if box.count)


class Replicated(Tensor):
    """A tensor of which each tensor-parallel rank has the whole. It reads all of them, and refuses ranks that differ."""

    def __init__(self, name: str, copies: Sequence[Tensor]) -> None:
        super().__init__(copies[0].shape, copies[0].dtype, copies[0].identity)
        self._name, self._copies = name, copies
        self.unit = max(copy.unit for copy in copies)

    def read(self, first: int, count: int) -> torch.Tensor:
        found = self._copies[0].read(first, count)
        for rank, copy in enumerate(self._copies[1:], 1):
            if not torch.equal(found.view(torch.uint8), copy.read(first, count).view(torch.uint8)):
                raise NebulaConfigError(f"the mapping says that {self._name} is replicated, and rank {rank} has other values of it than rank 0")
        return found


class Computed(Tensor):
    """A tensor that a function of the program makes of those of all ranks, which are in memory together for that."""

    def __init__(self, name: str, parts: Sequence[Tensor], function: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
        made = self._call(name, function, [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts])
        super().__init__(made.shape, made.dtype)
        self._name, self._parts, self._function = name, parts, function
        self.unit = max(1, self.count)

    @staticmethod
    def _call(name: str, function: Callable[[list[torch.Tensor]], torch.Tensor], parts: list[torch.Tensor]) -> torch.Tensor:
        made: Any = function(parts)
        if not isinstance(made, torch.Tensor):
            raise NebulaConfigError(f"the mapping's function for {name} returned a {type(made).__name__}, and must return a tensor")
        return made

    def read(self, first: int, count: int) -> torch.Tensor:
        made = self._call(self._name, self._function, [part.read(0, part.count).reshape(part.shape) for part in self._parts])
        return made.reshape(-1)[first : first + count]
