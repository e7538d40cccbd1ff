"""The weights of a checkpoint, by name: of plain torch and safetensors files, of torch.distributed.checkpoint, of DeepSpeed."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import io
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._session import documents
from ..errors import NebulaConfigError, NebulaCorrupt, NebulaNotFound
from ..integrations.redirect import SAFETENSORS_DTYPES
from ..tensors import dense, loading, unpickling
from .files import File, Files
from .tensors import Boxes, Computed, Held, Replicated, Stored, Tensor

__all__ = ["Weights", "merged", "read", "torch_object", "weights_in"]

# Keys under which training loops and frameworks keep the weights.
DICTS = (("state_dict",), ("model_state_dict",), ("model",), ("module",), ("app", "model"))

_DTYPES = {name: getattr(torch, text.removeprefix("torch.")) for text, name in SAFETENSORS_DTYPES.items() if hasattr(torch, text[6:])}
_HEADER_BYTES = 100 << 20  # as the format's own reader

Mapped = int | str | Callable[[list[torch.Tensor]], torch.Tensor]


@dataclasses.dataclass
class Weights:
    """tensors: by name. ties: names that stand for another one, which is in `tensors`. has_prefix: the program's module is around the model."""

    tensors: dict[str, Tensor]
    ties: dict[str, str] = dataclasses.field(default_factory=dict)
    has_prefix: bool = False


def read(files: Files, name: str | None, key: str | None) -> Weights:
    """Returns the weights of a checkpoint, whatever wrote it. name: its only file that counts. key: of the weights in that file's dict."""
    from . import dcp, deepspeed

    if name is not None:
        return _of_file(files.file(name), key)
    if dcp.is_in(files):
        return dcp.read(files, key)
    if deepspeed.is_in(files):
        return deepspeed.read(files)
    return _of_files(files, key)


def _of_files(files: Files, key: str | None) -> Weights:
    tensors = _whole(files, r"(?:.*/)?(?:model|pytorch_model|adapter_model)(?:-\d+-of-(\d+))?\.(?:safetensors|bin)")
    chosen = tensors or [_weights_file(files)]
    found = [_of_file(files.file(one), key) for one in chosen]
    result = Weights({}, has_prefix=found[0].has_prefix)
    for one in found:
        result.tensors.update(one.tensors)
        result.ties.update(one.ties)
    return result


def _whole(files: Files, pattern: str) -> list[str]:
    """Returns the files of a Hugging Face directory. Raises NebulaNotFound if one of several is missing."""
    matches = [match for name in sorted(files.names) if (match := re.fullmatch(pattern, name))]
    kinds = {match[0].rpartition(".")[2] for match in matches}
    if len(kinds) > 1:
        matches = [match for match in matches if match[0].endswith("safetensors")]
    if not matches or matches[0][1] is None:
        return [match[0] for match in matches[:1]]
    if len(matches) != int(matches[0][1]):
        raise NebulaNotFound(f"{files} has {len(matches)} of the {int(matches[0][1])} files of its weights")
    return [match[0] for match in matches]


def _weights_file(files: Files) -> str:
    """Returns the name of the one file that has the weights."""
    names = [name for name in files.names if name.endswith((".pt", ".pth", ".ckpt", ".bin", ".safetensors"))] or list(files.names)
    if len(names) == 1:
        return names[0]
    for wanted in ("model.pt", "model.00000.pt", "state.pt", "model.pth", "state.00000.pt", "checkpoint"):  # the last one is Lightning's
        if wanted in names:
            return wanted
    raise NebulaConfigError(f"{files} has the files {', '.join(sorted(files.names)) or '(none)'}: name the one that has the weights")


def _of_file(file: File, key: str | None) -> Weights:
    if file.name.endswith(".safetensors"):
        return _safetensors(file)
    state = torch_object(file)
    return Weights(weights_in(file, state, key), has_prefix=isinstance(state, dict) and "pytorch-lightning_version" in state)


def _safetensors(file: File) -> Weights:
    size = int.from_bytes(file.bytes(0, min(8, file.size)), "little")
    if not 2 <= size <= min(_HEADER_BYTES, file.size - 8):
        raise NebulaCorrupt(f"{file.name} is no safetensors file: its header would have {size} bytes")
    text, tensors = file.bytes(8, size), dict[str, Tensor]()
    try:
        header = documents.parse(text)
        said = dict(header.pop("__metadata__", {}))
        for name, one in header.items():
            dtype, shape, (begin, end) = _DTYPES[one["dtype"]], [*map(operator.index, one["shape"])], map(operator.index, one["data_offsets"])
            if end - begin != math.prod(shape) * dtype.itemsize or not 0 <= begin <= end <= file.size - 8 - size or min(shape, default=0) < 0:
                raise NebulaCorrupt(f"{file.name}: the header gives {name} the bytes {begin} to {end}")
            tensors[name] = Stored(file, 8 + size + begin, shape, dtype, torch.empty(shape, device="meta").stride())
    except NebulaCorrupt:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as failure:
        raise NebulaCorrupt(f"{file.name} has a header that cannot be read ({type(failure).__name__}: {failure})") from failure
    return Weights(tensors, {left: kept for left, kept in said.items() if kept in tensors and left not in tensors})


