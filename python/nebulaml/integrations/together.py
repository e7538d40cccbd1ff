"""On several nodes, all ranks load the same file at a path, or the same version.

Only the node of the rank that saved it knows of a file that has not appeared yet. So each rank first waits until what its own node has saved
there has appeared. Then all ranks compare the file with that of rank 0. All functions but several(), has_others() and key_of() are
collective on several nodes, from_rank_0() wherever there are several ranks.
"""

from __future__ import annotations

import hashlib
import logging
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeVar

from .. import api
from .._session import agree, ranks
from ..errors import NebulaError, NebulaStorageError, NebulaTimeout, from_status
from . import places

__all__ = ["await_all", "find", "flush", "from_rank_0", "has_others", "key_of", "load_file", "of_rank_0", "on_all", "several", "stages"]

log = logging.getLogger("nebulaml")

WAIT_S = 60.0  # for storage, between two collectives: a process group does not wait much longer than 10 minutes
OTHERWISE = "No rank loads it: start the job again"

T = TypeVar("T")


def several() -> bool:
    """True if the process group has ranks on several nodes."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return False
    place = ranks.current()
    return place.world > 1 and place.local_world < place.world


def has_others() -> bool:
    """True if the process group has other ranks."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _of_all(value: T) -> list[T]:
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return [value]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def of_rank_0(value: T) -> T:
    """Returns the value that rank 0 gives."""
    return _of_all(value)[0]


def from_rank_0(look: Callable[[], T], is_rank_0: bool | None = None, broadcast: Callable[[Any], Any] | None = None) -> T:
    """Returns what look() returns on rank 0, which alone calls it. If it fails there, it raises on all ranks: no rank waits for an answer.

    is_rank_0, broadcast: those of a framework. None: those of torch's default process group, if there is one.
    """
    from torch import distributed

    if broadcast is None:
        has_group = has_others()
        is_rank_0, broadcast = not has_group or distributed.get_rank() == 0, _broadcast if has_group else lambda value: value
    answer: Any = None
    failure: Exception | None = None
    if is_rank_0:
        try:
            answer = look()
        except Exception as error:
            failure = error
    problem = None if failure is None else (getattr(failure, "status", NebulaError.status), f"rank 0: {type(failure).__name__}: {failure}")
    answer, problem = broadcast((answer, problem))
    if problem is not None:
        raise failure or from_status(*problem, 0, 0)
    return answer  # type: ignore[no-any-return]


def _broadcast(value: Any) -> Any:
    from torch import distributed

    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def stages(session: api.Session, staging: str, target: str, save: Callable[[], T]) -> T | None:
    """Returns what save() returns, in which a framework writes small files into `staging`. None: storage refuses them, so nothing is saved.

    Rank 0 looks before that, so all ranks save or none. If storage refuses a file later, save() raises if there are several ranks: it may be
    between two collectives.
    """
    reason = from_rank_0(lambda: places.refusal(staging))
    if not reason:
        try:
            return save()
        except OSError as failure:
            if has_others() or not places.is_of_storage(failure):
                raise
            reason = str(failure)

    def refuse() -> None:
        raise NebulaStorageError(f"its files cannot be written: {reason}")

    session._engine.guarded(f"the save of {target}", refuse)
    return None


def await_all(wait: Callable[[float], Any]) -> None:
    """Calls wait(seconds) on each rank until it has returned on all. A failure is logged: what has failed does not appear any more."""
    is_over = False
    while not all(_of_all(is_over)):
        try:
            if not is_over:
                wait(WAIT_S)
            is_over = True
        except NebulaTimeout:
            pass
        except NebulaError as failure:
            log.warning("nebula: the ranks go on with what is in storage, because a later save does not get there: %s", failure)
            is_over = True


def flush(sessions: Sequence[api.Session] = (api.default,)) -> None:
    """Flushes the sessions. When it returns, the saves of all nodes have appeared.

    A flush alone waits for this node's agent, and that of another node may still put the directory in place.
    """
    if several():
        await_all(lambda seconds: [one._await_storage(seconds) for one in sessions])
    for one in sessions:
        one.flush_persistence()


