"""Copies in another node's memory: real agents on 127.0.0.1, each a node by its NEBULA_NODE_ID, and faults on their connections."""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import fork_server
import processes
import pytest
from processes import stop
from trainers import IMPORTS
from waiting import until

pytest.importorskip("torch")
nebulaml = pytest.importorskip("nebulaml")
locate = pytest.importorskip("nebulaml._session.locate")

JOB = (
    IMPORTS
    + """
import os, sys
def say(*words): os.write(1, (" ".join(map(str, words)) + chr(10)).encode())
def value(step): return torch.full((300_001,), float(step)).add_(torch.arange(300_001) % 97)
def save(step):
    ckpt = nm.Checkpoint(f"global_step{step}", 1)
    ckpt.save("model.pt", {"w": value(step), "step": step})
    assert ckpt.commit()
    return ckpt
def first():
    save(0).wait("durable", 60)  # a job's first version is persisted at once, all later ones an hour after that
def refused(ckpt, words):
    # Waits until a wait for a copy says this, and returns the whole message.
    while True:
        try:
            ckpt.wait("replicated", 1)
        except nm.NebulaTimeout as error:
            if words in str(error):
                return str(error)
def copied(ckpt, timeout=60):
    ckpt.wait("replicated", timeout)
    assert ckpt.state == "replicated", ckpt.state
    return ckpt
"""
)


class Node:
    """One node: its own agent, socket and memory."""

    def __init__(self, name: str, root: Path, persist: Path, memory: Path) -> None:
        self.name, self.persist = name, persist
        self.memory = memory / name
        self.runtime = root / "run"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("NEBULA_") or k in KEPT} | {
            "NEBULA_NODE_ID": name,
            "NEBULA_RUNTIME_DIR": str(self.runtime),
            "NEBULA_MEMORY_DIR": str(self.memory),
            "NEBULA_MEMORY_BUFFER_SIZE": "256M",
            "NEBULA_AGENT_LINGER": "300",
            "NEBULA_OUTPUT_DIR": str(root / f"output-{name}"),
            "PYTHONPATH": str(Path(nebulaml.__file__).parent.parent),
        }

    @property
    def log(self) -> str:
        path = Path(f"{self.runtime}-{self.name}") / "agent.log"
        return path.read_text() if path.exists() else ""

    def record(self) -> dict:
        return json.loads((self.persist / ".nebula" / "nodes" / f"{self.name}.json").read_text())

    def start(self, code: str, interval: float = 3600, replicas: int = 1, **extra: str) -> fork_server.Trainer:
        text = JOB + f"nm.init({str(self.persist)!r}, {interval}, 2, replicas={replicas}, on_error='raise')\n"
        return fork_server.start(
            text + textwrap.dedent(code), env=self.environment | extra, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, code: str, **options) -> str:
        process = self.start(code, **options)
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors + self.log
        return output

    def agent(self) -> int | None:
        wanted = {f"NEBULA_RUNTIME_DIR={self.runtime}", f"NEBULA_NODE_ID={self.name}"}
        return next(iter(processes.agents(wanted.issubset)), None)

    def kill_agent(self, number: int = signal.SIGKILL) -> None:
        pid = self.agent()
        if pid is not None:
            os.kill(pid, number)
            until(lambda: self.agent() is None, what="the end of the agent")

    def lose(self, *processes: fork_server.Trainer) -> None:
        """Removes the whole node: processes, agent and memory. The agent stops first, so it cannot persist what the processes leave."""
        pid = self.agent()
        if pid is not None:
            stop(pid)
        for process in processes:
            process.kill()
            process.wait()
        self.kill_agent()
        shutil.rmtree(self.memory, ignore_errors=True)


KEPT = ("NEBULA_AGENT_PATH",)


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="nb-"))
        self.shm = Path(tempfile.mkdtemp(prefix="nebula-test-", dir="/dev/shm"))
        self.persist = tmp_path / "storage"
        self.nodes: list[Node] = []
        self.helpers: list[fork_server.Trainer] = []

    def node(self, name: str, **extra: str) -> Node:
        made = Node(name, self.root, self.persist, self.shm)
        made.environment |= extra
        self.nodes.append(made)
        return made

    def holder(self, name: str, **extra: str) -> Node:
        """A node without versions of its own to copy: a rank of a second job runs on it."""
        made = self.node(name, **extra)
        process = made.start("say('there'); sys.stdin.readline()")
        assert process.stdout.readline() == "there\n", process.stderr.read()
        self.helpers.append(process)
        if "NEBULA_PEERS" not in made.environment:
            until((self.persist / ".nebula" / "nodes" / f"{name}.json").exists, what="the record of the node")
        return made

    def spare(self, name: str, **extra: str) -> tuple[Node, fork_server.Trainer]:
        """A node that waits as a spare of the job: what `nebula run` does there."""
        made = self.node(name, **extra)
        waits = fork_server.start(JOB + SPARE, self.persist, env=made.environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        self.helpers.append(waits)
        assert waits.stdout.readline() == "waits\n", waits.stderr.read()
        until((self.persist / ".nebula" / "nodes" / f"{name}.spare").exists, what="the record of the spare node")
        return made, waits

    def close(self) -> None:
        for helper in self.helpers:
            helper.kill()
            helper.communicate()
        for node in self.nodes:
            node.kill_agent()
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.shm, ignore_errors=True)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


