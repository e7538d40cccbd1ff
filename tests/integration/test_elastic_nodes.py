"""Real torchrun: nodes meet, the first one is killed, the others continue, one returns. With a directory, with blobs and with a table."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("nebulaml")

from emulators import between_server, emulator
from nebulaml._session import locate
from nebulaml.elastic import store_cells, table_cells
from processes import stop
from torchrun_nodes import Job, Node, counted, counting

STORAGE = os.environ.get("NEBULA_TEST_STORAGE", "")
SHORT = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=2"
PATIENT = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=30"  # a node that is late is not taken for dead
REQUESTS_MAX = 24  # of a node in a round, the addresses of the nodes that it hears included
REQUESTS_AGAIN = 3  # to read and write the state again, if another node has written it between this node's read and its write
ROUND_S = 5  # a busy machine takes longer, and the nodes ask for each other meanwhile
FULL = pytest.mark.skipif(os.environ.get("NEBULA_TEST_FRAMEWORKS") != "all", reason="one of the long ones: make test-frameworks")


@pytest.fixture
def nebula() -> str:
    return os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = []

    def start(*options: str, **environment: str) -> Job:
        jobs.append(Job(tmp_path, "--nproc-per-node=1", f"--rdzv-id=job-{uuid.uuid4().hex[:8]}", SHORT, *options, **environment))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


class Storage:
    """One kind of storage: the options of a node, its requests, and the objects that are left at the end."""

    def __init__(self, place: Path, nebula: str) -> None:
        self.place, self.nebula = place, nebula
        self.environment: dict[str, str] = {}

    def node(self, number: int) -> tuple[list[str], dict[str, str]]:
        return [f"--rdzv-endpoint={self.endpoint}", "--rdzv-backend=nebula-store"], counting(self.nebula, self.place, f"node{number}")

    def requests(self, number: int) -> list[tuple[float, str]]:
        return counted(self.place, f"node{number}")

    def cells(self) -> Any:
        return store_cells.open_cells(self.endpoint)


class Directory(Storage):
    @property
    def endpoint(self) -> str:
        return str(self.place / "shared")


class ObjectStore(Storage):
    def __init__(self, place: Path, nebula: str, endpoint: str) -> None:
        super().__init__(place, nebula)
        self.endpoint = endpoint


class Blobs(Storage):
    endpoint = "az://devstoreaccount1/elastic/run"


class Table(Storage):
    def __init__(self, place: Path, nebula: str, connection: str, stack: contextlib.ExitStack) -> None:
        super().__init__(place, nebula)
        self.connection, self.stack = connection, stack
        self.handlers: dict[int, Any] = {}

    def node(self, number: int) -> tuple[list[str], dict[str, str]]:
        self.handlers[number], endpoint = self.stack.enter_context(contextlib.contextmanager(between_server)(self.connection))
        return [f"--rdzv-endpoint={endpoint}", "--rdzv-backend=nebula-azure-table"], {}

    def requests(self, number: int) -> list[tuple[float, str]]:
        return self.handlers[number].seen

    def cells(self) -> Any:
        return table_cells.open_cells(None)


@pytest.fixture
def shared(request: Any, tmp_path: Path, nebula: str, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """Returns a directory, or with NEBULA_TEST_STORAGE the object store of that name."""
    monkeypatch.setenv("NEBULA_AGENT_PATH", nebula)
    if not STORAGE:
        return Directory(tmp_path, nebula)
    servers = request.getfixturevalue("servers")
    for name, value in servers.variables(STORAGE).items():
        monkeypatch.setenv(name, value)
    return ObjectStore(tmp_path, nebula, servers.new_path(STORAGE))


@pytest.fixture(params=["directory", pytest.param("blobs", marks=FULL), pytest.param("table", marks=pytest.mark.nightly)])
def storage(request: Any, tmp_path: Path, nebula: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    monkeypatch.setenv("NEBULA_AGENT_PATH", nebula)
    if request.param == "directory":
        yield request.getfixturevalue("shared")
        return
    if shutil.which("npm") is None:
        pytest.skip("npm is not here, which installs the emulator Azurite")
    pytest.importorskip("azure.data.tables")
    import azure_requests

    with contextlib.ExitStack() as stack:
        for connection, _ in emulator():
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
            azure_requests.make_container("elastic")
            yield Blobs(tmp_path, nebula) if request.param == "blobs" else Table(tmp_path, nebula, connection, stack)


def start(job: Job, storage: Storage, number: int) -> Node:
    options, environment = storage.node(number)
    return job.start(number, *options, **environment)


def written_again(requests: list[str]) -> int:
    """Counts the writes of the state that a node repeated at once, after it had read the state again."""
    kinds = ""
    for line in requests:
        if "/state/" not in line and "'state'" not in line:
            kinds += "-"
        elif '"do":"put"' in line or line.startswith(("PUT", "POST", "PATCH", "MERGE")):
            kinds += "W"
        else:
            kinds += "R"
    return len(re.findall(r"W(?=R{1,2}W)", kinds))


def check_requests(storage: Storage, number: int, begun: float, ended: float) -> None:
    """Counts a node's requests in that time.

    Repeated requests for a key that another node has not written yet count once, because their number depends on that node's speed.
    The time may hold two rounds: if a worker ends at its start (another program may have taken its port), torchrun starts the workers again, in a round of their own.
    """
    all_requests = [(at, line) for at, line in storage.requests(number) if begun <= at <= ended and "features" not in line]
    requests = [line for _, line in all_requests]
    distinct = [line for line, before in zip(requests, [None, *requests], strict=False) if line != before]
    rounds = {found[1] for line in requests if (found := re.search(r"key-.*?\.(\d+)_2F", line))}
    print(f"node {number}: {len(requests)} requests, {len(distinct)} distinct, rounds {rounds}", *(line[:150] for line in requests), sep="\n  ")
    assert 1 <= len(rounds) <= 2
    slow = max(1, (ended - all_requests[0][0]) / ROUND_S)
    assert len(distinct) <= REQUESTS_MAX * (len(rounds) - 1 + slow) + REQUESTS_AGAIN * written_again(distinct)


# fault (Elastic jobs): The first node is killed.
# result: The others notice it by its connections, and go on in a round of their own.
def test_the_first_node_is_killed_the_other_goes_on_and_one_returns(start_job, storage):
    job = start_job("--nnodes=1:2", "--max-restarts=3")
    one, two = start(job, storage, 2), start(job, storage, 3)
    both = [node.wait_for(lambda said: said["world"] == 2) for node in (one, two)]
    assert [said["rank"] for said in both] == [0, 1]
    for number, said in ((2, both[0]), (3, both[1])):
        check_requests(storage, number, 0, said["begun"])

    one.lose()  # rank 0
    killed = time.time()
    alone = two.wait_for(lambda said: said["world"] == 1)
    print("the survivor's worker starts after", alone["begun"] - killed)
    check_requests(storage, 3, killed, alone["begun"])

    back = start(job, storage, 1)
    assert back.wait_for(lambda said: said["world"] == 2)["rank"] == 1, "though it sorts first"
    again = two.wait_for(lambda said: said["world"] == 2)
    assert again["rank"] == 0, "a node keeps its rank"
    returned = storage.requests(1)[0][0]
    for number, node in ((1, back), (3, two)):
        check_requests(storage, number, returned, node.said()[-1]["begun"])

    job.stop()
    for node in (back, two):
        assert node.process.wait(60) == 0, node.told()
    cells = storage.cells()
    assert [entry.cell.name for entry in cells.entries()] == ["state"], back.told() + two.told()  # the keys have been removed
    cells.close()


# fault (Elastic jobs): A node stands still, counts as dead, and goes on.
# result: It joins again, and the others begin a new round with it.
@pytest.mark.nightly
def test_a_node_that_stood_still_and_was_taken_for_dead_is_taken_in_again(start_job, shared):
    storage = shared
    job = start_job("--nnodes=1:2", "--max-restarts=3")
    one = start(job, storage, 2)
    one.wait_for(lambda said: said["world"] == 1)
    stop(one.process.pid)  # the agent; its worker trains on
    time.sleep(4.5)
    two = start(job, storage, 3)
    two.wait_for(lambda said: said["world"] == 1)
    os.kill(one.process.pid, signal.SIGCONT)
    for node in (one, two):
        node.wait_for(lambda said: said["world"] == 2)
    job.stop()
    for node in (one, two):
        assert node.process.wait(60) == 0, node.told()


# fault (Elastic jobs): Two jobs use one `--rdzv-id`.
# result: They are one job. A node beyond the largest number waits, and ends with the job.
@pytest.mark.nightly
def test_a_second_job_with_the_same_id_waits_as_a_spare_node(start_job, tmp_path, shared):
    storage = shared
    job = start_job("--nnodes=1:2", "--max-restarts=3", "--rdzv-id=twice", PATIENT)
    nodes = [start(job, storage, number) for number in (3, 4)]
    workers = [node.wait_for(lambda said: said["world"] == 2)["pid"] for node in nodes]
    (tmp_path / "other").mkdir()
    options, environment = storage.node(2)  # it would sort first
    second = Job(tmp_path / "other", *job.options)
    try:
        spare = second.start(2, *options, **environment)
        deadline = time.monotonic() + 60
        while not any("node2" in path.name for path in tmp_path.glob("*.requests")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(10)
        assert spare.process.poll() is None and not spare.said()
        assert [node.said()[-1]["pid"] for node in nodes] == workers
        job.stop()
        for node in nodes:
            assert node.process.wait(60) == 0, node.told()
        spare.process.wait(60)
        assert not spare.said(), spare.told()
    finally:
        second.end()


# fault (Elastic jobs): The storage of the rendezvous does not answer, for less than 2 minutes.
# result: Training goes on. No node counts as dead because of it.
@pytest.mark.nightly
def test_training_goes_on_while_the_table_is_gone(start_job, tmp_path, nebula, monkeypatch):
    if shutil.which("npm") is None:
        pytest.skip("npm is not here, which installs the emulator Azurite")
    pytest.importorskip("azure.data.tables")
    with contextlib.ExitStack() as stack:
        for connection, _ in emulator():
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
            storage = Table(tmp_path, nebula, connection, stack)
            conf = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=3,keep_alive_max_attempt=2"
            job = start_job("--nnodes=1:3", "--max-restarts=3", conf)
            nodes = [start(job, storage, number) for number in (2, 3)]
            workers = [node.wait_for(lambda said: said["world"] == 2)["pid"] for node in nodes]
            for handler in storage.handlers.values():
                handler.port = 9
            time.sleep(12)  # twice the time after which a node is dead
            for handler in storage.handlers.values():
                handler.port = int(re.search(r"TableEndpoint=http://127.0.0.1:(\d+)", connection)[1])
            time.sleep(16)  # the time that nodes get after that, and after which a silent one is dead
            assert [node.said()[-1]["pid"] for node in nodes] == workers, "\n".join(node.told() for node in nodes)
            nodes.append(start(job, storage, 4))  # it finds them alive
            for node in nodes:
                node.wait_for(lambda said: said["world"] == 3)
            job.stop()
            for node in nodes:
                assert node.process.wait(60) == 0, node.told()


# fault: as test_a_worker_whose_torchrun_was_killed_ends_and_the_others_go_on
@pytest.mark.nightly("test_the_first_node_is_killed_the_other_goes_on_and_one_returns", "integration/test_rendezvous_azure.py::test_key_sas_and_connection_string_open_the_table")
def test_microsofts_command_line_and_a_worker_whose_torchrun_died(start_job, tmp_path, nebula, monkeypatch):
    if shutil.which("npm") is None:
        pytest.skip("npm is not here, which installs the emulator Azurite")
    pytest.importorskip("azure.data.tables")
    for connection, _ in emulator():
        job = Job(tmp_path, "--nproc_per_node=1", "--max_restarts=3", SHORT.replace("rdzv-conf", "rdzv_conf").replace("attempt=2", "attempt=6"))
        job.environment |= {"AZUREML_RUN_ID": "run_1", "AZURE_STORAGE_CONNECTION_STRING": connection}
        try:
            nodes = [job.start(number, module="nebulaml.elastic.run") for number in (2, 3)]
            workers = [node.wait_for(lambda said: said["world"] == 2)["pid"] for node in nodes]
            nodes[0].process.kill()  # torchrun alone
            nodes[0].process.wait()
            psutil.wait_procs([psutil.Process(workers[0])] if psutil.pid_exists(int(workers[0])) else [], timeout=60)
            assert not psutil.pid_exists(int(workers[0]))
            nodes[1].wait_for(lambda said: said["world"] == 1)
            job.stop()
            assert nodes[1].process.wait(60) == 0, nodes[1].told()
            late = job.start(4, module="nebulaml.elastic.run")
            assert late.process.wait(60) == 0, late.told()
            assert "has ended" in late.told()
            assert not late.said()
        finally:
            job.end()


# fault (Elastic jobs): Nodes are killed in the middle of a round, or all at once.
# result: After the keep-alive time, other nodes with the same id begin a new round.
@pytest.mark.nightly("test_the_first_node_is_killed_the_other_goes_on_and_one_returns")
def test_nodes_killed_in_a_round_and_all_at_once_do_not_keep_the_job_from_its_id(start_job, shared):
    storage = shared
    job = start_job("--nnodes=2:2", "--max-restarts=3")
    first = start(job, storage, 2)
    cells = storage.cells()
    deadline = time.monotonic() + 60
    while not any(entry.cell.name == "state" for entry in cells.entries()):  # until it is in the round, and waits for another one
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cells.close()
    first.lose()
    time.sleep(4.5)
    both = [start(job, storage, number) for number in (3, 4)]
    for node in both:
        node.wait_for(lambda said: said["world"] == 2)
    for node in both:
        node.lose()
    time.sleep(4.5)
    again = [start(job, storage, number) for number in (5, 6)]
    for node in again:
        node.wait_for(lambda said: said["world"] == 2)
    job.stop()
    for node in again:
        assert node.process.wait(60) == 0, node.told()
    cells = storage.cells()
    assert [entry.cell.name for entry in cells.entries()] == ["state"]
    cells.close()
