"""A manager whose far storage is a bucket of a server on this machine: away for a while, back, and then all that is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

pytest.importorskip("nebulaml")

from nebulaml._session import locate

TRAIN = """
import os, signal, sys, torch
import nebulaml as nm
near, far, server, expected, *steps = sys.argv[1:]
manager = nm.Manager(near, far=nm.Far(far, keep_last=2))
into = {"w": torch.zeros(1 << 18)}
found = manager.restore({"model": into})
assert (found.step if found else 0) == int(expected), found
assert not found or (into["w"] == found.step).all()
os.kill(int(server), signal.SIGSTOP)
for step in map(int, steps):
    manager.save(step, {"model": {"w": torch.full((1 << 18,), float(step))}}, force=True)
    manager.wait(step)
os.kill(int(server), signal.SIGCONT)
manager.close()
assert nm.wait_for_exports(120)
print("done")
"""


# fault: as test_a_job_whose_storage_and_memory_are_lost_goes_on_from_the_far_storage_and_saves_into_the_near_one
@pytest.mark.nightly
def test_a_job_goes_on_from_a_bucket_after_its_own_storage_and_memory_were_lost(servers, run, tmp_path, monkeypatch):
    name = "s3"
    command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    for variable, value in servers.variables(name).items():
        monkeypatch.setenv(variable, value)
    near, far, memory = tmp_path / "near", servers.new_path(name), tmp_path / "memory"
    environment = {**os.environ, "NEBULA_AGENT_PATH": command, "NEBULA_RUNTIME_DIR": str(tmp_path / "runtime"), "NEBULA_MEMORY_DIR": str(memory)}

    def train(expected: int, *steps: int) -> None:
        words = [near, far, servers.process(name), expected, *steps]
        try:
            done = subprocess.run(
                [sys.executable, "-c", TRAIN, *map(str, words)], capture_output=True, text=True, timeout=240, env=environment
            )
        finally:
            os.kill(servers.process(name), signal.SIGCONT)
        assert done.stdout == "done\n", done.stderr

    def steps_in(path: object) -> list[int]:
        return sorted(one["step"] for one in json.loads(run("list", "--path", path, "--json").stdout)["versions"])

    train(0, 1, 2, 3)
    assert steps_in(far)[-1] == 3 and len(steps_in(far)) <= 2
    assert run("verify", "--all", "--path", far).returncode == 0
    subprocess.run([command, "stop", "--now", "--yes"], capture_output=True, timeout=60, env=environment)
    shutil.rmtree(memory, ignore_errors=True)
    shutil.rmtree(near)
    train(3, 4)
    assert steps_in(near) == [4] and steps_in(far)[-1] == 4
