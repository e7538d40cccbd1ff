"""Rounds of an elastic job: a lost node is noticed in seconds, a round waits for no node that is not coming, and no two worlds train at once."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from nebulaml.elastic import handlers, hearing
from nebulaml.elastic.cells import STATE, Cell, Cells, CellUnreachable, Entry
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from waiting import until


class Memory(Cells):
    """Cells in this process, as one node reaches them. cut: this node does not reach them. rest_s: it stands still so long after each write."""

    def __init__(self, texts: dict[Cell, tuple[str, str]], lock: Any) -> None:
        self.texts, self.lock, self.cut, self.rest_s = texts, lock, False, 0.0

    def _look(self) -> None:
        if self.cut:
            raise CellUnreachable("the network is cut")

    def read(self, cell: Cell) -> tuple[str, str] | None:
        self._look()
        return self.texts.get(cell)

    def swap(self, cell: Cell, text: str, token: str | None) -> str | None:
        self._look()
        with self.lock:
            found = self.texts.get(cell)
            if (found[1] if found else None) != token:
                return None
            new = str(int(token or 0) + 1)
            self.texts[cell] = text, new
        time.sleep(self.rest_s)
        return new

    def put(self, cell: Cell, text: str) -> None:
        self._look()
        self.texts[cell] = text, "1"

    def delete(self, cell: Cell) -> bool:
        return self.texts.pop(cell, None) is not None

    def entries(self, job: str | None = None) -> list[Entry]:
        return [Entry(cell, time.time()) for cell in self.texts if job in (None, cell.job)]

    def remove(self, cells: list[Cell]) -> None:
        for cell in cells:
            self.texts.pop(cell, None)

    def clock(self) -> float:
        return time.time()

    def close(self) -> None:
        pass


class Node:
    """Does with its handler what torchrun does, in a thread. While it is in a world, its workers would train."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.cells = Memory(job.texts, job.lock)
        params = RendezvousParameters(
            "nebula-test", "memory", "job", job.least, job.most, local_addr=f"127.0.0.{number}", last_call_timeout="30", **job.options
        )
        self.handler = handlers._create(params, self.cells)
        self.world: tuple[int, int, int] | None = None  # round, rank, size
        self.joined = 0  # how often
        self.is_stopped = threading.Event()  # the process stands still
        self.fails = threading.Event()  # a worker has failed
        self.is_dead = False
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.is_dead:
                info = self.handler.next_rendezvous()
                self._set((self.handler._executor.round, info.rank, info.world_size))
                self.joined += 1
                while not self.is_dead:
                    time.sleep(0.05)
                    while self.is_stopped.is_set():
                        time.sleep(0.01)
                    if self.fails.is_set() or self.handler.num_nodes_waiting() > 0:
                        break
                self.fails.clear()
                self._set(None)
        except BaseException as failure:
            if not self.is_dead:
                self.failure = failure

    def _set(self, world: tuple[int, int, int] | None) -> None:
        self.world = world
        with self.job.lock:
            self.job.history.append((time.monotonic(), self.number, world))

    def lose(self) -> None:
        """The process ends, and its kernel closes its connections."""
        self.is_dead = True
        self.handler._inner._stop_heartbeats()
        self.handler._hearing.end()
        self._set(None)

    def __repr__(self) -> str:
        return f"<{self.number} {self.world} joined {self.joined} {self.failure!r}>"


