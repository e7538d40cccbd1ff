"""Manager for pytrees."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import jax

from ..checkpoint import Checkpoint
from ..errors import NebulaConfigError, NebulaNotFound
from ..manager import manager
from . import leaves
from .distributed import take_ranks
from .loading import load
from .saving import save


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of Manager.restore(): the step, metrics and metadata of the version, and the new trees by the names of the items."""

    step: int
    metrics: dict[str, float]
    metadata: dict[str, Any]
    items: dict[str, Any]


class Manager(manager.Manager):
    """``nebulaml.Manager`` for pytrees. All settings and methods are those of that class, but for these two:

    save(step, items): the items are pytrees, as save() of this module takes them, or iterators with get_state() and set_state(), such as
        Grain's, of which each process saves its own. All processes call it, and none waits for another one.
    restore(items): the items are templates, as load() takes them, and iterators, which it sets back. It returns new trees.
    """

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        take_ranks()
        if "replicated" in settings:
            raise NebulaConfigError("nebulaml.jax.Manager(replicated=...): each shard of a tree is written once in any case")
        super().__init__(path, **settings)

    def prepare(self, items: Mapping[str, Any]) -> None:
        """Does nothing: the first save of a tree makes its memory."""

    def _save_item(self, checkpoint: Checkpoint, name: str, item: Any, file: str) -> None:
        if not _is_iterator(item):
            save(checkpoint, name, item)
            return
        state = item.get_state()
        said = {"bytes": base64.b64encode(state).decode()} if isinstance(state, bytes) else {"json": state}
        try:
            text = json.dumps({"nebula": "jax-iterator", "version": "1.0", "processes": jax.process_count(), **said})
        except TypeError as failure:
            raise NebulaConfigError(f"the state of the iterator {name!r} is neither bytes nor JSON: {failure}") from failure
        checkpoint.save_bytes(leaves.file_of(name, jax.process_index(), "iterator"), text.encode())

    def _begin(self, step: int, items: Mapping[str, Any], said: Any) -> Checkpoint:
        if jax.process_count() > 1 and self._engine.place().world != jax.process_count():
            raise NebulaConfigError(f"this job has {self._engine.place().world} ranks, and JAX {jax.process_count()} processes")
        return super()._begin(step, items, said)

    def restore(  # type: ignore[override]
        self, targets: Mapping[str, Any], step: int | None = None, *, cast: bool = False
    ) -> Restored | None:
        """Returns new trees in the form of the templates, with their shardings. Every process must call it. None: there is no checkpoint.

        step: the version; None: the newest. cast: as for load(). Raises NebulaNotFound for a step, item or leaf that does not exist, and
        NebulaConfigError for what does not fit; iterators are set back last.
        """
        self._raise_late()
        if not isinstance(targets, Mapping) or not targets:
            raise NebulaConfigError("targets are a dict, as {'state': state}")
        checkpoint = self._newest() if step is None else self._of_step(step, for_all_ranks=True)
        if checkpoint is None:
            return None
        said = checkpoint._said()
        found = {name: load(checkpoint, name, target, cast=cast) for name, target in targets.items() if not _is_iterator(target)}
        states = {name: self._state_of(checkpoint, name) for name, target in targets.items() if _is_iterator(target)}
        for name, state in states.items():
            targets[name].set_state(state)
        self._goes_back_to(checkpoint.step)
        return Restored(checkpoint.step or 0, dict(said.metrics), dict(said.metadata), {**found, **{name: targets[name] for name in states}})

    def _state_of(self, checkpoint: Checkpoint, name: str) -> Any:
        file = leaves.file_of(name, jax.process_index(), "iterator")
        if file not in checkpoint._all_files():
            raise NebulaNotFound(f"{checkpoint.tag} has no state of the iterator {name!r} of process {jax.process_index()}")
        said = json.loads(checkpoint.read_bytes(file))
        if said["processes"] != jax.process_count():
            raise NebulaConfigError(
                f"{checkpoint.tag}: the iterator {name!r} is that of {said['processes']} processes, and this job has {jax.process_count()}"
            )
        return base64.b64decode(said["bytes"]) if "bytes" in said else said["json"]


def _is_iterator(item: Any) -> bool:
    return callable(getattr(item, "get_state", None)) and callable(getattr(item, "set_state", None))
