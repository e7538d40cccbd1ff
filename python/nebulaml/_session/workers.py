"""Workers of data loaders stay alive when SIGTERM goes to all processes of a job, so that the trainer can reach its next save.

Slurm, torchrun and `kill -- -PGID` signal them together with the trainer. If one of them died, torch would raise in the training loop.
From ``protect()`` on, each worker process of a DataLoader ignores SIGTERM unless the trainer sent it, as torch does to end a worker.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .. import _nebula

__all__ = ["blocked", "protect"]

PRELOAD = f"{__package__}.forkserver"


def protect() -> None:
    """Makes the workers that start from now on ignore the SIGTERM of others. It may be called again."""
    start = multiprocessing.process.BaseProcess.start
    if not hasattr(start, "__nebula__"):
        multiprocessing.process.BaseProcess.start = _wrapped(start)  # type: ignore[method-assign]


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Holds SIGTERM back on this thread, and from processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wrapped(start: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(start)
    def begin(self: Any) -> None:
        target = getattr(self, "_target", None)
        if not _is_loop(target):
            start(self)
            return
        method = getattr(self, "_start_method", None) or multiprocessing.get_start_method()
        self._target = _Loop(target, method != "forkserver")
        if method == "forkserver":  # the worker is a child of the server
            _preload()
            start(self)
            return
        if method == "spawn":
            from multiprocessing import resource_tracker

            resource_tracker.ensure_running()  # its first start would let the signal through
        with blocked():
            start(self)

    begin.__nebula__ = True  # type: ignore[attr-defined]
    return begin


def _is_loop(target: Any) -> bool:
    """True for the function that a worker of torch's or torchdata's loader runs."""
    module = getattr(target, "__module__", None) or ""
    return getattr(target, "__name__", "") == "_worker_loop" and module.startswith(("torch.utils.data.", "torchdata."))


def _preload() -> None:
    """Makes the fork server ignore the SIGTERM of others, too, if it does not run yet: its workers end when it has gone."""
    from multiprocessing import forkserver

    server = forkserver._forkserver  # type: ignore[attr-defined]
    if PRELOAD not in server._preload_modules:
        server._preload_modules = [*server._preload_modules, PRELOAD]


class _Loop:
    """Runs in the worker process."""

    def __init__(self, loop: Callable[..., None], is_child: bool) -> None:
        self.loop, self.is_child = loop, is_child

    def __call__(self, *arguments: Any, **named: Any) -> None:
        from torch.utils.data._utils import signal_handling

        trainer = multiprocessing.parent_process()
        pid = os.getppid() if trainer is None or trainer.pid is None else trainer.pid
        of_torch = signal_handling._set_worker_signal_handlers

        def set_handlers() -> None:
            of_torch()
            _nebula.end_only_by(pid)

        signal_handling._set_worker_signal_handlers = set_handlers
        if self.is_child:
            _watch(sys.modules[self.loop.__module__], pid)
        _nebula.end_only_by(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self.loop(*arguments, **named)


def _watch(module: Any, trainer: int) -> None:
    """Makes the worker end with the trainer also if that has ended before the worker looks for the first time."""

    class Watchdog(module.ManagerWatchdog):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.manager_pid = trainer

    module.ManagerWatchdog = Watchdog
