"""A job whose storage path is an object store: an emulator serves it. The agent, the command and the package are real."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import fork_server
import pytest

if TYPE_CHECKING:
    from store_servers import Servers

ROOT = Path(__file__).resolve().parents[2]


RUN = os.environ.get("NEBULA_TEST_RUN", "run")  # where run_beside's storage lies


class Store(NamedTuple):
    server: list[str]  # runs a command beside it
    path: str
    secret: str  # the environment variable with the key, alone or after "AccountKey="
    needs: str = "python3"  # the program that the server takes


S3 = [f"scripts/{os.environ.get('NEBULA_TEST_S3', 'moto')}.sh", "run"]  # or localstack

STORES = {
    "azure": Store(
        ["scripts/azurite.sh", "run"], f"az://devstoreaccount1/training/{RUN}", "AZURE_STORAGE_CONNECTION_STRING", "npm"
    ),
    "s3": Store(S3, f"s3://nebula/training/{RUN}", "AWS_SECRET_ACCESS_KEY"),
    "two accounts": Store(
        ["scripts/azurite.sh", "run", "--two"],
        f"az://devstoreaccount1,nebulatwo/training/{RUN}",
        "AZURE_STORAGE_CONNECTION_STRING",
        "npm",
    ),
    "two buckets": Store(S3, f"s3://nebula,nebula2/training/{RUN}", "AWS_SECRET_ACCESS_KEY"),
    "adls": Store(
        ["tests/servers/dfs.py"],
        f"abfss://nebula@datalake.dfs.core.windows.net/training/{RUN}",
        "AZURE_STORAGE_CONNECTION_STRING",
    ),
    "gs": Store(["tests/servers/gs.py"], f"gs://nebula/training/{RUN}", "GS_SECRET_ACCESS_KEY"),
    "buckets": Store(["tests/servers/buckets.py"], f"s3://nebula/training/{RUN}", "AWS_SECRET_ACCESS_KEY"),
}
# Those on which whole jobs and commands are tried each time. The C tests try each driver each time.
USUAL = [pytest.param(name, marks=() if name == "s3" else pytest.mark.nightly) for name in STORES]

# No file and no output may contain the key of the environment.
SECRETS = """
import os, sys
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
import test_object_stores as test
print("secret", os.environ[test.STORES[sys.argv[2]].secret].split("AccountKey=")[-1].split(";")[0])
"""

# Runs beside the emulator, which the environment describes.
JOB = """
import fork_server, signal, subprocess
PATH = test.STORES[sys.argv[2]].path
test.prepare(sys.argv[2])
def trainer(code):
    text = "import os, signal, torch\\nimport nebulaml as nm\\nPATH = %r\\n" % PATH
    process = fork_server.start(text + code, stderr=subprocess.PIPE)
    print(*process.communicate(timeout=120))
    return process
first = trainer(test.SAVE)
assert first.returncode == -signal.SIGKILL, first.returncode
test.lose_memory()
second = trainer(test.RESUME)
assert second.returncode == 0
for words in (["list"], ["verify", "--all"], ["prune", "--keep-last", "1", "--yes"], ["list", "--json"]):
    done = subprocess.run([os.environ["NEBULA_AGENT_PATH"], *words, "--path", PATH], capture_output=True, text=True, timeout=60)
    print(words, done.stdout, done.stderr)
    assert done.returncode == 0
"""

# A checkpoint of torch.distributed.checkpoint, by its URL.
DCP = """
import torch, torch.distributed.checkpoint as dcp
import nebulaml as nm
from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter
path = test.STORES[sys.argv[2]].path
test.prepare(sys.argv[2])
state = {"w": torch.arange(1 << 20, dtype=torch.float32), "step": 7}
dcp.save(state, storage_writer=NebulaStorageWriter(path + "/step7"))
nm.flush_persistence()
assert nm.persist_path() == path
test.lose_memory()
found = {"w": torch.zeros(1 << 20), "step": 0}
dcp.load(found, storage_reader=NebulaStorageReader(path + "/step7"))
assert torch.equal(found["w"], state["w"]) and found["step"] == 7
print("resumed")
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


def prepare(store: str) -> None:
    if store in ("azure", "two accounts"):
        from azure_requests import make_container

        make_container("training")
        if store == "two accounts":
            make_container("training", "nebulatwo")


def lose_memory() -> None:
    """Simulates a new machine: ends the agent and removes its memory."""
    subprocess.run([os.environ["NEBULA_AGENT_PATH"], "stop", "--now", "--yes"], capture_output=True, timeout=60)
    shutil.rmtree(os.environ["NEBULA_MEMORY_DIR"], ignore_errors=True)


