"""The rendezvous of one job: torch's handler changes its state by compare-and-set, and the last node removes it at the end."""

from __future__ import annotations

import logging
import time
import uuid
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from ..errors import NebulaError
from . import state as states
from .cells import PAUSE_MOST_S, STATE, Cell, CellCorrupt, Cells, CellUnreachable, Documents, escape

__all__ = ["Backend"]

_LOGGER = logging.getLogger("nebulaml.elastic")
_SKEW_S = 2.0  # seconds; a smaller difference means nothing if a store counts whole seconds
_CLOCK_TRIES = 3  # that a busy machine reads the store's clock, if it shows a difference
_GONE_S = 2.0  # seconds; if a request took longer, storage was not reachable for a while and the driver repeated it
_ABANDONED_S = 7 * 86400.0


def _clock_at() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class Token(NamedTuple):
    """One writing of the state. torch's handler passes it back."""

    cell: str
    incarnation: str  # of the job: after a job was closed, another incarnation begins
    closed_until: float | None


class Backend(RendezvousBackend):
    """The state of one job in cells.

    A closed state is kept for ``closed_ttl_s`` seconds, so that a late node of a finished job does not start the job again. After that
    it counts as absent.
    """

    def __init__(self, name: str, cells: Cells, job: str, closed_ttl_s: float = 60.0, **options: Any) -> None:
        if not job:
            raise ValueError("the rendezvous id must not be empty")
        self._name = name
        self.job = escape(job)
        self._job_text = job
        self.documents = Documents(cells, **options)
        self.cell = Cell(self.job, STATE)
        self._closed_ttl_s = closed_ttl_s
        self._ahead_s: float | None = None
        self._clock_at = 0.0  # this machine's clock by its uptime, when _ahead_s was found: it differs after a step of the clock
        self._expired: Token | None = None
        self.incarnation = ""  # of the state that was read or written last
        self.view: states.View | None = None  # of the node whose handler uses this backend

    @property
    def name(self) -> str:
        return self._name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Returns the state and its token, or None. Raises ``RendezvousConnectionError`` and ``RendezvousStateError``."""
        found = self._read()
        if found is None:
            return None
        document, token = found
        return states.decode(document, self._ahead(), self.view), token

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Token, bool] | None:
        """Writes the state if the token is that of the stored state, or if it is None and there is no state.

        Returns the stored state after that, its token, and True if it is ours.
        """
        if token is None and self._expired is not None:
            token = Token(self._expired.cell, "", None)
        if token is None or isinstance(token, Token):
            document = states.encode(state, self._ahead())
            written = self._write(document, token)
            if written is not None:
                return states.decode(document, self._ahead(), self.view), written, True
        found = self.get_state()
        return None if found is None else (*found, False)

    def leave(self, node: Any, stale_s: float) -> None:
        """Ends a node's part in a closed job. The last participant removes the job's keys and the rests of older jobs."""
        while True:
            found = self._read()
            if found is None or not states.is_closed(found[0]):
                return
            document, any_left = states.leave(found[0], node, self._now() - stale_s)
            if self._write(document, found[1]) is not None:
                break
        if not any_left:
            self._call(self._sweep)

    def close(self) -> None:
        self.documents.cells.close()

    def _read(self) -> tuple[dict[str, Any], Token] | None:
        found = self._call(lambda: self.documents.get(self.cell))
        if found is None:
            self._expired = None
            return None
        document, cell_token = found
        try:
            state, incarnation, closed_until = document["state"], document["incarnation"], document["closed_until"]
            if not isinstance(state, dict) or not isinstance(incarnation, str) or not incarnation.isalnum():
                raise TypeError("parts of the wrong type")
            token = Token(cell_token, incarnation, None if closed_until is None else float(closed_until))
        except (KeyError, TypeError, ValueError, OverflowError) as failure:
            raise RendezvousStateError(
                f"the stored rendezvous state of {self._job_text} is corrupt, so start the job again with another --rdzv-id: {failure!r}"
            ) from failure
        if token.closed_until is not None and self._now() > token.closed_until:
            self._expired = token
            return None
        if not self.incarnation and token.closed_until is not None:
            left = token.closed_until - self._now()
            _LOGGER.warning("the job %s has ended; another one can have this id in %.0f s", self._job_text, left)
        self._expired = None
        self.incarnation = incarnation
        return state, token

    def _write(self, state: dict[str, Any], token: Token | None) -> Token | None:
        incarnation = token.incarnation if token and token.incarnation else uuid.uuid4().hex[:12]
        closed_until = None
        if states.is_closed(state):
            kept = token.closed_until if token else None
            closed_until = kept if kept is not None else round(self._now() + self._closed_ttl_s, 3)
        document = {
            "nebula": "rendezvous",
            "version": "1.0",
            "job": self._job_text,
            "incarnation": incarnation,
            "closed_until": closed_until,
            "state": state,
        }
        written = self._call(lambda: self.documents.swap(self.cell, document, token.cell if token else None))
        if written is None:
            return None
        self.incarnation = incarnation
        self._expired = None
        return Token(written, incarnation, closed_until)

    def _sweep(self) -> None:
        """Removes the keys of this job, the states of jobs that were closed some time ago, and all that was not written for a week."""
        now = self._now()
        newest: dict[str, float] = {}
        found = self.documents.entries()
        for entry in found:
            newest[entry.cell.job] = max(newest.get(entry.cell.job, 0.0), entry.time)
        over = {job for job, written in newest.items() if job != self.job and self._is_over(job, written, now)}
        self.documents.remove([cell for cell, _ in found if cell.job in over or (cell.job == self.job and cell != self.cell)])

    def _is_over(self, job: str, written: float, now: float) -> bool:
        if now - written > _ABANDONED_S:
            return True
        try:
            found = self.documents.get(Cell(job, STATE))
            return found is not None and found[0]["closed_until"] is not None and now > float(found[0]["closed_until"])
        except (CellCorrupt, KeyError, TypeError, ValueError, OverflowError):
            return False

    def _ahead(self) -> float:
        """Returns how many seconds the store's clock is ahead of this machine's, which may have been set since."""
        clock_at = _clock_at()
        if self._ahead_s is None or abs(clock_at - self._clock_at) > _SKEW_S:
            ahead = -float("inf")
            for _ in range(_CLOCK_TRIES):  # an answer that arrives late shows the store's clock as behind, never as ahead
                ahead = max(ahead, self._call(self.documents.clock) - time.time())
                if abs(ahead) <= _SKEW_S:
                    break
            self._ahead_s, self._clock_at = ahead if abs(ahead) > _SKEW_S else 0.0, clock_at
            if self._ahead_s:
                _LOGGER.warning(
                    "the clock of this machine differs from the storage's by %.0f s; the rendezvous corrects for that",
                    -ahead,
                )
        return self._ahead_s

    def _now(self) -> float:
        """Returns the store's time."""
        return time.time() + self._ahead()

    def _call(self, request: Any) -> Any:
        begun, failures = time.monotonic(), self.documents.failures
        try:
            result = request()
            if self.view is not None and (self.documents.failures != failures or time.monotonic() - begun > _GONE_S):
                self.view.reached = datetime.now(timezone.utc) + timedelta(seconds=PAUSE_MOST_S)
            return result
        except CellCorrupt as failure:
            raise RendezvousStateError(
                f"the stored rendezvous state of {self._job_text} is corrupt, so start the job again with another --rdzv-id: {failure}"
            ) from failure
        except (CellUnreachable, NebulaError) as failure:
            raise RendezvousConnectionError(
                f"the storage of the rendezvous {self._job_text} failed: {failure}"
            ) from failure
