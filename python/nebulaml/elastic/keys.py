"""The key-value store of torchrun's agents, in cells. They use it after a round is complete."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .backend import Backend
from .cells import Cell, escape

__all__ = ["KeyStore"]

_PAUSES_S = (0.1, 0.5)
_ADDS_MAX = 4096  # additions to one counter that are remembered


class KeyStore(dist.Store):
    """The keys of one incarnation of a job, which end with it. Values are bytes, as in every ``Store``.

    ``get`` and ``wait`` ask again after pauses of 0.1 to 0.5 s, until the keys exist. They raise ``DistStoreError`` at the timeout.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self._documents = backend.documents

    def set(self, key: str, value: bytes | str) -> None:
        self._documents.put(self._cell(key), {"value": _text(value)})

    def get(self, key: str) -> bytes:
        return self._until(self.timeout, [key], lambda: self._value(key))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which is 0 if it does not exist, and returns the sum. It adds exactly once, even if an answer is lost."""
        cell, number = self._cell(key), uuid.uuid4().hex[:12]
        while True:
            document, token = self._documents.get(cell) or ({"value": _text(b"0")}, None)
            adds = document.get("adds", {})
            if number in adds:
                return int(adds[number])
            total = int(_bytes(document)) + amount
            adds = dict([*adds.items(), (number, total)][-_ADDS_MAX:])
            if self._documents.swap(cell, {"value": _text(str(total)), "adds": adds}, token) is not None:
                return total

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Sets ``desired`` if the value is ``expected``, or if the key is absent and ``expected`` is empty. Returns what TCPStore would."""
        cell = self._cell(key)
        while True:
            found = self._documents.get(cell)
            if found is None and _raw(expected):
                return _raw(expected)
            if found is not None and _bytes(found[0]) != _raw(expected):
                return _bytes(found[0])
            if self._documents.swap(cell, {"value": _text(desired)}, found[1] if found else None) is not None:
                return _raw(desired)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        left = list(keys)

        def all_there() -> bool | None:
            while left:
                if self._value(left[0]) is None:
                    return None
                left.pop(0)
            return True

        self._until(timeout or self.timeout, left, all_there)

    def check(self, keys: list[str]) -> bool:
        return all(self._value(key) is not None for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._documents.delete(self._cell(key))

    def num_keys(self) -> int:
        prefix = self._cell("").name
        return sum(entry.cell.name.startswith(prefix) for entry in self._documents.entries(self._backend.job))

    def append(self, key: str, value: bytes | str) -> None:
        cell = self._cell(key)
        while True:
            found = self._documents.get(cell)
            joined = (_bytes(found[0]) if found else b"") + _raw(value)
            if self._documents.swap(cell, {"value": _text(joined)}, found[1] if found else None) is not None:
                return

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    # torch's C++ code looks for these names in a store written in Python.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _cell(self, key: str) -> Cell:
        return Cell(self._backend.job, f"key-{self._backend.incarnation}-{escape(key) if key else ''}")

    def _value(self, key: str) -> bytes | None:
        found = self._documents.get(self._cell(key))
        return None if found is None else _bytes(found[0])

    def _until(self, timeout: timedelta, keys: list[str], look: Callable[[], Any]) -> Any:
        deadline, pause = time.monotonic() + timeout.total_seconds(), _PAUSES_S[0]
        while (result := look()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise dist.DistStoreError(
                    f"wait timeout after {timeout.total_seconds() * 1000:.0f}ms, keys: {', '.join(keys)}"
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, _PAUSES_S[1])
        return result


def _raw(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _text(value: bytes | str) -> str:
    return base64.b64encode(_raw(value)).decode()


def _bytes(document: dict[str, Any]) -> bytes:
    return base64.b64decode(document["value"])
