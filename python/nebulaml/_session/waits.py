"""Calls that may wait for long.

Ctrl-C works during the wait, and the log says what the call waits for. A signal handler that interrupts a save must not
wait for that save, so its calls are refused.
"""

from __future__ import annotations

import contextlib
import logging
import numbers
import threading
import time
from collections.abc import Callable, Iterator
from sys import is_finalizing
from typing import TypeVar

from ..errors import NebulaConfigError, NebulaTimeout, NebulaUnavailable

__all__ = ["beside_loop", "interruptible", "milliseconds", "patiently", "refuse_within_save", "run_handlers", "within_save"]

log = logging.getLogger("nebulaml")

T = TypeVar("T")

FOREVER_S = 1e9  # 30 years
SAY_AFTER_MS = 30_000  # ms after which the log says what the call waits for

_in_save: set[int] = set()  # threads that run Python code within a save, which holds the session until it is done


def milliseconds(timeout: float | None) -> int:
    """Returns the limit in ms for the C library: -1 (no limit) for None and for anything longer than FOREVER_S.

    timeout: seconds. Raises NebulaConfigError if it is no number.
    """
    if timeout is None:
        return -1
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not (timeout < 0 or timeout >= 0):  # nan is neither
        raise NebulaConfigError(f"a timeout is a number of seconds, or None, not {timeout!r}")
    return -1 if timeout > FOREVER_S else max(int(float(timeout) * 1000), 0)


@contextlib.contextmanager
def within_save() -> Iterator[None]:
    """Marks code that a save calls or waits for. A signal handler that runs meanwhile would wait for the save that it interrupts."""
    thread = threading.get_ident()
    _in_save.add(thread)
    try:
        yield
    finally:
        _in_save.discard(thread)


def refuse_within_save() -> None:
    """Raises NebulaUnavailable in such a signal handler."""
    if _in_save and threading.get_ident() in _in_save:  # each save asks several times: a thread-local would be slower
        raise NebulaUnavailable(
            "this signal handler has interrupted a save that waits for a device or for memory, so it cannot use Nebula: "
            "set a flag in the handler, and let the program check it after each step"
        )


def run_handlers() -> None:
    """Lets signal handlers of the program run. A save that waits for memory calls it every 200 ms; an exception of a handler ends the save."""
    with within_save():
        pass


def interruptible(call: Callable[..., T], *arguments: object) -> T:
    """Runs a call that may wait for long on another thread, so that Ctrl-C still works."""
    refuse_within_save()
    if threading.current_thread() is not threading.main_thread() or is_finalizing():  # a new thread would never run
        return call(*arguments)
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call(*arguments))
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="nebula-wait", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # from Python 3.12 on, no thread starts any more at the end of the interpreter
        return call(*arguments)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


async def beside_loop(call: Callable[[], T]) -> T:
    """Runs a call that may wait for long on a thread of its own.

    asyncio.run() waits at its end for the threads of to_thread(), for as long as a call there waits, also after it was cancelled.
    """
    import asyncio  # a program without an event loop does not need it

    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, failure: BaseException | None) -> None:
        if answer.done():  # cancelled
            return
        if failure is None:
            answer.set_result(result)  # type: ignore[arg-type]
        else:
            answer.set_exception(failure)

    def run() -> None:
        try:
            found: tuple[T | None, BaseException | None] = (call(), None)
        except BaseException as failure:
            found = (None, failure)
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(finish, *found)

    threading.Thread(target=run, name="nebula-wait", daemon=True).start()
    return await answer


def patiently(what: str, call: Callable[[int], T], limit_ms: int) -> T:
    """Runs a call that takes a limit in ms (< 0: none) as interruptible() does. After 30 s the log says what it waits for."""
    if not 0 <= limit_ms <= SAY_AFTER_MS:
        begun = time.monotonic()
        try:
            return interruptible(call, SAY_AFTER_MS)
        except NebulaTimeout as failure:
            if time.monotonic() - begun < 0.9 * SAY_AFTER_MS / 1000:  # the agent has given up; its clock ends a slice a little early
                raise
            log.warning("nebula: still waiting for %s: %s", what, failure)
        limit_ms = max(limit_ms - SAY_AFTER_MS, -1) if limit_ms > 0 else -1
    return interruptible(call, limit_ms)
