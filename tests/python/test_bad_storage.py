"""Storage that is full, read-only, gone, or full of other people's files: the effect on training, and the messages for the user."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from pathlib import Path

import nebulaml
import pytest
import torch
from nebulaml._session import config, locate
from nebulaml.errors import NebulaConfigError, NebulaCorrupt, NebulaError
from waiting import until, until_refused

MIB = 1 << 20


def save(step, mib=1, files=1):
    """Saves a version whose files hold its step. Returns False if the save failed."""
    checkpoint = nebulaml.Checkpoint(f"global_step{step}")
    for index in range(files):
        checkpoint.save(f"{index}.pt", torch.full((mib * MIB // 4,), float(step)))
    assert checkpoint.commit()
    return checkpoint


def holds(checkpoint, step, files=1):
    return all((checkpoint.load(f"{index}.pt") == step).all() for index in range(files))


def forget_memory(place):
    """Ends the agent and removes the memory tier, as a reboot does."""
    nebulaml._shutdown()
    place.lose_memory()


@pytest.fixture
def disk(place):
    """Mounts a file system of 12 MiB as the storage path."""
    place.storage.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "nebula-test", str(place.storage)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield place.storage
    nebulaml._shutdown()
    if place.agents():
        place.kill_agent()
    subprocess.run(["umount", "-l", place.storage], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)


# fault (Storage): Storage fills up in the middle of a version.
# result: The agent writes no manifest, so that version does not exist in storage. The one before can be loaded. Memory
# still has the new one.
def test_a_disk_that_fills_in_the_middle_of_a_version_costs_only_that_version(disk, place):
    nebulaml.init(str(disk), 0, 2)
    save(1, 3).wait("durable", 60)
    torn = save(2, 3, files=4)  # one or two of the four fit
    until_refused(torn, r"No space|are free")
    assert holds(nebulaml.get_latest_checkpoint(), 2, 4)  # memory still has it
    assert not (disk / "global_step2" / ".nebula" / "manifest-1.json").exists()
    forget_memory(place)
    nebulaml.init(str(disk), 0, 2)
    found = nebulaml.get_latest_checkpoint()
    assert found.tag == "global_step1" and holds(found, 1)


def test_a_wait_for_a_version_that_a_full_disk_has_failed_raises_an_error_of_storage(disk, monkeypatch):
    monkeypatch.setenv("NEBULA_PERSIST_GIVE_UP", "1")
    nebulaml.init(str(disk), 0, 2, on_error="raise")
    with pytest.raises(nebulaml.NebulaStorageError) as failure:
        save(1, 13).wait("durable", 60)
    assert failure.value.errno == errno.ENOSPC and isinstance(failure.value, OSError)


# fault (Storage): Storage has room again.
# result: The version that waited becomes durable.
def test_when_there_is_room_again_the_version_that_waited_becomes_durable(disk, place):
    nebulaml.init(str(disk), 0, 2)
    (disk / "ballast").write_bytes(bytes(10 * MIB))
    waiting = save(1, 4)
    until_refused(waiting, "No space|are free")
    (disk / "ballast").unlink()
    waiting.wait("durable", 60)
    forget_memory(place)
    nebulaml.init(str(disk), 0, 2)
    assert holds(nebulaml.get_latest_checkpoint(), 1)


# fault (Storage): Storage has no room for one version, but has for later ones.
# result: The later ones become durable. The large one waits, and says how many bytes it needs and how many are free.
def test_a_version_that_does_not_fit_on_the_disk_holds_up_no_later_one(disk, place):
    nebulaml.init(str(disk), 0, 2)
    large = save(1, 20)
    until_refused(large, r"No space|are free")
    for step in (2, 3):
        save(step, 1).wait("durable", 60)
    assert large.state == "committed" and "are free" in str(large.error)
    assert not (disk / "global_step1" / ".nebula" / "manifest-1.json").exists()
    forget_memory(place)
    nebulaml.init(str(disk), 0, 2)
    assert holds(nebulaml.get_latest_checkpoint(), 3)


# fault (Storage): The path turns read-only.
# result: Versions wait in memory and can be loaded. When the path is writable again, the agent goes on by itself.
def test_storage_that_turns_read_only_stops_nothing_and_is_used_again_later(disk, caplog):
    nebulaml.init(str(disk), 0, 2)
    save(1).wait("durable", 60)
    remount(disk, "ro")
    waiting = save(2)
    until_refused(waiting, "ead-only")
    assert nebulaml.flush_persistence(timeout=1) is False
    assert "ead-only" in caplog.text
    assert holds(nebulaml.get_latest_checkpoint(), 2)
    assert holds(nebulaml.get_checkpoint("global_step1"), 1)
    remount(disk, "rw")
    waiting.wait("durable", 60)


# fault (Storage): The directory is removed while the job runs.
# result: The agent makes it again for the next version. Versions that were in it are lost, and no list shows them.
def test_a_storage_directory_that_is_removed_while_running_is_made_again(nm, place):
    save(1).wait("durable", 60)
    shutil.rmtree(place.storage)
    save(2).wait("durable", 60)
    assert (torch.load(place.storage / "global_step2" / "0.pt") == 2).all()
    forget_memory(place)
    nebulaml.init(str(place.storage), 0)
    assert holds(nebulaml.get_latest_checkpoint(), 2)
    assert nebulaml.get_checkpoint("global_step1") is None  # the version was lost with its directory, and no answer claims otherwise


# fault (Storage): The path is replaced by a file.
# result: The agent reports an error until the path is a directory again. It does not touch the file.
def test_a_storage_path_that_becomes_a_file_is_an_error_until_it_is_a_directory_again(nm, place):
    save(1).wait("durable", 60)
    aside = place.root / "aside"
    place.storage.rename(aside)
    place.storage.write_text("not a directory")
    waiting = save(2)
    until_refused(waiting, "storage")
    assert place.storage.read_text() == "not a directory"
    place.storage.unlink()
    aside.rename(place.storage)
    waiting.wait("durable", 60)
    assert sorted(nm.list_checkpoints()) == ["global_step1", "global_step2"]


OBSTACLES = {
    "file": (lambda path: path.write_text("mine"), r"global_step2 is a file where a directory is to be: move it away"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), r"global_step2 is a symbolic link, and Nebula follows none below a storage path"),
    "circle": (lambda path: path.symlink_to("global_step2"), r"global_step2 is a symbolic link, and Nebula follows none below a storage path"),
    "file inside": (lambda path: (path.mkdir(), (path / ".nebula").write_text("mine")), r"global_step2/\.nebula is a file"),
}


# fault (Storage): A file, a dead link or a directory of another user has the name of a tag's directory, or one tag
# fails for another reason.
# result: That version waits in memory, and the agent tries again. Versions of other tags become durable meanwhile. The
# error names the obstacle and the cure.
@pytest.mark.parametrize("kind", list(OBSTACLES))
def test_an_obstacle_in_the_place_of_a_tag_blocks_only_that_version_and_is_named(kind, nm, place):
    make, words = OBSTACLES[kind]
    place.storage.mkdir()
    path = place.storage / "global_step2"
    make(path)
    save(1).wait("durable", 60)
    blocked = save(2)
    until_refused(blocked, words)
    for step in (3, 4):
        save(step).wait("durable", 60)
    until_refused(blocked, words)
    assert blocked.state == "committed" and holds(nm.get_latest_checkpoint(), 4)
    path.rename(place.root / "aside")
    blocked.wait("durable", 60)
    assert holds(nm.get_checkpoint("global_step2"), 2)


def test_a_directory_in_the_place_of_a_file_does_not_hold_up_its_version_and_is_named(nm, place):
    """Programs that do not read manifests find that directory. Readers of Nebula find the file."""
    (place.storage / "global_step2/0.pt/mine").mkdir(parents=True)
    save(2).wait("durable", 60)
    forget_memory(place)
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    assert holds(nm.get_checkpoint("global_step2"), 2)
    assert (place.storage / "global_step2/0.pt/mine").is_dir()
    assert "global_step2/0.pt is a directory where a file is to be" in (place.runtime / "agent.log").read_text()


REGIONS = {
    "first header": lambda data: 2,
    "padding": lambda data: 60,
    "first storage": lambda data: len(data) // 4,
    "payload": lambda data: len(data) // 2,
    "last storage": lambda data: len(data) * 3 // 4,
    "pickle": lambda data: data.index(b"_rebuild_tensor_v2"),
    "directory": lambda data: data.index(b"PK\x01\x02") + 10,
    "end of directory": lambda data: len(data) - 3,
}


# fault (Storage): A byte is flipped in any region of a file.
# result: `NebulaCorrupt` and `nebula verify` name the file and the offset.
@pytest.mark.parametrize("region", list(REGIONS))
def test_a_flipped_byte_in_any_region_of_a_file_is_found_and_the_older_version_loads(region, nm, place):
    for step in (1, 2):
        save(step)
    nm.flush_persistence()
    forget_memory(place)
    path = place.storage / "global_step2" / "0.pt"
    data = bytearray(path.read_bytes())
    data[REGIONS[region](data)] ^= 0x10
    path.write_bytes(data)
    nebulaml.init(str(place.storage), 0)
    with pytest.raises(NebulaCorrupt, match=r"global_step2/0\.pt"):
        nebulaml.get_checkpoint("global_step2").load("0.pt")
    assert holds(nebulaml.get_checkpoint("global_step1"), 1)


# fault (Storage): A file is truncated.
# result: `NebulaCorrupt` names the file and both sizes. The older version can be loaded.
@pytest.mark.parametrize("kept", [0, 1, 4095, 500_000, -1])
def test_a_truncated_file_is_found_and_never_loaded(kept, nm, place):
    for step in (1, 2):
        save(step)
    nm.flush_persistence()
    forget_memory(place)
    path = place.storage / "global_step2" / "0.pt"
    path.write_bytes(path.read_bytes()[:kept])
    nebulaml.init(str(place.storage), 0)
    with pytest.raises(NebulaCorrupt, match=r"0\.pt"):
        nebulaml.get_checkpoint("global_step2").load("0.pt")
    assert holds(nebulaml.get_checkpoint("global_step1"), 1)


def flip_in_document(place, document, part):
    """Flips a byte of a document of the second of two versions. Only storage has both."""
    for step in (1, 2):
        save(step)
    nebulaml.flush_persistence()
    forget_memory(place)
    (path,) = (place.storage / "global_step2" / ".nebula").glob(document)
    data = bytearray(path.read_bytes())
    data[int((len(data) - 1) * part)] ^= 1
    path.write_bytes(data)
    nebulaml.init(str(place.storage), 0)
    return path, data


# fault (Storage): A byte is flipped in the manifest.
# result: A search takes the older version. The damaged files stay as evidence. `nebula` names that version as its
# `latest`.
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.999])
def test_a_flipped_byte_in_a_manifest_leaves_the_older_version(part, nm, place):
    path, data = flip_in_document(place, "manifest-1.json", part)
    latest = nebulaml.get_latest_checkpoint()
    assert latest.tag == "global_step1" and holds(latest, 1)
    assert path.read_bytes() == data  # evidence stays


# fault (Storage): A byte is flipped in a record.
# result: A search reads manifests alone and takes that version, at every restart. Each `load` from it raises
# `NebulaCorrupt` and names the record. Older versions can be loaded by their tags. If you move this version's
# directory away, the newest of them is the newest again.
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.999])
def test_a_flipped_byte_in_a_record_is_named_by_each_load_and_the_older_version_loads_by_its_tag(part, nm, place):
    path, data = flip_in_document(place, "*.record-00000.json", part)
    for _ in range(2):
        with pytest.raises(NebulaCorrupt, match=r"global_step2.*record-00000"):
            nebulaml.get_latest_checkpoint().load("0.pt")
    assert holds(nebulaml.get_checkpoint("global_step1"), 1)
    assert path.read_bytes() == data  # evidence stays
    path.parent.parent.rename(place.storage.parent / "away")
    assert nebulaml.get_latest_checkpoint().tag == "global_step1"


# fault (Storage): A manifest has a newer major version.
# result: Nebula leaves that version alone and names it in the log. The older one can be loaded.
def test_a_manifest_of_a_newer_major_version_is_left_alone_and_named(nm, place):
    for step in (1, 2):
        save(step)
    nm.flush_persistence()
    forget_memory(place)
    path = place.storage / "global_step2" / ".nebula" / "manifest-1.json"
    text = path.read_text().replace('"version":"2.0"', '"version":"3.0"')
    assert '"3.0"' in text
    path.write_text(text)
    nebulaml.init(str(place.storage), 0)
    latest = nebulaml.get_latest_checkpoint()
    assert latest.tag == "global_step1" and holds(latest, 1)
    assert path.read_text() == text
    assert "global_step2" in (place.runtime / "agent.log").read_text()


# fault (Storage): Files of other programs are in the directory.
# result: Neither sweeps nor retention touch them, whatever their names are.
def test_foreign_files_in_the_storage_path_are_never_touched(place, monkeypatch):
    monkeypatch.setenv("NEBULA_SWEEP_AGE", "0")  # what could be swept is swept at once
    foreign = {
        "notes.txt": b"mine",
        "global_step1/readme": b"mine too",
        "global_step7/model.pt": b"another program's checkpoint",
        "other/.nebula/manifest-1.json": b"not json",
        "other/.nebula/secret": b"?",
        ".hidden": b"",
        "tmp-1-1": b"looks like debris, in the wrong place",
    }
    for name, content in foreign.items():
        path = place.storage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    nebulaml.init(str(place.storage), 0, 2, keep_last=1)
    for step in (1, 2, 3):
        save(step).wait("durable", 60)
    until(lambda: not (place.storage / "global_step2" / "0.pt").exists())
    assert holds(nebulaml.get_latest_checkpoint(), 3)
    forget_memory(place)
    nebulaml.init(str(place.storage), 0, 2)
    assert nebulaml.get_latest_checkpoint().tag == "global_step3"
    for name, content in foreign.items():
        assert (place.storage / name).read_bytes() == content, name


def test_a_storage_path_that_becomes_a_file_before_the_first_search_is_no_empty_storage(place):
    nebulaml.init(str(place.storage), 0, on_error="raise")
    place.storage.write_text("not a directory")
    with pytest.raises(NebulaError, match="Not a directory"):
        nebulaml.get_latest_checkpoint()


# fault (Storage): The path can never be a directory: it is a file, lies below one, or in `/proc`.
# result: `init`, a Manager, a Session and each search with that path raise `NebulaConfigError` at once.
@pytest.mark.parametrize("where", ["file", "file/below/it", "link", "/proc/self", "/proc/x", "/sys/x/y"])
def test_a_path_that_can_never_be_a_directory_of_checkpoints_is_refused_when_it_is_given(place, monkeypatch, where):
    (place.root / "file").write_text("not a directory")
    (place.root / "link").symlink_to(place.root / "file")
    path = place.root / where  # of two absolute paths the second counts
    calls = [
        lambda: nebulaml.init(path),
        lambda: nebulaml.init(f"file://{path}"),
        lambda: nebulaml.Manager(path),
        lambda: nebulaml.get_latest_checkpoint(str(path)),
        lambda: nebulaml.get_checkpoint("a", str(path)),
        lambda: nebulaml.list_checkpoints(path),
    ]
    for call in calls:
        with pytest.raises(NebulaConfigError, match=f"{path} cannot be a directory"):
            call()
    nebulaml._shutdown()
    monkeypatch.setenv("NEBULA_PERSISTENT_STORAGE_PATH", str(path))
    with pytest.raises(NebulaConfigError, match="cannot be a directory"):
        nebulaml.Checkpoint("a")


# fault: as test_a_path_that_can_never_be_a_directory_of_checkpoints_is_refused_when_it_is_given
def test_a_path_that_does_not_answer_holds_up_no_init(place, monkeypatch):
    monkeypatch.setattr(config, "LOOK_S", 0.01)
    monkeypatch.setattr(config, "_obstacle", lambda folder: threading.Event().wait(60) and "")
    nebulaml.init(place.storage, 0, on_error="raise")
    assert nebulaml.get_latest_checkpoint() is None


# fault (Storage): A program gives no storage path.
# result: Checkpoints are in memory only. The program's log says so once, at the first commit.
def test_a_job_without_a_storage_path_is_told_once_that_nothing_leaves_memory(place, caplog):
    for step in (1, 2):
        save(step)
    assert nebulaml.flush_persistence()
    assert caplog.text.count("checkpoints are in memory only, because no storage path was given") == 1
    nebulaml.init(place.storage)
    save(3)
    assert caplog.text.count("in memory only") == 1


@pytest.mark.parametrize("path", ["ftp://host/run", "file://relative", "file://host/run"])
def test_a_url_that_no_driver_knows_is_refused_when_it_is_given(path, place):
    with pytest.raises(NebulaConfigError, match=f'storage path "{path}"'):
        nebulaml.init(path)
    nebulaml.init("file://" + str(place.storage), 0)
    save(1).wait("durable", 60)


def test_a_flush_says_that_the_newest_version_failed_before_it_and_forgets_it_for_a_newer_one(place, monkeypatch, caplog):
    monkeypatch.setenv("NEBULA_PERSIST_GIVE_UP", "100ms")
    nebulaml.init(str(place.storage), 0)
    place.storage.write_text("not a directory")
    lost = save(1)
    until(lambda: lost.state == "failed")
    assert nebulaml.flush_persistence(timeout=60) is False
    assert "global_step1" in caplog.text and "Not a directory" in caplog.text
    place.storage.unlink()
    save(2)
    assert nebulaml.flush_persistence(timeout=60) is True


# fault (Storage): Storage hangs or is slow.
# result: Versions of its own jobs wait in memory. Versions of jobs with another path become durable. `nebula stop
# --now` ends the agent.
def test_storage_that_is_stuck_holds_up_its_own_job_and_neither_others_nor_the_end(place, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "1")  # a minute for one of the versions, nothing for the others
    stuck = place.root / "stuck"
    code = """
    nm.init(sys.argv[1], 0, 2, on_error="raise", job="other")
    checkpoint = nm.Checkpoint("global_step1", -2)
    checkpoint.save("0.pt", torch.zeros(16 << 20))
    say(checkpoint.commit())
    sys.stdin.read()
    """
    other = place.trainer(code, stuck, stdin=True)
    assert other.stdout.readline() == "True\n"
    until(lambda: any(path.is_file() for path in stuck.rglob("*")))  # its worker has begun
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    for step in (1, 2):
        checkpoint = nebulaml.Checkpoint(f"global_step{step}")
        checkpoint.save("0.pt", step)
        assert checkpoint.commit()
        checkpoint.wait("durable", 60)
    assert not list(stuck.rglob("manifest-*.json"))
    (agent,) = place.agents()
    program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    subprocess.run([program, "stop", "--now", "--yes"], check=True, timeout=60, capture_output=True)
    until(lambda: agent not in place.agents(), 60)
    assert not list(stuck.rglob("manifest-*.json"))
    other.communicate(timeout=60)


# fault (Storage): A byte is flipped in the manifest, and there is no older version.
# result: `get_latest_checkpoint()` raises `NebulaCorrupt`. Training does not begin again from nothing without a
# message.
def test_when_the_only_version_is_damaged_loading_raises_and_does_not_say_there_is_none(place):
    nebulaml.init(str(place.storage), 0, on_error="raise")
    save(1).wait("durable", 60)
    forget_memory(place)
    path = place.storage / "global_step1" / ".nebula" / "manifest-1.json"
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)
    nebulaml.init(str(place.storage), 0, on_error="raise")
    with pytest.raises(NebulaCorrupt, match=r"no checkpoint in .* can be loaded.*global_step1"):
        nebulaml.get_latest_checkpoint()
