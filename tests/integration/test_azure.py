"""Nodes that find each other through a container of Azure Blob Storage, in an emulator. The agents and the package are real."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_object_stores import run_beside

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "azurite.sh"
PATH = "az://devstoreaccount1/training/run"

# Two nodes, each with an agent of its own, that know of each other from the container alone.
NODES = """
import azure_requests, fork_server, os, subprocess, sys, test_azure
azure_requests.make_container("training")
def node(name, code):
    text = "import os, sys, torch\\nimport nebulaml as nm\\nPATH = %r\\n" % test_azure.PATH
    environment = os.environ | {"NEBULA_NODE_ID": name, "NEBULA_MEMORY_DIR": os.environ["NEBULA_MEMORY_DIR"] + "-" + name}
    return fork_server.start(text + code, env=environment, stdin=subprocess.PIPE)
keeper = node("b", test_azure.KEEP)
assert keeper.stdout.readline() == "here\\n"
saver = node("a", test_azure.COPY)
print(saver.communicate(timeout=120)[0], saver.returncode)
print(keeper.communicate("done", timeout=60)[0])
"""

KEEP = """
nm.init(PATH, 0, 2, replicas=1, on_error="raise")
nm.get_latest_checkpoint() # joins the job
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


needs_npm = pytest.mark.skipif(
    shutil.which("npm") is None, reason="npm is not here, which installs the emulator Azurite"
)


@pytest.mark.nightly
@needs_npm
def test_nodes_find_each_other_through_a_container(tmp_path):
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("0123456789abcdef0123456789abcdef")
    said = run_beside("azure", tmp_path, NODES, NEBULA_SECRET_FILE=str(secret))
    assert "state replicated" in said
