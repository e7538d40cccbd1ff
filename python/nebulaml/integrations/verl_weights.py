"""verl: an actor publishes its weights, and rollouts follow them, by verl's interface of checkpoint engines.

The settings below ``actor_rollout_ref.rollout.checkpoint_engine``::

    backend=nebula
    custom_backend_module=nebulaml.integrations.verl_weights
    engine_kwargs.nebula.path=/scratch/run7/weights

The path is a storage path of its own, as that of ``nebulaml.Publisher``. No process group joins the two sides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ..errors import NebulaError, NebulaTimeout
from ..reader import Reader
from ..weights.publication import number_of
from ..weights.publisher import Publisher
from ..weights.subscriber import Subscriber

__all__ = ["NebulaCheckpointEngine"]

TIMEOUT_S = 600.0


@CheckpointEngineRegistry.register("nebula")
class NebulaCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Publishes the weights of an actor, or follows them in a rollout.

    path: the storage path. is_master: of the actor's rank that publishes; all its ranks go through their weights, which are gathered
        meanwhile. bucket_size: unused. timeout: seconds for one transfer. options: those of ``nebulaml.Publisher``, such as full_every.

    Rank 0 holds one copy of the weights in host memory, and each rollout two in /dev/shm.
    """

    def __init__(
        self, bucket_size: int = 0, is_master: bool = False, *, path: str, timeout: float = TIMEOUT_S, **options: Any
    ) -> None:
        self._path, self._is_master, self._timeout, self._options = path, is_master, timeout, options
        self._weights: dict[str, Any] = {}
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None
        self._after = 0  # the newest publication before the transfer

    def prepare(self) -> dict[str, Any]:
        """Returns the number of the newest publication, on the rank that publishes."""
        return {"after": self._newest()} if self._is_master else {}

    def _newest(self) -> int:
        with Reader(self._path) as reader:
            return max((number for row in reader.versions() if (number := number_of(row.tag)) is not None), default=0)

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[dict[str, Any]]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tells the rollouts which publications are none of this transfer."""
        after = max(said.get("after", 0) for said in metadata)
        return {"after": [after] * actors}, {"after": [after] * rollouts}

    def init_process_group(self, after: int) -> None:
        """Notes the newest publication before the transfer. There is no process group."""
        self._after = after

    def finalize(self) -> None:
        """Does nothing: the publisher and the copies in memory serve the next transfer."""

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> None:
        """Publishes the weights. Returns when they are durable. Raises NebulaError if they are not."""
        names = set()
        for name, tensor in weights:  # on every rank, because they gather it
            names.add(name)
            if self._is_master:
                await asyncio.to_thread(self._take, name, tensor.detach())
        if self._is_master:
            self._weights = {name: self._weights[name] for name in names}
            await asyncio.to_thread(self._publish, global_steps or 0)

    def _take(self, name: str, tensor: Any) -> None:
        """Copies a tensor: the next one may lie in its memory."""
        known = self._weights.get(name)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
            known.copy_(tensor)
        else:
            self._weights[name] = tensor.to("cpu", copy=True).contiguous()

    def _publish(self, step: int) -> None:
        if self._publisher is None:
            self._publisher = Publisher(lambda: self._weights, self._path, **self._options)
        if not self._publisher.publish(step):
            raise NebulaError(f"the weights of step {step} could not be taken: the log says why")
        self._publisher.wait(self._timeout)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Any], None]:
        """Yields the tensors of the next publication of that step, on the host. They stay as they are until the next but one."""
        for name, tensor in (await asyncio.to_thread(self._next, global_steps)).items():
            yield name, tensor

    def _next(self, step: int | None) -> dict[str, Any]:
        if self._subscriber is None:
            self._subscriber = Subscriber(self._path)
        end = time.monotonic() + self._timeout
        while (found := self._subscriber.prepare(max(0.0, end - time.monotonic()))) is not None:
            found.commit()
            if found.number > self._after and (step is None or found.step == step):
                return found.tensors()
        raise NebulaTimeout(f"no weights of step {step} were published to {self._path} within {self._timeout:.0f} s")
