"""Warm workers: a forked worker is to its script what a new interpreter would be, and in doubt there is a new interpreter."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest
from nebulaml._session import locate
from nebulaml.elastic import warm, worker
from processes import stop
from waiting import until

STUB = [sys.executable, "-S", "-E", worker.__file__]


class Launcher:
    """Starts workers as torchrun does by nebulaml.elastic.run. The template is a child of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, ""
        self.environment = {name: value for name, value in os.environ.items() if name != "NEBULA_WARM"}
        self.environment["PYTHONPATH"] = os.pathsep.join(sys.path[1:])

    def template(self, *modules: str) -> None:
        before = set(children())
        self.address = warm.start(list(modules), self.environment)
        [self.pid] = set(children()) - before

    def script(self, code: str, name: str = "script.py") -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(code))
        return path

    def start(self, *words: object, is_warm: bool = True, **variables: str) -> subprocess.Popen[str]:
        environment = {**self.environment, "RANK": "0", **variables, **({"NEBULA_WARM": self.address} if is_warm else {})}
        return subprocess.Popen(
            [*STUB, str(os.getpid()), sys.executable, "-u", *map(str, words)], env=environment, cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def run(self, *words: object, is_warm: bool = True, **variables: str) -> tuple[int, str, str]:
        process = self.start(*words, is_warm=is_warm, **variables)
        said, errors = process.communicate(timeout=120)
        return process.returncode, said, errors


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    before = set(children())
    yield Launcher(tmp_path)
    for pid in set(children()) - before:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


SEEN = """
    import gc, json, os, random, resource, signal, sys, threading, warnings
    import numpy, torch
    environment = {name: value for name, value in os.environ.items() if name not in ("NEBULA_ENDS_BY_EXIT", "NEBULA_WARM", "LC_CTYPE")}
    print(json.dumps({
        "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "spec": repr(__spec__), "package": repr(__package__),
        "main": sorted(name for name in vars(sys.modules["__main__"]) if not name.startswith("__annot")), "doc": __doc__,
        "flags": repr(sys.flags), "options": sys.warnoptions, "filters": repr(warnings.filters), "executable": sys.executable,
        "directory": os.getcwd(), "mask": os.umask(0), "environment": environment, "leader": os.getsid(0) == os.getpid(),
        "handlers": [repr(signal.getsignal(number)).split(" at ")[0] for number in range(1, 32)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "limits": [resource.getrlimit(limit) for limit in range(16)], "processors": sorted(os.sched_getaffinity(0)),
        "oom": open("/proc/self/oom_score_adj").read(), "threads": torch.get_num_threads(),
        "fds": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in os.listdir("/proc/self/fd") if int(n) > 2 and os.path.exists(f"/proc/self/fd/{n}")),
        "loader": type(__loader__).__name__, "builtins": repr(__builtins__)[:20], "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "stdout": [sys.stdout.line_buffering, sys.stdout.write_through], "recursion": sys.getrecursionlimit(),
    }))
    print(random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed())
"""


def test_a_warm_worker_sees_what_a_cold_one_sees(launcher):
    is_nightly = bool(os.environ.get("NEBULA_TEST_NIGHTLY"))
    path = launcher.script(SEEN if is_nightly else SEEN.replace(", torch.rand(1).item(), torch.initial_seed()", "").replace(", torch", "").replace("torch.get_num_threads()", "0"))
    launcher.template(*(["torch"] if is_nightly else []), "numpy")
    seen, drawn = {}, set()
    for name, is_warm in (("cold", False), ("warm", True), ("again", True)):
        code, said, errors = launcher.run(path, "--lr", "1e-3", is_warm=is_warm, RANK="3")
        assert code == 0, errors
        about, random = said.strip().split("\n")
        seen[name] = json.loads(about)
        drawn |= set(random.split())
        assert "cold" not in errors
    assert seen["warm"] == seen["cold"] and seen["again"] == seen["cold"]
    assert len(drawn) == (12 if is_nightly else 6), "each start draws other numbers"


@pytest.mark.nightly("test_nebulas_launcher_restarts_warm_and_the_next_run_starts_warm")
def test_a_module_runs_as_by_dash_m(launcher):
    launcher.script("import sys; print(__name__, __spec__.name, sys.argv[1:], sys.path[0])", "package_of_it.py")
    launcher.template("json")
    assert launcher.run("-m", "package_of_it", "x")[:2] == launcher.run("-m", "package_of_it", "x", is_warm=False)[:2]


# An optimizer of torch imports its compiler, which takes 3 s.
TRAIN = """
    import sys, torch
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters()) if sys.argv[1] == "adamw" else None
    for step in range(20):
        loss = model(torch.randn(32, 64)).square().mean()
        model.zero_grad()
        loss.backward()
        if optimizer:
            optimizer.step()
        else:
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.01 * weight.grad
        print(loss.item().hex())
"""


@pytest.mark.nightly("test_a_warm_worker_sees_what_a_cold_one_sees")
@pytest.mark.parametrize(
    ("threads", "optimizer"), [("", "sgd"), ("", "adamw"), ("1", "adamw")]
)
def test_the_losses_of_a_warm_and_of_a_cold_run_are_equal_bit_for_bit(launcher, threads, optimizer):
    if threads:
        launcher.environment["OMP_NUM_THREADS"] = threads
    path = launcher.script(TRAIN)
    launcher.template("torch")
    warm_run, cold_run = launcher.run(path, optimizer), launcher.run(path, optimizer, is_warm=False)
    assert warm_run[0] == 0 and warm_run[1].count("0x") == 20 and warm_run[1] == cold_run[1] and "cold" not in warm_run[2]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        *(
            pytest.param(*one, marks=pytest.mark.nightly("test_the_stub_ends_as_its_worker_ends"))
            for one in (
                ("1 / 0", 1), ("pass", 0), ("raise SystemExit('text')", 1), ("import os; os._exit(77)", 77), ("import os; os.abort()", -6),
                ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
            )
        ),
    ],
)  # fmt: skip
def test_the_stub_ends_as_its_worker_ends(launcher, code, status):
    path = launcher.script(f"print('begins')\n{code}")
    launcher.template("json")
    found, cold = launcher.run(path), launcher.run(path, is_warm=False)
    assert found[:2] == (status, "begins\n") == cold[:2]
    assert ("ZeroDivisionError" in found[2]) == ("ZeroDivisionError" in cold[2]) == (code == "1 / 0")
    assert found[2] == cold[2] or code != "1 / 0"


