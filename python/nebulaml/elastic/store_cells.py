"""Cells in any storage that Nebula knows, through ``nebula store``: the C drivers move the bytes and have the credentials.

If a store can replace an object by its stamp, a cell is one object. Otherwise, as in directories, a cell is a log of objects that are
created and never replaced, and the newest one counts. A writer that has read entry n creates entry n + 1: that is the compare-and-set.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import subprocess
import threading
import time
from collections.abc import Iterable
from typing import Any

from .._session import config, locate
from ..errors import NebulaError, NebulaUnavailable, from_status
from .cells import STATE, Cell, CellCorrupt, Cells, CellUnreachable, Entry

__all__ = ["LogCells", "ObjectCells", "StoreProcess", "open_cells"]

_LOGGER = logging.getLogger("nebulaml.elastic")
ROOT = ".nebula/rendezvous"
_LIMIT_S = 150.0  # seconds; the drivers themselves repeat for 2 minutes
_SLOW_S = 10.0
_KEPT = 16  # newest entries of a log that always stay
_KEPT_S = 60.0  # seconds by the store's clock: younger entries stay, too
_FRESH_S = 20.0  # within this time after an entry was the newest, the next one cannot have been created and removed
_LOOKS = 20
_DIGITS, _NUMBERS = 20, 1 << 48  # of the name of an entry; no log gets as long


class StoreProcess:
    """A ``nebula store`` process of its own. Any thread may ask. If the process has died, the next request starts another one.

    limit_s: seconds in which it must answer. The drivers themselves repeat for 2 minutes, and a large file takes its time.
    slow_s: after so many seconds without an answer, a warning says so.
    """

    def __init__(self, url: str, limit_s: float = _LIMIT_S, slow_s: float = math.inf) -> None:
        self._url, self._limit_s, self._slow_s = url, limit_s, slow_s
        self._lock = threading.Lock()  # guards what follows
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self.requests = 0

    def ask(self, **request: Any) -> dict[str, Any]:
        with self._lock:
            self.requests += 1
            try:
                answer = self._exchange(json.dumps(request, separators=(",", ":")).encode() + b"\n")
            except (OSError, EOFError) as failure:
                self._end()
                raise CellUnreachable(f"`nebula store` for {request['do']}: {failure}") from failure
            except BaseException:
                # A signal handler, for example, raised and interrupted the request. Its answer comes later, and the next request would read
                # it as its own.
                self._end()
                raise
        error = answer.get("error")
        if error is None:
            return answer
        failure = from_status(error["status"], error["message"], 0, 0)
        if error["again"] and failure.status != "busy":
            raise CellUnreachable(failure.message) from failure
        raise failure

    def close(self) -> None:
        with self._lock:
            self._end()

    def _exchange(self, line: bytes) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line)
        process.stdin.flush()
        begun = time.monotonic()
        deadline, slow = begun + self._limit_s, begun + self._slow_s
        answers = select.poll()  # select.select takes no descriptor above 1023
        answers.register(process.stdout, select.POLLIN)
        while b"\n" not in self._received:
            if not answers.poll(max(0.0, min(deadline, slow) - time.monotonic()) * 1000):
                if slow < deadline:
                    _LOGGER.warning(
                        "the storage of the rendezvous has not answered for %.0f s, this node waits %.0f s for it", self._slow_s, self._limit_s
                    )
                    slow = deadline
                    continue
                raise EOFError(f"no answer in {self._limit_s:.0f} s")
            piece = os.read(process.stdout.fileno(), 1 << 20)
            if not piece:
                raise EOFError("it has ended")
            self._received += piece
        text, _, self._received = self._received.partition(b"\n")
        answer = json.loads(text)
        assert isinstance(answer, dict)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
        if command is None:
            raise NebulaUnavailable("the `nebula` command of this installation is not found; install the package again")
        # A URL may hold a secret, which a command line would show. A session of its own: Ctrl-C must reach only the parent.
        environment = os.environ | {"NEBULA_PERSISTENT_STORAGE_PATH": self._url}
        self._process = subprocess.Popen(
            [command, "store"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._received = b""
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def open_cells(url: str) -> Cells:
    """Returns the cells of a directory or a URL."""
    process = StoreProcess(config.clean_path(url) or "", slow_s=_SLOW_S)
    features = process.ask(do="features")
    if features["puts_if_same"]:
        return ObjectCells(process)
    return LogCells(process, bool(features["lists_fresh"]))


class _StoreCells(Cells):
    def __init__(self, process: StoreProcess) -> None:
        self.process = process

    def clock(self) -> float:
        return float(self.process.ask(do="clock")["time_ns"]) / 1e9

    def close(self) -> None:
        self.process.close()

    def _list(self, prefix: str) -> list[tuple[str, float]]:
        entries = self.process.ask(do="list", prefix=prefix)["entries"]
        return [(entry["key"], entry["time_ns"] / 1e9) for entry in entries]

    def _get(self, key: str) -> tuple[str, str] | None:
        try:
            answer = self.process.ask(do="get", key=key)
        except NebulaError as failure:
            if failure.status == "not-found":
                return None
            if failure.status == "corrupt":
                raise CellCorrupt(failure.message) from failure
            raise
        return answer["value"], answer["stamp"]

    def _put(self, key: str, text: str, **condition: str) -> str | None:
        """Returns the stamp. None: the condition does not hold."""
        try:
            return str(self.process.ask(do="put", key=key, value=text, **condition)["stamp"])
        except NebulaError as failure:
            if condition and failure.status == "busy":
                return None
            raise


class ObjectCells(_StoreCells):
    """A cell is one object. Its token is the object's stamp."""

    def read(self, cell: Cell) -> tuple[str, str] | None:
        return self._get(_key(cell))

    def swap(self, cell: Cell, text: str, token: str | None) -> str | None:
        if token is None:
            return self._put(_key(cell), text, **{"if": "absent"})
        return self._put(_key(cell), text, **{"if": "same"}, stamp=token)

    def put(self, cell: Cell, text: str) -> None:
        self._put(_key(cell), text)

    def delete(self, cell: Cell) -> bool:
        there = self._get(_key(cell)) is not None
        if there:
            self.process.ask(do="remove", keys=[_key(cell)])
        return there

    def entries(self, job: str | None = None) -> Iterable[Entry]:
        for key, written in self._list(f"{ROOT}/{job}/" if job else f"{ROOT}/"):
            parts = key.split("/")
            if len(parts) == 4:
                yield Entry(Cell(*parts[2:]), written)

    def remove(self, cells: list[Cell]) -> None:
        if cells:
            self.process.ask(do="remove", keys=[_key(cell) for cell in cells])


