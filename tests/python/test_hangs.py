"""Jobs that hang: the agent notices it from the steps, and says which rank stands where. tests/unit/agent/pulse/pace_test.c has the limits."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import nebulaml as nm
import pytest
from test_verdict import asked
from waiting import until

HANGS = """
import threading
os.environ.update(RANK=sys.argv[2], WORLD_SIZE=sys.argv[3], LOCAL_RANK=sys.argv[2], LOCAL_WORLD_SIZE=sys.argv[3], NEBULA_RUN="one", **dict(word.split("=") for word in sys.argv[4:]))
nm.init(sys.argv[1], 0)

def waits_for_a_rank_that_never_comes(gate):
    gate.wait()

gate = threading.Event()
step = 0
for word in iter(sys.stdin.readline, ""):
    if word == "hang\\n":
        say("hangs")
        waits_for_a_rank_that_never_comes(gate)
    elif word.startswith("phase"):
        with nm.phase("evaluate"):
            say("in phase")
            sys.stdin.readline()
        say("out")
    else:
        until = time.monotonic() + float(word)
        while time.monotonic() < until:
            step += 1
            nm.progress(step)
            time.sleep(0.005)
        say(step)
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A job hangs after a second without a step."""
    monkeypatch.setenv("NEBULA_HANG_S", "1")


def job(place) -> dict[str, Any]:
    found = [job for job in json.loads(asked(place, "status", "--json"))["jobs"] if job["path"] == str(place.storage)]
    return found[0] if found else {"verdict": {"state": "none"}}


def tell(trainer, word: str) -> str:
    trainer.stdin.write(word + "\n")
    trainer.stdin.flush()
    return trainer.stdout.readline().strip()


def test_a_hang_is_reported_with_the_stacks_of_all_ranks_the_last_one_first(place):
    ranks = [place.trainer(HANGS, place.storage, n, 2, stdin=True) for n in range(2)]
    for n, rank in enumerate(ranks):
        rank.stdin.write(f"{2.0 + n / 2}\n")  # rank 1 makes more steps
        rank.stdin.flush()
    done = [int(rank.stdout.readline()) for rank in ranks]
    assert done[0] < done[1]
    assert [tell(rank, "hang") for rank in ranks] == ["hangs", "hangs"]
    until(lambda: "makes no steps" in job(place)["verdict"].get("reason", ""), 60)
    verdict = job(place)["verdict"]
    assert verdict["state"] == "broken" and "rank 0 has taken" in verdict["reason"] and f"after step {done[0]}" in verdict["reason"]
    path = Path(re.search(r"stacks of 2 ranks of this node: (\S+)", verdict["reason"])[1])
    until(path.exists)
    text = path.read_text()
    assert text.startswith("rank 0, process ") and text.index("rank 0,") < text.index("rank 1,")
    assert text.count("in waits_for_a_rank_that_never_comes") == 2
    assert re.search(r"wchan|syscall|stack", text)
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


def test_a_job_that_goes_on_is_fine_again(place):
    trainer = place.trainer(HANGS, place.storage, 0, 1, stdin=True)
    tell(trainer, "2")
    os.kill(trainer.pid, signal.SIGSTOP)
    until(lambda: job(place)["verdict"]["state"] == "broken", 60)
    os.kill(trainer.pid, signal.SIGCONT)
    tell(trainer, "0.5")
    until(lambda: job(place)["verdict"]["state"] == "fine", 60)
    trainer.kill()
    trainer.wait()


def test_with_restart_the_ranks_that_hang_are_killed(place):
    trainer = place.trainer(HANGS, place.storage, 0, 1, "NEBULA_ON_HANG=restart", stdin=True)
    tell(trainer, "2")
    tell(trainer, "hang")
    assert trainer.wait(60) == -signal.SIGKILL
    log = next(place.runtime.rglob("agent.log")).read_text()
    assert "hangs and is killed, because NEBULA_ON_HANG=restart is set" in log


def test_a_phase_has_a_limit_of_its_own_and_one_rank_in_a_phase_speaks_for_all(place):
    ranks = [place.trainer(HANGS, place.storage, n, 2, stdin=True) for n in range(2)]
    for rank in ranks:
        rank.stdin.write("2\n")
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
