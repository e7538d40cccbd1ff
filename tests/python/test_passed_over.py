"""If a newer checkpoint may exist, an older one or None is never returned silently: the log and the result name the skipped ones."""

from __future__ import annotations

import json
import logging
import shutil

import nebulaml as nm
import pytest
from nebulaml import api


def save(place, *steps):
    """Saves by a run that then ends and loses its memory."""
    place.run(
        """
nm.init(sys.argv[1], 0, on_error="raise")
for step in sys.argv[2:]:
    with nm.Checkpoint(f"global_step{step}", -2) as checkpoint:
        checkpoint.save("state.pt", {"step": int(step), "more": torch.ones(1000)})
nm.flush_persistence()
""",
        place.storage,
        *steps,
    )
    place.lose_memory()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "nebulaml" and record.levelno == logging.WARNING]


def lose_file(folder):
    (folder / "state.pt").unlink()


def cut_file(folder):
    with open(folder / "state.pt", "r+b") as file:
        file.truncate(100)


def replace_file(folder):
    (folder / "state.pt").write_bytes(b"something else")


def damage_manifest(folder):
    path = folder / ".nebula" / "manifest-1.json"
    path.write_bytes(path.read_bytes().replace(b"global_step200", b"global_step201"))


def lose_manifest(folder):
    (folder / ".nebula" / "manifest-1.json").unlink()


def lose_record(folder):
    (path,) = (folder / ".nebula").glob("*.record-00000.json")
    path.unlink()


def lose_nebula(folder):
    shutil.rmtree(folder / ".nebula")


def rename(folder):
    folder.rename(folder.parent / "diverged")


# fault (Storage): The newest version has lost a file, a record, its manifest or all of `.nebula`, or one of these is
# cut, replaced, damaged or renamed.
# result: A search checks the sizes of all files that the manifest names, and takes an older version. The program's log
# (WARNING, with the reason) and `checkpoint.passed_over` name each version that was passed over. On several nodes no
# rank offers such a version to the others. In versions of more than 4,096 files the search does not check sizes.
@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lose_file, "missing"),
        (damage_manifest, "damaged"),
        (lose_nebula, "hidden files"),
        (rename, "renamed"),
        *(
            pytest.param(*one, marks=pytest.mark.nightly("test_a_newer_version_that_cannot_be_loaded_is_named_with_the_reason"))
            for one in ((cut_file, "100 bytes"), (replace_file, "14 bytes"), (lose_manifest, "manifest"), (lose_record, "missing"))
        ),
    ],
)
def test_a_newer_version_that_cannot_be_loaded_is_named_with_the_reason(place, caplog, damage, word):
    save(place, 100, 200)
    damage(place.storage / "global_step200")
    nm.init(place.storage, 0)
    found = nm.get_latest_checkpoint()
    assert found.tag == "global_step100" and found.load("state.pt")["step"] == 100
    [(tag, reason)] = found.passed_over
    assert tag == ("diverged" if damage is rename else "global_step200") and word in reason
    assert any(tag in line and reason in line and "global_step100 is taken" in line for line in warnings(caplog)), caplog.text


def test_nothing_is_said_of_what_is_older_or_in_order(place, caplog):
    save(place, 100, 200)
    lose_file(place.storage / "global_step100")
    (place.storage / "logs").mkdir()
    (place.storage / "logs" / "events").write_text("x")
    nm.init(place.storage, 0)
    found = nm.get_latest_checkpoint()
    assert (found.tag, found.passed_over) == ("global_step200", [])
    lose_nebula(place.storage / "global_step100")
    assert nm.get_latest_checkpoint().passed_over == []
    assert not warnings(caplog)


