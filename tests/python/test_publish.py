"""Checkpoints at paths that a framework chose: complete, durable, in order, also after the trainer and the agent have died."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import zipfile

import nebulaml
import processes
import pytest
import torch
from nebulaml._session import locate
from nebulaml.integrations import hf
from test_bad_storage import forget_memory
from waiting import until


@pytest.fixture
def out(place):
    return place.root / "out"


def save(nm, tag, value, name="checkpoint", count=1):
    checkpoint = nm.Checkpoint(tag, count)
    checkpoint.save(name, {"w": torch.full((1000,), float(value))})
    return checkpoint


def value_at(path):
    return torch.load(path)["w"][0].item()


def test_a_file_appears_when_durable(nm, place, out):
    checkpoint = save(nm, "global_step1", 1, count=None)  # whole only when it is committed
    assert checkpoint.publish("checkpoint", out / "a" / "epoch=0.ckpt")
    assert not (out / "a" / "epoch=0.ckpt").exists()
    checkpoint.commit()
    checkpoint.wait("durable")
    assert value_at(out / "a" / "epoch=0.ckpt") == 1
    assert sorted(os.listdir(out / "a")) == ["epoch=0.ckpt"]


# fault (Storage): A program later writes to a published file in place, as `torch.save` does.
# result: The stored file is another file and stays whole.
def test_a_published_file_that_is_overwritten_in_place_leaves_the_durable_version_whole(nm, place, out):
    checkpoint = save(nm, "global_step1", 1)
    checkpoint.publish("checkpoint", out / "1.ckpt")
    staging = out / "staging"
    staging.mkdir(parents=True)
    checkpoint.publish_directory(staging, out / "whole")
    checkpoint.commit()
    checkpoint.wait("durable")
    for path in (out / "1.ckpt", out / "whole" / "checkpoint"):
        torch.save({"w": torch.full((1000,), 2.0)}, path)
        assert value_at(path) == 2
    assert value_at(place.storage / "global_step1" / "checkpoint") == 1
    done = subprocess.run([locate.agent_path() or "nebula", "verify", "--path", place.storage], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    place.lose_memory()
    assert nm.get_latest_checkpoint().load("checkpoint")["w"][0] == 1


def test_another_file_system_gets_a_verified_copy(nm, place):
    elsewhere = tempfile.mkdtemp(prefix="nebula-publish-", dir="/dev/shm")
    try:
        if os.stat(elsewhere).st_dev == os.stat(place.root).st_dev:
            pytest.skip("there is only one file system")
        checkpoint = save(nm, "global_step1", 1)
        checkpoint.publish("checkpoint", elsewhere + "/x.ckpt")
        checkpoint.commit()
        checkpoint.wait("durable")
        assert value_at(elsewhere + "/x.ckpt") == 1
        assert os.listdir(elsewhere) == ["x.ckpt"]
    finally:
        shutil.rmtree(elsewhere)


def test_a_path_is_found_before_it_is_there_and_while_it_is_there_but_not_when_replaced(nm, out):
    path = out / "last.ckpt"
    assert nm.find_published(path) is None
    checkpoint = save(nm, "global_step1", 1)
    checkpoint.publish("checkpoint", path)
    checkpoint.commit()
    found, name = nm.find_published(path)
    assert (found.tag, name) == ("global_step1", "checkpoint")
    assert found.load(name)["w"][0] == 1
    checkpoint.wait("durable")
    assert nm.find_published(path)[0].tag == "global_step1"
    torch.save({"w": torch.zeros(3)}, str(path) + ".new")
    os.rename(str(path) + ".new", path)
    assert nm.find_published(path) is None


def test_a_path_published_again_holds_the_later_one(nm, out):
    for step in range(1, 6):
        checkpoint = save(nm, f"global_step{step}", step)
        checkpoint.publish("checkpoint", out / "last.ckpt")
        checkpoint.commit()
    assert nm.flush_persistence()
    assert value_at(out / "last.ckpt") == 5
    assert nm.find_published(out / "last.ckpt")[0].tag == "global_step5"


def test_top_k_removals_follow_the_saves_they_came_after(nm, out):
    for step in range(1, 8):
        checkpoint = save(nm, f"global_step{step}", step)
        checkpoint.publish("checkpoint", out / f"{step}.ckpt")
        checkpoint.commit()
        if step > 2:
            nm.unpublish(out / f"{step - 2}.ckpt")
    nm.flush_persistence()
    assert sorted(os.listdir(out)) == ["6.ckpt", "7.ckpt"]
    assert nm.find_published(out / "3.ckpt") is None


def test_nothing_is_removed_while_what_came_before_cannot_be_stored(nm, place, out):
    first = save(nm, "global_step1", 1)
    first.publish("checkpoint", out / "1.ckpt")
    first.commit()
    first.wait("durable")
    os.rename(place.storage, str(place.storage) + ".away")
    place.storage.write_text("in the way")
    second = save(nm, "global_step2", 2)
    second.publish("checkpoint", out / "2.ckpt")
    second.commit()
    nm.unpublish(out / "1.ckpt")
    with pytest.raises(nm.NebulaTimeout):
        second.wait("durable", timeout=1.5)
    assert value_at(out / "1.ckpt") == 1
    assert not (out / "2.ckpt").exists()
    os.unlink(place.storage)
    os.rename(str(place.storage) + ".away", place.storage)
    nm.flush_persistence()
    assert os.listdir(out) == ["2.ckpt"]


def test_a_save_that_is_cancelled_never_appears(nm, place, out):
    place.storage.write_text("in the way")
    for step in (1, 2):
        checkpoint = save(nm, f"global_step{step}", step)
        checkpoint.publish("checkpoint", out / f"{step}.ckpt")
        checkpoint.commit()
    nm.unpublish(out / "1.ckpt")
    assert nm.find_published(out / "1.ckpt") is None
    os.unlink(place.storage)
    nm.flush_persistence()
    assert os.listdir(out) == ["2.ckpt"]


def whole(nm, out, tag="checkpoint-1", value=1):
    staging, target = out / ".staging" / tag, out / tag
    (staging / "sub").mkdir(parents=True)
    (staging / "config.json").write_text(json.dumps({"value": value}))
    (staging / "sub" / "vocabulary.txt").write_text("words")
    checkpoint = nm.Checkpoint(tag, 3)
    checkpoint.save("optimizer.pt", {"w": torch.full((10,), float(value))})
    checkpoint.save("sub/rng.pt", {"w": torch.full((10,), float(value))})
    checkpoint.save_bytes(".metadata", [b"hidden"])
    checkpoint.publish_directory(staging, target)
    return checkpoint, target


NAMES = [".metadata", ".nebula.json", "config.json", "optimizer.pt", "sub/rng.pt", "sub/vocabulary.txt"]


def names_below(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_a_whole_directory_appears_with_what_was_staged_and_goes_with_its_checkpoint(nm, place, out):
    checkpoint, target = whole(nm, out)
    assert not target.exists()
    checkpoint.commit()
    assert nm.find_published(target / "sub" / "rng.pt")[1] == "sub/rng.pt"
    assert nm.find_published(target)[1] == ""
    checkpoint.wait("durable")
    assert names_below(target) == NAMES
    assert value_at(target / "sub" / "rng.pt") == 1
    assert (target / ".metadata").read_bytes() == b"hidden"
    assert not (out / ".staging" / "checkpoint-1").exists()
    second, _ = whole(nm, out, "checkpoint-2", 2)
    second.commit()
    nm.unpublish(target)
    nm.flush_persistence()
    assert sorted(path.name for path in out.iterdir() if path.name != ".staging") == ["checkpoint-2"]
    until(lambda: not (place.storage / "checkpoint-1").exists())
    assert nm.get_checkpoint("checkpoint-1") is None
    assert nm.get_latest_checkpoint().tag == "checkpoint-2"
    assert nm.flush_persistence(timeout=60)


def test_a_directory_that_is_removed_on_its_way_leaves_nothing_in_storage_or_staging(nm, place, out):
    place.storage.write_text("in the way")
    for step in range(1, 5):
        checkpoint, _ = whole(nm, out, f"checkpoint-{step}", step)
        checkpoint.commit()
        if step > 2:
            nm.unpublish(out / f"checkpoint-{step - 2}")
    os.unlink(place.storage)
    nm.flush_persistence()
    assert sorted(path.name for path in out.iterdir() if path.name != ".staging") == ["checkpoint-3", "checkpoint-4"]
    assert os.listdir(out / ".staging") == []
    until(lambda: sorted(n for n in os.listdir(place.storage) if n.startswith("checkpoint")) == ["checkpoint-3", "checkpoint-4"])


def test_a_path_that_nothing_can_be_published_as_is_refused_and_never_taken_for_another(nm, out):
    save(nm, "global_step1", 1).publish("checkpoint", out / "x.ckpt")
    nm.flush_persistence()
    for end in ("\0", "\0more", "\udc80"):
        with pytest.raises(nm.NebulaConfigError):
            nm.unpublish(str(out / "x.ckpt") + end)
        assert nm.find_published(str(out / "x.ckpt") + end) is None
    nm.flush_persistence()
    assert value_at(out / "x.ckpt") == 1


def test_directories_that_the_program_needs_or_that_were_not_published_are_never_removed(nm, place, out, monkeypatch):
    work = out / "work"
    (work / "sub").mkdir(parents=True)
    (work / "train.py").write_text("precious")
    (out / "link").symlink_to(out)
    save(nm, "global_step1", 1).wait("durable")
    monkeypatch.chdir(work)
    above = [place.root, place.storage, place.storage / ".." / "storage", "/"]
    for path in ("", ".", "..", work, out, out / "link" / "work", work / "sub", *above):
        with pytest.raises(nm.NebulaConfigError, match=r"empty|stays"):
            nm.unpublish(path)
    _, on_its_way = whole(nm, out)
    monkeypatch.chdir(place.root)
    with pytest.raises(nm.NebulaConfigError, match="was not published"):
        nm.unpublish("out/work")
    nm.unpublish(out / "link")  # of which only the link goes
    nm.unpublish(on_its_way)
    nm.flush_persistence()
    until(lambda: not (out / "link").is_symlink())
    until(lambda: nm.get_latest_checkpoint().tag == "global_step1", what="the removal of the version on its way, which may have been published")
    assert (work / "train.py").read_text() == "precious" and (work / "sub").exists()


def test_an_adapter_removes_what_its_framework_wrote_without_nebula_and_not_what_is_needed(nm, place, out, monkeypatch):
    from nebulaml import api

    (out / "checkpoint-1" / "sub").mkdir(parents=True)
    (out / "checkpoint-1" / "sub" / "model.bin").write_text("an earlier run's")
    monkeypatch.chdir(out / "checkpoint-1")
    with pytest.raises(nm.NebulaConfigError, match="stays"):
        api._remove(out / "checkpoint-1")
    monkeypatch.chdir(place.root)
    api._remove(out / "checkpoint-1")
    until(lambda: not (out / "checkpoint-1").exists())


def test_a_file_goes_also_from_a_working_directory_that_is_gone(nm, place, out, monkeypatch):
    save(nm, "global_step1", 1).publish("checkpoint", out / "x.ckpt")
    nm.flush_persistence()
    (place.root / "gone").mkdir()
    monkeypatch.chdir(place.root / "gone")
    (place.root / "gone").rmdir()
    nm.unpublish(out / "x.ckpt")
    until(lambda: not (out / "x.ckpt").exists())
    with pytest.raises(nm.NebulaConfigError, match="working directory is gone"):
        nm.unpublish("x.ckpt")


def test_nothing_is_published_as_an_empty_path(nm, out):
    checkpoint = save(nm, "global_step1", 1)
    for attempt in (lambda: checkpoint.publish("checkpoint", ""), lambda: checkpoint.publish_directory("", out)):
        with pytest.raises(nm.NebulaConfigError, match="empty"):
            attempt()
    assert nm.find_published("") is None


def test_files_join_a_directory_that_is_there_already(nm, out):
    checkpoint, target = whole(nm, out)
    target.mkdir()
    (target / "incomplete.txt").write_text("an earlier attempt")
    (target / "config.json").write_text("old")
    checkpoint.commit()
    checkpoint.wait("durable")
    assert names_below(target) == sorted([*NAMES, "incomplete.txt"])
    assert json.loads((target / "config.json").read_text()) == {"value": 1}


def test_a_directory_of_an_earlier_agent_takes_its_version_along(nm, place, out):
    for step in (1, 2):
        checkpoint, _ = whole(nm, out, f"checkpoint-{step}", step)
        checkpoint.commit()
        checkpoint.wait("durable")
    place.lose_memory()
    nm.unpublish(out / "checkpoint-1")
    nm.flush_persistence()
    until(lambda: not (place.storage / "checkpoint-1").exists())
    assert (place.storage / "checkpoint-2").exists()


def test_a_name_never_leads_out_of_its_directory(nm, out):
    staging = out / ".staging"
    checkpoint = nm.Checkpoint("checkpoint-1", 1)
    checkpoint.save("../../escaped.pt", {"w": torch.ones(1)})
    checkpoint.publish_directory(staging, out / "checkpoint-1")
    checkpoint.commit()
    with pytest.raises(nm.NebulaError, match="leads out"):
        checkpoint.wait("durable")
    assert not (out / "checkpoint-1").exists()
    assert not list(out.parent.rglob("escaped.pt"))


def test_a_checkpoint_that_cannot_appear_is_reported_and_training_continues(nm, place, out):
    out.mkdir()
    (out / "file").write_text("no directory")
    checkpoint = save(nm, "global_step1", 1)
    checkpoint.publish("checkpoint", out / "file" / "x.ckpt")
    checkpoint.commit()
    with pytest.raises(nm.NebulaError, match=r"x\.ckpt"):
        checkpoint.wait("durable")
    assert value_at(place.storage / "global_step1" / "checkpoint") == 1
    with pytest.raises(nm.NebulaNotFound):
        checkpoint.publish("no such file", out / "y.ckpt")


KILLED = """
nm.init(sys.argv[1], 0, 2)
if sys.argv[3:]:
    open(sys.argv[1], "w").write(sys.argv[3])
