"""The jobs that a studio serves: one storage path, several, or all that lie in one path.

A job costs something only while a page shows it: then it has a collector. The table of all jobs comes from `nebula list --jobs`, which finds
the newest version of each with a few small requests. It runs while a page shows the table, and rests longer than it works.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import Any

from .._session import config
from ..errors import NebulaConfigError, NebulaError, NebulaUnavailable
from .collector import REST, Collector
from .source import ASK_S, Source
from .works import Works

__all__ = ["Fleet", "Job"]

_LOGGER = logging.getLogger("nebulaml")
TABLE_LOCAL_S = 3.0
TABLE_CLOUD_S = 60.0
IDLE_S = 120.0  # without a page, a job's collector ends, and nothing looks at the jobs
FIRST_S = 20.0  # a request waits so long for the first answer of storage


class Job:
    """A storage path that a page shows."""

    def __init__(self, path: str, history: str | None, every_s: float | None, is_one_of_several: bool) -> None:
        self.source = Source(path, history, is_one_of_several)
        self.works = Works(lambda: self.collector.touch())
        self.collector = Collector(self.source, every_s, self.works.rows)
        self.checks: dict[str, dict[str, Any]] = {}
        self.used = time.monotonic()
        self.collector.start()

    def close(self) -> None:
        self.works.close()
        self.collector.close()
        self.source.close()


class Fleet:
    """Any thread may call. The thread ends if there is one job."""

    def __init__(self, paths: list[str], history: str | None, every_s: float | None) -> None:
        self._paths, self._history, self._every_s = paths, history, every_s
        self._lock = threading.Lock()  # guards the open jobs
        self._open: dict[str, Job] = {}
        self._known: dict[str, str] = {}  # paths by name; the table's thread replaces it
        self._table: dict[str, Any] = {"jobs": [], "problems": [], "looked_at": None}
        self._goodput: dict[str, tuple[float, float | None]] = {}  # of local paths: with the time of the history's last change
        self._ended = threading.Event()
        self._asked = threading.Event()  # a page wants the table, which is older than its rest
        self._shown = time.monotonic()  # when a page asked for the table last
        self._first: Any = None  # the answer that has shown whether one path is a parent; the first look takes it
        self.several: bool | None = True if len(paths) > 1 else None  # None: the storage of one path has not shown yet whether it is a parent
        self._decided = threading.Event()  # it has
        Source(paths[0]).close()  # before the address is printed: it raises if the installation has no command
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._begin, name="nebula-studio-jobs", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        """Finds out whether there are several jobs: the address is printed before, because storage can hang."""
        if self.several is None:
            with contextlib.suppress(NebulaError):  # the page of the path says why
                self._first = _jobs_of(self._paths[0])
            self.several = bool(self._first and not self._first["is_job"] and self._first["jobs"])
        self._decided.set()
        if self.several:
            self._run()
        else:
            with contextlib.suppress(NebulaConfigError):  # the studio ends
                self.job("")

    def about(self) -> dict[str, Any]:
        """Returns what the page asks first. It waits for storage for a while. Raises NebulaUnavailable: storage has not answered yet."""
        self._decided.wait(FIRST_S)
        if self.several is None:
            shown = config.shown(self._paths[0])
            raise NebulaUnavailable(f"{shown} has not answered yet: the page goes on when it does, or after {ASK_S:.0f} s")
        return {"several": self.several}

    def job(self, name: str) -> Job:
        """Returns the job of that name, "" if there is only one. Raises NebulaConfigError: there is none."""
        several = self.about()["several"]
        path = self._known.get(name) if several else self._paths[0]
        if path is None:
            raise NebulaConfigError(f"there is no job {name!r} in {', '.join(map(config.shown, self._paths))}" if name else "choose a job")
        with self._lock:
            if self._ended.is_set():
                raise NebulaConfigError("the studio ends")
            found = self._open.get(name)
            if found is None:
                found = self._open[name] = Job(path, self._history, self._every_s, several)
            found.used = time.monotonic()
            return found

    def table(self) -> dict[str, Any]:
        self._shown = time.monotonic()
        self._asked.set()
        return self._table

    def stop(self) -> None:
        """Ends the waits of pages."""
        self._ended.set()
        self._asked.set()
        self._decided.set()
        with self._lock:
            opened = list(self._open.values())
        for one in opened:
            one.collector.stop()

    def close(self) -> None:
        self.stop()
        if self._thread:
            self._thread.join(5)
        for one in self._open.values():
            one.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            begun = time.monotonic()
            try:
                self._look()
            except Exception as failure:  # if the thread ended, the page would show old numbers as current ones
                _LOGGER.exception("nebula studio: a look at the jobs failed")
                self._table = {**self._table, "problems": [f"a look failed: {type(failure).__name__}: {failure}"]}
            self._close_idle()
            is_local = all(not config.is_url(path) for path in self._paths)
            least = self._every_s or (TABLE_LOCAL_S if is_local else TABLE_CLOUD_S)
            self._ended.wait(max(least, REST * (time.monotonic() - begun)))
            while not self._ended.is_set() and time.monotonic() - self._shown > IDLE_S:
                self._asked.clear()
                self._asked.wait(IDLE_S)
                self._close_idle()

    def _look(self) -> None:
        jobs: list[dict[str, Any]] = []
        problems: list[str] = []
        known: dict[str, str] = {}
        for path in self._paths:
            try:
                answer, self._first = self._first or _jobs_of(path), None
            except NebulaError as failure:
                problems.append(str(failure))
                known |= {name: one for name, one in self._known.items() if one.startswith(path.partition("?")[0])}
                continue
            for row in answer["jobs"]:
                name = row["name"] if len(self._paths) == 1 else config.shown(row["path"])
                known[name] = path if answer["is_job"] else _below(path, row["name"])
                jobs.append({**row, "name": name, "goodput": self._goodput_of(known[name])})
            if not answer["jobs"]:
                problems.append(f"{config.shown(path)} has no checkpoint yet")
        self._known = known
        self._table = {"jobs": jobs, "problems": problems, "looked_at": time.time()}

    def _goodput_of(self, path: str) -> float | None:
        if "://" in path:
            return None  # its history is not beside its versions
        source = Source(path, None, is_one_of_several=True)
        try:
            changed = os.stat(source.history_file()).st_mtime
            if self._goodput.get(path, (0.0, None))[0] != changed:
                answer = source.goodput()
                self._goodput[path] = (changed, answer.get("goodput") if answer else None)
            return self._goodput[path][1]
        except OSError:
            return None
        finally:
            source.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle = [name for name, one in self._open.items() if time.monotonic() - one.used > IDLE_S and not one.works.are_running()]
            closed = [self._open.pop(name) for name in idle]
        for one in closed:
            one.close()


def _jobs_of(path: str) -> Any:
    source = Source(path)
    try:
        return source.ask("list", "--jobs", "--json")[1]
    finally:
        source.close()


def _below(path: str, name: str) -> str:
    """Returns the path of a directory in a path, with the signature that the URL may have."""
    base, question, query = path.partition("?") if "://" in path else (path, "", "")
    return f"{base.rstrip('/')}/{name.strip('/')}{question}{query}"