def test_signals_reach_the_worker_and_what_it_has_started(launcher):
    path = launcher.script("""
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: print("one", flush=True))
        def leave(*_):
            print("leaves", flush=True)
            sys.exit(5)
        signal.signal(signal.SIGTERM, leave)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        print(child.pid, flush=True)
        while True:
            time.sleep(100)
    """)
    launcher.template("json")
    process = launcher.start(path)
    child = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGUSR1)
    assert process.stdout.readline() == "one\n"
    os.killpg(process.pid, signal.SIGTERM)  # as torchrun ends a worker
    assert process.stdout.readline() == "leaves\n" and process.wait(60) == 5
    until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text(), 60, "the end of the child")
    process.communicate()


def lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return False


# fault (Elastic jobs): SIGTERM, or another signal, comes to all processes of a job, as a service manager sends it, and so to the template of the warm workers.
# result: The template goes on, and its workers save and end by themselves.
@pytest.mark.nightly("test_signals_reach_the_worker_and_what_it_has_started")
def test_a_signal_to_all_processes_does_not_kill_the_workers_by_the_end_of_their_template(launcher):
    path = launcher.script("""
        import os, signal, sys, time
        print([str(signal.getsignal(number)) for number in (1, 2, 3, 10, 12, 15)], flush=True)
        def leave(*_):
            time.sleep(0.5)  # as a save
            print("saved", flush=True)
            sys.exit(5)
        signal.signal(signal.SIGTERM, leave)
        print("begins", flush=True)
        while True:
            time.sleep(100)
    """)
    cold = launcher.start(path, is_warm=False)
    handlers = cold.stdout.readline()
    cold.kill()
    cold.communicate()
    launcher.template("json")
    process = launcher.start(path)
    assert (process.stdout.readline(), process.stdout.readline()) == (handlers, "begins\n")
    for number in warm.TO_ALL:
        os.kill(launcher.pid, number)
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "saved\n" and process.wait(60) == 5
    process.communicate()
    assert lives(launcher.pid)


