"""Jobs on a directory of an NFS client: it may show changes of other nodes late, and the server may vanish and come back.

tests/servers/nfs_fuse.c simulates the client. Two mounts of one directory are two nodes.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import time
import uuid

import fork_server
import pytest

pytest.importorskip("nebulaml")
ROOT = pathlib.Path(__file__).resolve().parents[2]

JOB = """
import os, sys, time, torch
import nebulaml as nm
path, last, slow = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
nm.init(path, 0, 4, on_error="raise")
latest = nm.get_latest_checkpoint()
step = latest.load("m.pt")["step"] if latest else 0
print("from", step, flush=True)
for step in range(step + 1, last + 1):
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save("m.pt", {"w": torch.full((50_000,), float(step)), "step": step})
    checkpoint.wait("durable", 60)
    print("durable", step, flush=True)
if slow:
    time.sleep(60)
"""


class Client:
    """A node: a mount of the server's directory, and an agent of its own."""

    def __init__(self, nebula, program, server, place):
        self.mount, self.control = place / "mount", place / "control"
        self.mount.mkdir(parents=True)
        self.rules()
        self.nebula = nebula
        self.path = self.mount / "store"
        name = uuid.uuid4().hex[:8]
        self.folders = [pathlib.Path(f"/tmp/nb-{name}"), pathlib.Path(f"/dev/shm/nb-{name}")]
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("NEBULA_")} | {
            "NEBULA_RUNTIME_DIR": str(self.folders[0]),
            "NEBULA_MEMORY_DIR": str(self.folders[1]),
            "NEBULA_NODE_ID": name,
            "NEBULA_AGENT_PATH": str(nebula),
        }
        command = [program, server, self.mount, self.control, "sh", "-c", "echo mounted; read line"]
        self.serving = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.serving.stdout.readline().strip() != "mounted":
            assert self.serving.wait(30) == 77
            pytest.skip("no file system can be mounted through /dev/fuse here")

    def rules(self, **rules):
        fresh = self.control.with_suffix(".new")
        fresh.write_text("".join(f"{name} {value}\n" for name, value in rules.items()))
        fresh.rename(self.control)

    def job(self, *arguments):
        return fork_server.start(JOB, self.path, *arguments, env=self.environment, stderr=subprocess.PIPE)

    def finish(self, *arguments):
        said, failed = (process := self.job(*arguments)).communicate(timeout=120)
        assert process.returncode == 0, failed[-3000:]
        return said.splitlines()

    def command(self, *words):
        return subprocess.run([self.nebula, *words, "--path", self.path], env=self.environment, capture_output=True, text=True, timeout=120)

    def stop(self, *how):
        subprocess.run([self.nebula, "stop", *how], env=self.environment, capture_output=True, timeout=120)

    def close(self):
        self.rules()
        self.stop("--now", "--yes")
        self.serving.communicate("end\n", timeout=60)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def clients(nebula, tmp_path):
    # The package's own build directory, build/python, has no tests.
    built = [path for pattern in ("build*", "build/*") for path in ROOT.glob(f"{pattern}/tests/unit/store/nfs_fuse")]
    if not built:
        pytest.skip("tests/servers/nfs_fuse.c was not built: libfuse 3 was not there")
    program = max(built, key=lambda path: path.stat().st_mtime)
    (tmp_path / "server").mkdir()
    made = []

    def make():
        made.append(Client(nebula, program, tmp_path / "server", tmp_path / f"client{len(made)}"))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_a_job_on_nfs_is_killed_and_goes_on_also_on_another_node(clients):
    first = clients()
    first.rules(ttl_ms=3000, squash=1, ahead_s=3600)
    job = first.job(1000)
    for line in job.stdout:
        if line.startswith("durable 5"):
            break
    job.send_signal(signal.SIGKILL)
    job.wait()
    begun = first.finish(8)[0]
    assert int(begun.split()[1]) >= 5
    first.stop()
    second = clients()
    assert second.finish(30)[0].split()[1] >= "8"
    assert second.command("verify", "--all").returncode == 0


def test_a_server_that_goes_and_comes_back_costs_time_and_no_checkpoint(clients):
    client = clients()
    assert client.finish(2)[-1] == "durable 2"
    for down in (1, 2):  # a hard mount waits, a soft one fails
        client.rules(down=down)
        job = client.job(2 + down)
        time.sleep(1.5)
        assert job.poll() is None or down == 2
        client.rules()
        said = job.communicate(timeout=120)[0]
        if job.returncode:  # a soft mount may fail the look for the newest version: that is said, and nothing begins from nothing
            assert down == 2 and "from 0" not in said
            said = "\n".join(client.finish(2 + down))
        assert f"durable {2 + down}" in said


def test_a_mount_that_shows_an_old_latest_is_harmless(clients):
    writer, stale = clients(), clients()
    writer.finish(3)
    stale.rules(ttl_ms=3_600_000)
    shown = (stale.path / "latest").read_text()
    seen = sorted(stale.path.rglob("*"))
    assert "global_step3" in shown and stale.path / "global_step3" in seen
    writer.finish(6)
    writer.stop()
    # The mount shows the listings of before, and for names that it knows the attributes of before.
    assert sorted(stale.path.rglob("*")) == seen
    job = stale.job(8)
    said, failed = job.communicate(timeout=120)
    begun = said.splitlines()[0]
    if begun == "from 3":
        assert job.returncode == 1 and said.splitlines() == ["from 3"]
        assert 'has made "global_step4" durable' in failed and "that checkpoint stays" in failed
    else:  # this node's agent changed the directory before the search, so the client listed it again
        assert begun == "from 6" and job.returncode == 0, failed
    stale.stop("--now", "--yes")
    # The other job's files are unchanged. The next test step uses a mount that caches attributes for some seconds, as NFS does.
    assert writer.command("verify", "--all").returncode == 0
    stale.rules(ttl_ms=500)
    time.sleep(0.6)
    assert stale.finish(8)[0] == ("from 6" if begun == "from 3" else "from 8")
    assert writer.command("verify", "--all").returncode == 0
