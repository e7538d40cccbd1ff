"""Pins: versions that stay whatever the rules of a manager say. One small file for each, below ``<persist>/.nebula/pins``."""

from __future__ import annotations

import json
import os
import time

from . import _nebula
from .errors import NebulaConfigError, NebulaStorageError

__all__ = ["add", "read", "remove"]


def _folder(persist_path: str | None) -> str:
    folder = (persist_path or "").removeprefix("file://")
    if not folder or "://" in folder:
        raise NebulaConfigError(f"versions are pinned in a storage directory, and this manager has {persist_path or 'memory only'}")
    return os.path.join(folder, ".nebula", "pins")


def _path(persist_path: str | None, tag: str) -> str:
    return os.path.join(_folder(persist_path), _nebula.encode_name(tag) + ".json")


def add(persist_path: str | None, tag: str, reason: str) -> None:
    """Pins a version, or gives another reason."""
    path = _path(persist_path, tag)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(temporary, "w") as file:
            json.dump({"nebula": "pin", "version": "1.0", "tag": tag, "reason": reason, "time": int(time.time())}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as failure:
        raise NebulaStorageError(f"{tag} cannot be pinned by {path}: {failure.strerror}") from failure


def remove(persist_path: str | None, tag: str) -> None:
    """Takes a pin back; none is no error."""
    try:
        os.unlink(_path(persist_path, tag))
    except FileNotFoundError:
        pass
    except OSError as failure:
        raise NebulaStorageError(f"the pin of {tag} cannot be removed: {failure.strerror}") from failure


def read(persist_path: str | None) -> dict[str, str]:
    """The reasons by tag. A file that cannot be read pins all the same."""
    if not persist_path or "://" in persist_path.removeprefix("file://"):
        return {}
    folder, found = _folder(persist_path), {}
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".json")]
    except FileNotFoundError:
        return {}
    except OSError as failure:
        raise NebulaStorageError(f"the pins in {folder} cannot be read: {failure.strerror}") from failure
    for name in names:
        try:
            with open(os.path.join(folder, name)) as file:
                document = json.load(file)
            found[str(document["tag"])] = str(document.get("reason", ""))
        except FileNotFoundError:  # taken back meanwhile
            continue
        except (OSError, ValueError, KeyError, TypeError):
            found[name.removesuffix(".json")] = "(unreadable)"
    return found
