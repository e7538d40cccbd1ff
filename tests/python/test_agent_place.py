"""One agent per user and node, in every environment of the shell, and a warning if there are two."""

from __future__ import annotations

import os
import re
import subprocess
import uuid
from pathlib import Path

import nebulaml
import pytest
from nebulaml._session import locate
from waiting import until

FINDS = """
nm.init(sys.argv[1], 100000, 2, on_error="raise")
found = nm.get_latest_checkpoint()
say(found.tag if found else "nothing")
"""

SAVES = """
nm.init(sys.argv[1], 100000, 2, on_error="raise")
for step in (1, 2):
    checkpoint = nm.Checkpoint(f"global_step{step}")
    checkpoint.save("m.pt", step)
    checkpoint.commit()
    checkpoint.wait("durable" if step == 1 else "captured", 30)
say("saved")
sys.stdin.read()
"""


def command(*arguments):
    program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)


@pytest.fixture
def shell(place, monkeypatch):
    """Returns the environment of a login shell, in which no directory of Nebula is set. The node's name keeps other agents of this machine apart."""
    monkeypatch.delenv("NEBULA_RUNTIME_DIR")
    monkeypatch.setenv("NEBULA_NODE_ID", f"t{uuid.uuid4().hex[:8]}")
    yield monkeypatch
    nebulaml._shutdown()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    command("stop", "--now", "--yes")


# fault (The machine and other users): `XDG_RUNTIME_DIR` is stale, or differs from shell to shell.
# result: It has no effect: one user has one agent on a node.
@pytest.mark.parametrize("stale", ["/proc/none", "/nowhere/1000", "relative", ""])
def test_a_stale_xdg_runtime_dir_costs_no_checkpoint(stale, place, shell):
    shell.setenv("XDG_RUNTIME_DIR", stale)
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    checkpoint = nebulaml.Checkpoint("global_step1")
    checkpoint.save("m.pt", 1)
    assert checkpoint.commit()
    checkpoint.wait("durable", 60)


# fault: as test_a_stale_xdg_runtime_dir_costs_no_checkpoint
def test_shells_that_differ_in_xdg_runtime_dir_have_one_agent(place, shell):
    first, second = place.root / "first", place.root / "second"
    for path in (first, second):
        path.mkdir(mode=0o700)
    shell.setenv("XDG_RUNTIME_DIR", str(first))
    saving = place.trainer(SAVES, place.storage, stdin=True)
    assert saving.stdout.readline() == "saved\n"
    saving.kill()
    saving.communicate(timeout=60)
    shell.setenv("XDG_RUNTIME_DIR", str(second))
    assert place.run(FINDS, place.storage).strip() == "global_step2"
    shell.delenv("XDG_RUNTIME_DIR")
    assert place.run(FINDS, place.storage).strip() == "global_step2"


def test_an_agent_where_an_older_version_had_it_is_found_by_programs_and_by_stop(place, shell):
    old = place.root / "xdg"
    old.mkdir(mode=0o700)
    shell.setenv("XDG_RUNTIME_DIR", str(old))
    node = os.environ["NEBULA_NODE_ID"]
    with shell.context() as old_version:  # it lives where one of an older version would
        old_version.setenv("NEBULA_RUNTIME_DIR", str(old / "nebula"))
        assert command("agent", "--daemon").returncode == 0
    assert (old / f"nebula-{node}" / "agent.sock").exists()
    saving = place.trainer(SAVES, place.storage, stdin=True)
    assert saving.stdout.readline() == "saved\n"
    saving.kill()
    saving.communicate(timeout=60)
    assert "has ended" in command("stop").stdout
    assert (place.storage / "global_step2/.nebula/manifest-1.json").exists()


# fault (The machine and other users): One user has two agents nevertheless (`NEBULA_RUNTIME_DIR` differs).
# result: Neither finds a version that only the other's memory has. The program's log says so, and names the other
# agent.
def test_the_program_s_log_says_that_another_agent_has_the_newest_in_memory(place, monkeypatch, caplog):
    saving = place.trainer(SAVES, place.storage, stdin=True)
    assert saving.stdout.readline() == "saved\n"
    monkeypatch.setenv("NEBULA_RUNTIME_DIR", str(place.root / "other"))
    try:
        nebulaml.init(str(place.storage), 0, 2, on_error="raise")
        assert nebulaml.get_latest_checkpoint().tag == "global_step1"
        until(lambda: "another agent of this user (process" in caplog.text)
        assert "NEBULA_RUNTIME_DIR" in caplog.text
        nebulaml.get_latest_checkpoint()
        assert caplog.text.count("another agent of this user") == 1
    finally:
        nebulaml._shutdown()
        command("stop", "--now", "--yes")
        saving.kill()
        saving.communicate(timeout=60)


@pytest.mark.parametrize("choice", [None, "off"])
def test_an_agent_gives_up_system_calls_unless_it_is_set_to_keep_them(place, monkeypatch, choice):
    if choice:
        monkeypatch.setenv("NEBULA_BOX", choice)
    nebulaml.init(str(place.storage))
    (agent,) = place.agents()
    (mode,) = re.findall(r"^Seccomp:\s+(\d)", Path(f"/proc/{agent}/status").read_text(), re.M)
    if not choice and mode == "0" and "has no seccomp" in (place.runtime / "agent.log").read_text():
        pytest.skip("this machine forbids seccomp, and the log says so")
    assert mode == ("0" if choice else "2")
