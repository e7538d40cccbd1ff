"""Jobs on a bucket that keeps what is removed, or refuses removals: saves and loads succeed, and retention says what it could not remove."""

from __future__ import annotations

import contextlib

import pytest
from store_servers import Servers
from test_object_stores import run_beside

# `keeps` counts the versions of objects that the bucket still has, without markers of removals.
SETUP = """
import pathlib, re, subprocess, time
import torch
import nebulaml as nm

def ask(code):
    # boto3 is in the environment of the server alone.
    text = "import json, os, boto3\\ns3 = boto3.client('s3', endpoint_url=os.environ['AWS_ENDPOINT_URL'])\\n"
    return subprocess.run([test.ROOT / ".envs/moto/bin/python", "-c", text + code], capture_output=True, text=True, check=True).stdout

def keeps(tag):
    return int(ask(f"print(len(s3.list_object_versions(Bucket='kept', Prefix='run/{tag}/m.pt').get('Versions', [])))"))

def nebula(*words):
    done = subprocess.run([os.environ["NEBULA_AGENT_PATH"], *words, "--path", PATH], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr

def log():
    runtime = pathlib.Path(os.environ["NEBULA_RUNTIME_DIR"])
    return "".join(one.read_text() for one in runtime.parent.glob(runtime.name + "*/agent.log"))

PATH = "s3://kept/run"
"""

BUCKETS = {
    "versioning": """
s3.create_bucket(Bucket="kept")
s3.put_bucket_versioning(Bucket="kept", VersioningConfiguration={"Status": "Enabled"})
""",
    "object lock": """
s3.create_bucket(Bucket="kept", ObjectLockEnabledForBucket=True)
rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
s3.put_object_lock_configuration(Bucket="kept", ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule})
""",
    "no removals": """
s3.create_bucket(Bucket="kept")
deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject", "Resource": "arn:aws:s3:::kept/*"}
s3.put_bucket_policy(Bucket="kept", Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]}))
""",
}

JOB = """
nm.init(PATH, 0, 1, on_error="raise", keep_last=2)
for step in (1, 2, 3, 4):
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save("m.pt", {"w": torch.full((1 << 18,), float(step))})
    checkpoint.wait("durable", 60)
nm.flush_persistence()
with nm.Checkpoint("global_step4") as checkpoint:  # written again: nothing of it is replaced
    checkpoint.save("m.pt", {"w": torch.full((1 << 18,), 5.0)})
checkpoint.wait("durable", 60)
end = time.monotonic() + 30
while REFUSED not in log() and "global_step1" in nebula("list") and time.monotonic() < end:
    time.sleep(0.2)
test.lose_memory()
nm._shutdown()
nm.init(PATH, 0, 1, on_error="raise")
assert (nm.get_latest_checkpoint().load("m.pt")["w"] == 5).all()
assert "no damage" in nebula("verify", "global_step4")
copied = subprocess.run([os.environ["NEBULA_AGENT_PATH"], "copy", PATH, "s3://kept/copy", "--tag", "global_step4"], capture_output=True, text=True, timeout=60)
assert copied.returncode == 0 and "copied, verified" in copied.stdout, copied
assert ("DeleteObject" in copied.stderr) == REFUSED.endswith("could not be removed"), copied
pruned, told = nebula("prune", "--keep-last", "1", "--yes"), nebula("doctor")
assert keeps("global_step1") and keeps("global_step3"), "the bucket has lost an object"
assert nebula("list").count("global_step") == 1
if REFUSED.endswith("could not be removed"):
    assert "cannot remove s3://kept/run/global_step3/m.pt: the answer is 403" in pruned and "s3:DeleteObject" in pruned, pruned
    assert "this takes s3:DeleteObject" in told and "may write              ok" in told, told
else:
    assert "removed 1 of 2 checkpoints" in pruned and "BAD" not in told, pruned + told
log = log()
assert REFUSED in log and "global_step4 is durable" in log and "cannot be written" not in log, log
print("held up nothing")
"""


# fault (Object stores): A bucket has versioning or object lock, or refuses removals.
# result: The object counts as removed. The job goes on, and the message names the objects that stay.
@pytest.mark.nightly("integration/test_pin.py::test_a_removal_that_fails_names_the_checkpoint", "integration/test_object_stores.py::test_a_job_on_an_object_store_is_killed_and_goes_on_where_it_was")
@pytest.mark.parametrize("bucket", ["versioning", "object lock", "no removals"])
def test_a_bucket_that_keeps_objects_holds_up_no_job(bucket, tmp_path):
    refused = "global_step1 could not be removed" if bucket == "no removals" else "removed global_step1 from"
    code = SETUP + f"ask({BUCKETS[bucket]!r})\nREFUSED = {refused!r}\n" + JOB
    with contextlib.closing(Servers()) as servers:  # of its own: the test takes rights from the key
        assert "held up nothing" in run_beside("s3", tmp_path, code, servers)