SPARE = """
from nebulaml import _nebula
from nebulaml._session import locate
session = _nebula.Session(persist_path=sys.argv[1], job="", agent_path=locate.agent_path(), is_spare=1)
session.report(_nebula.REPORT_STATUS, None)
say("waits")
for line in sys.stdin: session.report(_nebula.REPORT_STATUS, None); say("waits")
"""
SPARES = {"NEBULA_SPARES": "/dev/null"}  # as `nebula run --spares` sets it

LOAD = """
found = nm.get_latest_checkpoint()
loaded = found.load("model.pt")
assert torch.equal(loaded["w"], value(loaded["step"])), "other values"
say(found.tag, found.source if hasattr(found, "source") else "")
"""


def test_a_lost_node_loads_its_newest_version_from_its_peers_memory(world):
    world.holder("b")
    a = world.node("a")
    job = a.start("first()\nfor step in (1, 2, 3): copied(save(step)); say('replicated')\nsys.stdin.readline()")
    assert [job.stdout.readline() for _ in range(3)] == ["replicated\n"] * 3, job.stderr.read() if job.poll() else a.log
    assert not list(world.persist.glob("global_step3/.nebula/manifest-1.json")), (
        "it is not durable: storage cannot be the source"
    )
    a.lose(job)
    assert a.run(LOAD).split()[0] == "global_step3"
    assert "took over" not in a.log.rsplit("is ready", 1)[-1]
    report = a.run("nm.get_latest_checkpoint(); import json; say(json.dumps(nm.list_checkpoints()['global_step3']))")
    assert "peer" in json.loads(report)["source"]


# fault (Storage): A file of a version has rotted in storage, and only another node's memory has its bytes.
# result: `nebula verify --repair` on a node of the job writes them again.
def test_a_file_that_has_rotted_is_repaired_from_a_peers_memory(world):
    world.holder("b")
    a = world.node("a")
    job = a.start("first()\ncopied(save(1)).wait('durable', 60)\nsay('there'); sys.stdin.readline()")
    assert job.stdout.readline() == "there\n", job.stderr.read() if job.poll() else a.log
    a.lose(job)
    file = world.persist / "global_step1" / "model.pt"
    sound = file.read_bytes()
    file.write_bytes(sound[:500_000] + b"rot" + sound[500_003:])
    job = a.start("nm.list_checkpoints(); say('there'); sys.stdin.readline()")
    assert job.stdout.readline() == "there\n"
    command = [os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), "verify", "global_step1", "--repair", "--json", "--path", str(world.persist)]
    done = subprocess.run(command, env=a.environment, capture_output=True, text=True, timeout=60, check=False)
    job.kill()
    assert done.returncode == 0, done.stdout + done.stderr + a.log
    assert [one["repaired"] for one in json.loads(done.stdout)["versions"][0]["files"]] == ["memory"]
    assert file.read_bytes() == sound


# fault: as test_a_damaged_or_missing_manifest_is_made_again_from_its_records
def test_a_manifest_is_made_again_from_a_peers_memory_if_the_index_is_gone_too(world):
    world.holder("b")
    a = world.node("a")
    job = a.start("first()\ncopied(save(1)).wait('durable', 60)\nsay('there'); sys.stdin.readline()")
    assert job.stdout.readline() == "there\n", job.stderr.read() if job.poll() else a.log
    a.lose(job)
    (manifest,) = (world.persist / "global_step1/.nebula").glob("manifest-*")
    sound = json.loads(manifest.read_text())
    manifest.write_text(manifest.read_text().replace('"world"', '"wold"'))
    shutil.rmtree(world.persist / ".nebula/index")
    job = a.start("nm.list_checkpoints(); say('there'); sys.stdin.readline()")
    assert job.stdout.readline() == "there\n"
    command = [os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), "verify", "global_step1", "--repair", "--json", "--path", str(world.persist)]
    done = subprocess.run(command, env=a.environment, capture_output=True, text=True, timeout=60, check=False)
    job.kill()
    assert done.returncode == 0, done.stdout + done.stderr + a.log
    assert json.loads(done.stdout)["versions"][0]["documents"][0]["repaired"] == "memory"
    (manifest,) = (world.persist / "global_step1/.nebula").glob("manifest-*")
    now = json.loads(manifest.read_text())
    assert all(now[name] == sound[name] for name in sound if name not in ("host", "number", "crc64")) and now["number"] == sound["number"] + 1


