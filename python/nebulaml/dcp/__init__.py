"""torch.distributed.checkpoint through Nebula.

``NebulaStorageWriter(path)`` and ``NebulaStorageReader(path)`` take ``path = <persist>/<tag>``, or a `checkpoint_id` for
each call. ``FileSystemReader``, ``dcp.load`` and ``dcp_to_torch_save`` can read what they write. A save returns when the values
are fixed in memory, so ``dcp.save`` with this writer already takes milliseconds. ``async_save`` adds a future for durability,
and skips the planning if an earlier save had the same shapes. Neither runs collectives in the background, so they cannot mix
with those of a training step.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import inspect
import logging
import multiprocessing
import os
import pickle
import secrets
import threading
import uuid
import weakref
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

try:
    from torch.distributed.distributed_c10d import _get_object_coll_device
except ImportError:  # before torch 2.6
    from torch.distributed.distributed_c10d import _get_pg_default_device as _get_object_coll_device

from .._session.waits import interruptible
from ..checkpoint import Checkpoint
from ..errors import NebulaConfigError, NebulaError
from ..tensors import dense, device
from .places import METADATA, check_name, frame, is_place, is_taken, session_for, split
from .reader import NebulaStorageReader

log = logging.getLogger("nebulaml")

__all__ = ["NebulaStager", "NebulaStorageReader", "NebulaStorageWriter", "async_save"]

STOCK_ARGUMENTS = {"single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead", "cache_staged_state_dict"}
_TAKES_NO_DIST = "no_dist" in inspect.signature(dcp.save).parameters  # torch 2.4 finds out by itself
VERSION = "1.0.0"  # of the metadata's format, as torch writes it


def _to_dense(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return dense.to_dense(tensor, f"{name}: there is no place in a file of torch.distributed.checkpoint for a")


def _item_parts(tensor: torch.Tensor, name: str) -> tuple[list[Any], int]:
    """Returns one tensor as a complete torch file: its parts in order, and its size in bytes. A contiguous tensor is not copied."""
    tensor = _to_dense(tensor, name)
    # if device.covers it, the device writes into the image itself
    if tensor.device.type != "cpu" and not device.covers(tensor.untyped_storage()):
        tensor = tensor.cpu()
    tensor = tensor.contiguous()
    before, after = frame(tensor.shape, tensor.dtype)
    return [before, tensor, after], len(before) + tensor.numel() * tensor.element_size() + len(after)


class NebulaStager:
    """Copies a state dict into memory that it keeps for later saves. It is an AsyncStager for other writers than ours.

    It uses memory again when no tensor refers to it any more, so two saves at the same time never share it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}  # by size in bytes; guarded by _lock
        self._closed = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def synchronize_staging(self) -> None:
        """Does nothing: stage() returns when all is copied."""

    def stage(self, state_dict: STATE_DICT_TYPE, **_: Any) -> STATE_DICT_TYPE:
        """Returns a copy of all tensors.

        DTensors and ShardedTensors keep their placement. A tensor that occurs twice is copied once. Views become tensors of their own.
        """
        return self._copy(state_dict, {}, "")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._free.clear()

    def _lend(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        with self._lock:
            kept = self._free.get(size)
            memory = kept.pop() if kept else torch.empty(size, dtype=torch.uint8, device="cpu")
        # Each loan gets a new storage. It ends with the last tensor that refers to it, for example a DTensor's own view.
        loan = (ctypes.c_char * size).from_address(memory.data_ptr())
        weakref.finalize(loan, self._take_back, size, memory).atexit = False
        return torch.frombuffer(loan, dtype=tensor.dtype).view(tensor.shape)

    def _take_back(self, size: int, memory: torch.Tensor) -> None:
        # The garbage collector calls this, perhaps on a thread that holds the lock: then the memory is freed instead.
        if self._lock.acquire(blocking=False):
            if not self._closed:
                self._free.setdefault(size, []).append(memory)
            self._lock.release()

    def _copy(self, value: Any, memo: dict[Any, Any], name: str) -> Any:
        from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

        if isinstance(value, dense.dtensor_class()):
            # from_local() would move the copy to the devices of the mesh
            return dense.dtensor_class()(self._copy(value.to_local(), memo, name), value._spec, requires_grad=False)
        if isinstance(value, ShardedTensor):
            shards = [Shard(self._copy(shard.tensor, memo, name), shard.metadata) for shard in value.local_shards()]
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                shards, value.metadata(), process_group=value._process_group, sharding_spec=value.sharding_spec()
            )
        if isinstance(value, torch.Tensor):
            saved = _to_dense(value, name)
            key = (saved.untyped_storage()._cdata, saved.storage_offset(), tuple(saved.shape), saved.stride(), saved.dtype)
            if key not in memo:
                # holding `saved` keeps its memory, so that the key stays unique
                memo[key] = (self._lend(saved).copy_(saved), saved)
            return memo[key][0]
        if isinstance(value, dict):
            return {key: self._copy(item, memo, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(self._copy(item, memo, f"{name}.{index}") for index, item in enumerate(value))
        return pickle.loads(pickle.dumps(value)) if _is_mutable(value) else value


def _is_mutable(value: Any) -> bool:
    return not isinstance(value, (int, float, str, bytes, bool, complex, type(None)))


class _Save(threading.local):
    """The state of one save in progress."""

    path: str | None = None
    id: str | None = None  # of the save, in its metadata
    session: Any = None
    tag = ""
    rank = 0
    coordinator = False
    collectives = True  # False: each rank plans alone and has metadata of its own
    members: int | None = None  # the number of ranks that take part, where only the caller knows it
    hides = False  # this rank saves an empty file in place of the metadata of all ranks, which an earlier save of the tag has left
    is_part = False  # only a part of the job's ranks saves
    checkpoint: Any = None
    local: SavePlan | None = None  # the plan that this rank proposed
    final: SavePlan | None = None  # the plan that it was given to write
    results: list[WriteResult] | None = None


class NebulaStorageWriter(StorageWriter):
    """Writes `path` = <persist>/<tag>. It is also its own stager for torch's ``async_save``.

    On each rank the items of its plan become one file ``__<rank>_0.distcp``, which is captured at once. The coordinator adds
    ``.metadata``. If the ranks plan without collectives, each adds ``__<rank>.metadata`` instead. The checkpoint is complete
    when every rank has committed. If only a part of the job's ranks saves, it is complete when all files of these ranks exist.

    overwrite: False refuses a path that has a checkpoint. overlap: as in Checkpoint.save. stock: arguments of torch's
    FileSystemWriter about how it writes its files. They have no effect here. Raises TypeError for other arguments.
    """

    def __init__(self, path: Any = None, *, overwrite: bool = True, overlap: bool = False, **stock: Any) -> None:
        super().__init__()
        unknown = sorted(stock.keys() - STOCK_ARGUMENTS)
        if unknown:
            raise TypeError(f"NebulaStorageWriter takes no argument {', '.join(unknown)}")
        self.__setstate__({"_path": None if path is None else os.fspath(path), "_overwrite": overwrite, "_overlap": overlap})

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_overwrite": self._overwrite, "_overlap": self._overlap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path, self._overwrite, self._overlap = state["_path"], state["_overwrite"], state["_overlap"]
        self._stager = NebulaStager()
        self._save = _Save()  # torch runs each save on one thread, and two saves may run at the same time

    # As a stager.
    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: STATE_DICT_TYPE, **_: Any) -> STATE_DICT_TYPE:
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Does nothing: stage() returns when all is copied."""

    def close(self) -> None:
        self._stager.close()

    # As a writer.
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return is_place(checkpoint_id)

    @property
    def checkpoint_id(self) -> Any:
        return self._save.path or self._path

    def reset(self, checkpoint_id: Any = None) -> None:
        self._save.path = None if checkpoint_id is None else os.fspath(checkpoint_id)
        self._save.checkpoint, self._save.id = None, str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        self._save.id = self._save.id or str(uuid.uuid4())
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save.id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self.checkpoint_id is None:
            raise NebulaConfigError("NebulaStorageWriter has no path: give one, or a checkpoint_id to the save")
        if _is_helper():
            raise NebulaConfigError(
                "AsyncCheckpointerType.PROCESS saves in a process of its own, which cannot be a rank of the job beside its trainer: leave "
                "async_checkpointer_type out, because Nebula's agent writes outside of the trainer in any case"
            )
        persist, self._save.tag = split(self.checkpoint_id)
        check_name(self._save.tag)
        self._save.session = session_for(persist)
        if is_coordinator and not self._overwrite and is_taken(self._save.session, persist, self._save.tag):
            raise NebulaConfigError(f"{self.checkpoint_id} has a checkpoint, and the writer was made with overwrite=False")
        here = dist.get_rank() if dist.is_initialized() else 0
        rank = kwargs.get("rank")
        self._save.rank = rank if rank is not None else here
        self._save.coordinator = is_coordinator
        self._save.collectives = kwargs.get("use_collectives", True)
        if not self._save.collectives and self._save.members is None and self._save.rank != here:
            raise NebulaConfigError(
                f"rank {here} saves {self.checkpoint_id} as rank {self._save.rank} of a part of the job, and without collectives nothing "
                "says how many ranks that part has: save with use_collectives=True, or with nebulaml.dcp.async_save"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._save.local = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        number = secrets.randbits(62) + 1
        if not self._save.collectives:  # this rank's own plan
            members = self._save.members or self._save.session._engine.place().world
            return [dataclasses.replace(plan, storage_data=(self._save.rank, number, members)) for plan in plans]
        return [dataclasses.replace(plan, storage_data=(index, number, len(plans))) for index, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        parts, results = _lay_out(plan, planner)
        self._save.final, self._save.results = plan, results
        self._begin(plan)
        self._require(self._put(plan, parts))
        if self._save.collectives and not self._save.coordinator:
            self._require(self._save.checkpoint.commit())
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result(results)
        return future

    def _begin(self, plan: SavePlan) -> None:
        members = plan.storage_data[2]
        self._save.is_part = members != self._save.session._engine.place().world
        is_complete = members == 1 or not self._save.is_part  # other ranks could not count a file that only rank 0 knows of
        self._save.hides = self._save.coordinator and not self._save.collectives and is_complete and self._has_metadata_of_all()
        # Do not wait for ranks that take no part: count the files. Each member writes one, and the metadata come to them.
        files = members + (1 if self._save.collectives else members) + self._save.hides
        self._save.checkpoint = self._save.session.checkpoint(self._save.tag, files if self._save.is_part else -2)

    def _has_metadata_of_all(self) -> bool:
        session, persist = self._save.session, split(self.checkpoint_id)[0]
        try:
            handle = interruptible(session._engine.session().find, self._save.tag, persist)
            return METADATA in Checkpoint._found(session._engine, handle, persist)._all_files()
        except NebulaError:  # there is no such tag, or the save reports the failure
            return False

    def _put(self, plan: SavePlan, parts: list[Any]) -> bool:
        return not (parts or self._save.is_part) or self._save.checkpoint.save_bytes(_file_of(plan), parts, self._overlap)

    def _put_metadata(self, metadata: Metadata) -> bool:
        name = METADATA if self._save.collectives else f"__{self._save.rank}{METADATA}"
        # torch's own reader takes the metadata of all ranks if it can read them
        is_hidden = not self._save.hides or self._save.checkpoint.save_bytes(METADATA, [])
        return self._save.checkpoint.save_bytes(name, [pickle.dumps(metadata)]) and is_hidden

    def _require(self, is_done: bool) -> None:
        """Raises the failure of a save that returned False (on_error="warn"): dcp.save has no return value that could say so."""
        if not is_done:
            checkpoint = self._save.checkpoint
            raise checkpoint._failure or NebulaError(f"checkpoint {checkpoint.tag!r} could not be saved: {checkpoint.error}")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = VERSION
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        self._require(self._put_metadata(metadata))
        self._require(self._save.checkpoint.commit())


def _is_helper() -> bool:
    """Returns whether this process is one in which torch saves for a trainer."""
    target = getattr(multiprocessing.current_process(), "_target", None)
    return getattr(target, "__module__", None) == "torch.distributed.checkpoint._async_process_executor"


def _file_of(plan: SavePlan) -> str:
    """Returns the name of the file that a rank writes. The coordinator has numbered the plans."""
    return f"__{plan.storage_data[0]}_0.distcp"


def _lay_out(plan: SavePlan, planner: SavePlanner) -> tuple[list[Any], list[WriteResult]]:
    """Returns a rank's file as a list of parts, and the place of each item in it."""
    name = _file_of(plan)
    parts: list[Any] = []
    results: list[WriteResult] = []
    offset = 0
    for item in plan.items:
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            new, size = [data.getvalue()], data.getbuffer().nbytes
        else:
            new, size = _item_parts(data, item.index.fqn)
        parts += new
        results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=_StorageInfo(name, offset, size)))
        offset += size
    return parts, results


