"""The promises of a rendezvous on every storage. A test file defines the fixture ``cells``, which opens the storage again at each call."""

from __future__ import annotations

import base64
import json
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest
import torch.distributed as dist
from nebulaml.elastic.backend import Backend
from nebulaml.elastic.cells import Cell, Cells, CellUnreachable, Entry
from nebulaml.elastic.keys import KeyStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState
from torch.distributed.elastic.utils import store as store_util


def make_state(nodes: int, host: str = "node", **fields: object) -> bytes:
    state = _RendezvousState()
    state.round, state.complete = 7, True
    for rank in range(nodes):
        node = _NodeDesc(f"{host}-{rank:05d}", 1000 + rank, 0)
        state.participants[node] = rank
        state.last_heartbeats[node] = datetime.now(timezone.utc)
    vars(state).update(fields)
    return pickle.dumps(state)


def parts(state: bytes) -> dict[str, object]:
    return vars(pickle.loads(state))


class Unsteady(Cells):
    """Wraps real cells and loses answers: ``faults`` gives the fate of each swap, in order."""

    def __init__(self, cells: Cells, *faults: str) -> None:
        self.cells, self.faults = cells, list(faults)

    def swap(self, cell: Cell, text: str, token: str | None) -> str | None:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "refused":
            raise CellUnreachable("503")
        written = self.cells.swap(cell, text, token)
        if fault == "answer lost":
            raise CellUnreachable("the connection was closed")
        if callable(fault):
            fault()
            raise CellUnreachable("the connection was closed")
        return written

    def read(self, cell: Cell) -> tuple[str, str] | None:
        return self.cells.read(cell)

    def put(self, cell: Cell, text: str) -> None:
        self.cells.put(cell, text)

    def delete(self, cell: Cell) -> bool:
        return self.cells.delete(cell)

    def entries(self, job: str | None = None) -> list[Entry]:
        return list(self.cells.entries(job))

    def remove(self, cells: list[Cell]) -> None:
        self.cells.remove(cells)

    def clock(self) -> float:
        return self.cells.clock()

    def close(self) -> None:
        self.cells.close()


