"""The background process of a Publisher: compares each snapshot with the last publication, and writes what has changed.

It reads its settings and then one request per line from the trainer, and answers each with a line. When the trainer has closed the pipe,
or has died, it completes the newest request and ends.
"""

from __future__ import annotations

import base64
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
from ..errors import NebulaConfigError, NebulaError, NebulaNotFound, NebulaTimeout
from ..reader import Reader
from .publication import DELTA, EXTRA, HEAD, PARTS, WEIGHTS, About, Layout, next_number, number_of, of_rank, tag_of

log = logging.getLogger("nebulaml")

NICENESS = 10
DENSE = 2  # a delta of more than 1/DENSE of the bytes is no gain
CHAIN = 2  # after deltas of more than CHAIN times the bytes of the whole one, a whole one follows: storage and late followers have to take them
CHAINS = 2  # whole publications that stay, with the deltas after them
LIVE_S = 300.0  # the snapshot of a living trainer is there after this time
ORPHAN_S = 10.0  # and that of a dead one: no process copies them now, but the agent may have to start
POLL_S = 0.002
RANKS_S = 20.0  # of a publication of shards: the other ranks have written theirs so long after this one
LOOK_S = 0.5  # between looks at whether the agent still has the snapshot
_UNBOUND = (1 << 64) - 1


class Gone(NebulaError):
    """The snapshot is not in memory: the trainer has not copied it, or newer ones have its memory."""


class Base:
    """The last publication, in the memory where the trainer's snapshot lies."""

    def __init__(self, about: About, live: Checkpoint, layout: Layout, stack: contextlib.ExitStack, data: memoryview) -> None:
        self.about, self.live, self.layout, self.stack, self.data = about, live, layout, stack, data


