"""A second storage: copies of durable versions, made by a process of low priority, and loads from there if the first storage was lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from .._session import agree, config, locate
from .._session.engine import Engine
from .._session.keeping import is_count
from .._session.session import Session
from ..checkpoint import Checkpoint
from ..errors import (
    NebulaConfigError,
    NebulaCorrupt,
    NebulaError,
    NebulaNotFound,
    NebulaStorageError,
    NebulaTimeout,
    from_status,
)
from ..export.background import Work
from ..reader import Reader

__all__ = ["Copies", "Far", "Second"]

log = logging.getLogger("nebulaml")

TRIES = 3  # of a version that is damaged: it may have lost an item while it was copied
PATIENCE_S = 3600.0  # after the trainer's end, for a storage that does not answer
AWAY_S = 60.0  # for which a far storage that did not answer is not asked again, if the near one has something
_NUMBERS = ("every", "keep_last", "keep_every")
_LOADABLE = ("committed", "replicated", "durable")


@dataclasses.dataclass(frozen=True)
class Far:
    """A second storage of a manager: ``Manager(path, far=Far("s3://bucket/run7", every=1000, keep_last=5))``.

    path: a directory or a URL. Durable versions are copied there in the background, the newest first.
    every: only steps that are multiples of it.
    keep_last, keep_every: the versions that stay there: the newest keep_last, and those whose step is a multiple of keep_every. The newest
        and pinned versions always stay. Without either all stay.
    """

    path: str | os.PathLike[str]
    every: int = 1
    keep_last: int | None = None
    keep_every: int | None = None

    works: ClassVar[str] = "copy"
    done: ClassVar[tuple[str, str]] = ("copied", "is copied to")
    failed: ClassVar[tuple[str, str]] = ("copy-failed", "is not copied")

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if not is_count(value) and (value is not None or name == "every"):
                raise NebulaConfigError(f"Far({name}={value!r:.200}): a whole number of 1 or more")
        _check(self.place)

    @property
    def place(self) -> str:
        """The path as Nebula names it."""
        found = config.clean_path(self.path)
        if found is None:
            raise NebulaConfigError("Far('') names no storage path")
        return found

    def options(self, model: Any) -> dict[str, Any]:
        """Returns all of it as values of JSON."""
        return {"path": self.place, **{name: None if getattr(self, name) is None else int(getattr(self, name)) for name in _NUMBERS}}


def _check(path: str) -> None:
    if config.shown(path) != path:
        raise NebulaConfigError(
            f"{config.shown(path)} has a secret in its URL, which all users of the machine would see in the command line of a copy: "
            "give the SAS in AZURE_STORAGE_SAS_TOKEN"
        )


# -- in the process


class _Version(NamedTuple):
    """A complete version in the process's list. number: grows with each commit; a copy has that of its original."""

    tag: str
    step: int
    number: int
    size: int
    is_durable: bool


class Copies(Work):
    """Copies durable versions, and removes those that the far storage's rules no longer keep."""

    kinds = (Far.done[0], Far.failed[0])
    patience_s = PATIENCE_S

    def __init__(self, request: dict[str, Any], trainer: int) -> None:
        super().__init__(request, trainer)
        self.far, self.job = Far(**request["options"]), request["job"]
        self.place = self.far.place
        self._done: set[tuple[str, int]] = set()  # versions that are there, or cannot be, by tag and number
        self._tries: Counter[tuple[str, int]] = Counter()

    def due(self, reader: Any) -> tuple[tuple[Any, ...] | None, Any]:
        versions = [one for one in self._versions(reader, self.path) if one.step % self.far.every == 0]
        waiting, there = None, None
        for index, one in enumerate(versions):
            if not self._stays(index, one.step):
                continue
            if not one.is_durable:
                waiting = waiting or one
                continue
            if (one.tag, one.number) not in self._done:
                there = {found.tag: found.number for found in self._versions(reader, self.place)} if there is None else there
                if there.get(one.tag, 0) < one.number:
                    return (one,), waiting
                self._done.add((one.tag, one.number))
            if self.is_over():
                break  # older ones are not wanted any more
        return None, waiting

    def _versions(self, reader: Any, path: str) -> list[_Version]:
        """Returns the complete versions of the job, the newest first."""
        found = [one for one in reader._session.list_checkpoints(path).values() if one["job"] == self.job and one["step"] >= 0]
        known = [
            _Version(one["tag"], one["step"], one["sequence"], one["size"], one["state"] == "durable" and "storage" in one["source"])
            for one in found
            if one["state"] in _LOADABLE and not one["abandoned"] and one["sequence"]
        ]
        return sorted(known, key=lambda one: one.number, reverse=True)

    def _stays(self, index: int, step: int) -> bool:
        """Returns True if the rules keep the version in the far storage: a copy that is removed at once is not made."""
        last, every = self.far.keep_last, self.far.keep_every
        return (not last and not every) or index < (last or 1) or (bool(every) and step % every == 0)

    def do(self, reader: Any, row: Any, *rest: Any) -> None:
        begun, key = time.monotonic(), (row.tag, row.number)
        try:
            with Reader(self.path) as holder:
                holder.get(row.tag)  # so that retention leaves it alone while it is copied
                _nebula_command("copy", self.path, self.place, f"--tag={row.tag}", "--replace", "--json")
        except NebulaError as failure:
            self._tries[key] += isinstance(failure, NebulaCorrupt)
            if self._tries[key] < TRIES:
                raise
            self._done.add(key)
            self.report(self.kinds[1], row, str(failure), 0, time.monotonic() - begun)
            return
        self._done.add(key)
        self.report(self.kinds[0], row, config.shown(self.place), row.size, time.monotonic() - begun)
        self._prune()

    def _prune(self) -> None:
        rules = [f"--{name.replace('_', '-')}={getattr(self.far, name)}" for name in ("keep_last", "keep_every") if getattr(self.far, name)]
        if not rules:
            return
        planned = _nebula_command("prune", f"--path={self.place}", *rules, "--json")
        for one in planned.get("removed", []):
            if one["job"] == self.job:  # the rules of other jobs are others
                with contextlib.suppress(NebulaTimeout, NebulaNotFound):  # it is being read, or another process has removed it
                    _nebula_command("prune", f"--path={self.place}", f"--tag={one['tag']}", f"--entry={one['entry']}", "--yes", "--json")