RANK = """
def save(step):
    ckpt = nm.Checkpoint(f"global_step{step}", -2)
    if rank not in silent:
        ckpt.save(f"rank{rank}.pt", {"w": value(step) + rank, "step": step})
    assert ckpt.commit()
    return ckpt
silent = ()  # ranks that save no file
rank = int(os.environ["RANK"])
"""


def start_ranks(nodes: list[Node], code: str, run: str) -> list[fork_server.Trainer]:
    """Starts a job with one rank on each of these nodes."""
    return [
        node.start(
            RANK + textwrap.dedent(code),
            RANK=str(rank),
            WORLD_SIZE=str(len(nodes)),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            TORCHELASTIC_RUN_ID=run,
        )
        for rank, node in enumerate(nodes)
    ]


def lose_one_with_step_2(world: World, nodes: list[Node], lost: int, silent: tuple[int, ...] = ()) -> None:
    """Makes step 0 durable. Step 2 is in the memory of its nodes and of one more node each. Then one node is lost, and the other trainers are killed."""
    code = f"silent = {silent}\n" + "save(0).wait('durable', 60)\ncopied(save(2), 60)\nsay('there'); sys.stdin.readline()"
    ranks = start_ranks(nodes, code, "one")
    for rank, process in enumerate(ranks):
        assert process.stdout.readline() == "there\n", nodes[rank].log + (
            process.stderr.read() if process.poll() else ""
        )
    nodes[lost].lose(ranks.pop(lost))  # before the others end: their agents would persist step 2 with the share of this one
    for process in ranks:
        process.kill()
        process.wait()
    assert not (world.persist / "global_step2" / ".nebula" / "manifest-1.json").exists(), "storage has it, so no copy is needed"


def check_that_all_resume(nodes: list[Node], lost: str) -> None:
    """Each rank resumes from step 2, and loads the file of rank `lost`, an expression of Python."""
    code = f"""
        lost, found = {lost}, nm.get_latest_checkpoint()
        loaded = found.load(f"rank{{lost}}.pt")
        assert torch.equal(loaded["w"], value(loaded["step"]) + lost)
        say(found.tag)
        """
    for rank, process in enumerate(start_ranks(nodes, code, "two")):
        output, errors = process.communicate(timeout=120)
        assert output == "global_step2\n", errors + nodes[rank].log


@pytest.mark.nightly("test_the_nodes_that_are_left_agree_on_a_version_if_one_of_them_keeps_the_copy_of_the_lost_share")
def test_two_ranks_agree_on_a_version_that_one_has_from_a_peer(world):
    """Rank 0's node is lost. The only other copy of its share of step 2 is in the memory of rank 1's node."""
    nodes = [world.node("a"), world.node("b")]
    lose_one_with_step_2(world, nodes, 0)
    check_that_all_resume(nodes, "rank")


def test_the_nodes_that_are_left_agree_on_a_version_if_one_of_them_keeps_the_copy_of_the_lost_share(world):
    """Three nodes save, and the last one is lost. Two ranks resume, which are the first two again."""
    nodes = [world.node("a"), world.node("b"), world.node("c")]
    lose_one_with_step_2(world, nodes, 2)
    check_that_all_resume(nodes[:2], "2")


@pytest.mark.nightly("test_the_nodes_that_are_left_agree_on_a_version_if_one_of_them_keeps_the_copy_of_the_lost_share", "test_the_nodes_that_are_left_load_the_lost_share_from_memory_though_storage_has_it")
@pytest.mark.parametrize("lost", [0, 2])
def test_the_nodes_that_are_left_agree_on_a_version_of_which_rank_0_alone_had_saved_a_file(world, lost):
    """As with DDP. The lost node is that of rank 0, or one whose rank had saved none."""
    nodes = [world.node("a"), world.node("b"), world.node("c")]
    lose_one_with_step_2(world, nodes, lost, silent=(1, 2))
    nodes.pop(lost)
    check_that_all_resume(nodes, "0")