class LogCells(_StoreCells):
    """A cell is a log of objects, ``<n>``. A token is the number of the newest.

    The state is written often, so its old entries are removed, and their numbers become free. A writer that slept between reading and
    writing could create an entry with such a number. So after a long time it looks at the log again: entries are removed in ascending
    order, which shows if its entry was the next one. The logs of keys stay whole until the job ends.
    """

    def __init__(self, process: StoreProcess, lists_fresh: bool) -> None:
        super().__init__(process)
        self._lists_fresh = lists_fresh
        self._seen: dict[Cell, tuple[int, float]] = {}  # the newest number, and a time at which it was the newest
        self._texts: dict[Cell, tuple[int, str]] = {}  # an entry that was read or written; entries do not change

    def clock(self) -> float:
        """Returns the time of the file system. Without a directory the driver would answer with this machine's time, so it makes one first."""
        if any(number for number, _ in self._seen.values()):
            return super().clock()  # the entry that was seen lies in one
        key = f"{ROOT}/clock"
        self._put(key, "")
        found = super().clock()
        self.process.ask(do="remove", keys=[key])  # the directory stays
        return found

    def read(self, cell: Cell) -> tuple[str, str] | None:
        found = self._read(cell)
        return found if found is not None and found[0] else None

    def swap(self, cell: Cell, text: str, token: str | None) -> str | None:
        if token is None and not self._saw(cell, 0):
            found = self._read(cell)
            if found is not None and found[0]:
                return None
            token = found[1] if found is not None else None
        number, begun = int(token or 0), _now()
        if self._put(_entry(cell, number + 1), text, **{"if": "absent"}) is None:
            return None
        if cell.name == STATE and not self._saw(cell, number) and not self._follows(cell, number):
            self.process.ask(do="remove", keys=[_entry(cell, number + 1)])
            return None
        self._seen[cell] = number + 1, begun
        self._texts[cell] = number + 1, text
        return str(number + 1)

    def put(self, cell: Cell, text: str) -> None:
        token: str | None = "0"
        while self.swap(cell, text, token) is None:
            found = self._read(cell)
            token = found[1] if found is not None else "0"

    def delete(self, cell: Cell) -> bool:
        """Writes an empty entry: the numbers go on, so that no older token fits again."""
        while (found := self._read(cell)) is not None and found[0]:
            if self.swap(cell, "", found[1]) is not None:
                return True
        return False

    def entries(self, job: str | None = None) -> Iterable[Entry]:
        newest: dict[Cell, float] = {}
        for key, written in self._list(f"{ROOT}/{job}/" if job else f"{ROOT}/"):
            parts = key.split("/")
            if len(parts) == 5 and _number(key):
                newest[Cell(*parts[2:4])] = written
        return [Entry(cell, written) for cell, written in newest.items()]

    def remove(self, cells: list[Cell]) -> None:
        keys = [key for cell in cells for key, _ in self._log(cell)]
        if keys:
            self.process.ask(do="remove", keys=keys)

    def _log(self, cell: Cell) -> list[tuple[str, float]]:
        """Returns keys and times of the entries, in ascending order, without files of other programs, as .nfs* of an NFS client."""
        return [(key, written) for key, written in self._list(f"{_key(cell)}/") if _number(key) and key == _entry(cell, _number(key))]

    def _saw(self, cell: Cell, number: int) -> bool:
        """Returns True if this was the newest entry a short time ago."""
        seen, at = self._seen.get(cell, (-1, 0.0))
        return seen == number and _now() - at < _FRESH_S

    def _follows(self, cell: Cell, number: int) -> bool:
        """Returns True if entry ``number + 1`` was free because it had never existed."""
        there = {_number(key) for key, _ in self._log(cell)}
        return number in there or max(there, default=0) <= number + 1

    def _read(self, cell: Cell) -> tuple[str, str] | None:
        """Returns the newest entry, also an empty one."""
        for _ in range(_LOOKS):
            listed = _now()
            log = self._log(cell)
            if not log:
                self._seen[cell] = 0, listed
                return None
            number = _number(log[-1][0])
            text = self._entry_text(cell, number)
            while not self._lists_fresh and (newer := self._entry_text(cell, number + 1)) is not None:
                number, text = number + 1, newer
            if text is None:
                continue  # removed meanwhile
            self._seen[cell] = number, listed
            self._texts[cell] = number, text
            if cell.name == STATE:
                self._prune(log)
            return text, str(number)
        raise CellUnreachable(f"{_key(cell)}: storage lists entries that it then does not have")

    def _entry_text(self, cell: Cell, number: int) -> str | None:
        known = self._texts.get(cell)
        if known is not None and known[0] == number:
            return known[1]
        found = self._get(_entry(cell, number))
        return None if found is None else found[0]

    def _prune(self, log: list[tuple[str, float]]) -> None:
        newest = log[-1][1]
        for key, written in log[:-_KEPT]:  # one after the other, in ascending order
            if newest - written > _KEPT_S:
                self.process.ask(do="remove", keys=[key])


def _key(cell: Cell) -> str:
    return f"{ROOT}/{cell.job}/{cell.name}"


def _entry(cell: Cell, number: int) -> str:
    return f"{_key(cell)}/{number:0{_DIGITS}d}"


def _number(key: str) -> int:
    """Returns the number of an entry. 0: no writer has given this name."""
    name = key.rpartition("/")[2]
    return int(name) if len(name) == _DIGITS and name.isascii() and name.isdigit() and int(name) < _NUMBERS else 0


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # also counts while the machine sleeps
