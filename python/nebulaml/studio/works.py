"""Work that takes long: a command of its own per work, with its progress, which a person can stop."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import NebulaConfigError, NebulaError, NebulaUnavailable

__all__ = ["Work", "Works"]

KEPT = 50  # works that have ended, for their answers
AT_ONCE = 4  # more would only share the storage's speed


class Work:
    """One work. Its thread calls `run`; any thread may call `stop`."""

    def __init__(self, number: int, what: str, changed: Callable[[], None]) -> None:
        self.number, self.what, self._changed = number, what, changed
        self.state, self.error, self.answer = "running", "", None  # type: str, str, Any
        self.progress: dict[str, int] | None = None
        self.is_stopped = False
        self._lock = threading.Lock()  # guards the process, and that it is not started after a stop
        self._process: subprocess.Popen[str] | None = None

    def row(self) -> dict[str, Any]:
        return {"id": self.number, "what": self.what, "state": self.state, "error": self.error, "progress": self.progress}

    def whole(self) -> dict[str, Any]:
        return {**self.row(), "answer": self.answer}

    def report(self, done: int, total: int) -> None:
        self.progress = {"done": done, "total": total}
        self._changed()

    def run(self, start: Callable[[], subprocess.Popen[str]]) -> tuple[int, str, str]:
        """Runs one command. Returns its exit code, its output, and the texts of stderr that are no progress."""
        with self._lock:
            if self.is_stopped:
                raise NebulaUnavailable(f"{self.what} was stopped")
            process = self._process = start()
        texts: list[str] = []
        reader = threading.Thread(target=lambda: texts.extend(self._follow(process)), daemon=True)
        reader.start()
        assert process.stdout is not None
        with process:
            output = process.stdout.read()
            reader.join()
        return process.returncode, output, "".join(texts).strip()

    def _follow(self, process: subprocess.Popen[str]) -> Iterator[str]:
        assert process.stderr is not None
        for line in process.stderr:
            answer = None
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
            if isinstance(answer, dict) and isinstance(answer.get("done"), int) and isinstance(answer.get("total"), int):
                self.report(answer["done"], answer["total"])
            else:
                yield line

    def stop(self) -> None:
        with self._lock:
            self.is_stopped = True
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)


class Works:
    """The works of one job. Any thread may call."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._lock = threading.Lock()  # guards the list
        self._works: list[Work] = []
        self._numbers = itertools.count(time.time_ns() // 10**7)  # never a number of a studio that ran before

    def begin(self, what: str, do: Callable[[Work], Any], finish: Callable[[], None]) -> int:
        """Starts a thread that calls `do`, and `finish` after it. Returns the number of the work.

        Raises NebulaConfigError if many are running.
        """
        work = Work(next(self._numbers), what, self._changed)
        with self._lock:
            if sum(one.state == "running" for one in self._works) >= AT_ONCE:
                raise NebulaConfigError(f"{AT_ONCE} works are running: wait for one of them, or stop it")
            ended = [one for one in self._works if one.state != "running"]
            self._works = [one for one in self._works if one not in ended[:-KEPT]] + [work]
        threading.Thread(target=self._do, args=(work, do, finish), name=f"nebula-{what:.20}", daemon=True).start()
        self._changed()
        return work.number

    def _do(self, work: Work, do: Callable[[Work], Any], finish: Callable[[], None]) -> None:
        try:
            work.answer = do(work)
            state = "done"
        except NebulaError as failure:
            work.error, state = str(failure), "failed"
        except Exception as failure:
            work.error, state = f"{type(failure).__name__}: {failure}", "failed"
        work.state = "stopped" if work.is_stopped and state == "failed" else state
        finish()
        self._changed()

    def rows(self) -> list[dict[str, Any]]:
        with self._lock:
            return [one.row() for one in self._works]

    def are_running(self) -> bool:
        with self._lock:
            return any(one.state == "running" for one in self._works)

    def find(self, number: int) -> Work:
        with self._lock:
            found = next((one for one in self._works if one.number == number), None)
        if found is None:
            raise NebulaConfigError(f"the studio has forgotten work {number}: it was started again, or {KEPT} others have ended since")
        return found

    def close(self) -> None:
        with self._lock:
            running = [one for one in self._works if one.state == "running"]
        for one in running:
            one.stop()