@pytest.mark.parametrize(("count", "silent"), [pytest.param(2, (), marks=pytest.mark.nightly), pytest.param(3, (), marks=pytest.mark.nightly), (3, (1, 2))])
def test_the_nodes_that_are_left_load_the_lost_share_from_memory_though_storage_has_it(world, count, silent):
    """The version is durable. Its file of rank 0 is removed from storage, so a load from there would fail."""
    nodes = [world.node(name) for name in ("a", "b", "c")[:count]]
    code = f"silent = {silent}\nsave(0).wait('durable', 60)\nc = save(2)\nc.wait('replicated', 60)\nc.wait('durable', 60)\nsay('there'); sys.stdin.readline()"
    ranks = start_ranks(nodes, code, "one")
    for rank, process in enumerate(ranks):
        assert process.stdout.readline() == "there\n", nodes[rank].log + (process.stderr.read() if process.poll() else "")
    nodes.pop(0).lose(ranks.pop(0))
    for process in ranks:
        process.kill()
        process.wait()
    (world.persist / "global_step2" / "rank0.pt").unlink()
    check_that_all_resume(nodes, "0")


@pytest.mark.nightly("test_the_nodes_that_are_left_agree_on_a_version_if_one_of_them_keeps_the_copy_of_the_lost_share")
def test_copies_of_another_nodes_share_alone_are_no_version_for_this_one(world):
    """A third node has rank 1's share of step 2. No node has a copy of rank 0's share."""
    world.holder("c")
    nodes = [world.node("a"), world.node("b")]

    def start(rank: int, code: str, run: str, replicas: int) -> fork_server.Trainer:
        return nodes[rank].start(
            RANK + textwrap.dedent(code),
            replicas=replicas,
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            TORCHELASTIC_RUN_ID=run,
        )

    wait = "save(0).wait('durable', 60)\nsave(2).wait({!r}, 60)\nsay('there'); sys.stdin.readline()"
    ranks = [start(0, wait.format("committed"), "one", 0), start(1, wait.format("replicated"), "one", 1)]
    for rank, process in enumerate(ranks):
        assert process.stdout.readline() == "there\n", nodes[rank].log + (
            process.stderr.read() if process.poll() else ""
        )
    for node, process in zip(nodes, ranks, strict=True):
        node.lose(process)
    # From its first save on a rank looks alone, and does not take what the ranks had not agreed on.
    look = "say(nm.get_latest_checkpoint().tag); save(5); say(nm.get_checkpoint('global_step2') is not None)"
    ranks = [start(rank, look, "two", 1) for rank in (0, 1)]
    for rank, process in enumerate(ranks):
        output, errors = process.communicate(timeout=120)
        assert output.split() == ["global_step0", "False"], errors + nodes[rank].log


@pytest.mark.nightly("test_a_holder_without_room_refuses_and_says_so")
def test_copies_are_bounded_by_what_their_owner_keeps(world):
    b = world.holder("b")
    a = world.node("a")
    job = a.start(
        "first()\nfor step in range(1, 9): save(step).wait('replicated', 60)\nsay('done'); sys.stdin.readline()"
    )
    assert job.stdout.readline() == "done\n", a.log
    status = [line for line in b.log.splitlines() if "holds global_step" in line]
    assert len(status) >= 8
    a.lose(job)
    # Two versions are kept in memory there, so older ones have gone here too.
    out = a.run("say(*[t for t in range(1, 9) if nm.get_checkpoint(f'global_step{t}')])")
    kept = [int(word) for word in out.split()]
    assert kept[-1] == 8 and len(kept) <= 3 and kept == list(range(kept[0], 9))


def test_without_another_node_training_and_persisting_go_on(world):
    a = world.node("a")
    a.run(
        """
        c = save(1)
        c.wait("durable", 60)
        say(c.state)
        """
    )
    until(lambda: "there is no other node yet" in a.log, what="a line about it")


def test_nodes_sign_a_version_together_and_a_copy_in_another_nodes_memory_takes_no_signature_s_place(world):
    """Rank 0's agent believes the sums of rank 1's record because it has the signature of the key that both have."""
    a, b = world.node("a"), world.node("b")
    for words in (["--new-key", world.persist.parent / "key"], ["--trust", world.persist.parent / "key.pub"]):
        subprocess.run([os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), "sign", *map(str, words)], check=True, env=a.environment | {"NEBULA_TRUSTED_KEYS": str(world.persist.parent / "trusted")})
    settings = {"NEBULA_SIGN_KEY": str(world.persist.parent / "key"), "NEBULA_TRUSTED_KEYS": str(world.persist.parent / "trusted")}
    for node in (a, b):
        node.environment |= settings
    lose_one_with_step_2(world, [a, b], lost=0)
    assert len(list(world.persist.glob("global_step0/.nebula/signature-*.json"))) == 1
    for node in (a, b):
        del node.environment["NEBULA_SIGN_KEY"]
        node.environment["NEBULA_SIGNATURES"] = "require"
    code = """
        found = nm.get_latest_checkpoint()
        for other in (0, 1):
            loaded = found.load(f"rank{other}.pt")
            assert torch.equal(loaded["w"], value(loaded["step"]) + other)
        say(found.tag)
        """
    for rank, process in enumerate(start_ranks([a, b], code, "two")):
        output, errors = process.communicate(timeout=120)
        assert output == "global_step0\n", errors + (a, b)[rank].log


