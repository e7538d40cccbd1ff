"""Where adapters persist checkpoints if no storage path was given: outside the directories that frameworks list, and never removed together with another one."""

import os

import pytest
from nebulaml.integrations import places


def test_it_is_a_hidden_directory_beside_the_one_that_programs_list(tmp_path):
    assert places.beside(tmp_path / "run") == str(tmp_path / ".nebula" / "run")
    assert places.beside(str(tmp_path / "deep" / "run"), "-staging") == str(tmp_path / "deep" / ".nebula" / "run-staging")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert places.beside(tmp_path / "link") == places.beside(tmp_path / "real")


def test_it_is_within_where_nothing_can_be_made_beside(tmp_path):
    (tmp_path / ".nebula").write_text("a file")
    assert places.beside(tmp_path / "run") == str(tmp_path / "run" / "_nebula")
    assert places.beside("/") == "/_nebula"


def test_it_is_within_a_file_system_of_its_own(tmp_path):
    if os.stat("/dev/shm").st_dev == os.stat("/dev").st_dev:
        pytest.skip("/dev/shm is no file system of its own")
    assert places.beside("/dev/shm", "-staging") == "/dev/shm/_nebula-staging"


def test_it_is_within_where_the_parent_or_what_is_hidden_there_is_closed_to_this_user(tmp_path, monkeypatch):
    closed = [str(tmp_path / "closed"), str(tmp_path / "others" / ".nebula")]  # root may write everywhere, and the tests run as root
    monkeypatch.setattr(os, "access", lambda path, mode: path not in closed)
    for folder in ("closed", "others/.nebula"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("closed", "others"):
        assert places.beside(tmp_path / folder / "run") == str(tmp_path / folder / "run" / "_nebula")


def test_an_empty_directory_is_removed_and_one_with_entries_stays(tmp_path):
    one, two = places.beside(tmp_path / "run", "-staging"), places.beside(tmp_path / "run")
    os.makedirs(one)
    os.makedirs(two)
    places.tidy(one)
    assert os.listdir(tmp_path / ".nebula") == ["run"]
    (tmp_path / ".nebula" / "run" / "kept").write_text("")
    places.tidy(two)
    assert os.listdir(two) == ["kept"]
    os.unlink(os.path.join(two, "kept"))
    places.tidy(two)
    assert os.listdir(tmp_path) == []
    places.tidy(two)
