"""Nebula's track in the traces of torch.profiler, aligned with the program's own by the clock."""

from __future__ import annotations

import gzip
import itertools
import json
import time

import nebulaml
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

THREADS = {"calls of the program", "saves: training stands still", "copies to memory", "waits for storage", "writes to storage"}

CLOCKS_US = 100_000


def read(path):
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    ours = [event for event in trace["traceEvents"] if event.get("pid") == "nebula"]
    names = {event["tid"]: event["args"]["name"] for event in ours if event["name"] == "thread_name"}
    pieces = {}
    for event in ours:
        if event["ph"] == "X":
            pieces.setdefault(names[event["tid"]], {})[event["name"]] = event
    return trace, pieces


def save(step):
    with record_function(f"step {step}"):
        checkpoint = nebulaml.Checkpoint(f"global_step{step}")
        checkpoint.save("m.pt", torch.zeros(1 << 20))
        checkpoint.commit()
    return checkpoint


@pytest.mark.parametrize("use_gzip", [False, True])
def test_a_trace_has_saves_waits_and_writes_where_the_program_made_them(place, use_gzip):
    nebulaml.init(str(place.storage), 0, 2)
    save(1).wait("durable", 60)  # before the profiler runs: not in its trace
    time.sleep(0.05)
    track = nebulaml.profiler_track(place.root / "traces", use_gzip=use_gzip)
    with profile(activities=[ProfilerActivity.CPU], on_trace_ready=track):
        for step in (2, 3):
            save(step).wait("durable", 60)
    (path,) = (place.root / "traces").iterdir()
    assert path.name.endswith(".pt.trace.json.gz" if use_gzip else ".pt.trace.json")
    trace, pieces = read(path)
    assert set(pieces) == THREADS
    spans = {event["name"]: event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("pid") != "nebula"}
    rows = {row["tag"]: row for row in nebulaml.stats()}
    for name in THREADS - {"calls of the program"}:
        assert set(pieces[name]) == {"global_step2", "global_step3"}, name
    for step in (2, 3):
        tag, around = f"global_step{step}", spans[f"step {step}"]
        saved, written = pieces["saves: training stands still"][tag], pieces["writes to storage"][tag]
        # The agent counts by the machine's clock, and the profiler by its own. The agent hears of a save's begin and end while the save lasts.
        late_us = CLOCKS_US + around["dur"]
        assert around["ts"] - late_us <= saved["ts"] <= saved["ts"] + saved["dur"] <= around["ts"] + around["dur"] + late_us
        commit, wait = (pieces["calls of the program"][name] for name in (f"commit {tag}", f"wait for {tag} durable"))
        assert commit["ts"] - CLOCKS_US <= written["ts"] + written["dur"] <= wait["ts"] + wait["dur"] + CLOCKS_US
        assert written["dur"] == pytest.approx(rows[tag]["persist_seconds"] * 1e6, abs=2000)
        assert written["args"]["size_bytes"] == rows[tag]["size_bytes"] > 4 << 20
        copied = pieces["calls of the program"][f"save {tag} m.pt"]
        assert around["ts"] <= copied["ts"] and copied["ts"] + copied["dur"] <= around["ts"] + around["dur"]
        assert spans[f"nebula: save {tag} m.pt"]["tid"] == around["tid"]  # on the program's own thread, too
    before = path.read_bytes()
    track.update()  # nothing was open
    assert path.read_bytes() == before


def test_an_update_adds_the_ends_of_writes_and_doubles_no_track(place):
    nebulaml.init(str(place.storage), 1000, 2)  # the second version waits for its interval
    save(1).wait("durable", 60)
    track = nebulaml.profiler_track(place.root / "traces")
    plan = schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=track) as profiler:
        for step in range(2, 7):
            checkpoint = save(step)
            checkpoint.wait("committed", 60)  # its copy has ended, and the agent knows it
            profiler.step()
    (path,) = (place.root / "traces").iterdir()
    pieces = read(path)[1]
    assert "writes to storage" not in pieces
    assert "global_step4" in pieces["copies to memory"] and "global_step5" in pieces["saves: training stands still"]
    checkpoint.wait("durable", 60)
    nebulaml.flush_persistence("global_step5")
    track.update()
    again = read(path)[1]
    assert nebulaml.add_to_trace(path) == 0
    assert read(path)[1].keys() == again.keys() and {"global_step4", "global_step5"} <= set(again["copies to memory"])
    assert set(again["writes to storage"]) == {"global_step5"}
    assert len([event for event in read(path)[0]["traceEvents"] if event.get("name") == "process_name" and event["pid"] == "nebula"]) == 1


def test_pieces_of_one_thread_never_overlap_and_other_files_are_refused(place):
    nebulaml.init(str(place.storage), 0, 8)
    track = nebulaml.profiler_track(place.root / "traces")
    with profile(activities=[ProfilerActivity.CPU], on_trace_ready=track):
        checkpoints = [save(step) for step in range(1, 7)]
        for checkpoint in checkpoints:
            checkpoint.wait("durable", 60)
    (path,) = (place.root / "traces").iterdir()
    ours = sorted((event["tid"], event["ts"], event["dur"]) for event in read(path)[0]["traceEvents"] if event.get("pid") == "nebula" and event["ph"] == "X")
    for (tid, begin, duration), (other, next_begin, _) in itertools.pairwise(ours):
        assert tid != other or begin + duration <= next_begin + 1
    (place.root / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"not a trace of torch\.profiler"):
        nebulaml.add_to_trace(place.root / "other.json")
    assert (place.root / "other.json").read_text() == '{"traceEvents": []}'


def test_without_an_agent_the_programs_own_calls_are_there(place):
    nebulaml.init(str(place.storage), 0, 2, on_error="warn")
    track = nebulaml.profiler_track(place.root / "traces")
    with profile(activities=[ProfilerActivity.CPU], on_trace_ready=track):
        save(1).wait("durable", 60)
    (path,) = (place.root / "traces").iterdir()
    assert "save global_step1 m.pt" in read(path)[1]["calls of the program"]
