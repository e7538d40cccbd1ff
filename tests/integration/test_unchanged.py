"""Equal bytes of two versions go to an object store once: a proxy counts the bytes."""

from __future__ import annotations

import os
import re
import socket
import threading

import pytest
from test_object_stores import run_beside

MIB = int(os.environ.get("NEBULA_TEST_UNCHANGED_MIB", 32))  # of a checkpoint; 1024 is the size that the project promises for

# Runs beside the emulator, which the environment describes.
JOB = """
import fork_server, subprocess
import test_unchanged as unchanged
test.prepare(sys.argv[2])
PATH, MIB = test.STORES[sys.argv[2]].path, unchanged.MIB
counter = unchanged.Counter()
text = "import os, sys, torch\\nimport nebulaml as nm\\nPATH, MIB = %r, %d\\n" % (PATH, MIB)
with fork_server.start(text + unchanged.SAVE, stdin=subprocess.PIPE) as trainer:
    before = 0
    for line in trainer.stdout:
        print(line.strip(), "sent", counter.sent - before, flush=True)
        before = counter.sent
        trainer.stdin.write("\\n")
        trainer.stdin.flush()
assert trainer.returncode == 0
for words in (["verify", "global_step2"], ["list"]):
    done = subprocess.run([os.environ["NEBULA_AGENT_PATH"], *words, "--path", PATH], capture_output=True, text=True, timeout=300)
    print(words, done.stdout, done.stderr)
    assert done.returncode == 0
"""

SAVE = """
nm.init(PATH, 0, 8, on_error="raise")
layers = {f"layer{i}": torch.rand(1 << 18) for i in range(MIB)}
def save(step):
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save("model.pt", layers)
    checkpoint.wait("durable", 600)
    print("step", step, flush=True)
    sys.stdin.readline()
save(1)
for i in range(MIB // 3, MIB // 3 + max(1, MIB // 100)):  # 1 %
    layers[f"layer{i}"] += 1
save(2)
save(3)
nm.get_checkpoint("global_step1").load("model.pt")
"""


class Counter:
    """Passes connections on to the server that the environment names. Counts the bytes in both directions, and the parts that have arrived."""

    def __init__(self) -> None:
        names = ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_CONNECTION_STRING")
        name = next(name for name in names if name in os.environ)
        found = re.search(r"http://127\.0\.0\.1:(\d+)", os.environ[name])
        assert found
        self.port, self.sent, self.received, self.parts = int(found[1]), 0, 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        os.environ[name] = os.environ[name].replace(found[0], f"http://127.0.0.1:{self.listener.getsockname()[1]}")
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection(("127.0.0.1", self.port))
            last = [b""]  # the request line of this connection: its requests follow each other
            for pair in ((client, server, True), (server, client, False)):
                threading.Thread(target=self.copy, args=(*pair, last), daemon=True).start()

    def copy(self, source: socket.socket, to: socket.socket, counts: bool, last: list[bytes]) -> None:
        try:
            while piece := source.recv(1 << 20):
                if counts:
                    self.sent += len(piece)
                    last[0] = next(iter(re.findall(rb"(?:GET|HEAD|PUT|POST|PATCH|DELETE) (/[^ ]*) HTTP/1.1\r\n", piece)), last[0])
                elif b"partNumber=" in last[0] or b"comp=block&" in last[0]:
                    self.parts += len(re.findall(rb"\r\n(?:etag|x-ms-content-crc64):", piece.lower()))
                elif b"retainUncommittedData=true" in last[0]:  # ADLS keeps parts that were flushed
                    self.parts += 4 * len(re.findall(rb"HTTP/1.1 200", piece))
                self.received += 0 if counts else len(piece)
                to.sendall(piece)
            to.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@pytest.mark.parametrize("name", ["s3", pytest.param("azure", marks=pytest.mark.nightly)])
def test_a_version_of_which_little_changed_sends_little(name, tmp_path):
    said = run_beside(name, tmp_path, JOB, NEBULA_TEST_UNCHANGED_MIB=str(MIB))
    first, second, third = (int(sent) for sent in re.findall(r"step \d sent (\d+)", said))
    assert first > MIB << 20, said
    # 1 % has changed. A chunk has 4 MiB and a part 5 MiB, so a small checkpoint sends more than 2 %.
    assert second < max(0.02 * (MIB << 20), 10 << 20), said
    assert third < 1 << 20, said
    assert "WRITTEN" in said and "no damage" in said
