"""axolotl: ``plugins: [nebulaml.integrations.axolotl.NebulaPlugin]`` in the YAML file makes its trainer save through Nebula.

The keys of a section ``nebula:`` are the arguments of ``nebulaml.init``, and ``sync_on_save`` and ``overlap`` as ``nebulaml.attach`` has them.
Without the section the environment decides, and without that checkpoints are persisted beside ``output_dir``.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from .. import api
from .hf import attach_trainer

__all__ = ["NebulaArgs", "NebulaPlugin"]

ATTACHED = ("sync_on_save", "overlap")


class NebulaArgs(BaseModel):
    """What axolotl takes in the YAML file on top of its own keys."""

    nebula: dict[str, Any] | None = None


class NebulaPlugin(BasePlugin):  # type: ignore[misc]
    """Attaches Nebula to the trainer, of whatever kind, when axolotl has made it."""

    def get_input_args(self) -> str:
        """The class with the keys of this plugin."""
        return f"{__name__}.NebulaArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Called by axolotl on every rank, before training."""
        section = dict(cfg.get("nebula") or {})
        options = {name: section.pop(name) for name in ATTACHED if name in section}
        if section:
            api.init(**section)
        attach_trainer(trainer, **options)
