"""A trainer of the fork server has what an interpreter of its own has."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

import fork_server
import pytest

SHOWS = """
import atexit, json, os, pickle, resource, signal, subprocess, sys, threading
atexit.register(print, "at exit")
class Own: pass
assert type(pickle.loads(pickle.dumps(Own()))) is Own
print(json.dumps({
    "arguments": sys.argv, "directory": os.getcwd(), "environment": {name: os.environ.get(name) for name in ("NEBULA_OF_TEST", "HOME", "NOT_THERE")},
    "child": subprocess.check_output("echo $NEBULA_OF_TEST", shell=True, text=True), "limit": resource.getrlimit(resource.RLIMIT_NOFILE), "names": sorted(set(globals())),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "threads": threading.active_count(), "path": sys.path[:3],
    "read": sys.stdin.read(), "open": sorted(os.listdir("/proc/self/fd"))[:4],
}))
print("wrong", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def lower_limit():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_it_has_the_arguments_environment_limits_streams_and_end_of_an_interpreter(tmp_path, lower_limit):
    environment = {name: value for name, value in os.environ.items() if name != "NOT_THERE"} | {"NEBULA_OF_TEST": "é"}
    own = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHOWS, "first", "3"], input="said", capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    forked = fork_server.start(SHOWS, "first", 3, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=environment)
    assert forked.communicate("said", timeout=60) == (own.stdout, own.stderr)
    assert forked.returncode == own.returncode == 3
    assert "at exit" in own.stdout and own.stderr == "wrong\n"


def test_it_ends_by_a_signal_an_exception_or_a_timeout_as_a_process_does():
    sleeper = fork_server.start("import time; time.sleep(60)")
    assert sleeper.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.communicate(timeout=0.1)
    begun = time.monotonic()
    sleeper.kill()
    assert sleeper.wait() == -signal.SIGKILL and time.monotonic() - begun < 30
    failing = fork_server.start("raise ValueError('it fails')", stderr=subprocess.PIPE)
    assert "ValueError: it fails" in failing.communicate(timeout=60)[1] and failing.returncode == 1


ENDS = """
import atexit, ctypes, os, sys, torch
class Told:
    def __init__(self, text): self.text = text
    def __del__(self, write=os.write): write(1, self.text)
own, torch.of_a_test = Told(b"global "), Told(b"module ")
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.printf, b"C", None)  # into the buffer of C
atexit.register(os.write, 1, b"Python ")
if int(sys.argv[1]):
    sys.exit(7)
"""


@pytest.mark.parametrize("status", [0, 7])
@pytest.mark.parametrize(("end", "said"), [("", "Python global C"), ("1", "Python module global C")])
def test_it_ends_by_its_own_functions_and_objects_and_with_a_whole_end_by_those_of_the_modules_too(monkeypatch, end, said, status):
    if end:
        monkeypatch.setenv(fork_server.WHOLE_END, end)
    trainer = fork_server.start(ENDS, status)
    assert trainer.communicate(timeout=60)[0] == said and trainer.returncode == status
