"""Every rank loads the same version: the newest that every rank can load (docs/protocol.md, "Agreeing at resume").

A rank's inventory lists the versions that it could load now. With a process group the ranks exchange inventories through
its key-value store, without one through small documents beside the checkpoints. No collective runs, and no rank waits
longer than NEBULA_AGREE_TIMEOUT seconds. A job on one node, or of one rank, needs no agreement: one agent answers for all.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import _nebula
from ..errors import NebulaConfigError, NebulaCorrupt, NebulaError, NebulaStorageError, NebulaTimeout
from . import config, ranks

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Agreement", "choose", "inventory"]

_WHOLE = ("committed", "replicated", "durable")
_SENT_MAX = 64  # versions; older ones are not worth the traffic of many ranks
_PAUSE_S = (0.002, 0.25)
_LOOKS, _LOOK_S = 3, 2.0  # of ranks that see different storage: a version may have become durable between their looks

_counted: set[str] = set()  # prefixes of the questions in the key-value store in which this rank has been counted
_numbers = itertools.count(1)  # numbers of sessions, which all ranks make in the same order


class Agreement:
    """The versions that the ranks of one session have agreed on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.proxy(engine)  # which owns this object
        self._lock = threading.RLock()  # guards all below
        self._pinned: dict[str | None, list[dict[str, Any]]] = {}  # the agreed versions by storage path; None: the session's path
        self._answered: dict[str | None, int] = {}  # the number of answered questions, which gives each question keys of its own
        # by storage path: (tag, reason) of stored versions that this rank cannot load
        self._passed: dict[str | None, list[tuple[str, str]]] = {}
        self._told: dict[str | None, list[dict[str, Any]]] = {}  # the inventory that this rank has sent and that has no answer yet
        self._own: dict[str | None, list[dict[str, Any]]] = {}  # the inventory of the last answered question
        self.number = 0  # of the session, part of its questions; 0: the session of the package's functions
        self._moves = 0  # changes of path or job, the same on all ranks: after one, a question is another question
        self._saving = False

    def join(self) -> None:
        """Numbers this session: all ranks make it, and it is not the session of the package's functions."""
        self.number = next(_numbers)

    def needed(self) -> bool:
        """True until this session begins to save, if other nodes may know more than this node's agent."""
        place = self._engine.place()
        return place.world > 1 and place.local_world < place.world and not self._saving

    def begun_saving(self) -> None:
        """Lets this rank's agent answer from now on: all ranks have the versions that it calls committed, so no rank needs to wait."""
        if self._saving and not self._pinned:
            return
        with self._lock:
            self._saving = True
            self._pinned.clear()

    def moved(self) -> None:
        """Forgets the agreement after a change of path or job."""
        with self._lock:
            self._moves += 1
            self._pinned.clear()
            self._answered.clear()
            self._told.clear()

    def forget(self) -> None:
        """Resets all but the numbers of the questions to the start of the process."""
        with self._lock:
            self._saving = False
            self._pinned.clear()

    def after_fork(self) -> None:
        """Renews the lock in a forked child, where no other thread holds it."""
        self._lock = threading.RLock()

    def passed_over(self, path: str | None, chosen: dict[str, Any]) -> list[tuple[str, str]]:
        """Returns (tag, reason) of versions that may be newer than the chosen one, as far as this rank knows."""
        with self._lock:
            result = list(self._passed.get(path, []))
            own = self._own.get(path, [])
        keys = [_key(version) for version in own]
        newer = own[: keys.index(_key(chosen))] if _key(chosen) in keys else []
        return result + [(version["tag"], "not every rank can load it") for version in newer]

    def answer(self, path: str | None) -> list[dict[str, Any]]:
        """Returns the versions that all ranks can load, newest first; all ranks get the same list. It stays until this rank saves."""
        with self._lock:
            looks = 0
            while path not in self._pinned:
                # after a timeout, a rank asks the same question again: the others may still answer it
                turn = self._answered.get(path, 0) + 1
                if path not in self._told:
                    self._told[path], self._passed[path] = _look(self._engine, path)
                own = self._own[path] = self._told[path]
                by_key = {_key(version): version for version in own}
                # Take this rank's own numbers: without shared storage, the numbers of another node mean nothing to this node's agent.
                agreed = _agree(self._engine, path, f"{self.number}.{self._moves}.{turn}", own)
                self._answered[path] = turn
                del self._told[path]
                looks += 1
                if not agreed["refused"]:
                    self._pinned[path] = [by_key[_key(version)] for version in agreed["versions"]]
                elif looks == _LOOKS:
                    raise NebulaStorageError(agreed["refused"])
                else:
                    time.sleep(_LOOK_S)
            return self._pinned[path]


