"""Rows: a list of typed rows that prints as a table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from .printing import escaped, human_bytes, printable

__all__ = ["Row", "Rows", "listing"]

T = TypeVar("T")


def _shown(name: str, value: Any) -> str:
    return printable(_text(name, value))


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "pinned" and value == "":
        return "yes"
    if name == "size":
        return human_bytes(value)
    if name == "committed_at":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if value else ""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}={_text('', part)}" for key, part in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Rows(list[T]):
    """A list of dataclasses. A notebook and the prompt show it as a table."""

    def _table(self) -> list[list[str]]:
        names = [field.name for field in dataclasses.fields(self[0])]  # type: ignore[arg-type]
        return [names, *([_shown(name, getattr(row, name)) for name in names] for row in self)]

    def __repr__(self) -> str:
        if not self:
            return "(no rows)"
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)

    def _repr_html_(self) -> str:
        if not self:
            return "<i>no rows</i>"
        head, *rows = self._table()
        lines = ["".join(f"<th>{escaped(cell)}</th>" for cell in head)]
        lines += ["".join(f"<td>{escaped(cell)}</td>" for cell in row) for row in rows]
        return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


@dataclasses.dataclass(frozen=True)
class Row:
    """A checkpoint in a listing.

    size: bytes. source: "memory", "storage" or both. committed_at: seconds since 1970.
    """

    tag: str
    step: int | None
    state: str
    size: int
    source: tuple[str, ...] = ()
    committed_at: float = 0.0
    abandoned: bool = False
    error: str = ""


def listing(versions: Iterable[Mapping[str, Any]]) -> Rows[Row]:
    """Returns the rows for the values of list_checkpoints()."""
    rows = [
        Row(
            tag=one["tag"],
            step=one["step"] if one.get("step", -1) >= 0 else None,
            state=one.get("state", ""),
            size=int(one.get("size", 0)),
            source=tuple(one.get("source", ())),
            committed_at=float(one.get("committed_at") or 0),
            abandoned=bool(one.get("abandoned")),
            error=one.get("error") or "",
        )
        for one in versions
    ]
    return Rows(sorted(rows, key=lambda row: row.committed_at, reverse=True))
