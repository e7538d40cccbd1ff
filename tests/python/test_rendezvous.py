"""The rendezvous of elastic jobs in a directory, through `nebula store`."""

from __future__ import annotations

import os
import signal
import time

import pytest
from nebulaml.elastic import store_cells
from nebulaml.elastic.backend import Backend
from nebulaml.elastic.cells import Cell, escape
from nebulaml.elastic.store_cells import LogCells, StoreProcess, open_cells
from rendezvous_promises import Promises, make_state, parts


@pytest.fixture
def cells(place):
    opened = []

    def open_again():
        opened.append(open_cells(str(place.storage)))
        return opened[-1]

    yield open_again
    for one in opened:
        one.close()


class TestDirectory(Promises):
    pass


def test_names_are_one_to_one_and_fit_everywhere():
    texts = [
        "",
        ".",
        "..",
        "a",
        "a/b",
        "a_2Fb",
        "a b",
        "ä",
        "x" * 500,
        "x" * 499 + "y",
        "%",
        "A",
        "torch.rendezvous.1.0/MASTER_ADDR",
    ]
    names = [escape(text) for text in texts]
    assert len(set(names)) == len(texts)
    for name in names[1:]:
        assert 0 < len(name) <= 180
        assert not set(name) & set("/\\#?%\t")
        assert name.strip(".")


def test_a_store_process_that_died_is_started_again(cells, place):
    backend = Backend("nebula-store", cells(), "job")
    _, token, _ = backend.set_state(b"x")
    os.kill(backend.documents.cells.process._process.pid, signal.SIGKILL)
    assert backend.set_state(b"y", token)[2]
    assert backend.get_state()[0] == b"y"


def test_the_store_process_ends_with_its_parent_and_hides_secrets(cells, place):
    one = cells()
    pid = one.process._process.pid
    with open(f"/proc/{pid}/cmdline") as line:
        assert str(place.storage) not in line.read()
    one.process._process.stdin.close()
    assert one.process._process.wait(10) == 0


def test_a_directory_that_refuses_is_told_at_once(place):
    place.storage.write_text("a file")
    process = StoreProcess(str(place.storage))
    begun = time.monotonic()
    with pytest.raises(Exception, match="storage"):
        Backend("nebula-store", LogCells(process, True), "job").set_state(b"x")
    assert time.monotonic() - begun < 20
    process.close()


def test_a_writer_that_slept_takes_no_number_that_is_free_again(cells, monkeypatch):
    monkeypatch.setattr(store_cells, "_KEPT", 1)
    monkeypatch.setattr(store_cells, "_KEPT_S", 0.0)
    one, cell = cells(), Cell("job", "state")
    token = one.swap(cell, "1", None)
    for n in range(2, 8):
        token = one.swap(cell, str(n), token)
        assert one.read(cell)[0] == str(n)  # and removes the old ones
    assert one.process.ask(do="list", prefix=".nebula/rendezvous/job/")["entries"][0]["key"].endswith("7")
    for number in (0, 1, 4, 5):
        one._seen[cell] = number, 0.0
        assert one.swap(cell, "stale", str(number)) is None
        assert one.read(cell)[0] == "7"
    one._seen[cell] = 7, 0.0
    assert one.swap(cell, "8", "7") is not None  # slept too, and nobody came before it
    assert one.read(cell)[0] == "8"


def test_heartbeats_of_a_machine_whose_clock_is_wrong_are_right(cells, monkeypatch):
    right = Backend("nebula-store", cells(), "job")
    wrong = Backend("nebula-store", cells(), "job")
    wrong._ahead_s = -3600.0  # the store's clock is an hour behind this one's
    state = make_state(2)
    wrong.set_state(state)
    assert parts(wrong.get_state()[0]) == parts(state)
    (stored, seen) = (parts(x)["last_heartbeats"] for x in (state, right.get_state()[0]))
    assert all((stored[node] - seen[node]).total_seconds() == pytest.approx(3600, abs=0.01) for node in stored)