class Maker:
    """Makes publications, one after the other."""

    def __init__(self, path: str, name: str, full_every: int, files: dict[str, bytes], world: int = 1) -> None:
        self._name, self._full_every, self._files = name, full_every, files
        self._session = Session("", world=world, on_error="raise")._kept_in(path, world)
        memory = Engine(is_reader=True)
        memory.configure(persistent_storage_path="", job="", world=1, on_error="raise")
        memory.session(patient=True)
        self._memory = Session._of(memory)
        self._base: Base | None = None
        self._chain = 0  # bytes of the deltas since the last whole publication
        self._begin(path)

    def _begin(self, path: str) -> None:
        """Reads what the path has. It raises NebulaConfigError while the maker of a trainer that has died completes its last publication."""
        self._kept = self._published()
        self._next = 0  # it has no number yet
        self._wholes = self._last_whole()

    def _published(self) -> list[int]:
        """Returns the numbers of the path's publications, whoever has made them."""
        return sorted(number for row in self._session.checkpoints() if (number := number_of(row.tag)) is not None)

    def _last_whole(self) -> list[int]:
        """Returns the whole publication that the last run's newest one builds on: a follower may be reading them."""
        with contextlib.suppress(NebulaError):  # a damaged one is no reason not to publish
            newest = self._session.get_checkpoint(tag_of(self._kept[-1])) if self._kept else None
            about = About.read(newest.metadata) if newest is not None else None
            return [about.first] if about is not None else []
        return []

    def publish(self, request: dict[str, Any], is_over: Callable[[], bool]) -> None:
        """Publishes a snapshot of the trainer's memory. Returns when that is durable. is_over: whether the trainer has ended."""
        live, step = self._snapshot(request["tag"], is_over), request["step"]
        stack = contextlib.ExitStack()
        try:
            data = stack.enter_context(live.view(WEIGHTS))
            layout = self._layout(data)
            if self._base is None or not is_over():  # the last one of a trainer that has died comes before those of the next run
                self._look()
            made = self._delta(step, layout, data) or self._whole(step, layout, data)
            about, layout = made
        except BaseException:
            stack.close()
            self._forget_base()  # the next one is whole
            raise
        self._forget_base()
        self._base = Base(about, live, layout, stack, data)
        self._remove(about)

    def _snapshot(self, tag: str, is_over: Callable[[], bool]) -> Checkpoint:
        begun, end = time.monotonic(), math.inf
        seen = looked = begun
        while (found := self._memory.get_checkpoint(tag)) is None:
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                seen = now if any(row.tag == tag and row.state != "failed" for row in self._memory.checkpoints()) else seen
            end = min(end, now + ORPHAN_S if is_over() else begun + LIVE_S)
            if now > end or now - seen > ORPHAN_S:
                raise Gone("the trainer has not copied its values")
            time.sleep(POLL_S)
        return found

    def _layout(self, data: memoryview) -> Layout:
        return Layout.of(data)

    def _delta(self, step: int, layout: Layout, data: memoryview) -> tuple[About, Layout] | None:
        base = self._base
        if base is None or base.layout.head != layout.head or len(base.data) != len(data):
            return None
        if self._next - base.about.first >= self._full_every or self._chain > CHAIN * len(data):
            return None
        delta, parts = _nebula.delta_make(base.data, data, base.layout.parts, len(data) // DENSE)
        if delta is None:
            return None
        about = About(self._next, step, base.about.first, _nebula.delta_state_sum(parts), self._name)
        self._write(about, {DELTA: delta})
        self._chain += len(delta)
        return about, Layout(layout.head, parts)

    def _whole(self, step: int, layout: Layout, data: memoryview) -> tuple[About, Layout]:
        parts = _nebula.delta_sums(data, layout.parts)
        about = About(self._next, step, self._next, _nebula.delta_state_sum(parts), self._name)
        self._write(about, {WEIGHTS: data, **{EXTRA + name: content for name, content in self._files.items()}})
        self._chain = 0
        return about, Layout(layout.head, parts)

    def _look(self) -> None:
        """Finds a number, or raises NebulaError if another process has published to the path since this one has found its own."""
        self._kept = self._published()
        newest = self._kept[-1] if self._kept else 0
        if not self._next:
            self._next = next_number(self._kept)
        elif newest >= self._next:
            raise NebulaError(
                f"another process has made publication {newest} of this path since this publisher's first one. One process publishes to a "
                "path: to go on with this one, close it and make another Publisher"
            )

    def _write(self, about: About, files: dict[str, Any]) -> None:
        self._next = about.number + 1  # also after a failure: a subscriber may have seen this number
        with self._session.checkpoint(tag_of(about.number), -2 if about.ranks else None, metadata=about.stored()) as checkpoint:
            for name, content in files.items():
                checkpoint.save_bytes(name, content)
        self._await(checkpoint)
        self._kept.append(about.number)

    def _await(self, checkpoint: Checkpoint) -> None:
        checkpoint.wait("durable")

    def _forget_base(self) -> None:
        if self._base is not None:
            self._base.stack.close()
        self._base = None

    def _remove(self, about: About) -> None:
        """Removes publications that no follower needs: those before the last CHAINS whole ones."""
        if about.number != about.first:
            return
        self._wholes = [*self._wholes, about.number][-CHAINS:]
        self._remove_before(self._wholes[0])

    def _remove_before(self, first: int) -> None:
        for number in [number for number in self._kept if number < first]:
            try:
                with contextlib.suppress(NebulaNotFound):
                    self._session._engine.session().remove(tag_of(number))
                self._kept.remove(number)
            except NebulaError as failure:
                log.info("nebula: the publication %d is not removed yet: %s", number, failure)  # mostly: a follower reads it


class ShardMaker(Maker):
    """The maker of one rank of a job whose ranks publish their shards. All ranks make each publication: the engine commits it then.

    ``shards``: rank, world; first: the number of the publisher's first publication; head: the header of the whole file; size: its bytes;
    parts: ``Shards.parts``.
    """

    def __init__(self, path: str, name: str, full_every: int, files: dict[str, bytes], shards: dict[str, Any]) -> None:
        self._shards, self._rank = shards, int(shards["rank"])
        self._head = base64.b64decode(shards["head"])
        super().__init__(path, name, full_every, files, world=0)

    def _begin(self, path: str) -> None:
        self._session._engine.session(patient=True)
        self._kept = []
        if self._rank == 0:
            with Reader(path) as reader:
                self._kept = sorted(number for row in reader.versions() if (number := number_of(row.tag)) is not None)

    def publish(self, request: dict[str, Any], is_over: Callable[[], bool]) -> None:
        self._next = request["number"]
        try:
            if not request["tag"]:
                self._forget_base()
                raise NebulaError(request.get("why", "it could not take its values"))
            super().publish(request, is_over)
        except NebulaTimeout:
            raise  # the other ranks may still come to it
        except Exception as failure:  # the other ranks must not wait for this one's part
            with contextlib.suppress(NebulaError), self._session.checkpoint(tag_of(request["number"]), -2) as checkpoint:
                checkpoint.save_bytes(of_rank(DELTA, self._rank), b"")
                raise NebulaError(f"rank {self._rank} does not publish: {failure}") from failure
            raise

    def _look(self) -> None:
        """The request has the number."""

    def _layout(self, data: memoryview) -> Layout:
        return Layout.of_shards(data, self._shards["parts"])

    def _about(self, step: int) -> About:
        # all ranks write whole shards at the publisher's first number and at each multiple of full_every
        first = max(self._shards["first"], self._next - self._next % self._full_every)
        return About(self._next, step, first, 0, self._name, self._shards["world"])

    def _delta(self, step: int, layout: Layout, data: memoryview) -> tuple[About, Layout] | None:
        base, about = self._base, self._about(step)
        if base is None or about.first == about.number or base.layout.head != layout.head:
            return None
        delta, parts = _nebula.delta_make(base.data, data, base.layout.parts, _UNBOUND, self._shards["size"])
        self._write(about, {of_rank(DELTA, self._rank): delta})
        return about, Layout(layout.head, parts)

    def _whole(self, step: int, layout: Layout, data: memoryview) -> tuple[About, Layout]:
        parts = _nebula.delta_sums(data, layout.parts)
        files: dict[str, Any] = {of_rank(WEIGHTS, self._rank): data, of_rank(PARTS, self._rank): json.dumps(parts).encode()}
        if self._rank == 0:
            files |= {HEAD: self._head, **{EXTRA + name: content for name, content in self._files.items()}}
        about = self._about(step)
        self._write(about, files)
        return about, Layout(layout.head, parts)

    def _await(self, checkpoint: Checkpoint) -> None:
        """Waits longer than RANKS_S only if all ranks have written their part: after the death of a maker its rank may not come to this one."""
        with contextlib.suppress(NebulaTimeout):
            checkpoint.wait("committed", RANKS_S)
        if checkpoint.state == "captured":
            raise NebulaTimeout(f"other ranks have not written their shards {RANKS_S:.0f} s after this one")
        checkpoint.wait("durable")

    def _remove(self, about: About) -> None:
        if self._rank == 0 and about.number == about.first:
            self._remove_before(about.number - (CHAINS - 1) * self._full_every)


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
        shards = json.loads(_exactly(start, about["shards"])) if about["shards"] else None
    maker: Maker | None = None
    failed = False
    for requests in _requests(pipe):
        skipped = [] if shards else requests[:-1]  # with shards every rank makes every publication
        for request in skipped[-1:]:  # it answers those before it as well
            _answer({**request, "skipped": True})
        for request in requests[len(skipped) :]:
            try:
                maker = maker or _begin(about, files, shards)
                maker.publish(request, lambda: _is_closed(pipe))
                failed = False
            except Exception as failure:
                failed = True
                request = {**request, "error": str(failure) or type(failure).__name__, "gone": isinstance(failure, Gone)}
            _answer(request)
    return int(failed)


def _begin(about: dict[str, Any], files: dict[str, bytes], shards: dict[str, Any] | None) -> Maker:
    """Makes the Maker. It waits while that of a trainer that has died completes its last publication, and tells the trainer so."""
    end, is_told = time.monotonic() + LIVE_S, False
    while True:
        try:
            if shards:
                return ShardMaker(about["path"], about["name"], about["full_every"], files, shards)
            return Maker(about["path"], about["name"], about["full_every"], files)
        except NebulaConfigError as failure:
            if time.monotonic() > end:
                raise
            if not is_told:
                _answer({"waits": f"for up to {LIVE_S:.0f} s: {failure}"})
            is_told = True
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