def _key(version: dict[str, Any]) -> tuple[Any, ...]:
    # Nodes without shared storage number generations and sequences each for itself, but have the run in common.
    if version["shared"]:
        return (version["tag"], version["generation"], version["sequence"])
    return (version["tag"], version["run"], version["generation"])


def _order(versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the versions newest first.

    Of the tags ``global_step<n>`` the largest n of the latest line comes first. Of other tags the latest commit comes first.
    Of one of each kind the later commit comes first. Versions that a later line has abandoned come last.
    """
    kept = [version for version in versions if not version.get("abandoned")]
    if len(kept) < len(versions):
        return _order(kept) + _order([{**version, "abandoned": False} for version in versions if version.get("abandoned")])
    stepped = sorted((v for v in versions if _nebula.follows_step(v["tag"])), key=lambda v: (v.get("began", 0), v["step"], v["sequence"]))
    others = sorted((v for v in versions if not _nebula.follows_step(v["tag"])), key=lambda v: v["sequence"])
    result = []
    while stepped or others:
        if not others or (stepped and stepped[-1]["sequence"] >= others[-1]["sequence"]):
            result.append(stepped.pop())
        else:
            result.append(others.pop())
    return result


def inventory(engine: Engine, path: str | None) -> list[dict[str, Any]]:
    """Returns the versions that this rank could load now, newest first."""
    return _look(engine, path)[0]


def _look(engine: Engine, path: str | None) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Returns the inventory, and (tag, reason) of the stored versions that this rank cannot load."""
    report = json.loads(engine.session(patient=True).report(_nebula.REPORT_VERSIONS, path))
    shared = (path or engine.settings().persist_path) is not None
    whole = [
        {
            "tag": one["tag"],
            "state": one["state"],
            "generation": one["generation"],
            "sequence": one["sequence"],
            "step": one["step"],
            "began": one["line"][-1][0] if "line" in one else 0,  # when its line of history began (formats.md)
            "abandoned": one["abandoned"],
            "run": one.get("run", ""),
            "shared": shared,
            "world": one.get("world", 1),
            "ranks": one.get("ranks") if "storage" not in one["source"] else None,  # ranks whose parts this node has; None: all, or unknown
        }
        for one in report["versions"]
        if one["source"] and (one["state"] in _WHOLE or (one["state"] == "failed" and one["sequence"]))  # given up, but whole
    ]
    if not whole and (report["problems"] or report["passed"]):  # "none" would make the job start from nothing
        raise NebulaCorrupt("no checkpoint can be loaded: " + "; ".join(report["problems"] + [one["reason"] for one in report["passed"]]))
    return _order(whole)[:_SENT_MAX], [(one["tag"], one["reason"]) for one in report["passed"]]


def _has_all_shares(held: list[dict[str, Any]]) -> bool:
    """True if these nodes together have the parts of all ranks. A node that has left the job may have taken parts with it."""
    if any(one.get("ranks") is None for one in held):
        return True
    return {rank for one in held for rank in one["ranks"]} >= set(range(held[0]["world"]))


def choose(inventories: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the versions that are in all inventories, newest first. It depends on them alone, so every rank gets the same."""
    common = set.intersection(*({_key(version) for version in one} for one in inventories))
    held: dict[tuple[Any, ...], list[dict[str, Any]]] = {key: [] for key in common}
    for version in (version for one in inventories for version in one if _key(version) in common):
        held[_key(version)].append(version)
    common = {key for key, versions in held.items() if _has_all_shares(versions)}
    return _order([version for version in inventories[0] if _key(version) in common])


def _is_in_storage(version: dict[str, Any]) -> bool:
    return version["state"] == "durable" and version.get("ranks") is None


def refusal(inventories: list[list[dict[str, Any]]], path: str | None) -> str:
    """Returns why the ranks may not begin from nothing; "" if they may.

    If no version is in all inventories, and storage has one for some ranks, the others see another directory, or an old listing.
    """
    if choose(inventories):
        return ""
    for rank, one in enumerate(inventories):
        stored = next((version for version in one if version["shared"] and _is_in_storage(version)), None)
        if stored is not None:
            blind = next(other for other, found in enumerate(inventories) if _key(stored) not in map(_key, found))
            return (
                f"rank {rank} finds {stored['tag']} in storage and rank {blind} does not, and no checkpoint is there for all ranks: "
                f"see that each node has {path} mounted. To begin from nothing, give another path"
            )
    return ""


def _decide(inventories: list[list[dict[str, Any]]], path: str | None) -> dict[str, Any]:
    return {"versions": choose(inventories), "refused": refusal(inventories, path)}


def _timeout() -> float:
    return config.parse_seconds("NEBULA_AGREE_TIMEOUT", os.environ.get("NEBULA_AGREE_TIMEOUT") or 60)


def _agree(engine: Engine, path: str | None, turn: str, own: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the answer of _decide, the same on all ranks."""
    place, shared = engine.place(), ranks.store()
    root = path or engine.settings().persist_path
    if shared is not None:
        return _through_store(shared, place, f"nebula/agree/{turn}/{path or ''}", root, own)
    if root is None:
        raise NebulaConfigError(
            f"the {place.world} ranks live on several nodes and have neither a storage path nor a process group through "
            "which they could agree on a checkpoint: call this after torch.distributed.init_process_group()"
        )
    folder = root.removeprefix("file://")
    if "://" in folder:
        raise NebulaConfigError(
            f"the ranks can agree through {config.shown(root)} only with a process group: call this after "
            "torch.distributed.init_process_group()"
        )
    return _through_documents(engine, root, os.path.join(folder, ".nebula"), turn, own)


def _until(condition: Callable[[], Any], missing: Callable[[], list[int]], place: ranks.Place) -> Any:
    limit = _timeout()
    deadline, pause = time.monotonic() + limit, _PAUSE_S[0]
    while (value := condition()) is None:
        if time.monotonic() > deadline:
            absent = missing()
            shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
            raise NebulaTimeout(
                f"rank {place.rank} waited {limit:g} s for all {place.world} ranks to ask for a checkpoint, and ranks {shown} "
                "did not: call it on every rank, raise NEBULA_AGREE_TIMEOUT, or, if only this rank uses Nebula, give "
                "init() world=1"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, _PAUSE_S[1])
    return value


def _through_store(shared: Any, place: ranks.Place, prefix: str, root: str | None, own: list[dict[str, Any]]) -> dict[str, Any]:
    key = f"{prefix}/answer"

    def inventory_key(rank: int) -> str:
        return f"{prefix}/{rank}"

    if prefix not in _counted:
        shared.set(inventory_key(place.rank), json.dumps(own))
        is_last = shared.add(f"{prefix}/count", 1) >= place.world
        _counted.add(prefix)
        if is_last:
            everything = [json.loads(shared.get(inventory_key(rank))) for rank in range(place.world)]
            shared.compare_set(key, "", json.dumps(_decide(everything, root)))
    _until(
        lambda: shared.check([key]) or None,
        lambda: [rank for rank in range(place.world) if not shared.check([inventory_key(rank)])],
        place,
    )
    return dict(json.loads(shared.get(key)))


def _through_documents(engine: Engine, root: str, folder: str, turn: str, own: list[dict[str, Any]]) -> dict[str, Any]:
    place = engine.place()
    run = engine.settings().run or ranks.run(place)
    if not run:
        raise NebulaConfigError(
            "Nebula cannot tell the ranks of several nodes from the ranks of an earlier run: call this after "
            "torch.distributed.init_process_group(), or set NEBULA_RUN to a name that is new at each start"
        )
    mark = hashlib.sha256(f"{engine.settings().job}\0{run}\0{turn}".encode()).hexdigest()[:16]
    ours = os.path.join(folder, f"inventory-{mark}-{place.rank:05d}.json")
    try:
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):  # those of this rank's earlier runs
            if re.fullmatch(rf"inventory-(?!{mark})[0-9a-f]{{16}}-{place.rank:05d}\.json", name):
                os.unlink(os.path.join(folder, name))
        with open(ours + ".tmp", "w") as file:
            json.dump({"nebula": "inventory", "version": "1.0", "run": run, "versions": own}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(ours + ".tmp", ours)
    except OSError as failure:
        raise NebulaError(f"cannot agree on a checkpoint through {folder}: {failure}") from failure
    found: dict[int, list[dict[str, Any]]] = {place.rank: own}

    def read_all() -> list[list[dict[str, Any]]] | None:
        for rank in range(place.world):
            if rank in found:
                continue
            try:  # by name, because the listing of a mounted directory may be old
                with open(os.path.join(folder, f"inventory-{mark}-{rank:05d}.json")) as file:
                    found[rank] = json.load(file)["versions"]
            except (OSError, ValueError, KeyError):
                return None
        return [found[rank] for rank in range(place.world)]

    return _decide(_until(read_all, lambda: [rank for rank in range(place.world) if rank not in found], place), root)