def test_a_wrong_key_is_said_and_costs_only_the_copy(world, tmp_path):
    other = tmp_path / "other-secret"
    other.write_text("ff" * 32)
    other.chmod(0o600)
    b = world.holder("b", NEBULA_SECRET_FILE=str(other))
    a = world.node("a")
    out = a.run(
        """
        first()
        c = save(1)
        say("timeout:", refused(c, "secret"))
        save(2).wait("durable", 60)
        say("durable")
        """
    )
    assert "timeout:" in out and "secret" in out and out.endswith("durable\n")
    until(
        lambda: re.search(r"turned the peer at .* away: the peer holds another secret", b.log),
        what="a line of the holder",
    )
    until(lambda: "may hold another secret" in a.log, what="a line of the sender")
    assert a.agent() and b.agent()


def test_a_secret_that_others_can_read_is_refused(world):
    (world.persist / ".nebula").mkdir(parents=True)
    secret = world.persist / ".nebula" / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o644)
    a = world.node("a")
    a.run("save(1).wait('durable', 60)")
    until(lambda: "open to other users" in a.log and "chmod 600" in a.log, what="a line about it")
    assert not (world.persist / ".nebula" / "nodes").exists()


def test_the_secret_is_made_once_and_private(world):
    world.holder("b")
    first = (world.persist / ".nebula" / "secret").read_bytes()
    world.holder("c")
    secret = world.persist / ".nebula" / "secret"
    assert secret.read_bytes() == first and len(first) == 65
    assert secret.stat().st_mode & 0o777 == 0o600
    assert not list(secret.parent.glob("secret.tmp*"))


class Tamper(threading.Thread):
    """A proxy between two agents that damages the traffic: it flips a bit, stops, or closes the connection."""

    def __init__(self, target: int, deed: str, after: int) -> None:
        super().__init__(daemon=True)
        self.target, self.deed, self.after, self.done = target, deed, after, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.recorded = b""
        self.start()

    def run(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self.pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self.pump, args=(far, near, False), daemon=True).start()

    def pump(self, source: socket.socket, sink: socket.socket, forward: bool) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                if forward and not self.done:
                    self.recorded += data
                passed += len(data)
                if forward and not self.done and passed > self.after:
                    self.done = True
                    if self.deed == "flip":
                        data = data[:-1] + bytes([data[-1] ^ 1])
                    elif self.deed == "cut":
                        break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def through(world: World, b: Node, deed: str, after: int) -> tuple[Node, Tamper]:
    """A node that reaches b only through the proxy."""
    wire = Tamper(b.record()["port"], deed, after)
    shared = world.persist / ".nebula" / "secret"
    return world.node("a", NEBULA_PEERS=f"127.0.0.1:{wire.port}", NEBULA_SECRET_FILE=str(shared)), wire


@pytest.mark.parametrize(
    ("deed", "line"),
    [
        ("flip", "turned the peer at .* away: .*the data that came is not the data that the peer sent"),
        pytest.param("cut", "in the middle of a copy|closed the connection", marks=pytest.mark.nightly("test_a_frame_spoilt_on_the_way_is_refused_and_sent_anew")),
    ],
)
def test_a_frame_spoilt_on_the_way_is_refused_and_sent_anew(world, deed, line):
    b = world.holder("b")
    a, wire = through(world, b, deed, after=400_000)
    job = a.start(
        "first(); copied(save(1), 60); say('replicated'); save(2).wait('durable', 60); say('durable'); sys.stdin.readline()"
    )
    assert job.stdout.readline() == "replicated\n", a.log + b.log
    assert job.stdout.readline() == "durable\n"
    assert wire.done, "nothing was spoilt: the test shows nothing"
    until(lambda: re.search(line, b.log), what="a line of the holder")  # the old connection has another thread than the new one
    assert "has no copy in another node's memory yet" in a.log
    a.lose(job)
    assert a.run(LOAD).split()[0] == "global_step2"


