"""What of storage is the `nebula` command's work: removing a version as the rules of its layout want it."""

from __future__ import annotations

import os
import subprocess

from . import _nebula, guards, locate
from .errors import NebulaConfigError, NebulaError, NebulaUnavailable

__all__ = ["remove", "was_removed"]

LIMIT_S = 600


def remove(persist_path: str | None, tag: str) -> None:
    """Removes a version from storage. Raises NebulaConfigError for the newest, and without a storage path."""
    if persist_path is None:
        raise NebulaConfigError(f"{tag} is in memory only, where newer versions take its place")
    command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    if command is None:
        raise NebulaUnavailable("the `nebula` command of this installation is not found, which removes versions")
    line = [command, "prune", "--path", persist_path, "--tag", tag, "--yes"]
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise NebulaUnavailable(f"{tag} cannot be removed by {command}: {failure}") from failure
    if done.returncode:
        text = (done.stderr or done.stdout).strip().removeprefix("nebula prune: ")
        kind = NebulaConfigError if "stays" in text else NebulaError
        raise kind(f"{tag} is not removed: {text}")


def was_removed(persist_path: str | None, tag: str, state: str) -> bool:
    """Whether a version that was durable is in storage no more: the agent has it in memory for a while, and is not told."""
    folder = (persist_path or "").removeprefix("file://")
    if state != "durable" or not folder or "://" in folder:
        return False
    return not guards.has_manifest(os.path.join(folder, _nebula.encode_name(tag)))
