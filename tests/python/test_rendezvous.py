"""The rendezvous of elastic jobs in a directory, through `nebula store`."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest
from nebulaml.elastic import handlers, store_cells
from nebulaml.elastic.backend import Backend
from nebulaml.elastic.cells import PAUSE_MOST_S, Cell, escape
from nebulaml.elastic.state import LOST, View
from nebulaml.elastic.store_cells import LogCells, StoreProcess, open_cells
from processes import stop
from rendezvous_promises import Promises, Unsteady, make_state, parts
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc
from waiting import until


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
    assert one.process._process.wait(60) == 0


def test_a_directory_that_refuses_is_told_at_once(place):
    place.storage.write_text("a file")
    process = StoreProcess(str(place.storage))
    begun = time.monotonic()
    with pytest.raises(Exception, match="storage"):
        Backend("nebula-store", LogCells(process, True), "job").set_state(b"x")
    assert time.monotonic() - begun < 20
    process.close()


def test_storage_that_hangs_is_told_and_its_answer_still_taken(place, caplog):
    place.storage.mkdir(exist_ok=True)
    process = StoreProcess(str(place.storage), slow_s=0.1)
    process.ask(do="features")
    stopped, found = process._process.pid, []
    stop(stopped)
    asking = threading.Thread(target=lambda: found.append(process.ask(do="list", prefix="")))
    asking.start()
    try:
        until(lambda: "has not answered for" in caplog.text, what="the warning")
    finally:
        os.kill(stopped, signal.SIGCONT)
    asking.join(60)
    assert found == [{"entries": []}]
    process.close()


def test_a_request_that_a_signal_cut_off_gives_its_answer_to_no_other(cells):
    """torchrun's handler of SIGTERM raises at any point, and then its agent asks storage again to leave the job."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    one, cell = cells(), Cell("job", "key")
    one.put(cell, "value")
    stopped = one.process._process.pid
    stop(stopped)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            one.clock()
    finally:
        signal.signal(signal.SIGALRM, before)
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    assert one.read(cell) == ("value", "1")