# fault (Elastic jobs): A program, perhaps of another user, connects to the template of the warm workers and sends a message that is no request.
# result: It is refused. The template and its workers go on.
@pytest.mark.parametrize("text", ["{}", *(pytest.param(text, marks=pytest.mark.nightly("test_a_message_that_is_no_request_does_not_end_the_template")) for text in ("x", "[]", "7", '{"pid": 1}'))])
def test_a_message_that_is_no_request_does_not_end_the_template(launcher, text):
    launcher.template("json")
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(60)
            client.connect("\0" + launcher.address)
            assert client.recv(4096) == b"ready"
            client.send(text.encode())
            assert json.loads(client.recv(4096)) == {"cold": "the request is damaged"}
    assert launcher.run(launcher.script("print('runs')"))[:2] == (0, "runs\n")


SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"


def test_a_worker_ends_with_its_stub_and_before_the_next_one_begins(launcher):
    path = launcher.script(SLEEPS)
    launcher.template("json")
    first = launcher.start(path)
    one = int(first.stdout.readline())
    first.kill()  # as torchrun does after 30 s
    first.communicate()
    second = launcher.start(path)
    two = int(second.stdout.readline())
    assert not lives(one) and lives(two)
    second.kill()
    second.communicate()
    until(lambda: not lives(two), 60, "the end of the worker")


# fault: as test_a_module_that_kills_the_template_and_a_full_process_table_start_workers_cold
def test_the_end_of_the_template_ends_its_workers_and_the_next_one_starts_cold(launcher):
    path = launcher.script(SLEEPS)
    launcher.template("json")
    first = launcher.start(path)
    one = int(first.stdout.readline())
    os.kill(launcher.pid, signal.SIGKILL)
    assert first.wait(60) == -signal.SIGKILL
    until(lambda: not lives(one), 60, "the end of the worker")
    first.communicate()
    code, said, errors = launcher.run(launcher.script("print('runs')", "other.py"))
    assert (code, said) == (0, "runs\n") and "starts cold" in errors


@pytest.mark.nightly("test_a_module_that_kills_the_template_and_a_full_process_table_start_workers_cold")
def test_a_module_that_leaves_a_thread_or_a_connection_is_named_once_and_left_to_the_worker(launcher, capfd):
    launcher.script("import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", "leaves_a_thread.py")
    launcher.script("import socket\nkept = socket.socket()", "leaves_a_socket.py")
    launcher.script("raise ImportError('not here')", "is_broken.py")
    launcher.environment["PYTHONPATH"] = f"{launcher.folder}{os.pathsep}{launcher.environment['PYTHONPATH']}"
    launcher.template("json", "leaves_a_thread", "is_broken", "leaves_a_socket", "decimal")
    path = launcher.script("import sys; print(sorted(name for name in sys.modules if name.startswith(('leaves', 'decimal', 'is_broken'))))")
    for _ in range(2):
        assert launcher.run(path) == (0, "['decimal']\n", "")
    said = capfd.readouterr().err
    assert "--warm: is_broken cannot be imported: ImportError('not here')" in said
    assert said.count("leaves_a_thread starts a thread") == 1 and said.count("leaves_a_socket opens a connection") == 1
    code, said, errors = launcher.run(launcher.script("import leaves_a_thread, leaves_a_socket; print('whole')", "both.py"))
    assert (code, said, errors) == (0, "whole\n", "")


