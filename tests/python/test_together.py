"""All ranks load the same file at a path, or none of them does. tests/frameworks/test_lightning.py plays the nodes."""

from __future__ import annotations

import json
import os
import textwrap

import fork_server
import pytest
import torch

RANK = """
    import datetime, json, os, sys
    import torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    from nebulaml.errors import NebulaStorageError, NebulaTimeout
    from nebulaml.integrations import together
    rank, path, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    calls = []
    def wait(seconds):
        calls.append(seconds)
        if rank == 0 and len(calls) < 3:
            raise NebulaTimeout("not yet")
        if rank == 1 and what == "fails":
            raise NebulaStorageError("the disk is full")
    def load():
        if what == "replaces" and rank == 1:
            os.replace(path + ".new", path)
        if what == "raises" and rank == 1:
            raise KeyError("a part")
        return open(path, "rb").read().hex()
    try:
        together.await_all(wait)
        answer = [together.several(), len(calls), together.load_file(path, load, True)]
    except Exception as failure:
        answer = [type(failure).__name__, str(failure)]
    os.write(1, json.dumps(answer).encode())
    dist.barrier()
"""


def both(place, paths, what=""):
    """Two ranks, each on its own node. Returns their answers."""
    processes = []
    for rank in (0, 1):
        environment = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port), "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }  # fmt: skip
        processes.append(fork_server.start(textwrap.dedent(RANK), rank, paths[rank], what, env=environment))
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return answers


@pytest.fixture
def paths(tmp_path):
    return [tmp_path / "0", tmp_path / "1"]


def save(path, value):
    with open(path, "wb") as file:  # torch puts the name of a path into the file
        torch.save({"w": torch.full((1000,), float(value))}, file)


@pytest.mark.parametrize("what", ["", "fails"])
def test_all_ranks_wait_for_the_slowest_one_and_a_save_that_fails_holds_up_none(place, paths, what):
    for path in paths:
        save(path, 1)
    assert both(place, paths, what) == [[True, 3 - 2 * rank, path.read_bytes().hex()] for rank, path in enumerate(paths)]


def test_files_that_differ_in_a_value_are_not(place, paths):
    for rank, path in enumerate(paths):
        save(path, 1 + rank)
    answers = both(place, paths)
    assert [name for name, _ in answers] == ["NebulaStorageError"] * 2
    assert all(f"rank 1: {paths[1]} is another file than the one that rank 0 found there" in said for _, said in answers)


def test_a_file_that_is_no_zip_file_counts_by_its_bytes(place, paths):
    for path, value in zip(paths, (b"a", b"b"), strict=True):
        path.write_bytes(value * 100)
    assert [name for name, _ in both(place, paths)] == ["NebulaStorageError"] * 2


def test_no_rank_goes_on_if_one_has_no_file_or_cannot_load_it_or_loads_while_it_is_replaced(place, paths):
    save(paths[0], 1)
    answers = both(place, paths)
    assert all("there on rank 0 and not here" in said for _, said in answers)
    save(paths[1], 1)
    assert both(place, paths, "raises")[1] == ["KeyError", "'a part'"]
    save(f"{paths[1]}.new", 2)
    answers = both(place, paths, "replaces")
    assert [name for name, _ in answers] == ["NebulaStorageError"] * 2


def test_a_file_that_is_nowhere_is_missing_as_the_load_says(place, paths):
    assert [name for name, _ in both(place, paths)] == ["FileNotFoundError"] * 2