def test_a_recorded_conversation_opens_nothing_when_played_again(world):
    b = world.holder("b")
    a, wire = through(world, b, "none", after=1 << 60)
    job = a.start("first(); save(1).wait('replicated', 60); say('there'); sys.stdin.readline()")
    assert job.stdout.readline() == "there\n", a.log
    held = b.log.count("holds global_step1")
    with socket.create_connection(("127.0.0.1", b.record()["port"])) as again:
        again.sendall(wire.recorded)
        again.settimeout(60)
        try:
            while again.recv(65536):
                pass
        except ConnectionError:
            pass
    until(lambda: "turned the peer at" in b.log, what="a line about it")
    assert b.log.count("holds global_step1") == held
    assert b.agent(), "the agent has ended"
    job.kill()
    job.communicate()


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        *(
            pytest.param(noise, marks=pytest.mark.nightly("test_a_client_that_does_not_speak_the_protocol_is_turned_away"))
            for noise in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("<IHHQIIQ", 0x5042454E, 1, 1, 1, 0, 0, 0) * 8)
        ),
        b"\x16\x03\x01\xff\xff" + b"\0" * 64,
    ],
)
def test_a_client_that_does_not_speak_the_protocol_is_turned_away(world, noise):
    b = world.holder("b")
    with socket.create_connection(("127.0.0.1", b.record()["port"])) as stranger:
        stranger.sendall(noise)
        if not noise:  # half open: it says nothing, for longer than a handshake may take
            stranger.settimeout(60)
            assert stranger.recv(1) == b""
        until(lambda: "turned the peer at" in b.log, what="a line about it")
        assert b.agent()
        a = world.node("a")
        a.run("first(); copied(save(1))")


def test_a_peer_that_dies_is_replaced_by_the_next_on_the_ring(world):
    holders = {name: world.holder(name) for name in ("b", "c", "d")}
    a = world.node("a")
    job = a.start("first()\nfor line in sys.stdin: copied(save(int(line)), 60); say('replicated')")
    job.stdin.write("1\n")
    job.stdin.flush()
    assert job.stdout.readline() == "replicated\n", a.log
    first = re.search(r'is replicated on node "(\w)"', a.log).group(1)
    index = list(holders).index(first)
    world.helpers[index].kill()
    holders[first].lose()
    job.stdin.write("2\n")
    job.stdin.flush()
    assert job.stdout.readline() == "replicated\n", a.log
    second = re.findall(r'is replicated on node "(\w)"', a.log)[-1]
    assert second != first
    assert f'go to node "{second}" instead' in a.log
    a.lose(job)
    assert a.run(LOAD).split()[0] == "global_step2"


def test_a_holder_without_room_refuses_and_says_so(world):
    b = world.holder("b", NEBULA_PEER_MEMORY="1M")
    a = world.node("a")
    out = a.run(
        """
        first()
        say(refused(save(1), "NEBULA_PEER_MEMORY"))
        """
    )
    assert "NEBULA_PEER_MEMORY" in out and "no room for a copy of node" in b.log


def test_without_replicas_no_port_is_opened_and_no_record_written(world):
    a = world.node("a")
    a.run(
        "save(1).wait('durable', 60)\ntry: nm.Checkpoint('global_step1').wait('replicated', 60)\nexcept Exception as e: say(e)",
        replicas=0,
    )
    assert not (world.persist / ".nebula" / "nodes").exists() and "keeps copies for peers" not in a.log


def test_a_record_is_withdrawn_at_a_clean_end_and_stays_after_a_kill(world):
    world.holder("b")
    c = world.holder("c")
    record = world.persist / ".nebula" / "nodes" / "c.json"
    world.helpers[-1].kill()
    world.helpers[-1].communicate()
    c.kill_agent(signal.SIGTERM)
    assert not record.exists()
    assert (world.persist / ".nebula" / "nodes" / "b.json").exists()


@pytest.mark.nightly("test_two_copies_go_to_two_spare_nodes_and_either_node_loads_its_own")
def test_two_copies_lie_on_two_other_nodes_and_either_is_enough(world):
    b, c = world.holder("b"), world.holder("c")
    a = world.node("a")
    job = a.start("first()\nfor step in (1, 2): copied(save(step), 60)\nsay('there'); sys.stdin.readline()", replicas=2)
    assert job.stdout.readline() == "there\n", a.log
    assert all("holds global_step2" in node.log for node in (b, c))
    assert not (world.persist / "global_step2" / ".nebula" / "manifest-1.json").exists()
    a.lose(job)
    secret = str(world.persist / ".nebula" / "secret")
    for node in (b, c):
        alone = {"NEBULA_PEERS": f"127.0.0.1:{node.record()['port']}", "NEBULA_SECRET_FILE": secret}
        assert a.run(LOAD, replicas=2, **alone).split()[0] == "global_step2"
        a.lose()