class Job:
    def __init__(self, least: int, most: int, **options: str) -> None:
        self.least, self.most, self.options = least, most, options
        self.texts: dict[Cell, tuple[str, str]] = {}
        self.lock = threading.RLock()
        self.nodes: list[Node] = []
        self.history: list[tuple[float, int, tuple[int, int, int] | None]] = []

    def start(self, *numbers: int) -> list[Node]:
        new = [Node(self, number) for number in numbers]
        self.nodes += new
        return new

    def await_world(self, *nodes: Node, least_joined: int = 0) -> float:
        """Waits until these nodes are in one world of their own. Returns the seconds."""
        begun = time.monotonic()

        def are_there() -> bool:
            worlds = [node.world for node in nodes]
            return (
                all(worlds)
                and len({world[0] for world in worlds}) == 1
                and {world[2] for world in worlds} == {len(nodes)}
                and all(node.joined >= least_joined for node in nodes)
            )

        try:
            until(are_there)
        except AssertionError as failure:
            raise AssertionError(f"{self.nodes}") from failure
        return time.monotonic() - begun

    def check_worlds(self) -> None:
        """No two worlds train at once: at each moment, at most one round has all its nodes."""
        inside: dict[int, tuple[int, int, int]] = {}
        rounds: dict[int, int] = {}
        newest = -1
        for _, number, world in sorted(self.history):
            inside.pop(number, None)
            if world is not None:
                inside[number] = world
                rounds[world[0]] = world[2]
            whole = [n for n, size in rounds.items() if sum(each[0] == n for each in inside.values()) == size]
            assert len(whole) <= 1, self.history
            if whole:
                assert whole[0] >= newest, "an older world has trained after a newer one"
                newest = whole[0]

    def end(self) -> None:
        for node in self.nodes:
            node.is_stopped.clear()
            node.cells.cut = False
            if not node.is_dead:
                node.lose()


