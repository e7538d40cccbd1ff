"""One storage directory, however its path is spelled, is one path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time

import nebulaml
import pytest
import torch
from nebulaml._session import locate
from nebulaml.errors import NebulaError
from nebulaml.studio import snapshot
from waiting import until_refused


def bind(place):
    """Mounts the storage directory at a second place."""
    place.storage.mkdir(exist_ok=True)
    other = place.root / "mounted"
    other.mkdir()
    if os.geteuid() or subprocess.run(["mount", "--bind", place.storage, other], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    return other


def link(place, name, target):
    (place.root / name).symlink_to(target)
    return place.root / name


SPELLINGS = {
    "link": lambda place: link(place, "alias", place.storage),
    "relative link": lambda place: link(place, "alias", "storage"),
    "link of a link": lambda place: link(place, "second", link(place, "first", place.storage)),
    "link above": lambda place: link(place, "above", place.root) / "storage",
    "dots": lambda place: f"{link(place, 'sub', place.root)}/./storage/../storage",
    "slashes": lambda place: f"{place.root}//storage///",
    "url": lambda place: f"file://{place.storage}",
    "mounted twice": bind,
}

SECOND = """
nm.init(sys.argv[1], 0, 2, on_error="raise")
found = nm.get_latest_checkpoint()
say(found.tag, sorted(nm.list_checkpoints())) if found else say("nothing")
"""


REFUSED = """
try:
    nm.init(sys.argv[1], 0, 2, on_error="raise")
except nm.NebulaError as error:
    say(error)
