"""The shards of a rank: which bytes of the whole safetensors file its DTensors have.

No rank has whole tensors. Each publishes what it holds, and a subscriber puts the ranks' bytes together. So all ranks describe the same
file, and each byte of it belongs to one rank: the first of those that hold it.
"""

from __future__ import annotations

import collections
import datetime
import functools
import itertools
import math
import os
import threading
from collections.abc import Iterator
from typing import Any

from .._session import ranks
from ..errors import NebulaConfigError, NebulaError
from ..integrations.redirect import safetensors_header
from ..reader import Reader
from .publication import GAP, next_number, number_of

__all__ = ["Shards", "compare_steps", "first_number", "is_sharded", "next_turn"]

RUNS_MOST = 1 << 16  # of a rank: each is a part of every delta
AGREE_S = 60.0  # ranks wait so long for rank 0
_asking: threading.Thread | None = None  # of the last compare_steps
_turns = collections.Counter[str]()  # publishers of shards of this process, by path


def is_sharded(state: dict[str, Any]) -> bool:
    """Whether there are DTensors among the values."""
    return any(hasattr(value, "placements") for value in state.values())


def next_turn(path: str) -> int:
    """Counts the publishers of shards to a path: the same number on all ranks."""
    _turns[path] += 1
    return _turns[path]


def first_number(path: str, turn: int) -> tuple[int, str]:
    """Returns a number for the first publication, above those of the path, and a name that no other publisher has: the same on all ranks.

    The process group's store hands both on. After an error a rank may ask again.
    """
    store, place = ranks.store(), ranks.current()
    key = f"nebula/publisher/{path}/{turn}"
    if place.rank == 0:
        with Reader(path) as reader:
            numbers = [number for row in reader.versions() if (number := number_of(row.tag)) is not None]
        store.compare_set(key, "", f"{next_number(numbers)} {os.urandom(8).hex()}")
    try:
        store.wait([key], datetime.timedelta(seconds=AGREE_S))
    except Exception as failure:  # the stores raise errors of several types
        raise NebulaError(f"rank 0 has not named the first publication to {path} within {AGREE_S:.0f} s") from failure
    number, name = store.get(key).decode().split()
    return int(number), name


def compare_steps(path: str, turn: int, number: int, step: int) -> None:
    """Raises NebulaError if another rank publishes another step under this number. It waits for no rank: the first one's step counts.

    It waits AGREE_S for the store, whose host may hang; later calls wait no more until it has answered.
    """
    global _asking
    store, place = ranks.store(), ranks.current()
    if store is None:
        raise NebulaError("the process group has ended, so the ranks cannot compare their steps")
    if _asking is not None and _asking.is_alive():
        raise NebulaError("the process group's store does not answer, so the ranks cannot compare their steps")
    key, answers = f"nebula/publisher/{path}/{turn}/", list[Any]()

    def ask() -> None:
        try:
            answers.append(store.compare_set(f"{key}{number}", "", f"{step} {place.rank}"))
            if place.rank == 0:
                store.delete_key(f"{key}{number - GAP}")
        except Exception as failure:  # the stores raise errors of several types
            answers.append(failure)

    _asking = threading.Thread(target=ask, name="nebula-steps", daemon=True)
    try:
        _asking.start()
    except RuntimeError as failure:  # out of threads
        raise NebulaError(f"the ranks cannot compare their steps: {failure}") from failure
    _asking.join(AGREE_S)
    if not answers or isinstance(answers[-1], Exception):
        why = answers[-1] if answers else f"the process group's store has not answered for {AGREE_S:.0f} s"
        raise NebulaError(f"the ranks cannot compare their steps: {why}")
    first, rank = map(int, answers[0].split())
    if first != step:
        raise NebulaError(f"rank {place.rank} publishes step {step} in the call in which rank {rank} publishes step {first}")



class Shards:
    """What this rank publishes of a state that has DTensors.

    local: its own tensors by name. head: the header of the whole file. parts: (name, bytes into the local tensor, offset in the file,
    bytes, bytes of an element), in the order of the file.
    """

    def __init__(self, state: dict[str, Any], dtype: Any, rank: int) -> None:
        kept, left_out = _without_ties(state)
        self.head, order = safetensors_header({name: _whole(value, dtype) for name, value in kept.items()}, {"format": "pt", **left_out})
        self.local: dict[str, Any] = {}
        self.parts: list[tuple[str, int, int, int, int]] = []
        self.size = len(self.head)
        for name, whole in order:
            value, width = kept[name], whole.element_size()
            found = _local(name, value, rank)
            if found is not None:
                tensor, ranges = found
                runs = _runs(tuple(whole.shape), ranges)
                self.local[name] = tensor
                self.parts += [(name, inside * width, self.size + at * width, count * width, width) for inside, at, count in runs]
                if len(self.parts) > RUNS_MOST:
                    raise NebulaConfigError(
                        f"the shards of this rank are more than {RUNS_MOST} pieces of the whole file: shard tensors along their first "
                        "dimension, or publish full tensors"
                    )
            self.size += whole.numel() * width


