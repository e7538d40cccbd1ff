"""profiler_track: Nebula's saves, copies and writes as a track of their own in the traces of torch.profiler."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .._session import ranks, session
from .._session.traced import PREFIX
from ..errors import NebulaError

__all__ = ["ProfilerTrack", "add_to_trace", "profiler_track"]

PID = "nebula"  # Perfetto and chrome://tracing accept a text as process id, and no real process has this one
CATEGORY = "nebula"


def profiler_track(directory: str | os.PathLike[str], *, use_gzip: bool = False, session: Any = None) -> ProfilerTrack:
    """For ``torch.profiler.profile(on_trace_ready=...)``: writes each trace into the directory, with Nebula's track in it.

    session: a Session or Manager; None: that of the package's functions.
    """
    return ProfilerTrack(directory, use_gzip, session)


class ProfilerTrack:
    """The handler that profiler_track() returns. ``update()`` adds the ends of the versions that were being written when a trace was made."""

    def __init__(self, directory: str | os.PathLike[str], use_gzip: bool, session: Any) -> None:
        self._directory, self._ending, self._session = Path(directory), ".json.gz" if use_gzip else ".json", session
        self._unfinished: set[Path] = set()

    def __call__(self, profiler: Any) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"rank{ranks.current().rank}.{os.getpid()}.{time.time_ns()}.pt.trace{self._ending}"  # as TensorBoard's handler names them
        profiler.export_chrome_trace(str(self._directory / name))
        self._add(self._directory / name)

    def update(self) -> None:
        """Call it when the versions are durable: writes that had not ended get their end."""
        for path in sorted(self._unfinished):
            self._add(path)

    def _add(self, path: Path) -> None:
        self._unfinished.discard(path)
        if add_to_trace(path, session=self._session):
            self._unfinished.add(path)


def add_to_trace(path: str | os.PathLike[str], *, session: Any = None) -> int:
    """Adds Nebula's track to a trace that torch.profiler has exported, or replaces the one that is in it.

    The track has the versions that this node's agent knows, and the program's own calls. Its times are by the machine's clock, as the
    profiler's are. Returns the number of versions in the trace that are not durable yet. Raises ValueError if the file is not such a trace.
    """
    file = Path(path)
    trace = json.loads(_unpacked(file.read_bytes()))
    if not isinstance(trace, dict) or "baseTimeNanoseconds" not in trace or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{file} is not a trace of torch.profiler: it has no baseTimeNanoseconds and traceEvents")
    events = [event for event in trace["traceEvents"] if event.get("pid") != PID]
    base = int(trace["baseTimeNanoseconds"]) / 1e3  # microseconds
    times = [event["ts"] for event in events if event.get("ph") == "X"]
    ends = [event["ts"] + event.get("dur", 0) for event in events if event.get("ph") == "X"]
    rows = _rows(session)
    found = [row for row in rows if times and _overlaps(row, base + min(times), base + max(ends))]
    trace["traceEvents"] = events + list(_events(found, base)) + list(_calls(events))
    _replace(file, json.dumps(trace).encode())
    return sum(row["result"] not in ("durable", "failed", "superseded", "memory") for row in found)


def _rows(chosen: Any) -> list[dict[str, Any]]:
    try:
        return (getattr(chosen, "_session", chosen) or session.default).stats()
    except NebulaError:  # no agent answers: the program's own calls remain
        return []


def _overlaps(row: Mapping[str, Any], begin: float, end: float) -> bool:
    last = max(row[name] for name in ("begun", "captured", "committed", "durable"))
    is_open = not row["durable"] and row["result"] not in ("failed", "superseded", "memory")
    return row["begun"] > 0 and row["begun"] * 1e6 <= end and (is_open or last * 1e6 >= begin)


def _pieces(row: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Name of a thread, begin and end in seconds since 1970."""
    blocked, until = row["blocked_ms"] / 1e3, row["captured"] or float("inf")
    stood_until = min(row["begun"] + blocked, until)  # a save begins a little before the agent hears of it
    yield "saves: training stands still", stood_until - blocked, stood_until
    if row["captured"]:
        yield "copies to memory", row["begun"], row["captured"]
    if row["committed"] and row["durable"]:
        written_from = max(row["durable"] - row["persist_seconds"], row["committed"]) if row["persist_seconds"] else row["durable"]
        yield "waits for storage", row["committed"], written_from
        yield "writes to storage", written_from, row["durable"]


SHOWN = ("tag", "step", "sequence", "result", "size_bytes", "blocked_ms", "persist_seconds", "error")
THREADS = ("calls of the program", "saves: training stands still", "copies to memory", "waits for storage", "writes to storage")


def _events(rows: Iterable[Mapping[str, Any]], base: float) -> Iterator[dict[str, Any]]:
    """Two versions can be copied or written at once, and pieces of one thread must not overlap: then the later one takes another lane."""
    yield {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "ts": 0, "args": {"name": "Nebula"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": PID, "tid": 0, "ts": 0, "args": {"sort_index": -1}}
    lanes: dict[str, list[float]] = {}
    named = {0}
    yield _thread(0, THREADS[0])
    for row in sorted(rows, key=lambda row: row["begun"]):
        about = {name: row[name] for name in SHOWN if name in row}
        for name, begin, end in _pieces(row):
            ends = lanes.setdefault(name, [])
            lane = next((at for at, until in enumerate(ends) if until <= begin), len(ends))
            ends[lane : lane + 1] = [max(begin, end)]
            tid = THREADS.index(name) * 100 + lane
            if tid not in named:
                named.add(tid)
                yield _thread(tid, name)
            yield _piece(row["tag"], tid, begin * 1e6 - base, max(end - begin, 0) * 1e6, about)


def _calls(events: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The ranges that traced() has put on the program's threads. Those of several threads may overlap: one lane for each thread."""
    lanes: dict[Any, int] = {}
    for event in events:
        if event.get("ph") == "X" and str(event.get("name", "")).startswith(PREFIX) and event.get("cat") == "user_annotation":
            lane = lanes.setdefault(event.get("tid"), len(lanes))
            if lane:
                yield _thread(lane, THREADS[0])
            yield _piece(event["name"][len(PREFIX) :], lane, event["ts"], event.get("dur", 0), {})


def _thread(tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": PID, "tid": tid, "ts": 0, "args": {"name": name}}


def _piece(name: str, tid: int, begin: float, duration: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "cat": CATEGORY, "name": name, "pid": PID, "tid": tid, "ts": begin, "dur": duration, "args": args}


def _unpacked(data: bytes) -> bytes:
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def _replace(file: Path, data: bytes) -> None:
    """Replaces the trace by one rename: a reader sees the old trace or the new one."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(gzip.compress(data) if file.suffix == ".gz" else data)
        os.chmod(name, file.stat().st_mode & 0o777)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
