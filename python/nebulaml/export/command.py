"""The command line of ``nebula restore TAG --hf DIR``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from .._session import documents
from .._session.config import clean_path, shown
from .._session.printing import human_bytes
from ..errors import NebulaConfigError, NebulaError, NebulaNotFound
from ..reader import Reader
from . import SHARD_SIZE, export_hf

__all__ = ["main"]

PROGRESS_S = 0.5


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise NebulaConfigError(f"{message}; see `nebula restore --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nebula restore", add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("tag")
    add("name", nargs="?")
    add("--hf", required=True)
    add("--path")
    add("--config")
    add("--dtype")
    add("--max-shard-size", default=SHARD_SIZE)
    add("--key")
    add("--rename")
    add("--ranks")
    add("--mapping")
    add("--force", action="store_true")
    add("--json", action="store_true")
    return parser


def _json(option: str, path: str | None) -> Any:
    """Returns the dict in a file of JSON."""
    if path is None:
        return None
    try:
        found = documents.load(path)
    except (OSError, ValueError) as failure:
        raise NebulaConfigError(f"{option} {path}: no file of JSON that can be read: {failure}") from failure
    if not isinstance(found, dict):
        raise NebulaConfigError(f"{option} {path}: the JSON is no object, as {{\"*.weight\": 0}}")
    return found


def _progress() -> Callable[[int, int], None] | None:
    """Returns a function that prints lines for a program, as the commands in C do (NEBULA_PROGRESS=json)."""
    if os.environ.get("NEBULA_PROGRESS") != "json":
        return None
    next_at = 0.0

    def report(done: int, total: int) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at or done == total:
            next_at = time.monotonic() + PROGRESS_S
            print(json.dumps({"done": done, "total": total}), file=sys.stderr, flush=True)

    return report


def _end(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)  # the export removes what it has written


def _export(given: argparse.Namespace) -> tuple[str, Any]:
    """Returns the tag, and what was written."""
    options = {
        "config": given.config, "dtype": given.dtype, "max_shard_size": given.max_shard_size, "rename": _json("--rename", given.rename),
        "name": given.name, "key": given.key, "ranks": given.ranks, "mapping": _json("--mapping", given.mapping), "replace": given.force,
        "on_progress": _progress(),
    }  # fmt: skip
    if os.sep in given.tag:  # a directory that a framework has written
        return given.tag, export_hf(os.path.expanduser(given.tag), given.hf, **options)
    path = clean_path(given.path or os.environ.get("NEBULA_PERSISTENT_STORAGE_PATH") or os.getcwd())
    assert path is not None
    with Reader(path) as reader:
        version = reader.latest() if given.tag == "latest" else reader.get(given.tag)
        if version is None:
            raise NebulaNotFound(f"there is no complete checkpoint {given.tag!r} in {shown(path)}; see `nebula list`")
        return version.tag, export_hf(version, given.hf, **options)


def main(arguments: Sequence[str]) -> int:
    """Exports one checkpoint."""
    given = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    begun = time.monotonic()
    try:
        tag, found = _export(given)
    except NebulaError as failure:
        if given.json:
            print(json.dumps({"error": {"status": failure.status, "message": str(failure)}}))
        raise
    took = time.monotonic() - begun
    if given.json:
        files = [{"name": name} for name in found.files]
        answer = {"tag": tag, "path": found.directory, "files": files, "tensor_count": found.tensors, "bytes": found.size, "seconds": took}
        print(json.dumps(answer))
        return 0
    for name in found.files:
        print(f"{shown(found.directory)}/{name}")
    files = f"{len(found.files)} file{'s' * (len(found.files) != 1)}"
    print(f"{tag}: {found.tensors} tensors, {human_bytes(found.size)} in {files}, verified, {took:.1f} s", file=sys.stderr)
    return 0
