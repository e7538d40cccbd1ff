"""Eight ranks, many versions in a row: nothing grows, commits are quick, and an idle agent uses no processor time.

NEBULA_TEST_NIGHTLY=1 runs it at full size: 200 versions of 8 x 64 MiB. The figures are in the output (pytest -s).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import fork_server
import pytest
from waiting import until

NIGHTLY = os.environ.get("NEBULA_TEST_NIGHTLY") == "1"
RANKS = 8
MIB = (64 if NIGHTLY else 1) << 20
VERSIONS = 200 if NIGHTLY else 60
WARM = 20  # versions until pools are full

# No torch: eight of these must fit beside other work of the machine. "tensors": memory as torch's tensors have it once nebulaml
# was imported, private huge pages, which a save protects. "bytes": a buffer, which a save copies; each rank says then when its bytes
# were captured and when it knew that the version is committed, on the clock that all processes share.
RANK = """
import json, mmap, os, sys, time
from nebulaml import _nebula
from nebulaml._session import engine
import nebulaml as nm

path, kind = sys.argv[1:3]
interval, keep_last, size = map(int, sys.argv[3:6])
nm.init(path or None, interval, 2, on_error="raise", keep_last=keep_last or None)
session = engine.session()
rank = os.environ["RANK"]
content = os.urandom(4096) * (size // 4096)
if kind == "bytes":
    data = bytearray(content)
else:
    data = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data.madvise(mmap.MADV_HUGEPAGE)
    data.write(content)
    ranges = _nebula.Ranges()
    ranges.append(_nebula.address_of(memoryview(data)), size, data)
for line in sys.stdin:
    first, last = map(int, line.split())
    times = []
    for step in range(first, last):
        data[:8] = step.to_bytes(8, "little")
        checkpoint = session.begin(f"global_step{step}", _nebula.FILES_ALL_RANKS)
        if kind == "bytes":
            checkpoint.save_bytes(f"shard-{rank}.bin", data)
            session.settle(-1)
        else:
            checkpoint.save_ranges(f"shard-{rank}.bin", ranges)
        captured = time.clock_gettime(time.CLOCK_MONOTONIC)
        checkpoint.commit()
        checkpoint.wait("committed", 60000)
        times.append((captured, time.clock_gettime(time.CLOCK_MONOTONIC)))
    os.write(1, (json.dumps(times) + chr(10)).encode())
"""


def figures(pid: int) -> dict[str, float]:
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return {
        "anon_kib": int(status["RssAnon"].split()[0]),
        "threads": int(status["Threads"]),
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "cpu_s": time.clock_gettime(~pid << 3 | 2),  # its clock of CPU time, as clock_getcpuclockid(3) names it
    }


class Job:
    """Eight ranks that save on command."""

    def __init__(self, place, monkeypatch, path: Path | None, kind: str, interval: int, keep_last: int) -> None:
        self.place, self.processes = place, []
        for rank in range(RANKS):
            for name, value in (
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", RANKS),
                ("LOCAL_WORLD_SIZE", RANKS),
            ):
                monkeypatch.setenv(name, str(value))
            self.processes.append(self._start(path or "", kind, interval, keep_last, MIB))
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)

    def _start(self, *arguments: object) -> fork_server.Trainer:
        return fork_server.start(RANK, *arguments, cwd=self.place.root, stdin=subprocess.PIPE)

    def save(self, first: int, last: int) -> list[list[tuple[float, float]]]:
        """Makes all ranks save these versions. Returns (captured, committed) for each rank and version."""
        for process in self.processes:
            process.stdin.write(f"{first} {last}\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self.processes]
        assert all(lines), "a rank ended"
        return [json.loads(line) for line in lines]

    def look(self) -> dict[str, float]:
        (agent,) = self.place.agents()
        ranks = [figures(process.pid) for process in self.processes]
        return {
            **{f"agent {name}": value for name, value in figures(agent).items()},
            **{f"ranks {name}": sum(rank[name] for rank in ranks) for name in ("anon_kib", "threads", "fds")},
            "images": len(list(self.place.memory.glob("*.img"))),
            "notes": len(list(self.place.memory.glob("*.version"))),
            "memory_mib": self.place.memory_bytes() / (1 << 20),
            "seconds": time.monotonic(),
        }

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.stdout.close()
            assert process.wait(timeout=60) == 0


def commit_delays_ms(times: list[list[tuple[float, float]]]) -> list[float]:
    """Returns the times from the last rank's capture until the first rank knew of the commit."""
    return sorted(
        1000 * (min(rank[i][1] for rank in times) - max(rank[i][0] for rank in times)) for i in range(len(times[0]))
    )


def print_figures(title: str, before: dict[str, float], after: dict[str, float]) -> None:
    print(f"\n{title}: {RANKS} ranks x {MIB >> 20} MiB x {VERSIONS} versions")
    for name, value in after.items():
        print(f"  {name:16} {before[name]:12.1f} -> {value:12.1f}")


def assert_nothing_grew(before: dict[str, float], after: dict[str, float]) -> None:
    for name in ("agent fds", "agent threads", "ranks fds", "ranks threads", "images", "notes"):
        assert after[name] <= before[name] + 2, name
    assert (
        after["agent anon_kib"] <= before["agent anon_kib"] + 6 * 1024
    )  # tombstones: a few KiB per version, 256 at most
    assert after["ranks anon_kib"] <= before["ranks anon_kib"] + RANKS * 1024
    assert after["memory_mib"] <= 1.34 * before["memory_mib"]  # at most one more version's images than before


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["tensors", pytest.param("bytes", marks=pytest.mark.nightly)])
def test_many_versions_in_memory_leak_nothing_and_commit_quickly(place, monkeypatch, kind):
    job = Job(place, monkeypatch, None, kind, 0, 0)
    job.save(1, WARM + 1)
    before = job.look()
    times = job.save(WARM + 1, VERSIONS + 1)
    after = job.look()
    cpu = after["agent cpu_s"] - before["agent cpu_s"]
    seconds = after["seconds"] - before["seconds"]
    print_figures(f"memory only, {kind}", before, after)
    if kind == "bytes":
        delays = commit_delays_ms(times)
        print(f"  commit after the last capture: median {delays[len(delays) // 2]:.2f} ms, worst {delays[-1]:.2f} ms")
    print(f"  agent: {1000 * cpu / (VERSIONS - WARM):.2f} ms CPU per version, {100 * cpu / seconds:.1f} % of a core")
    assert_nothing_grew(before, after)
    if NIGHTLY:
        assert cpu <= 0.05 * seconds  # the goal; not reached yet for plain buffers beyond some 38 versions per second
    used = []

    def is_idle() -> bool:
        before = job.look()["agent cpu_s"]
        time.sleep(2)
        used.append(job.look()["agent cpu_s"] - before)
        return used[-1] <= 0.01

    until(is_idle, 60, "the agent to take no time")  # it may still make pages for the next version
    print(f"  idle with {RANKS} ranks connected: {1000 * used[-1]:.1f} ms CPU in 2 s")
    job.end()


