"""Notices: SIGTERM or a cloud says that this process will end soon, or a user asks the job to save now.

All ranks of a job learn of a notice at the same step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from .. import _nebula
from ..errors import NebulaConfigError, NebulaError, NebulaStorageError, NebulaUnavailable, from_status
from . import config, ranks, workers

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Notices", "ask_to_save"]

log = logging.getLogger("nebulaml")

SIGTERM_S = 30.0  # from SIGTERM to SIGKILL: the default of torchrun, Kubernetes and Slurm

SAME_S = 2.0  # SIGTERMs within this time are one: a launcher may signal all processes of a job, and torchrun passes its own on to the workers

KEPT_STEPS = 1000  # steps whose answers stay in the key-value store, for ranks that are behind


LOOK_S = 1.0  # between two looks at the file of the request, each one stat

_FAILED = "!"  # begins the answer of a rank 0 that cannot say whether a save is due

AGAIN_S = 1.0  # between two attempts to reach an agent that asks the cloud

CLOUDS = {"azure": _nebula.CLOUD_AZURE, "aws": _nebula.CLOUD_AWS, "gce": _nebula.CLOUD_GCE}


class _CloudWatch(threading.Thread):
    """Calls ``notify(reason, seconds)`` once, when the agent hears from the cloud that this machine is about to go, and ends."""

    def __init__(self, session: _nebula.Session, cloud: str, notify: Callable[[str, float], object]) -> None:
        super().__init__(name="nebula-evictions", daemon=True)
        self._watch = _nebula.Watch(session, CLOUDS[cloud])
        self._cloud, self._notify = cloud, notify
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                found = self._watch.next(-1)
            except NebulaUnavailable:  # the agent has ended: the next attempt starts another one
                self._ended.wait(AGAIN_S)
                continue
            except NebulaError as failure:
                log.warning("nebula: Nebula notices no eviction: %s", failure)
                return
            if found is None:
                continue
            kind, _, _, seconds, text = found
            if kind == _nebula.EVENT_EVICTION:
                self._notify(text, seconds)
                return
            log.warning("nebula: the metadata service of %s does not answer, so Nebula notices no eviction: %s", self._cloud, text)

    def end(self) -> None:
        """Ends the watch. Any thread may call it."""
        self._ended.set()
        self._watch.stop()


_listeners: weakref.WeakSet[Notices] = weakref.WeakSet()  # those to which SIGTERM is a notice
_before: Any = None  # the handler of the program. None: ours is not in its place
_is_signalled = _is_passing_on = False  # SIGTERM has come; the program's handler is running
_signalled_at = 0.0  # of the first one
_held = threading.local()  # the signals that were blocked before a fork


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """The handler of this process: notifies all listeners, and calls the program's handler. A later SIGTERM ends a program without one."""
    global _is_signalled, _is_passing_on, _signalled_at
    now = time.monotonic()
    if not _is_signalled:
        _is_signalled, _signalled_at = True, now
    listeners = list(_listeners)
    for listener in listeners:
        listener._come("SIGTERM", SIGTERM_S)
    if callable(_before):
        if _is_passing_on:  # that handler has called us, which it found here
            return
        _is_passing_on = True
        try:
            _before(number, frame)
        finally:
            _is_passing_on = False
    elif now - _signalled_at > SAME_S or not listeners:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def _take_sigterm() -> None:
    """Puts our handler in the place of the program's, also of one that the program has set since. Only the main thread can."""
    global _before, _is_signalled
    now = signal.getsignal(signal.SIGTERM)
    if now is _on_sigterm or threading.current_thread() is not threading.main_thread():
        return
    if now is signal.SIG_IGN or now is None or (now is signal.SIG_DFL and _before is not None):
        if _before is not None:  # the program has decided otherwise since
            log.warning("nebula: SIGTERM is no notice any more, because the program has set %s for it", getattr(now, "name", "a handler of C"))
            _listeners.clear()
            _before = None
        return
    if _before is None:
        _is_signalled = False
    _before = now
    signal.signal(signal.SIGTERM, _on_sigterm)


