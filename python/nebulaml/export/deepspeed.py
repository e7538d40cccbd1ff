"""The weights of a DeepSpeed checkpoint: ZeRO's fp32 partitions, put together, and the buffers of the module.

Of stages 1 and 2, rank r's ``single_partition_of_fp32_groups`` has its part of each parameter group: the parts, in the order of the
ranks, are the group's parameters one after the other, as ``param_shapes`` lists them. Of stage 3 each parameter is divided among the
ranks, and the last rank's part is padded: rank r's ``fp32_flat_groups`` has its parts of all parameters one after the other. In a
universal checkpoint each parameter has a file, ``zero/<name>/fp32.pt``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import NebulaConfigError, NebulaCorrupt, NebulaNotFound
from .files import File, Files
from .sources import Weights, as_tensor, torch_object, weights_in
from .tensors import Flat, Tensor

__all__ = ["is_in", "read"]

_MODEL = re.compile(r"(?:.*/)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:.*/)?(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNIVERSAL = re.compile(r"(?:.*/)?zero/(.+)/fp32\.pt")


def is_in(files: Files) -> bool:
    """Returns True if the files are those of DeepSpeed."""
    return any(_MODEL.fullmatch(name) or _UNIVERSAL.fullmatch(name) for name in files.names)


def _by_rank(files: Files, pattern: re.Pattern[str]) -> dict[int, str]:
    found = [match for name in files.names if (match := pattern.fullmatch(name))]
    several = sorted({match[2] for match in found})
    if len(several) > 1:
        raise NebulaConfigError(f"{files} has tensor-parallel ranks of DeepSpeed (mp_rank_{', '.join(several)}): only one can be exported")
    return {int(match[1] or 0): match[0] for match in found}


def read(files: Files) -> Weights:
    universal = {match[1]: name for name in files.names if (match := _UNIVERSAL.fullmatch(name))}
    models, optimizers = _by_rank(files, _MODEL), _by_rank(files, _OPTIMIZER)
    experts = [name for name in files.names if "_expert_" in name and name.endswith("_model_states.pt")]
    if experts:
        raise NebulaConfigError(f"{files} has experts in files of their own ({experts[0]}): they cannot be exported yet")
    model = files.file(models[min(models)]) if models else None
    state = torch_object(model) if model is not None else {}
    if not isinstance(state, Mapping):
        raise NebulaCorrupt(f"{models[min(models)]} holds a {type(state).__name__}")
    rest = _of_module(model, state) if model is not None else {}
    if universal:
        found = {name: _universal(files.file(place)) for name, place in universal.items()}
    elif optimizers:
        found = _partitioned(files, state, models, optimizers)
    elif "zero_pp_rank" in min(models.values(), default=""):
        raise NebulaNotFound(f"{files} has no file of the partitions of ZeRO (zero_pp_rank_..._optim_states.pt)")
    else:
        found = {}
    ties = {str(name): str(kept) for name, kept in _pairs(state.get("shared_params"))}
    left = {name: tensor for name, tensor in rest.items() if name not in found and name not in ties}
    if found:  # the module of ZeRO-3 has nothing but placeholders for parameters that are divided
        buffers = set(map(str, state.get("buffer_names") or ()))
        frozen = _frozen(files, state, models)
        left = {name: tensor for name, tensor in left.items() if name in buffers} | frozen
    return Weights({**found, **left}, {name: kept for name, kept in ties.items() if kept in found or kept in left})


def _pairs(shared: Any) -> list[tuple[Any, Any]]:
    return list(shared.items()) if isinstance(shared, Mapping) else [tuple(pair) for pair in shared or ()]


def _of_module(file: File, state: Mapping[str, Any]) -> dict[str, Tensor]:
    module = state.get("module")
    return weights_in(file, state, "module") if isinstance(module, Mapping) and module else {}


def _universal(file: File) -> Tensor:
    state = torch_object(file)
    found = state.get("param") if isinstance(state, Mapping) else state
    if not isinstance(found, torch.Tensor):
        raise NebulaCorrupt(f"{file.name} holds no tensor \"param\"")
    return as_tensor(file, file.name, found)


def _frozen(files: Files, state: Mapping[str, Any], models: Mapping[int, str]) -> dict[str, Tensor]:
    """Returns the parameters that are not trained: whole in stages 1 and 2, divided among the ranks' model files in stage 3."""
    shapes = state.get("frozen_param_shapes") or {}
    if not shapes:
        return {}
    parts = []
    for rank in sorted(models):
        file = files.file(models[rank])
        found = torch_object(file).get("frozen_param_fragments") or {}
        parts.append({name: as_tensor(file, name, value) for name, value in found.items()})
    return {
        str(name): Flat(shape, _cut([part[name] for part in parts if name in part], math.prod(shape))) for name, shape in shapes.items()
    }


