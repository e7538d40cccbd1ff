"""The weights of a DeepSpeed checkpoint: ZeRO's fp32 partitions, put together, and the buffers of the module.

Of stages 1 and 2, rank r's ``single_partition_of_fp32_groups`` has its part of each parameter group: the parts, in the order of the
ranks, are the group's parameters one after the other, as ``param_shapes`` lists them, each with the gap after it that
``param_alignment_paddings`` says. Of stage 3 each parameter is divided among the
ranks, and the last rank's part is padded: rank r's ``fp32_flat_groups`` has its parts of all parameters one after the other. In a
universal checkpoint each parameter has a file, ``zero/<name>/fp32.pt``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import NebulaConfigError, NebulaCorrupt, NebulaNotFound
from .files import File, Files
from .sources import Weights, as_tensor, torch_object, weights_in
from .tensors import Flat, Tensor

__all__ = ["is_in", "read", "refuse_parts"]

_MODEL = re.compile(r"(?:.*/)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:.*/)?(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT = re.compile(r"(?:.*/)?(?:(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states|expp_rank_\d+_mp_rank_\d+_optim_states)\.pt")
_LAYER = re.compile(r"(?:.*/)?layer_\d+(?:-\w+)?-model_states\.pt")
_UNIVERSAL = re.compile(r"(?:.*/)?zero/(.+)/fp32\.pt")


def is_in(files: Files) -> bool:
    """Returns True if the files are those of DeepSpeed."""
    return any(_MODEL.fullmatch(name) or _UNIVERSAL.fullmatch(name) for name in files.names)


def _by_rank(files: Files, pattern: re.Pattern[str]) -> dict[int, str]:
    found = [match for name in files.names if (match := pattern.fullmatch(name))]
    several = sorted({match[2] for match in found})
    if len(several) > 1:
        raise NebulaConfigError(
            f"{files} has tensor-parallel ranks of DeepSpeed (mp_rank_{', '.join(several)}): give ranks=\"mp_rank_*_model_states.pt\" and a "
            "mapping of the dimensions along which they divide each tensor, or convert it to the universal layout"
        )
    return {int(match[1] or 0): match[0] for match in found}


def refuse_parts(files: Files, ranks: Sequence[str] = ()) -> None:
    """Raises NebulaConfigError if the files of model states lack some of the weights. ranks: those that are to be put together."""
    for name in sorted(files.names):
        if _EXPERT.fullmatch(name):
            raise NebulaConfigError(
                f"{files} has the experts of DeepSpeed-MoE in files of their own ({name}), and a directory without them is no model: save a "
                "state_dict with all experts from the program, and export that"
            )
        if _LAYER.fullmatch(name):
            raise NebulaConfigError(
                f"{files} has the layers of a pipeline in files of their own ({name}): convert it to the universal layout first"
            )
    divided = [name for name in ranks if (found := _MODEL.fullmatch(name)) and found[1] is not None]
    if divided:
        raise NebulaConfigError(f"{divided[0]} of ZeRO stage 3 has placeholders for weights: convert it to the universal layout first")


def read(files: Files) -> Weights:
    refuse_parts(files)
    universal = {match[1]: name for name in files.names if (match := _UNIVERSAL.fullmatch(name))}
    models, optimizers = _by_rank(files, _MODEL), _by_rank(files, _OPTIMIZER)
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
    if "zero_pp_rank" in min(models.values(), default=""):  # of stage 3: the module has placeholders for parameters that are divided
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
    """Returns the parameters of stage 3 that are not trained. They are divided among the model files of the ranks."""
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


@dataclasses.dataclass
class _Partition:
    """One rank's part of the fp32 values: a flat tensor for each group. gaps: for each group, the elements after each parameter, or None."""

    stage: int
    world: int
    flat: list[Tensor]
    gaps: list[list[int]] | None


def _partitioned(files: Files, state: Mapping[str, Any], models: Mapping[int, str], optimizers: Mapping[int, str]) -> dict[str, Tensor]:
    opened = {rank: _partition(files.file(name)) for rank, name in optimizers.items()}
    first = opened[min(opened)]
    missing = sorted(set(range(first.world)) - opened.keys())
    if missing:
        what = f"no partition of rank {missing[0]}, of {first.world} ranks"
        raise NebulaNotFound(f"{files} has {what} (zero_pp_rank_{missing[0]}_..._optim_states.pt)")
    groups = state.get("param_shapes")
    if not groups:
        raise NebulaCorrupt(f"{files} has no param_shapes in its file of model states")
    groups = [groups] if isinstance(groups, Mapping) else list(groups)
    ranks = [opened[rank] for rank in range(first.world)]
    return (_stage3 if first.stage == 3 else _stage2)(files, groups, ranks)


def _partition(file: File) -> _Partition:
    state = torch_object(file)
    state = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or "zero_stage" not in state:
        raise NebulaCorrupt(f"{file.name} is no partition of ZeRO: its optimizer_state_dict has no zero_stage")
    if state.get("ds_zero_partition_groups") is not None:
        raise NebulaConfigError(f"{file.name} divides some parameters among a part of the ranks, as experts: they cannot be exported yet")
    stage = 3 if "fp32_flat_groups" in state else 2  # zero_stage itself is an object of DeepSpeed's
    flat = state.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    world = state.get("partition_count")
    world = max(world) if isinstance(world, (list, tuple)) else world
    if not isinstance(flat, (list, tuple)) or not all(isinstance(one, torch.Tensor) for one in flat) or not isinstance(world, int):
        raise NebulaCorrupt(f"{file.name} has no fp32 partitions")
    parts = [as_tensor(file, f"group {index}", one) for index, one in enumerate(flat)]
    return _Partition(stage, world, parts, state.get("param_alignment_paddings"))


def _stage2(files: Files, groups: Sequence[Mapping[str, Any]], ranks: Sequence[_Partition]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if any(len(rank.flat) != len(groups) for rank in ranks):
        raise NebulaCorrupt(f"{files}: the partitions have other groups than the {len(groups)} of the model states")
    for index, shapes in enumerate(groups):
        whole, at = [rank.flat[index] for rank in ranks], 0
        gaps = [0] * len(shapes) if ranks[0].gaps is None else ranks[0].gaps[index]
        wanted, there = sum(map(math.prod, shapes.values())) + sum(gaps), sum(part.count for part in whole)
        unit = 2 * len(ranks)  # DeepSpeed pads the end to a multiple of this
        if there < wanted - sum(gaps[-1:]) or -(-wanted // unit) != -(-there // unit):
            raise NebulaCorrupt(f"{files}: the partitions of group {index} have {there} elements, and its parameters {wanted}")
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            found[str(name)] = Flat(shape, _slice(whole, at, math.prod(shape)))
            at += math.prod(shape) + gap
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


def _stage3(files: Files, groups: Sequence[Mapping[str, Any]], ranks: Sequence[_Partition]) -> dict[str, Tensor]:
    shapes = {str(name): shape for group in groups for name, shape in group.items()}
    found: dict[str, Tensor] = {}
    at, there = 0, min(sum(part.count for part in rank.flat) for rank in ranks)
    for name, shape in shapes.items():
        count = math.prod(shape)
        each = -(-count // len(ranks))
        if at + each > there:
            raise NebulaCorrupt(f"{files}: the partitions have {there} elements, and {name} would end at {at + each}")
        parts = [piece for index, rank in enumerate(ranks) for piece in _slice(rank.flat, at, min(each, max(0, count - index * each)))]
        found[name] = Flat(shape, parts)
        at += each
    return found
