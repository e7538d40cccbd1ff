"""Rot of bytes: in storage, with sound bytes in memory, and in memory, with sound bytes in storage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import fork_server
import nebulaml as nm
import pytest
import torch
from nebulaml._session import locate
from waiting import until


def nebula(*words: object) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=120)


def save(place, tag: str = "global_step1") -> Path:
    nm.init(str(place.storage), 0, 2)
    with nm.Checkpoint(tag) as checkpoint:
        checkpoint.save("model.pt", {"value": torch.arange(3 << 20, dtype=torch.float32)})
    checkpoint.wait("durable", 60)
    return place.storage / tag / "model.pt"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


# fault: as test_damaged_files_are_repaired_from_another_storage
def test_a_file_that_has_rotted_in_storage_is_repaired_from_the_agents_memory(place):
    file = save(place)
    sound = file.read_bytes()
    flip(file, 5 << 20)
    done = nebula("verify", place.storage, "--every", "7d", "--repair", "--json")
    assert done.returncode == 0, done.stderr
    assert [one["repaired"] for one in json.loads(done.stdout)["versions"][0]["files"]] == ["memory"]
    assert file.read_bytes() == sound


def spoil_manifest(place, tag: str) -> None:
    (manifest,) = (place.storage / tag / ".nebula").glob("manifest-*")
    flip(manifest, 40)


def repair(place) -> list[tuple[str, str]]:
    done = nebula("verify", "--all", "--repair", "--json", "--path", place.storage)
    assert done.returncode == 0, done
    return [(one["tag"], document["repaired"]) for one in json.loads(done.stdout)["versions"] for document in one["documents"] if "repaired" in document]


# fault: as test_a_damaged_or_missing_manifest_is_made_again_from_its_records
def test_a_manifest_is_made_again_from_the_agents_memory_if_the_index_is_gone_too(place):
    file = save(place)
    sound = file.read_bytes()
    spoil_manifest(place, "global_step1")
    shutil.rmtree(place.storage / ".nebula/index")
    assert repair(place) == [("global_step1", "memory")]
    assert file.read_bytes() == sound and nebula("verify", "--all", "--path", place.storage).returncode == 0
    save(place, "global_step1")  # again
    save(place, "global_step2")
    assert torch.equal(nm.get_checkpoint("global_step1").load("model.pt")["value"], torch.arange(3 << 20, dtype=torch.float32))


# fault: as test_a_damaged_or_missing_manifest_is_made_again_from_its_records
@pytest.mark.nightly("test_a_manifest_is_made_again_from_the_agents_memory_if_the_index_is_gone_too")
def test_a_manifest_of_a_later_line_of_history_is_made_again_with_it(place):
    for step in (1, 2, 3):
        save(place, f"global_step{step}")
    nm._shutdown()
    nm.init(str(place.storage), 0, 2)
    nm.get_checkpoint("global_step1").load("model.pt")
    for step in (2, 3):  # another line
        save(place, f"global_step{step}")
    (manifest,) = (place.storage / "global_step3" / ".nebula").glob("manifest-*")
    line = json.loads(manifest.read_text())["line"]
    spoil_manifest(place, "global_step3")
    assert repair(place) == [("global_step3", "memory")]
    (manifest,) = (place.storage / "global_step3" / ".nebula").glob("manifest-*")
    assert json.loads(manifest.read_text())["line"] == line
    nm._shutdown()
    assert nebula("stop").returncode == 0
    manifest.unlink()
    assert repair(place) == [("global_step3", "its records")]
    assert json.loads(next((place.storage / "global_step3" / ".nebula").glob("manifest-*")).read_text())["line"] == line


def spoil(document: Path, how: str) -> None:
    text = document.read_bytes()
    if how == "removed":
        document.unlink()
    else:
        document.write_bytes({"bit": text[:40] + bytes([text[40] ^ 1]) + text[41:], "cut": text[: len(text) // 2], "empty": b""}[how])


def record_of(place, tag: str) -> Path:
    (record,) = (place.storage / tag / ".nebula").glob("*.record-*")
    return record


# fault (Storage): A record is damaged or missing, and memory has the version.
# result: The agent that has written it, or its manifest, has its bytes, and `nebula verify --repair` puts them back. Without that agent, a line names
# the record and `--from`.
@pytest.mark.parametrize("how", ["bit", *(pytest.param(how, marks=pytest.mark.nightly("test_a_damaged_or_missing_record_is_repaired_from_the_agents_memory")) for how in ("cut", "empty", "removed"))])
def test_a_damaged_or_missing_record_is_repaired_from_the_agents_memory(place, how):
    sound = {}
    for tag in ("global_step1", "global_step2"):
        save(place, tag)
        sound[tag] = record_of(place, tag).read_bytes()
    for tag in sound:
        record = record_of(place, tag)
        spoil(record, how)
        assert repair(place) == [(tag, "memory")]
        assert record.read_bytes() == sound[tag]
    assert nebula("verify", "--all", "--path", place.storage).returncode == 0
    nm._shutdown()
    assert nebula("stop").returncode == 0
    spoil(record, how)
    done = nebula("verify", "--all", "--repair", "--path", place.storage)
    assert done.returncode == 1 and f"the record of rank 0 of {tag} was not repaired from memory; --from" in done.stderr


# fault: as test_a_damaged_or_missing_record_is_repaired_from_the_agents_memory
@pytest.mark.parametrize("how", ["removed", pytest.param("bit", marks=pytest.mark.nightly("test_a_record_is_repaired_with_the_manifest_that_names_it"))])
def test_a_record_is_repaired_with_the_manifest_that_names_it(place, how):
    file = save(place)
    record, sound = record_of(place, "global_step1"), file.read_bytes()
    text = record.read_bytes()
    spoil(record, how)
    spoil_manifest(place, "global_step1")
    assert repair(place) == [("global_step1", "memory")]
    assert record.read_bytes() == text and file.read_bytes() == sound
    assert nebula("verify", "--all", "--path", place.storage).returncode == 0


# fault: as test_a_damaged_or_missing_record_is_repaired_from_the_agents_memory
def test_the_record_of_files_that_carry_over_is_repaired(place):
    nm.init(str(place.storage), 0, 2)
    for name in ("first.pt", "second.pt"):  # the later writing takes the file of the first over
        with nm.Checkpoint("global_step1") as checkpoint:
            checkpoint.save(name, {"value": torch.arange(1000)})
        checkpoint.wait("durable", 60)
    records = sorted((place.storage / "global_step1/.nebula").glob("*.record-*"))
    sound = [record.read_bytes() for record in records]
    assert len(records) == 2
    for record in records:
        spoil(record, "bit")
    assert repair(place) == [("global_step1", "memory")]
    assert [record.read_bytes() for record in records] == sound


# fault: as test_a_damaged_or_missing_record_is_repaired_from_the_agents_memory
@pytest.mark.parametrize("how", ["bit", pytest.param("removed", marks=pytest.mark.nightly("test_the_agent_writes_a_record_again_that_a_reader_has_found_damaged"))])
def test_the_agent_writes_a_record_again_that_a_reader_has_found_damaged(place, how):
    save(place)
    record = record_of(place, "global_step1")
    sound = record.read_bytes()
    spoil(record, how)
    assert nebula("verify", place.storage).returncode == 1
    until(lambda: record.is_file() and record.read_bytes() == sound, 60, "the agent writes the record again")
    until(lambda: "storage" in nm.list_checkpoints()["global_step1"]["source"], 60, "the version counts as durable")


ANOTHER_RUN = """
import sys, torch, nebulaml as nm
nm.init(sys.argv[1], 0, 2)
assert nm.get_latest_checkpoint() is not None
for number in range(4):
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", {"value": torch.full((1000,), float(number))})
    checkpoint.wait("durable", 60)
