"""Whether the ranks of several nodes have the same file."""

from __future__ import annotations

import os
import types
import zipfile
import zlib

import pytest
import torch.distributed
from nebulaml import api
from nebulaml._session import notices, ranks
from nebulaml.dcp import directory
from nebulaml.errors import NebulaError, NebulaNotFound, NebulaStorageError, NebulaUnavailable
from nebulaml.integrations import hf, together


# fault (Storage): Two nodes find different files at one path, and torch has written them without checksums (set_crc32_options(False)).
# result: No rank loads its file, and all raise.
def test_files_without_checksums_are_compared_by_their_bytes(tmp_path):
    found = []
    for content in (b"step 1", b"step 2"):
        path = tmp_path / content.decode()
        with zipfile.ZipFile(path, "w") as records:
            records.writestr(zipfile.ZipInfo("archive/data/0"), content)
        path.write_bytes(path.read_bytes().replace(zlib.crc32(content).to_bytes(4, "little"), bytes(4)))
        with zipfile.ZipFile(path) as records:
            assert records.infolist()[0].CRC == 0
        found.append(together._fingerprint(str(path)))
    assert found[0] == together._fingerprint(str(tmp_path / "step 1")) != found[1]


# fault (Storage): One node finds a damaged file at a path, of a kind that Python's zipfile does not expect.
# result: All ranks raise, and none waits for the others.
def test_a_damaged_file_is_a_difference_and_no_end_of_the_comparison(tmp_path):
    path = tmp_path / "last.ckpt"
    with zipfile.ZipFile(path, "w") as records:
        records.writestr("\u00e9", b"values")
    path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xff\xff"))
    assert together._fingerprint(str(path)).startswith(f"{path} cannot be read: ")


# fault (Storage): Rank 0 alone looks for what all ranks load, and cannot look.
# result: All ranks raise its failure. None waits for an answer that does not come.
@pytest.mark.parametrize(("kind", "seen"), [(NebulaStorageError, NebulaStorageError), (NebulaNotFound, NebulaNotFound), (OSError, NebulaError)])
def test_a_look_that_fails_on_rank_0_raises_on_all_ranks(kind, seen):
    def fail():
        raise kind("not mounted")

    sent = []
    with pytest.raises(kind, match=r"^not mounted$"):
        together.from_rank_0(fail, True, lambda value: sent.append(value) or value)
    with pytest.raises(seen, match=rf"^rank 0: {kind.__name__}: not mounted$"):
        together.from_rank_0(pytest.fail, False, lambda _: sent[0])
    assert together.from_rank_0(lambda: 3, True, lambda value: value) == 3
    assert together.from_rank_0(pytest.fail, False, lambda _: (3, None)) == 3


# fault: as test_a_look_that_fails_on_rank_0_raises_on_all_ranks
def test_a_directory_that_rank_0_cannot_find_is_told_to_all_ranks(monkeypatch):
    def fail(*_):
        raise NebulaUnavailable("no agent answers")

    sent = []
    monkeypatch.setattr(api, "find_published", fail)
    with pytest.raises(NebulaUnavailable):
        directory.find_directory("/somewhere", lambda value: sent.append(value) or value)
    assert sent == [(None, ("unavailable", "rank 0: NebulaUnavailable: no agent answers"))]


# fault: as test_a_look_that_fails_on_rank_0_raises_on_all_ranks
def test_tags_that_rank_0_cannot_choose_are_told_to_all_ranks(monkeypatch, tmp_path):
    def fail(*_):
        raise PermissionError("the directory")

    sent = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda box, src: sent.extend(box))
    monkeypatch.setattr(os.path, "isdir", fail)
    with pytest.raises(PermissionError):
        hf._tags(types.SimpleNamespace(list_checkpoints=lambda: {"checkpoint-1": {}}), str(tmp_path), "")
    assert sent == [(None, ("failed", "rank 0: PermissionError: the directory"))]


# fault (Storage): A version is removed between the search of one rank and its look at it, while all ranks search.
# result: All ranks raise that rank's failure.
def test_a_version_that_goes_while_ranks_compare_it_raises_on_all_ranks(monkeypatch):
    class Gone:
        tag, _persist_path = "global_step1", "/p"

        def _report(self):
            raise NebulaNotFound("it has just been removed")

    told = []
    monkeypatch.setattr(together, "several", lambda: True)
    monkeypatch.setattr(together, "_of_all", lambda value: told.append(value) or [value])
    with pytest.raises(NebulaNotFound):
        together.find(types.SimpleNamespace(_engine=None, get_checkpoint=lambda tag, path: Gone()))
    assert told == ["NebulaNotFound: it has just been removed"]


# fault (The machine and other users): The agent of rank 0 does not answer when rank 0 is to say by its clock whether a save is due.
# result: should_save() raises that failure on all ranks.
def test_a_rank_0_that_cannot_say_whether_a_save_is_due_is_heard_by_all_ranks(monkeypatch):
    def fail():
        raise NebulaUnavailable("no agent answers")

    store = torch.distributed.HashStore()
    monkeypatch.setattr(ranks, "store", lambda: store)

    class Engine:
        agreement = types.SimpleNamespace(number=1)

        def __init__(self, rank):
            self.place = lambda: ranks.Place(rank, 2, 0, 1)

        def settings(self):
            return types.SimpleNamespace(persist_path=None)

    engines = [Engine(0), Engine(1)]
    first, second = (notices.Notices(one) for one in engines)
    with pytest.raises(NebulaUnavailable, match=r"^no agent answers$"):
        first.agree(3, True, fail)
    with pytest.raises(NebulaUnavailable, match=r"^rank 0: no agent answers$"):
        second.agree(3, True, fail)
    assert first.agree(4, True, lambda: True) and second.agree(4, True, fail)
