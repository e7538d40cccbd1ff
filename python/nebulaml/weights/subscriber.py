"""Subscriber: the published weights of a storage path, in a directory in memory that engines read as any model directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from .. import _nebula
from ..checkpoint import Checkpoint
from ..errors import NebulaConfigError, NebulaCorrupt, NebulaError
from ..reader import LOADABLE, Reader
from .publication import (
    DELTA,
    EXTRA,
    HEAD,
    PARTS,
    WEIGHTS,
    About,
    Layout,
    number_of,
    of_rank,
    size_of,
    tag_of,
    tensors_of,
)

__all__ = ["Published", "Subscriber"]

log = logging.getLogger("nebulaml")

PIECE = 64 << 20  # bytes that are copied at once
OWN = "nebula-subscriber-"  # begins the names of directories that subscribers make themselves
LOCK = ".lock"  # in a directory that the program names: it says that the names below are a subscriber's
NAMES = ("0", "1", "current", "latest", "weight_v*")  # what a subscriber replaces in its directory


def _made_directory() -> tuple[Path, int]:
    """Makes a directory in memory. Returns it and its lock, and removes those of subscribers that were killed."""
    memory = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    for left in memory.glob(f"{OWN}*"):
        with contextlib.suppress(OSError), _opened(left) as lock:  # another user's, or one that is in use
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    while True:
        made = Path(tempfile.mkdtemp(prefix=OWN, dir=memory))
        with contextlib.suppress(FileNotFoundError), _opened(made) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if made.exists():  # else another subscriber took it for one that was left
                return made, os.dup(lock)


def _check_owned(directory: Path) -> None:
    """Raises if a directory that the program names holds files of another program, which a subscriber would remove."""
    if os.path.lexists(directory / LOCK):
        return
    found = sorted(entry.name for entry in directory.iterdir() if any(fnmatch.fnmatchcase(entry.name, name) for name in NAMES))
    if found:
        raise NebulaConfigError(
            f"Subscriber(directory={os.fspath(directory)!r}): no subscriber has made {', '.join(found[:5])} there, and it would replace "
            "these names. Give it a directory of its own"
        )


# The locks of the named directories of this process's subscribers, by process, device and inode.
_taken: weakref.WeakValueDictionary[tuple[int, int, int], _Lock] = weakref.WeakValueDictionary()


class _Lock:
    """The lock of a directory that the program names. Forked children do not have it. That of a forgotten subscriber ends with the process."""

    def __init__(self, directory: Path) -> None:
        self._descriptor: int | None = None
        place = os.stat(directory)
        self._key = (os.getpid(), place.st_dev, place.st_ino)
        if _taken.setdefault(self._key, self) is not self:  # the file is not opened: to close it again would end the lock of the other one
            raise self._refusal(directory, "this process has")
        try:
            self._descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            del _taken[self._key]
            raise
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failure:
            if failure.errno in (errno.EACCES, errno.EAGAIN):
                self.close()
                raise self._refusal(directory, "another process has") from None
            log.debug("nebula: %s cannot be locked: %s", directory, failure)  # such as a file system without locks: the program sees to it

    @staticmethod
    def _refusal(directory: Path, owner: str) -> NebulaConfigError:
        return NebulaConfigError(
            f"Subscriber(directory={os.fspath(directory)!r}): {owner} a subscriber there. Give each one a directory of its own"
        )

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
            _taken.pop(self._key, None)


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


class Slot:
    """One copy of the weights, in a directory. ``about``: the publication that it has; None: none, or a half changed one."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.about, self.total = directory, None, 0
        self.ranks: dict[int, tuple[int, int]] = {}  # of shards: the number of the publication that a rank's bytes are of, and their sum
        self._memory: mmap.mmap | None = None  # of the weights' file, with its pages: else each delta would take a fault for each page
        self._file: tuple[int, int] | None = None  # which file that is
        directory.mkdir()

    about: About | None

    def memory(self, name: str) -> mmap.mmap:
        """Returns the bytes of the weights' file. Raises OSError if it is not there."""
        with open(self.directory / name, "r+b") as file:
            about = os.fstat(file.fileno())
            if self._memory is None or self._file != (about.st_ino, about.st_size):
                self._memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
                self._file = (about.st_ino, about.st_size)
        return self._memory

    def forget(self) -> None:
        """Empties the directory. Tensors that lie in its file stay valid."""
        self.about = self._memory = self._file = None
        self.ranks = {}
        for entry in self.directory.iterdir():
            _remove(entry)

    def copy_to(self, other: Slot) -> None:
        """Copies the files. A publication has no directories and links: an engine has made those."""
        for entry in self.directory.iterdir():
            if entry.is_file() and not entry.is_symlink():
                shutil.copyfile(entry, other.directory / entry.name)


