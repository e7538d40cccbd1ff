"""Hugging Face directories of checkpoints: ``export_hf(version, directory)``.

It reads ranges of the files of all ranks, and writes one slice at a time. No rank takes part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import api
from .._session import config as settings
from ..errors import NebulaConfigError, NebulaError, NebulaNotFound, NebulaStorageError
from ..reader import Reader

__all__ = ["Exported", "export_hf"]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
SHARD_SIZE = "5GB"


@dataclasses.dataclass(frozen=True)
class Exported:
    """A directory that was written: the names of its files of weights, the number of tensors, and their size in bytes."""

    directory: str
    files: tuple[str, ...]
    tensors: int
    size: int


def export_hf(
    version: Any,
    directory: str | os.PathLike[str],
    *,
    config: Any = None,
    dtype: Any = None,
    max_shard_size: int | str = SHARD_SIZE,
    rename: Callable[[str], str | None] | Mapping[str, str | None] | None = None,
    name: str | None = None,
    key: str | None = None,
    ranks: Sequence[str] | str | None = None,
    mapping: Mapping[str, Any] | None = None,
    replace: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Writes a Hugging Face directory of a checkpoint, which ``from_pretrained`` reads. It appears when it is complete and verified.

    version: a Checkpoint, a tag of this session's storage path, or a directory that a framework has written.
    directory: a path, or a URL of an object store, where config.json comes last. It must not exist, unless ``replace``.
    config: a directory with config.json and tokenizer files, a configuration or a model of transformers, or a dict. If transformers knows
        the model, names, shapes and tied weights are checked by it.
    dtype: "bf16", "fp16" or "fp32", or that dtype of torch, for all floats. None: each tensor keeps its own.
    max_shard_size: bytes of a file, or text such as "5GB" or "500MiB".
    rename: a function or dict from the checkpoint's names to those of the model. None as a name leaves that tensor out.
    name, key: the file that has the weights, and their key in its dict, if the checkpoint has several.
    ranks, mapping: the files of tensor-parallel ranks, and for each pattern of names the dimension along which they divide a tensor,
        "replicate", or a function of the list of the ranks' tensors.
    on_progress: a function that gets the bytes that were written so far, and those of all weights.

    It holds one slice in memory, not the model. Raises NebulaError; then no directory exists.
    """
    kind, most = dtype_of(dtype), size_of(max_shard_size)
    if (ranks is None) != (mapping is None):
        raise NebulaConfigError("an export of tensor-parallel ranks needs both: ranks, their files, and mapping")
    try:
        with contextlib.ExitStack() as open_readers:
            found = _version(version, open_readers)
            return _write(found, target_of(directory), config, kind, most, rename, name, key, ranks, mapping, replace, on_progress)
    except NebulaError:
        raise
    except OSError as failure:
        raise NebulaStorageError(f"{failure.filename or target_of(directory)}: {failure.strerror or failure}") from failure


def _write(
    found: Any, target: str, config: Any, kind: Any, most: int, rename: Any, name: Any, key: Any, ranks: Any, mapping: Any, replace: bool,
    on_progress: Callable[[int, int], None] | None,
) -> Exported:  # fmt: skip
    from . import card, naming, sources
    from . import directory as out
    from .files import Directory, Files, Version

    remote = "://" in target
    if not remote:
        out.check_target(target, replace)
    files = found if isinstance(found, Files) else Directory(found) if isinstance(found, Path) else Version(found)
    if config is None and isinstance(found, Path) and (found / naming.CONFIG).is_file():
        config = found
    chosen = config if isinstance(config, naming.Config) else naming.Config(config)
    weights = sources.read(files, name, key) if ranks is None else sources.merged(files, ranks, mapping or {}, key)
    tensors, tied = naming.named(weights, rename, naming.Model.of(chosen))
    shards = out.shards_of(tensors, kind, most)
    trained = _checkpoint(found)
    readme = card.text(trained, chosen.values is not None) if trained is not None and card.FILE not in chosen.files else None
    small = out.small_files(chosen, out.describe(shards, chosen), out.index_of(shards, tensors), readme)
    size = sum(place[2] for shard in shards for place in shard.places.values())
    done = 0

    def moved(more: int) -> None:
        nonlocal done
        done += more
        if on_progress is not None:
            on_progress(done, size)

    if remote:
        from . import upload

        upload.write(target, shards, tensors, tied, small, replace, moved)
    else:
        out.write_directory(target, shards, tensors, tied, small, replace, moved)
    return Exported(settings.shown(target), tuple(shard.name for shard in shards), len(tensors), size)


def _checkpoint(found: Any) -> Any:
    """Returns the checkpoint of Nebula, whose training a card can describe. None: a framework has written the directory."""
    from .files import Files, Published

    if isinstance(found, Published):
        return found.checkpoint
    return None if isinstance(found, (Path, Files)) else found


def target_of(directory: str | os.PathLike[str]) -> str:
    """Returns the directory as an absolute path, or the URL of an object store."""
    text = os.fspath(directory)
    if not text:
        raise NebulaConfigError("export_hf('') names no directory")
    text = settings.without_scheme(text)
    return text.rstrip("/") if "://" in text else os.path.abspath(os.path.expanduser(text))


def dtype_of(dtype: Any) -> Any:
    """Returns the dtype of torch, or None. Raises NebulaConfigError for any other than the three."""
    import torch

    if dtype is None:
        return None
    text = str(dtype).removeprefix("torch.")
    if text not in DTYPES:
        raise NebulaConfigError(f"dtype={dtype!r:.100}: give one of bf16, fp16 and fp32, or None for the dtype of each tensor")
    return getattr(torch, DTYPES[text])


def size_of(text: int | str) -> int:
    """Returns a number of bytes: 5GB is 5 * 10^9, as Hugging Face counts, and 5GiB is 5 * 2^30."""
    found = re.fullmatch(r"(\d+)\s*(?:([KMGT]?)(i?)B)?", str(text).strip(), re.IGNORECASE)
    if found is None or isinstance(text, bool) or not int(found[1]):
        raise NebulaConfigError(f"max_shard_size={text!r:.100}: give a number of bytes, or text such as 5GB")
    return int(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index((found[2] or " ").upper())


def _version(version: Any, open_readers: contextlib.ExitStack) -> Any:
    """Returns a Checkpoint, or the Path of a directory or file of a framework. A reader that it opens is closed with the stack."""
    if not isinstance(version, (str, os.PathLike)):
        return version
    path = Path(os.fspath(version)).expanduser()
    if isinstance(version, str) and os.sep not in version and not path.is_dir():
        return _tagged(version, api.persist_path(), open_readers)
    if not path.exists():
        raise NebulaNotFound(f"there is no checkpoint {str(path)!r}")
    path = path.resolve()
    # its bytes are verified if it is read as a version, and it may not be complete
    return _tagged(path.name, str(path.parent), open_readers) if (path / ".nebula").is_dir() else path


def _tagged(tag: str, storage: str | None, open_readers: contextlib.ExitStack) -> Any:
    """Returns the checkpoint of a tag. A reader finds it: other ranks need not ask for it, too."""
    found = api.get_checkpoint(tag) if storage is None else open_readers.enter_context(Reader(storage)).get(tag)
    if found is None:
        raise NebulaNotFound(f"there is no complete checkpoint {tag!r} in {settings.shown(storage or 'memory')}")
    return found