class Planted:
    """Unpickled, this makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


class Promises:
    @pytest.fixture
    def job(self) -> str:
        return f"job {uuid.uuid4().hex}/x"

    @pytest.fixture
    def backend(self, cells: Callable[[], Cells], job: str) -> Backend:
        return Backend("nebula-test", cells(), job)

    # PyTorch's eight promises of a backend.

    def test_a_stored_state_is_read_with_a_token(self, backend):
        backend.set_state(b"x")
        state, token = backend.get_state()
        assert state == b"x"
        assert token is not None

    def test_no_state_is_none(self, backend):
        assert backend.get_state() is None

    # fault (Elastic jobs): The stored state of a rendezvous is damaged.
    # result: `torchrun` ends on all nodes, and `RendezvousStateError` names the state. Another `--rdzv-id` begins
    # anew, and resumes from the newest version.
    @pytest.mark.parametrize("text", [
        "no JSON", "[]", "{}", "[" * 50_000, '{"state":{},"incarnation":"a","closed_until":null}',
        '{"state":{},"incarnation":"a","closed_until":1' + "0" * 400 + "}", '{"state":{},"incarnation":"a","closed_until":NaN}',
    ])  # fmt: skip
    def test_a_corrupt_state_is_an_error_of_its_own(self, backend, text):
        backend.documents.cells.put(backend.cell, text)
        with pytest.raises(RendezvousStateError, match="another --rdzv-id"):
            backend.get_state()

    def test_without_a_token_a_state_is_written_where_there_is_none(self, backend):
        state, token, written = backend.set_state(b"x")
        assert (state, written) == (b"x", True)
        assert token == backend.get_state()[1]

    def test_with_the_current_token_a_state_is_replaced(self, backend):
        _, first, _ = backend.set_state(b"x")
        state, second, written = backend.set_state(b"y", first)
        assert (state, written) == (b"y", True)
        assert second != first
        assert backend.get_state()[0] == b"y"

    def test_with_an_old_token_nothing_is_written(self, backend):
        _, first, _ = backend.set_state(b"x")
        _, second, _ = backend.set_state(b"y", first)
        state, token, written = backend.set_state(b"z", first)
        assert (state, token, written) == (b"y", second, False)
        assert backend.set_state(b"z", token)[2]

    def test_without_a_token_nothing_is_replaced(self, backend):
        _, first, _ = backend.set_state(b"x")
        state, token, written = backend.set_state(b"y")
        assert (state, token, written) == (b"x", first, False)
        assert backend.get_state()[0] == b"x"

    def test_with_what_is_no_token_nothing_is_written(self, backend):
        _, first, _ = backend.set_state(b"x")
        state, token, written = backend.set_state(b"y", "invalid")
        assert (state, token, written) == (b"x", first, False)
        assert backend.get_state()[0] == b"x"

    # What is stored.

    def test_every_part_of_torchs_state_comes_back_and_none_of_it_is_a_pickle(self, backend):
        waiting, spare = _NodeDesc("waits", 1, 2), _NodeDesc("spare", 3, 4)
        fields = {
            "wait_list": {waiting},
            "redundancy_list": {spare},
            "deadline": datetime.now(timezone.utc) + timedelta(seconds=5),
        }
        state = make_state(3, **fields)
        backend.set_state(state)
        assert parts(backend.get_state()[0]) == parts(state)
        stored = json.loads(backend.documents.cells.read(backend.cell)[0])["state"]
        assert stored["round"] == 7
        assert ["waits", 1, 2, None, "w", None] in stored["nodes"]

    def test_a_pickle_in_storage_is_never_loaded(self, backend, tmp_path):
        trap = pickle.dumps(Planted(str(tmp_path / "planted")))
        state = make_state(1)
        backend.set_state(state)
        document = json.loads(backend.documents.cells.read(backend.cell)[0])
        node = document["state"]["nodes"][0]
        for bad in (
            {"bytes": base64.b64encode(trap).decode()},
            {**document["state"], "round": {"bytes": base64.b64encode(trap).decode()}},
            {**document["state"], "nodes": [["a", 1, 2]]},
            {**document["state"], "nodes": [[node[0], True, *node[2:]]]},
            {**document["state"], "deadline": "now"},
            {**document["state"], "deadline": 1e300},
        ):
            backend.documents.cells.put(backend.cell, json.dumps({**document, "state": bad}))
            with pytest.raises(RendezvousStateError):
                backend.get_state()
        assert not (tmp_path / "planted").exists()

    @pytest.mark.parametrize("nodes", [500, 3000])
    def test_a_state_of_many_nodes_is_stored_whole(self, backend, nodes):
        state = make_state(nodes, host="a-rather-long-name-of-a-node.in-some-cluster.example.com")
        _, token, written = backend.set_state(state)
        assert written
        assert parts(backend.get_state()[0]) == parts(state)
        small = make_state(1)
        assert backend.set_state(small, token)[2]
        assert parts(backend.get_state()[0]) == parts(small)

    # Races and faults.

    def test_of_sixteen_racers_one_wins_each_round(self, cells, job):
        backends = [Backend("nebula-test", cells(), job) for _ in range(16)]
        tokens = [None] * 16
        for expected in range(3):
            together, results = threading.Barrier(16), [None] * 16

            def race(i, together=together, results=results, tokens=tokens):
                together.wait()
                results[i] = backends[i].set_state(b"x%d" % i, tokens[i])

            run_all(race, 16)
            winners = [i for i in range(16) if results[i][2]]
            assert len(winners) == 1, (expected, winners)
            assert {result[0] for result in results} == {b"x%d" % winners[0]}
            tokens = [backend.get_state()[1] for backend in backends]
        for backend in backends:
            backend.close()

    # fault: as test_a_table_that_is_busy_or_loses_answers_keeps_each_write_once
    @pytest.mark.parametrize(
        "faults", [("answer lost",), ("refused",), ("refused", "answer lost"), ("answer lost", "refused")]
    )
    @pytest.mark.parametrize("first", [True, False])
    def test_a_write_whose_answer_is_lost_counts_once(self, cells, job, faults, first):
        steady = Backend("nebula-test", cells(), job)
        token = None if first else steady.set_state(b"x")[1]
        unsteady = Backend("nebula-test", Unsteady(cells(), *faults), job)
        state, token, written = unsteady.set_state(b"y", token)
        assert (state, written) == (b"y", True)
        assert steady.get_state()[0] == b"y"
        assert unsteady.set_state(b"z", token)[2]

    def test_a_lost_answer_is_not_taken_for_success_when_another_writer_was_first(self, cells, job):
        steady = Backend("nebula-test", cells(), job)
        _, token, _ = steady.set_state(b"x")
        faulty = Unsteady(cells(), "refused")
        unsteady = Backend("nebula-test", faulty, job)
        steady.set_state(b"z", token)
        state, _, written = unsteady.set_state(b"y", token)
        assert (state, written) == (b"z", False)

    def test_storage_that_stays_away_is_a_lost_connection(self, cells, job, caplog):
        backend = Backend("nebula-test", Unsteady(cells(), *["refused"] * 100), job, patience_s=1)
        with pytest.raises(RendezvousConnectionError):
            backend.set_state(b"x")
        said = [record.getMessage() for record in caplog.records if "storage of the rendezvous" in record.getMessage()]
        assert len(said) == 1 and "asks it again for 1 s: 503" in said[0]

    def test_storage_that_comes_back_is_told(self, cells, job, caplog):
        assert Backend("nebula-test", Unsteady(cells(), "refused", "refused"), job).set_state(b"x")[2]
        said = [record.getMessage() for record in caplog.records if "storage of the rendezvous" in record.getMessage()]
        assert len(said) == 2 and "fails" in said[0] and "answers again" in said[1]

    # The end of a job.

    def test_a_closed_state_stays_for_late_nodes_and_then_gives_way_to_a_new_job(self, cells, job):
        last_run = Backend("nebula-test", cells(), job, closed_ttl_s=1.0)
        _, token, _ = last_run.set_state(make_state(1))
        KeyStore(last_run).set("k", b"old")
        _, token, _ = last_run.set_state(make_state(1, closed=True), token)
        late = Backend("nebula-test", cells(), job)
        assert parts(late.get_state()[0])["closed"]
        time.sleep(1.2)
        assert late.get_state() is None
        state = make_state(2)
        assert late.set_state(state)[2]
        assert parts(late.get_state()[0]) == parts(state)
        assert not last_run.set_state(make_state(1), token)[2]
        assert not KeyStore(late).check(["k"])

    def test_the_last_node_removes_the_keys_of_its_job_and_closed_jobs_of_the_past(self, cells, job):
        past = Backend("nebula-test", cells(), job + "past", closed_ttl_s=0.1)
        past.set_state(make_state(0, closed=True))
        other = Backend("nebula-test", cells(), job + "other")
        other.set_state(make_state(1))
        KeyStore(other).set("k", b"v")
        backend = Backend("nebula-test", cells(), job)
        state = make_state(2, closed=True)
        backend.set_state(state)
        KeyStore(backend).set("k", b"v")
        time.sleep(0.3)
        first, second = sorted(parts(state)["participants"])

        def names(of):
            return {entry.cell.name for entry in backend.documents.cells.entries(of.job)}

        backend.leave(first, 15)
        assert len(names(backend)) == 2
        assert names(past)
        backend.leave(second, 15)
        assert names(backend) == {"state"}
        assert not names(past)
        assert len(names(other)) == 2

    # The store of the agents.

    @pytest.fixture
    def stores(self, cells, job):
        """Returns the stores of two nodes, wrapped as by torch's handler."""
        backends = [Backend("nebula-test", cells(), job) for _ in range(2)]
        backends[0].set_state(make_state(2))
        backends[1].get_state()
        inner = [KeyStore(backend) for backend in backends]
        yield [dist.PrefixStore("torch.rendezvous.job.0", store) for store in inner]
        for backend in backends:
            backend.close()

    def test_values_go_from_one_node_to_the_other(self, stores):
        one, other = stores
        one.set("a/b", b"\x00\xff")
        one.set("text", "t")
        assert other.get("a/b") == b"\x00\xff"
        assert other.get("text") == b"t"
        assert other.check(["a/b", "text"])
        assert not other.check(["a/b", "none"])
        other.multi_set(["m1", "m2"], ["1", "2"])
        assert one.multi_get(["m1", "m2"]) == [b"1", b"2"]
        one.append("text", "u")
        assert other.get("text") == b"tu"
        assert one.num_keys() == 4
        assert other.delete_key("text")
        assert not one.delete_key("text")
        assert not one.check(["text"])
        one.set("text", "again")
        assert other.get("text") == b"again"

    def test_compare_set_is_that_of_tcpstore(self, stores):
        one, other = stores
        assert one.compare_set("k", "absent", "x") == b"absent"
        assert not other.check(["k"])
        assert one.compare_set("k", "", "x") == b"x"
        assert other.compare_set("k", "y", "z") == b"x"
        assert other.compare_set("k", "x", "z") == b"z"
        assert one.get("k") == b"z"

    def test_a_get_waits_for_the_key(self, stores):
        one, other = stores
        timer = threading.Timer(0.7, one.set, ("late", b"v"))
        timer.start()
        begun = time.monotonic()
        assert other.get("late") == b"v"
        assert 0.5 < time.monotonic() - begun < 5
        timer.join()

    def test_waits_end_at_their_timeout(self, stores):
        one, _ = stores
        begun = time.monotonic()
        with pytest.raises(dist.DistStoreError, match="never"):
            one.wait(["never"], timedelta(seconds=0.4))
        one.set_timeout(timedelta(seconds=0.4))
        with pytest.raises(dist.DistStoreError, match="never"):
            one.get("never")
        assert 0.8 <= time.monotonic() - begun < 5

    def test_sums_of_many_writers_are_exact(self, cells, job, stores):
        one, _ = stores
        more = [Backend("nebula-test", Unsteady(cells(), *["answer lost", ""] * 3), job) for _ in range(4)]
        sums = []

        def add(i):
            more[i].get_state()
            inner = KeyStore(more[i])  # which a PrefixStore does not keep
            store = dist.PrefixStore("torch.rendezvous.job.0", inner)
            sums.extend(store.add("n", 2) for _ in range(4))

        run_all(add, 4)
        assert sorted(sums) == list(range(2, 34, 2))
        assert one.add("n", 0) == 32
        assert one.add("n", -2) == 30
        for backend in more:
            backend.close()

    def test_an_addition_that_others_have_followed_counts_once(self, cells, job, stores):
        one, _ = stores
        unsteady = Backend("nebula-test", Unsteady(cells(), lambda: one.add("n", 10)), job)
        unsteady.get_state()
        inner = KeyStore(unsteady)
        assert dist.PrefixStore("torch.rendezvous.job.0", inner).add("n", 1) == 1
        assert one.add("n", 0) == 11

    def test_torchs_own_barrier_and_exchange_work_on_it(self, stores):
        got = [None, None]

        def agent(rank):
            got[rank] = store_util.synchronize(stores[rank], b"data%d" % rank, rank, 2, "torchelastic/data", timeout=30)
            store_util.barrier(stores[rank], 2, "torchelastic/agent/terminal_state", 30)

        run_all(agent, 2)
        assert got == [[b"data0", b"data1"]] * 2


def run_all(work: Callable[[int], object], count: int) -> None:
    """Runs the function in that many threads, and raises the first exception of a thread."""
    failures: list[BaseException] = []

    def run(i: int) -> None:
        try:
            work(i)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
