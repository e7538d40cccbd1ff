"""cleanroot.py STORAGE: a job that saves, is killed and resumes, with the package as `pip install` has installed it. scripts/cleanroot.sh runs it."""

import os
import subprocess
import sys
import urllib.request

JOB = """
import os, signal, sys, torch
import nebulaml as nm

nm.init(persistent_storage_path=sys.argv[1])
latest = nm.get_latest_checkpoint()
state = latest.load("state.pt") if latest else {"step": 0, "sum": torch.zeros(1 << 20)}
for step in range(state["step"] + 1, 9):
    state = {"step": step, "sum": state["sum"] + step}
    with nm.Checkpoint(f"step{step}") as checkpoint:
        checkpoint.save("state.pt", state)
    checkpoint.wait("captured")
    if step == 5 and not latest:
        os.kill(os.getpid(), signal.SIGKILL)
print("resumed from", latest.tag if latest else None, "ended with", state["step"], float(state["sum"].mean()))
nm.flush_persistence()
"""

here = os.path.dirname(sys.executable)
nebula = os.path.join(here, "nebula")
try:
    first = subprocess.run([sys.executable, "-c", JOB, sys.argv[1]])
    assert first.returncode == -9, first
    second = subprocess.run([sys.executable, "-c", JOB, sys.argv[1]], stdout=subprocess.PIPE, text=True)
    print(second.stdout, end="")
    assert second.returncode == 0 and second.stdout == "resumed from step5 ended with 8 36.0\n", second
    subprocess.run([nebula, "verify", sys.argv[1]], check=True)
    with subprocess.Popen([nebula, "metrics", "--listen", "0", "--path", sys.argv[1]], stdout=subprocess.PIPE, text=True) as serving:
        with urllib.request.urlopen(serving.stdout.readline().strip(), timeout=60) as answer:
            assert "nebula_" in answer.read().decode()
        serving.terminate()
    import torch

    assert float(torch.load(os.path.join(sys.argv[1], "step8", "state.pt"))["sum"][7]) == 36
finally:
    subprocess.run([nebula, "stop", "--now", "--yes"], check=False)
print("ok")
