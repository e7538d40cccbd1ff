"""axolotl: a plugin that makes its trainer save through Nebula.

The YAML file names it: ``plugins: [nebulaml.integrations.axolotl.NebulaPlugin]``. The keys of an optional section ``nebula:`` are the
arguments of ``nebulaml.init``, and ``sync_on_save`` and ``overlap`` of ``nebulaml.attach``. Without the section, Nebula's environment
variables apply. If they name no storage path either, checkpoints are persisted beside ``output_dir``.
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
    """The keys that axolotl accepts in the YAML file in addition to its own."""

    nebula: dict[str, Any] | None = None


class NebulaPlugin(BasePlugin):  # type: ignore[misc]
    """Attaches Nebula to axolotl's trainer. It works with every kind of trainer that axolotl makes."""

    def get_input_args(self) -> str:
        """Returns the name of the class with the keys of this plugin."""
        return f"{__name__}.NebulaArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """axolotl calls this on every rank, before training. Raises NebulaConfigError for wrong keys in the section."""
        section = dict(cfg.get("nebula") or {})
        options = {name: section.pop(name) for name in ATTACHED if name in section}
        if section:
            api.init(**section)
        attach_trainer(trainer, **options)
