"""Rounds that wait for no node that is not coming.

torch's handler decides by its own rules. Five are different here:
* a node that leaves a complete round, and a spare for which there is a place, are in the wait list by the same write, so a new round never
  begins without them;
* a round closes when every node of the last world has come back or is lost, and a spare stands in for each lost one. Only a round without a
  node of an earlier world waits for the last call;
* if a round closes with all its places taken, the nodes that still wait are spares. In torch they go on waiting, and a waiting node makes the
  others begin anew, again and again;
* a node keeps its rank from one round to the next, if there are as many nodes, so that its memory has the shares of its ranks. A spare has the
  rank of the node that it stands in for;
* a waiting node looks at the state after 0.1 to 0.5 s, not after 1 s.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _Action,
    _DistributedRendezvousOpExecutor,
    _RendezvousExitOp,
)

__all__ = ["Executor", "refresh"]

_PAUSES_S = (0.1, 0.5)
_SPARE_S = 1.5  # a spare that lives joins within this time


def refresh(holder: Any) -> Any:
    """Reads the state from storage, although torch has read it less than a second ago, and returns it."""
    holder._last_sync_time = -1
    holder.sync()
    return holder.state


class Executor(_DistributedRendezvousOpExecutor):  # type: ignore[misc]
    """Runs torch's operations by the rules above."""

    def __init__(self, node: Any, holder: Any, settings: Any) -> None:
        super().__init__(node, holder, settings)
        self.world: dict[Any, int] = {}  # the nodes of the newest round that this node was in, and their ranks
        self.round = -1
        self._spares_since = 0.0
        self._seen: dict[Any, int] = {}  # the nodes of the newest complete round, and their ranks
        self._seen_round = -1
        self.is_spare = False  # this node waits for a place

    def run(self, state_handler: Any, *given: Any, **options: Any) -> None:
        self._spares_since = 0.0

        def decide(context: Any, deadline: float) -> Any:
            pause = _PAUSES_S[0]
            while True:
                self._see(context.state)
                action = state_handler(context, deadline)
                if (
                    action in (_Action.SYNC, _Action.KEEP_ALIVE)
                    and self._node in context.state.participants
                    and self._all_there(context.state)
                ):
                    return _Action.MARK_RENDEZVOUS_COMPLETE
                if action == _Action.FINISH and context.state.complete and self._node in context.state.participants:
                    self.world, self.round = dict(context.state.participants), context.state.round
                if action != _Action.SYNC:
                    return action
                time.sleep(pause)
                pause = min(2 * pause, _PAUSES_S[1])
                context.state = self._state = refresh(self._state_holder)

        super().run(decide, *given, **options)

    def _see(self, state: Any) -> None:
        self.is_spare = self._node in state.redundancy_list
        if state.complete and state.round != self._seen_round:
            self._seen, self._seen_round = dict(state.participants), state.round

    def leave(self, deadline: float) -> None:
        """Leaves the complete round that this node is in, and waits for the next one."""
        self.run(_RendezvousExitOp(), deadline)

    def _add_to_participants(self) -> None:
        super()._add_to_participants()
        if self._all_there(self._state):
            self._mark_rendezvous_complete()

    def _remove_from_participants(self) -> None:
        was_complete = self._state.complete
        super()._remove_from_participants()
        if was_complete:
            self._wait()

    def _remove_from_redundancy_list(self) -> None:
        super()._remove_from_redundancy_list()
        self._wait()

    def _wait(self) -> None:
        self._state.wait_list.add(self._node)
        self._state.last_heartbeats[self._node] = datetime.now(timezone.utc)

    def _mark_rendezvous_complete(self) -> None:
        super()._mark_rendezvous_complete()
        state = self._state
        nodes = sorted(state.participants)
        kept = {node: self._seen[node] for node in nodes if self._seen.get(node, len(nodes)) < len(nodes)}
        free = iter(sorted(set(range(len(nodes))) - set(kept.values())))
        for node in nodes:
            state.participants[node] = kept[node] if node in kept else next(free)
        if len(state.participants) == self._settings.max_nodes:
            state.redundancy_list |= state.wait_list
            state.wait_list.clear()

    def _all_there(self, state: Any) -> bool:
        """Whether this round has no node to wait for."""
        if state.complete or state.closed or not self.world or state.wait_list:
            return False
        if not self._settings.min_nodes <= len(state.participants) <= self._settings.max_nodes:
            return False
        if not state.redundancy_list:
            return True
        self._spares_since = self._spares_since or time.monotonic()
        return time.monotonic() - self._spares_since > _SPARE_S
