"""torchrun's agent for ``nebula run``: the end of a worker is noticed at once, a node that is not well does not join, and a job that makes no
progress ends.

Rank 0 leaves in a file in memory whether it uses Nebula, and its newest committed step. The agent of its node counts the failures without a new
one. A node that joins is no failure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from .._session import locate
from .worker import COMMITTED, PASSED_OVER, SPARES
from .workers import await_end

__all__ = ["Agent", "NoProgress", "Unwell", "use"]

_LOGGER = logging.getLogger("nebulaml.elastic")
DEFAULT, OFF = "default", "off"  # values of --health-check
UNWELL = 1  # exit code of `nebula doctor`
CHECK_S = 60.0  # of a health check
_AT_ONCE_S = 1e-6
_TELLS_AGAIN_S = 8.0  # after the store of the rendezvous has failed


class NoProgress(Exception):
    """The job has failed again and again without a new committed step."""


class Unwell(SignalException):  # type: ignore[misc]
    """This node does not join. torch leaves the job open after a SignalException."""


class Progress:
    """What rank 0 has committed, as its node's agent sees it."""

    def __init__(self, most: int, passes_over: bool = False) -> None:
        self._most = most  # failures in a row; 0: no limit
        self._passes_over = passes_over
        self.poison: list[str] = []  # "SEQUENCE TAG" of versions that are loaded no more
        self._loaded = ("", 0)  # the version that was loaded before the last failure, and before how many in a row
        self._file = os.memfd_create("nebula-committed")
        self._newest = -2  # -1: rank 0 uses Nebula and has committed nothing
        self.failures = 0
        os.environ[COMMITTED] = f"/proc/{os.getpid()}/fd/{self._file}"

    def fail(self) -> None:
        """The workers of this job have failed. Raises NoProgress."""
        said, _, loaded = os.pread(self._file, 4096, 0).decode().partition("\n")
        if not said or not self._most:
            return
        os.ftruncate(self._file, len(said) + 1)  # the next start may fail before it loads anything
        self._loaded = (loaded, self._loaded[1] + 1 if loaded == self._loaded[0] else 1)
        step = int(said)
        if step > self._newest:
            self.failures = 0
            self.poison.clear()
        else:
            self.failures += 1
        self._newest = max(step, self._newest)
        if (
            self.failures >= self._most
            and self._passes_over
            and self._loaded[0]
            and self._loaded[1] >= self._most
            and not self.poison
        ):
            self.poison.append(self._loaded[0])
            self.failures = 0
            _LOGGER.warning(
                "%s restarts have failed after loading %s: the next one loads an older checkpoint",
                self._most,
                self._loaded[0].partition(" ")[2],
            )
        if self.failures >= self._most:
            since = f"after step {self._newest}" if self._newest >= 0 else "since it began"
            raise NoProgress(
                f"{self.failures} restarts have committed no new step {since}, so the job ends: look at the failures above. "
                "--max-failures-without-progress=N allows more, 0 any number"
            )

    def forget(self) -> None:
        self.failures = 0


class Agent(LocalElasticAgent):  # type: ignore[misc]
    progress: Progress
    health_check = OFF
    passes_over = False
    place = -1  # the file where rank 0 leaves the place of its checkpoints, for spare nodes; -1: the job has none
    told = b""
    tells_at = 0.0

    def _invoke_run(self, *given: Any, **options: Any) -> Any:
        has_failed, spec = True, self._worker_group.spec
        self._interval_s, spec.monitor_interval = spec.monitor_interval, _AT_ONCE_S  # torch sleeps so long before each look
        try:
            result = super()._invoke_run(*given, **options)
            has_failed = result.is_failed()
            return result
        finally:
            handler = spec.rdzv_handler
            if has_failed and hasattr(handler, "give_up") and not isinstance(sys.exc_info()[1], SignalException):
                with contextlib.suppress(RendezvousError):
                    handler.give_up()

    def _monitor_workers(self, worker_group: Any) -> Any:
        await_end(self._pcontext.pids().values(), self._interval_s)
        if self.place >= 0 and worker_group.group_rank == 0:
            self._tell_spares(worker_group.spec.rdzv_handler)
        return super()._monitor_workers(worker_group)

    def _tell_spares(self, handler: Any) -> None:
        told = os.pread(self.place, 65536, 0)
        if told == self.told or not told.endswith(b"}") or not hasattr(handler, "tell_spares") or time.monotonic() < self.tells_at:
            return
        if handler.tell_spares(told):
            self.told = told
        else:
            self.tells_at = time.monotonic() + _TELLS_AGAIN_S

    def _rendezvous(self, worker_group: Any) -> None:
        check(self.health_check)
        super()._rendezvous(worker_group)
        if worker_group.group_rank != 0:
            self.progress.forget()
        if self.passes_over:  # all nodes pass over the same
            if worker_group.group_rank == 0:
                worker_group.store.set(PASSED_OVER, "\n".join(self.progress.poison) or "\n")
            os.environ[PASSED_OVER] = worker_group.store.get(PASSED_OVER).decode().strip("\n")
            self.progress.poison = [line for line in os.environ[PASSED_OVER].split("\n") if line]

    def _restart_workers(self, worker_group: Any) -> None:
        # torchrun counts its restarts down for failures alone. The handler knows that another node has failed or is lost.
        left, before = self._remaining_restarts, getattr(self, "_left_before", worker_group.spec.max_restarts)
        self._left_before = left
        if worker_group.group_rank == 0 and (
            left < before or getattr(worker_group.spec.rdzv_handler, "is_broken", False)
        ):
            self.progress.fail()
        super()._restart_workers(worker_group)


def check(command: str) -> None:
    """Runs the health check of a node that is about to join. If it fails, this node ends, and the job goes on without it."""
    words = _default() if command == DEFAULT else shlex.split(command)
    if not words or command == OFF:
        return
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=CHECK_S, check=False)
        why = "" if done.returncode == 0 else f"exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:].strip()}"
        if command == DEFAULT and done.returncode != UNWELL:  # the command itself has a problem
            why = ""
    except subprocess.TimeoutExpired as failure:
        why = str(failure)
    except OSError as failure:
        why = "" if command == DEFAULT else str(failure)
    if why:
        raise Unwell(f"this node does not join, because its health check `{shlex.join(words)}` has failed: {why}", signal.SIGTERM)


def _default() -> list[str]:
    """Memory, disk and devices, in less than a second. []: the command is not here."""
    command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    return [command, "doctor", "--health"] if command else []


def use(most: int, health_check: str, passes_over: bool, has_spares: bool = False) -> None:
    """Makes torchrun use this agent."""
    from torch.distributed.launcher import api

    Agent.progress, Agent.health_check, Agent.passes_over = Progress(most, passes_over), health_check, passes_over
    if has_spares:
        Agent.place = os.memfd_create("nebula-spares")
        os.environ[SPARES] = f"/proc/{os.getpid()}/fd/{Agent.place}"
    api.LocalElasticAgent = Agent
