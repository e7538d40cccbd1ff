"""Makes the rendezvous handlers of ``--rdzv-backend=nebula-store`` and ``nebula-azure-table`` (nebula_rendezvous.py)."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousHandler

from . import hearing, worker
from .cells import PATIENCE_S
from .workers import LEFT_S, Workers

__all__ = ["Handler", "create_azure_table", "create_store"]

_LOGGER = logging.getLogger("nebulaml.elastic")
_TRIES = 20  # to write that a node is lost, against other writers
_AGAIN_S = 0.5  # then a node that the others do not hear tries again to reach them
_FORMS_S = 5.0  # within this time, the others have begun a round and published their addresses


def create_store(params: Any) -> Any:
    from .store_cells import open_cells

    if not params.endpoint:
        raise ValueError(
            "--rdzv-backend=nebula-store needs --rdzv-endpoint: a directory that all nodes see, or a URL such as az://account/container/prefix"
        )
    if "/" not in params.endpoint:  # as a directory, each node could have its own, and be a job of its own
        raise ValueError(
            f"--rdzv-endpoint={params.endpoint} looks like a host: nebula-store needs a directory that all nodes see, or a URL. "
            f"If it is a directory, give ./{params.endpoint}"
        )
    return _create(params, open_cells(params.endpoint))


def create_azure_table(params: Any) -> Any:
    from .table_cells import open_cells

    return _create(params, open_cells(params.endpoint))


def _create(params: Any, cells: Any) -> Any:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    from .backend import Backend
    from .keys import KeyStore
    from .state import View

    try:
        quiet_s = float(params.get("silence_timeout", hearing.QUIET_S))
    except ValueError:
        quiet_s = -1.0
    if not hearing.INTERVAL_S <= quiet_s < math.inf:
        raise ValueError(f"--rdzv-conf=silence_timeout={params.get('silence_timeout')}: give at least {hearing.INTERVAL_S} seconds")
    backend = Backend(params.backend, cells, params.run_id, closed_ttl_s=params.get_as_int("closed_ttl", 60))
    inner = create_handler(KeyStore(backend), backend, params)
    # torch drops a heartbeat that has waited 5 s for storage. The next one may come too late for the other nodes.
    inner.settings.timeout._set_timeouts(heartbeat=timedelta(seconds=PATIENCE_S))
    backend.view = View(inner._this_node, inner.settings.keep_alive_interval)
    _prepare(params)
    return Handler(inner, backend, quiet_s)


def _prepare(params: Any) -> None:
    os.environ[worker.TORCHRUN] = str(os.getpid())
    # With a shared TCPStore both agents hang when a node joins (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # The template has the workers' environment, so it starts after that.
    if os.path.basename(os.environ.get("PYTHON_EXEC", "")) == worker.INTERPRETER and worker.WARM not in os.environ:
        from .run import warm_for_torchrun

        warm_for_torchrun(sys.argv[1:])
    if params.min_nodes < params.max_nodes and "last_call_timeout" not in params.config:
        _LOGGER.warning(
            "the first round waits 30 s for more nodes, if fewer than %d are there; --rdzv-conf=last_call_timeout=5 makes that 5 s",
            params.max_nodes,
        )


class Handler(RendezvousHandler):  # type: ignore[misc]
    """torch's handler, with nodes that hear each other, and rounds that wait for no node that is not coming.

    Two worlds never train at once: a round begins when each node of the world before has left it (its workers have ended by then) or is lost.
    A lost node that lives, for example after a partition of the network, is in a world without the others, where no collective and no version
    completes. It reads in the state that the round is over, ends its workers, and joins again.
    """

    def __init__(self, inner: Any, backend: Any, quiet_s: float = hearing.QUIET_S) -> None:
        from .rounds import Executor

        self._inner, self._backend = inner, backend
        self._holder = inner._state_holder
        self._executor = inner._op_executor = Executor(inner._this_node, self._holder, inner.settings)
        self._workers = Workers()
        self._has_given_up = False
        self.is_broken = False  # the last round has ended because a node has left it or is lost
        self._hearing = hearing.Hearing(inner._this_node.addr, self._lost, self._changed, quiet_s)
        self._spare: Any = None  # holds copies of the job's checkpoints while this node waits as a spare
        if worker.SPARES in os.environ:
            from .spare import Waiting

            self._spare = Waiting(inner._store, lambda: self._executor.is_spare)

    @property
    def settings(self) -> Any:
        return self._inner.settings

    @property
    def use_agent_store(self) -> bool:
        return bool(getattr(self._inner, "use_agent_store", False))

    def get_backend(self) -> str:
        return str(self._inner.get_backend())

    def get_run_id(self) -> str:
        return str(self._inner.get_run_id())

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()

    def next_rendezvous(self) -> Any:
        if self._executor.world:
            from .rounds import refresh

            self._inner._stop_heartbeats()
            is_left = self._inner._this_node not in refresh(self._holder).participants
            self._executor.leave(self._inner._get_deadline(self.settings.timeout.join))
            self._hearing.tell()
            has_heard = self._hearing.has_heard()
            self._hearing.end()
            if is_left and has_heard:
                self._await_reach()
        with self._spare or contextlib.nullcontext():
            info = self._inner.next_rendezvous()
        self.is_broken = False
        os.environ[worker.ROUND] = f"{self.get_run_id()}/{self._backend.incarnation}.{self._executor.round}"
        self._workers.begin()
        self._hearing.begin(info.rank, info.world_size, self._executor.round, self._inner._store)
        return info

    def tell_spares(self, place: bytes) -> bool:
        """Tells spare nodes where the job's checkpoints are. Those that come later read it, too. False: the storage fails."""
        from .spare import KEY

        try:
            self._inner._store.set(KEY, place)
        except Exception as failure:  # training does not end for this
            _LOGGER.warning("spare nodes do not learn yet where the checkpoints are: %s", failure)
            return False
        return True

    def num_nodes_waiting(self) -> int:
        """Returns more than 0 if this node's workers are to begin anew: a node waits, or one of this round's nodes is gone."""
        waiting = int(self._inner.num_nodes_waiting())
        state = self._holder.state
        gone = self._executor.world.keys() - state.participants.keys()
        if not self._executor.world or (
            state.closed and not gone & state.wait_list
        ):  # a node that has ended well does not wait
            return waiting
        is_over = state.round != self._executor.round or self._inner._this_node not in state.participants
        if is_over or gone:
            self.is_broken = is_over or not state.wait_list - self._executor.world.keys()  # else a node joins
            is_left = not is_over and gone <= state.wait_list
            self._workers.end(LEFT_S if is_left else 0.0)
            self._hearing.tell()
            return max(waiting, 1)
        if waiting:
            self._workers.stopping()
        return waiting

    def give_up(self) -> None:
        """The job has failed, and is about to be closed: the other nodes are to end their workers, which wait for this node's."""
        self._has_given_up = True
        self._inner._stop_heartbeats()
        self._executor.leave(self._inner._get_deadline(self.settings.timeout.close))
        self._hearing.tell()

    def shutdown(self) -> bool:
        """torchrun calls it on each node. The last node removes the job's data from storage."""
        closed = bool(self._inner.shutdown())
        self._hearing.end()
        if self._spare is not None:
            self._spare.close()
        if self._has_given_up:  # the others are to read that this node has left
            self._backend.close()
            return closed
        lost_s = self.settings.keep_alive_interval.total_seconds() * self.settings.keep_alive_max_attempt
        try:
            self._backend.leave(self._inner._this_node, lost_s)
        except Exception as failure:  # the job itself has ended well
            _LOGGER.warning("the rendezvous could not remove its state from storage: %s", failure)
        self._backend.close()
        return closed

    def _await_reach(self) -> None:
        """The others have taken this node for lost. It asks for no round before it reaches the hubs of theirs.

        Otherwise a node that reaches the storage and not the other nodes would end their round again and again. It does not wait for nodes that
        cannot begin without it, or that publish no addresses.
        """
        from .rounds import refresh

        me, number, deadline, has_said = self._inner._this_node, -1, 0.0, False
        while True:
            state = refresh(self._holder)
            others = (state.participants.keys() | state.wait_list) - {me}
            if state.closed or me in state.participants or (not state.complete and 0 < len(others) < self.settings.min_nodes):
                return
            reached = None
            if state.complete and state.round > self._executor.round:
                reached = hearing.reaches(state.round, len(state.participants), self._inner._store)
            if state.round != number or (state.complete and state.round == self._executor.round):  # they are about to leave that one
                number, deadline = state.round, time.monotonic() + _FORMS_S
            if reached or (reached is None and time.monotonic() > deadline):
                return
            if reached is False and not has_said:
                _LOGGER.warning("the other nodes go on without this one, which does not reach them: it waits until it does")
                has_said = True
            time.sleep(_AGAIN_S)

    def _changed(self) -> None:
        self._holder._last_sync_time = -1  # the next look reads the state

    def _lost(self, rank: int, why: str) -> None:
        """Removes a node that has not been heard from the round, unless it has left.

        Of two nodes that suspect each other, the first one to write goes on. The other one reads that it is out, and writes nothing.
        """
        from .rounds import refresh
        from .state import LOST

        node = next((node for node, its in self._executor.world.items() if its == rank), None)
        try:
            for _ in range(_TRIES):
                with self._inner._heartbeat_lock:
                    state = refresh(self._holder)
                    if (
                        state.closed
                        or state.round != self._executor.round
                        or not state.complete
                        or not {node, self._inner._this_node} <= state.participants.keys()
                    ):
                        break
                    state.last_heartbeats[node] = LOST
                    self._holder._sanitize()  # by the same write, so that no heartbeat of that node undoes it
                    self._holder.mark_dirty()
                    if self._holder.sync():
                        _LOGGER.warning("node %s (%s) counts as lost: %s", rank, getattr(node, "addr", "?"), why)
                        break
        except RendezvousError as failure:
            _LOGGER.warning(
                "node %s is not heard (%s), and the storage of the rendezvous fails: %s", rank, why, failure
            )
        self._hearing.tell()