def test_a_process_with_many_descriptors_asks_storage(cells):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2048:
        pytest.skip(f"a process may have {limits[1]} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert cells().read(Cell("job", "state")) is None
    finally:
        for one in opened:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# fault: as test_a_table_that_is_busy_or_loses_answers_keeps_each_write_once
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
    assert one.swap(cell, "8", "7") is not None  # slept, too, and no other writer came before it
    assert one.read(cell)[0] == "8"


# fault (Storage): Another program has files beside the entries of the rendezvous: an NFS client (.nfs*), an editor, a person.
# result: The rendezvous does not count them, and leaves them there.
@pytest.mark.parametrize("name", [".nfs0000000000000001", "README", "9" * 20, "9" * 30, "00000000000000000005~", "sub/00000000000000000009"])
def test_files_of_other_programs_beside_the_entries_change_nothing(cells, place, name):
    one, cell = cells(), Cell("job", "state")
    token = one.swap(cell, "first", None)
    foreign = place.storage / ".nebula/rendezvous/job/state" / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("x")
    other = cells()
    assert other.read(cell) == ("first", token) and other._follows(cell, int(token))
    token = other.swap(cell, "second", token)
    assert token is not None and one.read(cell) == ("second", token) and [each.cell for each in one.entries()] == [cell]
    one.remove([cell])
    assert cells().read(cell) is None and foreign.read_text() == "x"


def test_a_list_that_is_behind_the_log_hides_nothing(cells, place):
    """An NFS client may show such a list."""
    writer, cell = cells(), Cell("job", "state")
    token = writer.swap(cell, "1", None)
    reader = LogCells(StoreProcess(str(place.storage)), lists_fresh=False)
    old = reader._list(".nebula/rendezvous/job/state/")
    for text in "23":
        token = writer.swap(cell, text, token)
    reader._list = lambda prefix: old
    assert reader.read(cell)[0] == "3"
    assert reader.swap(cell, "4", reader.read(cell)[1]) is not None
    assert writer.read(cell)[0] == "4"
    reader.close()


def test_the_first_node_of_a_job_takes_the_time_of_the_file_system_for_the_storages(cells, place):
    """Without the directory, `nebula store` answers with the time of its machine."""
    one = cells()
    assert not place.storage.exists()
    before = time.time()
    assert before - 2 < one.clock() < time.time() + 2
    assert place.storage.is_dir() and not list(one.entries())
    assert [path for path in place.storage.rglob("*") if path.is_file()] == []


def test_heartbeats_of_a_machine_whose_clock_is_wrong_are_right(cells, monkeypatch):
    right = Backend("nebula-store", cells(), "job")
    wrong = Backend("nebula-store", cells(), "job")
    wrong._ahead()
    wrong._ahead_s = -3600.0  # the store's clock is an hour behind this one's
    state = make_state(2)
    wrong.set_state(state)
    assert parts(wrong.get_state()[0]) == parts(state)
    (stored, seen) = (parts(x)["last_heartbeats"] for x in (state, right.get_state()[0]))
    assert all((stored[node] - seen[node]).total_seconds() == pytest.approx(3600, abs=0.01) for node in stored)


def test_an_answer_that_arrives_late_moves_no_clock(cells, monkeypatch):
    backend, late_s = Backend("nebula-store", cells(), "job"), iter([4.0, 0.0])
    monkeypatch.setattr(backend.documents, "clock", lambda: time.time() - next(late_s))
    assert backend._ahead() == 0.0
    monkeypatch.setattr(backend.documents, "clock", lambda: time.time() - 3600)
    backend._ahead_s = None
    assert backend._ahead() == pytest.approx(-3600, abs=1)


# fault (Elastic jobs): The clock of a node is set while a job runs.
# result: Its heartbeats have the time of the storage, and it takes no other node for lost.
def test_a_clock_that_is_set_while_a_job_runs_changes_no_heartbeat(cells, monkeypatch):
    backend, real, set_by = Backend("nebula-store", cells(), "job"), time.time, [0.0]
    monkeypatch.setattr(backend.documents, "clock", lambda: real())
    monkeypatch.setattr(time, "time", lambda: real() + set_by[0])
    for set_by[0] in (0.0, 3600.0, -3600.0, 0.0):
        assert backend._now() == pytest.approx(real(), abs=1)


def seen_by(backend, node, keep_alive_s=5.0):
    backend.view = View(node, timedelta(seconds=keep_alive_s))
    return backend


def test_a_node_that_others_took_for_dead_joins_again(cells):
    """Otherwise its agent would go on training beside the new world."""
    other = Backend("nebula-store", cells(), "job")
    state = make_state(2)
    one, two = sorted(parts(state)["participants"])
    removed = seen_by(Backend("nebula-store", cells(), "job"), two)
    other.set_state(state)
    assert not parts(removed.get_state()[0])["wait_list"]
    _, token = other.get_state()
    _, token, _ = other.set_state(make_state(1), token)
    shown, mine = removed.get_state()
    assert len(parts(shown)["wait_list"]) == 1  # so torch's agent begins a new round
    assert not parts(other.get_state()[0])["wait_list"]
    joining = parts(shown) | {"wait_list": parts(shown)["wait_list"] | {two}}
    assert removed.set_state(make_state(1, wait_list=joining["wait_list"]), mine)[2]
    assert parts(other.get_state()[0])["wait_list"] == {two}  # no other node sees the invented node
    assert parts(removed.get_state()[0])["wait_list"] == {two}
    assert not parts(seen_by(other, one).get_state()[0])["participants"].keys() - {one}


def test_a_new_node_and_a_closed_job_are_shown_as_they_are(cells):
    backend = seen_by(Backend("nebula-store", cells(), "job"), _NodeDesc("new", 1, 0))
    state = make_state(2)
    backend.set_state(state)
    shown, token = backend.get_state()
    assert parts(shown) == parts(state)
    backend.view._has_joined = True
    closed = make_state(2, closed=True)
    backend.set_state(closed, token)
    assert parts(backend.get_state()[0]) == parts(closed)


# fault: as test_training_goes_on_while_the_table_is_gone
def test_after_storage_was_gone_no_node_is_taken_for_dead_at_once(cells):
    now = datetime.now(timezone.utc)
    old = {"last_heartbeats": {node: now - timedelta(seconds=60) for node in parts(make_state(2))["participants"]}}
    unsteady = Unsteady(cells())
    backend = Backend("nebula-store", unsteady, "job")
    backend.set_state(make_state(2, **old))
    one, two = sorted(old["last_heartbeats"])
    seen_by(backend, one)
    before = datetime.now(timezone.utc)
    heartbeats = parts(backend.get_state()[0])["last_heartbeats"]
    assert before - timedelta(seconds=8) < heartbeats[one] <= datetime.now(timezone.utc) - timedelta(seconds=5)  # alive, and due
    assert heartbeats[two] == old["last_heartbeats"][two]  # storage was there: it is dead
    _, token = backend.get_state()
    unsteady.faults.append("refused")
    before = datetime.now(timezone.utc)
    shown, token, is_written = backend.set_state(make_state(2, **old), token)
    assert is_written
    heartbeats = parts(shown)["last_heartbeats"]
    assert heartbeats[two] == parts(backend.get_state()[0])["last_heartbeats"][two]
    # The other node may wait for its next request, and has the time of one heartbeat after it.
    assert heartbeats[two] - before > timedelta(seconds=PAUSE_MOST_S - 2)
    assert heartbeats[one] <= datetime.now(timezone.utc) - timedelta(seconds=5)  # it writes its heartbeat now
    backend.set_state(shown, token)
    other = seen_by(Backend("nebula-store", cells(), "job"), two)
    granted = parts(other.get_state()[0])["last_heartbeats"][two]
    assert granted <= datetime.now(timezone.utc) - timedelta(seconds=5)  # and so does the other one, although it has time left


def test_a_node_that_counts_as_lost_stays_lost_after_storage_was_gone(cells):
    one, two = sorted(parts(make_state(2))["participants"])
    unsteady = Unsteady(cells())
    backend = seen_by(Backend("nebula-store", unsteady, "job"), one)
    unsteady.faults.append("refused")
    backend.set_state(make_state(2, last_heartbeats={one: datetime.now(timezone.utc), two: LOST}))
    assert parts(backend.get_state()[0])["last_heartbeats"][two] == LOST


@pytest.mark.parametrize(("given", "is_warned"), [({}, True), pytest.param({"last_call_timeout": "5"}, False, marks=pytest.mark.nightly("test_the_handler_sets_what_torch_needs_and_suggests_a_last_call"))])
def test_the_handler_sets_what_torch_needs_and_suggests_a_last_call(place, monkeypatch, caplog, given, is_warned):
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    handler = handlers.create_store(RendezvousParameters("nebula-store", str(place.storage), "job", 1, 4, **given))
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert ("last_call_timeout=5" in caplog.text) == is_warned
    assert handler.settings.timeout.last_call.total_seconds() == (30 if is_warned else 5)
    handler.shutdown()
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    handlers.create_store(RendezvousParameters("nebula-store", str(place.storage), "job2", 1, 4, **given)).shutdown()
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "0"


@pytest.mark.parametrize("endpoint", ["node1:29400", "localhost", "10.0.0.1:29400", "[::1]:29400", "shared"])
def test_a_host_is_no_endpoint_and_makes_no_directory(place, monkeypatch, endpoint):
    place.storage.mkdir()
    monkeypatch.chdir(place.storage)
    with pytest.raises(ValueError, match="a directory that all nodes see"):
        handlers.create_store(RendezvousParameters("nebula-store", endpoint, "job", 1, 4))
    assert list(place.storage.iterdir()) == []


def test_an_endpoint_below_the_home_directory_is_there_on_each_node(place, monkeypatch):
    monkeypatch.chdir(place.root)
    monkeypatch.setenv("HOME", str(place.storage))
    cells = store_cells.open_cells("~/rendezvous")
    cells.put(Cell("job", "state"), "text")
    cells.close()
    assert (place.storage / "rendezvous/.nebula/rendezvous/job/state").is_dir()
