"""Publisher: names the weights of a step, so that evaluators, rollout engines and servers can follow them."""

from __future__ import annotations

import base64
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

from .._session import config, ranks
from .._session.pipes import without_sigpipe
from .._session.session import Session
from ..errors import NebulaConfigError, NebulaError, NebulaTimeout
from . import shards

__all__ = ["Publisher", "publish"]

log = logging.getLogger("nebulaml")

CLOSE_S = 600.0  # a close waits so long for the last publication
MAKERS = 2  # that may die of a request
WAIT_S = 60.0  # a call waits so long for the publications before it, if ranks publish shards
_made = itertools.count()


class _Request:
    """What a maker is asked, and the makers that have had it. A body with the tag "" lets a publication of shards fail: "why" says why."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body, self.makers = body, 0
        self.maker: subprocess.Popen[bytes] | None = None


class Publisher:
    """Publishes weights into a storage path of their own, which ``Subscriber`` follows.

    weights: a module, a dict of tensors, pairs (name, tensor), or a function that returns such a dict at each publication. Of a module all
        parameters and persistent buffers, by the names of its state_dict. Tied weights are published once, under the first of their names.
    path: a directory or a URL, used for nothing else.
    dtype: floating-point tensors are published as this type, for example torch.bfloat16. None: as they are.
    full_every: after so many publications a whole one is written. Others are deltas, unless half of the bytes have changed
        or the deltas have become larger than twice the weights.
    files: a directory, or bytes by name: what an engine needs beside the weights, such as config.json and the tokenizer's files.
    name: the name of the weights' file in an engine's directory.

    A background process of low priority compares, writes, and removes what no follower needs any more. It completes the last publication
    even if the trainer dies. One process publishes to a path: in a job of several ranks, rank 0. If there are DTensors (FSDP2), all
    ranks publish, each its own shards, and call ``publish`` for the same steps. Then no publication is skipped: a call waits while two
    are being made.
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
        self._files = _read_files(files, name)
        self._job = f"publisher-{os.getpid()}-{next(_made)}-{time.time_ns()}"
        self._session = Session("", job=self._job, world=1, num_of_version_in_retention=2, on_error="raise")
        self._session._engine._logged_memory_only = True  # the maker makes it durable
        self._maker: subprocess.Popen[bytes] | None = None
        self._tags = itertools.count(1)
        self._asked = 0
        self._failure: str | None = None  # of the newest publication that was answered
        self._rest = b""
        self._place: dict[str, str] = {}  # the variables that say a maker's rank
        self._requests: list[_Request] = []  # those without an answer
        self._is_stuck = False  # the last wait for makers was in vain, and none has answered since
        self._shards: dict[str, Any] | None = None  # of a rank that publishes shards
        self._turn = 0  # of this publisher among those of shards to this path; 0: it has not published any yet
        self._is_whole = False  # it has published whole tensors
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
            self._asked += 1
            request = _Request({"id": self._asked, "tag": tag, "step": step})
            is_taken = False
            try:
                parts = self._parts()
                if self._shards is not None:
                    self._await_makers()
                    shards.compare_steps(self._path, self._turn, self._number(request), step)
                with self._session.checkpoint(tag) as live:
                    live.save_bytes("weights", parts)
                is_taken = True
            except (NebulaConfigError, ValueError) as failure:
                request.body["why"] = str(failure)[:1000]  # the line fits into the pipe at once
                raise
            except (NebulaError, OSError) as failure:
                request.body["why"] = str(failure)[:1000]  # the line fits into the pipe at once
                log.error("nebula: step %d is not published to %s: %s. Training goes on.", step, config.shown(self._path), failure)
            finally:
                self._requests.append(request)
                if not is_taken:
                    self._give_up(request)
                self._hand_over()
            return request in self._requests and request.body["tag"] == tag

    def _await_makers(self) -> None:
        """Waits until at most one publication is being made: each needs its snapshot. After a wait in vain it waits again once one is made."""
        end = time.monotonic() + (0 if self._is_stuck else WAIT_S)
        while len(self._requests) > 1:
            if time.monotonic() > end:
                self._is_stuck = True
                raise NebulaTimeout(f"two publications before it are not durable after {WAIT_S:.0f} s")
            self._hear(0.2)

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the newest publication is durable. Raises NebulaTimeout after so many seconds, and NebulaError if it failed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:  # not while it waits: another thread may publish meanwhile
                if self._requests:
                    self._hear(0)
                if not self._requests:
                    if self._failure is not None:
                        raise NebulaError(f"the newest publication to {config.shown(self._path)} failed: {self._failure}")
                    return
            if deadline is not None and time.monotonic() >= deadline:
                raise NebulaTimeout(f"the newest publication to {config.shown(self._path)} is not durable after {timeout} s")
            time.sleep(0.002)

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

    def _hand_over(self) -> None:
        """Gives the maker the requests that it lacks. One that two makers have died of is given up. The snapshots are still in memory."""
        for _ in range(MAKERS):
            try:
                maker = self._started() if self._requests else None
                lacking = [request for request in self._requests if request.maker is not maker]
                if self._shards is None:  # older snapshots are gone
                    self._requests = [request for request in self._requests if request not in lacking[:-1]]
                    lacking = lacking[-1:]
                for request in lacking:
                    if request.makers == MAKERS:
                        self._failure = "its background process has ended"
                        self._give_up(request)
                    if request in self._requests:
                        self._send(request, maker)
                return
            except BrokenPipeError:  # it has died since the last look
                self._forget_maker()
            except OSError as failure:
                log.error("nebula: no background process can be started: %s", failure)
                self._forget_maker()
        for request in list(self._requests):
            self._failure = "no background process takes it"
            self._give_up(request)

    def _give_up(self, request: _Request) -> None:
        """Ends a request without a publication. If ranks publish shards, a maker lets it fail on all, which else wait for this one's part."""
        if self._shards is not None and request.body["tag"]:
            request.body["tag"], request.makers, request.maker = "", 0, None
            return
        self._requests.remove(request)

    def _number(self, request: _Request) -> int:
        """The number of a publication of shards."""
        assert self._shards is not None
        return int(self._shards["first"]) + int(request.body["id"]) - 1

    def _send(self, request: _Request, maker: subprocess.Popen[bytes] | None) -> None:
        assert maker is not None and maker.stdin is not None
        if self._shards is not None:
            request.body["number"] = self._number(request)
        line = json.dumps(request.body).encode() + b"\n"
        with contextlib.suppress(BlockingIOError):  # the pipe is full of requests: this one is sent after the next answer
            with without_sigpipe():
                written = os.write(maker.stdin.fileno(), line)
            if written != len(line):
                raise OSError("the background process got a part of a request")
            request.makers, request.maker = request.makers + 1, maker

    def _started(self) -> subprocess.Popen[bytes]:
        if self._maker is not None and self._maker.poll() is not None:
            self._forget_maker()
        if self._maker is None:
            package = str(Path(__file__).resolve().parents[2])
            search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
            # A session of its own: a signal that ends the trainer, or its process group, does not reach it, so it can finish.
            self._maker = subprocess.Popen(
                [sys.executable, "-m", "nebulaml.weights.maker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": "", **self._place}, start_new_session=True,
            )  # fmt: skip
            shards = json.dumps(self._shards).encode() if self._shards is not None else b""
            about = {"path": self._path, "name": self._name, "full_every": self._full_every}
            about |= {"files": sorted(self._files), "shards": len(shards)}
            assert self._maker.stdin is not None and self._maker.stdout is not None
            with without_sigpipe():
                self._maker.stdin.write(json.dumps(about).encode() + b"\n")
                for file in sorted(self._files):
                    self._maker.stdin.write(len(self._files[file]).to_bytes(8, "little") + self._files[file])
                self._maker.stdin.write(shards)
                self._maker.stdin.flush()
            os.set_blocking(self._maker.stdin.fileno(), False)
            os.set_blocking(self._maker.stdout.fileno(), False)
        return self._maker

    def _hear(self, timeout: float) -> None:
        """Takes the answers of the maker, and waits at most so many seconds for one."""
        maker = self._maker
        if maker is None or maker.stdout is None:
            self._hand_over()
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
                self._hand_over()
                return
            *lines, self._rest = (self._rest + got).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            if lines:
                if any(request.maker is not maker for request in self._requests):
                    self._hand_over()
                return

    def _take(self, answer: dict[str, Any]) -> None:
        if "waits" in answer:
            log.warning("nebula: publications to %s wait for another publisher's process %s", config.shown(self._path), answer["waits"])
            return
        self._requests = [request for request in self._requests if request.body["id"] > answer["id"]]
        is_overtaken = self._shards is None and self._requests and answer.get("gone")  # newer snapshots have its memory
        self._failure, self._is_stuck = None if is_overtaken else answer.get("error"), False
        if self._failure is not None:
            log.error("nebula: step %d is not published to %s: %s", answer["step"], config.shown(self._path), self._failure)

    def _forget_maker(self) -> None:
        maker, self._maker, self._rest = self._maker, None, b""
        for pipe in (maker.stdin, maker.stdout) if maker is not None else ():
            with contextlib.suppress(OSError), without_sigpipe():
                pipe.close()  # type: ignore[union-attr]
        if maker is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                maker.wait(5.0)

    def _after_fork(self) -> None:
        """Closes the pipes in a forked child: otherwise the maker would not notice the end of the trainer before that of a data loader.

        What the parent's maker has got, it makes: a child that closes the publisher at its end does not wait for that.
        """
        self._lock, self._requests, self._failure = threading.Lock(), [], None
        maker, self._maker = self._maker, None
        for pipe in (maker.stdin, maker.stdout) if maker is not None else ():
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    # -- the weights

    def _parts(self) -> list[Any]:
        """Returns the parts of the safetensors file of the present values."""
        from ..integrations.redirect import safetensors_parts

        state = self._weights()
        if self._shards is not None or shards.is_sharded(state):
            return safetensors_parts(self._as_published(self._of_shards(state)))
        self._is_whole = True
        state, left_out = _without_ties(self._as_published(state))
        return safetensors_parts(state, {"format": "pt", **left_out})

    def _of_shards(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the tensors that this rank publishes of a state with DTensors. The first time it agrees with the other ranks on a number."""
        if self._shards is None and (self._is_whole or ranks.store() is None):
            raise NebulaConfigError(
                "DTensors are published by all ranks of a process group, from the first publication on: call "
                "torch.distributed.init_process_group() before, or publish the full_tensor() of each"
            )
        place = ranks.current()
        found = shards.Shards(state, self._dtype, place.rank)
        about = {"head": base64.b64encode(found.head).decode(), "size": found.size, "parts": found.parts}
        if self._shards is None:
            self._turn = self._turn or shards.next_turn(self._path)  # ranks that call again ask for the same number
            first, run = shards.first_number(self._path, self._turn)
            self._shards = {**about, "rank": place.rank, "world": place.world, "first": first}
            self._place = {
                "RANK": str(place.rank), "WORLD_SIZE": str(place.world), "LOCAL_RANK": str(place.local_rank),
                "LOCAL_WORLD_SIZE": str(place.local_world), "NEBULA_RUN": f"{ranks.run(place)}-{run}",
            }  # fmt: skip
        elif any(self._shards[key] != value for key, value in about.items()):
            raise NebulaConfigError("the names, shapes or shards of the weights have changed: make another Publisher")
        return found.local

    def _as_published(self, state: dict[str, Any]) -> dict[str, Any]:
        """Casts what is to be cast, into buffers that stay. Tied weights stay tied."""
        result: dict[str, Any] = {}
        first: dict[Any, str] = {}
        for name, value in state.items():
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
    """Publishes a module's weights, with one ``Publisher`` per path that lives until the program ends.

    options: those of ``Publisher``. Options that a later call does not give stay as they are; if it gives another value, another
    ``Publisher`` takes the place of the first one, which completes its last publication.
    """
    key = config.clean_path(os.fspath(path)) or ""
    known, publisher, given = _publishers.get(key, (None, None, {}))
    wanted = {**given, **options} if known is model else options
    if publisher is None or known is not model or wanted != given:
        if publisher is not None:
            del _publishers[key]
            publisher.close()
        publisher = Publisher(model, path, **wanted)
        _publishers[key] = (model, publisher, wanted)
    return publisher.publish(step)


_publishers: dict[str, tuple[Any, Publisher, dict[str, Any]]] = {}
_living: weakref.WeakSet[Publisher] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_living):
        one._after_fork()
    _publishers.clear()


os.register_at_fork(after_in_child=_after_fork)


def _named(weights: Any) -> Any:
    """Returns a function that gives the tensors by name."""
    if hasattr(weights, "state_dict") and callable(weights.state_dict):
        return lambda: {name: value for name, value in _state_of(weights).items() if hasattr(value, "data_ptr")}
    if isinstance(weights, Mapping):
        return lambda: dict(weights)
    if callable(weights):
        return lambda: dict(weights())
    if isinstance(weights, Iterable):
        pairs = dict(weights)
        return lambda: pairs
    raise NebulaConfigError(f"Publisher({type(weights).__name__}): give a module, a dict of tensors, pairs (name, tensor), or a function")


def _state_of(module: Any) -> Mapping[str, Any]:
    """Returns the state with the parameters themselves, by which ties of DTensors are found. A module's own state_dict may lack that option."""
    try:
        return module.state_dict(keep_vars=True)  # type: ignore[no-any-return]
    except TypeError:
        return module.state_dict()  # type: ignore[no-any-return]


def _read_files(files: str | os.PathLike[str] | Mapping[str, bytes] | None, weights_name: str) -> dict[str, bytes]:
    """Returns the files beside the weights. Of a directory all plain files but weights."""
    if files is None:
        return {}
    if isinstance(files, Mapping):
        found = {name: bytes(data) for name, data in files.items()}
    else:
        weights = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json", ".bin.index.json")
        listed = [entry for entry in os.scandir(files) if entry.is_file() and entry.name != weights_name and not entry.name.endswith(weights)]
        found = {entry.name: Path(entry.path).read_bytes() for entry in listed}
    for name in found:
        if not name or "/" in name or name.startswith("."):
            raise NebulaConfigError(f"Publisher(files=...): {name!r} is not the plain name of a file")
        if name == weights_name:
            raise NebulaConfigError(f"Publisher(files=...): {name!r} is the name of the weights' file")
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
