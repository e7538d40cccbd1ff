"""Files that other users put into a storage path cannot lead Nebula out of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import nebulaml
import pytest
import torch
from nebulaml._session import locate
from nebulaml.errors import NebulaError
from test_bad_storage import forget_memory
from waiting import until


def nebula(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def make_version(place, tag: str, again: bool = False) -> None:
    """Makes a valid version in storage. Files of its second writing still wait to be put in place."""
    nebulaml.init(str(place.storage), 0, 2)
    for content in [b"first", b"second"][: 1 + again]:
        with nebulaml.Checkpoint(tag) as checkpoint:
            checkpoint.save_bytes("a", [content])
            checkpoint.save_bytes(".bashrc", [content])
        checkpoint.wait("durable", 60)
    forget_memory(place)


# Which part of <storage>/evil is a link to a directory of the victim's, in which the same names lie.
PARTS = ["", ".nebula", "apart"]


# fault (Storage): A symbolic link is in the place of a tag's directory, of `.nebula`, of a directory in it or of a
# file, also if another user plants it while Nebula works.
# result: Nebula does not follow it, so it reads, writes, moves and removes nothing outside the storage path. It
# replaces a link in the place of a file.
@pytest.mark.parametrize("part", PARTS)
def test_a_link_in_the_place_of_a_directory_is_followed_by_nothing(place, part):
    make_version(place, "evil", again=True)
    tag = place.storage / "evil"
    home = place.root / "home"
    if part == "apart":  # the files of the second writing, which found their places taken
        (path,) = (tag / ".nebula").glob("w*-2-*/")
        part = path.relative_to(tag)
    shutil.move(tag / part, home)
    (tag / part).symlink_to(home)
    before = contents(home)
    assert before
    for words in (["list"], ["status"], ["verify", "--all"], ["verify", "evil"], ["inspect", "evil"], ["prune", "--tag", "evil", "--yes"],
                  ["prune", "--keep-last", "1", "--yes"], ["restore", "evil", "--to", place.root / "restored"]):
        nebula(*words, "--path", place.storage)
        assert contents(home) == before, words
    nebulaml.init(str(place.storage), 0, 2)
    for found in (nebulaml.get_latest_checkpoint, lambda: nebulaml.get_checkpoint("evil")):
        try:
            loaded = found()
        except NebulaError:
            loaded = None
        assert not loaded
    with nebulaml.Checkpoint("evil") as checkpoint:
        checkpoint.save_bytes("a", [b"third"])
    with nebulaml.Checkpoint("other") as other:
        other.save_bytes("a", [b"other"])
    other.wait("durable", 60)
    until(lambda: checkpoint.state != "capturing")
    time.sleep(0.5)  # for a try to write it
    assert contents(home) == before
    forget_memory(place)
    nebulaml.init(str(place.storage), 0, 2)
    assert nebulaml.get_checkpoint("other").read_bytes("a") == b"other"
    assert contents(home) == before


# fault: as test_a_link_in_the_place_of_a_directory_is_followed_by_nothing
def test_a_file_that_is_a_link_is_not_read_and_is_replaced_itself(place):
    make_version(place, "t")
    secret = place.root / "secret"
    secret.write_bytes(b"first")
    (place.storage / "t/a").unlink()
    (place.storage / "t/a").symlink_to(secret)
    assert nebula("verify", "t", "--path", place.storage).returncode
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    with pytest.raises(NebulaError, match="symbolic link"):
        nebulaml.get_checkpoint("t").read_bytes("a")
    with nebulaml.Checkpoint("t") as checkpoint:
        checkpoint.save_bytes("a", [b"again"])
        checkpoint.save_bytes(".bashrc", [b"again"])
    checkpoint.wait("durable", 60)
    assert secret.read_bytes() == b"first" and (place.storage / "t/a").read_bytes() == b"again"
    assert not (place.storage / "t/a").is_symlink()


# fault: as test_a_link_in_the_place_of_a_directory_is_followed_by_nothing
@pytest.mark.parametrize("part", ["t/model.pt", "t"])
def test_inspect_shows_nothing_of_what_a_link_leads_to(place, part):
    nebulaml.init(str(place.storage), 0, 2)
    with nebulaml.Checkpoint("t") as checkpoint:
        checkpoint.save("model.pt", {"weight": torch.ones(3)})
    checkpoint.wait("durable", 60)
    forget_memory(place)
    assert "weight" in nebula("inspect", "--tensors", "t", "model.pt", "--path", place.storage).stdout
    shutil.move(place.storage / part, place.root / "moved")
    (place.storage / part).symlink_to(place.root / "moved")
    told = nebula("inspect", "--tensors", "t", "model.pt", "--path", place.storage)
    assert told.returncode and "weight" not in told.stdout and "symbolic link" in told.stderr, told


# fault (Storage): The storage path itself is reached through links.
# result: It works as any other path.
def test_a_storage_path_that_is_reached_through_links_works_as_any(place):
    real = place.root / "real"
    real.mkdir()
    place.storage.symlink_to(real)
    make_version(place, "t", again=True)
    nebulaml.init(str(place.storage), 0, 2)
    assert nebulaml.get_latest_checkpoint().read_bytes("a") == b"second"
    assert not nebula("verify", "--all", "--path", place.storage).returncode


# fault (Storage): You have moved a checkpoint away and left a link to it.
# result: A search does not find it under the link. The log names the link.
def test_a_checkpoint_behind_a_link_of_ones_own_is_named_in_the_log(place):
    make_version(place, "t")
    shutil.move(place.storage / "t", place.root / "elsewhere")
    (place.storage / "t").symlink_to(place.root / "elsewhere")
    nebulaml.init(str(place.storage), 0, 2)
    assert nebulaml.get_latest_checkpoint() is None
    until(lambda: '"t": to have a checkpoint found' in (place.runtime / "agent.log").read_text())
    assert "symbolic link" in nebula("verify", "t", "--path", place.storage).stdout


def durable(tag):
    with nebulaml.Checkpoint(tag) as checkpoint:
        checkpoint.save_bytes("a", [b"x"])
    checkpoint.wait("durable", 60)


# fault (Storage): `latest` was not written by Nebula: it is a link, a directory, or a file of your own.
# result: Nebula leaves it alone, and names it once in the log. One line with the name of a checkpoint there, or of a
# step, counts as the hint and follows the newest version.
@pytest.mark.parametrize("what", ["link", "dangling", "directory", "notes", "word", "long", "binary", "empty"])
def test_a_latest_that_nebula_has_not_written_is_left_alone_and_named_once(place, what):
    place.storage.mkdir()
    latest, kept = place.storage / "latest", place.root / "kept"
    kept.write_text("global_step1\n")
    texts = {"notes": b"first line\nsecond\n", "word": b"mine\n", "long": b"x" * 300, "binary": b"global_step1\0\n", "empty": b""}
    if what in ("link", "dangling"):
        latest.symlink_to(kept if what == "link" else place.root / "nowhere")
    elif what == "directory":
        latest.mkdir()
        (latest / "file").write_text("mine")
    else:
        latest.write_bytes(texts[what])
    nebulaml.init(str(place.storage), 0, 2)
    durable("global_step1")
    durable("global_step2")
    assert kept.read_text() == "global_step1\n" and not (place.root / "nowhere").exists()
    if what == "directory":
        assert (latest / "file").read_text() == "mine"
    elif what in texts:
        assert latest.read_bytes() == texts[what]
    else:
        assert latest.is_symlink()
    until(lambda: "is left alone" in (place.runtime / "agent.log").read_text())
    assert (place.runtime / "agent.log").read_text().count("is left alone") == 1


# fault: as test_a_latest_that_nebula_has_not_written_is_left_alone_and_named_once
@pytest.mark.parametrize("text", ["global_step1\n", "global_step7", "other\n"])
def test_a_latest_that_names_a_checkpoint_follows_the_newest(place, text):
    """Also a `latest` of a version that the user has moved away, and DeepSpeed's own, which has no newline."""
    (place.storage / "other").mkdir(parents=True)
    (place.storage / "latest").write_text(text)
    nebulaml.init(str(place.storage), 0, 2)
    durable("global_step2")
    until(lambda: (place.storage / "latest").read_text() == "global_step2\n")


# fault (Storage): A link is in the place of the history.
# result: Nebula writes no lines to it.
def test_a_history_that_is_a_link_gets_no_lines(place):
    victim = place.root / "victim"
    victim.write_text("mine\n")
    output = place.root / "output"
    output.mkdir()
    (output / "checkpointHistories.csv").symlink_to(victim)
    nebulaml.init(str(place.storage), 0, 2)
    durable("global_step1")
    until(lambda: "no history" in (place.runtime / "agent.log").read_text())
    assert victim.read_text() == "mine\n"
    (output / "checkpointHistories.csv").unlink()
    os.link(victim, output / "checkpointHistories.csv")
    nebulaml._shutdown()
    nebulaml.init(str(place.storage), 0, 2)
    durable("global_step2")
    until(lambda: (place.runtime / "agent.log").read_text().count("no history") == 2)
    assert victim.read_text() == "mine\n"
