"""Work on a job's durable checkpoints by a process of low priority, while training goes on.

It makes Hugging Face directories, or copies in a far storage.

The process is a reader of the storage path: it looks for durable versions by itself, one after the other, the newest first. The trainer
starts it, hears of what it made through a pipe, and notifies it when no more versions come. This module is both ends, and the work that
makes Hugging Face directories. manager/far.py has the work that copies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .. import _nebula
from .._session import config as settings
from .._session.pipes import without_sigpipe
from .._session.rows import listing
from ..errors import (
    NebulaConfigError,
    NebulaError,
    NebulaNotFound,
    NebulaStorageError,
    NebulaTimeout,
    NebulaUnavailable,
)
from ..events import Event
from . import SHARD_SIZE, dtype_of, size_of, target_of

__all__ = ["HFExport", "Work", "begin", "end", "step_of", "wait"]

log = logging.getLogger("nebulaml")

NICENESS = 10
LOOK_S = 2.0  # between two looks for a durable version: a commit on this node is noticed at once
PUBLISHED_S = 60.0  # from the look that finds a version durable until its directory is there
END_S = 10.0  # for a process that does not read what it shall do
GIVE_UP_S = 900.0  # after the trainer's end, for a version that is not durable: agents give up sooner
PAUSE_S = (1.0, 60.0)  # first and longest pause after a storage did not answer
TRIES = 3  # of an export whose storage or directory failed
SILENT_S = (60.0, 3600.0)  # first and longest time between two reports of one trouble
_WAITS = ("committed", "replicated")
_AGAIN = re.compile(r"~\d+$")  # in the tag of a directory that was removed and made again


@dataclasses.dataclass(frozen=True)
class HFExport:
    """Hugging Face directories of a job's durable checkpoints: ``Manager(export=HFExport(...))``, and the same option of adapters.

    directory: a path or a URL with {step} or {tag} in it. Without them ``replace`` is needed, and the directory always has the newest.
    every: only steps that are multiples of it.
    config, dtype, max_shard_size, rename, name, key, ranks, mapping, replace: as in export_hf(), but no functions. Without a config, an
        adapter takes that of its model, if transformers has made it.
    """

    directory: str | os.PathLike[str]
    every: int = 1
    config: Any = None
    dtype: Any = None
    max_shard_size: int | str = SHARD_SIZE
    rename: Mapping[str, str | None] | None = None
    name: str | None = None
    key: str | None = None
    ranks: Sequence[str] | str | None = None
    mapping: Mapping[str, Any] | None = None
    replace: bool = False

    works: ClassVar[str] = "export"
    done: ClassVar[tuple[str, str]] = ("exported", "is exported as")  # the kind of the event, and the words of the log
    failed: ClassVar[tuple[str, str]] = ("export-failed", "is not exported")

    def __post_init__(self) -> None:
        """Raises NebulaConfigError now for what the process would refuse after each checkpoint."""
        dtype_of(self.dtype)
        size_of(self.max_shard_size)
        target_of(self.directory)
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise NebulaConfigError(f"every={self.every!r:.100}: give a number of steps of 1 or more")
        try:
            is_fixed = self.target("a", 1) == self.target("b", 2)
        except (KeyError, IndexError, ValueError) as failure:
            raise NebulaConfigError(f"directory={os.fspath(self.directory)!r}: only {{step}} and {{tag}} can be in it ({failure})") from failure
        if is_fixed and not self.replace:
            raise NebulaConfigError(f"directory={os.fspath(self.directory)!r} has neither {{step}} nor {{tag}}: each export needs replace=True")
        for option in ("rename", "mapping"):
            with _as_json(option):
                json.dumps(getattr(self, option))

    def target(self, tag: str, step: int | None) -> str:
        """Returns the directory of a version."""
        return target_of(os.fspath(self.directory).format(step="none" if step is None else step, tag=tag.replace("/", "_")))

    def options(self, model: Any) -> dict[str, Any]:
        """Returns all of it as values of JSON."""
        from .naming import Config

        given = self.config if self.config is not None else model
        chosen: Any = os.path.abspath(os.path.expanduser(given)) if isinstance(given, (str, os.PathLike)) else None
        if chosen is None and given is not None:
            made = Config(given)
            chosen = {"values": made.values, "files": {name: bytes(text).decode() for name, text in made.files.items()}}  # type: ignore[arg-type]
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        options |= {"config": chosen, "dtype": None if self.dtype is None else str(self.dtype), "directory": os.fspath(self.directory)}
        with _as_json("config"):
            json.dumps(options)
        return options


@contextlib.contextmanager
def _as_json(what: str) -> Any:
    try:
        yield
    except (TypeError, ValueError) as failure:
        raise NebulaConfigError(f"{what}= of an export in the background must be plain values, not functions: {failure}") from failure


# -- in the trainer

_lock = threading.Lock()  # guards both below
_running: dict[tuple[str, str, int], _Worker] = {}  # by path, prefix of the tags, and the id of the work's description
_ending: list[_Worker] = []


class _Worker:
    """The process, and the thread that hears of what it made."""

    def __init__(self, export: Any, request: bytes, owner: Any) -> None:
        package = str(Path(__file__).resolve().parents[2])
        search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        # A session of its own: a signal that ends the trainer, or its process group, does not reach it, so it can finish.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nebulaml.export.background", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._export, self._owner = export, owner  # the export: its id is in use
        self._rest = self._send(request)
        self._is_sent = threading.Event()
        self._failed: set[str] = set()  # tags of versions
        self.thread = threading.Thread(target=self._listen, name=f"nebula-{export.works}", daemon=True)
        self.thread.start()

    def _send(self, request: bytes) -> bytes:
        """Writes what the pipe takes at once, so that it arrives although the trainer dies next. Returns the rest."""
        pipe = self.process.stdin.fileno()  # type: ignore[union-attr]
        os.set_blocking(pipe, False)
        try:
            with without_sigpipe():
                return request[os.write(pipe, request) :]
        except OSError:  # the process has ended
            return b""
        finally:
            os.set_blocking(pipe, True)

    def _listen(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError), without_sigpipe():
            self.process.stdin.write(self._rest)
            self.process.stdin.flush()
        self._is_sent.set()
        for line in self.process.stdout:
            with contextlib.suppress(ValueError, TypeError):
                self._hear(Event(**json.loads(line)))
        self.process.wait()
        if self.process.returncode:
            self._hear(Event(self._export.failed[0], text=f"its process ended with {self.process.returncode}"))

    def _hear(self, event: Event) -> None:
        kind, words = self._export.done
        if event.kind == kind:
            self._failed = self._failed - {event.tag} if kind == "exported" else set()  # the next copy makes up for one that failed
            log.info("nebula: %s %s %s in %.1f s", event.tag, words, event.text, event.seconds)
        else:
            self._failed.add(event.tag)
            log.error("nebula: %s %s: %s. Training goes on.", event.tag or "a checkpoint", self._export.failed[1], event.text)
        self._owner.hear(event)

    @property
    def failed(self) -> bool:
        return bool(self._failed)

    def end(self) -> None:
        """Tells the process that no more versions come. A forked child may hold the pipe open, so this is a line of its own."""
        self._is_sent.wait(END_S)
        with contextlib.suppress(OSError), without_sigpipe():
            os.write(self.process.stdin.fileno(), b"end\n")  # type: ignore[union-attr]
            self.process.stdin.close()  # type: ignore[union-attr]


def begin(export: Any, owner: Any, prefix: str = "", root: str | None = None, model: Any = None) -> None:
    """Makes sure that a process does the work of a description on the session's versions. It never raises.

    Rank 0 alone calls it to any effect, after each commit. export: an HFExport or a Far.
    prefix: what the tags of these versions begin with. root: the directory in which they are published, under the rest of their tags.
    model: of transformers; its configuration counts if the export has none.
    """
    if export is None:
        return
    try:
        path = owner.settings().persist_path
        if owner.place().rank != 0:
            return
        if path is None:
            raise NebulaConfigError("there is no storage path, so none becomes durable")
        key = (path, prefix, id(export))
        with _lock:
            found = _running.get(key)
            if found is not None and found.process.poll() is None:
                return
            request = {"works": export.works, "path": path, "job": owner.settings().job, "prefix": prefix, "root": root}
            _running[key] = _Worker(export, json.dumps({**request, "options": export.options(model)}).encode() + b"\n", owner)
    except Exception as failure:
        log.error("nebula: a checkpoint %s: %s. Training goes on.", export.failed[1], failure)


def end(export: Any) -> None:
    """Ends the work of that description. Their processes finish the newest version first. It does not wait for them."""
    with _lock:
        for key in [key for key in _running if export is not None and key[2] == id(export)]:
            found = _running.pop(key)
            found.end()
            _ending.append(found)


def wait(deadline: float | None) -> bool:
    """Tells all processes that no more versions come, and waits for them. Returns False if an export failed, or is not there in time."""
    with _lock:
        for found in _running.values():
            found.end()
        _ending.extend(_running.values())
        _running.clear()
        waited = list(_ending)
    all_there = True
    for found in waited:
        found.thread.join(None if deadline is None else max(deadline - time.monotonic(), 0))
        if found.thread.is_alive():
            return False
        all_there = all_there and not found.failed
        with _lock, contextlib.suppress(ValueError):
            _ending.remove(found)
    return all_there


def _after_fork() -> None:
    """Forgets the parent's processes in a forked child, which must not end them."""
    global _lock
    _lock = threading.Lock()
    _running.clear()
    _ending.clear()


