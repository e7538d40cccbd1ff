"""A line on the terminal for a call that waits for more than a second: what it waits for, bytes, rate, and time left.

    with progress.sending(engine, "saving global_step5", "global_step5"):
        ...wait until it is durable...

The line is on stderr, if that is a terminal, and disappears when the call returns. NEBULA_PROGRESS=0 turns it off. One process of a node
shows it, that of local rank 0, and one call of that process at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from .. import _nebula
from .printing import human_bytes, printable

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["fetching", "sending", "waiting"]

AFTER_S = 1.0  # a shorter call shows nothing
REDRAW_S = 0.5

Look = Callable[[], tuple[int, int]]  # bytes moved, and all bytes; 0 for all: not known

_one = threading.Lock()  # held by the call that shows its line


def _is_wanted(engine: Engine) -> bool:
    try:
        is_terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # a program without stderr, or one that has closed it
        return False
    return is_terminal and os.environ.get("NEBULA_PROGRESS") != "0" and engine.place().local_rank == 0


@contextlib.contextmanager
def _shown(engine: Engine, what: str, look: Look | None) -> Iterator[None]:
    if not _is_wanted(engine) or not _one.acquire(blocking=False):
        yield
        return
    is_over = threading.Event()
    try:
        thread = threading.Thread(target=_draw, args=(sys.stderr, what, look, is_over), name="nebula-progress", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # at the end of the interpreter no thread starts
            thread = None  # type: ignore[assignment]
        try:
            yield
        finally:
            is_over.set()
            if thread is not None:
                thread.join(1)  # it may wait for an answer of the agent
    finally:
        _one.release()


def _draw(terminal: TextIO, what: str, look: Look | None, is_over: threading.Event) -> None:
    begun, is_drawn = time.monotonic(), False
    first = _looked(look)
    pause = AFTER_S
    while not is_over.wait(pause):
        pause = REDRAW_S
        text = _line(what, time.monotonic() - begun, first, _looked(look))
        if is_over.is_set():
            break
        with contextlib.suppress(OSError, ValueError):
            terminal.write(f"\r\033[K{text}")
            terminal.flush()
            is_drawn = True
    if is_drawn:
        with contextlib.suppress(OSError, ValueError):
            terminal.write("\r\033[K")
            terminal.flush()


def _looked(look: Look | None) -> tuple[int, int] | None:
    try:
        return look() if look is not None else None
    except Exception:  # no agent, or one of another release: the call itself will say so
        return None


def _line(what: str, seconds: float, first: tuple[int, int] | None, now: tuple[int, int] | None) -> str:
    """Returns the line after so many seconds; ``first`` is what was moved when the call began."""
    text = f"nebula: {printable(what)}"
    if first is None or now is None or not now[0]:
        return f"{text}  {seconds:.0f} s"
    done, total = now
    rate = max(done - first[0], 0) / seconds
    speed = f"{human_bytes(int(rate))}/s"
    if not total:
        return f"{text}  {human_bytes(done)}  {speed}"
    done = min(done, total)
    is_known = rate and done < total and done - first[0] > total // 100  # the first bytes say nothing of the rest
    left = f"  {(total - done) / rate:.0f} s left" if is_known else ""
    return f"{text}  {100 * done / total:.0f} %  {human_bytes(done)} of {human_bytes(total)}  {speed}{left}"


def _status(engine: Engine) -> dict[str, Any]:
    return json.loads(engine.session().report(_nebula.REPORT_STATUS, None))


def sending(engine: Engine, what: str, tag: str | None = None) -> contextlib.AbstractContextManager[None]:
    """Shows how many bytes of this process's versions that are not durable storage has; of one, if a tag is given."""
    sizes: dict[tuple[str, str, str], int] = {}

    def look() -> tuple[int, int]:
        status = _status(engine)
        mine = {(row["job"], row["path"]) for row in status["sessions"] if row["pid"] == os.getpid()}
        left = {}
        for row in status["queue"]:
            if (row["job"], row["path"]) in mine and tag in (None, row["tag"]):
                name = row["job"], row["path"], row["tag"]
                sizes[name] = row["size"]
                left[name] = row["size"] - min(row["moved"], row["size"])
        total = sum(sizes.values())
        return total - sum(left.values()), total

    return _shown(engine, what, look)


def fetching(engine: Engine, what: str, total: Callable[[], int]) -> contextlib.AbstractContextManager[None]:
    """Shows how many bytes of files this process and its agent have read from storage since the call began.

    total: returns the bytes that this process waits for. They are not shown if other ranks of the node may read at the same time.
    """
    begin: list[int] = []  # when the call began: the bytes read, and those to read

    def look() -> tuple[int, int]:
        read = _nebula.read_bytes() + _status(engine)["agent"]["fetched_bytes"]
        if not begin:
            begin.extend((read, total() if engine.place().local_world == 1 else 0))
        return read - begin[0], begin[1]

    return _shown(engine, what, look)


def waiting(engine: Engine, what: str) -> contextlib.AbstractContextManager[None]:
    """Shows for how long the call has waited."""
    return _shown(engine, what, None)


def _after_fork() -> None:
    global _one
    _one = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
