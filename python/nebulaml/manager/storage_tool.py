"""Work on storage that the `nebula` command does: it removes versions in the order that the layout needs, and handles pins."""

from __future__ import annotations

import json
import os
import subprocess

from .. import _nebula
from .._session import locate
from ..errors import NebulaConfigError, NebulaError, NebulaNotFound, NebulaStorageError, NebulaUnavailable
from ..integrations import guards

__all__ = ["call", "remove", "was_removed"]

LIMIT_S = 600
_KINDS = {2: NebulaConfigError, 3: NebulaNotFound, 4: NebulaStorageError, 5: NebulaConfigError}  # exit codes of docs/cli.md


def remove(persist_path: str | None, tag: str, entry: int | None = None) -> None:
    """Removes a version from storage; with `entry`, only if that is still the newest entry of the tag's log.

    Raises NebulaConfigError for the newest version, for a pinned one, for one that was written again, and without a storage path.
    """
    if persist_path is None:
        raise NebulaConfigError(f"{tag} is in memory only, and newer versions take its memory")
    call(persist_path, f"{tag} is not removed", "prune", "--yes", "--tag", tag, *(["--entry", str(entry)] if entry else []))


def call(persist_path: str, what: str, *words: str) -> dict:
    """Runs `nebula WORDS` on a storage path and returns its answer. `what`: the beginning of the error message."""
    command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    if command is None:
        raise NebulaUnavailable(f"{what}: the `nebula` command of this installation is not found")
    # A URL can hold a secret, which a command line would show to all users of the machine.
    environment = os.environ | {"NEBULA_PERSISTENT_STORAGE_PATH": persist_path}
    line = [command, words[0], "--json", *words[1:]]
    try:
        done = subprocess.run(line, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
        answer = json.loads(done.stdout or "{}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as failure:
        raise NebulaUnavailable(f"{what} by {command}: {failure}") from failure
    if done.returncode == 0:
        return answer
    text = answer.get("error", {}).get("message") or done.stderr.strip()
    raise _KINDS.get(done.returncode, NebulaError)(f"{what}: {text}")


def was_removed(persist_path: str | None, tag: str, state: str) -> bool:
    """Returns True if a version that was durable is no longer in storage. The agent may still have it in memory, and does not know."""
    folder = (persist_path or "").removeprefix("file://")
    if state != "durable" or not folder or "://" in folder:
        return False
    return not guards.has_manifest(os.path.join(folder, _nebula.encode_name(tag)))
