"""Keys of a store belong to the job that brought them, and not to the process that started the agent."""

from __future__ import annotations

from test_object_stores import run_beside

# The agent starts without keys, and asks no service of this machine for some.
CODE = """
import os, pathlib, subprocess, sys, time
import torch
import nebulaml as nm

NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
KEYS = {name: os.environ.pop(name) for name in NAMES}
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
PATH = test.STORES["s3"].path

def status():
    done = subprocess.run([os.environ["NEBULA_AGENT_PATH"], "status"], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr

def until(holds):
    for _ in range(600):
        if found := holds():
            return found
        time.sleep(0.1)
    raise SystemExit("it did not happen\\n" + status())

def save(step):
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save("m.pt", {"w": torch.full((1 << 18,), float(step))})
    return checkpoint

nm.init(PATH, 0, 2, on_error="raise")
first = save(1)
told = until(lambda: (text := status()) and "hold no keys" in text and text)
assert f"process {os.getpid()} (rank 0) brought" in told, told
assert first.state == "committed"

os.environ.update(KEYS | {"AWS_SECRET_ACCESS_KEY": "wrong"})
nm.init(PATH, 0, 2, on_error="raise")
told = until(lambda: (text := status()) and "is not accepted" in text and text)
assert f"process {os.getpid()} (rank 0) brought" in told and "the agent, process " in told, told

os.environ.update(KEYS)
nm.init(PATH, 0, 2, on_error="raise")
first.wait("durable", 60)
save(2).wait("durable", 60)

# A job whose keys are wrong takes none of another job, and costs it nothing.
other = os.fork()
if not other:
    os.environ["AWS_SECRET_ACCESS_KEY"] = "wrong"
    os.environ["AWS_REGION"] = "us-east-1"
    os.execv(sys.executable, [sys.executable, "-c", f'''
import nebulaml as nm
nm.init("{PATH}-other", 0, 2, job="other", on_error="raise")
with nm.Checkpoint("global_step7") as checkpoint:
    checkpoint.save_bytes("m.bin", [b"bytes"])
try:
    checkpoint.wait("durable", 60)
except nm.NebulaError:
    raise SystemExit(0)
raise SystemExit("a job without keys is durable")
'''])
assert os.waitpid(other, 0)[1] == 0
save(3).wait("durable", 60)
test.lose_memory()
nm._shutdown()
nm.init(PATH, 0, 2, on_error="raise")
assert nm.get_latest_checkpoint().tag == "global_step3"
print("durable")
"""


# fault (Storage): The keys of the process that started the agent expire, or it had none.
# result: Versions wait in memory. When a trainer of the job brings good keys, the agent writes them. No other job gets
# these keys.
def test_the_newest_keys_of_a_job_count_and_no_other_job_gets_them(tmp_path):
    assert "durable" in run_beside("s3", tmp_path, CODE)