def torch_object(file: File) -> Any:
    """Returns the object of a torch file. Its tensors have no values yet, unless the file is an unusual one. No code of the file runs."""
    mapped = file.map
    mapped.fetch_headers()
    storage = loading._storage_of(mapped)
    if loading._is_zip(mapped):
        for load in (lambda: unpickling.read_plain(mapped, "cpu", storage), lambda: unpickling.read_tensors(mapped, storage, False)):
            with contextlib.suppress(unpickling.NotPlain):
                return load()
    mapped.fetch(0, file.size)
    try:
        return loading.load_tensors(mapped, file.name)
    except Exception as failure:
        raise NebulaConfigError(f"{file.name} is no file of weights that can be exported: {failure}") from failure


def as_tensor(file: File, name: str, tensor: torch.Tensor) -> Tensor:
    """Returns the tensor of an object that torch_object() made."""
    if isinstance(tensor, dense.dtensor_class()):
        raise NebulaConfigError(f"{file.name} has only one shard of {name}: checkpoints through nebulaml.dcp have all shards")
    tensor = tensor.detach()
    is_usual = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_meta)
    if not is_usual:
        file.map.fetch(0, file.size)
        return Held(dense.to_dense(tensor, f"{name!r} is a"))  # raises for a tensor that is more than its values
    at = tensor.data_ptr() - loading._storage_of(file.map).data_ptr() if tensor.numel() else -1
    identity = (file.name, at, tuple(tensor.shape), tensor.stride(), tensor.dtype) if tensor.numel() else None
    if 0 <= at < file.size:
        return Stored(file, at, tensor.shape, tensor.dtype, tensor.stride(), identity)
    return Held(tensor, identity)


def _at(state: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        if not isinstance(state, Mapping) or key not in state:
            return None
        state = state[key]
    return state


def weights_in(file: File, state: Any, key: str | None) -> dict[str, Tensor]:
    """Returns the flat dict of tensors in the object of a file. Values that are no tensors count as no weights if torch names them so."""
    keys = [(key,), tuple(key.split("."))] if key is not None else [(), *DICTS]
    for path in keys:
        found = _at(state, path)
        if isinstance(found, Mapping):
            found = {name: value for name, value in found.items() if not str(name).endswith("_extra_state")}
        if isinstance(found, Mapping) and found and all(isinstance(value, torch.Tensor) for value in found.values()):
            return {str(name): as_tensor(file, str(name), value) for name, value in found.items()}
    known = ", ".join(sorted(map(str, state))[:20]) if isinstance(state, Mapping) else type(state).__name__
    raise NebulaConfigError(f"{file.name} has no flat dict of tensors{f' under {key!r}' if key else ''}; it holds: {known}")


def merged(files: Files, names: Sequence[str] | str, mapping: Mapping[str, Mapped], key: str | None) -> Weights:
    """Returns the weights of tensor-parallel ranks, put together.

    names: the file of each rank, in order; or a pattern, whose files are taken by the numbers in their names.
    mapping: for each pattern of names the dimension along which ranks divide the tensor, "replicate", or a function of the ranks' tensors.
    """
    from . import deepspeed

    found = sorted(fnmatch.filter(files.names, names), key=_numbers) if isinstance(names, str) else list(names)
    if not found:
        raise NebulaNotFound(f"{files} has no file {names!r}; it has: {', '.join(sorted(files.names))}")
    deepspeed.refuse_parts(files, found)
    ranks = [_of_file(files.file(name), key) for name in found]
    first = ranks[0].tensors
    for rank, one in enumerate(ranks):
        if one.tensors.keys() != first.keys():
            raise NebulaConfigError(f"{found[rank]} and {found[0]} do not have the same names: {_some(one.tensors.keys() ^ first.keys())}")
    unmapped = [name for name in first if _rule(mapping, name) is None]
    if unmapped:
        raise NebulaConfigError(f"the mapping has no pattern for {_some(unmapped)}")
    tensors = {name: _joined(name, [one.tensors[name] for one in ranks], _rule(mapping, name)) for name in first}
    return Weights(tensors, ranks[0].ties, ranks[0].has_prefix)


def _numbers(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _rule(mapping: Mapping[str, Mapped], name: str) -> Mapped | None:
    return next((rule for pattern, rule in mapping.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _joined(name: str, parts: list[Tensor], rule: Any) -> Tensor:
    shapes = [part.shape for part in parts]
    if callable(rule):
        return Computed(name, parts, rule)
    if rule == "replicate":
        if len(set(shapes)) > 1:
            raise NebulaConfigError(f"the mapping says that {name} is replicated, and the ranks have the shapes {shapes}")
        return Replicated(name, parts)
    if isinstance(rule, bool) or not isinstance(rule, int):
        raise NebulaConfigError(f"the mapping gives {name} {rule!r:.100}: give a dimension, \"replicate\" or a function")
    rank = len(shapes[0])
    dimension = rule + rank if rule < 0 else rule
    rest = {(*shape[:dimension], *shape[dimension + 1 :]) for shape in shapes}
    if not 0 <= dimension < rank or len(rest) > 1 or any(len(shape) != rank for shape in shapes):
        raise NebulaConfigError(f"the mapping says that ranks divide {name} along dimension {rule}, and they have the shapes {shapes}")
    at, boxes = 0, []
    for part in parts:
        boxes.append(([at if one == dimension else 0 for one in range(rank)], part))
        at += part.shape[dimension]
    whole = [at if one == dimension else size for one, size in enumerate(shapes[0])]
    return Boxes(whole, parts[0].dtype, boxes)


def whole_piece(content: bytes) -> torch.Tensor:
    """Returns the tensor of a complete torch file."""
    found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(found, torch.Tensor):
        raise NebulaCorrupt(f"a piece of a tensor is a {type(found).__name__}")
    return found