# fault (Storage): The path holds folders, but no manifest: copied without hidden files, another tool's, one level too
# high.
# result: The search returns None. The program's log names the path and the likely cure.
def test_a_path_of_folders_without_a_manifest_is_named_with_the_likely_cure(place, caplog, tmp_path):
    save(place, 100, 200)
    copied, other, empty = tmp_path / "copied", tmp_path / "other", tmp_path / "empty"
    shutil.copytree(place.storage, copied, ignore=shutil.ignore_patterns(".nebula"))
    (other / "run" / "checkpoint-5").mkdir(parents=True)
    empty.mkdir()
    nm.init(place.storage, 0)
    assert nm.get_latest_checkpoint(str(empty)) is None and nm.get_latest_checkpoint(str(tmp_path / "none")) is None
    assert not warnings(caplog)
    assert nm.get_latest_checkpoint(str(copied)) is None
    assert nm.get_latest_checkpoint(str(other)) is None
    assert nm.get_latest_checkpoint(str(place.storage.parent)) is None
    assert nm.get_latest_checkpoint(str(copied)) is None  # said once
    first, second, third = warnings(caplog)
    assert f"{copied} holds 2 folders but no Nebula manifest" in first and "hidden files" in first
    assert f"{other} holds 1 folder but no" in second
    assert f"one level deeper, in {place.storage}: give that path" in third


def test_a_tag_whose_folder_has_no_manifest_is_named(place, caplog):
    save(place, 100)
    lose_nebula(place.storage / "global_step100")
    nm.init(place.storage, 0)
    assert nm.get_checkpoint("global_step100") is None
    assert nm.get_checkpoint("global_step300") is None
    [line] = warnings(caplog)
    assert "'global_step100'" in line and "no manifest" in line


# fault: as test_a_newer_version_that_cannot_be_loaded_is_named_with_the_reason
def test_ranks_of_several_nodes_agree_on_what_storage_has_whole(place, caplog, monkeypatch):
    from nebulaml._session import agree, engine

    save(place, 100, 200, 300)
    lose_file(place.storage / "global_step300")
    nm.init(place.storage, 0)
    others = [one for one in agree.inventory(engine.default, None) if one["tag"] == "global_step100"]
    assert [one["tag"] for one in agree.inventory(engine.default, None)] == ["global_step200", "global_step100"]
    monkeypatch.setattr(agree.Agreement, "needed", lambda self: True)
    monkeypatch.setattr(agree.Agreement, "_ask", lambda self, path, turn, own, spent: (agree.choose([own, agree.Inventory.of(others)]), None))
    found = api.get_latest_checkpoint()
    assert found.tag == "global_step100"
    assert [tag for tag, _ in found.passed_over] == ["global_step300", "global_step200"]
    assert "not every rank" in found.passed_over[1][1] and "missing" in found.passed_over[0][1]
    assert len(warnings(caplog)) == 2
    for step in 100, 200:
        lose_file(place.storage / f"global_step{step}")
    with pytest.raises(nm.NebulaCorrupt, match="missing"):
        agree.inventory(engine.default, None)


def test_the_list_of_a_program_leaves_out_what_storage_has_lost(place):
    save(place, 100, 200)
    lose_file(place.storage / "global_step200")
    nm.init(place.storage, 0)
    assert json.loads(json.dumps(list(nm.list_checkpoints()))) == ["global_step100"]


# fault: as test_a_folder_that_was_moved_away_is_believed_by_the_agent_that_runs_on
@pytest.mark.parametrize("ends", ["is known", "is not known yet"])
def test_a_version_that_was_moved_away_between_two_sessions_of_a_process_is_not_the_newest(place, ends):
    place.run(
        """
        import contextlib
        def save():
            nm.init(sys.argv[1], 0, on_error="raise")
            for step in (1, 2):
                with nm.Checkpoint(f"global_step{step}") as checkpoint:
                    checkpoint.save("x", step)
                checkpoint.wait("durable")
        save()
        if sys.argv[2] == "is not known yet":  # the agent sees no end of a connection that is still open somewhere
            for fd in range(3, 100):
                with contextlib.suppress(OSError):
                    os.dup(fd)
        nm._shutdown()
        os.rename(sys.argv[1] + "/global_step2", sys.argv[1] + "-elsewhere")
        nm.init(sys.argv[1], 0, on_error="raise")
        assert nm.get_latest_checkpoint().load("x") == 1
        """,
        place.storage,
        ends,
    )


def test_a_link_to_a_checkpoint_is_answered_with_the_directory_that_holds_it(place, nm):
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("x", 1)
    checkpoint.wait("durable")
    link = place.root / "link"
    link.symlink_to(place.storage / "global_step1")
    with pytest.raises(nm.NebulaConfigError, match=f"is a checkpoint, not a directory of checkpoints: give {place.storage}$"):
        nm.get_latest_checkpoint(str(link))
