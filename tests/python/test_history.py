"""The history, the listing and the status agree on each version."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import time

import nebulaml
import pytest
import torch
from nebulaml._session import locate
from nebulaml.studio import snapshot
from nebulaml.studio.source import Source
from waiting import until

HISTORY = "checkpointHistories.csv"
KEY = ("tag", "sequence")
COLUMNS = [
    *("tag", "step", "sequence", "world", "files", "size_bytes", "result"),
    *("blocked_ms", "copy_ms", "capture_cpu_ms", "faults", "begun", "captured", "committed", "durable"),
    *("persist_seconds", "persist_mib_per_s", "error", "stopped", "stepped", "read", "read_step", "written_bytes", "read_tier"),
]


def program() -> str:
    return os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()


def told(place, *arguments):
    command = [program(), *arguments, "--json", "--path", str(place.storage)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def save(tag, count=1000):
    checkpoint = nebulaml.Checkpoint(tag)
    checkpoint.save("m.pt", torch.zeros(count))
    checkpoint.commit()
    return checkpoint


def recorded(place, count, file=None):
    """Returns the rows of the file when it has so many. The file is there before its rows are."""
    path, deadline = file or place.root / "output" / HISTORY, time.monotonic() + 60
    rows = []
    while len(rows) < count:
        assert time.monotonic() < deadline, rows
        time.sleep(0.02)
        rows = list(csv.DictReader(path.open())) if path.exists() else []
    return rows


def first_frame(place):
    """Returns the tags that `nebula status --watch` shows."""
    command = [program(), "status", "--watch", "--path", str(place.storage)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("TAG ") for line in lines)
        tags = []
        for line in lines:
            if not line.strip() or line.startswith("agent"):
                break
            tags.append(line.split()[0])
        process.kill()
    return tags


def test_history_stats_list_and_status_agree_on_every_version(place, monkeypatch):
    """The versions: durable ones, some that left memory before they were due, a tag written twice, and a failed one between them."""
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "32M")
    nebulaml.init(str(place.storage), 1000, 2, on_full="skip")
    save("global_step1").wait("durable", 60)
    for step in (2, 3, 4):
        save(f"global_step{step}")
    save("best").wait("durable", 60)
    save("best").wait("durable", 60)
    save("global_step5", 10 << 20)  # more than all memory
    save("global_step6").wait("durable", 60)

    stats = nebulaml.stats()
    results = sorted((row["tag"], row["result"]) for row in stats)
    assert results == [
        ("best", "durable"),
        ("best", "durable"),
        ("global_step1", "durable"),
        *((f"global_step{step}", "superseded") for step in (2, 3, 4)),
        ("global_step5", "failed"),
        ("global_step6", "durable"),
    ]
    rows = recorded(place, len(stats))
    assert list(rows[0]) == COLUMNS and all(list(row) == COLUMNS for row in stats)
    by_key = {tuple(str(row[name]) for name in KEY): row for row in stats}
    for row in rows:
        live = by_key.pop(tuple(row[name] for name in KEY))
        for name in COLUMNS:
            if isinstance(live[name], float):
                assert float(row[name]) == pytest.approx(live[name], abs=0.06)
            else:
                assert row[name] == str(live[name])
    assert not by_key, "a version has no line"

    listed = told(place, "list")["versions"]
    assert [row["tag"] for row in listed] == ["global_step1", "best", "global_step5", "global_step6"]
    for row in listed:
        live = next(one for one in stats if all(one[name] == row[name] for name in KEY))
        assert (row["state"], row["size"], row["file_count"]) == (live["result"], live["size_bytes"], live["files"])
        assert ("storage" in row["where"]) == (live["result"] == "durable") and row["reason"] == live["error"]
    assert listed[1]["entry"] == 2
    status = told(place, "status")
    assert status["storage"]["versions"] == listed and not status["queue"]
    assert first_frame(place) == [row["tag"] for row in listed]
    assert {tag: row["state"] for tag, row in nebulaml.list_checkpoints().items()} == {
        row["tag"]: row["state"] for row in listed
    }
    loadable = {row["tag"] for row in listed if row["state"] != "failed"}
    assert loadable == {tag for row in stats if nebulaml.get_checkpoint(tag := row["tag"]) is not None}


def test_the_history_goes_on_with_the_next_agent_and_has_each_version_once(place):
    nebulaml.init(str(place.storage), 0, 2)
    save("global_step1").wait("durable", 60)
    recorded(place, 1)
    place.kill_agent()
    save("global_step2").wait("durable", 60)
    assert [row["tag"] for row in recorded(place, 2)] == ["global_step1", "global_step2"]


@pytest.mark.parametrize("capture", ["copy", "auto"])
def test_a_save_says_what_it_cost(place, monkeypatch, capture):
    monkeypatch.setenv("NEBULA_CAPTURE", capture)
    nebulaml.init(str(place.storage), 0, 2)
    save("global_step1", 8 << 20).wait("durable", 60)
    (row,) = nebulaml.stats()
    assert row["blocked_ms"] > 0 and row["copy_ms"] > 0 and row["capture_cpu_ms"] > 0
    assert row["begun"] < row["captured"] <= row["committed"] < row["durable"]
    assert capture != "copy" or row["faults"] == 0


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("azure", [False, True])
def test_the_history_lies_with_azuremls_outputs_or_beside_the_storage_and_the_working_directory_stays_clean(place, monkeypatch, azure):
    work = place.root / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("NEBULA_OUTPUT_DIR")
    if azure:
        monkeypatch.setenv("AZUREML_RUN_ID", "run7")
    nebulaml.init(str(place.storage), 0)
    save("global_step1").wait("durable", 60)
    beside = place.storage / ".nebula" / HISTORY
    where = work / "outputs" / "nebula" / HISTORY if azure else beside
    assert [row["tag"] for row in recorded(place, 1, where)] == ["global_step1"]
    assert files_below(work) == ([f"outputs/nebula/{HISTORY}"] if azure else [])
    assert beside.exists() != azure
    assert [version["tag"] for version in told(place, "list")["versions"]] == ["global_step1"]


def test_a_hostile_tag_is_one_field_of_one_line_and_turns_nothing_around(place):
    nebulaml.init(str(place.storage), 0)
    tags = ["\u202egpj.exe", 'esc\x1b[31m\x9b2J,"quoted"\nnext', "<script>alert(1)</script>"]
    for tag in tags:
        save(tag).wait("durable", 60)
    assert [row["tag"] for row in recorded(place, 3)] == [" gpj.exe", 'esc [31m 2J,"quoted" next', tags[2]]
    assert sorted(version["tag"] for version in told(place, "list")["versions"]) == sorted(tags)


FORMULAS = ["=1+1", "+1", "-1+1", "@SUM(1)", "\t=2+1", "\r=3+1", " =1+1", "\uff1d1+1", "'=1+1", "' -1", "=HYPERLINK(\"http://x\",\"y\")"]
PLAIN = ["'quoted'", "a=1+1", "1-1", "' a"]


def test_a_spreadsheet_takes_no_tag_for_a_formula_and_the_readers_find_the_same_tag(place):
    nebulaml.init(str(place.storage), 0)
    for tag in [*FORMULAS, *PLAIN]:
        save(tag).wait("durable", 60)
    rows = recorded(place, len(FORMULAS) + len(PLAIN))
    cells = [row["tag"] for row in rows]
    assert cells == ["'" + re.sub(r"\s", " ", tag) for tag in FORMULAS] + PLAIN
    assert {row["step"] for row in rows} == {"-1", "1"}, "numbers stay numbers"
    source = Source(str(place.storage), str(place.root / "output"))
    assert [row["tag"] for row in source.history()] == [re.sub(r"\s", " ", tag) for tag in [*FORMULAS, *PLAIN]]
    told = snapshot.build(source.status() | {"history": []}, source.history(), [], None, snapshot.Watch(), time.time())
    assert sorted(one["tag"] for one in told["rows"].values()) == sorted([*FORMULAS, *PLAIN])
    assert all(one["state"] == "durable" and one["blocked_ms"] > 0 for one in told["rows"].values())
    source.close()


def test_the_studio_reads_all_lines_but_those_that_were_cut(place):
    nebulaml.init(str(place.storage), 0)
    for tag in ("global_step1", "global_step2", "global_step3"):
        save(tag).wait("durable", 60)
    recorded(place, 3)
    file = place.root / "output" / HISTORY
    header, *whole = file.read_text().splitlines(keepends=True)
    source = Source(str(place.storage), str(file))
    for cut in (whole[1][:5] + "\n", whole[1][:60] + "\n", whole[1][:60], "x" * 200_000 + "\n", "\0\n", re.sub(r"\d+\.\d+", "nan", whole[1])):
        file.write_text(header + whole[0] + cut + whole[2] + whole[2][:70])
        tags = [row["tag"] for row in source.history()]
        assert tags == (["global_step1", "global_step3"] if cut.endswith("\n") else ["global_step1"]), cut[:100]
    source.close()


@pytest.mark.parametrize("where", ["outputs/nebula", "output", "storage/.nebula"])
def test_the_studio_takes_lines_and_goodput_from_the_same_file(place, monkeypatch, where):
    nebulaml.init(str(place.storage), 0)
    for tag in ("global_step1", "global_step2"):
        save(tag).wait("durable", 60)
    recorded(place, 2)
    (place.root / where).mkdir(parents=True, exist_ok=True)
    (place.root / "output" / HISTORY).rename(place.root / where / HISTORY)
    monkeypatch.setenv("AZUREML_RUN_ID", "run7")
    monkeypatch.setenv("NEBULA_OUTPUT_DIR", "output")
    monkeypatch.chdir(place.root)
    source = Source(str(place.storage))
    assert len(source.history()) == source.goodput()["saves"] == 2
    (place.root / where / HISTORY).unlink()
    assert source.history() == [] and source.goodput() is None
    source.close()


def test_without_a_storage_path_there_is_a_history_only_where_one_is_named(place, monkeypatch):
    work = place.root / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("NEBULA_OUTPUT_DIR")
    monkeypatch.setenv("AZUREML_RUN_ID", "run7")
    nebulaml.init(num_of_version_in_retention=1)
    for step in (1, 2, 3):  # without storage the version before stays until another one begins
        save(f"global_step{step}").wait("committed", 60)
    until(lambda: [row["result"] for row in nebulaml.stats() if row["tag"] == "global_step1"] in ([], ["memory"]))
    assert files_below(work) == []
    monkeypatch.setenv("NEBULA_OUTPUT_DIR", "here")
    nebulaml._shutdown()
    nebulaml.init(num_of_version_in_retention=1)
    for step in (4, 5, 6):
        save(f"global_step{step}").wait("committed", 60)
    until((work / "here" / HISTORY).exists)
