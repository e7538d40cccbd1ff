"""Files large enough to be written to storage while they are copied, and kills in the middle of that.

NEBULA_TEST_NIGHTLY=1 kills forty times.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import nebulaml
import pytest
import torch
from test_cow import possible

pytestmark = pytest.mark.skipif(not possible(), reason="no userfaultfd here")

KILLS = 40 if os.environ.get("NEBULA_TEST_NIGHTLY") else 1
COUNT = (40 if os.environ.get("NEBULA_TEST_NIGHTLY") else 16) << 20  # floats of one file: 160 MiB, or 64 MiB

# Every element of a file is the step it was saved at, and changes right after the save.
TRAIN = """
    nm.init(sys.argv[1], 0, 2, keep_last=3)
    first, last, files, count = map(int, sys.argv[2:6])
    tensors = [torch.zeros(count) for _ in range(files)]
    for step in range(first, last):
        for t in tensors:
            t.fill_(step)
        say("saving", step)
        c = nm.Checkpoint(f"global_step{step}", -2)
        for i, t in enumerate(tensors):
            c.save(f"f{i}.pt", {"step": step, "t": t})
        c.commit()
        for t in tensors:
            t.fill_(-1)
        if step == first:
            c.wait("committed", 60)  # so each run leaves a newer version
        say("saved", step)
    nm.flush_persistence()
    say("done")
    time.sleep(60)
"""


def lines_until(process, word: str) -> None:
    for line in process.stdout:
        if line.startswith(word):
            return
    raise AssertionError(f"the trainer ended before it said {word!r}")


def check_files(load, step: int, files: int) -> None:
    for i in range(files):
        got = load(f"f{i}.pt")
        assert got["step"] == step
        assert (got["t"] == step).all()


def held(directory: Path) -> bool:
    """Returns True if the newest entry of the tag's log is a version. A removal adds an entry, removes the files, and removes the entries last."""
    entries = sorted(directory.glob(".nebula/manifest-*.json"), key=lambda path: int(path.stem.removeprefix("manifest-")))
    try:
        return bool(entries) and json.loads(entries[-1].read_text())["nebula"] == "manifest"
    except FileNotFoundError:  # the removal ended between the listing and the read
        return False


def check_storage(storage: Path, files: int) -> list[int]:
    """Checks that torch alone reads each stored version completely, unless retention removes it meanwhile. Returns their steps."""
    steps = []
    for directory in filter(held, storage.glob("global_step*")):
        step = int(directory.name.removeprefix("global_step"))
        try:
            check_files(lambda name, directory=directory: torch.load(directory / name, mmap=True), step, files)
        except FileNotFoundError:
            if held(directory):
                raise
        else:
            steps.append(step)
    return sorted(steps)


@pytest.mark.nightly("test_kills_while_a_large_file_is_copied_and_written")
def test_a_large_file_is_as_it_was_saved_in_memory_and_in_storage(place, monkeypatch):
    monkeypatch.setenv("NEBULA_CAPTURE", "cow")
    process = place.trainer(TRAIN, place.storage, 1, 4, 2, COUNT)
    lines_until(process, "done")
    assert check_storage(place.storage, 2) == [1, 2, 3]
    process.kill()
    process.wait(timeout=60)
    process.stdout.close()
    nebulaml.init(str(place.storage), 0, 2)
    found = nebulaml.get_latest_checkpoint()
    assert found.tag == "global_step3"
    check_files(found.load, 3, 2)


# fault (Storage): The trainer, the agent or both are killed while a file is copied and its beginning is in storage
# already.
# result: That version does not exist in storage, and the one before can be loaded. The agent removes the written
# beginning. After the agent's own death the next agent sweeps it.
@pytest.mark.timeout(1800 if KILLS > 1 else 300)
@pytest.mark.parametrize("victims", ["trainer", *(pytest.param(victim, marks=pytest.mark.nightly("test_kills_while_a_large_file_is_copied_and_written")) for victim in ("agent", "both"))])
def test_kills_while_a_large_file_is_copied_and_written(place, monkeypatch, victims):
    monkeypatch.setenv("NEBULA_CAPTURE", "cow")
    seed = int(os.environ.get("NEBULA_TEST_SEED", "0")) or random.randrange(1, 1 << 31)
    print(f"NEBULA_TEST_SEED={seed}")
    chance = random.Random(f"{seed} {victims}")
    first = durable = 0  # durable: the newest step that storage was seen to have
    for _ in range(KILLS):
        process = place.trainer(TRAIN, place.storage, first + 1, first + 1000, 2, COUNT)
        lines_until(process, f"saving {first + 2}")
        time.sleep(chance.uniform(0, 0.6))
        if victims == "agent":
            place.kill_agent(wait=False)
            for _ in range(2):  # the trainer continues with another agent
                lines_until(process, "saved")
        if victims == "both":
            place.kill_all(process)
        else:
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=60)
            process.stdout.close()
        nebulaml.init(str(place.storage), 0, 2, keep_last=3)
        found = nebulaml.get_latest_checkpoint()
        assert found
        step = int(found.tag.removeprefix("global_step"))
        assert step > first
        assert step >= durable
        check_files(found.load, step, 2)
        nebulaml.flush_persistence()
        durable = check_storage(place.storage, 2)[-1]
        assert durable == step
        del found  # which holds the session
        nebulaml._shutdown()
        first = step
