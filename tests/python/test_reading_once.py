"""The ranks of a node read a file from the disk once, by the kernel's count of the bytes that it fetched for them."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

BYTES = 48 << 20
LOADS = {
    "whole": "state = found.load('state.pt'); values = state['weights']",
    "into": "state = {'weights': torch.zeros(int(sys.argv[1]) // 4)}; found.load_into('state.pt', state); values = state['weights']",
}
RANK = """
    def fetched():
        with open("/proc/self/io") as file:
            return int(file.read().split("read_bytes: ")[1].split()[0])
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = sys.argv[2]
    nm.init(sys.argv[3], 0, 2)
    found = nm.get_checkpoint(tag="step1", persist_path=sys.argv[3])
    say("ready")
    sys.stdin.readline()
    begun = fetched()
    {load}
    say(fetched() - begun, int(values[:1000].sum()), int(values[-1]))
    sys.stdin.readline()
"""


def fetched(pid: int) -> int:
    return int(Path(f"/proc/{pid}/io").read_text().split("read_bytes: ")[1].split()[0])


def evict(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def is_counted(folder: Path) -> bool:
    """Whether the kernel counts what is read from this file system: it does not where there is no disk."""
    path = folder / "counted"
    path.write_bytes(bytes(1 << 20))
    evict(folder)
    before = fetched(os.getpid())
    fd = os.open(path, os.O_RDONLY)
    os.preadv(fd, [mmap.mmap(-1, 1 << 20)], 0)
    os.close(fd)
    path.unlink()
    return fetched(os.getpid()) - before >= 1 << 20


@pytest.mark.parametrize(("how", "memory"), [pytest.param("whole", "1G", marks=pytest.mark.nightly("test_two_ranks_that_load_the_same_file_read_the_disk_once")), ("into", "1G"), pytest.param("whole", "8M", marks=pytest.mark.nightly("test_two_ranks_that_load_the_same_file_read_the_disk_once"))])
def test_two_ranks_that_load_the_same_file_read_the_disk_once(how, memory, place, nm, monkeypatch):
    place.storage.mkdir(exist_ok=True)
    if not is_counted(place.storage):
        pytest.skip(f"the kernel does not count what is read from the file system of {place.storage}")
    weights = torch.arange(BYTES // 4, dtype=torch.float32)
    with nm.Checkpoint("step1") as checkpoint:
        checkpoint.save("state.pt", {"weights": weights})
    checkpoint.wait("durable", timeout=60)
    nm._shutdown()
    place.lose_memory()
    evict(place.storage)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NEBULA_MEMORY_BUFFER_SIZE": memory}.items():
        monkeypatch.setenv(name, value)
    ranks = [place.trainer(RANK.format(load=LOADS[how]), BYTES, rank, place.storage, stdin=True) for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        (agent,) = place.agents()
        before = fetched(agent)
        for rank in ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
        found = [[int(word) for word in rank.stdout.readline().split()] for rank in ranks]
        total = fetched(agent) - before + sum(counted for counted, _, _ in found)
    finally:
        for rank in ranks:
            rank.communicate("\n", timeout=60)
    assert all(first == 499500 and last == BYTES // 4 - 1 for _, first, last in found)
    assert 0.95 * BYTES < total < 1.2 * BYTES, f"{total / BYTES:.2f} times the file's size was read"