nm._shutdown()
"""


# fault: as test_a_damaged_or_missing_manifest_is_made_again_from_its_records
def test_a_tag_that_another_run_writes_again_during_repairs_keeps_its_newest_version(place):
    save(place)
    save(place, "global_step0")
    nm._shutdown()
    other = fork_server.start(ANOTHER_RUN, place.storage)
    while other.poll() is None:
        for tag in ("global_step0", "global_step1"):
            try:
                spoil_manifest(place, tag)
            except (ValueError, OSError):  # the other run is just writing it
                continue
            nebula("verify", tag, "--repair", "--path", place.storage)
    assert other.returncode == 0
    repair(place)
    assert nebula("verify", "--all", "--path", place.storage).returncode == 0
    nm.init(str(place.storage), 0, 2)
    assert torch.equal(nm.get_checkpoint("global_step1").load("model.pt")["value"], torch.full((1000,), 3.0))


# fault: as test_a_damaged_or_missing_record_is_repaired_from_the_agents_memory
# result: The record of a version that another run has replaced does not come back.
def test_memory_gives_no_record_of_a_version_that_storage_has_no_more(place):
    save(place)
    former = record_of(place, "global_step1")
    nm._shutdown()
    apart = {"NEBULA_RUNTIME_DIR": str(place.root / "other"), "NEBULA_MEMORY_DIR": str(place.root / "memory"), "NEBULA_AGENT_LINGER": "0"}
    assert fork_server.start(ANOTHER_RUN, place.storage, env=os.environ | apart).wait(120) == 0
    record = record_of(place, "global_step1")
    spoil(record, "bit")
    spoil_manifest(place, "global_step1")
    done = nebula("verify", "--all", "--repair", "--path", place.storage)
    assert done.returncode == 1 and "cannot be made again" in done.stderr, done
    assert not former.exists() and record_of(place, "global_step1") == record


@pytest.fixture
def told(caplog):
    """Returns the lines of the program's log that have a text."""
    caplog.set_level("INFO", "nebulaml")
    return lambda text: [record.getMessage() for record in caplog.records if text in record.getMessage()]