def run_beside(name: str, tmp_path: Path, code: str, servers: Servers | None = None, **settings: str) -> str:
    """Runs code with the store's server in its environment, with its own agents and an empty path in the store. Returns its output. Its second
    argument is the store. Without `servers` it shares the server with other tests.
    """
    nebulaml = pytest.importorskip("nebulaml")
    from nebulaml._session import locate
    from store_servers import shared

    number = uuid.uuid4().hex[:8]
    memory, runtime = Path(f"/dev/shm/nb-{number}"), Path(f"/tmp/nb-{number}")
    others = ("NEBULA_", "AZURE_", "AWS_", "GOOGLE_", "GS_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(others)} | {
        "NEBULA_RUNTIME_DIR": str(runtime),
        "NEBULA_MEMORY_DIR": str(memory),
        "NEBULA_OUTPUT_DIR": str(tmp_path / "output"),
        "NEBULA_AGENT_PATH": os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(),
        "PYTHONPATH": os.pathsep.join([str(Path(nebulaml.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
        "NEBULA_TEST_RUN": number,
        **(servers or shared()).variables(name),
        **settings,
    }
    try:
        process = fork_server.start(SECRETS + code, Path(__file__).parent, name, env=environment, stderr=subprocess.PIPE)
        output, errors = process.communicate(timeout=280)
        logs = "".join(path.read_text() for path in runtime.parent.glob(f"{runtime.name}*/agent.log"))
        assert process.returncode == 0, output + errors + logs
        secret = re.search("^secret (.{10,})$", output, re.MULTILINE)[1]
        assert (output + errors + logs).count(secret) == 1
        return output
    finally:
        for node in ("", "a", "b"):
            stop = environment | ({"NEBULA_NODE_ID": node} if node else {})
            subprocess.run(
                [environment["NEBULA_AGENT_PATH"], "stop", "--now", "--yes"], env=stop, capture_output=True, timeout=60
            )
        for path in (*memory.parent.glob(memory.name + "*"), *runtime.parent.glob(runtime.name + "*")):
            shutil.rmtree(path, ignore_errors=True)


# fault: as an_expired_place_is_asked_for_once_more_and_never_says_that_there_is_no_object
@pytest.mark.parametrize("name", USUAL)
def test_a_job_on_an_object_store_is_killed_and_goes_on_where_it_was(name, tmp_path):
    said = run_beside(name, tmp_path, JOB)
    assert "resumed" in said and "no damage" in said
    assert "removed 2 of 3 checkpoints" in said


# Loads and commands with the names in another order: a job must not begin from nothing.
REORDERED = """
import subprocess, time
import nebulaml as nm
path = test.STORES[sys.argv[2]].path
test.prepare(sys.argv[2])
nm.init(path, 0, 2, on_error="raise")
with nm.Checkpoint("global_step1") as checkpoint:
    checkpoint.save("model.pt", {"step": 1})
checkpoint.wait("durable", 60)
nm._shutdown()
test.lose_memory()
scheme, names, rest = path.replace("://", "/", 1).split("/", 2)
other = scheme + "://" + ",".join(reversed(names.split(","))) + "/" + rest
nm.init(other, 0, 2, on_error="raise")
try:
    print(nm.get_latest_checkpoint())
except nm.NebulaError as error:
    print("refused:", error)
for _ in range(300):  # the verdict needs the agent's own look at storage, which waits a second for a search's list
    done = subprocess.run([os.environ["NEBULA_AGENT_PATH"], "list", "--path", other], capture_output=True, text=True, timeout=60)
    if "give the names in the order" in done.stdout:
        break
    time.sleep(0.1)
print(done.returncode, done.stdout, done.stderr)
"""


@pytest.mark.parametrize("name", [pytest.param("two accounts", marks=pytest.mark.nightly), "two buckets"])
def test_names_in_another_order_are_refused_and_no_job_begins_from_nothing(name, tmp_path):
    said = run_beside(name, tmp_path, REORDERED)
    # of the refusal, the verdict and the command
    assert said.count("give the names in the order in which the checkpoints were written") == 3 and "refused:" in said, said


MISSING = {
    "azure": "az://devstoreaccount1/nosuch/x",
    "s3": "s3://nosuch/x",
    "two accounts": "az://devstoreaccount1,nebulatwo/nosuch/x",
    "two buckets": "s3://nebula,nosuch/x",
    "adls": "abfss://nosuch@datalake.dfs.core.windows.net/x",
    "gs": "gs://nosuch/x",
    "buckets": "s3://nosuch/x",
}


# fault (Object stores): There is no container or bucket, or the path names another one by mistake.
# result: Saves, loads and all commands fail, and the message names it. It does not count as a storage path without
# checkpoints.
@pytest.mark.parametrize(("name", "path"), [pytest.param(*one, marks=() if one[0] in ("s3", "two buckets", "gs") else pytest.mark.nightly) for one in MISSING.items()])
def test_a_container_that_does_not_exist_is_not_an_empty_storage_path(name, path, run, make, serve, tmp_path):
    store = make("global_step1", "model.pt=100")
    for words in (
        ["list", "--path", path],
        ["verify", "--path", path],
        ["prune", "--keep-last", "1", "--path", path],
        ["restore", "latest", "--to", tmp_path / "out", "--path", path],
        ["copy", path, tmp_path / "copy"],
        ["copy", store, path],
    ):
        told = run(*words, **serve(name))
        assert told.returncode == 4 and re.search("404 .*: create the (container|bucket)", told.stderr), (words, told)
    told = run("doctor", "--path", path, **serve(name))
    assert re.search("may list +BAD .*: create the (container|bucket)", told.stdout), told.stdout


@pytest.mark.nightly("test_a_job_on_an_object_store_is_killed_and_goes_on_where_it_was", "frameworks/test_dcp.py::test_fsdp2_resumes_bit_for_bit_after_sigkill_and_stock_load_reads_it")
@pytest.mark.parametrize("name", ["s3", "gs", "buckets"])
def test_a_checkpoint_of_torch_distributed_is_saved_and_loaded_by_its_url(name, tmp_path):
    assert "resumed" in run_beside(name, tmp_path, DCP)


SIGNED = """
import json
import torch, nebulaml as nm
path = test.STORES[sys.argv[2]].path
test.prepare(sys.argv[2])
def nebula(*words):
    done = subprocess.run([os.environ["NEBULA_AGENT_PATH"], *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
root = os.environ["NEBULA_OUTPUT_DIR"]
os.makedirs(root, exist_ok=True)
os.environ["NEBULA_TRUSTED_KEYS"] = root + "/trusted"
nebula("sign", "--new-key", root + "/key"), nebula("sign", "--trust", root + "/key.pub")
for step in (1, 2):
    if step == 1:
        os.environ["NEBULA_SIGN_KEY"] = root + "/key"
    nm.init(path, 0, 2, on_error="raise")
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save("model.pt", {"w": torch.full((3 << 20,), float(step))})
    checkpoint.wait("durable", 60)
    os.environ.pop("NEBULA_SIGN_KEY", None)
    nm._shutdown(), test.lose_memory()
nebula("copy", path, path + "-copy", "--all")
for place in (path, path + "-copy"):
    nm.init(place, 0, 2, signatures="require")
    found = nm.get_latest_checkpoint()
    assert found.tag == "global_step1" and (found.load("model.pt")["w"] == 1).all()
    nm._shutdown(), test.lose_memory()
    assert json.loads(nebula("inspect", "global_step1", "--path", place, "--json"))["signatures"][0]["state"] == "trusted"
nebula("prune", "--tag", "global_step1", "--yes", "--path", path)
print("signed")
"""


# fault: as test_a_file_whose_checksums_fit_is_refused_if_it_is_not_the_signed_one
@pytest.mark.nightly("test_a_job_on_an_object_store_is_killed_and_goes_on_where_it_was", "integration/test_replicas.py::test_nodes_sign_a_version_together_and_a_copy_in_another_nodes_memory_takes_no_signature_s_place")
def test_a_signed_version_of_an_object_store_is_read_and_copied_with_its_signature(tmp_path):
    assert "signed" in run_beside("s3", tmp_path, "import subprocess\n" + SIGNED)


def test_the_signature_of_a_url_goes_with_its_path():
    places = pytest.importorskip("nebulaml.dcp.places")
    whole = "https://a.blob.core.windows.net/c/run/step7?sv=1&sig=x/y"
    assert places.split(whole) == ("https://a.blob.core.windows.net/c/run?sv=1&sig=x/y", "step7")
    assert places.is_place(whole) and places.is_place("/a/b") and not places.is_place("memory://a/b")


# The endpoint and the region are in a profile alone, which a driver reads from a file.
PROFILE = """
import nebulaml as nm
import pathlib, torch
test.prepare(sys.argv[2])
config = pathlib.Path(sys.argv[3])
config.write_text(f"[default]\\nendpoint_url = {os.environ.pop('AWS_ENDPOINT_URL')}\\nregion = {os.environ.pop('AWS_REGION')}\\n")
os.environ["AWS_CONFIG_FILE"] = str(config)
nm.init(test.STORES[sys.argv[2]].path, 0, 2, on_error="raise")
with nm.Checkpoint("global_step1") as checkpoint:
    checkpoint.save("model.pt", {"w": torch.ones(8)})
checkpoint.wait("durable", 60)
print("durable")
"""


def test_a_job_whose_endpoint_stands_in_a_profile_saves(tmp_path):
    """The agent that checks its locks would end if it read the file under the catalogue's."""
    assert "durable" in run_beside("s3", tmp_path, PROFILE.replace("sys.argv[3]", repr(str(tmp_path / "config"))))


# fault: as a_store_that_ignores_the_condition_of_a_write_gets_none
def test_doctor_names_what_a_gateway_lacks(run, serve, servers):
    told = run("doctor", "--path", servers.new_path("buckets"), **serve("buckets"))
    assert re.search("conditional write +.*yes", told.stdout) and re.search("clock .*agree", told.stdout), told.stdout
    assert re.search("protocol .*it lacks metadata of objects .*, If-Match of a removal$", told.stdout, re.MULTILINE), told.stdout