class _Known(NamedTuple):
    """A save that all ranks planned together. Later saves of the same shapes use its plan."""

    group: Any
    local: SavePlan
    final: SavePlan
    results: list[WriteResult]
    metadata: Metadata

    @property
    def number(self) -> int:
        """The number that the coordinator drew: one plan has the same number on all ranks, another plan another number."""
        return int(self.final.storage_data[1])


KNOWN_MAX = 2  # a job that also saves an average of its weights saves two states in turn
_known_lock = threading.Lock()  # guards the list below
_known: list[_Known] = []


def _remember(known: _Known) -> None:
    with _known_lock:
        _known.append(known)
        del _known[:-KNOWN_MAX]


def _recall(group: Any, planner: DefaultSavePlanner) -> tuple[_Known | None, list[Any]]:
    """Returns the known plan that fits the planner's state to the byte, and the parts of this rank's file by it."""
    with _known_lock:
        candidates = _known[::-1]  # newest first: if only the states of other ranks differ, the newest plan most likely fits them, too
    local = planner.create_local_plan()
    for known in candidates:
        if known.group is group and known.local == local:
            parts, results = _lay_out(planner.finish_plan(known.final), planner)
            if results == known.results:
                return known, parts
    return None, []


def _all_know(known: _Known | None, group: Any) -> bool:
    """Returns True if every rank of the group has the same plan. It takes one collective of two numbers."""
    if group is None or dist.get_world_size(group) == 1:
        return known is not None
    number = known.number if known else 0
    numbers = torch.tensor([number, -number], device=_get_object_coll_device(group))
    dist.all_reduce(numbers, dist.ReduceOp.MIN, group=group)
    least, most = int(numbers[0]), -int(numbers[1])
    return least == most != 0