def _give_sigterm_back() -> None:
    """Restores the program's handler, unless the program has set another one since."""
    global _before
    if _before is not None and threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGTERM) is _on_sigterm:
            signal.signal(signal.SIGTERM, _before)
        _before = None


def _before_fork() -> None:
    """Holds SIGTERM back, so that it reaches a child only when that has its own handler."""
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _before is not None else None


def _release() -> None:
    mask, _held.mask = getattr(_held, "mask", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork() -> None:
    """A forked child handles SIGTERM as it would without Nebula: its parent, or a pool, ends it so."""
    _listeners.clear()
    _give_sigterm_back()
    _release()


os.register_at_fork(before=_before_fork, after_in_parent=_release, after_in_child=_after_fork)


def _wish(persist_path: str | None) -> str | None:
    folder = config.without_scheme(persist_path or "")
    return os.path.join(folder, ".nebula", "save-now") if folder and "://" not in folder else None


def ask_to_save(persist_path: str | None) -> None:
    """Makes a job that saves with a Manager save at its next step. Raises NebulaConfigError without a storage directory."""
    path = _wish(persist_path)
    if path is None:
        place = config.shown(persist_path or "memory only")
        raise NebulaConfigError(f"a job gets a request to save through its storage directory, and this job has {place}")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "w") as file:
            file.write(f"{time.time_ns()}\n")
        os.replace(temporary, path)
    except OSError as failure:
        raise NebulaStorageError(f"the job cannot be asked to save by {path}: {failure.strerror}") from failure