# fault (Storage): Bytes of a version change in memory.
# result: The idle agent finds it. The version leaves memory, and storage serves it. A version that only memory has
# fails.
def test_an_image_whose_bytes_change_is_named_and_answers_no_more(place, monkeypatch, told):
    monkeypatch.setenv("NEBULA_CHECK_MEMORY", "1")
    file = save(place)
    (image,) = [path for path in place.memory.glob("*.img") if path.stat().st_size >= file.stat().st_size and b"PK" in path.read_bytes()[:4]]
    flip(image, 5 << 20)
    until(lambda: told("in memory have changed"), 60, "the event")
    assert "'global_step1'" in told("in memory have changed")[0] and "storage has it" in told("in memory have changed")[0]
    until(lambda: "storage" in nm.list_checkpoints()["global_step1"]["source"], 60, "the version counts as durable")
    assert torch.equal(nm.get_latest_checkpoint().load("model.pt")["value"], torch.arange(3 << 20, dtype=torch.float32))
    assert 'nebula_findings_total{kind="rotten"} 1' in nebula("metrics", "--path", place.storage).stdout


def test_images_that_are_sound_stay_however_often_they_are_compared(place, monkeypatch, told):
    monkeypatch.setenv("NEBULA_CHECK_MEMORY", "1")
    for step in range(1, 6):  # images are reused
        save(place, f"global_step{step}")
    report = json.loads(nebula("status", "--json", "--path", place.storage).stdout)
    assert not told("have changed") and report
    assert "memory" in nm.list_checkpoints()["global_step5"]["source"]


def save_values(place, step: int, **tensors: torch.Tensor) -> None:
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save("model.pt", {"step": step, **tensors})
    checkpoint.wait("durable", 60)


# fault (Storage): A program saves the same values again, or a NaN or infinite value.
# result: The log of the program, an event and a metric say so. The version is written.
def test_a_version_with_the_values_of_the_one_before_is_told(place, told):
    nm.init(str(place.storage), 0, 2)
    weights = torch.randn(40_000)
    save_values(place, 1, w=weights)
    save_values(place, 2, w=weights + 1)
    save_values(place, 3, w=weights + 1)
    until(lambda: told("its values are those of"), 60, "the event")
    assert ["'global_step3'" in line and "step 2:" in line for line in told("its values are those of")] == [True]
    assert 'nebula_findings_total{kind="stale"} 1' in nebula("metrics", "--path", place.storage).stdout


# fault: as test_a_version_with_the_values_of_the_one_before_is_told
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_named_once(place, dtype, value, told):
    nm.init(str(place.storage), 0, 2)
    good, bad = torch.ones(1000, dtype=dtype), torch.ones(1000, dtype=dtype)
    bad[7] = value
    numbers = torch.full((1000,), -1)  # integers whose bytes would be NaNs
    save_values(place, 1, good=good, numbers=numbers, most=torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))
    assert not told("infinite value")
    save_values(place, 2, good=good, bad=bad)
    save_values(place, 3, good=good, bad=bad)
    until(lambda: told("infinite value"), 60, "the event")
    assert ["'global_step2'" in line and '"bad"' in line for line in told("infinite value")] == [True]


