"""Jobs that hang: the agent notices it from the steps, and says which rank stands where. tests/unit/agent/pulse/pace_test.c has the limits."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import nebulaml as nm
import pytest
from processes import stop
from test_verdict import asked
from waiting import until

HANGS = """
import threading
os.environ.update({"RANK": sys.argv[2], "WORLD_SIZE": sys.argv[3], "LOCAL_RANK": sys.argv[2], "LOCAL_WORLD_SIZE": sys.argv[3], "NEBULA_RUN": "one"} | dict(word.split("=") for word in sys.argv[4:]))
nm.init(sys.argv[1], 0)

def waits_for_a_rank_that_never_comes(gate):
    gate.wait()

gate = threading.Event()
step = 0
for word in iter(sys.stdin.readline, ""):
    if word.startswith("phase"):
        with nm.phase("evaluate"):
            say("in phase")
            sys.stdin.readline()
        say("out")
    else:
        for step in range(step + 1, step + 1 + int(word.split()[0])):
            nm.progress(step)
            time.sleep(0.005)
        say(step)
        if "hang" in word:
            waits_for_a_rank_that_never_comes(gate)
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch, tmp_path):
    """A job hangs after a second without a step. The tool for native stacks is one that takes no time."""
    monkeypatch.setenv("NEBULA_HANG_S", "1")
    tool(tmp_path / "tools", 'echo "PID $2 - process"; echo "#0 in pthread_cond_wait"')
    monkeypatch.setenv("PATH", f"{tmp_path}/tools:{os.environ['PATH']}")


def tool(folder: Path, code: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "eu-stack").write_text(f"#!/bin/sh\n{code}\n")
    (folder / "eu-stack").chmod(0o755)


def job(place) -> dict[str, Any]:
    found = [job for job in json.loads(asked(place, "status", "--json"))["jobs"] if job["path"] == str(place.storage)]
    return found[0] if found else {"verdict": {"state": "none"}}


def tell(trainer, word: str) -> str:
    trainer.stdin.write(word + "\n")
    trainer.stdin.flush()
    return trainer.stdout.readline().strip()


# fault (Elastic jobs): All ranks of a node wait for ever.
# result: The agent reports the stacks. With `--on-hang=restart` the ranks start again and resume.
def test_a_hang_is_reported_with_the_stacks_of_all_ranks_the_last_one_first(place):
    ranks = [place.trainer(HANGS, place.storage, n, 2, stdin=True) for n in range(2)]
    done = (400, 500)  # rank 1 makes more steps
    for steps, rank in zip(done, ranks, strict=True):
        rank.stdin.write(f"{steps} hang\n")
        rank.stdin.flush()
    assert [int(rank.stdout.readline()) for rank in ranks] == [*done]
    until(lambda: "makes no steps" in job(place)["verdict"].get("reason", ""), 60)
    verdict = job(place)["verdict"]
    assert verdict["state"] == "broken" and "rank 0 has taken" in verdict["reason"] and f"after step {done[0]}" in verdict["reason"]
    path = Path(re.search(r"stacks of 2 ranks of this node: (\S+)", verdict["reason"])[1])
    until(path.exists)
    text = path.read_text()
    assert text.startswith("rank 0, process ") and text.index("rank 0,") < text.index("rank 1,")
    assert text.count("in waits_for_a_rank_that_never_comes") == 2
    assert re.search(r"wchan|syscall|stack", text)
    assert text.count("  native stacks:\n") == 2 and f"PID {ranks[0].pid} - process\n#0 in pthread_cond_wait" in text
    metrics = asked(place, "metrics")
    assert f'nebula_hangs_total{{job="",path="{place.storage}"}} 1\n' in metrics
    assert f'nebula_step{{job="",path="{place.storage}"}} {done[0]}\n' in metrics
    assert all(f"\n{name}{{" in metrics for name in ("nebula_seconds_since_step", "nebula_step_limit_seconds"))
    assert all(rank.poll() is None for rank in ranks), "the default only reports"
    log = next(place.runtime.rglob("agent.log")).read_text()
    assert log.count("is broken: the job makes no steps") == 1
    for rank in ranks:
        rank.kill()
        rank.wait()


# fault: as test_a_hang_is_reported_with_the_stacks_of_all_ranks_the_last_one_first
@pytest.mark.nightly("test_a_hang_is_reported_with_the_stacks_of_all_ranks_the_last_one_first")
def test_of_ranks_on_two_nodes_the_one_that_lags_behind_is_named_wherever_it_is(place, tmp_path):
    """Rank 1 is on another node, which has another agent."""
    words = ["LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1"]
    memory = tmp_path / "memory-b"
    memory.mkdir(mode=0o700)
    ranks = [
        place.trainer(HANGS, place.storage, 0, 2, *words, stdin=True),
        place.trainer(HANGS, place.storage, 1, 2, *words, "NEBULA_NODE_ID=b", f"NEBULA_MEMORY_DIR={memory}", stdin=True),
    ]
    done = (600, 400)  # rank 1 makes fewer steps
    for steps, rank in zip(done, ranks, strict=True):
        rank.stdin.write(f"{steps} hang\n")
        rank.stdin.flush()
    assert [int(rank.stdout.readline()) for rank in ranks] == [*done]
    until(lambda: 'rank 1 on node "b" lags behind, of 2 of 2 ranks' in job(place)["verdict"].get("reason", ""), 60)
    reason = job(place)["verdict"]["reason"]
    assert f"after step {done[1]}" in reason
    there = Path(re.search(r"its stacks are in (\S+) there", reason)[1])
    until(there.exists)
    assert there.read_text().startswith("rank 1, process ") and "-b/" in str(there)
    here = place.runtime / "hang-0.txt"
    until(lambda: here.exists() and here.read_text().startswith('rank 1 on node "b" lags behind'))
    for rank in ranks:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("echo 'eu-stack: dwfl_linux_proc_attach: Operation not permitted'; exit 2", "native stacks:\n.*Operation not permitted"),
        ("exit 3", "no native stacks: eu-stack or gdb has ended with 3"),
    ],
)
def test_where_the_machine_shows_no_native_stacks_the_report_says_why(place, tmp_path, code, words):
    tool(tmp_path / "tools", code)
    trainer = place.trainer(HANGS, place.storage, 0, 1, stdin=True)
    tell(trainer, "400 hang")
    path = place.runtime / "hang-0.txt"
    until(path.exists, 60)
    assert re.search(words, path.read_text()) and "in waits_for_a_rank_that_never_comes" in path.read_text()
    trainer.kill()
    trainer.wait()