# fault (Elastic jobs): A module kills the template of warm workers, the template dies, or the process table is full.
# result: Workers start cold, and a line on stderr says why.
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the template has ended|the template does not answer"),
        ("import os\ndef full(): raise BlockingIOError(11, 'Resource temporarily unavailable')\nos.fork = full", "no process can be made: .*unavailable"),
    ],
)
def test_a_module_that_kills_the_template_and_a_full_process_table_start_workers_cold(launcher, code, why):
    launcher.script(code, "fails.py")
    launcher.environment["PYTHONPATH"] = f"{launcher.folder}{os.pathsep}{launcher.environment['PYTHONPATH']}"
    launcher.template("fails")
    for _ in range(2):
        code, said, errors = launcher.run(launcher.script("print('runs')"))
        assert (code, said) == (0, "runs\n") and re.search(f"nebula: a worker starts cold: ({why})", errors), errors


@pytest.mark.nightly
def test_the_command_status_shows_a_template_and_its_memory(launcher, place):
    launcher.environment |= {name: value for name, value in os.environ.items() if name.startswith("NEBULA_")}
    launcher.template("json")
    assert launcher.run(launcher.script("print('runs')"))[0] == 0
    said = subprocess.run([locate.agent_path(), "status", "--json"], capture_output=True, text=True, timeout=60)
    [found] = json.loads(said.stdout)["templates"]
    assert found["pid"] == launcher.pid and 1 << 20 < found["memory_used"] < 1 << 30
    said = subprocess.run([locate.agent_path(), "status"], capture_output=True, text=True, timeout=60)
    assert f"of warm workers, pid {launcher.pid}, memory " in said.stdout


@pytest.mark.nightly("test_a_module_that_kills_the_template_and_a_full_process_table_start_workers_cold")
def test_a_template_that_takes_too_much_memory_leaves_the_module_to_the_workers(launcher, monkeypatch, capfd):
    launcher.script("from nebulaml.elastic import warm\nwarm.MEMORY_MOST = 1", "takes_memory.py")
    launcher.environment["PYTHONPATH"] = f"{launcher.folder}{os.pathsep}{launcher.environment['PYTHONPATH']}"
    launcher.template("json", "takes_memory", "decimal")
    path = launcher.script("import sys; print('takes_memory' in sys.modules, 'decimal' in sys.modules)")
    assert launcher.run(path) == (0, "False True\n", "")
    assert "takes_memory takes the template over" in capfd.readouterr().err


def test_a_changed_environment_or_module_starts_one_worker_cold_and_the_next_warm_again(launcher):
    module = launcher.script("VALUE = 1", "changes.py")
    launcher.environment["PYTHONPATH"] = f"{launcher.folder}{os.pathsep}{launcher.environment['PYTHONPATH']}"
    launcher.template("changes")
    path = launcher.script("import os, sys; print('changes' in sys.modules, os.environ.get('SETTING')); import changes; print(changes.VALUE)")
    assert launcher.run(path) == (0, "True None\n1\n", "")
    code, said, errors = launcher.run(path, SETTING="a")
    assert (code, said) == (0, "False a\n1\n") and "the environment has changed: SETTING" in errors
    assert launcher.run(path, SETTING="a") == (0, "True a\n1\n", "")
    module.write_text("VALUE = 23")
    code, said, errors = launcher.run(path, SETTING="a")
    assert (code, said) == (0, "False a\n23\n") and "a module's file has changed" in errors
    assert launcher.run(path, SETTING="a") == (0, "True a\n23\n", "")


@pytest.mark.nightly("test_nebulas_launcher_restarts_warm_and_the_next_run_starts_warm")
def test_processes_that_a_warm_worker_starts_find_its_script(launcher):
    path = launcher.script("""
        import multiprocessing

        def work(number):
            return number * 2

        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(work, [1, 2]))
    """)
    launcher.template("json")
    assert launcher.run(path) == (0, "[2, 4]\n" * 3, "")


