"""Keeps the document up to date, and records its changes since each revision."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import NebulaError
from . import snapshot
from .source import Source

__all__ = ["Collector"]

_LOGGER = logging.getLogger("nebulaml")
METRICS_AT_ONCE = 50
LOCAL_S = 1.0
CLOUD_S = 15.0  # a listing of a bucket costs requests
CLOUD_PER_VERSION_S = 0.001  # of 100,000 versions it takes 600, so they are listed every 100 s
LATE_S = 30.0  # after so long without an answer, and three times the time of the last one, the page says that what it shows is old
REST = 3.0  # after each look, the thread waits for this multiple of the time that the look took


class Collector:
    """Collects the document on one thread. `state` answers pages on any thread."""

    def __init__(self, source: Source, every_s: float | None = None, works: Callable[[], list[dict[str, Any]]] = list) -> None:
        self._source = source
        self._works = works
        self._every_s = every_s or (LOCAL_S if source.is_local else CLOUD_S)
        self._per_version_s = 0.0 if every_s or source.is_local else CLOUD_PER_VERSION_S
        self._stored = 0
        self._changed = threading.Condition()  # guards what follows
        self._revision = 0
        self._rest: dict[str, Any] = {}
        self._rows: dict[str, tuple[int, dict[str, Any]]] = {}  # with the revision of the last change of each
        self._removed: dict[str, int] = {}
        self._wanted = threading.Event()
        self._ended = False
        self._watch = snapshot.Watch()
        self._ledger: dict[str, Any] | None = None  # the answer of `nebula goodput`, and the number of lines of history that it is made from
        self._lines = 0
        self._complete = False  # storage was read once
        self._asked: float | None = None  # when the look began that is under way
        self._late: float | None = None  # that of the look of which the page says that it takes long
        self._took = 0.0  # by the last look
        self._epoch = f"{time.time_ns():x}"
        self._thread = threading.Thread(target=self._run, name="nebula-studio", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the waits of pages, and soon the thread. Call it on any thread, except inside `state`."""
        self._ended = True
        self._wanted.set()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        self._thread.join(5)

    def look(self) -> None:
        """Makes the thread look soon, because an action may have changed something."""
        self._wanted.set()

    def touch(self) -> None:
        """Sends the state to pages again, because a work has gone on."""
        with self._changed:
            self._revision += 1
            self._changed.notify_all()

    def state(self, epoch: str, since: int, wait_s: float) -> dict[str, Any]:
        """Returns the changes after revision `since`. It waits at most wait_s for a change. A page of an earlier server gets everything."""
        with self._changed:
            if epoch != self._epoch:
                since = 0
            self._changed.wait_for(lambda: self._revision > since or self._ended, wait_s)
            self._say_if_late()
            rows = {key: row for key, (revision, row) in self._rows.items() if revision > since}
            gone = [key for key, revision in self._removed.items() if revision > since]
            changes = {"epoch": self._epoch, "revision": self._revision, "all": since == 0, "rows": rows, "gone": gone}
            return {**changes, "works": self._works(), **self._rest}

    def _say_if_late(self) -> None:
        """Adds a problem if the look under way gets no answer. The caller holds `_changed`. The first look shows its progress instead."""
        asked = self._asked
        passed = time.monotonic() - asked if asked is not None else 0.0
        if passed <= max(LATE_S, 3 * self._took) or self._late == asked or not self._complete:
            return
        self._late = asked
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - passed))
        text = f"The storage has not answered since {since}: the page shows what was known then. `nebula status` has the verdict of now."
        self._rest = {**self._rest, "problems": [*self._rest.get("problems", []), text]}
        self._revision += 1
        self._changed.notify_all()

    def _run(self) -> None:
        while not self._ended:
            self._asked = begun = time.monotonic()
            self._wanted.clear()
            try:
                document = self._document()
            except NebulaError as failure:
                document = self._failed(str(failure))
            except Exception as failure:  # if the thread ended, the page would show old numbers as current ones
                _LOGGER.exception("nebula studio: a look failed")
                document = self._failed(f"a look failed: {type(failure).__name__}: {failure}")
            self._asked = None
            self._publish(document)
            self._took = took = time.monotonic() - begun
            self._wanted.wait(max(self._every_s, self._per_version_s * self._stored, REST * took))

    def _failed(self, text: str) -> dict[str, Any]:
        """Returns the last document, with this problem added. The known rows stay: a failed look does not mean that versions are gone."""
        with self._changed:
            rows = {key: row for key, (_, row) in self._rows.items()}
            return {**self._rest, "problems": [text], "rows": rows, "time": time.time()}

    def _document(self) -> dict[str, Any]:
        status = self._source.status(self._begin)
        now = time.time()
        self._watch.look(status, now)
        history = self._source.history()
        if len(history) != self._lines:
            self._ledger, self._lines = self._source.goodput(), len(history)
        document = snapshot.build(status, history, self._source.nodes(), self._ledger, self._watch, now, self._source.settings())
        self._add_metrics(document["rows"])
        document["path"] = self._source.shown_path
        self._stored = document["now"]["stored"]
        self._complete = self._complete or ("versions" in status["storage"] and not status["storage"].get("error"))
        return document

    def _begin(self, status: dict[str, Any]) -> None:
        """Shows the newest versions while the storage is read for the first time. A later look keeps the rows until it is complete."""
        if self._complete:
            return
        document = snapshot.build(status, [], [], None, snapshot.Watch(), time.time())
        self._publish({**document, "path": self._source.shown_path, "reading": status["reading"]})

    def _add_metrics(self, rows: dict[str, dict[str, Any]]) -> None:
        """Adds metrics, newest versions first and only some per look: each version costs one request to storage."""
        stored = (row for row in reversed(list(rows.values())) if "storage" in row["where"] and (row["file_count"] or 0) > 1)
        with self._changed:
            known = {key: row["metrics"] for key, (_, row) in self._rows.items()}
        budget = itertools.count()
        for row in stored:
            if not self._source.knows_metrics(row["tag"], row["sequence"]) and next(budget) >= METRICS_AT_ONCE:
                break
            with contextlib.suppress(NebulaError):
                row["metrics"] = self._source.metrics(row["tag"], row["sequence"], row["entry"])
        for key, row in rows.items():
            row["metrics"] = row["metrics"] or known.get(key, {})

    def _publish(self, document: dict[str, Any]) -> None:
        rows = document.pop("rows", {})
        with self._changed:
            same = {name: value for name, value in document.items() if name != "time"}
            before = {name: value for name, value in self._rest.items() if name != "time"}
            changed = [key for key, row in rows.items() if key not in self._rows or self._rows[key][1] != row]
            gone = [key for key in self._rows if key not in rows]
            self._rest = document
            if not changed and not gone and same == before and self._revision:
                return
            self._revision += 1
            for key in changed:
                self._rows[key] = (self._revision, rows[key])
                self._removed.pop(key, None)
            for key in gone:
                del self._rows[key]
                self._removed[key] = self._revision
            self._changed.notify_all()