for step in range(1, 5):
    c = nm.Checkpoint(f"global_step{step}", 1)
    c.save("checkpoint", {"w": torch.full((200000,), float(step))})
    c.publish("checkpoint", f"{sys.argv[2]}/{step}.ckpt")
    c.commit()
    if step > 1:
        nm.unpublish(f"{sys.argv[2]}/{step - 1}.ckpt")
say("saved")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_publishing_survives_the_trainer(place, out):
    place.run(KILLED, place.storage, out, returncode=-signal.SIGKILL)
    until(lambda: out.exists() and os.listdir(out) == ["4.ckpt"])
    assert value_at(out / "4.ckpt") == 4


def test_publishing_survives_trainer_and_agent(nm, place, out):
    nm._shutdown()
    place.run(KILLED, place.storage, out, "in the way", returncode=-signal.SIGKILL)
    place.kill_agent()
    os.unlink(place.storage)
    assert not out.exists()
    nm.init(str(place.storage), 0, 2, on_error="raise")
    found, name = nm.find_published(out / "4.ckpt")
    assert found.load(name)["w"][0] == 4
    nm.flush_persistence()
    until(lambda: out.exists() and os.listdir(out) == ["4.ckpt"])
    assert value_at(out / "4.ckpt") == 4


# fault (Memory): A version whose file is to appear at a path is lost with its survival log, and storage has an earlier writing of its tag.
# result: The agent's log says that the file cannot be published. The earlier file does not appear in its place.
def test_the_file_of_an_earlier_writing_is_not_published_for_one_that_was_lost(place, out, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "1")
    out.mkdir()
    trainer = place.trainer(
        """
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        for content in (b"old", b"new" * (20 << 20)):
            with nm.Checkpoint("a") as checkpoint:
                checkpoint.save_bytes("w", content)
            if content == b"old":
                checkpoint.wait("durable", 60)
        checkpoint.publish("w", sys.argv[2])
        say("asked")
        sys.stdin.read()
        """,
        place.storage, out / "w", stdin=True,
    )  # fmt: skip
    assert trainer.stdout.readline() == "asked\n"
    until(lambda: any(json.loads(path.read_text())["entries"][0]["sequence"] for path in place.memory.glob("*.publish")), 20, "the list")
    for pid in place.agents():
        processes.stop(pid)
    assert not list(out.iterdir())
    for path in place.memory.glob("*.version"):
        path.write_bytes(b"damaged")
    place.kill_all(trainer)
    with nebulaml.Reader(place.storage):
        until(lambda: "w of a cannot be published" in "".join(path.read_text() for path in place.root.rglob("agent.log")) or list(out.iterdir()), 60)
    assert not list(out.iterdir())


