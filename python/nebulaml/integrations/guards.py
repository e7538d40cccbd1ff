"""Checks that detect wrong uses of Nebula through a framework, which would otherwise fail silently.

They look only at modules that the program has loaded, and import no framework.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import sys

from .. import _nebula
from .._session import config
from ..errors import NebulaConfigError

__all__ = ["check_bare", "check_framework", "check_missing", "check_path", "check_tag", "log_passed_over", "numbers_of"]

log = logging.getLogger("nebulaml")

STOCK_ENGINE = "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine"
BROKEN = ((0, 17, 1), (0, 18, 4))  # DeepSpeed from the first version on, before the second: it calls commit() with wrong arguments

_warned_strategy = False
_named: set[str] = set()  # paths without a manifest that were already reported
LOOKS = 64  # the number of folders to look into, and of entries in each: enough for a hint


def _stock_deepspeed() -> bool:
    """Returns True if DeepSpeed's own Nebula support is loaded, which happens only for a `nebula` section."""
    return STOCK_ENGINE in sys.modules


def numbers_of(version: str) -> tuple[int, ...] | None:
    """Returns the three numbers that a version begins with, whatever follows (rc1, .dev0, +cu121). None: it has none."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return None if match is None else tuple(int(number or 0) for number in match.groups())


def check_framework() -> None:
    """Raises at init() for the DeepSpeed releases that cannot commit a checkpoint."""
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
    """Warns about Lightning's DeepSpeedStrategy: it gives every checkpoint the tag "checkpoint", so only the newest is kept."""
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
    """Raises if a universal checkpoint is not found: DeepSpeed would silently load the newest one instead."""
    if tag.endswith("_universal") and _stock_deepspeed():
        where = f" in {root}" if root else ""
        raise NebulaConfigError(
            f"{tag!r} is a universal checkpoint, which Nebula did not write{where}; DeepSpeed would load another one in its "
            'place. Set "enable_nebula_load": false in the "nebula" section and give its directory as load_dir'
        )


def check_path(root: str | None) -> None:
    """Checks a path without checkpoints. Raises if it is itself a checkpoint: the program would start from nothing."""
    folder = config.without_scheme(root or "").rstrip("/")
    if folder and has_manifest(folder):
        raise NebulaConfigError(f"{root} is a checkpoint, not a directory of checkpoints: give {os.path.dirname(os.path.realpath(folder))}")
    if folder and folder not in _named and "://" not in folder:
        warning = _without_manifests(folder)
        if warning:
            _named.add(folder)
            log.warning("nebula: found no checkpoint, so training begins anew: %s", warning)


def has_manifest(folder: str) -> bool:
    """Returns True if a folder holds a checkpoint."""
    with contextlib.suppress(OSError), os.scandir(os.path.join(folder, ".nebula")) as entries:
        return any(one.name.startswith("manifest-") for one in entries)
    return False


def _is_foreign(folder: str) -> bool:
    """Returns True if a folder holds no checkpoint of its own, complete or not, but its sub-folders may."""
    inside = os.path.join(folder, ".nebula")
    return not os.path.exists(inside) or os.path.exists(os.path.join(inside, "index"))


def _folders(folder: str, most: int = LOOKS) -> list[str]:
    """Returns the paths of sub-folders that may be checkpoints."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        found = (one.path for one in entries if not one.name.startswith(".") and one.name != "lost+found" and one.is_dir())
        return list(itertools.islice(found, most))
    return []


def _without_manifests(folder: str) -> str | None:
    """Returns a warning about a path in which no checkpoint was found. None: it holds no folder that could be one."""
    inside = [one for one in _folders(folder) if _is_foreign(one)]
    if not inside:
        return None
    many = f"{len(inside)}{' or more' if len(inside) == LOOKS else ''} folder{'s' if len(inside) > 1 else ''}"
    deeper = [one for one in inside if any(map(has_manifest, _folders(one)))]
    if deeper:
        others = f", and {len(deeper) - 1} others" if len(deeper) > 1 else ""
        cure = f"there are checkpoints one level deeper, in {deeper[0]}{others}: give that path"
    elif any(_nebula.follows_step(os.path.basename(one)) for one in inside):
        cure = "if they are checkpoints of Nebula they were copied without hidden files: copy their .nebula folders, too"
    else:
        cure = "if checkpoints of Nebula are expected here, it is another path, or they were copied without hidden files (.nebula)"
    return f"{folder} holds {many} but no Nebula manifest; {cure}"


def log_passed_over(found: str, passed: list[tuple[str, str]]) -> None:
    """Logs that an older checkpoint than the newest is about to be loaded."""
    for tag, reason in passed:
        log.warning("nebula: %s is taken, and %s is passed over: %s", found, tag, reason)


def check_bare(tag: str, root: str | None) -> None:
    """Warns if a tag is not found although its folder exists."""
    folder = os.path.join(config.without_scheme(root or ""), _nebula.encode_name(tag))
    if root and "://" not in folder and os.path.isdir(folder) and not has_manifest(folder):
        log.warning(
            "nebula: there is no checkpoint %r in %s: its folder is there, but has no manifest (.nebula/manifest-*.json). It was never "
            "completed, was copied without hidden files, or is not of Nebula",
            tag,
            root,
        )
