"""The storage of a rendezvous: texts under names, which are replaced by compare-and-set.

Each kind of storage implements ``Cells``. ``Documents`` is the compare-and-set core above it: it repeats requests that failed. If the
answer of a write was lost, it finds out whether the write was done.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

from .._session import documents

__all__ = ["PATIENCE_S", "PAUSE_MOST_S", "STATE", "Cell", "CellCorrupt", "CellUnreachable", "Cells", "Documents", "Entry", "escape"]

_LOGGER = logging.getLogger("nebulaml.elastic")
STATE = "state"  # the name of the cell that holds the rendezvous
PATIENCE_S = 120.0  # seconds that storage may be unreachable before a request fails
PAUSE_MOST_S = 5.0  # between two requests to storage that is away: so long after its return, each node has found it
_PAUSES_S = (0.2, PAUSE_MOST_S)
_NAME_MAX = 180


class CellUnreachable(Exception):
    """Storage did not answer. The request may have been done or not."""


class CellCorrupt(Exception):
    """Nebula has not written the stored content."""


class Cell(NamedTuple):
    """A name of a job: ``STATE``, or a key of its store."""

    job: str  # escaped
    name: str  # escaped


class Entry(NamedTuple):
    """A cell that exists, and the time of its last writing, in seconds by the store's clock."""

    cell: Cell
    time: float


def escape(text: str) -> str:
    """Returns a name that every storage accepts, one for each text: letters, digits, ``.``, ``-``, and ``_XX`` for other bytes."""
    result = "".join(
        chr(byte) if chr(byte).isascii() and (chr(byte).isalnum() or byte in b".-") else f"_{byte:02X}"
        for byte in text.encode()
    )
    if len(result) > _NAME_MAX:
        result = f"{result[:80]}_-{hashlib.sha256(text.encode()).hexdigest()}"
    return result if result.strip(".") else "_" + result


class Cells(ABC):
    """One kind of storage. Every method may raise ``CellUnreachable``. Errors that a repetition cannot cure are raised unchanged."""

    @abstractmethod
    def read(self, cell: Cell) -> tuple[str, str] | None:
        """Returns the text and a token of this writing. None: the cell does not exist. Raises ``CellCorrupt`` if the content is not text."""

    @abstractmethod
    def swap(self, cell: Cell, text: str, token: str | None) -> str | None:
        """Writes if the cell did not change since it was read with that token; with token None, if the cell does not exist.

        Returns the new token. None: the condition does not hold.
        """

    @abstractmethod
    def put(self, cell: Cell, text: str) -> None:
        """Writes in any case."""

    @abstractmethod
    def delete(self, cell: Cell) -> bool:
        """Removes the text. Returns True if there was one. A later ``swap`` with an older token fails."""

    @abstractmethod
    def entries(self, job: str | None = None) -> Iterable[Entry]:
        """Returns the cells of one job, or of all."""

    @abstractmethod
    def remove(self, cells: list[Cell]) -> None:
        """Removes cells of a job that has ended."""

    @abstractmethod
    def clock(self) -> float:
        """Returns the store's time in seconds since 1970, perhaps in whole seconds."""

    @abstractmethod
    def close(self) -> None: ...


class Documents:
    """JSON objects in cells. Each writing has a unique number (``nonce``), which shows if a write was done although its answer was lost."""

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
            document = documents.parse(text)
        except ValueError as failure:
            raise CellCorrupt(f"{cell.job}/{cell.name} is not JSON: {failure}") from failure
        if not isinstance(document, dict):
            raise CellCorrupt(f"{cell.job}/{cell.name} is not a JSON object")
        return document, token

    def swap(self, cell: Cell, document: dict[str, Any], token: str | None) -> str | None:
        """Writes if the cell did not change since it was read with that token. Returns the new token. None: another writer was first."""
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
            if written is None and doubtful:  # perhaps an earlier attempt of this writer has written it
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

    def entries(self, job: str | None = None) -> list[Entry]:
        return self._patiently(lambda: list(self.cells.entries(job)))

    def remove(self, cells: list[Cell]) -> None:
        self._patiently(lambda: self.cells.remove(cells))

    def clock(self) -> float:
        return self._patiently(self.cells.clock)

    def _patiently(self, request: Any) -> Any:
        deadline, pause, is_away = time.monotonic() + self._patience_s, _PAUSES_S[0], False
        while True:
            try:
                found = request()
                if is_away:
                    _LOGGER.warning("the storage of the rendezvous answers again")
                return found
            except CellUnreachable as failure:
                self.failures += 1
                if time.monotonic() + pause >= deadline:
                    raise
                if not is_away:
                    _LOGGER.warning("the storage of the rendezvous fails, this node asks it again for %.0f s: %s", self._patience_s, failure)
                is_away = True
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])
