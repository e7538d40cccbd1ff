"""What a rendezvous needs of storage: texts under names, replaced by compare-and-set.

``Cells`` is what each kind of storage implements. ``Documents`` is the one compare-and-set core above it: it repeats what failed, and
finds out whether a write whose answer was lost has been done.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["STATE", "Cell", "CellCorrupt", "CellUnreachable", "Cells", "Documents", "Entry", "escape"]

STATE = "state"  # the name of the cell in which the rendezvous is
PATIENCE_S = 120.0  # how long storage may be gone before a request fails
_PAUSES_S = (0.2, 5.0)
_NAME_MAX = 180


class CellUnreachable(Exception):
    """Storage did not answer. The request may have been done or not."""


class CellCorrupt(Exception):
    """What is stored is none of ours."""


class Cell(NamedTuple):
    """A name of a job: ``STATE``, or a key of its store."""

    job: str  # escaped
    name: str  # escaped


class Entry(NamedTuple):
    """A cell that exists, and when it was written, in seconds by the store's clock."""

    cell: Cell
    time: float


def escape(text: str) -> str:
    """A name that every storage takes, one for each text: letters, digits, ``.``, ``-``, and ``_XX`` for other bytes."""
    result = "".join(
        chr(byte) if chr(byte).isascii() and (chr(byte).isalnum() or byte in b".-") else f"_{byte:02X}"
        for byte in text.encode()
    )
    if len(result) > _NAME_MAX:
        result = f"{result[:80]}_-{hashlib.sha256(text.encode()).hexdigest()}"
    return result if result.strip(".") else "_" + result


class Cells(ABC):
    """One kind of storage. Every method may raise ``CellUnreachable``; errors that no repetition mends are raised as they are."""

    @abstractmethod
    def read(self, cell: Cell) -> tuple[str, str] | None:
        """The text and a token that names this writing of it; None: there is none. ``CellCorrupt``: it is no text."""

    @abstractmethod
    def swap(self, cell: Cell, text: str, token: str | None) -> str | None:
        """Writes if the cell is as it was read with that token, with None if it does not exist. The new token, or None: it was not so."""

    @abstractmethod
    def put(self, cell: Cell, text: str) -> None:
        """Writes, whatever is there."""

    @abstractmethod
    def delete(self, cell: Cell) -> bool:
        """Removes the text; whether there was one. A later ``swap`` with an older token fails."""

    @abstractmethod
    def entries(self, job: str | None = None) -> Iterable[Entry]:
        """The cells of one job, or of all."""

    @abstractmethod
    def remove(self, cells: list[Cell]) -> None:
        """Removes cells of a job that has ended, for good."""

    @abstractmethod
    def clock(self) -> float:
        """The store's time, in seconds since 1970. May count in whole seconds."""

    @abstractmethod
    def close(self) -> None: ...


class Documents:
    """JSON objects in cells. Each writing carries a number of its own (``nonce``), by which a lost answer is found out."""

    def __init__(self, cells: Cells, patience_s: float = PATIENCE_S) -> None:
        self.cells = cells
        self._patience_s = patience_s
        self.failures = 0  # requests that storage did not answer

    def get(self, cell: Cell) -> tuple[dict[str, Any], str] | None:
        found = self._patiently(lambda: self.cells.read(cell))
        if found is None:
            return None
        text, token = found
        try:
            document = json.loads(text)
        except ValueError as failure:
            raise CellCorrupt(f"{cell.job}/{cell.name} is no JSON: {failure}") from failure
        if not isinstance(document, dict):
            raise CellCorrupt(f"{cell.job}/{cell.name} is no JSON object")
        return document, token

    def swap(self, cell: Cell, document: dict[str, Any], token: str | None) -> str | None:
        """Writes if the cell is as it was read with that token. The new token, or None: another writer was first."""
        nonce = uuid.uuid4().hex
        text = json.dumps({**document, "nonce": nonce}, separators=(",", ":"))
        doubtful = False

        def attempt() -> str | None:
            nonlocal doubtful
            try:
                written = self.cells.swap(cell, text, token)
            except CellUnreachable:
                doubtful = True
                raise
            if written is None and doubtful:  # perhaps by an earlier attempt of this writer
                found = self.get(cell)
                if found is not None and found[0].get("nonce") == nonce:
                    return found[1]
            return written

        return self._patiently(attempt)

    def put(self, cell: Cell, document: dict[str, Any]) -> None:
        text = json.dumps({**document, "nonce": uuid.uuid4().hex}, separators=(",", ":"))
        self._patiently(lambda: self.cells.put(cell, text))

    def delete(self, cell: Cell) -> bool:
        return self._patiently(lambda: self.cells.delete(cell))

    def _patiently(self, request: Any) -> Any:
        deadline, pause = time.monotonic() + self._patience_s, _PAUSES_S[0]
        while True:
            try:
                return request()
            except CellUnreachable:
                self.failures += 1
                if time.monotonic() + pause >= deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])
