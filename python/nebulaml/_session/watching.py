"""The program's own log reports its checkpoints: one line for each that is durable, or never will be.

Rank 0 has a thread that listens on a connection of its own. It asks for nothing, keeps nothing alive, and ends with the agent.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from sys import is_finalizing
from typing import TYPE_CHECKING, Any

from .. import _nebula
from ..errors import NebulaError

if TYPE_CHECKING:
    from ..events import Event

__all__ = ["Watcher", "end", "follow", "forget"]

log = logging.getLogger("nebulaml")

SLICE_MS = 10_000  # ms between two checks whether the thread is still wanted

END_S = 5


class Watcher(threading.Thread):
    def __init__(self, session: _nebula.Session, what: Any, notify: Callable[[Event], object]) -> None:
        from ..events import of_agent  # by the thread that starts this one, which may run when the interpreter ends

        super().__init__(name="nebula-watch", daemon=True)
        self.event = of_agent
        self.notify = notify
        self.watch = _nebula.Watch(session)  # reports events from now on
        self.what = what
        self.wanted = self.listens = True
        self.storage_error = ""  # the last one
        self.failures = 0  # of storage since the last durable version, each text once
        self.found: dict[int, int] = {}  # versions by the kind of what their values showed
        self.incomplete = 0  # versions since the last durable one that wait for ranks, or are lost

    def run(self) -> None:
        try:
            while self.wanted:
                event = self.watch.next(SLICE_MS)
                if event is not None:
                    self.say(*event)
                    self.notify(self.event(*event))
        except NebulaError:  # the agent has ended: the next commit meets another one, or reports the failure
            pass
        finally:
            self.listens = False

    def stop(self) -> None:
        """Ends the reports and the thread. Lightning's tests look for a method of this name at each daemon thread that is left."""
        end(self)

    def say(self, kind: int, tag: str, size: int, seconds: float, text: str) -> None:
        if kind == _nebula.EVENT_DURABLE:
            took = f", written in {seconds:.2f} s" if seconds else ""
            ended = f" It is the first after {self.incomplete} that are not." if self.incomplete else ""
            ended = " Storage works again." if self.storage_error else ended
            log.log(logging.WARNING if ended else logging.INFO, "nebula: checkpoint %r is durable: %s%s.%s", tag, _bytes(size), took, ended)
            self.storage_error, self.failures, self.incomplete = "", 0, 0
        elif kind in (_nebula.EVENT_LOST, _nebula.EVENT_LATE):
            self.incomplete += 1
            if self.incomplete & (self.incomplete - 1):  # a rank that is gone would be one line for each save
                return
            row = f" That is so for {self.incomplete} checkpoints since the last durable one." if self.incomplete > 1 else ""
            if kind == _nebula.EVENT_LOST:
                log.error("nebula: checkpoint %r is not durable, and will not be: %s. Training goes on.%s", tag, text, row)
                return
            log.warning(
                "nebula: checkpoint %r %s: until then it is neither stored nor loaded. Each rank must commit, with or without "
                "files; if one rank alone saves, give init() world=1 there.%s",
                tag,
                text,
                row,
            )
        elif kind == _nebula.EVENT_REMOVED:
            log.info("nebula: %s was removed from storage, because %s does not name it", tag, text)
        elif kind == _nebula.EVENT_HUNG:
            log.error("nebula: the job makes no steps: %s", text)
        elif kind in (_nebula.EVENT_ROTTEN, _nebula.EVENT_STALE, _nebula.EVENT_NOT_FINITE, _nebula.EVENT_LEFT_MEMORY):
            count = self.found[kind] = self.found.get(kind, 0) + 1
            if count & (count - 1):  # what a program does at each save would be one line for each
                return
            row = f" That is so for {count} checkpoints." if count > 1 else ""
            (log.error if kind == _nebula.EVENT_ROTTEN else log.warning)("nebula: checkpoint %r: %s.%s", tag, text, row)
        elif kind == _nebula.EVENT_OTHER_AGENT:
            log.warning(
                "nebula: another agent of this user (%s) has checkpoints of this path in memory, and this process cannot find them: "
                "use one NEBULA_RUNTIME_DIR, or end that agent by `nebula stop` where it was started",
                text,
            )
        elif text != self.storage_error:
            self.storage_error = text
            self.failures += 1
            if self.failures & (self.failures - 1):  # a text with a number, such as that of the free bytes, differs each time
                return
            log.warning("nebula: storage fails, the agent tries again: %s", text)


def _bytes(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def follow(
    current: Watcher | None, session: _nebula.Session, what: Any, notify: Callable[[Event], object] = lambda event: None
) -> Watcher | None:
    """Makes the log report on this session's job from now on, and calls ``notify`` for each event.

    what: identifies the job. If ``current`` follows the same one, it is returned; otherwise a new watcher takes its place.
    """
    if (current is not None and current.listens and current.what == what) or is_finalizing():
        return current
    forget(current)
    with contextlib.suppress(NebulaError, RuntimeError):  # no thread can start: only the log lines are lost
        watcher = Watcher(session, what, notify)
        watcher.start()
        return watcher
    return None


def forget(current: Watcher | None) -> None:
    """Ends the reports. The thread ends by itself."""
    if current is not None:
        current.wanted = False
        current.watch.stop()


def end(current: Watcher | None) -> None:
    """As forget(), and waits for the thread. A handler of the program's can delay that by at most END_S."""
    forget(current)
    if current is not None and current is not threading.current_thread():
        current.join(END_S)
