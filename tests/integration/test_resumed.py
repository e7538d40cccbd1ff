"""An agent is killed in the middle of an upload: the next one does not send again what the server has. Bytes are counted on the way."""

from __future__ import annotations

import re
import time

import pytest
from test_object_stores import run_beside


def mebibytes(name: str) -> int:
    """Returns the size of the file: 12 parts, of which the driver has 8 under way at first. ADLS keeps what was flushed, so it takes 20 parts."""
    return 320 if name == "adls" else 96


# Runs beside the emulator, which the environment describes.
JOB = """
import json, signal, subprocess
import torch
import nebulaml as nm
import test_resumed as resumed
import test_unchanged as unchanged
test.prepare(sys.argv[2])
PATH, MIB = test.STORES[sys.argv[2]].path, resumed.mebibytes(sys.argv[2]) << 20
counter = unchanged.Counter()
def nebula(*words):
    return subprocess.run([os.environ["NEBULA_AGENT_PATH"], *words], capture_output=True, text=True, timeout=120)
nm.init(PATH, 0, 4, on_error="raise")
pid = json.loads(nebula("status", "--json").stdout)["agent"]["pid"]
state = {f"w{i}": torch.arange(MIB >> 5, dtype=torch.int32) + i for i in range(8)}
with nm.Checkpoint("global_step1") as checkpoint:
    checkpoint.save("model.pt", state)
resumed.until(lambda: counter.parts > 2)
os.kill(pid, signal.SIGKILL)
resumed.until(lambda: not os.path.exists(f"/proc/{pid}"))
before = counter.sent
os.environ.pop("NEBULA_STORE_MBPS")
nm.get_checkpoint("global_step1")  # starts an agent, which takes over
checkpoint.wait("durable", 120)
print("sent", counter.sent - before)
found = nebula("verify", "global_step1", "--path", PATH)
print(found.stdout, found.stderr)
assert found.returncode == 0
test.lose_memory()
loaded = nm.get_checkpoint("global_step1").load("model.pt")
assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)
"""


def until(happens) -> None:
    end = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.nightly  # by day tests/unit/store/resume_test.c shows it of each driver
@pytest.mark.parametrize("name", ["gs", "azure", "s3", "adls"])
def test_an_agent_that_is_killed_in_an_upload_sends_no_part_twice(name, tmp_path):
    said = run_beside(name, tmp_path, JOB, NEBULA_STORE_MBPS="60", NEBULA_SWEEP_AGE="0")  # its sweep spares the upload
    sent = int(re.search(r"sent (\d+)", said)[1])
    assert sent < (mebibytes(name) - 8) << 20, said
    assert "no damage" in said
