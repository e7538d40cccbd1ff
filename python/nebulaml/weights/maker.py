"""The background process of a Publisher: compares each snapshot with the last publication, and writes what has changed.

It reads its settings and then one request per line from the trainer, and answers each with a line. When the trainer has closed the pipe,
or has died, it completes the newest request and ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from .. import _nebula
from .._session.engine import Engine
from .._session.session import Session
from ..checkpoint import Checkpoint
from ..errors import NebulaConfigError, NebulaError, NebulaNotFound
from .publication import DELTA, EXTRA, WEIGHTS, About, Layout, number_of, tag_of

log = logging.getLogger("nebulaml")

NICENESS = 10
DENSE = 2  # a delta of more than 1/DENSE of the bytes is no gain
CHAINS = 2  # whole publications that stay, with the deltas after them
LIVE_S = 300.0  # the snapshot of a living trainer is there after this time
ORPHAN_S = 10.0  # and that of a dead one: no process copies them now, but the agent may have to start
POLL_S = 0.002


class Base:
    """The last publication, in the memory where the trainer's snapshot lies."""

    def __init__(self, about: About, live: Checkpoint, layout: Layout, stack: contextlib.ExitStack, data: memoryview) -> None:
        self.about, self.live, self.layout, self.stack, self.data = about, live, layout, stack, data