def until_durable(place, step: int) -> None:
    """Waits until the newest version is in storage and retention has removed the others. Then no file is being written."""
    manifest = place.storage / f"global_step{step}" / ".nebula" / "manifest-1.json"
    deadline = time.monotonic() + 120
    while not manifest.exists() or len(list(place.storage.glob("global_step*"))) > 2:
        assert time.monotonic() < deadline, sorted(path.name for path in place.storage.iterdir())
        time.sleep(0.05)


@pytest.mark.nightly("test_many_versions_in_memory_leak_nothing_and_commit_quickly")
@pytest.mark.timeout(1800)
def test_many_versions_in_storage_leave_what_is_kept_and_nothing_else(place, monkeypatch):
    # Every version is persisted, so saving waits for storage; without a bound the queue would take half of the machine.
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", str(4 * RANKS * (MIB + (2 << 20))))
    job = Job(place, monkeypatch, place.storage, "bytes", 5 if NIGHTLY else 0, 2)
    job.save(1, WARM + 1)
    until_durable(place, WARM)
    before = job.look()
    job.save(WARM + 1, VERSIONS + 1)
    until_durable(place, VERSIONS)
    after = job.look()
    print_figures("with storage, keep_last=2", before, after)
    assert_nothing_grew(before, after)
    job.end()
    newest = place.storage / f"global_step{VERSIONS}"
    assert sorted(path.name for path in newest.iterdir()) == [
        ".nebula",
        *(f"shard-{rank}.bin" for rank in range(RANKS)),
    ]
    for rank in range(RANKS):
        assert (newest / f"shard-{rank}.bin").read_bytes()[:8] == VERSIONS.to_bytes(8, "little")
    assert not list(place.storage.rglob("tmp-*"))
