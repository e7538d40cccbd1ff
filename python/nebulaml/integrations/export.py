"""Safetensors files of checkpoints, made in the background by a process of low priority.

``nebulaml.export_safetensors(checkpoint, path)`` writes a line to that process and returns. The process waits until the checkpoint is
durable, reads the tensors from the fastest place, verifies them, and makes the file appear at `path` by one rename. It completes
all requests even if the trainer has died. This module is both ends; in the trainer it only writes to a pipe.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .. import _nebula, api
from .._session import engine
from .._session.pipes import without_sigpipe
from ..errors import NebulaConfigError, NebulaError

__all__ = ["export_safetensors", "wait_for_exports"]

log = logging.getLogger("nebulaml")

NICENESS = 10
POLL_S = 0.25

_lock = threading.Lock()  # guards both below
_process: subprocess.Popen[bytes] | None = None  # takes requests
_ending: list[subprocess.Popen[bytes]] = []  # processes that get no more requests, and may still be at work


def export_safetensors(checkpoint: Any, path: str | os.PathLike[str], name: str | None = None, key: str | None = None) -> bool:
    """Makes the safetensors file `path` of a checkpoint as soon as the checkpoint is durable. Returns at once.

    name: the file of the checkpoint that has the weights; not needed if it has only one.
    key: the key of the weights in that file's dict. Without it, the whole dict, or its state_dict, model_state_dict, model or module.

    Tied weights are stored once, under the first of their names; the file's metadata names the others, as safetensors' own
    ``save_model`` does. Returns False if the request could not be sent. A later failure is one line on stderr. Raises NebulaConfigError
    without a storage path: such checkpoints never become durable.
    """
    storage = engine.settings().persist_path
    if storage is None:
        raise NebulaConfigError("an export waits until the checkpoint is durable: give persistent_storage_path to init()")
    target = os.path.abspath(os.path.expanduser(path))
    request = {"storage": storage, "tag": checkpoint.tag, "path": target, "name": name, "key": key}
    line = json.dumps(request).encode() + b"\n"
    if len(line) > 4096:
        # a pipe takes up to this size at once
        raise NebulaConfigError(f"the names of this export take {len(line)} bytes: 4096 is the most")
    with _lock:
        for _ in range(2):  # the earlier process may have died
            try:
                process = _started()
                with without_sigpipe():
                    os.write(process.stdin.fileno(), line)  # type: ignore[union-attr]
                return True
            except BlockingIOError:
                log.error("nebula: %s is not exported: too many exports are waiting", checkpoint.tag)
                return False
            except OSError as failure:
                _forget()
                reason = failure
    log.error("nebula: %s is not exported: %s", checkpoint.tag, reason)
    return False


def wait_for_exports(timeout: float | None = None) -> bool:
    """Waits until all requested files and directories exist. Returns False if one failed, or is not there after `timeout` seconds.

    Exports of a job in the background (HFExport) end with its newest checkpoint; the next save begins them again.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    with _lock:
        _forget()
        waited = list(_ending)
    background = sys.modules.get("nebulaml.export.background")
    all_there = background is None or background.wait(deadline)
    for process in waited:
        try:
            code = process.wait(None if deadline is None else max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return False
        all_there = all_there and code == 0
        with _lock, contextlib.suppress(ValueError):
            _ending.remove(process)
    return all_there


def _started() -> subprocess.Popen[bytes]:
    global _process
    if _process is None:
        package = str(Path(__file__).resolve().parents[2])
        search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        # A session of its own: a signal that ends the trainer, or its process group, does not reach it, so it can finish.
        _process = subprocess.Popen(
            [sys.executable, "-m", "nebulaml.integrations.export"],
            stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": ""}, start_new_session=True,
        )  # fmt: skip
        os.set_blocking(_process.stdin.fileno(), False)  # type: ignore[union-attr]
    return _process


def _forget() -> None:
    """Tells the process that no more requests come. The next request starts another one."""
    global _process
    if _process is not None:
        with contextlib.suppress(OSError):
            _process.stdin.close()  # type: ignore[union-attr]
        _ending.append(_process)
        _process = None


def _forget_in_child() -> None:
    """Closes the pipe in a forked child: otherwise it would stay open until the last data loader's worker ends."""
    global _lock
    _lock = threading.Lock()
    _forget()
    _ending.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _write(checkpoint: Any, request: dict[str, Any]) -> None:
    """Writes the file in a directory beside its place, verifies it, and gives it its name."""
    from ..export import directory, naming, sources
    from ..export.files import Version

    files = Version(checkpoint)
    names = [request["name"]] if request["name"] else list(files.names)
    if len(names) != 1:
        raise NebulaConfigError(f"it has the files {names}: name the one to export")
    tensors = sources.read(files, names[0], request["key"]).tensors
    left_out = naming.same_memory(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    parent, name = os.path.split(request["path"])
    shard = directory.shard_of(name, {one: tensor.dtype for one, tensor in kept.items()}, kept, left_out)
    with directory.Scratch(parent) as folder:
        directory.write(folder, shard, kept, lambda more: None)
        _nebula.staging_place(os.path.join(folder, name), request["path"], parent, False)


def _serve(request: dict[str, Any]) -> None:
    """Does one export: waits until the version is durable, or gone."""
    api.init(job=f"export-{os.getpid()}", world=1, on_error="raise")  # the job's own rank 0 is the trainer, so this is another job
    while (known := api.list_checkpoints(request["storage"]).get(request["tag"])) is not None and known["state"] != "durable":
        if known["state"] == "failed":
            raise NebulaError("it failed")
        time.sleep(POLL_S)
    checkpoint = api.get_checkpoint(request["tag"], request["storage"])
    if checkpoint is None:
        raise NebulaError("a newer checkpoint took its memory before it was durable")
    _write(checkpoint, request)


def main() -> int:
    """Reads requests from the pipe, one after the other, until the trainer has closed it. Returns 1 if one failed."""
    os.nice(NICENESS)
    failed = 0
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            _serve(request)
        except Exception as failure:
            failed = 1
            print(f"nebula: {request['tag']} is not exported to {request['path']}: {failure}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
