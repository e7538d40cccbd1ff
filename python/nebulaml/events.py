"""Event: a report of the agent on a checkpoint in the background."""

from __future__ import annotations

import dataclasses

from . import _nebula

__all__ = ["Event", "of_agent"]

_KINDS = {
    _nebula.EVENT_DURABLE: "durable",
    _nebula.EVENT_LOST: "lost",
    _nebula.EVENT_STORAGE: "storage",
    _nebula.EVENT_LATE: "late",
    _nebula.EVENT_OTHER_AGENT: "other-agent",
    _nebula.EVENT_REMOVED: "removed",
    _nebula.EVENT_HUNG: "hung",
    _nebula.EVENT_ROTTEN: "rotten",
    _nebula.EVENT_STALE: "stale",
    _nebula.EVENT_NOT_FINITE: "not-finite",
    _nebula.EVENT_LEFT_MEMORY: "left-memory",
}


@dataclasses.dataclass(frozen=True)
class Event:
    """One event.

    kind: "durable": the checkpoint is durable; "lost": it is not durable and will not be; "storage": storage fails,
        and the agent tries again; "late": some ranks have not committed it; "other-agent": another agent of this
        user has checkpoints of this path; "rotten": its bytes in memory have changed, and it left memory; "stale":
        its values are those of the one before, though its step is larger; "not-finite": a tensor has a NaN or an
        infinite value; "left-memory": it is durable, and left memory because the machine was short of it; "hung": the
        ranks of this node make no steps, and ``text`` names the file with their stacks; "removed": the agent has
        removed it from storage, and ``text`` names the rules that no longer kept it; "exported": a Hugging Face
        directory of it is there, whose path is ``text``; "export-failed": there will be none; "copied": the far
        storage ``text`` has a copy; "copy-failed": it has none, and ``text`` says whether it is tried again; "interval":
        the saves of ``Manager(save_every="free")`` come at another interval, which ``text`` names.
    tag, step: those of the checkpoint; "" and None if the event concerns none. step is None, too, if the tag has none.
    size: bytes. seconds: the time to write it. text: the reason.
    """

    kind: str
    tag: str = ""
    step: int | None = None
    size: int = 0
    seconds: float = 0.0
    text: str = ""


def of_agent(kind: int, tag: str, size: int, seconds: float, text: str) -> Event:
    """Returns the Event for an event of the C library."""
    step = _nebula.step_of(tag)
    return Event(_KINDS.get(kind, "other"), tag, step if step >= 0 else None, size, seconds, text)
