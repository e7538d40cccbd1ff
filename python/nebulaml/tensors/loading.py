"""Loads objects from mapped files.

A map is private, verified memory of this process. The loaded tensors lie in it, may be written to, and keep it alive. Nothing is copied.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import _nebula
from .._session import config
from ..errors import NebulaConfigError, NebulaError
from . import containers, dense, device, lazy, names, unpickling, uploading, values

__all__ = ["load", "load_into", "load_lazily", "load_own", "load_tensors", "plan_part"]

# Layouts whose tensors cannot change their number of elements.
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def load(
    mapped: _nebula.Map,
    map_location: Any = None,
    weights_only: bool | None = None,
    storage: torch.UntypedStorage | None = None,
    name: str = "file",
    own_bytes: int = unpickling.OWN_BYTES,
) -> Any:
    """Returns what torch.load would return for the file. ``name``: for errors.

    weights_only: None means False, or True with NEBULA_WEIGHTS_ONLY=1. TORCH_FORCE_WEIGHTS_ONLY_LOAD overrides both.
    storage: the storage of the map, for callers that need its address. own_bytes: storages up to that size get memory of their own.
    """
    weights_only = values.is_weights_only(weights_only)
    if not _is_zip(mapped):
        try:
            return torch.load(unpickling.MapFile(mapped), map_location=map_location, weights_only=weights_only)
        except (NebulaError, MemoryError):
            raise
        except Exception as failure:  # torch's own errors name neither the file nor the fault
            raise pickle.UnpicklingError(
                f"{name!r} is not a file that torch.load reads; read_bytes() gives its bytes ({type(failure).__name__}: {failure})"
            ) from failure
    read = unpickling.read_weights if weights_only else unpickling.read
    return read(mapped, map_location, _storage_of(mapped) if storage is None else storage, own_bytes)


def load_lazily(mapped: _nebula.Map, map_location: Any, weights_only: bool | None) -> Any:
    """Does load(), with tensors of lazy.py, of a map whose bytes may still be in storage. None: the file does not allow it."""
    mapped.fetch_headers()
    with contextlib.suppress(unpickling.NotPlain):
        return unpickling.read_lazily(mapped, map_location, _storage_of(mapped), values.is_weights_only(weights_only))
    return None


def load_tensors(mapped: _nebula.Map, name: str) -> Any:
    """Returns the tensors and plain values of a file, whatever else it holds. No code of the file runs."""
    try:
        return load(mapped, "cpu", True, name=name)  # torch's own loader knows more kinds of tensors
    except pickle.UnpicklingError as failure:
        try:
            return unpickling.read_tensors(mapped, _storage_of(mapped))
        except unpickling.NotPlain:
            raise failure from None


def _is_zip(mapped: _nebula.Map) -> bool:
    view = memoryview(mapped)
    mapped.fetch(0, min(4, len(view)))
    return bytes(view[:4]) == b"PK\3\4" and hasattr(torch.serialization, "_load")


def _storage_of(mapped: _nebula.Map) -> torch.UntypedStorage:
    if not len(memoryview(mapped)):
        return torch.UntypedStorage(0)
    return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()


def load_into(mapped: _nebula.Map, target: Any, name: str, weights_only: bool | None = None) -> Any:
    """Copies the values of a map, whose bytes may still be in storage, into existing tensors, in place.

    Containers must have the same keys and lengths, tensors the same shape and dtype. All this is checked before anything is changed.
    Values that are not tensors replace those of ``target``. Returns ``target``. Raises NebulaConfigError if the two do not fit.
    """
    plan_part(mapped, target, name, weights_only)()
    return target


def plan_part(
    mapped: _nebula.Map,
    target: Any,
    name: str,
    weights_only: bool | None = None,
    select: Callable[[str], bool] | None = None,
    strict: bool = True,
) -> Callable[[], list[str]]:
    """Checks what load_into() checks, for the keys that ``select`` accepts (None: all), and returns a function that loads.

    Without ``strict`` parts that do not fit are left out. The function returns a sentence for each of them.
    """
    file = _Lazy(mapped, name, weights_only)
    source, root, state = file.source, target, file.source
    made: set[str] = set()
    if isinstance(root, torch.nn.Module):
        target = names.plain_keys(root.state_dict())
        state = source = names.plain_keys(source.state_dict() if isinstance(source, torch.nn.Module) else source)
    if select is not None:
        if not isinstance(source, dict) or not isinstance(target, dict):
            raise NebulaConfigError(f"{name} is not a dict of names: it can only be restored as a whole")
        target = {key: value for key, value in target.items() if select(str(key))}
        state = source = {key: value for key, value in source.items() if select(str(key))}
    if isinstance(root, torch.nn.Module):
        made = _made(root, target)
        if made and isinstance(source, dict):
            # Only the module knows how to load values that are no tensors, and extra state.
            free = {key for key in made & source.keys() if _is_free(key, target[key]) and not _is_lazy(source[key])}
            target = {key: value for key, value in target.items() if key not in free}
            source = {key: value for key, value in source.items() if key not in free}
    plan = _Plan()
    if isinstance(target, torch.Tensor):
        plan.tensor(source, target, name)
    else:
        plan.container(source, target, name)
    if plan.problems and strict:
        raise NebulaConfigError(f"{name} does not fit what it is loaded into:\n  {config.in_lines(plan.problems)}")
    is_part = not strict or select is not None

    def run() -> list[str]:
        if made and not is_part:
            file.fetch_all()
            root.load_state_dict(names.own_keys(state, root.state_dict()))
        else:
            plan.run(mapped, file.storage)
        if made and is_part and isinstance(state, dict):
            file.fetch_all()
            own = root.state_dict()
            now = names.plain_keys(own)
            fitting = {key: state[key] for key in made & state.keys() if _is_free(key, now[key]) or _fits(state[key], now[key])}
            root.load_state_dict(names.own_keys(fitting, own), strict=False)
        if select is not None and root is not target and not isinstance(root, torch.nn.Module):
            root.update(target)
        return plan.problems

    return run


def load_own(mapped: _nebula.Map, name: str, weights_only: bool | None = None) -> Any:
    """Returns the object of a file, with tensors in memory of their own, so that none keeps the file mapped. It copies the bytes once."""
    mapped.fetch_headers()
    if _is_zip(mapped):
        with contextlib.suppress(unpickling.NotPlain):
            return unpickling.read_own(mapped, _storage_of(mapped))
    mapped.fetch(0, len(memoryview(mapped)))
    return load(mapped, "cpu", weights_only, name=name, own_bytes=unpickling.ALL_BYTES)


class _Lazy:
    """A file whose bytes may still be in storage, and its object. Its tensors have no values before they are fetched."""

    def __init__(self, mapped: _nebula.Map, name: str, weights_only: bool | None) -> None:
        weights_only = values.is_weights_only(weights_only)
        self._mapped = mapped
        mapped.fetch_headers()
        self.storage = _storage_of(mapped)
        try:
            if not _is_zip(mapped):
                raise unpickling.NotPlain
            self.source = unpickling.read_plain(mapped, "cpu", self.storage)
        except unpickling.NotPlain:
            self.fetch_all()
            self.source = load(mapped, "cpu", weights_only, self.storage, name)

    def fetch_all(self) -> None:
        self._mapped.fetch(0, len(memoryview(self._mapped)))


def _fits(source: Any, target: Any) -> bool:
    return isinstance(source, torch.Tensor) == isinstance(target, torch.Tensor) and getattr(source, "shape", None) == getattr(
        target, "shape", None
    )


def _made(module: torch.nn.Module, state: dict[str, Any]) -> set[str]:
    """Returns the keys of the state_dict() whose values were made for it: the module does not see writes into those."""
    own = {_memory_of(tensor) for tensor in [*module.parameters(), *module.buffers()]} - {None}
    return {key for key, value in state.items() if not isinstance(value, torch.Tensor) or _memory_of(value) not in own}


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, dense.dtensor_class())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor on this rank: the shard of a DTensor, in the DTensor's own memory."""
    return tensor.detach().to_local() if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def _shard(tensor: Any) -> tuple[Any, ...]:
    """Describes which part of a DTensor this rank has. For DTensors of one shape, equal descriptions mean equal parts."""
    placed = tensor.placements
    here = tensor.device_mesh.get_coordinate()
    if here is not None:  # the number among several equal copies does not matter
        here = [at for at, placement in zip(here, placed, strict=True) if not placement.is_replicate()]
    return placed, tuple(tensor.device_mesh.shape), here, tensor.to_local().shape


