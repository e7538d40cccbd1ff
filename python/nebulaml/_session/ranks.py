"""Finds out which rank of a job this process is."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

from ..elastic import worker

__all__ = ["Place", "awaits_group", "current", "launcher", "mark", "run", "store", "take_nodes"]

_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
_WORLD = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS", "PMI_SIZE")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID")
_LOCAL_WORLD = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_LAUNCHERS = {  # names of programs and of modules
    b"torchrun",
    b"torch.distributed.run",
    b"torch.distributed.launch",
    b"nebulaml.elastic.run",
    b"accelerate",
    b"accelerate-launch",
}
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "CROSS_SIZE", "GROUP_WORLD_SIZE")
_READ = tuple(
    name.encode() for name in (*_RANK, *_WORLD, *_LOCAL_RANK, *_LOCAL_WORLD, *_NODES, "NODE_RANK", "NEBULA_NODE_ID")
)


class Place(NamedTuple):
    """One rank of ``world``, and its number among the processes of its node."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def _first(names: tuple[str, ...]) -> int | None:
    for name in names:
        text = os.environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return None


def _from_process_group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    begun = getattr(distributed, "is_initialized", None)  # None: torch was built without it
    if distributed is None or begun is None or not begun():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _from_environment() -> tuple[int, int]:
    # Take both from one launcher: SLURM variables of an interactive shell must not mix with those of torchrun.
    for rank_name, world_name in zip(_RANK, _WORLD, strict=True):
        rank, world = os.environ.get(rank_name, ""), os.environ.get(world_name, "")
        if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
            return int(rank), int(world)
    if awaits_group():  # beyond the first node this is not the final rank, but no other process of that node has it
        return int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def awaits_group() -> bool:
    """True if Lightning's own launcher has started this process, which learns its rank from the process group later.

    Until then the process that Lightning was started from is rank 0 of 1: nothing shows it that others will follow.
    """
    local, world = os.environ.get("LOCAL_RANK", ""), os.environ.get("WORLD_SIZE", "")
    known = "RANK" in os.environ or "NODE_RANK" not in os.environ or _from_process_group() is not None
    return not known and local.isdecimal() and world.isdecimal() and int(local) < int(world)


def current() -> Place:
    """Returns the rank from torch.distributed if it is initialised, else from the launcher's environment, else rank 0 of 1."""
    rank, world = _from_process_group() or _from_environment()
    if world == 1:
        return Place()
    local_rank, local_world = _first(_LOCAL_RANK) or 0, _first(_LOCAL_WORLD)
    if local_world is None:
        # The launcher does not say how many ranks this node has. Every rank must decide alike whether there are several nodes, so the
        # decision must not depend on the rank.
        several = (_first(_NODES) or _nodes) > 1 or os.environ.get("NEBULA_NODE_ID", "") != ""
        local_world = min(local_rank + 1, world - 1) if several else world
    return Place(rank, world, min(local_rank, local_world - 1), local_world)


_nodes = 1


def take_nodes(count: int) -> None:
    """Keeps how many nodes the job has, as a framework knows it: its own launcher may not say so. All ranks call it with the same number."""
    global _nodes
    _nodes = count


def mark() -> object:
    """Returns a value of all that current() and awaits_group() read. While it is equal, their answers are; they take longer."""
    # A dict of bytes: a missing name costs no exception. A replacement of os.environ by the program has no _data.
    found = getattr(os.environ, "_data", None)
    return (_from_process_group(), _start, _nodes, tuple(map(found.get, _READ))) if found is not None else object()


shared: Any = None  # the key-value store of a job without torch (nebulaml.jax), with the methods that Nebula calls


def store() -> Any:
    """Returns the key-value store of torch's default process group, or that of a job without torch. None: there is no group."""
    if _from_process_group() is None:
        return shared
    return sys.modules["torch.distributed"].distributed_c10d._get_default_store()


_run: tuple[tuple[Place, bool], tuple[str, bool]] | None = None  # with its name, and whether no other start has had that


def run(place: Place) -> str:
    """Returns the name of this incarnation of the job: the same text on all its ranks, another one after every restart.

    The process keeps the name, so that it does not change when a process group starts. So either all ranks call init()
    before the process group starts, or all call it after that.
    """
    global _run
    key = (place, awaits_group())
    if _run is None or _run[0] != key:
        _run = (key, _find_run(place))
    return _run[1][0]


def is_new(place: Place) -> bool:
    """Whether no other start of the job can have had the name of this run."""
    run(place)
    return _run is not None and _run[1][1]


_start = ""  # of the run, from what all its ranks have said


def begun(start: str) -> None:
    """Keeps what distinguishes this start of the job from an earlier one to which the launcher gave the same name. The first call counts."""
    global _start
    _start = _start or f".{start}"


def start() -> str:
    """Returns what follows the name that the launcher gave the run. "": its ranks have not agreed, or no other start has had that name."""
    return _start


def _find_run(place: Place) -> tuple[str, bool]:
    if place.world == 1:
        return os.urandom(8).hex(), True
    kept = store()
    if kept is not None:
        # The first rank names it: no collective, and no rank waits.
        return str(kept.compare_set("nebula/run", "", os.urandom(8).hex()).decode()), True
    name = _run_of_launcher(os.environ)
    return name, name != "" and name == os.environ.get(worker.ROUND)


def _run_of_launcher(environment: Any) -> str:
    address = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
    elastic = environment.get("TORCHELASTIC_RUN_ID")
    if elastic is not None:
        # TORCHELASTIC_RESTART_COUNT differs between nodes of which one has joined later, and stays if a node comes or goes.
        round_ = environment.get(worker.ROUND, "")
        if round_.startswith(elastic + "/"):  # else it is that of a torchrun around this one
            return str(round_)
        # Without --rdzv-id every job is called "none". Then its port distinguishes two launches.
        name = elastic if elastic != "none" else f"none@{address}"
        return f"{name}.{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if "SLURM_JOB_ID" in environment:
        parts = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
        return ".".join(parts)
    return address if address != ":" else ""


def launcher() -> int | None:
    """Returns the torchrun that started this process: the nearest ancestor without torchrun's variables. None: there is none."""
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    while pid > 0:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_worker = any(one.startswith(b"TORCHELASTIC_RUN_ID=") for one in file.read().split(b"\0"))
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().split(b"\0")[:8]  # an interpreter and its options come before the program's name
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return None
        if not is_worker:  # the process that has adopted an orphan is not its launcher
            return pid if _LAUNCHERS & {os.path.basename(word) for word in command} else None
        pid = parent
    return None
