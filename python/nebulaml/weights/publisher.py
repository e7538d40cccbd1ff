"""Publisher: names the weights of a step, so that evaluators, rollout engines and servers can follow them."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .._session import config
from .._session.session import Session
from ..errors import NebulaConfigError, NebulaError, NebulaTimeout

__all__ = ["Publisher", "publish"]

log = logging.getLogger("nebulaml")

CLOSE_S = 600.0  # a close waits so long for the last publication
_made = itertools.count()


class Publisher:
    """Publishes weights into a storage path of their own, which ``Subscriber`` follows.

    weights: a module, a dict of tensors, or pairs (name, tensor). Of a module all parameters and persistent buffers, by the names of its
        state_dict. Tied weights are published once, under the first of their names.
    path: a directory or a URL, used for nothing else.
    dtype: floating-point tensors are published as this type, for example torch.bfloat16. None: as they are.
    full_every: after so many publications a whole one is written. Others are deltas, unless half of the bytes have changed.
    files: a directory, or bytes by name: what an engine needs beside the weights, such as config.json and the tokenizer's files.
    name: the name of the weights' file in an engine's directory.

    A background process of low priority compares, writes, and removes what no follower needs any more. It completes the last publication
    even if the trainer dies. One process publishes to a path: in a job of several ranks, rank 0.
    """

    def __init__(
        self,
        weights: Any,
        path: str | os.PathLike[str],
        *,
        dtype: Any = None,
        full_every: int = 50,
        files: str | os.PathLike[str] | Mapping[str, bytes] | None = None,
        name: str = "model.safetensors",
    ) -> None:
        if isinstance(full_every, bool) or not isinstance(full_every, int) or full_every < 1:
            raise NebulaConfigError(f"Publisher(full_every={full_every!r}): give a whole number of 1 or more")
        if not name or "/" in name or name.startswith("."):
            raise NebulaConfigError(f"Publisher(name={name!r}): give the plain name of a file")
        found = config.clean_path(os.fspath(path))
        if not found:
            raise NebulaConfigError("Publisher(path='') names no storage path")
        self._path, self._name, self._full_every = found, name, full_every
        self._weights, self._dtype, self._casts = _named(weights), dtype, dict[str, Any]()
        self._files = _read_files(files)
        self._job = f"publisher-{os.getpid()}-{next(_made)}-{time.time_ns()}"
        self._session = Session("", job=self._job, world=1, num_of_version_in_retention=2, on_error="raise")
        self._session._engine._logged_memory_only = True  # the maker makes it durable
        self._maker: subprocess.Popen[bytes] | None = None
        self._tags = itertools.count(1)
        self._asked = self._answered = 0
        self._failure: str | None = None  # of the newest publication that was answered
        self._rest = b""
        self._line = b""  # the newest request, if no second maker has had it
        self._lock = threading.Lock()
        _living.add(self)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def publish(self, step: int) -> bool:
        """Publishes the present values. Returns when they are fixed: the program may change every tensor.

        If a publication is still being made when two more come, the older of these is skipped. Returns False, after one line in the log, if
        the values could not be taken. A later failure is one line in the log at the next call; the next publication is then a whole one.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise NebulaConfigError(f"publish({step!r}): a step is a whole number of 0 or more")
        with self._lock:
            self._hear(0)
            # readers of memory see the tags of all jobs; and one that a failed call has used may hold its values
            tag = f"{self._job}-{next(self._tags)}"
            try:
                with self._session.checkpoint(tag) as live:
                    live.save_bytes("weights", self._parts())
                self._ask({"id": self._asked + 1, "tag": tag, "step": step})
            except (NebulaConfigError, ValueError):
                raise
            except (NebulaError, OSError) as failure:
                log.error("nebula: step %d is not published to %s: %s. Training goes on.", step, config.shown(self._path), failure)
                self._forget_maker()
                return False
            self._asked += 1
            return True

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the newest publication is durable. Raises NebulaTimeout after so many seconds, and NebulaError if it failed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._answered < self._asked:
                left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
                if left <= 0:
                    raise NebulaTimeout(f"the newest publication to {config.shown(self._path)} is not durable after {timeout} s")
                self._hear(left)
            if self._failure is not None:
                raise NebulaError(f"the newest publication to {config.shown(self._path)} failed: {self._failure}")

    def close(self) -> None:
        """Waits until the newest publication is durable, and ends the publisher. Its failure is one line in the log."""
        try:
            self.wait(CLOSE_S)
        except NebulaError as failure:
            log.error("nebula: %s", failure)
        with self._lock:
            self._forget_maker()
        self._session.close()

    # -- the maker

    def _ask(self, request: dict[str, Any]) -> None:
        line = json.dumps(request).encode() + b"\n"
        try:
            self._send(line)
        except BrokenPipeError:  # it has died since the last look
            self._forget_maker()
            self._send(line)
        self._line = line

    def _send(self, line: bytes) -> None:
        maker = self._started()
        assert maker.stdin is not None
        if os.write(maker.stdin.fileno(), line) != len(line):
            raise OSError("the background process takes no more requests")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._maker is not None and self._maker.poll() is not None:
            self._forget_maker()
        if self._maker is None:
            package = str(Path(__file__).resolve().parents[2])
            search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
            # A session of its own: a signal that ends the trainer, or its process group, does not reach it, so it can finish.
            self._maker = subprocess.Popen(
                [sys.executable, "-m", "nebulaml.weights.maker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": ""}, start_new_session=True,
            )  # fmt: skip
            about = {"path": self._path, "name": self._name, "full_every": self._full_every, "files": sorted(self._files)}
            assert self._maker.stdin is not None and self._maker.stdout is not None
            self._maker.stdin.write(json.dumps(about).encode() + b"\n")
            for file in sorted(self._files):
                self._maker.stdin.write(len(self._files[file]).to_bytes(8, "little") + self._files[file])
            self._maker.stdin.flush()
            os.set_blocking(self._maker.stdin.fileno(), False)
            os.set_blocking(self._maker.stdout.fileno(), False)
        return self._maker

    def _hear(self, timeout: float) -> None:
        """Takes the answers of the maker, and waits at most so many seconds for one."""
        maker = self._maker
        if maker is None or maker.stdout is None:
            if self._answered < self._asked:
                self._ask_again()
            return
        deadline = time.monotonic() + timeout
        while True:
            try:
                got = os.read(maker.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return
                time.sleep(0.002)
                continue
            if not got:
                self._forget_maker()
                self._ask_again()
                return
            *lines, self._rest = (self._rest + got).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            if lines:
                return

    def _ask_again(self) -> None:
        """Gives the newest request to another maker, once. Its snapshot is still in memory."""
        line, self._line = self._line, b""
        if self._answered == self._asked:
            return
        try:
            if line:
                self._send(line)
                return
        except OSError as failure:
            log.error("nebula: no background process can be started: %s", failure)
        self._answered, self._failure = self._asked, "its background process has ended"

    def _take(self, answer: dict[str, Any]) -> None:
        self._answered, self._failure = answer["id"], answer.get("error")
        if self._failure is not None:
            log.error("nebula: step %d is not published to %s: %s", answer["step"], config.shown(self._path), self._failure)

    def _forget_maker(self) -> None:
        maker, self._maker, self._rest = self._maker, None, b""
        for pipe in (maker.stdin, maker.stdout) if maker is not None else ():
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        if maker is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                maker.wait(5.0)

    def _after_fork(self) -> None:
        """Closes the pipes in a forked child: otherwise the maker would not notice the end of the trainer before that of a data loader."""
        self._lock = threading.Lock()
        maker, self._maker = self._maker, None
        for pipe in (maker.stdin, maker.stdout) if maker is not None else ():
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    # -- the weights

    def _parts(self) -> list[Any]:
        """Returns the parts of the safetensors file of the present values."""
        from ..integrations.redirect import safetensors_parts

        state, left_out = _without_ties(self._as_published(self._weights()))
        return safetensors_parts(state, {"format": "pt", **left_out})

    def _as_published(self, state: dict[str, Any]) -> dict[str, Any]:
        """Casts what is to be cast, into buffers that stay. Tied weights stay tied."""
        result: dict[str, Any] = {}
        first: dict[Any, str] = {}
        for name, value in state.items():
            if hasattr(value, "placements"):
                raise NebulaConfigError(f"{name!r} is a DTensor: publish full tensors, for example tensor.full_tensor() of each one")
            tensor = value.detach()
            if self._dtype is None or not tensor.is_floating_point() or tensor.dtype == self._dtype:
                result[name] = tensor
                continue
            view = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
            known = first.setdefault(view, name)
            if known != name:
                result[name] = result[known]
                continue
            into = self._casts.get(name)
            if into is None or into.shape != tensor.shape or into.device != tensor.device:
                self._casts[name] = into = tensor.to(self._dtype).contiguous()
            else:
                into.copy_(tensor)
            result[name] = into
        return result


def publish(model: Any, path: str | os.PathLike[str], step: int, **options: Any) -> bool:
    """Publishes a module's weights, with one ``Publisher`` per path that lives until the program ends. options: those of ``Publisher``."""
    key = config.clean_path(os.fspath(path)) or ""
    found = _publishers.get(key)
    if found is None or found[0] is not model:
        if found is not None:
            found[1].close()
        found = _publishers[key] = (model, Publisher(model, path, **options))
    return found[1].publish(step)


_publishers: dict[str, tuple[Any, Publisher]] = {}
_living: weakref.WeakSet[Publisher] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_living):
        one._after_fork()
    _publishers.clear()