os.register_at_fork(after_in_child=_after_fork)


# -- in the process


def step_of(tag: str) -> int | None:
    """Returns the number at the end of a tag: global_step500, checkpoint-500, epoch=1-step=500.ckpt."""
    found = re.search(r"(\d+)(?:\.[A-Za-z]+)?$", _AGAIN.sub("", tag))
    return int(found[1]) if found else None


def _wait(watch: _nebula.Watch, seconds: float) -> None:
    """Returns when something was committed or became durable on this node, or after so many seconds."""
    end = time.monotonic() + seconds
    try:
        watch.next(int(seconds * 1000))
    except NebulaError:  # the agent has ended: the next look starts another one
        time.sleep(max(0.0, end - time.monotonic()))


class Work:
    """The loop of the process. A kind of work says which version is due, and does it."""

    kinds: tuple[str, str]  # of the events: done, failed
    patience_s = GIVE_UP_S  # after the trainer's end, for what is not there yet

    def __init__(self, request: dict[str, Any], trainer: int) -> None:
        self.path, self._trainer = request["path"], trainer
        self.ended = threading.Event()  # the trainer has said so
        self._ended_at: float | None = None
        self._pause, self._silent_s, self._report_at = PAUSE_S[0], SILENT_S[0], 0.0

    def due(self, reader: Any) -> tuple[tuple[Any, ...] | None, Any]:
        """Returns the newest version that can be worked on, with what do() needs, or None; and a newer one that is not durable yet, or None."""
        raise NotImplementedError

    def do(self, reader: Any, row: Any, *rest: Any) -> None:
        """Raises a NebulaError if the same work shall be tried again."""
        raise NotImplementedError

    def is_over(self) -> bool:
        return self.ended.is_set() or os.getppid() != self._trainer

    def run(self) -> None:
        from ..reader import Reader

        with contextlib.ExitStack() as opened:
            reader = None
            while True:
                is_over = self.is_over()  # first: what was committed before that counts
                row = None
                try:
                    reader = reader or opened.enter_context(Reader(self.path))
                    watch = _nebula.Watch(reader._engine.session(patient=True))
                    found, waiting = self.due(reader)
                    if is_over and waiting is not None and not self._is_late():
                        found = None  # the last version is the one that counts
                    elif found is None and is_over:
                        return
                    if found is not None:
                        row = found[0]
                        self.do(reader, *found)
                        self._pause, self._silent_s, self._report_at = PAUSE_S[0], SILENT_S[0], 0.0
                    else:
                        _wait(watch, 0.2 if is_over else LOOK_S)
                except NebulaError as failure:
                    if not self._goes_on(failure, row):
                        return

    def _is_late(self) -> bool:
        """Returns True if a version has not become durable for a long time after the trainer's end."""
        self._ended_at = self._ended_at or time.monotonic()
        return time.monotonic() - self._ended_at > self.patience_s

    def _goes_on(self, failure: NebulaError, row: Any) -> bool:
        """Reports a trouble, ever more rarely, and waits a while. Returns False if the trainer has ended long ago."""
        is_last = self.is_over() and self._is_late()
        if is_last or time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + self._silent_s
            self._silent_s = min(2 * self._silent_s, SILENT_S[1])
            self.report(self.kinds[1], row, f"{failure}{'' if is_last else '; it is tried again'}")
        if not is_last:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, PAUSE_S[1])
        return not is_last

    def report(self, kind: str, row: Any, text: str, size: int = 0, seconds: float = 0.0) -> None:
        tag = row.tag if row is not None else ""
        try:
            print(json.dumps(dataclasses.asdict(Event(kind, tag, step_of(tag), size, seconds, text))), flush=True)
        except OSError:  # the trainer has ended
            if kind == self.kinds[1]:
                print(f"nebula: {tag or 'a checkpoint'}: {kind}: {text}", file=sys.stderr, flush=True)