def change_copy(pid: int, contents: bytes) -> None:
    """Changes one byte of a copy in the memory of an agent that lives: copies have no files."""
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            words = line.split(maxsplit=5)
            if "w" not in words[1] or len(words) < 6 or not ("memfd" in words[5] or "(deleted)" in words[5]):
                continue
            first, end = (int(word, 16) for word in words[0].split("-"))
            memory.seek(first)
            at = memory.read(end - first).find(contents)
            if at >= 0:
                memory.seek(first + at)
                memory.write(bytes([contents[0] ^ 1]))
                return
    raise AssertionError("the copy is not in the agent's memory")


# fault (Memory): Bytes of a copy change in the memory of another node.
# result: The first reader finds that. The node drops the copy, and the owner of the version sends it again.
def test_a_copy_whose_bytes_have_changed_is_dropped_and_sent_again(world):
    b = world.holder("b")
    a = world.node("a")
    job = a.start("first(); copied(save(1)); say('there'); sys.stdin.readline()")
    assert job.stdout.readline() == "there\n", a.log
    change_copy(b.agent(), array.array("f", [at % 97 + 1.0 for at in range(50_000, 60_000)]).tobytes())
    alone = {"NEBULA_PEERS": f"127.0.0.1:{b.record()['port']}", "NEBULA_SECRET_FILE": str(world.persist / ".nebula" / "secret")}
    c = world.node("c")
    tried = """
    found = nm.get_latest_checkpoint()
    try:
        found.load("model.pt")
    except nm.NebulaError as error:
        say(found.tag, str(error))
    """
    assert "is damaged in the memory of the node that keeps its copy" in c.run(tried, **alone), b.log
    until(lambda: a.log.count('global_step1 is replicated on node "b"') == 2, what="the second copy")
    c.lose()
    assert c.run(LOAD, **alone).split()[0] == "global_step1", b.log


def test_a_copy_too_few_is_said_and_the_other_one_is_made(world):
    b = world.holder("b")
    a = world.node("a")
    out = a.run(
        """
        first()
        say(refused(save(1), "one more copy"))
        """,
        replicas=2,
    )
    assert "one more copy" in out
    until(lambda: "holds global_step1" in b.log, what="the copy of the other node")


def test_the_rate_of_copies_to_peers_stays_below_the_bound(world):
    world.holder("b")
    a = world.node("a", NEBULA_PEER_MBPS="1")
    a.run("first(); copied(save(1), 60)")
    seconds = float(re.search(r"step1 .*replicated on node .* in ([0-9.]+) s", a.log).group(1))
    assert seconds >= 0.8 * 4 * 300_001 / 1e6, "more than 1 MB went out in a second"


def holder_of(node: Node, step: int) -> str:
    """The node that got the copy last."""
    return re.findall(rf'global_step{step} is replicated on node "(\w+)"', node.log)[-1]


def asked(job: fork_server.Trainer, line: object) -> None:
    job.stdin.write(f"{line}\n")
    job.stdin.flush()
    assert job.stdout.readline() == "replicated\n", job.stderr.read()


COPY_EACH = "first()\nfor line in sys.stdin: copied(save(int(line)), 60); say('replicated')"


# fault (Elastic jobs): A node is lost while a spare node waits, with `replicas`.
# result: The spare node has the newest copy in its own memory, and loads it from there.
def test_copies_go_to_a_spare_node_first_and_it_loads_them_from_its_own_memory(world):
    world.holder("b")
    spare, waits = world.spare("s")
    a = world.node("a")
    job = a.start(COPY_EACH, **SPARES)
    for step in (1, 2):
        asked(job, step)
        assert holder_of(a, step) == "s"
    [kept] = [row for row in json.loads(status(spare, "--json"))["jobs"] if row["spare"]]
    assert [*kept["copies_kept"]] == ["a"] and kept["copies_kept"]["a"] > 1_200_000
    said = status(spare)
    assert "this node waits as a spare, and keeps" in said and "in copies of node a" in said
    a.lose(job)
    waits.kill()
    waits.communicate()
    assert spare.run(LOAD, **SPARES).split()[0] == "global_step2"
    assert '"model.pt" of global_step2: 1 MiB come from a copy in this node\'s own memory' in spare.log
    assert "from the memory of node" not in spare.log
    nodes = world.persist / ".nebula" / "nodes"
    until(lambda: (nodes / "s.json").exists() and not (nodes / "s.spare").exists(), what="the record of a node with ranks")


@pytest.mark.nightly
def test_copies_move_to_a_spare_node_that_comes_later_and_leave_one_that_takes_part_or_goes(world):
    b = world.holder("b")
    a = world.node("a")
    job = a.start(COPY_EACH, **SPARES)
    asked(job, 1)
    assert holder_of(a, 1) == "b"
    first, waits = world.spare("s")
    step = moved(job, a, 2, "s")
    until(lambda: kept_by(b) == 0, what="the old holder drops its copies")
    # It is taken over: its program ends, and its node has ranks.
    waits.kill()
    waits.communicate()
    world.spare("t")
    step = moved(job, a, step, "t")
    until(lambda: kept_by(first) == 0, what="the old holder drops its copies")
    # The second spare leaves, and no other one is there.
    world.helpers[-1].kill()
    world.helpers[-1].communicate()
    moved(job, a, step, "b")


