"""The ranks of jax.distributed, and its key-value service."""

from __future__ import annotations

import os
from typing import Any

import jax

from .._session import ranks

_STORE_MS = 300_000  # as torch's stores


def take_ranks() -> None:
    if jax.process_count() > 1 and "RANK" not in os.environ:
        local = os.environ.get("LOCAL_WORLD_SIZE", str(jax.process_count() if _is_one_machine() else 1))
        os.environ.update(RANK=str(jax.process_index()), WORLD_SIZE=str(jax.process_count()), LOCAL_WORLD_SIZE=local)
        os.environ.setdefault("LOCAL_RANK", str(jax.process_index() % int(local)))
    client = jax._src.distributed.global_state.client
    if client is not None and ranks.current().world == jax.process_count() > 1:
        ranks.shared = _Store(client)


class _Store:
    """The key-value service of jax.distributed, with the methods of torch.distributed.Store that Nebula calls."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        """Waits until the key has a value, as torch's stores do."""
        return str(self._client.blocking_key_value_get(key, _STORE_MS)).encode()

    def add(self, key: str, amount: int) -> int:
        return int(self._client.key_value_increment(key, amount))

    def check(self, keys: list[str]) -> bool:
        return all(self._has(key) for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Sets a key that has no value yet. Returns its value. Nebula expects nothing else."""
        assert expected == ""
        try:
            self._client.key_value_set(key, value)
        except jax.errors.JaxRuntimeError as failure:
            if not str(failure).startswith("ALREADY_EXISTS"):
                raise
        return self.get(key)

    def delete_key(self, key: str) -> bool:
        self._client.key_value_delete(key)
        return True

    def _has(self, key: str) -> bool:
        try:
            self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as failure:
            if not str(failure).startswith("NOT_FOUND"):
                raise
            return False
        return True


def _is_one_machine() -> bool:
    address = str(getattr(jax._src.distributed.global_state, "coordinator_address", "") or "")
    return address.rpartition(":")[0] in ("localhost", "127.0.0.1", "::1", "[::1]")
