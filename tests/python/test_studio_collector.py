"""If `nebula store` does not answer, the studio's thread continues and reports that."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest
from nebulaml._session import locate
from nebulaml.errors import NebulaUnavailable
from nebulaml.studio import collector as module
from nebulaml.studio import fleet
from nebulaml.studio.collector import Collector
from nebulaml.studio.source import Source
from waiting import until

SAVE = """
    nm.init(sys.argv[1], 0, 2, on_error="raise")
    checkpoint = nm.Checkpoint("global_step1", metrics={"val_loss": 3.0})
    checkpoint.save("model.pt", {"weight": torch.ones(64, 32)})
    assert checkpoint.commit()
    checkpoint.wait("durable")
"""


def test_the_end_of_nebula_store_stops_no_look_and_loses_no_metrics(place, monkeypatch):
    place.run(SAVE, place.storage)
    real = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    fails = place.root / "fails"
    fails.touch()
    script = place.root / "command"
    script.write_text(f'#!/bin/sh\nif [ "$1" = store ] && [ -e {fails} ]; then exit 1; fi\nexec {real} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("NEBULA_AGENT_PATH", str(script))
    source = Source(str(place.storage))
    collector = Collector(source, 0.2)
    collector.start()
    try:
        (row,) = collector.state("", 0, 60)["rows"].values()
        assert row["tag"] == "global_step1" and row["metrics"] == {}
        fails.unlink()
        deadline = time.monotonic() + 60
        while row["metrics"] != {"val_loss": 3.0}:
            assert time.monotonic() < deadline and collector._thread.is_alive(), row
            time.sleep(0.1)
            (row,) = collector.state("", 0, 0)["rows"].values()
        place.kill_agent()
        os.kill(source._store._process.pid, signal.SIGKILL)
        while collector.state("", 0, 0)["running"]:
            assert time.monotonic() < deadline and collector._thread.is_alive()
            time.sleep(0.1)
    finally:
        collector.close()
        source.close()


# fault (Storage): Storage hangs while a page shows a job.
# result: The page keeps what it knew, and says since when that is old, until storage answers.
def test_a_storage_that_hangs_is_said_on_the_page(place, monkeypatch):
    place.run(SAVE, place.storage)
    source = Source(str(place.storage))
    look, hangs, answers = source.status, threading.Event(), threading.Event()

    def status(*arguments):
        if hangs.is_set():
            assert answers.wait(60)
        return look(*arguments)

    monkeypatch.setattr(source, "status", status)
    monkeypatch.setattr(module, "LATE_S", 0.2)
    collector = Collector(source, 0.1)
    collector.start()

    def problems():
        told = collector.state("", 0, 0)
        assert len(told["rows"]) == 1
        return [one for one in told["problems"] if "has not answered since" in one]

    try:
        until(lambda: collector._complete and not problems(), 60, "the first look")
        hangs.set()
        until(problems, 60, "the words")
        assert len(problems()) == 1
        hangs.clear()
        answers.set()
        until(lambda: not problems(), 60, "an answer")
    finally:
        answers.set()
        collector.close()
        source.close()


# fault (Storage): Another program has put its own files into the place of a job's settings and of the history.
# result: The studio shows the versions, and leaves these files out.
def test_settings_and_a_history_that_no_agent_has_written_hide_no_version(place):
    place.run(SAVE, place.storage)
    (sound,) = (place.storage / ".nebula").glob("settings-*.json")
    kept = json.loads(sound.read_text())
    wrong = [[], {}, "text", None, {"job": "x"}, {"job": "x", "settings": []}, {**kept, "job": 1}, {**kept, "job": "x", "settings": {"rules": [1]}}]
    wrong += [{**kept, "job": "x", "settings": {**kept["settings"], "persistent_time_interval": now}} for now in ("", None, [], -1)]
    for number, one in enumerate(["{", "[" * 50_000, *map(json.dumps, wrong)]):
        (place.storage / f".nebula/settings-wrong{number}.json").write_text(one)
    os.mkfifo(place.storage / ".nebula/settings-fifo.json")
    (place.storage / ".nebula/checkpointHistories.csv").unlink(missing_ok=True)
    os.mkfifo(place.storage / ".nebula/checkpointHistories.csv")
    source = Source(str(place.storage), history=str(place.storage / ".nebula"))
    collector = Collector(source, 0.2)
    collector.start()
    try:
        state = collector.state("", 0, 60)
        assert [row["tag"] for row in state["rows"].values()] == ["global_step1"], state["problems"]
        assert not state["problems"]
        assert {one["origin"] for one in state["config"]["values"] if one["name"] == "replicas"} == {"init(), kept with the versions"}
    finally:
        collector.close()
        source.close()


AGAIN = """
    nm.init(sys.argv[1], 0, 2, on_error="raise")
    for loss in (3.0, 2.0):
        checkpoint = nm.Checkpoint("global_step1", metrics={"val_loss": loss})
        checkpoint.save("model.pt", {"weight": torch.full((64, 32), loss)})
        assert checkpoint.commit()
        checkpoint.wait("durable")
"""


def test_metrics_of_a_tag_that_was_written_again_are_those_that_its_manifest_names(place, monkeypatch):
    place.run(AGAIN, place.storage)
    beside = place.storage / "global_step1" / "nebula-metadata.json"
    text = beside.read_text()
    beside.unlink()
    beside.write_text(text.replace("2.0", "3.0"))  # as a store leaves it that cannot copy
    source = Source(str(place.storage))
    try:
        assert "3.0" in beside.read_text() and source.metrics("global_step1", 1, 2) == {"val_loss": 2.0}
    finally:
        source.close()


# fault (Storage): Storage hangs when the studio starts.
# result: The studio prints its address at once. Its page waits until storage has said whether it has one job or several.
def test_a_storage_that_hangs_holds_up_no_start_of_the_studio(place, monkeypatch):
    answers = place.root / "answers"
    script = place.root / "command"
    script.write_text(f"#!/bin/sh\nwhile [ ! -e {answers} ]; do sleep 0.05; done\necho '{{\"is_job\": false, \"jobs\": [], \"path\": \"\"}}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("NEBULA_AGENT_PATH", str(script))
    monkeypatch.setattr(fleet, "FIRST_S", 0.2)
    studio = fleet.Fleet([str(place.storage)], None, None)
    try:
        studio.start()
        for asked in (studio.about, lambda: studio.job("")):
            with pytest.raises(NebulaUnavailable, match="has not answered yet"):
                asked()
        answers.touch()
        until(lambda: studio.several is not None, 60, "the answer of storage")
        assert studio.about() == {"several": False} and studio.job("").source.path == str(place.storage)
    finally:
        answers.touch()
        studio.close()