def _cut(parts: Sequence[Tensor], count: int) -> list[tuple[Tensor, int, int]]:
    """Returns the first `count` elements of tensors, one after the other."""
    taken = []
    for part in parts:
        size = min(part.count, count)
        taken.append((part, 0, size))
        count -= size
    return [one for one in taken if one[2]]


def _partitioned(files: Files, state: Mapping[str, Any], models: Mapping[int, str], optimizers: Mapping[int, str]) -> dict[str, Tensor]:
    opened = {rank: _partition(files.file(name)) for rank, name in optimizers.items()}
    stage, world, _ = opened[min(opened)]
    missing = sorted(set(range(world)) - opened.keys())
    if missing:
        raise NebulaNotFound(f"{files} has no partition of rank {missing[0]} (zero_pp_rank_{missing[0]}_..._optim_states.pt), of {world} ranks")
    groups = state.get("param_shapes")
    if not groups:
        raise NebulaCorrupt(f"{models.get(min(models, default=0))} of {files} has no param_shapes: DeepSpeed older than 0.4 has written it")
    groups = [groups] if isinstance(groups, Mapping) else list(groups)
    ranks = [opened[rank][2] for rank in range(world)]
    return _stage3(files, groups, ranks) if stage == 3 else _stage2(files, groups, ranks)


def _partition(file: File) -> tuple[int, int, list[Tensor]]:
    """Returns the stage, the number of ranks, and this rank's flat tensors: one for each group."""
    state = torch_object(file)
    state = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or "zero_stage" not in state:
        raise NebulaCorrupt(f"{file.name} is no partition of ZeRO: its optimizer_state_dict has no zero_stage")
    stage, world = int(state["zero_stage"]), state.get("partition_count", 1)
    flat = state.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(flat, (list, tuple)) or not all(isinstance(one, torch.Tensor) for one in flat):
        raise NebulaCorrupt(f"{file.name} has no fp32 partitions")
    count = max(world) if isinstance(world, (list, tuple)) else int(world)
    return stage, int(count), [as_tensor(file, f"group {index}", one) for index, one in enumerate(flat)]


def _stage2(files: Files, groups: Sequence[Mapping[str, Any]], ranks: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for index, shapes in enumerate(groups):
        whole, at = [rank[index] for rank in ranks], 0
        wanted, there = sum(math.prod(shape) for shape in shapes.values()), sum(part.count for part in whole)
        if there < wanted:
            raise NebulaCorrupt(f"{files}: the partitions of group {index} have {there} elements, and its parameters {wanted}")
        for name, shape in shapes.items():
            found[str(name)] = Flat(shape, _slice(whole, at, math.prod(shape)))
            at += math.prod(shape)
    return found


def _slice(parts: Sequence[Tensor], first: int, count: int) -> list[tuple[Tensor, int, int]]:
    """Returns `count` elements of tensors that lie one after the other, from element `first`."""
    taken, at = [], 0
    for part in parts:
        low, high = max(first, at), min(first + count, at + part.count)
        if low < high:
            taken.append((part, low - at, high - low))
        at += part.count
    return taken


def _stage3(files: Files, groups: Sequence[Mapping[str, Any]], ranks: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    shapes = {str(name): shape for group in groups for name, shape in group.items()}
    found: dict[str, Tensor] = {}
    at, there = 0, min(sum(part.count for part in rank) for rank in ranks)
    for name, shape in shapes.items():
        count = math.prod(shape)
        each = -(-count // len(ranks))
        if at + each > there:
            raise NebulaCorrupt(f"{files}: the partitions have {there} elements, and {name} would end at {at + each}")
        parts = [piece for index, rank in enumerate(ranks) for piece in _slice(rank, at, min(each, max(0, count - index * each)))]
        found[name] = Flat(shape, parts)
        at += each
    return found
