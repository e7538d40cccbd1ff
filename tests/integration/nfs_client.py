"""A node whose storage is a directory of an NFS client, and a job on it."""

import os
import pathlib
import shutil
import subprocess
import uuid

import fork_server
import pytest

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


def built(name):
    """A program of the C tests, from the newest build; None: it was not built. The package's own build directory, build/python, has none."""
    found = [path for pattern in ("build*", "build/*") for path in ROOT.glob(f"{pattern}/tests/unit/store/{name}")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


class Client:
    """A node: a mount of the server's directory, and an agent of its own. `serve` is the command of the mount, up to its own command."""

    def __init__(self, nebula, place, serve, **environment):
        self.mount, self.nebula = place / "mount", nebula
        self.mount.mkdir(parents=True)
        self.path = self.mount / "store"
        name = uuid.uuid4().hex[:8]
        self.folders = [pathlib.Path(f"/tmp/nb-{name}"), pathlib.Path(f"/dev/shm/nb-{name}")]
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("NEBULA_")} | {
            "NEBULA_RUNTIME_DIR": str(self.folders[0]),
            "NEBULA_MEMORY_DIR": str(self.folders[1]),
            "NEBULA_NODE_ID": name,
            "NEBULA_AGENT_PATH": str(nebula),
        }
        command = [*serve(self.mount), "sh", "-c", "echo mounted; read line"]
        self.serving = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
        if self.serving.stdout.readline().strip() != "mounted":
            assert self.serving.wait(60) == 77
            pytest.skip("no file system can be mounted through /dev/fuse here")

    def job(self, *arguments):
        return fork_server.start(JOB, self.path, *arguments, env=self.environment, stderr=subprocess.PIPE)

    def train_until_killed(self, step):
        """Starts a job, and kills it when it has said that the version of this step is durable."""
        job = self.job(1000)
        next(line for line in job.stdout if line == f"durable {step}\n")
        job.kill()
        job.wait()

    def finish(self, *arguments):
        said, failed = (process := self.job(*arguments)).communicate(timeout=120)
        assert process.returncode == 0, failed[-3000:]
        return said.splitlines()

    def command(self, *words):
        return subprocess.run([self.nebula, *words, "--path", self.path], env=self.environment, capture_output=True, text=True, timeout=120)

    def stop(self, *how):
        subprocess.run([self.nebula, "stop", *how], env=self.environment, capture_output=True, timeout=120)

    def close(self):
        self.stop("--now", "--yes")
        self.serving.communicate("end\n", timeout=60)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
