"""A job whose storage path is a container of Azure Blob Storage: an emulator keeps it, and the agent, the command and the package are the real ones."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "azurite.sh"
PATH = "az://devstoreaccount1/training/run"

# Runs beside the emulator, whose connection string is in the environment.
JOB = """
import os, signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
import test_azure
test_azure.make_container("training")
def trainer(code):
    text = "import os, signal, torch\\nimport nebulaml as nm\\nPATH = %r\\n" % test_azure.PATH
    return subprocess.run([sys.executable, "-W", "ignore", "-c", text + code], capture_output=True, text=True, timeout=120)
first = trainer(test_azure.SAVE)
print(first.stdout, first.stderr)
assert first.returncode == -signal.SIGKILL, first.returncode
test_azure.lose_memory()
second = trainer(test_azure.RESUME)
print(second.stdout, second.stderr)
assert second.returncode == 0
for words in (["list"], ["verify", "--all"], ["prune", "--keep-last", "1", "--yes"], ["list", "--json"]):
    done = subprocess.run([os.environ["NEBULA_AGENT_PATH"], *words, "--path", test_azure.PATH], capture_output=True, text=True, timeout=60)
    print(words, done.stdout, done.stderr)
    assert done.returncode == 0
"""

# Two nodes, each with an agent of its own, that know of each other from the container alone.
NODES = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
import test_azure
test_azure.make_container("training")
def node(name, code):
    text = "import os, sys, torch\\nimport nebulaml as nm\\nPATH = %r\\n" % test_azure.PATH
    environment = os.environ | {"NEBULA_NODE_ID": name, "NEBULA_MEMORY_DIR": os.environ["NEBULA_MEMORY_DIR"] + "-" + name}
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", text + code], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
keeper = node("b", test_azure.KEEP)
assert keeper.stdout.readline() == "here\\n"
saver = node("a", test_azure.COPY)
print(saver.communicate(timeout=120)[0], saver.returncode)
print(keeper.communicate("done", timeout=60)[0])
"""

KEEP = """
nm.init(PATH, 0, 2, replicas=1, on_error="raise")
nm.Checkpoint("global_step0").commit()
print("here", flush=True)
sys.stdin.read()
"""

COPY = """
nm.init(PATH, 1000, 2, replicas=1, on_error="raise")
for step in (1, 2):  # the job's first version goes to storage at once
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save("model.pt", {"w": torch.full((3 << 20,), float(step)), "step": step})
checkpoint.wait("replicated", 60)
print("state", checkpoint.state)
"""

SAVE = """
nm.init(PATH, 0, 2, on_error="raise")
for step in (1, 2, 3):
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save("model.pt", {"w": torch.full((3 << 20,), float(step)), "step": step})
nm.flush_persistence()
os.kill(os.getpid(), signal.SIGKILL)
"""

RESUME = """
nm.init(PATH, 0, 2, on_error="raise")
found = nm.get_latest_checkpoint()
state = found.load("model.pt")
assert found.tag == "global_step3" and state["step"] == 3 and (state["w"] == 3).all()
with nm.Checkpoint("global_step3") as checkpoint:  # the same tag again: nothing is replaced
    checkpoint.save("model.pt", {"w": torch.full((8,), 7.0), "step": 3})
checkpoint.wait("durable", 60)
assert (nm.get_checkpoint("global_step3").load("model.pt")["w"] == 7).all()
assert (nm.get_checkpoint("global_step2").load("model.pt")["w"] == 2).all()
print("resumed")
"""


def signed(method: str, resource: str, query: str = "", **headers: str) -> urllib.request.Request:
    """A request for CONTAINER/BLOB with the key of the connection string. query: one name=value."""
    parts = dict(part.split("=", 1) for part in os.environ["AZURE_STORAGE_CONNECTION_STRING"].split(";") if part)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    path = re.sub(r"https?://[^/]+", "", parts["BlobEndpoint"]) + f"/{resource}"
    text = (
        method
        + "\n" * 12
        + f"x-ms-date:{date}\nx-ms-version:2021-12-02\n/{parts['AccountName']}{path}"
        + (f"\n{query.replace('=', ':')}" if query else "")
    )
    signature = base64.b64encode(
        hmac.new(base64.b64decode(parts["AccountKey"]), text.encode(), hashlib.sha256).digest()
    ).decode()
    proof = {
        "x-ms-date": date,
        "x-ms-version": "2021-12-02",
        "Authorization": f"SharedKey {parts['AccountName']}:{signature}",
    }
    address = f"{parts['BlobEndpoint']}/{resource}" + (f"?{query}" if query else "")
    return urllib.request.Request(address, method=method, headers=proof | headers)


def make_container(name: str) -> None:
    request = signed("PUT", name, "restype=container", **{"Content-Length": "0"})
    assert urllib.request.urlopen(request, timeout=30).status == 201


def lose_memory() -> None:
    """As a new machine: no agent, and nothing in memory."""
    subprocess.run([os.environ["NEBULA_AGENT_PATH"], "stop", "--now", "--yes"], capture_output=True, timeout=60)
    shutil.rmtree(os.environ["NEBULA_MEMORY_DIR"], ignore_errors=True)


def run_beside_emulator(tmp_path: Path, code: str, **settings: str) -> str:
    """What the code prints, which runs with an emulator in its environment and agents of its own."""
    nebulaml = pytest.importorskip("nebulaml")
    from nebulaml import locate

    name = uuid.uuid4().hex[:8]
    memory, runtime = Path(f"/dev/shm/nb-{name}"), Path(f"/tmp/nb-{name}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("NEBULA_", "AZURE_"))} | {
        "NEBULA_RUNTIME_DIR": str(runtime),
        "NEBULA_MEMORY_DIR": str(memory),
        "NEBULA_OUTPUT_DIR": str(tmp_path / "output"),
        "NEBULA_AGENT_PATH": os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(),
        "PYTHONPATH": os.pathsep.join([str(Path(nebulaml.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
        **settings,
    }
    try:
        command = [SCRIPT, "run", sys.executable, "-W", "ignore", "-c", code, Path(__file__).parent]
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=280)
        logs = "".join(path.read_text() for path in runtime.parent.glob(f"{runtime.name}*/agent.log"))
        assert done.returncode == 0, done.stdout + done.stderr + logs
        assert "Eby8vdM02x" not in done.stdout + done.stderr + logs  # the account's key
        return done.stdout
    finally:
        for node in ("", "a", "b"):
            stop = environment | ({"NEBULA_NODE_ID": node} if node else {})
            subprocess.run(
                [environment["NEBULA_AGENT_PATH"], "stop", "--now", "--yes"], env=stop, capture_output=True, timeout=60
            )
        for path in (*memory.parent.glob(memory.name + "*"), *runtime.parent.glob(runtime.name + "*")):
            shutil.rmtree(path, ignore_errors=True)


needs_npm = pytest.mark.skipif(
    shutil.which("npm") is None, reason="npm is not here, which installs the emulator Azurite"
)


@needs_npm
def test_a_job_on_azure_blob_storage_is_killed_and_goes_on_where_it_was(tmp_path):
    said = run_beside_emulator(tmp_path, JOB)
    assert "resumed" in said and "no damage" in said
    assert "removed 2 of 3 checkpoints" in said


@needs_npm
def test_nodes_find_each_other_through_a_container(tmp_path):
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("0123456789abcdef0123456789abcdef")
    said = run_beside_emulator(tmp_path, NODES, NEBULA_SECRET_FILE=str(secret))
    assert "state replicated" in said
