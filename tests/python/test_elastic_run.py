"""The command line of `python -m nebulaml.elastic.run`."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import subprocess
import sys
import time
import types

import fork_server
import psutil
import pytest
from nebulaml import _nebula
from nebulaml._session import locate
from nebulaml.elastic import agent, handlers, run, spare, warm, worker, workers
from nebulaml.elastic.agent import NoProgress, Progress
from nebulaml.errors import NebulaConfigError
from torch.distributed.run import get_args_parser
from waiting import until


def parsed(line: str, **environment: str):
    return run.parse(line.split(), environment)


def test_the_wrapper_s_arguments_become_torchruns(caplog):
    options = parsed("train.py --epochs 2", AZUREML_RUN_ID="job_7")
    assert (options.rdzv_backend, options.rdzv_id, options.nnodes) == ("nebula-azure-table", "job_7", "1:50")
    assert (options.training_script, options.training_script_args) == ("train.py", ["--epochs", "2"])
    line = "--rdzv_backend=azuretable --rdzv_endpoint=None --rdzv_id=mine --nnodes=2:4 --nproc_per_node=2 --max_restarts=3 train.py"
    caplog.clear()
    options = parsed(line, AZUREML_RUN_ID="job_7")
    assert (options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id) == ("nebula-azure-table", "", "mine")
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2:4", "2", 3)
    assert not caplog.records


def test_options_of_torchrun_keep_their_meaning():
    options = parsed(
        "--rdzv-backend=nebula-store --rdzv-endpoint=/shared --rdzv-id=x --nnodes=3 --local-addr=10.0.0.1 -m pkg.train"
    )
    assert (options.rdzv_backend, options.rdzv_endpoint, options.nnodes) == ("nebula-store", "/shared", "3")
    assert options.module and options.local_addr == "10.0.0.1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PET_NNODES", "2:3")
        assert run.parse(["--rdzv-id=x", "train.py"], os.environ).nnodes == "2:3"


def test_a_range_of_nodes_without_restarts_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        parsed("--rdzv-id=x train.py")
        assert "max-restarts" in caplog.text
        caplog.clear()
        parsed("--rdzv-id=x --nnodes=4 train.py")
        parsed("--rdzv-id=x --max-restarts=1 train.py")
        assert not caplog.text


def test_a_standalone_job_is_one_of_torchruns_and_waits_for_no_other_node(caplog):
    with caplog.at_level(logging.WARNING):
        for line in ("--standalone --nproc-per-node=2 train.py", "--standalone --nnodes=1:2 --max-restarts=2 train.py"):
            found = vars(parsed(line))
            own = {"warm": "auto", "on_hang": "report", "spares": 0, "health_check": "default", "on_poison": "end", "max_failures_without_progress": 3}
            assert {name: found.pop(name) for name in own} == own and found == vars(get_args_parser().parse_args(line.split()))
    assert not caplog.text


def test_a_job_without_an_id_is_refused_except_for_a_try_on_one_machine():
    with pytest.raises(NebulaConfigError, match="rdzv-id"):
        parsed("train.py")
    assert parsed("train.py", DEBUG="1").rdzv_id != parsed("train.py", DEBUG="1").rdzv_id


@pytest.mark.parametrize("key", ["key", None])
def test_the_account_of_an_azure_ml_workspace_is_taken_if_none_is_named(tmp_path, monkeypatch, key):
    package = tmp_path / "azureml" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from types import SimpleNamespace as N\n"
        f"store = N(account_name='acct', account_key={key!r}, sas_token='sas')\n"
        "class Run:\n"
        "    @staticmethod\n"
        "    def get_context():\n"
        "        return N(experiment=N(workspace=N(get_default_datastore=lambda: store)))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "azureml.core", raising=False)
    monkeypatch.delitem(sys.modules, "azureml", raising=False)
    environment = {"AZUREML_RUN_ID": "r"}
    run.parse(["train.py"], environment)
    secret = {"AZURE_STORAGE_KEY": "key"} if key else {"AZURE_STORAGE_SAS_TOKEN": "sas"}
    assert environment == {"AZUREML_RUN_ID": "r", "AZURE_STORAGE_ACCOUNT": "acct"} | secret
    named = {"AZUREML_RUN_ID": "r", "AZURE_STORAGE_ACCOUNT": "other"}
    run.parse(["train.py"], named)
    assert named["AZURE_STORAGE_ACCOUNT"] == "other"
    monkeypatch.delitem(sys.modules, "azureml.core", raising=False)
    monkeypatch.delitem(sys.modules, "azureml", raising=False)


def test_a_worker_does_not_begin_without_its_torchrun():
    echo = [sys.executable, "-S", "-E", str(worker.__file__)]
    begun = subprocess.run([*echo, str(os.getpid()), "echo", "a b"], capture_output=True, text=True, timeout=60)
    assert (begun.returncode, begun.stdout) == (0, "a b\n")
    orphan = subprocess.run([*echo, str(os.getpid() + 1), "echo", "x"], capture_output=True, text=True, timeout=60)
    assert orphan.returncode == 1 and not orphan.stdout and "torchrun has ended" in orphan.stderr


LAUNCHER = """
import subprocess
from nebulaml.elastic import worker
# A line is one write: both processes have one pipe.
PROGRAM = "import sys, time, nebulaml as nm; nm.init(sys.argv[1]); print('ready' + chr(10), end='', flush=True); time.sleep(100)"
WORKER = f"import subprocess, sys; own = subprocess.Popen([sys.executable, '-c', {PROGRAM!r}, sys.argv[2]]); print(str(own.pid) + chr(10), end='', flush=True); {PROGRAM}"
os.environ[worker.TORCHRUN] = str(os.getpid() if sys.argv[3] == "ours" else os.getppid())
say(subprocess.Popen([sys.executable, "-c", WORKER, *sys.argv[1:3]]).pid)
time.sleep(100)
"""


@pytest.mark.parametrize("rendezvous", ["ours", "another's"])
def test_a_worker_ends_with_a_torchrun_of_our_rendezvous_and_a_program_that_it_started_does_not(place, rendezvous):
    torchrun = place.trainer(LAUNCHER, place.storage, place.root / "other", rendezvous)
    lines = [torchrun.stdout.readline().strip() for _ in range(4)]
    both = [psutil.Process(int(line)) for line in lines if line != "ready"]
    of_worker, program = sorted(both, key=lambda process: process.ppid() != torchrun.pid)
    try:
        assert lines.count("ready") == 2 and program.ppid() == of_worker.pid
        torchrun.kill()
        torchrun.wait()
        if rendezvous == "ours":
            psutil.wait_procs([of_worker], timeout=60)
        gone, _ = psutil.wait_procs(both, timeout=2)
        assert gone == ([of_worker] if rendezvous == "ours" else [])
    finally:
        torchrun.kill()
        torchrun.stdout.close()
        for process in (program, of_worker):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


# Warm workers have a template that imports torch, and a whole interpreter's end. These jobs import no torch. In `make nightly` they are warm, as by default.
COLD = [] if os.environ.get("NEBULA_TEST_NIGHTLY") else ["--warm=off"]
launch = functools.partial(fork_server.run_module, "nebulaml.elastic.run", modules=("torch.distributed.run",))

STUBBORN = """
import os, signal, sys, time
rank, count, place = os.environ["LOCAL_RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1]
signal.signal(signal.SIGTERM, lambda *_: None)  # as a trainer that waits for a lost rank in a collective
open(f"{place}/{rank}-{count}", "w").close()
while not os.path.exists(f"{place}/0-{count}") or not os.path.exists(f"{place}/1-{count}"):
    time.sleep(0.01)
if count == 0 and rank == "1":
    sys.exit(3)
time.sleep(60 if count == 0 else 0)
"""


# fault (Elastic jobs): A worker fails while others of its node wait for it and catch SIGTERM.
# result: They are killed, and all start again.
@pytest.mark.parametrize("how", [pytest.param("auto", marks=pytest.mark.nightly), "off"])
def test_a_failed_worker_takes_the_others_of_its_node_with_it(tmp_path, place, how):
    """torchrun alone would wait 30 s for a worker that catches SIGTERM."""
    (tmp_path / "worker.py").write_text(STUBBORN)
    command = ["--standalone", "--nproc_per_node=2", "--max_restarts=1", f"--warm={how}"]
    job = launch(*command, tmp_path / "worker.py", tmp_path, timeout=100)
    assert job.returncode == 0, job.stderr
    assert {"0-1", "1-1"} <= set(os.listdir(tmp_path))
    times = {file.name: file.stat().st_mtime for file in tmp_path.glob("[01]-[01]")}
    assert min(times["0-1"], times["1-1"]) - max(times["0-0"], times["1-0"]) < 25
    assert "exitcode: 3" in job.stderr, "the failure that torchrun reports is the first one"


STALLS = """
import os, sys
with open(f"{sys.argv[1]}/starts", "a") as starts:
    print(os.environ["TORCHELASTIC_RESTART_COUNT"], file=starts)
import nebulaml as nm
nm.init(f"{sys.argv[1]}/storage", 0)
latest = nm.get_latest_checkpoint()
step = latest.step if latest else 0
for step in range(step + 1, 3):
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save_bytes("b", [b"x"])
sys.exit(9)  # step 3 never succeeds
"""


# fault (Elastic jobs): A job fails again and again at the same step.
# result: It ends with the reason after 3 restarts without a new committed step.
@pytest.mark.nightly("test_failures_count_only_without_a_new_step_and_only_in_jobs_that_use_nebula", "test_a_checkpoint_whose_load_is_followed_by_failures_is_passed_over_for_the_one_before")
def test_a_job_that_fails_again_and_again_without_a_new_step_ends_with_the_reason(tmp_path, place):
    (tmp_path / "worker.py").write_text(STALLS)
    command = ["--standalone", "--nproc_per_node=1", "--max_restarts=50", *COLD]
    command.append("--monitor-interval=600")  # the end of each worker is noticed all the same
    job = launch(*command, tmp_path / "worker.py", tmp_path, timeout=200)
    assert job.returncode == 1
    assert "nebula run: 3 restarts have committed no new step after step 2, so the job ends" in job.stderr
    assert len((tmp_path / "starts").read_text().split()) == 4, "the first one has committed, and three others have tried"


POISONED = """
import os, sys
import nebulaml as nm
nm.init(f"{sys.argv[1]}/storage", 0)
latest = nm.get_latest_checkpoint()
with open(f"{sys.argv[1]}/loads", "a") as loads:
    print(latest and latest.step, file=loads)
if latest is None:
    for step in (1, 2, 3):
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save_bytes("b", [b"x"])
sys.exit(0 if latest and latest.step == 2 else 9)
"""


# fault (Elastic jobs): A job fails each time after it has loaded a certain checkpoint.
# result: With `--on-poison=older` it loads the one before.
def test_a_checkpoint_whose_load_is_followed_by_failures_is_passed_over_for_the_one_before(tmp_path, place):
    (tmp_path / "worker.py").write_text(POISONED)
    command = ["--standalone", "--nproc_per_node=1", "--max_restarts=50", "--on-poison=older", *COLD]
    job = launch(*command, tmp_path / "worker.py", tmp_path, timeout=200)
    assert job.returncode == 0, job.stderr
    assert (tmp_path / "loads").read_text().split() == ["None", "3", "3", "3", "2"]
    assert "3 restarts have failed after loading global_step3: the next one loads an older checkpoint" in job.stderr
    assert "failed again and again after loading it" in job.stderr


REWRITTEN = """
import os, sys
import nebulaml as nm
nm.init(f"{sys.argv[1]}/storage", 0)

def save(step, content):
    with nm.Checkpoint(f"global_step{step}") as checkpoint:
        checkpoint.save_bytes("b", [content])

latest = nm.get_latest_checkpoint()
content = bytes(latest.read_bytes("b")) if latest else b"none"
with open(f"{sys.argv[1]}/loads", "a") as loads:
    print(latest and latest.step, content.decode(), file=loads)
if latest is None:
    save(2, b"good"), save(3, b"bad")
elif latest.step == 2:
    save(3, b"good")
sys.exit(0 if latest and latest.step == 3 and content == b"good" else 9)
"""


# fault (Elastic jobs): A job passes a checkpoint over, saves its tag again, and fails once more before a later step is committed.
# result: It loads the tag's new version, not the one before again.
@pytest.mark.nightly("test_a_checkpoint_whose_load_is_followed_by_failures_is_passed_over_for_the_one_before")
def test_a_tag_that_was_passed_over_is_loaded_again_once_it_has_another_version(tmp_path, place):
    (tmp_path / "worker.py").write_text(REWRITTEN)
    command = ["--standalone", "--nproc_per_node=1", "--max_restarts=50", "--on-poison=older", *COLD]
    job = launch(*command, tmp_path / "worker.py", tmp_path, timeout=200)
    assert (tmp_path / "loads").read_text().splitlines() == ["None none", *["3 bad"] * 3, "2 good", "3 good"], job.stderr
    assert job.returncode == 0, job.stderr
    assert "3 restarts have failed after loading global_step3: the next one loads an older checkpoint" in job.stderr


def test_the_end_of_a_child_ends_the_wait_for_it_and_a_kernel_without_pidfds_waits_for_the_interval(monkeypatch):
    child, other = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    try:
        child.kill()
        workers.await_end([child.pid, other.pid], 600)
        child.wait()
        workers.await_end([child.pid], 0.01)  # it is no child any more

        def refuse(pid: int) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", refuse)
        begun = time.monotonic()
        workers.await_end([other.pid], 0.2)
        assert time.monotonic() - begun >= 0.2
    finally:
        for each in (child, other):
            each.kill()
            each.wait()


def test_failures_count_only_without_a_new_step_and_only_in_jobs_that_use_nebula(monkeypatch):
    progress = Progress(3)
    for _ in range(20):
        progress.fail()  # no rank uses Nebula
    monkeypatch.setenv("RANK", "0")
    worker.tell(-1)
    for step in (-1, -1, -1, 5, 5, 5, 6, 7, 3, 3):
        if step >= 0:
            worker.tell(step)
        progress.fail()
    monkeypatch.setenv("RANK", "1")
    worker.tell(1000)  # rank 0 alone counts
    with pytest.raises(NoProgress, match="after step 7"):
        progress.fail()
    progress.forget()
    progress.fail()


# fault (Elastic jobs): A job has loaded a checkpoint and fails, and its next starts fail before they load anything.
# result: The checkpoint is not taken for the reason.
def test_only_failures_after_a_load_make_a_job_pass_over_the_checkpoint(monkeypatch):
    progress = Progress(3, passes_over=True)
    monkeypatch.setenv("RANK", "0")
    worker.tell(5)
    progress.fail()
    worker.tell(loaded="7 global_step5")
    progress.fail()
    progress.fail()
    with pytest.raises(NoProgress):
        progress.fail()
    assert not progress.poison
    progress.forget()
    for _ in range(3):
        worker.tell(loaded="7 global_step5")
        progress.fail()
    assert progress.poison == ["7 global_step5"]


# fault (Elastic jobs): The health check of a node fails.
# result: The node does not join.
def test_a_node_that_is_not_well_does_not_join(tmp_path, place):
    (tmp_path / "worker.py").write_text("open(f'{__file__}.ran', 'w')")
    command = ["--standalone", "--nproc_per_node=1", "--warm=off"]
    check = "sh -c 'echo the disk is broken; exit 3'"
    job = launch(*command, "--health-check", check, tmp_path / "worker.py", timeout=100)
    assert job.returncode == 1
    assert "nebula run: this node does not join" in job.stderr and "exit code 3: the disk is broken" in job.stderr
    assert not (tmp_path / "worker.py.ran").exists()


# fault: as test_a_node_that_is_not_well_does_not_join
@pytest.mark.parametrize("health", ["default", pytest.param("off", marks=pytest.mark.nightly("test_without_a_command_a_node_joins_if_memory_disk_and_devices_are_well"))])
def test_without_a_command_a_node_joins_if_memory_disk_and_devices_are_well(tmp_path, place, health):
    (tmp_path / "worker.py").write_text("open(f'{__file__}.ran', 'w')")
    (tmp_path / "torchrun").mkdir()
    command = ["--rdzv-backend=nebula-store", f"--rdzv-endpoint={tmp_path}/shared", "--rdzv-id=x"]
    command += ["--nnodes=1:1", "--warm=off", f"--log-dir={tmp_path}/torchrun", *([] if health == "default" else ["--health-check=off"])]
    unwritable = os.environ | {"TMPDIR": "/proc/self", "PYTHONDONTWRITEBYTECODE": "1"}
    job = launch(*command, tmp_path / "worker.py", timeout=100, env=unwritable)
    assert (tmp_path / "worker.py.ran").exists() == (health == "off"), job.stderr
    if health == "default":
        assert job.returncode == 1
        assert "nebula run: this node does not join" in job.stderr and "BAD  /proc/self: cannot write" in job.stderr
    else:
        assert job.returncode == 0, job.stderr


def test_a_default_check_that_cannot_run_keeps_no_node_away(monkeypatch, tmp_path):
    for command in ("/nowhere/nebula", "/bin/true"):
        monkeypatch.setenv("NEBULA_AGENT_PATH", command)
        agent.check(agent.DEFAULT)
    (tmp_path / "nebula").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "nebula").chmod(0o755)
    monkeypatch.setenv("NEBULA_AGENT_PATH", str(tmp_path / "nebula"))
    agent.check(agent.DEFAULT)
    (tmp_path / "nebula").write_text("#!/bin/sh\necho devices BAD\nexit 1\n")
    with pytest.raises(agent.Unwell, match="devices BAD"):
        agent.check(agent.DEFAULT)


# fault (Elastic jobs): An option of `nebula run` is wrong.
# result: It ends, and its last line names the option.
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--nnodes=2 --spares=2", "nebula run: --spares=2: of --nnodes=2, at least one node trains"),
        ("--max-failures-without-progress=-1", "nebula run: --max-failures-without-progress=-1: give a number"),
        ("--on-hang=restarts", "argument --on-hang/--on_hang: invalid choice: 'restarts'"),
        ("--rdzv-endpoint=host:29400", "--rdzv-endpoint=host:29400 looks like a host"),
        ("--rdzv-conf=silence_timeout=soon", "--rdzv-conf=silence_timeout=soon: give at least 0.25 seconds"),
    ],
)
def test_a_wrong_option_ends_the_launcher_with_a_sentence_that_names_it(tmp_path, place, options, words):
    command = ["--rdzv-backend=nebula-store", "--rdzv-id=x", "--nnodes=1:1", "--warm=off", f"--rdzv-endpoint={tmp_path}/shared", *options.split()]
    job = fork_server.start(
        "import runpy, sys; runpy.run_module('nebulaml.elastic.run', run_name='__main__', alter_sys=True)", *command, tmp_path / "worker.py",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, modules=("torch.distributed.run",), cwd=tmp_path,
    )  # fmt: skip
    _, errors = job.communicate(timeout=100)
    assert job.returncode not in (0, None) and words in errors


def test_where_no_template_can_be_started_workers_start_cold_with_a_word(monkeypatch, caplog):
    def full(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(warm, "start", full)
    monkeypatch.delenv(worker.WARM, raising=False)
    run._warm(parsed("--rdzv-id=x --nnodes=1 --warm=torch train.py"))
    assert "workers start cold, because no template could be started: " in caplog.text and worker.WARM not in os.environ


def test_spares_are_the_nodes_above_the_number_that_trains():
    assert parsed("--rdzv-id=x --nnodes=10 --spares=2 train.py").nnodes == "8:8"
    assert parsed("--rdzv-id=x --nnodes=2:10 --max-restarts=1 --spares=2 train.py").nnodes == "2:8"
    with pytest.raises(NebulaConfigError, match="at least one node trains"):
        parsed("--rdzv-id=x --nnodes=2 --spares=2 train.py")


class Keys(dict):
    """The store of a rendezvous."""

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]


# fault (Elastic jobs): The storage of the rendezvous refuses the note that tells spare nodes where the checkpoints are.
# result: The job goes on. Its agent says so, and tries again after 8 seconds.
def test_a_note_for_spare_nodes_that_cannot_be_written_does_not_end_the_job(tmp_path, caplog, monkeypatch):
    (tmp_path / "told").write_text("{}")
    told, handler = agent.Agent.__new__(agent.Agent), handlers.Handler.__new__(handlers.Handler)
    asked = []

    def refuse(key: str, value: bytes) -> None:
        asked.append(value)
        raise PermissionError(13, "the table is not yours")

    handler._inner = types.SimpleNamespace(_store=types.SimpleNamespace(set=refuse))
    with open(tmp_path / "told", "rb") as file:
        monkeypatch.setattr(told, "place", file.fileno())
        told._tell_spares(handler)
        told._tell_spares(handler)
        assert asked == [b"{}"] and "the table is not yours" in caplog.text
        told.tells_at = 0.0
        told._tell_spares(handler)
        assert asked == [b"{}"] * 2
        told.tells_at = 0.0
        handler._inner._store.set = lambda key, value: asked.clear()
        told._tell_spares(handler)
        assert told.told == b"{}" and not asked


# fault (Elastic jobs): The storage path of a job cannot be opened on a spare node.
# result: The spare waits without copies, and says so once.
def test_a_spare_node_waits_at_its_agent_once_rank_0_has_told_where_the_checkpoints_are(tmp_path, place, monkeypatch, caplog):
    (tmp_path / "told").touch()
    monkeypatch.setenv(worker.SPARES, str(tmp_path / "told"))
    worker.tell_spares("/" + 300 * "a long path", "run7", 0)
    worker.tell_spares("nowhere://x", "run7", 0)
    monkeypatch.setattr(spare, "LOOKS_S", (0.01, 0.01))
    monkeypatch.setattr(spare, "KEPT_S", 0.01)
    store, waits, told = Keys(), [False], agent.Agent.__new__(agent.Agent)

    def spares() -> list[str]:
        command = [os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), "status", "--json", "--path", str(tmp_path / "storage")]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)
        return [row["name"] if "name" in row else row["job"] for row in found.get("jobs", []) if row["spare"]]

    def publish() -> None:
        told.place = os.open(tmp_path / "told", os.O_RDONLY)
        told._tell_spares(types.SimpleNamespace(tell_spares=lambda place: store.update({spare.KEY: place}) or True))
        os.close(told.place)

    waiting = spare.Waiting(store, lambda: waits[0])
    with waiting:
        publish()
        assert not spares(), "it is no spare yet"
        waits[0] = True
        until(lambda: "this spare node holds no copies of the job's checkpoints" in caplog.text)
        monkeypatch.setenv("RANK", "1")
        worker.tell_spares("/another/place", "run7", 0)  # only rank 0 tells
        monkeypatch.setenv("RANK", "0")
        worker.tell_spares(str(tmp_path / "storage"), "run7", 0)
        publish()
        until(lambda: spares() == ["run7"])
    assert spares() == ["run7"], "until the workers come"
    with waiting:
        until(lambda: waiting._place)
        assert spares() == ["run7"]
    waiting.close()
    until(lambda: not spares())
    assert caplog.text.count("holds no copies") == 1
    session = _nebula.Session(persist_path=str(tmp_path / "storage"), job="run7", agent_path=locate.agent_path(), is_spare=1)
    for call in (lambda: session.latest(None), lambda: session.pin("global_step1", "")):
        with pytest.raises(NebulaConfigError, match="a spare node has no rank yet"):
            call()