os.register_at_fork(after_in_child=_after_fork)


def _named(weights: Any) -> Any:
    """Returns a function that gives the tensors by name."""
    if hasattr(weights, "state_dict") and callable(weights.state_dict):
        return lambda: {name: value for name, value in weights.state_dict().items() if hasattr(value, "data_ptr")}
    if isinstance(weights, Mapping):
        return lambda: dict(weights)
    if isinstance(weights, Iterable):
        pairs = dict(weights)
        return lambda: pairs
    raise NebulaConfigError(f"Publisher({type(weights).__name__}): give a module, a dict of tensors, or pairs (name, tensor)")


def _read_files(files: str | os.PathLike[str] | Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Returns the files beside the weights. Of a directory all plain files but weights."""
    if files is None:
        return {}
    if isinstance(files, Mapping):
        found = {name: bytes(data) for name, data in files.items()}
    else:
        weights = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json", ".bin.index.json")
        listed = [entry for entry in os.scandir(files) if entry.is_file() and not entry.name.endswith(weights)]
        found = {entry.name: Path(entry.path).read_bytes() for entry in listed}
    for name in found:
        if not name or "/" in name or name.startswith("."):
            raise NebulaConfigError(f"Publisher(files=...): {name!r} is not the plain name of a file")
    return found


def _without_ties(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the tensors that are written, and {left out: kept}. Of several names for one tensor the first by the alphabet stays.

    Other views of one storage, for example a transposed one, are copied as tensors of their own.
    """
    kept, left_out = dict(state), {}
    first: dict[Any, str] = {}
    for name in sorted(name for name, tensor in state.items() if tensor.numel()):
        tensor = state[name]
        view = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if view in first:
            left_out[name] = first[view]
            del kept[name]
        else:
            first[view] = name
    views_of = collections.Counter(storage for storage, *_ in first)
    for (storage, *_), name in first.items():
        if views_of[storage] > 1:
            kept[name] = state[name].clone()
    return {name: tensor.contiguous() for name, tensor in kept.items()}, left_out