JOB = """
    import json, os, sys
    seconds = float(open("/proc/uptime").read().split()[0]) - int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    was_warm = "torch" in sys.modules and "decimal" in sys.modules
    import torch, decimal, nebulaml as nm
    nm.init(sys.argv[1], 0, world=1, on_error="raise")
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with nm.Checkpoint(f"global_step{count}") as checkpoint:
        checkpoint.save("x.pt", torch.ones(3))
    print(json.dumps([count, was_warm, nm.get_latest_checkpoint().step]), flush=True)
    if count < 1:
        os.kill(os.getpid(), 9)
"""


def test_nebulas_launcher_restarts_warm_and_the_next_run_starts_warm(place, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    command, said = ["--standalone", "--nproc_per_node=1", "--max_restarts=3"], []
    runs = ([], [], *((["--warm", "off"], ["--warm", "torch,decimal"]) if os.environ.get("NEBULA_TEST_NIGHTLY") else ()))
    for options in runs:
        job = fork_server.run_module("nebulaml.elastic.run", *command, *options, script, place.storage, timeout=200, modules=("torch.distributed.run",))
        assert job.returncode == 0, job.stderr
        said.append([json.loads(line) for line in job.stdout.split("\n") if line])
    assert [one[1] for one in said[0]] == [False, False] and [one[1] for one in said[1]] == [True] * 2, said
    assert [one[1] for each in said[2:] for one in each] == ([False, False, True, True] if said[2:] else [])
    assert [[one[0] for one in each] for each in said] == [[0, 1]] * len(runs) and all(one[2] == one[0] for each in said for one in each)
    records = list(place.runtime.glob("imports-*.json"))
    assert len(records) == 1 and "torch" in json.loads(records[0].read_text())
    assert not [name for name in json.loads(records[0].read_text()) if re.match("job|__main__", name)]
    until(lambda: not [pid for pid in os.listdir("/proc") if pid.isdigit() and b"elastic import warm" in cmdline(pid)], 60, "the end of the templates")


@pytest.mark.nightly("test_nebulas_launcher_restarts_warm_and_the_next_run_starts_warm", "test_a_warm_worker_sees_what_a_cold_one_sees")
def test_plain_torchrun_starts_warm_with_our_interpreter(place, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    command = ["--rdzv-backend=nebula-store", f"--rdzv-endpoint={tmp_path}/shared", "--nnodes=1:1"]
    environment = os.environ | {"PYTHON_EXEC": str(Path(sys.executable).parent / worker.INTERPRETER)}
    for n in range(2):
        words = [*command, f"--rdzv-id=warm{n}", "--max-restarts=1", "--local-addr=127.0.0.1", script, place.storage]
        job = fork_server.run_module("torch.distributed.run", *words, timeout=200, env=environment, modules=("torch.distributed.run",))
        assert job.returncode == 0, job.stderr
        said = [json.loads(line) for line in job.stdout.split("\n") if line]
        assert [one[:2] for one in said] == [[0, n == 1], [1, n == 1]], said
    assert "starts cold" not in job.stderr


def cmdline(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_template_that_is_stopped_delays_no_worker_for_ever(launcher, monkeypatch):
    path = launcher.script("print('runs')")
    launcher.template("json")
    assert launcher.run(path)[0] == 0
    stop(launcher.pid)
    copy = launcher.folder / "worker.py"
    copy.write_text(Path(worker.__file__).read_text().replace("WAIT_S = 120.0", "WAIT_S = 0.3"))
    begun = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-S", "-E", copy, str(os.getpid()), sys.executable, "-u", path], env={**launcher.environment, "NEBULA_WARM": launcher.address},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert process.stdout == "runs\n" and "starts cold: the template does not answer" in process.stderr and time.monotonic() - begun < 90
