"""Pins: they keep versions in spite of the rules. They lie in storage, and the `nebula` command reads and writes them (docs/formats.md)."""

from __future__ import annotations

from .._session import config
from ..errors import NebulaConfigError
from . import storage_tool

__all__ = ["add", "read", "remove"]


def add(persist_path: str | None, tag: str, reason: str) -> None:
    """Pins a version, which may still be in memory only, or changes the reason of its pin."""
    config.check_text("the reason of a pin", reason)
    _call(persist_path, f"{tag} cannot be pinned", "pin", "--early", *([f"--reason={reason}"] if reason else []), "--", tag)


def remove(persist_path: str | None, tag: str) -> None:
    """Removes a pin. It is no error if there is none."""
    _call(persist_path, f"the pin of {tag} cannot be removed", "unpin", "--", tag)


def read(persist_path: str | None) -> dict[str, str]:
    """Returns the reasons by tag. A pin that cannot be read still counts."""
    if not persist_path:
        return {}
    return {one["tag"]: one["reason"] for one in _call(persist_path, "the pins of this storage cannot be read", "pin")["pins"]}


def _call(persist_path: str | None, what: str, *words: str) -> dict:
    if not persist_path:
        raise NebulaConfigError("versions are pinned in storage, and this manager has memory only")
    return storage_tool.call(persist_path, what, *words)
