"""The nodes of a job read a file of an object store together: the store sends each chunk once, and the nodes hand it on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest
from ports import held_port
from trainers import IMPORTS
from waiting import until

pytest.importorskip("torch")
locate = pytest.importorskip("nebulaml._session.locate")

NODES = int(os.environ.get("NEBULA_TEST_READ_NODES") or (32 if os.environ.get("NEBULA_TEST_NIGHTLY") == "1" else 4))
MIB = 64
SAVE = """
nm.init(sys.argv[1], 0, on_error="raise")
with nm.Checkpoint("global_step1") as checkpoint:
    checkpoint.save("model.pt", {"w": torch.arange(int(sys.argv[2]) << 18, dtype=torch.int32)})
checkpoint.wait("durable", 120)
"""
RANK = """
if os.environ["WORLD_SIZE"] != "1":
    torch.distributed.init_process_group("gloo")
nm.init(sys.argv[1], "1h", replicas=1, on_error="raise")
found = nm.get_latest_checkpoint()
os.write(1, b"ready\\n")
sys.stdin.readline()
if sys.argv[3] == "whole":
    state = found.load("model.pt")
else:
    state = {"w": torch.zeros(int(sys.argv[2]) << 18, dtype=torch.int32)}
    found.load_into("model.pt", state)
assert torch.equal(state["w"], torch.arange(int(sys.argv[2]) << 18, dtype=torch.int32))
os.write(1, b"loaded\\n")
sys.stdin.readline()
"""


class Node:
    def __init__(self, root: Path, number: int, server: dict[str, str]) -> None:
        self.place, self.command = root / f"{number}", os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
        (self.place / "memory").mkdir(parents=True, mode=0o700)
        secret = root / "secret"
        if not secret.exists():
            secret.touch(mode=0o600)
            secret.write_text("the secret of this test\n")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("NEBULA_")} | server | {
            "NEBULA_AGENT_PATH": self.command, "NEBULA_RUNTIME_DIR": str(self.place / "run"), "NEBULA_MEMORY_DIR": str(self.place / "memory"),
            "NEBULA_MEMORY_BUFFER_SIZE": "512M", "NEBULA_AGENT_LINGER": "300", "NEBULA_NODE_ID": f"node{number}", "NEBULA_SECRET_FILE": str(secret),
            "RANK": str(number), "WORLD_SIZE": str(NODES), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        }  # fmt: skip

    prefix = ""  # of each trainer's code

    def start(self, code: str, *arguments: object) -> fork_server.Trainer:
        text = IMPORTS + "import os, sys\n" + self.prefix + code
        return fork_server.start(text, *arguments, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=self.place)

    def agent(self) -> dict:
        done = subprocess.run([self.command, "status", "--json"], env=self.environment, capture_output=True, text=True, timeout=60)
        return json.loads(done.stdout)["agent"]

    def listens(self) -> bool:
        return any("keeps copies for peers at" in path.read_text() for path in self.place.glob("run*/agent.log"))

    def end(self) -> None:
        subprocess.run([self.command, "stop", "--now", "--yes"], env=self.environment, capture_output=True, timeout=60)


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="nb-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def stored(servers, root) -> tuple[dict[str, str], str]:
    """The variables of a store's server, and a path in it that has a checkpoint which is in no memory."""
    server, path = servers.variables("gs"), servers.new_path("gs")
    writer = Node(root, 0, server)
    writer.environment["WORLD_SIZE"] = "1"
    saves = writer.start(SAVE, path, MIB)
    saves.communicate(timeout=120)
    assert saves.returncode == 0
    writer.end()
    shutil.rmtree(root / "0")
    return server, path


@contextlib.contextmanager
def ready(nodes: list[Node], path: str, how: str) -> Iterator[list[fork_server.Trainer]]:
    """The rank of each node, when it has found the checkpoint and its agent listens."""
    ranks: list[fork_server.Trainer] = []
    held = held_port()
    try:
        for node in nodes:
            node.environment["MASTER_PORT"] = str(held.getsockname()[1])
            ranks.append(node.start(RANK, path, MIB, how))
        for rank in ranks:
            assert rank.stdout.readline().strip() == "ready"
        until(lambda: all(node.listens() for node in nodes), 60, "listeners of all nodes")
        yield ranks
    finally:
        for rank in ranks:
            with contextlib.suppress(OSError, ValueError):
                rank.communicate("\n", timeout=60)
        for node in nodes:
            node.end()
        held.close()


def load(ranks: list[fork_server.Trainer]) -> None:
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()


def load_counted(nodes: list[Node], ranks: list[fork_server.Trainer]) -> tuple[float, list[int]]:
    """Returns the seconds until all ranks have loaded, and the bytes that each node has read from the store."""
    before = [node.agent()["fetched_bytes"] for node in nodes]
    begun = time.monotonic()
    load(ranks)
    for rank in ranks:
        assert rank.stdout.readline().strip() == "loaded"
    seconds = time.monotonic() - begun
    return seconds, [node.agent()["fetched_bytes"] - was for node, was in zip(nodes, before, strict=True)]


@pytest.mark.parametrize("how", [pytest.param("whole", marks=pytest.mark.nightly), "into"])
def test_the_nodes_of_a_job_read_a_file_from_the_store_once_and_hand_it_on(stored, root, how):
    server, path = stored
    nodes, gone = [Node(root, number, server) for number in range(NODES)], Node(root, NODES, server)
    gone.environment |= {"RANK": "0", "WORLD_SIZE": "1"}  # of an earlier job, whose node was lost: its record stays
    with ready([gone], path, how):
        os.kill(gone.agent()["pid"], signal.SIGKILL)
    with ready(nodes, path, how) as ranks:
        seconds, read = load_counted(nodes, ranks)
    total = sum(read) / (MIB << 20)
    print(f"{NODES} nodes, {how}: {seconds:.1f} s; the store has sent {total:.3f} times the {MIB} MiB of the file; MiB by node: {[one >> 20 for one in read]}")
    assert 1.0 <= total <= 1.1, read


@pytest.mark.nightly("test_the_nodes_of_a_job_read_a_file_from_the_store_once_and_hand_it_on")
def test_an_agent_that_dies_while_the_nodes_read_together_fails_no_load(stored, root):
    server, path = stored
    nodes = [Node(root, number, server) for number in range(NODES)]
    with ready(nodes, path, "whole") as ranks:
        dying = nodes[NODES // 2].agent()["pid"]
        load(ranks)
        os.kill(dying, signal.SIGKILL)
        for rank in ranks:
            assert rank.stdout.readline().strip() == "loaded"