def _nebula_command(*arguments: str) -> dict[str, Any]:
    """Runs a command of this installation, and returns its last line of JSON. Raises its failure."""
    command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    if command is None:
        raise NebulaConfigError("the `nebula` command of this installation is not found; install the package again")
    done = subprocess.run([command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", cwd="/")
    answer: Any = None
    with contextlib.suppress(ValueError):
        answer = json.loads(done.stdout if arguments[0] == "prune" else done.stdout.strip().rpartition("\n")[2])
    if done.returncode == 0 and isinstance(answer, dict):
        return answer
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        raise from_status(str(error["status"]), str(error["message"]), 0, 0)
    raise NebulaStorageError(f"`nebula {arguments[0]}`: {done.stderr.strip() or f'it ended with {done.returncode}'}")


# -- in the trainer

Look = Callable[[Engine, "str | None"], "list[dict[str, Any]]"]  # agree.of_all_ranks, or agree.inventory
Find = Callable[["str | None", "str | None"], "Checkpoint | None"]  # of a tag and a path: Session.get_checkpoint, or _for_all_ranks


class Second:
    """The loads of a manager: from its own path, and from the far storage if that has a newer version, or the only one."""

    def __init__(self, session: Session, far: Far) -> None:
        path = session.persist_path
        if path is None:
            raise NebulaConfigError("far= is a second storage: give the manager a storage path of its own, too")
        _check(path)
        self.place = far.place
        if os.path.realpath(config.without_scheme(path)) == os.path.realpath(config.without_scheme(self.place)):
            raise NebulaConfigError(f"far={config.shown(self.place)} is the manager's own path: give another one")
        self._session, self._path, self._shown = session, path, config.shown(self.place)
        self._away_until = 0.0
        self._is_away = False  # before the first save the ranks of several nodes have agreed to do without the far storage

    def newest(self) -> Checkpoint | None:
        """Finds the newest checkpoint of both storages, the same on all ranks. It fails if no storage has one, and either cannot be read."""
        near, damage = self._near(self._session._for_all_ranks)
        if near is not None and self._is_away and self._session._engine.agreement.needed():
            return near
        try:
            found = self._session._for_all_ranks(None, self.place)
        except NebulaError as failure:
            if near is None or agree.is_absence(failure):
                raise damage or failure from failure
            self._log_away(failure, self._session._engine.agreement.needed())
            return near
        if found is None and damage is not None:
            raise damage
        if found is None or (near is not None and _sequence(found) <= _sequence(near)):
            return near
        self._log_taken(found, damage or (f"the newest in {config.shown(self._path)} is the older {near.tag}" if near is not None else None))
        return found

    def tagged(self, tag: str, find: Find, was_removed: Callable[[Checkpoint], bool]) -> Checkpoint | None:
        """Finds the checkpoint of a tag, in the near storage if that has it."""
        near, damage = self._near(lambda: find(tag, None))
        if near is not None and not was_removed(near):
            return near
        found = find(tag, self.place)
        if found is not None:
            self._log_taken(found, damage)
        elif damage is not None:
            raise damage
        return found

    def _near(self, look: Callable[[], Checkpoint | None]) -> tuple[Checkpoint | None, NebulaError | None]:
        """Returns what a look finds. Storage that cannot be read may have it, so that is a failure; damage is not."""
        try:
            return look(), None
        except NebulaCorrupt as failure:
            return None, failure

    def _log_taken(self, found: Checkpoint, why: Any) -> None:
        if self._session._engine.place().local_rank == 0:
            log.warning("nebula: %s is taken from %s: %s", found.tag, self._shown, why or f"{config.shown(self._path)} does not have it")

    def _log_away(self, failure: NebulaError, is_agreed: bool) -> None:
        if time.monotonic() >= self._away_until:
            log.warning("nebula: the far storage %s cannot be read, and %s counts alone: %s", self._shown, config.shown(self._path), failure)
        self._away_until = time.monotonic() + AWAY_S
        self._is_away |= is_agreed

    def versions(self, look: Look) -> list[dict[str, Any]]:
        """Returns the versions of both storages that a look finds, the newest first, each once."""
        owner = self._session._engine
        damage, near = None, []
        try:
            near = look(owner, None)
        except NebulaCorrupt as failure:
            damage = failure
        # Each rank has a clock of its own, so ranks that look together do not go by it.
        is_together = look is agree.of_all_ranks and owner.agreement.needed()
        if near and (self._is_away if is_together else time.monotonic() < self._away_until):
            return near
        try:
            found = look(owner, self.place)
        except NebulaError as failure:
            if not near or agree.is_absence(failure):
                raise damage or failure from failure
            self._log_away(failure, is_together)
            return near
        if damage is not None and not found:
            raise damage
        tags = {one["tag"] for one in near if not one["was_removed"]}
        kept = [one for one in near if one["tag"] in tags]
        return agree.in_order(kept + [{**one, "path": self.place} for one in found if one["tag"] not in tags])


def _sequence(found: Checkpoint) -> int:
    try:
        return int(found._report().get("sequence", 0))
    except NebulaNotFound:  # it has just been removed
        return 0
