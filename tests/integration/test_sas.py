"""Jobs whose only credential is a SAS of an emulator's container: it ends in the middle of an upload, or lacks a permission."""

from __future__ import annotations

import pytest
from test_azure import needs_npm
from test_object_stores import run_beside

# The agent has nothing but the SAS. It sends 24 MiB at 3 MB/s, so that a SAS of three seconds ends after the first block of 8 MiB.
SETUP = """
import datetime, os, pathlib, shutil, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import azure_requests, test_doctor
import torch
import nebulaml as nm
azure_requests.make_container("training")
KEY = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
PATH = dict(part.split("=", 1) for part in KEY.split(";"))["BlobEndpoint"] + "/training/" + test.RUN

def sas(permissions="rcwdl", seconds=3600):
    os.environ["AZURE_STORAGE_CONNECTION_STRING"] = KEY
    end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)
    made = test_doctor.service_sas(permissions, end.strftime("%Y-%m-%dT%H:%M:%SZ"))[0].split("?", 1)[1]
    del os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    return made

def nebula(*words):
    done = subprocess.run([os.environ["NEBULA_AGENT_PATH"], *words, "--path", PATH], capture_output=True, text=True, timeout=60)
    assert "sig=" not in done.stdout + done.stderr
    return done.stdout + done.stderr

def save(step, mib):
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save("m.pt", {"w": torch.full((mib << 18,), float(step))})
    return checkpoint

def until(holds):
    for _ in range(600):
        if found := holds():
            return found
        time.sleep(0.1)
    raise SystemExit("it did not happen\\n" + nebula("status"))
"""

ENDS = """
os.environ["AZURE_STORAGE_SAS_TOKEN_FILE"] = file = str(pathlib.Path(os.environ["NEBULA_OUTPUT_DIR"]).parent / "sas")
os.environ["NEBULA_STORE_MBPS"] = "3"
pathlib.Path(file).write_text(sas(seconds=3))
nm.init(PATH, 0, 2, on_error="raise")
checkpoint = save(1, 24)
told = until(lambda: (text := nebula("status")) and "has expired, at 20" in text and text)
assert "write a new one into that file" in told, told
assert checkpoint.state == "committed" and nm.get_latest_checkpoint().tag == "global_step1"
os.environ["NEBULA_STORE_MBPS"] = "0"
pathlib.Path(file).write_text(sas())
checkpoint.wait("durable", 60)
assert "no damage" in nebula("verify")
print("durable")
"""

# The SAS is in the storage path. No output shows it, and a trainer that comes with a new one finds the version that waits.
IN_PATH = """
def told_by(path):
    words = ("status", "status --json", "list", "list --json", "doctor --json", "inspect latest", "verify", "pin", "flush --timeout 1", "prune --keep-last 1")
    for one in words:
        done = subprocess.run([os.environ["NEBULA_AGENT_PATH"], *one.split(), "--path", path], capture_output=True, text=True, timeout=60)
        assert "sig=" not in done.stdout + done.stderr, one
        yield done

os.environ["NEBULA_STORE_MBPS"] = "3"
old = PATH + "?" + sas(seconds=3)
nm.init(old, 0, 2, on_error="raise")
checkpoint = save(1, 24)
told = until(lambda: (text := nebula("status")) and "has expired, at 20" in text and text)
assert "start again with a new one in the path" in told, told
list(told_by(old))
del os.environ["NEBULA_STORE_MBPS"]
new = PATH + "//?" + sas()
nm.init(new, 0, 2, on_error="raise")
found = nm.get_latest_checkpoint()
assert found.tag == "global_step1" and (found.load("m.pt")["w"] == 1).all()
found.wait("durable", 60)
assert all(done.returncode == 0 for done in told_by(new))
assert nebula("status").count(PATH) == 1, nebula("status")  # one job
log = "".join(one.read_text() for one in pathlib.Path(os.environ["NEBULA_RUNTIME_DIR"]).parent.glob("nb-" + test.RUN + "*/agent.log"))
assert PATH in log and "sig=" not in log, log
print("durable")
"""

RIGHTS = """
import re, signal
def becomes(permissions):
    # The agent dies, and the next one has another SAS in its environment.
    if pids := [int(pid) for pid in re.findall("running, pid ([0-9]+)", nebula("status"))]:
        os.kill(*pids, signal.SIGKILL)
        nm._shutdown()
    os.environ["AZURE_STORAGE_SAS_TOKEN"] = sas(permissions)
    nm.init(PATH, 0, 2, on_error="raise", keep_last=1)

runtime = pathlib.Path(os.environ["NEBULA_RUNTIME_DIR"])
def log():
    return "".join(one.read_text() for one in runtime.parent.glob(runtime.name + "*/agent.log"))

becomes("rcwdl")
save(1, 1).wait("durable", 60)

becomes("rcwl")  # saves succeed, and retention says what stays
for step in (2, 3):
    save(step, 1).wait("durable", 60)
until(lambda: "global_step1 could not be removed" in log())
assert "has sp=rcwl and lacks d" in log(), log()
told = nebula("doctor")
assert "this takes d in the SAS" in told and "lacks d" in told, told
assert "global_step3" in nebula("list") and "no damage" in nebula("verify")

becomes("rcwd")  # without it an agent cannot tell whether a tag is taken: versions wait in memory
assert "cannot list" in nebula("list") and "has sp=rcwd and lacks l" in nebula("list")
told = nebula("doctor")
assert "this takes l in the SAS" in told, told
checkpoint = save(4, 1)
def refusal():
    try:
        checkpoint.wait("durable", 1)
    except nm.NebulaTimeout as failure:
        return "is committed; storage fails: cannot list" in str(failure) and "lacks l" in str(failure)
    raise SystemExit("it became durable")
until(refusal)
becomes("rcwdl")
nm.get_checkpoint("global_step4").wait("durable", 60)
print("all said")
"""


# fault (Object stores): A SAS ends in the middle of an upload.
# result: The upload goes on if the file of `AZURE_STORAGE_SAS_TOKEN_FILE` has a new one. Otherwise the message says
# that it has expired, and the version waits in memory.
@pytest.mark.nightly("integration/test_doctor.py::test_an_expired_sas_is_called_expired_and_never_shown", "integration/test_copy.py::test_all_versions_arrive_verified_and_are_not_copied_again")
@needs_npm
def test_an_upload_whose_sas_ends_goes_on_when_the_file_has_a_new_one(tmp_path):
    assert "durable" in run_beside("azure", tmp_path, SETUP + ENDS)


@pytest.mark.nightly("integration/test_doctor.py::test_an_expired_sas_is_called_expired_and_never_shown")
@needs_npm
def test_the_sas_of_a_storage_path_is_never_shown_and_can_be_replaced(tmp_path):
    assert "durable" in run_beside("azure", tmp_path, SETUP + IN_PATH)


@pytest.mark.nightly
@needs_npm
def test_a_sas_without_a_right_is_named_by_saves_lists_and_doctor(tmp_path):
    assert "all said" in run_beside("azure", tmp_path, SETUP + RIGHTS)