def test_bytes_and_tensors_are_saved_one_behind_the_other_and_read_back(nm):
    tensor = torch.arange(5, dtype=torch.int32)
    checkpoint = nm.Checkpoint("global_step1", 1)
    checkpoint.save_bytes("x.bin", [b"head", tensor, memoryview(b"tail"), b"", bytearray(b"!")])
    expected = b"head" + tensor.numpy().tobytes() + b"tail!"
    tensor.zero_()
    checkpoint.commit()
    assert checkpoint.read_bytes("x.bin") == expected
    with checkpoint.view("x.bin") as data:
        assert data.readonly and data[4:8] == b"\0\0\0\0"
    with pytest.raises(nm.NebulaConfigError):
        checkpoint.save_bytes("y.bin", [torch.zeros(4, 4).t()[1:]])


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_one_tensor_as_a_complete_torch_file(tmp_path, shape, dtype):
    from nebulaml.tensors import pickling

    tensor = torch.randint(0, 2, shape).to(dtype)
    parts, size = pickling.file_parts(torch.empty(shape, dtype=dtype), tensor)
    whole = b"".join(part if isinstance(part, bytes) else bytes_of(part) for part in parts)
    assert len(whole) == size
    (tmp_path / "x.pt").write_bytes(whole)
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded.dtype == dtype and torch.equal(loaded, tensor)
    assert "archive/data/0" in zipfile.ZipFile(tmp_path / "x.pt").namelist() or tensor.numel() == 0


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


