"""The form of a publication in its storage path, which the maker writes and subscribers read.

Each publication is one checkpoint ``publication-<number>``. Its file ``weights`` is the whole safetensors file, or its file ``delta``
leads to it from the publication before (src/delta/delta.h). Numbers grow; a step may come again after a restart.

If ranks publish their shards, each rank has ``delta-<rank>``, or ``weights-<rank>`` with ``parts-<rank>``, which says where its bytes belong
in the whole file. ``head`` has the header of that file.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import _nebula
from .._session import documents
from ..errors import NebulaCorrupt

__all__ = [
    "DELTA", "EXTRA", "GAP", "HEAD", "PARTS", "WEIGHTS", "About", "Layout", "next_number", "number_of", "of_rank", "size_of", "tag_of",
    "tensors_of",
]  # fmt: skip

WEIGHTS, DELTA = "weights", "delta"
PARTS, HEAD = "parts", "head"
EXTRA = "files/"  # other files of the directory, such as config.json
GAP = 16  # numbers that makers of the last run may still use
_PREFIX = "publication-"
_WIDTHS = {"F64": 4, "I64": 4, "U64": 4, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_HEADER_MOST = 100_000_000  # bytes; the format's own limit


def tag_of(number: int) -> str:
    """Returns the tag of a publication."""
    return f"{_PREFIX}{number:010d}"


def of_rank(name: str, rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"{name}-{rank:05d}"


def number_of(tag: str) -> int | None:
    """Returns the number of a publication's tag; None: it is another tag."""
    digits = tag.removeprefix(_PREFIX)
    return int(digits) if digits != tag and digits.isascii() and digits.isdigit() else None


def next_number(numbers: Iterable[int]) -> int:
    """Returns the number of a run's first publication. numbers: those of the path.

    It is not 1 in an empty path: there may be followers of publications that were removed.
    """
    return max(int(time.time()), *(number + GAP for number in numbers), 1)


@dataclasses.dataclass(frozen=True)
class About:
    """The metadata of a publication. ``first``: the number of the whole one that it builds on. ``total``: the sum of its state, or 0.
    ``ranks``: how many publish shards; 0: one process publishes whole tensors.
    """

    number: int
    step: int
    first: int
    total: int
    name: str  # of the file for engines, such as model.safetensors
    ranks: int = 0

    def stored(self) -> dict[str, Any]:
        """Returns it as the metadata of a checkpoint."""
        return {**dataclasses.asdict(self), "total": f"{self.total:016x}"}

    @classmethod
    def read(cls, metadata: dict[str, Any]) -> About | None:
        """Returns it from the metadata of a checkpoint; None: they are those of another kind of checkpoint."""
        try:
            number, step, first = (documents.whole(metadata[key]) for key in ("number", "step", "first"))
            name, total, ranks = metadata["name"], int(metadata["total"], 16), documents.whole(metadata.get("ranks", 0))
            is_plain = bool(name.encode()) and not {"/", "\0"} & set(name) and not name.startswith(".")
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        return cls(number, step, first, total, name, ranks) if is_plain and 0 < first <= number and ranks >= 0 else None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the tensors of a safetensors file lie. ``head``: the bytes before them, which two states must share for a delta."""

    head: bytes
    parts: list[_nebula.Part]

    @classmethod
    def of(cls, data: memoryview) -> Layout:
        """Reads the header of a file. Raises NebulaCorrupt if it is none, or names bytes beyond the end."""
        head, tensors = _read_head(data)
        try:
            parts = sorted((offset, size, _WIDTHS.get(dtype, 1), 0) for offset, size, dtype in tensors.values())
        except TypeError as failure:
            raise NebulaCorrupt(f"the header of these weights is damaged: {failure}") from None
        if any(offset < len(head) or size < 0 or offset + size > len(data) or size % width for offset, size, width, _ in parts):
            raise NebulaCorrupt("the header of these weights names bytes beyond their end")
        if any(one[0] + one[1] > other[0] for one, other in itertools.pairwise(parts)):
            raise NebulaCorrupt("the header of these weights names bytes twice")
        return cls(head, parts)

    @classmethod
    def of_shards(cls, data: memoryview, pieces: list[tuple[str, int, int, int, int]]) -> Layout:
        """The layout of a rank's shards, which lie in a safetensors file of their own. pieces: ``Shards.parts``."""
        head, tensors = _read_head(data)
        return cls(head, [(offset, size, width, 0, tensors[name][0] + inside) for name, inside, offset, size, width in pieces])


def _read_head(data: memoryview) -> tuple[bytes, dict[str, tuple[int, int, str]]]:
    """Returns the header of a safetensors file, and (offset in the file, bytes, type) of its tensors."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, _HEADER_MOST):
        raise NebulaCorrupt("these weights are no safetensors file")
    head = bytes(data[: 8 + size])
    try:
        said = {name: about for name, about in documents.parse(head[8:]).items() if name != "__metadata__"}
        tensors = {name: (*about["data_offsets"], about["dtype"]) for name, about in said.items()}
        if any(type(place) is not int for begin, end, _ in tensors.values() for place in (begin, end)):
            raise ValueError("an offset is no whole number")
        return head, {name: (len(head) + begin, end - begin, dtype) for name, (begin, end, dtype) in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise NebulaCorrupt(f"the header of these weights is damaged: {failure}") from None


def size_of(head: bytes) -> int:
    """Returns the bytes of the safetensors file with this header."""
    padded = memoryview(head)
    _, tensors = _read_head(padded)
    return max((offset + size for offset, size, _ in tensors.values()), default=len(head))


def tensors_of(path: Path) -> dict[str, Any]:
    """Returns the tensors of a safetensors file, in a private mapping of it. Raises NebulaCorrupt if the header does not fit the bytes."""
    import torch

    from ..integrations.redirect import SAFETENSORS_DTYPES

    dtypes = {name: getattr(torch, text.removeprefix("torch.")) for text, name in SAFETENSORS_DTYPES.items()}
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise NebulaCorrupt(f"{path} is empty")  # which no mapping can be of
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    head, places = _read_head(memoryview(memory))
    said = documents.parse(head[8:])
    tensors = {}
    for name, (offset, size, dtype) in places.items():
        shape = said[name].get("shape")
        if not isinstance(dtype, str) or dtype not in dtypes:
            raise NebulaCorrupt(f"tensor {name!r} of {path} has the type {dtype!r}, which Nebula does not know")
        if not isinstance(shape, list) or any(type(length) is not int or length < 0 for length in shape):
            raise NebulaCorrupt(f"tensor {name!r} of {path} has the shape {shape!r}, which is no list of lengths")
        if size != math.prod(shape) * dtypes[dtype].itemsize or offset < len(head) or offset + size > len(memory):
            raise NebulaCorrupt(f"tensor {name!r} of {path} has the shape {shape} of {dtype}, which does not fit its {size} bytes at {offset}")
        data = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset) if size else torch.empty(0, dtype=torch.uint8)
        tensors[name] = data.view(dtypes[dtype]).reshape(shape)
    return tensors