class Link(NamedTuple):
    """A publication of a chain."""

    number: int
    checkpoint: Checkpoint


class Shard(NamedTuple):
    """An entry of a rank's list of parts."""

    offset: int  # in the whole file
    size: int
    width: int
    sum: int
    begin: int  # in the file of the rank's shards


def _cover(parts: list[Shard], memory: mmap.mmap) -> bool:
    """Whether each byte after the header of a safetensors file belongs to one part."""
    at = 8 + int.from_bytes(memory[:8], "little")
    for part in sorted(parts):
        if part.size and part.offset != at:
            return False
        at += part.size
    return at == len(memory)


def _sequence(found: Checkpoint) -> int:
    """Returns what two writings of one publication differ in. Raises NebulaError if it was lost."""
    report = found._report()
    if not report.get("sequence"):
        raise NebulaError(report.get("error") or f"publication {found.tag!r} is not complete")
    return int(report["sequence"])


class Published:
    """Weights that are staged: whole and verified. They become the current ones by ``commit()``."""

    def __init__(self, owner: Subscriber, slot: Slot, about: About, read: int) -> None:
        self._owner, self._slot, self._about = owner, slot, about
        self.bytes_read = read  # of the publication's files

    def __repr__(self) -> str:
        return f"<nebulaml.Published {self.number}, step {self.step}>"

    @property
    def number(self) -> int:
        """The number of the publication. It grows with each one."""
        return self._about.number

    @property
    def step(self) -> int:
        """The trainer's step. After a restart of the trainer it may be smaller than before."""
        return self._about.step

    @property
    def directory(self) -> Path:
        """The directory with the weights' file and the files beside it. After ``commit`` it stays until the next but one ``prepare``."""
        return self._slot.directory

    def tensors(self) -> dict[str, Any]:
        """Returns the tensors by name, without a copy. After ``commit`` they stay as they are until the next but one ``prepare``.

        The program may change them: that changes neither the directory nor the next publication.
        """
        return tensors_of(self.directory / self._about.name)

    def commit(self) -> Path:
        """Makes ``Subscriber.current`` lead to these weights, by one rename. Returns that path."""
        return self._owner._commit(self._slot, self._about)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class Subscriber:
    """Follows what a ``Publisher`` publishes to a path, on the same machine or on another one.

    path: the publisher's path.
    directory: where the weights lie, best in memory. Each subscriber needs one of its own. None: a new directory in /dev/shm, which
        ``close()`` removes, or the next such subscriber of this machine if this one is killed. It holds two
        copies of the weights, one of which is current while the next one is staged, and the link ``current``.
    poll: seconds between looks at storage. A publication of this machine is noticed at once.
    versions: also keep a link ``weight_v<number>`` to the current weights, and its name in the file ``latest``, as slime's disk weight sync and
        stitch's layout of that name have them. Each is a whole version for their receivers (THUDM/slime pull request 2181).

    Each publication is whole, verified and durable before it is shown. A subscriber never goes back to an earlier number. After any doubt it
    reads the whole weights again. Trainer, agent and storage may be away at any time: then it waits.
    """

    def __init__(
        self, path: str | os.PathLike[str], directory: str | os.PathLike[str] | None = None, *, poll: float = 1.0, versions: bool = False
    ) -> None:
        if not poll > 0:
            raise NebulaConfigError(f"Subscriber(poll={poll!r}): give seconds of more than 0")
        self._reader = Reader(path)
        self._poll, self._versions, self._process = poll, versions, os.getpid()
        self._lock: int | _Lock | None = None  # of a directory that it has made itself, or of a named one
        try:
            if directory is None:
                self._root, self._lock = _made_directory()
            else:
                self._root = Path(directory).absolute()
                self._root.mkdir(parents=True, exist_ok=True)
                _check_owned(self._root)
                self._lock = _Lock(self._root)
        except BaseException:
            self._reader.close()
            raise
        for name in ("0", "1"):
            shutil.rmtree(self._root / name, ignore_errors=True)
        self._slots = [Slot(self._root / "0"), Slot(self._root / "1")]
        self._current: Slot | None = None
        self._staged: Slot | None = None
        self._newest = 0  # number that was staged
        self._search = self._reader._search()  # remembers the checkpoint that it found last
        self._staging = (0, 0)  # number and sequence of the publication that was staged last, durable or not
        self._deltas: dict[tuple[int, int], bytes] = {}  # by number and rank; the other copy still lacks them
        self._bytes = 0  # that were read of publications
        self._trouble, self._trouble_until, self._trouble_pause = "", 0.0, 1.0
        for link in (self.current, *self._root.glob("weight_v*"), self._root / "latest"):
            link.unlink(missing_ok=True)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def current(self) -> Path:
        """The link to the directory of the weights that were committed last."""
        return self._root / "current"

    def close(self) -> None:
        """Ends the subscriber. It removes a directory that it has made itself, but not in a forked child: the parent's engine reads it."""
        self._reader.close()
        lock, self._lock = self._lock, None
        if isinstance(lock, _Lock):
            lock.close()
        elif lock is not None:
            if os.getpid() == self._process:
                shutil.rmtree(self._root, ignore_errors=True)
            os.close(lock)

    def follow(self, swap: Callable[[Published], object] | None = None, timeout: float | None = None) -> Iterator[Published]:
        """Yields the newest publication, then each newer one, committed. It skips those that were replaced meanwhile.

        swap: called with each one before it is yielded, for an engine that has to be paused only while it changes its weights.
        timeout: ends the iteration if nothing has come for so many seconds. None: it never ends.
        """
        while (published := self.prepare(timeout)) is not None:
            published.commit()
            if swap is not None:
                swap(published)
            yield published

    def prepare(self, timeout: float | None = None) -> Published | None:
        """Waits for a publication that is newer than the last one, and stages it. None: none has come for so many seconds.

        timeout: 0 looks once. None: it waits for ever. It changes the copy that is not current: an engine may go on with the current one.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            before, left = self._search.last, _left(deadline)
            try:
                for found in self._reader._follow(self._search, self._poll, left):
                    last, self._search.last = self._search.last, before  # as long as it is not staged, a look finds it
                    about = About.read(found.metadata)
                    staged = None
                    if about is not None and about.number > self._newest:
                        staged = self._stage(*self._greatest(found, about), _left(deadline))
                    before = self._search.last = last
                    if staged is not None:
                        return staged
            except (NebulaError, OSError) as failure:  # it may have been replaced, or storage is away, or the directory is full
                self._report(failure)
                left = _left(deadline)
                time.sleep(min(self._poll, 0.2 if left is None else left))
            if _left(deadline) == 0:
                return None

    def _greatest(self, found: Checkpoint, about: About) -> tuple[Checkpoint, About]:
        """Returns the publication with the greatest number.

        It is not always the newest checkpoint: the background process of a trainer that has died may complete its last publication after
        the first one of the next run.
        """
        number = max(self._numbers(), default=0)
        later = self._reader.get(tag_of(number)) if number > about.number else None
        theirs = About.read(later.metadata) if later is not None else None
        if later is None or theirs is None or theirs.number != number:  # it was removed, or it is no publication
            return found, about
        return later, theirs

    def _numbers(self) -> set[int]:
        """Returns the numbers of the complete publications."""
        return {number_of(row.tag) or 0 for row in self._reader.versions() if row.state in LOADABLE}

    def _report(self, failure: Exception) -> None:
        """Logs a trouble, and the same one again ever more rarely."""
        now = time.monotonic()
        if str(failure) != self._trouble or now >= self._trouble_until:
            self._trouble_pause = 1.0 if str(failure) != self._trouble else min(600.0, 2 * self._trouble_pause)
            self._trouble, self._trouble_until = str(failure), now + self._trouble_pause
            log.warning("nebula: the newest weights cannot be staged yet, the subscriber tries again: %s", failure)

    # -- staging

    def _stage(self, found: Checkpoint, about: About, timeout: float | None) -> Published:
        """Stages a publication while it becomes durable, and waits for that. If that fails, the sums of the next delta decide what the slot is
        good for. Another publication with the same number need not have a delta.
        """
        slot = next(slot for slot in self._slots if slot is not self._current)
        other = next(other for other in self._slots if other is not slot)
        before, staging = self._bytes, (about.number, _sequence(found))
        if self._staging[0] == about.number and self._staging != staging:
            slot.forget()
            self._deltas.clear()
        self._staging = staging
        self._forget_links(slot)
        if about.ranks:
            self._stage_shards(slot, other, found, about)
        else:
            self._stage_whole(slot, other, found, about)
        slot.about = about
        found.wait("durable", timeout)
        if _sequence(found) != staging[1]:
            raise NebulaCorrupt(f"publication {about.number} has been written again")
        self._newest, self._staged = about.number, slot
        have = other.about.number if other.about is not None and other.about.first == about.first else about.number
        self._deltas = {key: data for key, data in self._deltas.items() if key[0] > have}
        return Published(self, slot, about, self._bytes - before)

    def _stage_whole(self, slot: Slot, other: Slot, found: Checkpoint, about: About) -> None:
        """Of a publisher of whole tensors."""
        try:
            if not self._is_on(slot, about):
                self._copy_of(other, slot, about)
            self._advance(slot, found, about)
        except NebulaError:
            self._deltas.clear()  # they may be of another publication with the same number
            self._copy(slot, about)
            self._advance(slot, found, about)
        if slot.total != about.total:
            slot.forget()
            raise NebulaCorrupt(f"the weights of publication {about.number} do not have the sum that it names")

    def _stage_shards(self, slot: Slot, other: Slot, found: Checkpoint, about: About) -> None:
        """Of ranks that publish their shards."""
        try:
            if not slot.ranks and other.ranks and other.about is not None and other.about.name == about.name:
                slot.forget()
                other.copy_to(slot)
                slot.ranks = dict(other.ranks)
            self._bring(slot, found, about)
        except NebulaError:
            slot.forget()
            self._deltas.clear()  # they may be of another publication with the same number
            self._bring(slot, found, about)

    def _bring(self, slot: Slot, found: Checkpoint, about: About) -> None:
        """Brings each rank's bytes to a publication. After an error the slot has nothing."""
        if about.ranks > len(found._all_files()):
            raise NebulaCorrupt(f"publication {about.number} has fewer files than ranks")
        chains, have = self._chains(slot, found, about), slot.ranks
        slot.about, slot.ranks = None, {}
        if have and 0 not in have:
            raise NebulaCorrupt("the file of the weights may be another one")  # so all ranks begin with their whole shards
        is_new, copied = not have, list[Shard]()
        if is_new:
            self._begin_file(slot, [chain[0].checkpoint for chain in chains.values()], about)
        for rank, chain in chains.items():
            if rank not in have:
                link = chain.pop(0)
                total, parts = self._copy_shards(slot, link.checkpoint, rank, about)
                have[rank] = (link.number, total)
                copied += parts
        memory = slot.memory(about.name)
        if is_new and not _cover(copied, memory):
            raise NebulaCorrupt(f"the shards of publication {about.number} are not the whole file")
        for rank, chain in chains.items():
            checkpoints = {link.number: link.checkpoint for link in chain}
            have[rank] = (about.number, self._apply(memory, have[rank][1], checkpoints, checkpoints.__getitem__, rank, of_rank(DELTA, rank)))
        slot.ranks = have

    def _chains(self, slot: Slot, found: Checkpoint, about: About) -> dict[int, list[Link]]:
        """Returns the publications that lead each rank's bytes to this one. A rank that the slot then has not begins with its whole shards."""
        chains: dict[int, list[Link]] = {rank: [] for rank in range(about.ranks)}
        missing, number = set(chains), about.number
        if not slot.ranks.keys() <= chains.keys():
            raise NebulaCorrupt("another number of ranks publishes now")
        while missing := {rank for rank in missing if slot.ranks.get(rank, (0, 0))[0] != number}:
            if number < about.first:
                raise NebulaCorrupt(f"the whole shards that publication {about.number} builds on are not there any more")
            checkpoint = found if number == about.number else self._reader.get(tag_of(number))
            if checkpoint is None:  # it failed, or was removed; and numbers that nobody has used may be many
                there = self._numbers() | {have for have, _ in slot.ranks.values()}
                number = max((one for one in there if one < number), default=0)
                continue
            for rank in missing:
                chains[rank].insert(0, Link(number, checkpoint))
            names = checkpoint._all_files()
            for rank in [rank for rank in missing if of_rank(WEIGHTS, rank) in names]:
                slot.ranks.pop(rank, None)
                missing.remove(rank)
            number -= 1
        return dict(sorted(chains.items()))

    def _copy_shards(self, slot: Slot, checkpoint: Checkpoint, rank: int, about: About) -> tuple[int, list[Shard]]:
        """Copies a rank's whole shards into the slot, and verifies them. Returns their sum."""
        memory = slot.memory(about.name)
        with checkpoint.view(of_rank(WEIGHTS, rank)) as data:
            self._bytes += len(data)
            try:
                parts = [Shard(*part) for part in json.loads(checkpoint.read_bytes(of_rank(PARTS, rank)))]
                for part in parts:
                    if not (part.size >= 0 and 0 <= part.offset <= len(memory) - part.size and 0 <= part.begin <= len(data) - part.size):
                        raise ValueError(f"{part.size} bytes at {part.offset} are beyond the end")
                    memory[part.offset : part.offset + part.size] = data[part.begin : part.begin + part.size]
                here = _nebula.delta_sums(memory, [(*part[:3], 0) for part in parts])
            except (ValueError, TypeError, OverflowError, RecursionError) as failure:
                raise NebulaCorrupt(f"the list of rank {rank}'s shards in {checkpoint.tag!r} is damaged: {failure}") from None
        if [part[3] for part in here] != [part.sum for part in parts]:
            raise NebulaCorrupt(f"the shards of rank {rank} in {checkpoint.tag!r} do not have the sums that it names")
        return _nebula.delta_state_sum(here), parts

    def _begin_file(self, slot: Slot, wholes: list[Checkpoint], about: About) -> None:
        """Makes the file of the whole weights, unless the slot has it, and copies the files beside it. wholes: of each rank."""
        head = wholes[0].read_bytes(HEAD)
        size = size_of(head)
        if size > len(head) + sum(whole._all_files()[of_rank(WEIGHTS, rank)] for rank, whole in enumerate(wholes)):
            raise NebulaCorrupt(f"the header of publication {about.number} names more bytes than its ranks have")
        path = slot.directory / about.name
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            if os.fstat(file.fileno()).st_size == size and file.read(len(head)) == head:
                os.posix_fallocate(file.fileno(), 0, size)  # the last try may have failed at that
                for entry in slot.directory.iterdir():  # another run may publish other files
                    if entry != path:
                        _remove(entry)
                self._copy_extras(slot, wholes[0])
                return
        slot.forget()
        with open(path, "xb") as file:
            file.write(head)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, size)  # a write through a map into a file without the space would be a SIGBUS
        self._copy_extras(slot, wholes[0])

    def _copy_extras(self, slot: Slot, whole: Checkpoint) -> None:
        """Copies the files beside the weights."""
        for name in whole._all_files():
            if name.startswith(EXTRA) and "/" not in name.removeprefix(EXTRA):
                self._write(slot.directory / name.removeprefix(EXTRA), whole.read_bytes(name))

    def _is_on(self, slot: Slot, about: About) -> bool:
        """Whether deltas lead from the slot's publication to this one."""
        return slot.about is not None and slot.about.first == about.first and slot.about.number <= about.number

    def _copy_of(self, other: Slot, slot: Slot, about: About) -> None:
        """Copies the other slot. The sums of the deltas after it verify the copy."""
        if not self._is_on(other, about) or other.about == about:
            raise NebulaCorrupt("no copy of this chain is here")
        slot.forget()
        other.copy_to(slot)
        slot.about, slot.total = other.about, other.total

    def _checkpoint(self, number: int) -> Checkpoint:
        found = self._reader.get(tag_of(number))
        if found is None:
            raise NebulaCorrupt(f"publication {number} is not there any more")
        return found

    def _copy(self, slot: Slot, about: About) -> None:
        """Copies the whole publication that the chain begins with, and verifies it."""
        slot.forget()
        whole = self._checkpoint(about.first)
        first = About.read(whole.metadata)
        if first is None or first.number != about.first:
            raise NebulaCorrupt(f"publication {about.first} is not what the chain begins with")
        with whole.view(WEIGHTS) as data:
            self._bytes += len(data)
            layout = Layout.of(data)
            self._write(slot.directory / first.name, data)
        self._copy_extras(slot, whole)
        slot.total = _nebula.delta_state_sum(_nebula.delta_sums(slot.memory(first.name), layout.parts))
        if slot.total != first.total:
            slot.forget()
            raise NebulaCorrupt(f"the weights of publication {about.first} do not have the sum that it names")
        slot.about = first

    def _write(self, path: Path, data: memoryview | bytes) -> None:
        with open(path, "xb") as file:
            for at in range(0, len(data), PIECE):
                file.write(data[at : at + PIECE])

    def _advance(self, slot: Slot, found: Checkpoint, about: About) -> None:
        """Applies the deltas up to a publication of the slot's chain. After an error the slot has nothing."""
        have = slot.about
        assert have is not None
        slot.about = None
        numbers = range(have.number + 1, about.number + 1)

        def find(number: int) -> Checkpoint:
            return self._checkpoint(number) if number != about.number else found

        slot.total = self._apply(slot.memory(have.name), slot.total, numbers, find, 0, DELTA)
        slot.about = about

    def _apply(
        self, memory: mmap.mmap, total: int, numbers: Iterable[int], find: Callable[[int], Checkpoint], rank: int, name: str
    ) -> int:
        """Applies a rank's deltas, and returns the sum that the state then has. find: returns a publication of `numbers`.

        It keeps deltas for the other copy only while they have fewer bytes than the weights: those of a long chain may have many times more.
        """
        waiting: list[bytes] = []
        for number in numbers:
            if (number, rank) not in self._deltas:
                self._deltas[number, rank] = find(number).read_bytes(name)
                self._bytes += len(self._deltas[number, rank])
            waiting.append(self._deltas[number, rank])
            if sum(map(len, self._deltas.values())) > len(memory):
                total = _nebula.delta_apply(memory, total, waiting)
                waiting.clear()
                self._deltas.clear()
        return _nebula.delta_apply(memory, total, waiting)

    def _commit(self, slot: Slot, about: About) -> Path:
        if self._staged is not slot or slot.about is not about:
            raise NebulaConfigError(f"publication {about.number} is not staged any more: commit each one before the next prepare()")
        if self._versions:
            name = f"weight_v{about.number:06d}"
            self._link(slot, self._root / name)
            text = self._root / "latest.next"
            text.write_text(name)
            text.rename(self._root / "latest")
        self._link(slot, self.current)
        self._current = slot
        return self.current

    def _link(self, slot: Slot, path: Path) -> None:
        link = self._root / "next"
        link.unlink(missing_ok=True)
        link.symlink_to(slot.directory.name)
        link.rename(path)

    def _forget_links(self, slot: Slot) -> None:
        """The directory is about to change: no version leads to it any more."""
        for link in self._root.glob("weight_v*"):
            if os.readlink(link) == slot.directory.name:
                link.unlink()
