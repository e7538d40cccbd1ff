"""Damages what Nebula has stored, and looks at what a program then loads.

    python tests/campaign/corruption.py [--trials 400] [--seed 1] [--tiers storage,memory,gs,s3,az,copies]

A trainer saves versions, one tag twice, with signatures of its values that this program knows. Each trial damages one place of one file, or
swaps, removes or sets back files or a whole tag, in the storage path (storage: a directory; gs, s3, az: an object store) or in the memory that a killed
agent has left (memory), or a copy in the memory of another node, or what goes to and fro between the nodes (copies). Then another agent and trainer
begin. A trial ends well in one of two ways:

* each tag loads with exactly the values of one of its writings, and the newest version is one of those that were saved;
* a load raises an error or logs a warning that names the tag or the file.

Other values, a crash, a hang, or a version that is missing without a word are wrong. After that the next save must become durable and load.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "power")]

import copies  # noqa: E402
import nebulaml as nm  # noqa: E402
import objects  # noqa: E402
from power import WAIT_S, Child, content, digest, loaded  # noqa: E402

SIZES = {"model": 9_000, "optimizer": 20_000}
TAGS = ("global_step1", "global_step2", "global_step3", "best")
PAGE = 4096


def written(tag: str, writing: int) -> dict[str, bytes]:
    return {name: content(tag, writing, name, size) for name, size in SIZES.items()}


WRITINGS = {tag: [written(tag, n) for n in range(2 if tag == "best" else 1)] for tag in TAGS}
DIGESTS = {
    tag: [{name: digest(data) for name, data in files.items()} for files in each] for tag, each in WRITINGS.items()
}


def save(path: Path | str, awaited: str, keep: Callable[[], object] | None = None, **settings: Any) -> None:
    """keep: called after the first half."""
    nm.init(str(path), 0 if awaited == "durable" else "1h", 16, **settings)
    for at, (tag, writing) in enumerate([("best", 0), *((tag, 0) for tag in TAGS[:3]), ("best", 1)]):
        if keep is not None and tag == "global_step3":
            keep()
        checkpoint = nm.Checkpoint(tag, -2)
        for name, data in WRITINGS[tag][writing].items():
            checkpoint.save_bytes(name, data)
        assert checkpoint.commit()
        checkpoint.wait("durable" if awaited == "replicated" and not at else awaited, WAIT_S)  # of a job with copies the first is


# -- damage


def flip(data: bytearray, chance: random.Random) -> bytearray:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def run(data: bytearray, chance: random.Random) -> bytearray:
    at, size = chance.randrange(len(data)), chance.randint(1, 600)
    piece = data[at : at + size]
    data[at : at + size] = chance.randbytes(len(piece))
    return data


def zeros(data: bytearray, chance: random.Random) -> bytearray:
    at = chance.randrange(len(data)) // PAGE * PAGE
    piece = data[at : at + PAGE]
    data[at : at + PAGE] = bytes(len(piece))
    return data


def cut(data: bytearray, chance: random.Random) -> bytearray:
    return data[: chance.randrange(len(data))]


def grow(data: bytearray, chance: random.Random) -> bytearray:
    return data + chance.randbytes(chance.randint(1, 5000))


def twice(data: bytearray, chance: random.Random) -> bytearray:
    return data + data


BYTES: dict[str, Callable[[bytearray, random.Random], bytearray]] = {
    f.__name__: f for f in (flip, run, zeros, cut, grow, twice)
}
FILES = ("swap", "lose", "stale", "mix", "tag")


def damage(root: Path, older: Path | None, chance: random.Random) -> str:
    """Damages one place, and returns what it did."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    kind = chance.choice([*BYTES, *BYTES, *FILES])
    path = chance.choice(files)
    name = path.relative_to(root)
    if kind in BYTES and path.stat().st_size:
        data = bytearray(path.read_bytes())
        path.write_bytes(BYTES[kind](data, chance))
        return f"{kind} {name}"
    if kind == "swap":
        same = [other for other in files if other != path and other.stat().st_size == path.stat().st_size]
        if same:
            other = chance.choice(same)
            mine, theirs = path.read_bytes(), other.read_bytes()
            path.write_bytes(theirs)
            other.write_bytes(mine)
            return f"swap {name} {other.relative_to(root)}"
    if kind in ("stale", "mix") and older is not None:
        old = [
            found
            for found in sorted(older.rglob("*"))
            if found.is_file() and (kind == "mix" or (root / found.relative_to(older)).exists())
        ]
        for found in [chance.choice(old)] if kind == "stale" else chance.sample(old, len(old) // 2):
            (root / found.relative_to(older)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, root / found.relative_to(older))
        return f"{kind} {found.relative_to(older)}"
    if kind == "tag" and older is not None:  # all of it comes from an older backup
        tag = chance.choice(sorted(found.name for found in older.iterdir() if found.is_dir()))
        shutil.rmtree(root / tag, ignore_errors=True)
        shutil.copytree(older / tag, root / tag)
        return f"tag {tag}"
    if (
        path.suffix == ".version"
    ):  # without it nothing says that there was a version: no medium loses a whole file of memory
        return f"none {name}"
    path.unlink()
    return f"lose {name}"


# -- judgement


class Words(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def judge(path: Path | str, is_checked: bool, damaged: str, **settings: Any) -> dict[str, Any]:
    """Returns what is wrong, and of each tag how its load ended: exact, older, named, damaged.

    is_checked: a load compares the bytes with checksums. Without it, other values of the right file are not wrong. damaged: the file.
    """
    log = Path(os.environ["NEBULA_RUNTIME_DIR"]) / "agent.log"
    words = Words()
    logging.getLogger().addHandler(words)
    read, write = os.pipe()  # the library's own messages go to standard error
    kept = os.dup(2)
    os.dup2(write, 2)
    os.set_blocking(read, False)
    wrong, ends = [], collections.Counter()

    def said() -> str:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(read, 1 << 16):
                words.lines.append(piece.decode(errors="replace"))
        return "\n".join([*words.lines, log.read_text() if log.exists() else ""])

    def load(tag: str, call: Callable[[], Any]) -> dict[str, str] | None:
        try:
            found = call()
            result = loaded(found)
        except nm.NebulaError as failure:
            text = str(failure)
            if not any(name in text for name in (TAGS if tag == "newest" else (tag,))) and str(path) not in text:
                wrong.append(f"the load of {tag} raises, and names neither tag nor path: {text}")
            ends["named"] += 1
            return None
        if result is None:
            if tag == "newest" or not (tag in said() or Path(damaged).stem in said()):
                wrong.append(f"{tag} is not there, and nothing says why")
            ends["named"] += 1
        return result

    nm.init(str(path), 0, 16, **settings)
    newest = load("newest", lambda: nm.get_latest_checkpoint())
    if newest is not None and is_checked and not any(newest in each for each in DIGESTS.values()):
        wrong.append(f"the newest has the values of no version: {newest}")
    for tag in TAGS:
        found = load(tag, lambda tag=tag: nm.get_checkpoint(tag))
        if found is not None and found not in DIGESTS[tag]:
            if is_checked:
                wrong.append(f"{tag} has other values: {found}")
            ends["damaged"] += 1
        elif found is not None:
            ends["exact" if found == DIGESTS[tag][-1] else "older"] += 1
    files = {name: content("next", 0, name, 5_000) for name in SIZES}
    checkpoint = nm.Checkpoint("global_step900", -2)
    for name, data in files.items():
        checkpoint.save_bytes(name, data)
    checkpoint.commit()
    try:
        checkpoint.wait("durable", WAIT_S)
        if loaded(nm.get_latest_checkpoint()) != {name: digest(data) for name, data in files.items()}:
            wrong.append("after the next save the newest is another one")
    except nm.NebulaError as failure:
        if str(path) not in str(failure):
            wrong.append(f"the next save fails, and names no file: {failure}")
        ends["save refused"] += 1
    os.dup2(kept, 2)
    return {"wrong": wrong, "ends": ends}


def trial(tier: str, source: Path, older: Path, seed: int, place: Path, store: objects.Objects | objects.Blobs | None) -> tuple[str, list[str], dict[str, int]]:
    chance = random.Random(f"{tier}/{seed}")
    storage = place / "storage"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if tier == "copies":
        try:
            done, answer = copies.trial(
                place, seed, [data for each in WRITINGS.values() for files in each for data in files.values()],
                lambda path: save(path, "replicated", replicas=1), lambda path, what: judge(path, True, what, replicas=1),
            )  # fmt: skip
        except RuntimeError as failure:
            return "? ?", [str(failure)], {}
        return done, answer["wrong"], answer["ends"]
    if tier != "memory":
        shutil.copytree(source, storage)
        done = damage(storage, older, chance)
        if store:
            store.fill(storage)
        child = Child(lambda: judge(store.path if store else storage, True, done.split()[1]))
    else:
        done = damage(source / "memory", None, chance)
        child = Child(lambda: judge(source / "storage", False, done.split()[1]), kept=source / "memory")
    try:
        answer = child.end()
    except RuntimeError as failure:
        return done, [str(failure)], {}
    return done, answer["wrong"], answer["ends"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400, help="of each tier")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiers", default="storage,memory")
    given = parser.parse_args(arguments)
    return 1 if sum(campaign(tier, given.trials, given.seed) for tier in given.tiers.split(",")) else 0


def campaign(tier: str, trials: int, first: int) -> int:
    """Returns how many trials were wrong."""
    begun, ends, kinds, failed = time.monotonic(), collections.Counter(), collections.Counter(), 0
    with tempfile.TemporaryDirectory(prefix="corruption-") as name, contextlib.ExitStack() as stack:
        place, store = Path(name), None
        if tier == "storage":
            Child(lambda: save(place / "pristine", "durable", lambda: shutil.copytree(place / "pristine", place / "older"))).end()
        elif tier in ("gs", "s3", "az"):
            store = stack.enter_context(contextlib.closing(objects.Blobs() if tier == "az" else objects.Objects(tier)))
            Child(lambda: save(store.path, "durable", lambda: store.dump(place / "older"))).end()
            store.dump(place / "pristine")
        for seed in range(first * 1_000_000, first * 1_000_000 + trials):
            source = remembered(place / f"memory-{seed}") if tier == "memory" else place / "pristine"
            done, wrong, each = trial(tier, source, place / "older", seed, place / "trial", store)
            if tier == "memory":
                shutil.rmtree(source, ignore_errors=True)
            ends.update(each)
            kinds[done.split()[0]] += 1
            failed += bool(wrong)
            for line in wrong:
                print(f"    {tier}, seed {seed}, {done}: {line}", flush=True)
    words = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    print(f"{tier}: {trials} trials, {failed} wrong; loads: {words}; {time.monotonic() - begun:.0f} s", flush=True)
    print(f"    {', '.join(f'{kind} {count}' for kind, count in sorted(kinds.items()))}", flush=True)
    return failed


def remembered(place: Path) -> Path:
    """Leaves the memory of an agent that was killed with versions that storage does not have."""
    place.mkdir(parents=True)
    (place / "memory").mkdir()
    Child(lambda: save(place / "storage", "committed"), kept=place / "memory").end()
    return place


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