# fault (Storage): The directory of a checkpoint of transformers is a copy of another one's.
# result: A save there takes a tag of its own, so the other checkpoint stays as it is.
def test_a_save_into_a_copied_directory_does_not_take_the_tag_of_the_copied_one(nm, out):
    for step in (4, 6, 8):
        checkpoint = save(nm, f"checkpoint-{step}", step)
        (out / f"staging-{step}").mkdir(parents=True)
        checkpoint.publish_directory(out / f"staging-{step}", out / f"checkpoint-{step}")
        checkpoint.commit()
        checkpoint.wait("durable")
        until((out / f"checkpoint-{step}" / hf.LABEL).exists)
    shutil.rmtree(out / "checkpoint-6")
    shutil.copytree(out / "checkpoint-4", out / "checkpoint-6")
    assert hf._chosen(nm.api.default, str(out), "") == {"checkpoint-4": "checkpoint-4", "checkpoint-6": "checkpoint-6~2", "checkpoint-8": "checkpoint-8"}
    shutil.rmtree(out / "checkpoint-8")
    for text in ("", "[]", '{"tag": null}', '{"tag": 5}'):
        (out / "checkpoint-4" / hf.LABEL).write_text(text)
        assert hf._chosen(nm.api.default, str(out), "") == {"checkpoint-6": "checkpoint-6~2", "checkpoint-8": "checkpoint-8~2"}, text