def _shard_problem(source: torch.Tensor, target: torch.Tensor) -> str:
    if not _is_dtensor(target):
        return "" if not _is_dtensor(source) else "a whole tensor expected, the checkpoint has a DTensor, of which each file holds one shard"
    if not _is_dtensor(source):
        return "a DTensor expected, the checkpoint has a whole tensor"
    expected, found = _shard(target), _shard(source)
    if expected == found:
        return ""
    return (
        "a shard (placements, mesh, place in it, shape) {} expected, the checkpoint has {}: load the file that this rank saved; what is "
        "saved through nebulaml.dcp fits any number of ranks"
    ).format(*(tuple(map(str, shard)) for shard in (expected, found)))


def _memory_of(tensor: torch.Tensor) -> int | None:
    if torch.nn.parameter.is_lazy(tensor):
        return None  # its module makes it when it loads a state
    try:
        return int(_local(tensor).untyped_storage()._cdata)
    except NotImplementedError:  # a sparse tensor has no storage
        return None


def _is_free(key: str, value: Any) -> bool:
    """Returns True for a value of a module that is compared with nothing: its module alone knows what it may become."""
    return not isinstance(value, torch.Tensor) or _is_lazy(value) or key.rpartition(".")[2] == "_extra_state"


def _is_lazy(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and torch.nn.parameter.is_lazy(value)


class _Plan(containers.Plan):
    """All copies that load_into will do."""

    is_tensor = staticmethod(lambda value: isinstance(value, torch.Tensor))

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kinds: set[tuple[Any, Any]] = set()  # of source and target, for pairs that fit in all but shape and dtype

    def tensor(self, source: Any, target: torch.Tensor, path: str) -> None:
        kinds = dense.kind_of(source), dense.kind_of(target)
        if kinds in self._kinds and dense.fills_memory(source) and dense.fills_memory(target):
            if source.shape == target.shape and source.dtype == target.dtype:
                self.copies.append((target, source))
                return
        planned = len(self.copies)
        self._compare(source, target, path)
        if len(self.copies) > planned and None not in kinds and target.layout == torch.strided:
            self._kinds.add(kinds)

    def _compare(self, source: Any, target: torch.Tensor, path: str) -> None:
        if not isinstance(source, torch.Tensor):
            self.problems.append(f"{path}: a tensor expected, the checkpoint has {type(source).__name__}")
        elif source.is_nested or target.is_nested:
            self.problems.append(f"{path}: a nested tensor takes no values in place: load() gives it")
        elif _is_lazy(source):
            self.problems.append(f"{path}: a tensor expected, the checkpoint has a parameter that was not initialized")
        elif _is_lazy(target):
            self.problems.append(f"{path}: a parameter that is not initialized holds no values: give the module, not its state_dict()")
        elif source.shape != target.shape:
            self.problems.append(
                f"{path}: shape {tuple(target.shape)} expected, the checkpoint has {tuple(source.shape)}"
            )
        elif source.dtype != target.dtype:
            self.problems.append(f"{path}: {target.dtype} expected, the checkpoint has {source.dtype}")
        elif source.layout != target.layout:
            self.problems.append(f"{path}: {target.layout} expected, the checkpoint has {source.layout}")
        elif problem := _shard_problem(source, target):
            self.problems.append(f"{path}: {problem}")
        else:
            self.part(_local(source), _local(target), path)

    def part(self, source: torch.Tensor, target: torch.Tensor, path: str) -> None:
        """Checks this rank's part of a tensor, and plans its copy."""
        nowhere = dense.without_memory(target)
        if nowhere is not None:
            self.problems.append(f"{path}: a {nowhere[0]} expected: values cannot be put there")
        elif target.is_inference() and not torch.is_inference_mode_enabled():
            self.problems.append(f"{path}: an inference tensor changes in inference_mode() only: load in that mode, or into its clone()")
        elif target.is_meta and not source.is_meta:
            self.problems.append(f"{path}: a tensor on the meta device holds no values: give it memory first, with to_empty()")
        elif _is_expanded(target):
            self.problems.append(f"{path}: several elements of an expanded tensor are one: it cannot hold {tuple(target.shape)} values")
        elif target.layout in _COMPRESSED and source._nnz() != target._nnz():
            self.problems.append(f"{path}: {target._nnz()} elements in {target.layout} expected, the checkpoint has {source._nnz()}")
        else:
            self.copies.append((target, source))

    def run(self, mapped: _nebula.Map, storage: torch.UntypedStorage) -> None:
        base, end = storage.data_ptr(), 0
        straight, rest, pairs = [], [], []
        for target, source in self.copies:
            (pairs if lazy.is_raw(source) and lazy.is_raw(target) else rest).append((target, source))
        for target, source in sorted(pairs, key=lambda pair: pair[1].data_ptr()):
            offset, size = source.data_ptr() - base, source.numel() * source.element_size()
            if offset >= end and 0 < size <= storage.nbytes() - offset:
                straight.append((offset, size, target.data_ptr()))
                torch.autograd.graph.increment_version(target)
                end = offset + size
            else:  # overlaps the one before
                rest.append((target, source))
        needed, kept = [], [part for _, _, value in self.values for part in _tensors(value)]
        for source in [*(source for _, source in rest), *kept]:
            if source.layout == torch.strided:
                offset, size = source.untyped_storage().data_ptr() - base, source.untyped_storage().nbytes()
                if offset >= 0 and size <= storage.nbytes() - offset:
                    needed.append((offset, size))
        mapped.fetch_parts(needed)
        mapped.read(straight)
        uploads = uploading.Uploads()
        with torch.no_grad():
            for target, source in rest:
                place = device.place(target.untyped_storage()) if lazy.is_raw(source) and lazy.is_raw_bytes(target) else None
                if place is None or not source.numel():
                    target.copy_(source)
                    continue
                at = target.storage_offset() * target.element_size()
                uploads.add(place, source.data_ptr(), target.untyped_storage(), at, source.numel() * source.element_size())
                torch.autograd.graph.increment_version(target)
        uploads.run()
        memo: dict[int, Any] = {}
        for container, key, value in self.values:  # a tensor in a value gets memory of its own
            container[key] = copy.deepcopy(value, memo) if kept and next(_tensors(value), None) is not None else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested containers. Several places may hold the same one."""
    waiting, seen = [value], set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, (dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            waiting += part.values() if isinstance(part, dict) else part


def _is_expanded(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