@pytest.fixture
def start_job() -> Iterator[Callable[..., Job]]:
    jobs = []

    def start(*given: int, **options: str) -> Job:
        jobs.append(Job(*given, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda seconds: None)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """Pairs of an address and a rank: bytes from the one to the other are lost. Meanwhile, a node that has to join again reaches no other."""
    lost: set[tuple[str, int]] = set()
    say, reaches = hearing._Ears._say, hearing.reaches
    monkeypatch.setattr(hearing, "reaches", lambda *given: False if lost else reaches(*given))

    def cut_say(self: Any, what: bytes, but: Any = None) -> None:
        kept = self.peers
        self.peers = {each: peer for each, peer in kept.items() if (self.round.address, peer.rank) not in lost}
        try:
            say(self, what, but)
        finally:
            self.peers = kept

    monkeypatch.setattr(hearing._Ears, "_say", cut_say)
    return lost


def hears(node: Node, count: int) -> bool:
    """Whether the node has that many connections."""
    a = node.handler._hearing._round
    return a is not None and getattr(a, "ears", None) is not None and len(a.ears.peers) >= count


# fault: as test_the_first_node_is_killed_the_other_goes_on_and_one_returns
def test_a_lost_node_is_noticed_by_its_connection_and_the_round_waits_for_no_call(start_job):
    job = start_job(1, 3)
    nodes = job.start(2, 3, 4)
    job.await_world(*nodes)
    until(lambda: hears(nodes[0], 2) and hears(nodes[1], 2) and hears(nodes[2], 2))
    nodes[2].lose()
    # Neither the 15 s of a heartbeat nor the 30 s of a last call have passed.
    assert job.await_world(*nodes[:2], least_joined=2) < 10
    until(lambda: hears(nodes[0], 1))
    nodes[0].lose()
    assert job.await_world(nodes[1], least_joined=3) < 10
    job.check_worlds()


# fault (Elastic jobs): A worker of another node fails.
# result: All nodes begin one new round.
def test_the_others_begin_anew_with_a_node_whose_worker_has_failed(start_job):
    job = start_job(3, 3)
    nodes = job.start(2, 3, 4)
    job.await_world(*nodes)
    nodes[1].fails.set()
    job.await_world(*nodes, least_joined=2)
    assert [node.joined for node in nodes] == [2, 2, 2], "one failure is one round"
    job.check_worlds()


# fault (Elastic jobs): A node is lost while a spare waits, or a node returns, also one whose address sorts first.
# result: The spare takes its place in the same round. All nodes begin a new round with the node that returns.
def test_a_spare_stands_in_for_a_lost_node(start_job):
    job = start_job(1, 2)
    nodes = job.start(2, 3)
    job.await_world(*nodes)
    [spare] = job.start(4)
    until(lambda: '"r"' in str([text for text, _ in job.texts.values()]))
    until(lambda: hears(nodes[0], 1))
    nodes[1].lose()
    job.await_world(nodes[0], spare, least_joined=1)
    assert nodes[0].joined == 2, "no round was closed without the spare"
    job.check_worlds()


# fault: as test_a_spare_stands_in_for_a_lost_node
def test_a_spare_is_waited_for_from_its_first_write_on(start_job):
    job = start_job(1, 2)
    nodes = job.start(2, 3)
    job.await_world(*nodes)
    [spare] = job.start(4)
    until(lambda: '"r"' in str([text for text, _ in job.texts.values()]))
    until(lambda: hears(nodes[0], 1))
    spare.cells.rest_s = 2.0
    nodes[1].lose()
    job.await_world(nodes[0], spare, least_joined=1)
    assert nodes[0].joined == 2, "no round was closed without the spare"


# fault: as test_a_spare_stands_in_for_a_lost_node
def test_each_node_keeps_its_rank_and_the_spare_has_that_of_the_lost_one(start_job):
    """The copies of a node's shares are of its ranks, and a spare holds them."""
    job = start_job(1, 3)
    nodes = job.start(5, 3, 4)
    job.await_world(*nodes)
    ranks = {node: node.world[1] for node in nodes}
    lost = min(nodes, key=lambda node: ranks[node])
    stay = [node for node in nodes if node is not lost]
    [spare] = job.start(9)  # its address sorts last
    until(lambda: '"r"' in str([text for text, _ in job.texts.values()]))
    until(lambda: hears(stay[0], 1))
    lost.lose()
    job.await_world(*stay, spare, least_joined=1)
    assert {node: node.world[1] for node in stay} == {node: ranks[node] for node in stay}
    assert spare.world[1] == ranks[lost]


# fault (Elastic jobs): There are more nodes than places, and some of them fail again and again.
# result: A node without a place waits as a spare, and disturbs nobody.
# fault: as test_a_second_job_with_the_same_id_waits_as_a_spare_node
def test_a_node_that_finds_no_place_in_a_round_is_a_spare_and_disturbs_nobody(start_job):
    job = start_job(1, 2)
    nodes = job.start(2, 3, 4)

    def inside() -> list[Node]:
        found = [node for node in nodes if node.world]
        return found if len(found) == 2 and found[0].world[::2] == found[1].world[::2] else []

    for _ in range(3):
        first = until(inside)[0]
        was = first.joined
        first.fails.set()
        until(lambda first=first, was=was: (first.joined > was or first.world is None) and inside())
    until(lambda: sorted(each[4] for each in json.loads(job.texts[Cell("job", STATE)][0])["state"]["nodes"]) == ["", "", "r"])
    [rounds] = {node.world[0] for node in until(inside)}
    for node in inside():
        for _ in range(5):
            node.handler._changed()
            assert node.handler.num_nodes_waiting() == 0
    assert {node.world[0] for node in inside()} == {rounds}
    job.check_worlds()


# fault: as test_a_node_that_stood_still_and_was_taken_for_dead_is_taken_in_again
def test_a_node_that_stood_still_is_left_and_joins_again(start_job, monkeypatch):
    job = start_job(1, 3, silence_timeout="1")
    nodes = job.start(2, 3, 4)
    job.await_world(*nodes)
    until(lambda: hears(nodes[0], 2) and hears(nodes[2], 2))
    stopped = nodes[2]
    turn = hearing._Ears.turn

    def stand_still(self: Any) -> bool:
        while self.round.address == "127.0.0.4" and stopped.is_stopped.is_set():
            time.sleep(0.01)
        return turn(self)

    monkeypatch.setattr(hearing._Ears, "turn", stand_still)
    stopped.is_stopped.set()
    stopped.handler._inner._stop_heartbeats()
    job.await_world(*nodes[:2], least_joined=2)
    assert stopped.world is not None, "it does not know yet"
    stopped.is_stopped.clear()
    job.await_world(*nodes, least_joined=2)
    job.check_worlds()


# fault (Elastic jobs): The network is cut, in one direction or both, with the storage or without; a launcher or a node
# stands still.
# result: The node joins again when it can. At no time do two worlds train.
def test_one_way_loss_and_partitions_never_let_two_worlds_train(start_job, network):
    """Seeded faults: nodes whose bytes are lost, whose storage is cut, whose workers fail; in the end all are in one world."""
    job = start_job(1, 4, silence_timeout="1")
    nodes = job.start(2, 3, 4, 5)
    job.await_world(*nodes)
    until(lambda: all(hears(node, 1) for node in nodes))
    chance = random.Random(5)
    for fault in ("one way", "worker", "partition", "both ways"):
        victim = chance.choice(nodes)
        if fault == "worker":
            victim.fails.set()
        others = range(4)
        if fault in ("one way", "partition", "both ways"):
            network |= {(f"127.0.0.{victim.number}", rank) for rank in others}
        if fault in ("both ways", "partition"):
            network |= {(f"127.0.0.{node.number}", rank) for node in nodes for rank in [victim.world[1] if victim.world else 0]}
        victim.cells.cut = fault == "partition"
        before = [node.joined for node in nodes]
        until(lambda before=before: any(node.joined > was for node, was in zip(nodes, before, strict=True)))
        network.clear()
        victim.cells.cut = False
        job.await_world(*nodes)
        until(lambda: all(hears(node, 1) for node in nodes))
    job.check_worlds()


@pytest.mark.parametrize("how", ["ends well", pytest.param("fails", marks=pytest.mark.nightly("test_the_workers_of_others_end_with_a_job_that_fails_and_not_with_one_that_ends_well"))])
def test_the_workers_of_others_end_with_a_job_that_fails_and_not_with_one_that_ends_well(start_job, how):
    job = start_job(2, 2)
    nodes = job.start(2, 3)
    job.await_world(*nodes)
    nodes[0].is_dead = True
    nodes[0].thread.join()
    if how == "fails":
        nodes[0].handler.give_up()
    nodes[0].handler.shutdown()
    if how == "fails":
        until(lambda: isinstance(nodes[1].failure, RendezvousClosedError))
    else:
        until(lambda: nodes[1].handler.is_closed())
        assert nodes[1].handler.num_nodes_waiting() == 0
        assert nodes[1].failure is None and nodes[1].joined == 1


def test_of_two_nodes_that_suspect_each_other_one_goes_on_and_the_other_waits_until_it_reaches_it(start_job, monkeypatch):
    job = start_job(1, 2)
    nodes = job.start(2, 3)
    job.await_world(*nodes)
    until(lambda: all(hears(node, 1) for node in nodes))
    tried: list[int] = []
    is_cut, reaches = [True], hearing.reaches

    def try_to_reach(number: int, world: int, store: Any) -> bool | None:
        tried.append(number)
        return False if is_cut else reaches(number, world, store)

    monkeypatch.setattr(hearing, "reaches", try_to_reach)
    for node in nodes:
        other = 1 - node.world[1]
        threading.Thread(target=node.handler._lost, args=(other, "the link between them is cut")).start()
    until(lambda: len(tried) >= 5)
    assert [node.world[2] for node in nodes if node.world] == [1] and sum(node.joined for node in nodes) == 3
    assert len(set(tried)) == 1, "one round was begun"
    is_cut.clear()
    job.await_world(*nodes, least_joined=2)
    job.check_worlds()


def test_a_node_that_is_cut_off_is_left_and_leaves_nobody(start_job, network):
    job = start_job(1, 3, silence_timeout="4")  # a busy machine delays a word between the two that stay by a second
    nodes = job.start(2, 3, 4)
    job.await_world(*nodes)
    until(lambda: all(hears(node, 1) for node in nodes))
    network |= {("127.0.0.4", 0), ("127.0.0.4", 1), ("127.0.0.2", 2), ("127.0.0.3", 2)}  # sorted by address: ranks 0, 1, 2
    job.await_world(*nodes[:2], least_joined=2)
    until(lambda: nodes[2].world is None)
    assert [node.joined for node in nodes] == [2, 2, 1]
    network.clear()
    job.await_world(*nodes, least_joined=2)
    job.check_worlds()


def test_a_heartbeat_that_waited_for_storage_is_written_all_the_same(start_job, monkeypatch):
    """The others count time from the moment at which storage is back: the next heartbeat may come too late for them."""
    job = start_job(1, 1, keep_alive_interval="1")
    [node] = job.start(2)
    job.await_world(node)
    node.lose()
    node.thread.join()
    inner, now, late = node.handler._inner, time.monotonic, [0.0]
    beats = inner._state_holder.state.last_heartbeats
    until(lambda: datetime.now(timezone.utc) - beats[inner._this_node] > inner.settings.keep_alive_interval)
    inner._state_holder._last_sync_time = -1  # torch reads the state anew, as it does a second after it has read it
    beat = beats[inner._this_node]
    monkeypatch.setattr(time, "monotonic", lambda: now() + late[0])
    read = node.cells.read

    def read_late(cell: Cell) -> Any:
        late[0] = 60.0
        return read(cell)

    monkeypatch.setattr(node.cells, "read", read_late)
    inner._keep_alive()
    assert late[0] and inner._state_holder.state.last_heartbeats[inner._this_node] > beat


def test_the_threads_that_hear_run_no_c_plus_plus_of_torch(start_job):
    """torchrun would crash at its end, if such a thread was inside torch's store then."""
    job = start_job(2, 2)
    nodes = job.start(2, 3)
    job.await_world(*nodes)
    until(lambda: hears(nodes[0], 1))
    store = type(nodes[0].handler._hearing._round.store)
    assert all(isinstance(getattr(store, name), types.FunctionType) for name in ("check", "get", "set"))


# -- how long a node may be silent


def test_a_quiet_network_allows_two_seconds_and_a_noisy_one_more():
    quiet, noisy = hearing.Peer(0, 0.0), hearing.Peer(1, 0.0)
    for n in range(1, 200):
        quiet.hear(n * 0.25)
        noisy.hear(n * 0.25 + (1.0 if n % 10 == 0 else 0.0))
    assert 2.0 <= quiet.limit_s() <= 3.0
    assert 3.0 < noisy.limit_s() <= hearing.MOST_S


def test_no_healthy_node_is_suspected_on_noisy_networks():
    """Heartbeats that jitter, come in bursts, and are delayed by other traffic up to 1.5 s."""
    chance = random.Random(1)
    for kind in ("jitter", "bursts", "transfers"):
        peer, now = hearing.Peer(0, 0.0), 0.0
        for n in range(20_000):
            gap = 0.25
            if kind == "jitter":
                gap = chance.expovariate(4)
                gap = min(gap, 1.8)
            elif kind == "bursts":
                gap = 0.01 if n % 5 else 1.2
            elif chance.random() < 0.01:
                gap = chance.uniform(0.5, 1.9)
            assert not peer.is_silent(now + gap), (kind, n, gap, peer.limit_s())
            now += gap
            peer.hear(now)


def test_a_long_pause_makes_a_node_deaf_for_no_more_than_ten_seconds():
    peer = hearing.Peer(0, 0.0)
    peer.hear(600.0)
    assert peer.limit_s() <= hearing.MOST_S


def test_a_stranger_without_the_rounds_key_is_heard_by_no_hub(start_job):
    job = start_job(2, 2)
    nodes = job.start(2, 3)
    job.await_world(*nodes)
    until(lambda: hears(nodes[0], 1))
    a = nodes[0].handler._hearing._round
    mine = next(iter(a.ears.peers))
    with socket.create_connection(a.listener.getsockname()) as stranger:
        stranger.recv(16)
        stranger.sendall((1).to_bytes(4, "big") + bytes(48))
        assert stranger.recv(1) == b""
    assert list(a.ears.peers) == [mine] and nodes[0].joined == 1


logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
