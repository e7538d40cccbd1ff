"""Versions on a file system that shares blocks, and blocks that lose bits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

CHUNK = 4 << 20

SAVE = """
    nm.init(sys.argv[1], 0, 1, on_error="raise")
    for step in map(int, sys.argv[2:]):
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save_bytes("m.bin", bytes(24 << 20))
        checkpoint.wait("durable")
    nm.flush_persistence()
"""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """An XFS in a file: its files can share blocks."""
    if os.geteuid() or not shutil.which("mkfs.xfs"):
        pytest.skip("an XFS needs root and xfsprogs")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with open(image, "wb") as made:
        made.truncate(400 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True).returncode:
        pytest.skip("no file can be mounted here")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def rot(path: Path, offset: int) -> None:
    """Changes a bit as a disk does: in the block, and nothing else."""
    before = path.stat()
    with open(path, "r+b", buffering=0) as opened:
        block = os.pread(opened.fileno(), 1, offset)
        os.pwrite(opened.fileno(), bytes([block[0] ^ 1]), offset)
        os.fsync(opened.fileno())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def verify(place, storage: Path, *words: str) -> dict[str, list[dict]]:
    done = subprocess.run(
        [os.environ.get("NEBULA_AGENT_PATH") or shutil.which("nebula"), "verify", *words, "--json", "--path", storage],
        capture_output=True, text=True, timeout=100,
    )
    return {version["tag"]: version["files"] for version in json.loads(done.stdout)["versions"]}


# fault: as shared_bytes_that_have_rotted_are_written_again
def test_a_version_takes_no_rotten_block_over_and_verify_names_all_that_share_one(place, shared):
    storage = shared / "run"
    place.run(SAVE, storage, "1")
    rot(storage / "global_step1/m.bin", 5 << 20)
    place.run(SAVE, storage, "2", "3")
    found = verify(place, storage, "--all")
    assert {tag: files[0]["ok"] for tag, files in found.items()} == {
        "global_step1": False, "global_step2": True, "global_step3": True,
    }
    extents = subprocess.run(["filefrag", "-v", storage / "global_step3/m.bin"], capture_output=True, text=True)
    if extents.returncode == 0:
        assert "shared" in extents.stdout, "the third version shares no block with the second"
    (file,) = verify(place, storage, "global_step1")["global_step1"]
    assert [one["offset"] for one in file["damage"]] == [CHUNK] and set(file["same_in"]) == {"global_step2", "global_step3"}


AMEND = """
    nm.init(sys.argv[1], 0, 1, on_error="raise")
    with nm.Checkpoint("last", -2) as checkpoint:
        for name in sys.argv[2:]:
            checkpoint.save_bytes(name, bytes(24 << 20))
    checkpoint.wait("durable", timeout=60)
"""
SAY_FAILURE = AMEND.replace("checkpoint.wait", "try: checkpoint.wait") + "    except nm.NebulaError as failure: say(failure)"


def sound(place) -> dict[str, bool]:
    return {file["name"]: file["ok"] for file in verify(place, place.storage, "last")["last"]}


# fault (Storage): A file that a new writing of a tag takes over from the writing before has rotted in storage.
# result: The agent reads such files before the version is durable. It writes a damaged one again if memory has it.
# Else the version fails, and the failure names the file and the cure. In object stores it compares sizes only: the
# service checks what it keeps.
def test_a_damaged_file_of_the_writing_before_is_written_again_from_memory(place):
    keeps_both = AMEND.replace("init(sys.argv[1], 0, 1,", "init(sys.argv[1], 0, 2,")
    place.run(keeps_both, place.storage, "model.bin", "rng.bin")
    rot(place.storage / "last/model.bin", 5 << 20)
    place.run(keeps_both, place.storage, "rng.bin")
    assert sound(place) == {"model.bin": True, "rng.bin": True}


# fault: as test_a_damaged_file_of_the_writing_before_is_written_again_from_memory
def test_a_writing_that_takes_a_damaged_file_over_is_not_called_durable_and_the_failure_names_the_file_and_the_cure(place):
    place.run(AMEND, place.storage, "model.bin", "rng.bin")
    place.kill_all()
    shutil.rmtree(place.memory)
    rot(place.storage / "last/model.bin", 5 << 20)
    failed = place.run(SAY_FAILURE, place.storage, "rng.bin")
    assert "last/model.bin: damaged between byte 4194304 and 8388608" in failed and "Save this file again" in failed
    assert sound(place) == {"model.bin": False, "rng.bin": True}
    place.run(AMEND, place.storage, "model.bin", "rng.bin")
    assert sound(place) == {"model.bin": True, "rng.bin": True}