# fault: as test_a_version_with_the_values_of_the_one_before_is_told
def test_many_small_tensors_are_looked_at_in_each_fourth_version_and_named_once(place, told):
    nm.init(str(place.storage), 0, 2)
    many = {f"w{i}": torch.ones(64) for i in range(1100)}
    for step in range(1, 9):  # steps 1, 5 and 9 are looked at
        if step == 2:
            many["w700"] = torch.full((64,), torch.nan)
        save_values(place, step, **many)
        assert not told("infinite value") or step > 4
    until(lambda: told("infinite value"), 60, "the event")
    save_values(place, 9, **many)
    save_values(place, 10, bad=torch.full((1,), torch.nan), **dict(list(many.items())[:900]))  # too few to be left out
    save_values(place, 11, large=torch.ones(1 << 20))
    save_values(place, 12, large=torch.full((1 << 20,), torch.inf))
    until(lambda: len(told("infinite value")) == 2, 60, "the second event")
    assert ["'global_step5'" in told("infinite value")[0] and '"w700"' in told("infinite value")[0], "'global_step12'" in told("infinite value")[1]] == [True, True]


# fault: as test_a_version_with_the_values_of_the_one_before_is_told
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_not_finite_is_found_in_files_of_dcp_and_in_safetensors(place, dtype, told):
    import torch.distributed.checkpoint as dcp
    from nebulaml.dcp import NebulaStorageWriter

    nm.init(str(place.storage), 0, 2)
    good, bad = torch.ones(1001, dtype=dtype), torch.ones(1001, dtype=dtype)
    bad[7] = float("inf")

    def plain(tensor: torch.Tensor) -> bytes:  # safetensors
        parts = {"first": torch.ones(3, dtype=torch.int32), "layer.weight": tensor}
        offsets, at = {}, 0
        for name, one in parts.items():
            kind = {torch.int32: "I32", torch.float32: "F32", torch.bfloat16: "BF16"}[one.dtype]
            offsets[name] = {"dtype": kind, "shape": list(one.shape), "data_offsets": [at, at := at + one.nbytes]}
        head = json.dumps({"__metadata__": {"format": "pt"}, **offsets}).encode()
        return len(head).to_bytes(8, "little") + head + b"".join(bytes(one.view(torch.uint8).numpy()) for one in parts.values())

    def save_plain(step: int, tensor: torch.Tensor) -> None:
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save_bytes("model.safetensors", plain(tensor))
        checkpoint.wait("durable", 60)

    def save_dcp(step: int, tensor: torch.Tensor) -> None:
        writer = NebulaStorageWriter(str(place.storage / f"global_step{step}"))
        dcp.save({"a": good, "w": tensor, "z": good, "step": step}, storage_writer=writer, no_dist=True)
        nm.flush_persistence(timeout=60)

    save_plain(1, good)
    save_dcp(2, good)
    assert not told("infinite value")
    save_plain(3, bad)
    until(lambda: told("infinite value"), 60, "the event")
    assert ["'global_step3'" in line and '"layer.weight"' in line for line in told("infinite value")] == [True]
    save_plain(4, good)
    save_dcp(5, bad)
    until(lambda: len(told("infinite value")) == 2, 60, "the event")
    assert "'global_step5'" in told("infinite value")[1] and "distcp" in told("infinite value")[1]


@pytest.mark.parametrize(("choice", "at", "is_found"), [("all", 100_000, True), ("sample", 100_000, False), ("off", 7, False)])
def test_the_agent_looks_at_as_many_values_as_it_is_set_to(place, monkeypatch, told, choice, at, is_found):
    monkeypatch.setenv("NEBULA_CHECK_VALUES", choice)
    nm.init(str(place.storage), 0, 2)
    values = torch.ones(200_000)
    values[at] = float("nan")  # 100,000: beyond the first 4 KiB of its MiB
    save_values(place, 1, w=values)
    save_values(place, 2, w=torch.ones(8))  # events come in order, so that of step 1 has come, if any, when this version is durable
    if is_found:
        until(lambda: told("infinite value"), 60, "the event")
    assert bool(told("infinite value")) == is_found