def moved(job: fork_server.Trainer, node: Node, step: int, name: str) -> int:
    """Saves until the copies go to that node; returns the next step."""
    for each in range(step, step + 100_000):
        asked(job, each)
        if holder_of(node, each) == name:
            return each + 1
    raise AssertionError(node.log)


def status(node: Node, *options: str) -> str:
    command = [os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), "status", "--path", str(node.persist), *options]
    return subprocess.run(command, env=node.environment, capture_output=True, text=True).stdout


def kept_by(node: Node) -> int:
    return sum(sum(row["copies_kept"].values()) for row in json.loads(status(node, "--json"))["jobs"])


def test_a_spare_node_without_room_leaves_the_copy_to_the_next_choice(world):
    world.holder("b")
    spare, _ = world.spare("s", NEBULA_PEER_MEMORY="1M")
    a = world.node("a")
    job = a.start(COPY_EACH, **SPARES)
    for step in (1, 2, 3):
        asked(job, step)
        assert holder_of(a, step) == "b"
    assert "no room for a copy of node" in spare.log and 'spare node "s" has no room' in a.log


@pytest.mark.nightly("test_a_spare_node_without_room_leaves_the_copy_to_the_next_choice")
def test_a_spare_node_without_room_and_without_a_next_choice_is_asked_again_later_and_not_at_once(world):
    world.spare("s", NEBULA_PEER_MEMORY="1M")
    a = world.node("a")
    job = a.start("first()\nsave(1)\nsay('saved')\nsys.stdin.readline()", **SPARES)
    assert job.stdout.readline() == "saved\n", job.stderr.read()
    until(lambda: "has no copy in another node's memory yet: node \"s\"" in a.log, what="the end of the attempt")


@pytest.mark.nightly("test_a_spare_node_without_room_leaves_the_copy_to_the_next_choice")
def test_copies_move_past_a_spare_node_without_room_to_one_that_has_room(world):
    world.holder("b")
    a = world.node("a")
    job = a.start(COPY_EACH, **SPARES)
    asked(job, 1)
    for name in ("s", "u"):
        world.spare(name, NEBULA_PEER_MEMORY="1M")
    world.spare("t")
    moved(job, a, 2, "t")


def test_a_session_of_a_spare_changes_nothing_on_a_node_with_ranks(world):
    b = world.holder("b")
    before = json.loads(status(b, "--json"))["agent"]["memory_budget"]
    waits = fork_server.start(
        JOB + SPARE.replace("is_spare=1", "is_spare=1, memory_bytes=1 << 27"), world.persist, env=b.environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    world.helpers.append(waits)
    assert waits.stdout.readline() == "waits\n", waits.stderr.read()
    told = json.loads(status(b, "--json"))
    assert told["agent"]["memory_budget"] == before and not any(row["spare"] for row in told["jobs"])
    assert not (world.persist / ".nebula" / "nodes" / "b.spare").exists()


def test_two_copies_go_to_two_spare_nodes_and_either_node_loads_its_own(world):
    world.holder("b")
    spares = [world.spare(name) for name in ("s", "t")]
    a = world.node("a")
    job = a.start(COPY_EACH.replace("60", "40"), replicas=2, **SPARES)
    asked(job, 1)
    assert all("holds global_step1" in node.log for node, _ in spares)
    a.lose(job)
    for node, waits in spares:
        waits.kill()
        waits.communicate()
        assert node.run(LOAD, replicas=2, **SPARES).split()[0] == "global_step1"
        assert "this node's own memory" in node.log


@pytest.mark.nightly("test_copies_go_to_a_spare_node_first_and_it_loads_them_from_its_own_memory")
def test_a_spare_node_whose_agent_died_comes_back_empty_and_gets_the_next_copy(world):
    spare, waits = world.spare("s")
    a = world.node("a")
    job = a.start(COPY_EACH, **SPARES)
    asked(job, 1)
    spare.kill_agent()
    waits.stdin.write("\n")
    waits.stdin.flush()
    assert waits.stdout.readline() == "waits\n", waits.stderr.read()
    asked(job, 2)
    assert holder_of(a, 2) == "s"
    a.lose(job)
    waits.kill()
    waits.communicate()
    assert spare.run(LOAD, **SPARES).split()[0] == "global_step2"