# fault (Storage): A person has copied the directory of a checkpoint. The program removes the copy.
# result: The version of the other directory stays, and the version that was published there goes.
@pytest.mark.parametrize("forgets", [False, True])
def test_the_removal_of_a_copy_leaves_the_version_of_the_directory_that_was_copied(nm, place, out, forgets):
    for step in (4, 6, 8):
        checkpoint = save(nm, f"checkpoint-{step}", step)
        (out / f"staging-{step}").mkdir(parents=True)
        checkpoint.publish_directory(out / f"staging-{step}", out / f"checkpoint-{step}")
        checkpoint.commit()
        checkpoint.wait("durable")
        until((out / f"checkpoint-{step}" / hf.LABEL).exists)
    shutil.rmtree(out / "checkpoint-6")
    shutil.copytree(out / "checkpoint-4", out / "checkpoint-6")
    shutil.copytree(out / "checkpoint-4", out / "best")
    if forgets:
        forget_memory(place)
        nm.init(str(place.storage), 0, 2, on_error="raise")
    nm.unpublish(out / "checkpoint-6")
    nm.unpublish(out / "best")
    nm.unpublish(out / "checkpoint-8")
    until(lambda: not (out / "checkpoint-8").exists() and "checkpoint-8" not in nm.list_checkpoints())
    assert sorted(os.listdir(out)) == ["checkpoint-4"]
    left = nm.list_checkpoints()
    assert "checkpoint-4" in left and ("checkpoint-6" in left) == forgets, left  # no label and no list of the agent names it then
