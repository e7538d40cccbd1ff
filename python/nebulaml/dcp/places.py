"""The places of checkpoints of torch.distributed.checkpoint, and the form of a tensor in their files."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import torch

from .. import _nebula, api
from .._session import config
from .._session.session import Session, default
from .._session.waits import interruptible
from ..errors import NebulaConfigError, NebulaNotFound
from ..tensors import pickling

__all__ = [
    "METADATA",
    "check_name",
    "frame",
    "is_place",
    "is_stock",
    "is_taken",
    "join",
    "reading_session",
    "session_for",
    "split",
]

METADATA = ".metadata"
# <scheme>://<place>/<prefix>/<tag>?<signature>, for object stores that have a driver
_URL = re.compile(r"((?:az|abfss?|s3|gs|https?)://[^?]+)/([^/?]+)/?(\?.*)?", re.DOTALL)


def is_place(checkpoint_id: Any) -> bool:
    """Returns True for a path of a directory, or a URL of an object store."""
    if not isinstance(checkpoint_id, (str, os.PathLike)):
        return False
    text = config.without_scheme(os.fspath(checkpoint_id))
    return "://" not in text or _URL.fullmatch(text) is not None


def split(path: Any) -> tuple[str, str]:
    """Splits <persist>/<tag> into (absolute <persist>, <tag>). ~ and file:// mean the same as in init()."""
    text = config.without_scheme(os.fspath(path))
    if "://" in text:
        url = _URL.fullmatch(text)
        if url is None:
            raise NebulaConfigError(
                f"{text.partition('?')[0]}: give the directory, or the URL of an object store, <persist>/<tag>"
            )
        return url[1] + (url[3] or ""), url[2]
    parent, tag = os.path.split(os.path.abspath(os.path.expanduser(text)))
    named = api.persist_path()
    return named if named and config.without_scheme(named).rstrip("/") == parent else parent, tag


def join(persist: str, tag: str) -> str:
    """(<persist>, <tag>) -> <persist>/<tag>, with the signature of a URL after it: what split() takes apart."""
    return config.below(persist, tag)


def session_for(persist: str) -> Session:
    """Returns the session of the package's functions if it has this path or none yet, else one of this path with the same settings."""
    if os.path.exists(persist) and not os.path.isdir(persist):
        raise NebulaConfigError(f"{persist} is not a directory: no checkpoint can be saved in it")
    if not api.is_initialized():
        api.init(persistent_storage_path=persist, persistent_time_interval=0)
    elif api.persist_path() is None:
        api.init(persistent_storage_path=persist)
    return default._at(persist)


def reading_session(persist: str) -> Session:
    """Returns the session with which to look for a checkpoint of this path."""
    if not api.is_initialized():
        return session_for(persist)  # a writer may follow
    return default._that_writes(persist)


def check_name(tag: str) -> None:
    """Raises NebulaConfigError for a tag that storage would give another name: stock readers would not find it."""
    stored = _nebula.encode_name(tag)
    if stored != tag:
        raise NebulaConfigError(
            f"a checkpoint at .../{tag} would lie at .../{stored}, where no other reader looks for it: choose another name"
        )


def is_stock(folder: str) -> bool:
    """Returns True if torch's own writer, or one with the same layout, has made this directory."""
    return os.path.exists(os.path.join(folder, METADATA)) or os.path.exists(os.path.join(folder, f"__0{METADATA}"))


def is_taken(session: Session, persist: str, tag: str) -> bool:
    """Returns True if a complete checkpoint is there, as far as this node knows."""
    try:
        interruptible(session._engine.session().find, tag, persist)
    except NebulaNotFound:
        return is_stock(os.path.join(config.without_scheme(persist), tag))
    return True


@functools.lru_cache(maxsize=1024)
def frame(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Returns the bytes before and after the values in a complete torch file of one contiguous tensor."""
    template = torch.empty(shape, dtype=dtype, device="cpu")  # its memory is never touched
    (before, _, after), _ = pickling.file_parts(template, template)
    return before, after
