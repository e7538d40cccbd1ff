"""Every rank loads the same version: the newest that every rank can load (docs/protocol.md, "Agreeing at resume").

A rank's inventory lists the versions that it could load now. With a process group the ranks exchange inventories through
its key-value store, without one through small documents beside the checkpoints. No collective runs, and no rank waits
longer than NEBULA_AGREE_TIMEOUT seconds. A job on one node, or of one rank, needs no agreement: one agent answers for all.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import re
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _nebula
from ..elastic import worker
from ..errors import NebulaConfigError, NebulaCorrupt, NebulaError, NebulaStorageError, NebulaTimeout, from_status
from . import config, documents, progress, ranks
from .waits import interruptible

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Agreement", "Inventory", "choose", "in_order", "inventory", "refusal"]

POISON = "the job has failed again and again after loading it"
UNSEEN = "the newest in storage"  # in place of a tag, if storage cannot be listed (src/agent/restore/passed_over.h)
_MOST_BYTES = 1 << 28  # of a document of an inventory, with 200 for each of a million versions
_SAVED = "+"  # at the end of a token: that process has saved, under the name that the run has
_GROUP = "torch.distributed.init_process_group() or nebulaml.jax.init()"
_WHOLE = ("committed", "replicated", "durable")
_PAUSE_S = (0.002, 0.25)
_LOOKS, _LOOK_S = 3, 2.0  # of ranks that see different storage: a version may have become durable between their looks

_counted: set[str] = set()  # prefixes of the questions in the key-value store in which this rank has been counted
_sent: set[str] = set()  # keys of the lists of stored versions that this rank sends there
_has_saved = False  # whether this process has begun to save, in any session
_numbers = itertools.count(1)  # numbers of sessions, which all ranks make in the same order


class _Questions:
    """The questions about the versions of one storage path, each with keys of its own."""

    def __init__(self, mark: str = "") -> None:
        self.mark = mark  # begins the numbers of these questions
        self.answered = 0  # their number
        self.sent: list[dict[str, Any]] | None = None  # the inventory that this rank has sent and that has no answer yet
        self.failure: NebulaError | None = None  # why this rank could not make it
        self.own: list[dict[str, Any]] = []  # the inventory of the last answered question
        self.passed: list[tuple[str, str]] = []  # (tag, reason) of stored versions that this rank cannot load
        self.spent: list[str] = []  # keys in the store, of the last answered question

    def passed_over(self, chosen: dict[str, Any]) -> list[tuple[str, str]]:
        """Returns (tag, reason) of versions that may be newer than the chosen one, as far as this rank knows."""
        keys = [_key(version) for version in self.own]
        newer = self.own[: keys.index(_key(chosen))] if _key(chosen) in keys else []
        poison = worker.passed_over()
        return self.passed + [(one["tag"], POISON if _is_one_of(poison, one) else "not every rank can load it") for one in newer]


class Agreement:
    """The versions that the ranks of one session have agreed on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.proxy(engine)  # which owns this object
        self._lock = threading.RLock()  # guards all below
        self._pinned: dict[str | None, list[dict[str, Any]]] = {}  # the agreed versions by storage path; None: the session's path
        self._first: dict[str | None, _Questions] = {}  # by storage path: those before the first save
        self._later: dict[str | None, _Questions] = {}  # those of calls that all ranks make after it
        self.number = 0  # of the session, part of its questions; 0: the session of the package's functions
        self._moves = 0  # changes of path or job, the same on all ranks: after one, a question is another question
        self._saving = False
        self._token = ""  # of this process, in its documents

    def join(self) -> None:
        """Numbers this session: all ranks make it, and it is not the session of the package's functions."""
        self.number = next(_numbers)

    def needed(self) -> bool:
        """True until this session begins to save, if other nodes may know more than this node's agent."""
        return self.is_of_several_nodes() and not self._saving

    def is_of_several_nodes(self) -> bool:
        """Whether the ranks of this session are on several nodes."""
        place = self._engine.place()
        return place.world > 1 and place.local_world < place.world

    @property
    def is_saving(self) -> bool:
        """Whether this session has begun to save."""
        return self._saving

    def begun_saving(self) -> None:
        """Lets this rank's agent answer from now on. Its searches wait for news of the versions that this rank has closed."""
        global _has_saved
        self._saving = _has_saved = True

    def _place(self, path: str | None) -> str | None:
        """Returns None for the session's own path: a program may name it or not, and asks the same question."""
        own = self._engine.settings().persist_path
        return None if path is None or (own and config.without_scheme(path) == config.without_scheme(own)) else path

    def only(self, path: str | None, versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns those that all ranks can load, as far as they have agreed: what this rank did not have then is of its own run."""
        path = self._place(path)
        with self._lock:
            if path not in self._pinned:
                return versions
            agreed, before = _numbered(self._pinned[path]), _numbered(self._first[path].own)
        return [version for key, version in _numbered(versions).items() if key in agreed or key not in before]

    def agreed(self, path: str | None) -> list[dict[str, Any]] | None:
        """Returns the versions that all ranks have agreed on, newest first. None: they have not been asked."""
        with self._lock:
            return self._pinned.get(self._place(path))

    def moved(self) -> None:
        """Forgets the agreement after a change of path or job."""
        with self._lock:
            self._moves += 1
            self._pinned.clear()
            self._first.clear()
            self._later.clear()

    def forget(self) -> None:
        """Resets all but the numbers of the questions to the start of the process."""
        with self._lock:
            self._saving = False
            self._pinned.clear()

    def after_fork(self) -> None:
        """Renews the lock in a forked child, where no other thread holds it."""
        self._lock, self._token = threading.RLock(), ""

    def passed_over(self, path: str | None, chosen: dict[str, Any]) -> list[tuple[str, str]]:
        """Returns (tag, reason) of versions that may be newer than the chosen one, as far as this rank knew before its first save."""
        with self._lock:
            return self._first.get(self._place(path), _Questions()).passed_over(chosen)

    def answer(self, path: str | None) -> list[dict[str, Any]]:
        """Returns the versions that all ranks can load, newest first; all ranks get the same list. It stays."""
        path = self._place(path)
        with self._lock:
            if path not in self._pinned:
                self._pinned[path] = self._answer(path, self._first.setdefault(path, _Questions()))
            return self._pinned[path]

    def answer_now(self, path: str | None, wanted: str) -> tuple[list[dict[str, Any]], Callable[[dict[str, Any]], list[tuple[str, str]]]]:
        """As answer(), also after saves, and what passed_over() is for one of the versions. After saves each call is a question anew.

        wanted: what this rank is about to load, in words. After saves all ranks raise if they want different versions.
        """
        path = self._place(path)
        with self._lock:
            if not self._saving:
                return self.answer(path), self._first[path].passed_over
            questions = self._later.setdefault(path, _Questions("0."))
            return self._answer(path, questions, wanted), questions.passed_over

    def _answer(self, path: str | None, questions: _Questions, wanted: str = "") -> list[dict[str, Any]]:
        looks = 0
        while True:
            # after a timeout, a rank asks the same question again: the others may still answer it
            turn = questions.answered + 1
            if questions.sent is None:
                questions.failure = None
                try:
                    questions.sent, questions.passed = _look(self._engine, path)
                except NebulaError as failure:  # the other ranks hear of it, and do not wait
                    questions.sent, questions.passed, questions.failure = [], [], failure
            own, failure = questions.sent, questions.failure
            questions.own = own
            by_key = {_key(version): version for version in own}
            # Take this rank's own numbers: without shared storage, the numbers of another node mean nothing to this node's agent.
            sent = Inventory.of(own, str(failure or ""), failure.status if failure else "", wanted)
            versions, refused = self._ask(path, f"{self.number}.{self._moves}.{questions.mark}{turn}", sent, questions.spent)
            questions.answered, questions.sent = turn, None
            looks += 1
            if refused is None:
                return _without_poison([by_key[_key(one)] | {"was_removed": one["was_removed"]} for one in versions])
            if looks == _LOOKS:  # the same kind of error on all ranks, which decides what they do next
                raise failure if failure is not None and failure.status == refused.status else refused
            time.sleep(_LOOK_S)

    def _ask(
        self, path: str | None, turn: str, own: Inventory, spent: list[str]
    ) -> tuple[list[dict[str, Any]], NebulaError | None]:
        """Returns the agreed versions, newest first, and why the ranks may not begin from nothing; both the same on all ranks."""
        place, shared = self._engine.place(), ranks.store()
        root = path or self._engine.settings().persist_path
        if shared is not None:
            repeats = bool(self._engine.settings().run) or not ranks.is_new(place)
            return _through_store(shared, place, f"nebula/agree/{turn}/{path or ''}", root, own, spent, repeats)
        if root is None:
            raise NebulaConfigError(
                f"the {place.world} ranks live on several nodes and have neither a storage path nor a process group through "
                f"which they could agree on a checkpoint: call this after {_GROUP}"
            )
        folder = config.without_scheme(root)
        if "://" in folder:
            raise NebulaConfigError(
                f"the ranks can agree through {config.shown(root)} only with a process group: call this after {_GROUP}"
            )
        self._token = self._token or os.urandom(8).hex()
        token = self._token + _SAVED * _has_saved
        return _through_documents(self._engine, root, os.path.join(folder, ".nebula"), turn, own, token)


def _key(version: dict[str, Any]) -> tuple[Any, ...]:
    # Nodes without shared storage choose sequences each for itself, but have the run and its writings in common.
    if version["shared"]:
        return (version["tag"], version["sequence"])
    return (version["tag"], version["run"], version["writing"])


def _numbered(versions: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(version["tag"], version["sequence"]): version for version in versions}


def in_order(versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the versions newest first."""
    facts = [(one["tag"], one.get("began", 0), one["sequence"], bool(one.get("abandoned"))) for one in versions]
    return [versions[index] for index in _nebula.order(facts)]


def inventory(engine: Engine, path: str | None) -> list[dict[str, Any]]:
    """Returns the versions that this rank could load now, newest first. NebulaStorageError: storage cannot be listed."""
    found, passed = _look(engine, path)
    unread = next((reason for tag, reason in passed if tag == UNSEEN), None)
    if unread is not None:
        raise NebulaStorageError(unread)
    return _without_poison(found)


def of_all_ranks(engine: Engine, path: str | None) -> list[dict[str, Any]]:
    """Returns the versions that all ranks can load, newest first. Every rank must call it until this session begins to save."""
    if not engine.agreement.needed():
        return engine.agreement.only(path, inventory(engine, path))
    with progress.waiting(engine, "looking for the checkpoints that all ranks have"):
        return interruptible(engine.agreement.answer, path)


def of_all_ranks_now(
    engine: Engine, path: str | None, wanted: str
) -> tuple[list[dict[str, Any]], Callable[[dict[str, Any]], list[tuple[str, str]]]]:
    """As of_all_ranks(), and what each of them was taken in place of. Every rank must call it, also after saves."""
    with progress.waiting(engine, "looking for the checkpoints that all ranks have"):
        return interruptible(engine.agreement.answer_now, path, wanted)


def _look(engine: Engine, path: str | None) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Returns the inventory, and (tag, reason) of the stored versions that this rank cannot load."""
    report = json.loads(engine.session(patient=True).report(_nebula.REPORT_VERSIONS, path))
    shared = (path or engine.settings().persist_path) is not None
    whole = [
        {
            "tag": one["tag"],
            "state": one["state"],
            "was_removed": bool(one.get("durable_at")) and "storage" not in one["source"],  # memory may still have it
            "sequence": one["sequence"],
            "step": one["step"],
            "began": one["line"][-1][0] if "line" in one else 0,  # when its line of history began (formats.md)
            "abandoned": one["abandoned"],
            "run": "" if shared else one.get("run", ""),  # a version that storage alone has names none
            "writing": 0 if shared else one.get("writing", 0),
            "shared": shared,
            "world": one.get("world", 1),
            "ranks": one.get("ranks") if "storage" not in one["source"] else None,  # ranks whose parts this node has; None: all, or unknown
        }
        for one in report["versions"]
        if one["source"]
        and (one["state"] in _WHOLE or (one["state"] == "failed" and one["sequence"]))  # given up, but whole
        and not one.get("late")  # it was not there when the first rank of this node looked
    ]
    if not whole and (report["problems"] or report["passed"]):  # "none" would make the job start from nothing
        raise NebulaCorrupt("no checkpoint can be loaded: " + "; ".join(report["problems"] + [one["reason"] for one in report["passed"]]))
    unread = [(UNSEEN, report["unread"])] if report["unread"] else []
    return in_order(whole), unread + [(one["tag"], one["reason"]) for one in report["passed"]]


def _is_one_of(poison: list[tuple[int, str]], version: dict[str, Any]) -> bool:
    """A later writing of a tag is another version. If the nodes share no storage, each has numbers of its own, and the tag counts."""
    return any(tag == version["tag"] and (sequence == version["sequence"] or not version["shared"]) for sequence, tag in poison)


def _without_poison(versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leaves out those that the launcher does not want to be loaded, unless there is no other one: a job never begins from nothing because of
    that. It takes what all ranks have, for which they all come to the same.
    """
    poison = worker.passed_over()
    return [version for version in versions if not _is_one_of(poison, version)] or versions


def _is_in_storage(version: dict[str, Any]) -> bool:
    return version["state"] == "durable" and version.get("ranks") is None


class Inventory(NamedTuple):
    """The versions that one rank could load.

    All ranks that see the same storage have equal stored versions, so these are sent once, under their digest. Ranks of which
    Inventory.sent() was given the same list share one object.
    """

    stored: dict[tuple[Any, ...], dict[str, Any]]
    held: dict[tuple[Any, ...], dict[str, Any]]  # those of which only memory has all, or a share
    failure: str = ""  # why the rank could not look
    status: str = ""  # that of the failure (errors.py)
    wanted: str = ""  # what the rank is about to load; "": it has not said

    @classmethod
    def sent(
        cls, stored: dict[tuple[Any, ...], dict[str, Any]], held: Iterable[dict[str, Any]], failure: str = "", status: str = "",
        wanted: str = "",
    ) -> Inventory:  # fmt: skip
        return cls(stored, {_key(version): version for version in held}, failure, status, wanted)

    @classmethod
    def of(cls, versions: list[dict[str, Any]], failure: str = "", status: str = "", wanted: str = "") -> Inventory:
        return cls.sent(
            {_key(version): version for version in versions if _is_in_storage(version)},
            (version for version in versions if not _is_in_storage(version)),
            failure,
            status,
            wanted,
        )

    def __contains__(self, key: object) -> bool:
        return key in self.stored or key in self.held


def _has_all_shares(key: tuple[Any, ...], inventories: list[Inventory]) -> bool:
    """True if these nodes together have the parts of all ranks. A node that has left the job may have taken parts with it."""
    found: set[int] = set()
    for one in inventories:
        version = one.stored.get(key) or one.held[key]
        if version.get("ranks") is None:
            return True
        found.update(version["ranks"])
    return found >= set(range(version["world"]))


def choose(inventories: list[Inventory]) -> list[dict[str, Any]]:
    """Returns the versions that are in all inventories, newest first. It depends on them alone, so every rank gets the same.

    A version was removed if one rank says so.
    """
    first = inventories[0]
    common = set.intersection(*(set(stored) for stored in {id(one.stored): one.stored for one in inventories}.values()))
    common |= {
        key for key in {*first.stored, *first.held} - common if all(key in one for one in inventories) and _has_all_shares(key, inventories)
    }
    lists = [*{id(one.stored): one.stored for one in inventories}.values(), *(one.held for one in inventories)]
    removed = {key for known in lists for key, version in known.items() if version.get("was_removed")}
    agreed = [(key, version) for known in (first.stored, first.held) for key, version in known.items() if key in common]
    return in_order([version | {"was_removed": key in removed} for key, version in agreed])


def refusal(inventories: list[Inventory], path: str | None) -> str:
    """Returns why the ranks may not begin from nothing; "" if they may.

    If no version is in all inventories, and storage has one for some ranks, the others see another directory, or an old listing.
    """
    failing = _failing(inventories)
    if failing is not None:
        return f"rank {failing} cannot say what it can load: {inventories[failing].failure}"
    other = next((rank for rank, one in enumerate(inventories) if one.wanted != inventories[0].wanted), None)
    if other is not None:
        return f"rank 0 is to load {inventories[0].wanted}, and rank {other} {inventories[other].wanted}: give all ranks the same step"
    if choose(inventories):
        return ""
    for rank, one in enumerate(inventories):
        stored = next((key for key, version in one.stored.items() if version["shared"]), None)
        if stored is not None:
            blind = next(other for other, found in enumerate(inventories) if stored not in found)
            return (
                f"rank {rank} finds {stored[0]} in storage and rank {blind} does not, and no checkpoint is there for all ranks: "
                f"see that each node has {path} mounted. To begin from nothing, give another path"
            )
    return ""


def _failing(inventories: list[Inventory]) -> int | None:
    """Returns the rank whose failure counts. Damage counts if no rank has another failure: a program may go on with another storage then."""
    failing = [rank for rank, one in enumerate(inventories) if one.failure]
    return next((rank for rank in failing if inventories[rank].status != NebulaCorrupt.status), failing[0] if failing else None)


def _status(inventories: list[Inventory]) -> str:
    """Returns the status of the error with which all ranks refuse."""
    failing = _failing(inventories)
    if failing is not None:
        return inventories[failing].status
    return NebulaStorageError.status if len({one.wanted for one in inventories}) == 1 else NebulaConfigError.status


def _error(refused: str, status: str) -> NebulaError | None:
    return from_status(status, refused, 0, 0) if refused else None


def is_absence(failure: NebulaError) -> bool:
    """Whether a question failed because not all ranks have asked in time. Other failures of a question are the same on all ranks."""
    return bool(vars(failure).get("ranks_absent"))


def _timeout() -> float:
    return config.parse_seconds("NEBULA_AGREE_TIMEOUT", os.environ.get("NEBULA_AGREE_TIMEOUT") or 60)


def _until(condition: Callable[[], Any], missing: Callable[[], list[int]], place: ranks.Place) -> Any:
    limit = _timeout()
    deadline, pause = time.monotonic() + limit, _PAUSE_S[0]
    while (value := condition()) is None:
        if time.monotonic() > deadline:
            absent = missing()
            shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
            failure = NebulaTimeout(
                f"rank {place.rank} waited {limit:g} s for all {place.world} ranks to ask for a checkpoint, and ranks {shown} "
                "did not: call it on every rank, raise NEBULA_AGREE_TIMEOUT, or, if only this rank uses Nebula, give "
                "init() world=1"
            )
            vars(failure)["ranks_absent"] = True
            raise failure
        time.sleep(pause)
        pause = min(pause * 1.5, _PAUSE_S[1])
    return value


def _digest(text: bytes) -> str:
    import hashlib  # it loads OpenSSL, which a process without other ranks does not need

    return hashlib.sha256(text).hexdigest()


def _packed(versions: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """Returns the digest of versions, and their text. A store of torch refuses values of more than 8 MiB, so the text is compressed."""
    text = json.dumps(sorted(versions, key=_key), sort_keys=True).encode()
    return _digest(text)[:32], base64.b85encode(zlib.compress(text)).decode()


def _unpacked(text: bytes | str) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {_key(version): version for version in json.loads(zlib.decompress(base64.b85decode(text)))}


def _through_store(
    shared: Any, place: ranks.Place, prefix: str, root: str | None, own: Inventory, spent: list[str], repeats: bool = False
) -> tuple[list[dict[str, Any]], NebulaError | None]:
    """Asks through the store of the process group. The last rank that asks answers for all.

    `spent`: the keys of the last answered question about this path. A rank that asks this one has that answer. `repeats`: an earlier start of
    the job may have had the run's name.
    """
    answer = f"{prefix}/answer"
    digest, text = _packed(own.stored.values())

    def inventory_key(rank: int) -> str:
        return f"{prefix}/{rank}"

    def stored_key(digest: str) -> str:
        return f"{prefix}/{digest}"

    def send(digest: str, text: str) -> None:
        key = stored_key(digest)
        if key in _sent or shared.add(f"{key}/senders", 1) == 1:  # one rank of all that have this list
            _sent.add(key)
            shared.set(key, text)

    if prefix not in _counted:
        send(digest, text)
        about = {"failure": own.failure, "status": own.status, "wanted": own.wanted, "saved": _has_saved}
        mine = {"stored": digest, "held": list(own.held.values()), **about}
        shared.set(inventory_key(place.rank), json.dumps(mine))
        is_last = shared.add(f"{prefix}/count", 1) >= place.world
        _counted.add(prefix)
        if is_last:
            sent = [json.loads(shared.get(inventory_key(rank))) for rank in range(place.world)]
            stored = {one: _unpacked(shared.get(stored_key(one))) for one in {each["stored"] for each in sent}}
            inventories = [
                Inventory.sent(stored[each["stored"]], each["held"], each["failure"], each["status"], each["wanted"]) for each in sent
            ]
            agreed = Inventory.of(choose(inventories))
            digest_of_all, text_of_all = _packed(agreed.stored.values())
            send(digest_of_all, text_of_all)
            refused = {"refused": refusal(inventories, root), "status": _status(inventories)}
            start = "" if any(each["saved"] for each in sent) else os.urandom(6).hex()
            said = {"stored": digest_of_all, "held": list(agreed.held.values()), "start": start, **refused}
            shared.compare_set(answer, "", json.dumps(said))
            _forget(shared, [f"{prefix}/count", *spent, *(stored_key(one) for one in stored if one != digest_of_all)])
    _until(
        lambda: shared.check([answer]) or None,
        lambda: [rank for rank in range(place.world) if not shared.check([inventory_key(rank)])],
        place,
    )
    said = json.loads(shared.get(answer))
    if repeats and said["start"]:
        ranks.begun(said["start"])
    common = own.stored if said["stored"] == digest else _unpacked(shared.get(stored_key(said["stored"])))
    _forget(shared, [inventory_key(place.rank)])
    spent[:] = [answer, stored_key(said["stored"]), *(f"{stored_key(one)}/senders" for one in {digest, said["stored"]})]
    return in_order([*common.values(), *said["held"]]), _error(said["refused"], said["status"])


def _forget(shared: Any, keys: list[str]) -> None:
    """Removes keys from the store, which lives as long as the job. Not every kind of store can, and keys cost it only memory."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        for key in keys:
            shared.delete_key(key)


def _write_document(path: str, rank: int, document: dict[str, Any]) -> None:
    temporary = f"{path}.{rank}.tmp"  # other ranks may write the same list
    with open(temporary, "w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read_document(path: str) -> dict[str, Any] | None:
    """Returns a document. None: it is not there yet. It is opened by its name, because the listing of a mounted directory may be old."""
    try:
        return dict(documents.load(path, most=_MOST_BYTES))
    except (OSError, ValueError, TypeError):
        return None


def _are_versions(found: Any) -> bool:
    """Whether this is a list of versions as _look() makes them, and not what another program has put into its place."""
    texts, numbers = ("tag", "run"), ("sequence", "step", "began", "writing", "world", "shared")

    def is_version(one: Any) -> bool:
        return all(isinstance(one.get(key), str) for key in texts) and all(
            isinstance(one.get(key), int) and -1 <= one[key] < 1 << 64 for key in numbers
        )

    return isinstance(found, list) and all(isinstance(one, dict) and is_version(one) for one in found)


def _read_stored(path: str, digest: str) -> dict[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the versions of the list that has this digest. None: it is not there yet."""
    versions = (_read_document(path) or {}).get("versions")
    if not _are_versions(versions) or _packed(versions)[0] != digest:
        return None
    return {_key(version): version for version in versions}


def _through_documents(
    engine: Engine, root: str, folder: str, turn: str, own: Inventory, token: str
) -> tuple[list[dict[str, Any]], NebulaError | None]:
    """Asks through documents in storage: one of each rank, and one for each list of stored versions. Each rank finds the answer itself.

    A job that starts again may have the same run's name, and finds the documents of the earlier start. So each rank also confirms the tokens
    that it has read. `token`: of this rank's question, which no earlier start has had.
    """
    place, job = engine.place(), engine.settings().job
    run = engine.settings().run or ranks.run(place)
    if not run:
        raise NebulaConfigError(
            "Nebula cannot distinguish the ranks of several nodes from the ranks of an earlier run: call this after "
            f"{_GROUP}, or set NEBULA_RUN to a name that is new at each start"
        )
    of_job, of_run = (_digest(text.encode())[:12] for text in (job, run))
    digest, _ = _packed(own.stored.values())

    def rank_path(rank: int, confirmed: str = "") -> str:
        return os.path.join(folder, f"inventory-{of_job}-{of_run}-{turn}-{rank:05d}{confirmed and '-'}{confirmed}.json")

    def stored_path(digest: str) -> str:
        return os.path.join(folder, f"inventory-{of_job}-{of_run}-{digest}.json")

    def write(path: str, document: dict[str, Any]) -> None:
        try:
            _write_document(path, place.rank, document)
        except OSError as failure:
            raise NebulaError(f"cannot agree on a checkpoint through {folder}: {failure}") from failure

    head = {"nebula": "inventory", "version": "1.0", "run": run}
    try:
        os.makedirs(folder, exist_ok=True)
        # of earlier runs: those of this rank, and on rank 0 the lists of stored versions; and this rank's confirmations of this question
        of_rank = rf"{place.rank:05d}(-[0-9a-f]{{12}})?"
        of_others = rf"(?!{of_run})[0-9a-f]{{12}}-([0-9.]+-{of_rank}{'|[0-9a-f]{32}' if place.rank == 0 else ''})"
        left = rf"inventory-{of_job}-({of_others}|{of_run}-{re.escape(turn)}-{place.rank:05d}-[0-9a-f]{{12}})\.json"
        for name in os.listdir(folder):
            if re.fullmatch(left, name):
                os.unlink(os.path.join(folder, name))
    except OSError as failure:
        raise NebulaError(f"cannot agree on a checkpoint through {folder}: {failure}") from failure
    if _read_stored(stored_path(digest), digest) is None:
        write(stored_path(digest), {**head, "versions": list(own.stored.values())})
    said = {"token": token, "stored": digest, "failure": own.failure, "status": own.status, "wanted": own.wanted}
    write(rank_path(place.rank), head | said | {"versions": list(own.held.values())})
    found, stored, tokens = {place.rank: own}, {digest: own.stored}, {place.rank: token}
    confirmed, confirming = "", set(range(place.world))  # of the tokens that this rank has read; the ranks that have not confirmed them

    def read(rank: int) -> None:
        sent = _read_document(rank_path(rank))
        is_whole = sent is not None and _are_versions(sent.get("versions"))
        texts = [sent.get(key) for key in ("stored", "token", "failure", "status", "wanted")] if sent and is_whole else []
        if not texts or not all(isinstance(text, str) for text in texts) or texts[1] == tokens.get(rank, ""):
            return  # the rank has not written its own yet
        of_list, theirs, failure, status, wanted = texts
        if of_list not in stored:
            listed = _read_stored(stored_path(of_list), of_list)
            if listed is None:
                return
            stored[of_list] = listed
        found[rank], tokens[rank] = Inventory.sent(stored[of_list], sent["versions"], failure, status, wanted), theirs

    def read_all() -> list[Inventory] | None:
        nonlocal confirmed, confirming
        for rank in range(place.world):
            if rank not in found:
                read(rank)
            if rank not in found:
                return None
        now = _digest(" ".join(tokens[rank] for rank in range(place.world)).encode())[:12]
        if now != confirmed:
            write(rank_path(place.rank, now), head)
            if confirmed:
                with contextlib.suppress(OSError):
                    os.unlink(rank_path(place.rank, confirmed))
            confirmed, confirming = now, set(range(place.world)) - {place.rank}
        confirming = {rank for rank in confirming if _read_document(rank_path(rank, confirmed)) is None}
        for rank in confirming:
            read(rank)  # the one that was read may be of an earlier start
        return None if confirming else [found[rank] for rank in range(place.world)]

    def awaited() -> list[int]:
        return [rank for rank in range(place.world) if rank not in found] or sorted(confirming)

    inventories = _until(read_all, awaited, place)
    if not any(one.endswith(_SAVED) for one in tokens.values()):
        ranks.begun(confirmed)  # versions that an earlier start of that name has left half saved are not completed with saves of this one
    return choose(inventories), _error(refusal(inventories, root), _status(inventories))
