"""Clear answers to uses of Nebula through a framework that would go wrong without a word.

These look at what the program has loaded already; they import no framework.
"""

from __future__ import annotations

import logging
import os
import re
import sys

from .errors import NebulaConfigError

__all__ = ["check_framework", "check_missing", "check_path", "check_tag", "numbers_of"]

log = logging.getLogger("nebulaml")

STOCK_ENGINE = "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine"
BROKEN = ((0, 17, 1), (0, 18, 4))  # DeepSpeed from the first on, before the second: commit() gets wrong arguments

_warned_strategy = False


def _stock_deepspeed() -> bool:
    """Whether DeepSpeed's own Nebula support is in use: it is loaded for a `nebula` section only."""
    return STOCK_ENGINE in sys.modules


def numbers_of(version: str) -> tuple[int, ...] | None:
    """The three numbers that a version begins with, whatever follows them (rc1, .dev0, +cu121); None: it has none."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return None if match is None else tuple(int(number or 0) for number in match.groups())


def check_framework() -> None:
    """At init(): refuses the DeepSpeed releases that cannot commit a checkpoint."""
    if not _stock_deepspeed():
        return
    text = getattr(sys.modules.get("deepspeed"), "__version__", "")
    numbers = numbers_of(text)
    if numbers is not None and BROKEN[0] <= numbers < BROKEN[1]:
        raise NebulaConfigError(
            f"DeepSpeed {text} fails in every commit of a Nebula checkpoint (0.17.1 to 0.18.3 do); "
            "install deepspeed 0.18.4 or later"
        )


def check_tag(tag: str) -> None:
    """At a new checkpoint: Lightning's DeepSpeedStrategy calls all of them "checkpoint", so only the newest is kept."""
    global _warned_strategy
    if tag != "checkpoint" or _warned_strategy or not _stock_deepspeed():
        return
    if any(name in sys.modules for name in ("lightning.pytorch.strategies.deepspeed", "pytorch_lightning.strategies.deepspeed")):
        _warned_strategy = True
        log.warning(
            "nebula: Lightning's DeepSpeedStrategy gives every checkpoint the tag 'checkpoint', so only the newest is kept; "
            "use strategy=nebulaml.NebulaDeepspeedStrategy(config=...)"
        )


def check_missing(tag: str, root: str | None) -> None:
    """When a tag is not found: DeepSpeed would load the newest instead of a universal checkpoint, without a word."""
    if tag.endswith("_universal") and _stock_deepspeed():
        where = f" in {root}" if root else ""
        raise NebulaConfigError(
            f"{tag!r} is a universal checkpoint, which Nebula did not write{where}; DeepSpeed would load another one in its "
            'place. Set "enable_nebula_load": false in the "nebula" section and give its directory as load_dir'
        )


def check_path(root: str | None) -> None:
    """When a path holds no checkpoint: one that is a checkpoint itself would make the program begin from nothing."""
    folder = (root or "").removeprefix("file://").rstrip("/")
    if folder and os.path.exists(os.path.join(folder, ".nebula", "manifest.json")):
        raise NebulaConfigError(f"{root} is one checkpoint, and not where checkpoints lie: give {os.path.dirname(folder)}")