def _save_as_before(state: STATE_DICT_TYPE, path: Any, writer: NebulaStorageWriter, group: Any) -> Metadata | None:
    """Saves by the plan of an earlier save. Returns None if a rank has no plan that fits; then all ranks plan again."""
    rank = dist.get_rank(group) if group is not None else 0
    known, parts = None, []
    try:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        known, parts = _recall(group, planner)
    except Exception as failure:  # the new planning reports the failure to every rank
        log.debug("nebula: the plan of an earlier save cannot be used again: %s", failure)
    if not _all_know(known, group):
        return None
    assert known is not None
    writer.reset(path)
    writer.set_up_storage_writer(rank == 0, rank=rank)
    metadata = copy.copy(known.metadata)
    metadata.storage_meta = writer.storage_meta()
    writer._begin(known.final)
    try:
        writer._put(known.final, parts)
        if rank == 0:
            writer._put_metadata(metadata)
    except BaseException as failure:
        writer._save.checkpoint._give_up(f"a save failed: {failure!r:.400}")
        raise
    writer._save.checkpoint.commit()
    return metadata


def async_save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: Any = None,
    storage_writer: NebulaStorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Metadata]:
    """Saves like ``dcp.save``: the values are fixed on return. The future gives the metadata when the checkpoint is durable.

    A save by the ranks of a `process_group`, or with `no_dist` by this rank alone, is complete when those ranks have saved.
    Without `use_collectives` each rank plans alone and writes metadata of its own. Torch 2.4 has neither of these two arguments.
    Otherwise the ranks agree on the plan inside this call. No collective runs after it, so the default process group is safe to
    use. If the names, shapes, types and places of the state equal those of one of the last two planned saves, that plan is used
    again: the ranks only confirm that all have it. With a `planner` every save is planned.
    """
    writer = storage_writer or NebulaStorageWriter(checkpoint_id)
    alone = no_dist or not dist.is_initialized()
    group = None if alone else process_group or dist.group.WORLD
    state = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
    metadata = _save_as_before(state, checkpoint_id, writer, group) if planner is None and use_collectives else None
    if metadata is None:
        writer._save.members, writer._save.checkpoint = 1 if group is None else dist.get_world_size(group), None
        try:
            metadata = dcp.save(
                state,
                checkpoint_id=checkpoint_id,
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                **({"no_dist": True} if no_dist or (alone and _TAKES_NO_DIST) else {}),
                **({} if use_collectives else {"use_collectives": False}),
            )
        except (Exception, CheckpointException) as failure:  # of some rank, perhaps after this one has committed
            if writer._save.checkpoint is not None:
                writer._save.checkpoint._give_up(f"a save failed: {failure!r:.400}")
            raise
        finally:
            writer._save.members = None
        save = writer._save
        if planner is None and use_collectives and save.local and save.final and save.results is not None:
            _remember(_Known(group, save.local, save.final, save.results, metadata))
    checkpoint = writer._save.checkpoint
    future: Future[Metadata] = Future()
    future.set_running_or_notify_cancel()  # it can no longer be cancelled

    def wait() -> None:
        try:
            checkpoint.wait("durable")
            future.set_result(metadata)
        except BaseException as error:  # noqa: BLE001  the caller of result() gets it
            future.set_exception(error)

    threading.Thread(target=wait, name="nebula-durable", daemon=True).start()
    return future