@pytest.mark.skipif(os.environ.get("NEBULA_TEST_NIGHTLY") != "1" or not shutil.which("gdb"), reason="one of the long ones: gdb takes seconds")
def test_gdb_shows_the_native_stacks_of_a_rank_that_hangs(place, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(":")[2])
    if shutil.which("eu-stack"):
        pytest.skip("eu-stack is here, and comes first")
    trainer = place.trainer(HANGS, place.storage, 0, 1, stdin=True)
    tell(trainer, "400 hang")
    path = place.runtime / "hang-0.txt"
    until(path.exists, 90)
    text = path.read_text()
    assert "native stacks:\n" in text and re.search(r"#\d+ .* in (__futex|sem_|pthread_|PyThread|_Py)", text), text
    trainer.kill()
    trainer.wait()


def test_a_job_that_goes_on_is_fine_again(place):
    trainer = place.trainer(HANGS, place.storage, 0, 1, stdin=True)
    tell(trainer, "400")
    stop(trainer.pid)
    until(lambda: job(place)["verdict"]["state"] == "broken", 60)
    os.kill(trainer.pid, signal.SIGCONT)
    tell(trainer, "100")
    until(lambda: job(place)["verdict"]["state"] == "fine", 60)
    trainer.kill()
    trainer.wait()


# fault: as test_a_hang_is_reported_with_the_stacks_of_all_ranks_the_last_one_first
def test_with_restart_the_ranks_that_hang_are_killed(place):
    trainer = place.trainer(HANGS, place.storage, 0, 1, "NEBULA_ON_HANG=restart", stdin=True)
    tell(trainer, "400 hang")
    assert trainer.wait(60) == -signal.SIGKILL
    log = next(place.runtime.rglob("agent.log")).read_text()
    assert "hangs and is killed, because NEBULA_ON_HANG=restart is set" in log


@pytest.mark.nightly("test_a_hang_is_reported_with_the_stacks_of_all_ranks_the_last_one_first")
def test_a_phase_has_a_limit_of_its_own_and_one_rank_in_a_phase_speaks_for_all(place):
    ranks = [place.trainer(HANGS, place.storage, n, 2, stdin=True) for n in range(2)]
    for rank in ranks:
        rank.stdin.write("400\n")
        rank.stdin.flush()
    for rank in ranks:
        rank.stdout.readline()
    assert tell(ranks[0], "phase") == "in phase"
    until(lambda: job(place)["steps"]["seconds"] > 4, 60)  # the other one waits for four limits
    assert job(place)["verdict"]["state"] == "fine"
    assert tell(ranks[0], "") == "out"
    until(lambda: job(place)["verdict"]["state"] == "broken", 60)
    for rank in ranks:
        rank.kill()
        rank.wait()


def test_a_program_that_makes_no_steps_and_one_that_has_ended_them_are_not_watched(place):
    nm.init(place.storage, 0)
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save_bytes("b", [b"x"])
    assert "steps" not in job(place)
    nm.progress(5)
    until(lambda: job(place).get("steps", {}).get("step") == 5, 60)
    assert nm.flush_persistence()
    until(lambda: "steps" not in job(place), 60)


def test_steps_and_phases_without_a_session_and_in_a_child_do_nothing(place):
    nm.progress(1)
    with nm.phase("evaluate"), nm.phase("a name that is longer than thirty-one bytes"):
        nm.progress()
    nm.init(place.storage, 0)
    nm.progress(7)
    until(lambda: job(place).get("steps", {}).get("step") == 7, 60)
    child = os.fork()
    if child == 0:
        nm.progress(99)
        os._exit(0)
    os.waitpid(child, 0)
    nm.progress(8)
    until(lambda: job(place)["steps"]["step"] == 8, 60)


def test_a_session_that_the_program_has_dropped_takes_no_steps(place):
    dropped = nm.Session(place.root / "other", persistent_time_interval=0)
    with nm.Checkpoint("global_step1", session=dropped) as checkpoint:
        checkpoint.save_bytes("b", [b"x"])
    nm.progress(1)
    del dropped, checkpoint
    gc.collect()
    nm.init(place.storage, 0)
    nm.progress(7)
    until(lambda: job(place).get("steps", {}).get("step") == 7, 60)


def test_the_next_agent_finds_the_steps_too(place):
    nm.init(place.storage, 0)
    nm.progress(7)
    until(lambda: job(place).get("steps", {}).get("step") == 7, 60)
    place.kill_agent()
    with nm.Checkpoint("global_step8") as checkpoint:  # meets the next agent
        checkpoint.save_bytes("b", [b"x"])
    nm.progress(8)
    until(lambda: job(place).get("steps", {}).get("step") == 8, 60)