def _without_ties(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the tensors that are written, and {left out: kept}. All ranks must decide alike: so one object under several names is one
    tensor, and addresses, which a rank with an empty shard lacks, do not count."""
    first: dict[int, str] = {}
    for name in sorted(state):
        first.setdefault(id(state[name]), name)
    kept = {name: value for name, value in state.items() if first[id(value)] == name}
    return kept, {name: first[id(value)] for name, value in state.items() if name not in kept}


def _whole(value: Any, dtype: Any) -> Any:
    """The whole tensor as it is published, without its values."""
    import torch

    cast = dtype is not None and value.dtype.is_floating_point
    return torch.empty(value.shape, dtype=dtype if cast else value.dtype, device="meta")


_Ranges = list[list[tuple[int, int]]]  # for each dimension of the whole tensor: (begin, count) of what a local one has, in its order


def _local(name: str, value: Any, rank: int) -> tuple[Any, _Ranges] | None:
    """Returns what this rank publishes of a tensor: its local tensor, and the part of the whole one that this is. None: nothing."""
    if not hasattr(value, "placements"):
        return (value.detach(), [[(0, size)] for size in value.shape]) if rank == 0 and value.numel() else None
    kinds, placements = _kinds(), tuple(value.placements)
    if any(type(placement) not in (kinds.Replicate, kinds.Shard, getattr(kinds, "_StridedShard", None)) for placement in placements):
        raise NebulaConfigError(f"{name!r} is placed as {placements}: Publisher takes Shard and Replicate, so publish its full_tensor()")
    divided = [placement.dim for placement in placements if type(placement) is kinds.Shard]
    if len(set(divided)) < len(divided) and not hasattr(kinds, "_StridedShard"):
        why = "torch 2.4 does not say which mesh dimension was the first to divide one of its dimensions"
        raise NebulaConfigError(f"{name!r} is placed as {placements}, and {why}: publish its full_tensor(), or use torch 2.5 or newer")
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or not _is_first(mesh):
        return None  # another rank publishes it
    if any(at and type(placement) is kinds.Replicate for at, placement in zip(coordinate, placements, strict=True)):
        return None  # and here, too
    ranges = _ranges(tuple(value.shape), tuple(mesh.shape), tuple(coordinate), placements)
    local = value.detach().to_local()
    shape = tuple(sum(count for _, count in each) for each in ranges) if ranges is not None else None
    if shape is None or (tuple(local.shape) != shape and math.prod(shape) + local.numel() > 0):
        raise NebulaConfigError(f"the shard of {name!r} on this rank is not what its placement {placements} says: publish its full_tensor()")
    return (local.contiguous(), ranges) if local.numel() else None


def _kinds() -> Any:
    """Returns torch's module of placements."""
    try:
        from torch.distributed.tensor import placement_types
    except ImportError:  # torch 2.4
        from torch.distributed._tensor import placement_types
    return placement_types


def _is_first(mesh: Any) -> bool:
    """Whether this slice of a larger mesh is the first one. All slices have the same tensors: those that tensor parallelism leaves whole."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else _older_root(mesh)
    return int(root.mesh.flatten()[0]) in mesh.mesh.flatten().tolist()


def _older_root(mesh: Any) -> Any:
    """Returns the root of a mesh as torch 2.9 and older know it."""
    from torch.distributed import device_mesh

    known = device_mesh._mesh_resources
    found = known.get_root_mesh(mesh) if hasattr(known, "get_root_mesh") else known.get_parent_mesh(mesh)  # torch 2.4: None of a root
    return mesh if found is None else found


@functools.lru_cache(RUNS_MOST)
def _ranges(shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]) -> _Ranges | None:
    """Returns the part of a tensor that a rank has. Each placement divides what those before it have left, as ``torch.chunk`` does.

    A ``_StridedShard`` divides each of split_factor chunks: FSDP2 has placed it on shards of tensor parallelism, whose mesh dimension comes
    later. None: torch itself would divide it in another way, as older versions do if the sizes are uneven.
    """
    import torch

    replicate = _kinds().Replicate
    indices = [torch.arange(size) for size in shape]
    for placement, ranks_along, at in zip(placements, mesh, coordinate, strict=True):
        if type(placement) is replicate:
            continue
        index = indices[placement.dim]
        own = torch.cat([_chunks(chunk, ranks_along)[at] for chunk in _chunks(index, getattr(placement, "split_factor", 1))])
        row = index.view([1] * placement.dim + [len(index)])
        if not torch.equal(own, placement._split_tensor(row, ranks_along, with_padding=False, contiguous=False)[0][at].flatten()):
            return None
        indices[placement.dim] = own
    return [_joined(index.tolist()) for index in indices]


def _chunks(index: Any, count: int) -> list[Any]:
    size = -(-len(index) // count)
    return [index[at * size : (at + 1) * size] for at in range(count)]


def _joined(index: list[int]) -> list[tuple[int, int]]:
    """Returns the ranges of numbers that follow each other."""
    begins = [at for at, number in enumerate(index) if not at or number != index[at - 1] + 1]
    return [(index[begin], end - begin) for begin, end in zip(begins, [*begins[1:], len(index)], strict=False)]


def _runs(whole: tuple[int, ...], ranges: _Ranges) -> Iterator[tuple[int, int, int]]:
    """Yields (element of the local tensor, element of the whole one, elements) of each piece that lies together in both."""
    if not whole:
        yield 0, 0, 1
        return
    outer = max((at for at, size in enumerate(whole) if ranges[at] != [(0, size)]), default=0)
    strides = [math.prod(whole[at + 1 :]) for at in range(len(whole))]
    rows = ([begin + at for begin, count in each for at in range(count)] for each in ranges[:outer])
    inside = 0
    for row in itertools.product(*rows):
        base = sum(at * stride for at, stride in zip(row, strides, strict=False))
        for begin, count in ranges[outer]:
            yield inside, base + begin * strides[outer], count * strides[outer]
            inside += count * strides[outer]