# fault (Storage): A version is found damaged in storage while memory has it.
# result: It does not count as durable and stays in memory. The agent writes it again from memory.
def test_a_version_that_was_found_damaged_in_storage_is_written_again_from_memory(place):
    file = save(place)
    sound = file.read_bytes()
    flip(file, 5 << 20)
    assert nebula("verify", place.storage, "--every", "7d").returncode == 1
    until(lambda: file.read_bytes() == sound, 60, "the agent writes the file again")
    until(lambda: "storage" in nm.list_checkpoints()["global_step1"]["source"], 60, "the version counts as durable")


# fault: as test_a_version_that_was_found_damaged_in_storage_is_written_again_from_memory
def test_a_version_that_cannot_be_written_again_stays_in_memory_until_it_can(place):
    nm.init(str(place.storage), 0, 1)
    values = torch.arange(3 << 20, dtype=torch.float32)

    def save_step(step: int) -> None:
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("model.pt", {"value": values + step})
        checkpoint.wait("durable", 60)

    save_step(1)
    file = place.storage / "global_step1" / "model.pt"
    sound = file.read_bytes()
    file.unlink()
    file.mkdir()  # no agent can write a file there
    assert nebula("verify", "global_step1", "--path", place.storage).returncode == 1
    for step in (2, 3):
        save_step(step)
    assert nm.list_checkpoints()["global_step1"]["source"] == ["memory"]
    assert torch.equal(nm.get_checkpoint("global_step1").load("model.pt")["value"], values + 1)
    file.rmdir()
    until(lambda: file.is_file() and file.read_bytes() == sound, 60, "the agent writes the file again")
    until(lambda: "storage" in nm.list_checkpoints()["global_step1"]["source"], 60, "the version counts as durable")


OTHER_NODE = """
import sys, torch, nebulaml as nm
nm.init(sys.argv[1], 0, 2)
with nm.Checkpoint("global_step1") as checkpoint:
    checkpoint.save("model1.pt", {"value": torch.arange(3 << 20, dtype=torch.float32)})
checkpoint.wait("durable", 60)
nm._shutdown()
"""


def save_of_two_nodes(place, monkeypatch) -> None:
    nodes = [{"NEBULA_NODE_ID": f"node{rank}", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for rank in range(2)]
    apart = {"NEBULA_RUNTIME_DIR": str(place.root / "other"), "NEBULA_MEMORY_DIR": str(place.root / "memory"), "NEBULA_AGENT_LINGER": "0"}
    place.storage.mkdir()
    monkeypatch.setenv("NEBULA_RUN_ID", "run1")
    other = fork_server.start(OTHER_NODE, place.storage, env=os.environ | nodes[1] | apart)
    for name, value in nodes[0].items():
        monkeypatch.setenv(name, value)
    nm.init(str(place.storage), 0, 2)
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model0.pt", {"value": torch.arange(3 << 20, dtype=torch.float32)})
    checkpoint.wait("durable", 60)
    assert other.wait(60) == 0


# fault: as test_a_damaged_or_missing_record_is_repaired_from_the_agents_memory
# result: The node that wrote the manifest repairs the records of all nodes.
def test_records_of_other_nodes_are_repaired_by_the_node_that_wrote_the_manifest(place, monkeypatch):
    save_of_two_nodes(place, monkeypatch)
    records = sorted((place.storage / "global_step1/.nebula").glob("*.record-*"))
    sound = [record.read_bytes() for record in records]
    assert len(records) == 2
    for record in records:
        spoil(record, "cut")
    assert repair(place) == [("global_step1", "memory")]
    assert [record.read_bytes() for record in records] == sound


# fault: as test_a_version_that_was_found_damaged_in_storage_is_written_again_from_memory
# result: A node that has no sound bytes of the damaged file does not count the version as whole.
@pytest.mark.parametrize("is_own_damaged", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_version_whose_damaged_file_is_another_nodes_does_not_count_as_durable(place, monkeypatch, is_own_damaged):
    save_of_two_nodes(place, monkeypatch)
    own, others = (place.storage / "global_step1" / f"model{rank}.pt" for rank in range(2))
    sound = own.read_bytes()
    flip(others, 5 << 20)
    if is_own_damaged:
        flip(own, 5 << 20)
    assert nebula("verify", place.storage).returncode == 1
    until(lambda: own.read_bytes() == sound, 60, "the agent writes its own file again")
    nebula("flush", "--path", place.storage)
    assert nm.list_checkpoints()["global_step1"]["source"] == ["memory"]