class Maker:
    """Makes publications, one after the other."""

    def __init__(self, path: str, name: str, full_every: int, files: dict[str, bytes]) -> None:
        self._name, self._full_every, self._files = name, full_every, files
        self._session = Session("", world=1, on_error="raise")._alone_in(path)
        self._session._engine.settings()
        memory = Engine(is_reader=True)
        memory.configure(persistent_storage_path="", job="", world=1, on_error="raise")
        memory.session(patient=True)
        self._memory = Session._of(memory)
        self._base: Base | None = None
        numbers = [number for row in self._session.checkpoints() if (number := number_of(row.tag)) is not None]
        # in an empty path not 1: there may be followers of publications that were removed
        self._next = max(numbers) + 1 if numbers else int(time.time())
        self._kept = sorted(numbers)
        self._wholes = self._last_whole()

    def _last_whole(self) -> list[int]:
        """Returns the whole publication that the last run's newest one builds on: a follower may be reading them."""
        with contextlib.suppress(NebulaError):  # a damaged one is no reason not to publish
            newest = self._session.get_checkpoint(tag_of(self._kept[-1])) if self._kept else None
            about = About.read(newest.metadata) if newest is not None else None
            return [about.first] if about is not None else []
        return []

    def publish(self, tag: str, step: int, is_over: Callable[[], bool]) -> None:
        """Publishes the snapshot `tag` of the trainer's memory. Returns when that is durable. is_over: whether the trainer has ended."""
        live = self._snapshot(tag, is_over)
        stack = contextlib.ExitStack()
        try:
            data = stack.enter_context(live.view(WEIGHTS))
            layout = Layout.of(data)
            made = self._delta(step, layout, data) or self._whole(step, layout, data)
            about, layout = made
        except BaseException:
            stack.close()
            self._forget_base()  # the next one is whole
            raise
        self._forget_base()
        self._base = Base(about, live, layout, stack, data)
        self._next += 1
        self._remove(about)

    def _snapshot(self, tag: str, is_over: Callable[[], bool]) -> Checkpoint:
        begun, end = time.monotonic(), math.inf
        while (found := self._memory.get_checkpoint(tag)) is None:
            now = time.monotonic()
            end = min(end, now + ORPHAN_S if is_over() else begun + LIVE_S)
            if now > end:
                raise NebulaError("the trainer has not copied its values")
            time.sleep(POLL_S)
        return found

    def _delta(self, step: int, layout: Layout, data: memoryview) -> tuple[About, Layout] | None:
        base = self._base
        if base is None or base.layout.head != layout.head or len(base.data) != len(data):
            return None
        if self._next - base.about.first >= self._full_every:
            return None
        delta, parts = _nebula.delta_make(base.data, data, base.layout.parts, len(data) // DENSE)
        if delta is None:
            return None
        about = About(self._next, step, base.about.first, _nebula.delta_state_sum(parts), self._name)
        self._write(about, {DELTA: delta})
        return about, Layout(layout.head, parts)

    def _whole(self, step: int, layout: Layout, data: memoryview) -> tuple[About, Layout]:
        parts = _nebula.delta_sums(data, layout.parts)
        about = About(self._next, step, self._next, _nebula.delta_state_sum(parts), self._name)
        self._write(about, {WEIGHTS: data, **{EXTRA + name: content for name, content in self._files.items()}})
        return about, Layout(layout.head, parts)

    def _write(self, about: About, files: dict[str, Any]) -> None:
        with self._session.checkpoint(tag_of(about.number), metadata=about.stored()) as checkpoint:
            for name, content in files.items():
                checkpoint.save_bytes(name, content)
        checkpoint.wait("durable")
        self._kept.append(about.number)

    def _forget_base(self) -> None:
        if self._base is not None:
            self._base.stack.close()
        self._base = None

    def _remove(self, about: About) -> None:
        """Removes publications that no follower needs: those before the last CHAINS whole ones."""
        if about.number != about.first:
            return
        self._wholes = [*self._wholes, about.number][-CHAINS:]
        for number in [number for number in self._kept if number < self._wholes[0]]:
            try:
                with contextlib.suppress(NebulaNotFound):
                    self._session._engine.session().remove(tag_of(number))
                self._kept.remove(number)
            except NebulaError as failure:
                log.info("nebula: the publication %d is not removed yet: %s", number, failure)  # mostly: a follower reads it


def _requests(pipe: BinaryIO) -> Iterator[list[dict[str, Any]]]:
    """Yields all requests that have come since the last look, until the trainer has ended."""
    rest = b""
    descriptor = pipe.fileno()
    while got := os.read(descriptor, 1 << 16):
        while select.select([descriptor], [], [], 0)[0] and (more := os.read(descriptor, 1 << 16)):
            got += more
        *lines, rest = (rest + got).split(b"\n")
        if lines:
            yield [json.loads(line) for line in lines]


def _is_closed(pipe: BinaryIO) -> bool:
    """Whether the trainer has closed the pipe, or has died."""
    look = select.poll()
    look.register(pipe, 0)
    return any(found & select.POLLHUP for _, found in look.poll(0))


def main() -> int:
    """Serves one Publisher. Returns 1 if the newest publication failed."""
    os.nice(NICENESS)
    pipe = os.fdopen(os.dup(0), "rb", buffering=0)
    with os.fdopen(os.dup(0), "rb", buffering=0) as start:
        about = json.loads(_line(start))
        files = {name: _exactly(start, int.from_bytes(_exactly(start, 8), "little")) for name in about["files"]}
    maker: Maker | None = None
    failed = False
    for requests in _requests(pipe):
        *skipped, newest = requests
        for request in skipped:
            _answer({**request, "skipped": True})
        try:
            maker = maker or _begin(about, files)
            maker.publish(newest["tag"], newest["step"], lambda: _is_closed(pipe))
            failed = False
        except Exception as failure:
            failed = True
            newest = {**newest, "error": str(failure) or type(failure).__name__}
        _answer(newest)
    return int(failed)


def _begin(about: dict[str, Any], files: dict[str, bytes]) -> Maker:
    """Makes the Maker. It waits while that of a trainer that has died completes its last publication."""
    end = time.monotonic() + LIVE_S
    while True:
        try:
            return Maker(about["path"], about["name"], about["full_every"], files)
        except NebulaConfigError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _line(pipe: BinaryIO) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        got = pipe.read(1)
        if not got:
            sys.exit(0)
        line += got
    return line


def _exactly(pipe: BinaryIO, size: int) -> bytes:
    data = b""
    while len(data) < size:
        got = pipe.read(size - len(data))
        if not got:
            sys.exit(0)
        data += got
    return data


def _answer(answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the trainer has died
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
