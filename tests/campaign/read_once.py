"""The nodes of a job load one file of an object store. Each node is a network namespace with an agent and a rank.

    python tests/campaign/read_once.py [--nodes 32] [--rate 4]

It needs root and the command ip. The store is a double of Google Cloud Storage in a namespace of its own, which sends `rate` MiB/s in all. One node
loads the file alone, then all nodes load it together. The store must have sent at most 1.1 times the bytes of the file to all nodes; each rank
compares all values. The last line names the bytes that each node has read, and both times.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/integration")]

import test_read_once  # noqa: E402
from networks import Networks  # noqa: E402
from test_read_once import MIB, RANK, SAVE, Node, load_counted  # noqa: E402
from waiting import until  # noqa: E402

ENTER = """
import ctypes
with open("/run/netns/{name}") as place:
    assert ctypes.CDLL(None).setns(place.fileno(), {kind}) == 0, "this process cannot enter the namespace"
"""
NETWORK = 0x40000000  # CLONE_NEWNET
PORT = 29555  # of the process group, in a namespace where nothing else listens


class Placed(Node):
    """Node n is namespace n + 1."""

    def __init__(self, networks: Networks, root: Path, number: int, world: int, server: dict[str, str]) -> None:
        super().__init__(root, number, server)
        self.prefix = ENTER.format(name=networks.name(number + 1), kind=NETWORK)
        self.environment |= {
            "WORLD_SIZE": str(world), "NEBULA_LISTEN": networks.address(number + 1), "MASTER_ADDR": networks.address(1), "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0", "NEBULA_STORE_ALLOW_HTTP": "1",
        }  # fmt: skip


def start_store(networks: Networks, node: int, rate: float) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """Starts the store in a namespace. Returns its process, which ends with its stdin, and the variables that clients need."""
    command = ["ip", "netns", "exec", networks.name(node), sys.executable, ROOT / "tests/servers/gs.py", "sh", "-c", "env -0; echo; exec cat"]
    environment = {**os.environ, "NEBULA_TEST_RATE": str(rate), "NEBULA_TEST_ADDRESS": networks.address(node)}
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    said = dict(one.split("=", 1) for one in server.stdout.readline().decode().rstrip("\n").split("\0") if "=" in one)
    return server, {name: value for name, value in said.items() if os.environ.get(name) != value and not name.startswith("NEBULA_")}


def together(nodes: list[Placed], path: str) -> tuple[float, list[int]]:
    """Loads the file on all nodes. Returns the seconds, and the bytes that each node has read from the store."""
    ranks = []
    try:
        ranks = [node.start(RANK, path, MIB, "whole") for node in nodes]
        for rank in ranks:
            assert rank.stdout.readline().strip() == "ready"
        if len(nodes) > 1:
            until(lambda: all(node.listens() for node in nodes), 120, "listeners of all nodes")
        return load_counted(nodes, ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for node in nodes:
            node.end()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--rate", type=float, default=4.0, help="MiB/s of the store")
    given = parser.parse_args(arguments)
    test_read_once.NODES = given.nodes
    networks = Networks(range(1, given.nodes + 2))
    root = Path(tempfile.mkdtemp(prefix="nb-", dir="/dev/shm"))
    server, variables = start_store(networks, given.nodes + 1, given.rate)
    try:
        path = "gs://nebula/read-once"
        writer = Placed(networks, root / "writer", 0, 1, variables)
        saves = writer.start(SAVE, path, MIB)
        saves.communicate(timeout=300)
        assert saves.returncode == 0
        writer.end()
        alone, _ = together([Placed(networks, root / "alone", 0, 1, variables)], path)
        all_of_them, read = together([Placed(networks, root / "all", number, given.nodes, variables) for number in range(given.nodes)], path)
    finally:
        server.kill()
        server.wait()
        networks.close()
        shutil.rmtree(root, ignore_errors=True)
    share = sum(read) / (MIB << 20)
    print(
        f"{given.nodes} nodes in namespaces load {MIB} MiB from a store that sends {given.rate:g} MiB/s: {all_of_them:.1f} s, one node {alone:.1f} s, "
        f"{all_of_them / alone:.2f} times as long; the store has sent {share:.3f} times the file; MiB by node: {[one >> 20 for one in read]}",
        flush=True,
    )
    assert 1.0 <= share <= 1.1, read
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