def find(session: api.Session, tag: str | None = None, path: str | None = None) -> api.Checkpoint | None:
    """Returns the version of a tag, without one the newest, the same on all ranks. None: there is none that all ranks can load.

    After a save a search does not wait longer than 5 s for the ranks of other nodes, so ranks may find different versions.
    """
    if not several():
        return session.get_checkpoint(tag, path)
    owner = session._engine
    found, own_key = on_all(lambda: _with_key(session.get_checkpoint(tag, path)))
    keys = _of_all(own_key)
    if all(key == keys[0] for key in keys):
        return found
    own = on_all(lambda: agree.of_all_ranks(owner, path))
    common = agree.choose([agree.Inventory.of(one) for one in _of_all(own)])
    key = next((agree._key(one) for one in common if tag in (None, one["tag"])), None)
    chosen = next((one for one in own if agree._key(one) == key), None)
    result = on_all(lambda: None if chosen is None else session._exactly(chosen, path))
    if found is not None and (result is None or own_key != key):
        log.warning("nebula: this rank would have loaded %s, and not every rank can load it", found.tag)
    return result if result is None or tag is not None else session._newest(result, owner.agreement.passed_over(path, chosen))


def key_of(found: api.Checkpoint) -> tuple[Any, ...]:
    """Returns what a version has in common on all nodes, and another version does not."""
    return agree._key({**found._report(), "tag": found.tag, "shared": found._persist_path is not None})


def _with_key(found: api.Checkpoint | None) -> tuple[api.Checkpoint | None, tuple[Any, ...] | None]:
    return found, None if found is None else key_of(found)


def on_all(look: Callable[[], T], otherwise: str = OTHERWISE) -> T:
    """Returns what look() returns here. If it fails on some rank, it raises on all. otherwise: the end of the error of the other ranks."""
    result: Any = None
    failure: Exception | None = None
    try:
        result = look()
    except Exception as error:
        failure = error
    try:
        _raise_any("" if failure is None else f"{type(failure).__name__}: {failure}", otherwise)
    except NebulaError as of_some_rank:
        raise failure or of_some_rank from None
    return result  # type: ignore[no-any-return]


def load_file(path: str, load: Callable[[], T], is_alone: bool) -> T:
    """Returns load() of the file at the path, the same file on all ranks. Otherwise it raises on all ranks.

    is_alone: load() waits for no other rank, so all ranks learn of a failure in it before they go on.
    """
    here = _fingerprint(path)
    _raise_any(_difference(path, here, of_rank_0(here)))
    result: Any = None
    failure: BaseException | None = None
    try:
        result = load()
    except Exception as error:
        if not is_alone:
            raise
        failure = error
    problem = f"{type(failure).__name__}: {failure}" if failure else _difference(path, _fingerprint(path), here)
    try:
        _raise_any(problem)
    except NebulaError as of_some_rank:
        raise failure or of_some_rank from None
    return result  # type: ignore[no-any-return]


def _raise_any(problem: str, otherwise: str = OTHERWISE) -> None:
    for rank, one in enumerate(_of_all(problem)):
        if one:
            raise NebulaStorageError(f"rank {rank}: {one}. {otherwise}")


def _difference(path: str, here: str, expected: str) -> str:
    """Returns what is wrong if the file at the path is not the expected one, else ""."""
    if here == expected:
        return ""
    if "" in (here, expected):
        return f"{path} is {'there on rank 0 and not here' if expected else 'not there on rank 0, and here'}: see that each node has it mounted"
    return f"{path} is another file than the one that rank 0 found there"


def _fingerprint(path: str) -> str:
    """Returns a text that is equal for equal files: of the checksums in a zip file, which torch.save and Nebula write. "": there is no file."""
    found = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            sums = _checksums(file)
            if sums is not None:
                found.update(sums)
            else:
                file.seek(0)
                while block := file.read(1 << 20):
                    found.update(block)
    except FileNotFoundError:
        return ""
    except IsADirectoryError:
        return "a directory"
    except Exception as failure:  # zipfile has many kinds for damaged files, and the other ranks wait for this one
        return f"{path} cannot be read: {failure}"
    return found.hexdigest()


def _checksums(file: BinaryIO) -> bytes | None:
    """Returns the checksums in a zip file. None: it is none, or torch has written zeros in place of checksums (set_crc32_options(False))."""
    if not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as records:
        listed = [(one.filename, one.CRC, one.file_size, one.header_offset) for one in records.infolist()]
    return repr(listed).encode() if all(checksum or not size for _, checksum, size, _ in listed) else None