"""


@pytest.fixture
def spelled(request, place):
    yield str(SPELLINGS[request.param](place))
    nebulaml._shutdown()
    if request.param == "mounted twice":
        if place.agents():
            place.kill_agent()
        subprocess.run(["umount", "-l", place.root / "mounted"], check=True)


DAILY = ("link", "dots", "url", "mounted twice")


def every_spelling(test):
    nightly = pytest.mark.nightly(test.__name__)
    return pytest.mark.parametrize("spelled", [name if name in DAILY else pytest.param(name, marks=nightly) for name in SPELLINGS], indirect=True)(test)


def save(tag, value=1):
    checkpoint = nebulaml.Checkpoint(tag)
    checkpoint.save("m.pt", torch.full((1000,), float(value)))
    assert checkpoint.commit()
    return checkpoint


def command(*arguments):
    program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)


# fault (Arguments of the caller): One path has two spellings: a symbolic link, `..`, `//`, `file://`, a second mount.
# result: They are one path. The second trainer is refused. A reader finds versions in memory under each spelling, also
# those that the last agent left. `nebula metrics` and `nebula studio` show the job under each.
@every_spelling
def test_a_second_trainer_of_one_path_is_refused_and_finds_what_memory_has_however_it_spells_it(spelled, place):
    nebulaml.init(str(place.storage), 100000, 2, on_error="raise")
    save("global_step1").wait("durable", 60)
    save("global_step2").wait("captured", 60)
    assert nebulaml.get_latest_checkpoint(spelled).tag == "global_step2"
    rows = json.loads(command("list", "--json", "--path", spelled).stdout)["versions"]
    assert sorted(row["tag"] for row in rows) == ["global_step1", "global_step2"]
    assert "already is rank 0" in place.run(REFUSED, spelled)
    nebulaml._shutdown()
    assert place.run(SECOND, spelled).strip() == "global_step2 ['global_step1', 'global_step2']"


# fault: as test_a_second_trainer_of_one_path_is_refused_and_finds_what_memory_has_however_it_spells_it
@every_spelling
def test_the_next_agent_finds_by_another_spelling_what_the_last_one_left_in_memory(spelled, place):
    place.storage.mkdir(exist_ok=True)  # nothing is made behind a link that leads nowhere
    nebulaml.init(spelled, 100000, 2, on_error="raise")
    save("global_step1").wait("durable", 60)
    save("global_step2").wait("captured", 60)
    nebulaml._shutdown()
    place.kill_agent()
    assert place.run(SECOND, place.storage).strip() == "global_step2 ['global_step1', 'global_step2']"


def test_a_path_that_does_not_exist_yet_is_one_however_it_is_spelled(place):
    disk = place.root / "disk"
    disk.mkdir()
    spelled = link(place, "alias", disk) / "runs" / "7"
    nebulaml.init(str(spelled), 100000, 2, on_error="raise")
    save("global_step1").wait("captured", 60)
    assert nebulaml.get_latest_checkpoint(str(disk / "runs" / "7")).tag == "global_step1"
    nebulaml.flush_persistence()
    assert (disk / "runs" / "7" / "global_step1" / "m.pt").exists()
    nebulaml._shutdown()
    assert place.run(SECOND, disk / "runs" / "7").startswith("global_step1")


# fault (Arguments of the caller): A link in the storage path leads to a file system that is not mounted yet.
# result: Versions wait in memory until it is mounted. The agent makes no directory in its place.
def test_a_link_to_what_is_not_mounted_yet_is_followed_once_it_is_and_nothing_is_made_there_before(place):
    disk = place.root / "disk"
    spelled = link(place, "scratch", disk)
    nebulaml.init(str(spelled / "7"), 0, 2, on_error="raise")
    waiting = save("global_step1")
    until_refused(waiting, "scratch is a symbolic link that leads nowhere")
    assert not disk.exists()
    disk.mkdir()
    waiting.wait("durable", 60)
    assert nebulaml.get_latest_checkpoint(str(disk / "7")).tag == "global_step1"
    assert "already is rank 0" in place.run(REFUSED, disk / "7")


# fault (Arguments of the caller): A link in the storage path is set to another directory while the agent runs.
# result: A trainer that starts from then on uses the other directory. Versions that were saved before become durable
# in the directory of the time when their trainer began.
def test_a_link_that_leads_elsewhere_by_now_is_another_path_and_what_was_saved_stays_where_it_led(place):
    for name in ("7", "8"):
        (place.root / name).mkdir()
    current = link(place, "current", place.root / "7")
    nebulaml.init(str(current), 100000, 2, on_error="raise")
    save("global_step1").wait("captured", 60)
    current.unlink()
    current.symlink_to(place.root / "8")
    assert place.run(SECOND, current).strip() == "nothing"
    nebulaml.flush_persistence()
    assert (place.root / "7" / "global_step1" / "m.pt").exists() and not list((place.root / "8").iterdir())


def test_a_directory_that_is_made_anew_elsewhere_is_not_taken_for_the_one_that_went(place):
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    save("global_step1").wait("durable", 60)
    inode = place.storage.stat().st_ino
    nebulaml._shutdown()
    shutil.rmtree(place.storage)
    names = [place.root / f"new{i}" for i in range(50)]
    for name in names:
        name.mkdir()  # one of them may get the inode number of the removed directory
    same = [name for name in names if name.stat().st_ino == inode] or names[:1]
    assert place.run(SECOND, same[0]).strip() == "nothing"


def test_a_published_path_is_found_and_removed_by_another_spelling(nm, place):
    out = place.root / "out"
    out.mkdir()
    spelled = link(place, "alias", out)
    checkpoint = save("global_step1", 3)
    checkpoint.publish("m.pt", str(out / "best.pt"))
    nm.flush_persistence()
    assert torch.load(spelled / "best.pt").sum() == 3000
    found = nebulaml.api.find_published(str(spelled / "best.pt"))
    assert found is not None and found[0].tag == "global_step1"
    nm.unpublish(str(spelled / "best.pt"))
    nm.flush_persistence()
    assert not (out / "best.pt").exists()


@pytest.mark.parametrize("name", ["NEBULA_RUNTIME_DIR", "NEBULA_MEMORY_DIR"])
@pytest.mark.parametrize("spell", [lambda path: f"{path}/", lambda path: f"/{path.parent}//./{path.name}", lambda path: link_beside(path)])
def test_a_directory_of_the_agents_is_one_however_it_is_spelled(name, spell, place, monkeypatch):
    monkeypatch.setenv("NEBULA_NODE_ID", "a")  # which is put behind the runtime directory
    nebulaml.init(str(place.storage), 100000, 2, on_error="raise")
    save("global_step1").wait("durable", 60)
    save("global_step2").wait("captured", 60)
    nebulaml._shutdown()
    if name == "NEBULA_MEMORY_DIR":
        place.kill_agent()
    before = place.agents()
    path = {"NEBULA_RUNTIME_DIR": place.root / "run-a", "NEBULA_MEMORY_DIR": place.memory}[name]
    text = str(spell(path))
    if name == "NEBULA_RUNTIME_DIR":
        text = text.replace("run-a", "run")
    monkeypatch.setenv(name, text)
    try:
        assert place.run(SECOND, place.storage).startswith("global_step2")
        assert name == "NEBULA_MEMORY_DIR" or place.agents() == before
    finally:
        command("stop", "--now", "--yes")


def link_beside(path):
    """Returns the same directory through a link. For NEBULA_RUNTIME_DIR it is the link's name with Nebula's suffix."""
    other = path.parent / ("z" + path.name)
    if not other.is_symlink():
        other.symlink_to(path)
    return other


def test_a_link_of_another_user_is_no_runtime_directory(place, monkeypatch):
    if os.geteuid():
        pytest.skip("giving a link to another user needs root")
    place.runtime.mkdir(mode=0o700)
    trap = link(place, "trap", place.runtime)
    os.lchown(trap, 65534, 65534)
    monkeypatch.setenv("NEBULA_RUNTIME_DIR", str(trap))
    with pytest.raises(NebulaError, match=r"is not a directory|belongs to user"):
        nebulaml.init(str(place.storage), 0, 2, on_error="raise")


# fault: as test_a_second_trainer_of_one_path_is_refused_and_finds_what_memory_has_however_it_spells_it
@every_spelling
def test_status_metrics_and_studio_show_the_job_of_a_path_however_it_is_spelled(spelled, place):
    nebulaml.init(str(place.storage), 100000, 2, on_error="raise")
    save("global_step1").wait("durable", 60)
    save("global_step2").wait("captured", 60)
    exposed = command("metrics", "--path", spelled).stdout.splitlines()
    assert {"nebula_world_size 1", "nebula_checkpoint_in_progress 1"} <= set(exposed)
    status = json.loads(command("status", "--json", "--path", spelled).stdout)
    assert [one["path"] for one in status["sessions"]] == [status["path"]]
    now = snapshot.build(status, [], [], None, snapshot.Watch(), time.time())["now"]
    assert now["trains"] and [one["tag"] for one in now["queue"]] == ["global_step2"]
    assert "nebula_world_size 0" in command("metrics", "--path", place.root / "another").stdout.splitlines()