class Notices:
    """The notices that one manager has received."""

    def __init__(self, engine: Engine, cloud: str | None = None) -> None:
        """cloud: the cloud whose metadata service is asked, too: "azure", "aws" or "gce"."""
        self._engine = weakref.proxy(engine)
        self.reason, self.deadline = "", 0.0  # of the first notice to this rank; the deadline is on the monotonic clock
        self.is_here = False  # the notice counts; with several ranks for all of them, at the same step
        self._has_come = False  # a notice has come to this rank
        self._is_answered = False  # a save has followed the notice
        self._is_listening = False
        self._wish_seen: tuple[int, int] | None = None  # the file's time and inode; None: there was none
        self._wish_at = 0.0  # the time of the last look
        self._wishes: bool | None = None  # None: not looked yet; a file that exists at the first look is an older run's
        if cloud and cloud not in CLOUDS:
            raise NebulaConfigError(f"evictions={cloud!r}: give one of {', '.join(map(repr, CLOUDS))}")
        self._cloud = cloud
        self._watch: _CloudWatch | None = None
        self._is_evicted = False  # the first notice is the cloud's
        self._returns = 0  # to earlier steps, the same on all ranks: a step that comes again is another question
        workers.protect()

    def listen(self) -> None:
        """Makes SIGTERM a notice from now on; one that comes SAME_S later ends the process. Call it at each step.

        It does nothing in another thread than the main thread, or if the program ignores SIGTERM.
        """
        if self._cloud and self._watch is None and self._engine.place().local_rank == 0:
            with contextlib.suppress(NebulaError):  # no agent can be reached: a save reports that, and the next call tries again
                self._watch = _CloudWatch(self._engine.session(), self._cloud, self._evict)
                self._watch.start()
        if not self._is_listening:
            self._is_listening = True
            _listeners.add(self)
        if self in _listeners:
            _take_sigterm()

    def _come(self, reason: str, seconds: float) -> None:
        """Records a notice. Any thread may call it."""
        if not self._has_come:
            self.reason, self.deadline = reason, time.monotonic() + seconds
            log.info("nebula: %s: this process is to end within %.0f s", reason, seconds)
        self._has_come = True
        if self._engine.place().world == 1 or ranks.store() is None:
            self.is_here = True

    def _evict(self, reason: str, seconds: float) -> None:
        self._is_evicted = not self._has_come
        self._come(reason, seconds)

    def notify_launcher(self) -> None:
        """Ends torchrun on this node if the cloud takes the machine: it would start the workers again here, until the machine is gone."""
        found = ranks.launcher() if self._is_evicted else None
        if found is not None:
            log.info("nebula: torchrun (process %d) gets SIGTERM, so that this node does not join the job again", found)
            with contextlib.suppress(OSError):
                os.kill(found, signal.SIGTERM)

    def left_s(self) -> float:
        """Returns the seconds until this process may be killed. For a notice to another rank it is the time that SIGTERM leaves."""
        return max(0.0, self.deadline - time.monotonic()) if self._has_come else SIGTERM_S

    def answered(self) -> None:
        """Records that a version was saved."""
        self._is_answered = self.is_here

    def goes_back(self) -> None:
        """The program goes back to an earlier step, on all ranks."""
        self._returns += 1

    def agree(self, step: int, asks_clock: bool, is_due: Callable[[], bool]) -> bool:
        """Returns True if a save is due now by a notice or, if asked, by rank 0's clock. All ranks get the same answer."""
        place = self._engine.place()
        mine, failure = self._has_come and not self._is_answered, None
        try:
            mine = mine or (asks_clock and place.rank == 0 and is_due())
        except NebulaError as error:  # no agent answers; the other ranks wait for this one
            failure = error
        mine = mine or (place.rank == 0 and self._is_wished())
        if place.world == 1:
            if failure is not None:
                raise failure
            return mine
        shared = ranks.store()
        if shared is None:
            if asks_clock:
                raise NebulaConfigError(
                    f"save_every and save_every_s with {place.world} ranks need a process group, through which they agree on a step: call "
                    "torch.distributed.init_process_group() first, or save by steps"
                )
            return False  # one rank alone makes no complete version
        return self._through(shared, place, step, mine, failure)

    def _is_wished(self) -> bool:
        """True if a user has asked for a save since the last look."""
        now = time.monotonic()
        if self._wishes is not None and now - self._wish_at < LOOK_S:
            return False
        self._wish_at = now
        path = _wish(self._engine.settings().persist_path)
        seen = self._wish_seen
        if path:
            with contextlib.suppress(OSError):
                found = os.stat(path)
                # Not its age: a server's clock may have been wrong when an earlier file was written.
                self._wish_seen = (found.st_mtime_ns, found.st_ino)
        is_new = self._wishes is not None and self._wish_seen != seen
        self._wishes = is_new
        return is_new

    def _through(self, shared: Any, place: ranks.Place, step: int, mine: bool, failure: NebulaError | None) -> bool:
        prefix = f"nebula/due/{self._engine.agreement.number}"
        asked = f"{prefix}/{self._returns}"
        if place.rank != 0:
            if mine:
                shared.set(f"{prefix}/notice", "1")
            try:
                answer = shared.get(f"{asked}/{step}").decode()
            except Exception as error:
                raise NebulaUnavailable(
                    f"rank {place.rank} asks should_save({step}), and rank 0 has not answered: each rank asks at each step ({error})"
                ) from error
            if answer.startswith(_FAILED):
                raise from_status(*json.loads(answer.removeprefix(_FAILED)), 0, 0)
        else:
            noticed = shared.check([f"{prefix}/notice"]) and not self._is_answered
            answer = "notice" if noticed or (self._has_come and not self._is_answered) else "1" if mine else "0"
            if failure is not None and answer == "0":
                answer = _FAILED + json.dumps([failure.status, f"rank 0: {failure}"])
            shared.set(f"{asked}/{step}", answer)
            if step >= KEPT_STEPS:
                shared.delete_key(f"{asked}/{step - KEPT_STEPS}")
            if failure is not None and answer.startswith(_FAILED):
                raise failure
        self.is_here |= answer == "notice"
        return answer != "0"

    def forget(self) -> None:
        """Ends the notices. After those of the last manager, the program's handler is in its place again."""
        if self._watch is not None:
            self._watch.end()
        _listeners.discard(self)
        if not _listeners:
            _give_sigterm_back()
