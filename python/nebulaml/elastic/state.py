"""The state of torch's rendezvous as JSON.

Every writer of a table can store any bytes there, so a reader must not unpickle them. torch pickles its ``_RendezvousState`` before it
gives it to a backend, and unpickles the bytes that the backend returns. This process makes both pickles. The stored state is JSON, with
plain numbers and texts. Its times are by the store's clock, so that the clocks of nodes may differ.
"""

from __future__ import annotations

import base64
import pickle
import pickletools
from datetime import datetime, timedelta, timezone
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

__all__ = ["LOST", "View", "decode", "encode", "is_closed", "leave"]

_OPCODES = {opcode.code.encode("latin-1") for opcode in pickletools.opcodes}
_FIELDS = {"round", "complete", "deadline", "closed", "participants", "wait_list", "redundancy_list", "last_heartbeats"}
_NOBODY = -1  # the local id of a node that no other process sees
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
LOST = _EPOCH  # the last heartbeat of a node that others hear no more
_LOST_BEFORE = datetime(1980, 1, 1, tzinfo=timezone.utc)  # as a clock shows LOST that differs from the storage's


class View:
    """Corrects a node's view of the state where torch's handler would draw wrong conclusions."""

    def __init__(self, node: Any, keep_alive: timedelta) -> None:
        self._node, self._keep_alive = node, keep_alive
        self._has_joined = False
        self.reached = _EPOCH  # by this time after its last failure, each node has found that storage is reachable again

    def show(self, state: _RendezvousState) -> None:
        # While storage was unreachable no node could write. Each other node gets the time of one heartbeat from then on.
        beats, now = state.last_heartbeats, datetime.now(timezone.utc)
        for node in beats:
            if beats[node] > _LOST_BEFORE and node != self._node:
                beats[node] = max(beats[node], self.reached)
        if self._node in state.participants:
            self._has_joined = True
            # torch's handler would remove its own node and not write that. But the node is alive and about to write a heartbeat. If the
            # stored heartbeat is another node's grant, it lies in the future: this node would wait for that time and write too late.
            own, due = beats.get(self._node, _EPOCH), now - self._keep_alive
            beats[self._node] = due if own > now else max(own, due)
        elif self._has_joined and state.complete and not state.closed and self._node not in state.wait_list | state.redundancy_list:
            # Other nodes took this node for dead, for example because it was stopped for long. torch's agent would train on beside their
            # world. A waiting node makes it join again.
            state.wait_list.add(_NodeDesc(self._node.addr, self._node.pid, _NOBODY))


def encode(state: bytes, ahead_s: float) -> dict[str, Any]:
    """Converts torch's bytes to JSON values. ``ahead_s``: the seconds that the store's clock is ahead of this machine's."""
    try:
        value = pickle.loads(state)  # this process has pickled it
    except Exception:
        value = None
    if not isinstance(value, _RendezvousState):
        return {"bytes": base64.b64encode(state).decode()}
    unknown = set(vars(value)) ^ _FIELDS
    if unknown:
        raise RendezvousStateError(
            f"this torch's rendezvous state has fields that Nebula does not know: {sorted(unknown)}"
        )
    nodes = [
        [
            node.addr,
            node.pid,
            node.local_id,
            value.participants.get(node),
            "w" * (node in value.wait_list) + "r" * (node in value.redundancy_list),
            _number(value.last_heartbeats.get(node), ahead_s),
        ]
        for node in sorted({*value.participants, *value.wait_list, *value.redundancy_list, *value.last_heartbeats})
        if node.local_id != _NOBODY
    ]
    return {
        "round": value.round,
        "complete": value.complete,
        "closed": value.closed,
        "deadline": _number(value.deadline, ahead_s),
        "nodes": nodes,
    }


def decode(document: Any, ahead_s: float, view: View | None = None) -> bytes:
    """Converts JSON values to torch's bytes. Raises ``RendezvousStateError`` if they are not a state."""
    try:
        if "bytes" in document:
            return _opaque(document["bytes"])
        state = _state(document, ahead_s)
        if view is not None:
            view.show(state)
        return pickle.dumps(state)
    except (KeyError, TypeError, ValueError, OverflowError) as failure:
        raise RendezvousStateError(
            f"the stored rendezvous state is corrupt, so start the job again with another --rdzv-id: {type(failure).__name__}: {failure}"
        ) from failure


def is_closed(document: Any) -> bool:
    return isinstance(document, dict) and document.get("closed") is True


def leave(document: dict[str, Any], node: Any, ended_before: float) -> tuple[dict[str, Any], bool]:
    """Returns the state without that node and without nodes whose last heartbeat is older, and True if participants are left."""
    nodes = [
        entry
        for entry in document["nodes"]
        if entry[:3] != [node.addr, node.pid, node.local_id] and (entry[5] or 0) >= ended_before
    ]
    return {**document, "nodes": nodes}, any(entry[3] is not None for entry in nodes)


def _opaque(text: str) -> bytes:
    """Returns bytes that are not torch's, unchanged. Raises ValueError if an unpickler would accept their first byte."""
    state = base64.b64decode(text, validate=True)
    if not state or state[:1] in _OPCODES:
        raise ValueError("bytes that could be a pickle")
    return state


def _state(document: dict[str, Any], ahead_s: float) -> _RendezvousState:
    state = _RendezvousState()
    state.round = _typed(document["round"], int)
    state.complete = _typed(document["complete"], bool)
    state.closed = _typed(document["closed"], bool)
    state.deadline = _moment(document["deadline"], ahead_s)
    for addr, pid, local_id, rank, lists, heartbeat in document["nodes"]:
        node = _NodeDesc(_typed(addr, str), _typed(pid, int), _typed(local_id, int))
        if rank is not None:
            state.participants[node] = _typed(rank, int)
        if "w" in _typed(lists, str):
            state.wait_list.add(node)
        if "r" in lists:
            state.redundancy_list.add(node)
        if heartbeat is not None:
            state.last_heartbeats[node] = _moment(heartbeat, ahead_s)
    return state


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} where a value of type {kind.__name__} belongs")
    return value


def _number(moment: datetime | None, ahead_s: float) -> float | None:
    return None if moment is None else round((moment - _EPOCH).total_seconds() + ahead_s, 6)


def _moment(number: Any, ahead_s: float) -> Any:
    if number is None:
        return None
    if type(number) not in (int, float):
        raise TypeError(f"{number!r:.80} is not a time")
    return _EPOCH + timedelta(seconds=number - ahead_s)