class _Exports(Work):
    kinds = (HFExport.done[0], HFExport.failed[0])

    def __init__(self, request: dict[str, Any], trainer: int) -> None:
        from .naming import Config

        super().__init__(request, trainer)
        options = dict(request["options"])
        if isinstance(options["config"], dict):
            made = Config(options["config"]["values"])
            made.files = {name: text.encode() for name, text in options["config"]["files"].items()}
            options["config"] = made
        self.export = HFExport(**options)
        self.prefix, self._root, self._job = request["prefix"], request["root"], request["job"]
        self._done: set[tuple[str, float]] = set()  # versions that are exported, or cannot be
        self._tries: Counter[tuple[str, float]] = Counter()
        self._durable_since: dict[str, float] = {}  # by tag, of versions whose directory is not there

    def due(self, reader: Any) -> tuple[tuple[Any, ...] | None, Any]:
        waiting = None
        for row in listing(one for one in reader._session.list_checkpoints().values() if one["job"] == self._job):  # the newest first
            name = row.tag.removeprefix(self.prefix)
            step = step_of(name)
            if not row.tag.startswith(self.prefix) or row.abandoned or (step or 0) % self.export.every:
                continue
            target = self.export.target(name, step)
            if (row.tag, row.committed_at) in self._done or (not self.export.replace and "://" not in target and os.path.exists(target)):
                break  # older ones are not wanted any more
            published = self._published(row.tag)
            if row.state == "durable" and (published is None or published.is_dir()):
                return (row, target), waiting
            if row.state == "durable" and time.monotonic() - self._durable_since.setdefault(row.tag, time.monotonic()) > PUBLISHED_S:
                continue  # the program has removed that directory
            if row.state in (*_WAITS, "durable"):
                waiting = waiting or row
        return None, waiting

    def _published(self, tag: str) -> Path | None:
        name = _AGAIN.sub("", tag.removeprefix(self.prefix))
        return None if self._root is None else Path(self._root, name)

    def do(self, reader: Any, row: Any, *rest: Any) -> None:
        from . import export_hf
        from .files import Directory, Published, Version
        from .naming import CONFIG

        target, begun, key = rest[0], time.monotonic(), (row.tag, row.committed_at)
        self._done.add(key)
        try:
            version = reader.get(row.tag)
            if version is None:
                raise NebulaNotFound(f"it was removed before it could be exported; it is not in {settings.shown(self.path)}")
            names = {one.name for one in dataclasses.fields(self.export)} - {"directory", "every"}
            options = {name: getattr(self.export, name) for name in names}
            published = self._published(row.tag)
            if published is not None:
                version = Published(Version(version), Directory(published))
                if options["config"] is None and (published / CONFIG).is_file():
                    options["config"] = published
            made = export_hf(version, target, **options)
        except Exception as failure:
            if getattr(failure, "status", "") == "busy":  # another run has made it
                return
            self._tries[key] += 1
            if isinstance(failure, (OSError, NebulaTimeout, NebulaUnavailable)) and self._tries[key] < TRIES:
                self._done.remove(key)
                raise failure if isinstance(failure, NebulaError) else NebulaStorageError(str(failure)) from failure
            text = str(failure) if isinstance(failure, NebulaError) else f"{type(failure).__name__}: {failure}"
            self.report(self.kinds[1], row, text, 0, time.monotonic() - begun)
        else:
            self.report(self.kinds[0], row, made.directory, made.size, time.monotonic() - begun)


def _work(request: dict[str, Any], trainer: int) -> Work:
    if request["works"] == HFExport.works:
        return _Exports(request, trainer)
    from ..manager.far import Copies

    return Copies(request, trainer)


def main(trainer: int) -> None:
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    request = sys.stdin.buffer.readline()
    if not request.endswith(b"\n"):  # the trainer has died
        return
    work = _work(json.loads(request), trainer)

    def listen() -> None:
        sys.stdin.buffer.readline()
        work.ended.set()

    threading.Thread(target=listen, daemon=True).start()
    work.run()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter's end flushes a pipe that may have no reader


if __name__ == "__main__":
    from nebulaml.export import background  # the module that others import, whose classes they extend

    background.main(int(sys.argv[1]))
