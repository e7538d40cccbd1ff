"""Stand-in files: they have the names that a framework looks for, but their values are elsewhere."""

from __future__ import annotations

from typing import Any, NoReturn

from .._session import config
from ..errors import NebulaNotFound

__all__ = ["StandIn", "is_one", "text_for"]

_BEGIN = "this file is only a placeholder for"
_HEAD_BYTES = 4096  # of a file, in which a stand-in has that text


class StandIn(str):
    """The content of a stand-in file: it says where the values are. Access to values in it raises NebulaNotFound with that text."""

    def _refuse(self, *unused: Any, **unused_too: Any) -> NoReturn:
        raise NebulaNotFound(str(self))

    __getitem__ = __setitem__ = __delitem__ = __contains__ = _refuse  # type: ignore[assignment]
    get = items = keys = values = pop = update = setdefault = _refuse


def text_for(tag: str, name: str, persist_path: str | None) -> str:
    """Returns the text of a stand-in file. ``persist_path``: the storage path of the real file; None: it is in memory only."""
    if persist_path is None:
        return (
            f"{_BEGIN} {name!r} of checkpoint {tag!r}, which is in the memory of the machine that saved it: give "
            "nebulaml.init a persistent_storage_path, and read that directory"
        )
    return (
        f"{_BEGIN} {name!r} of checkpoint {tag!r}: its values are under {config.shown(persist_path)}, from the "
        f"moment when the checkpoint is durable (nebulaml.flush_persistence waits for that). Read that directory instead, with tag={tag!r}"
    )


def is_one(path: str) -> bool:
    """Returns True if the file at this path is a stand-in file. It runs no code of the file."""
    with open(path, "rb") as file:
        return _BEGIN.encode() in file.read(_HEAD_BYTES)
