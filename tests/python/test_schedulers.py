"""Slurm and the kubelet end a job: the same signals and commands, in their order and to the same processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import fork_server
import nebulaml as nm
import pytest
from waiting import until

JOB = """
import logging, os, sys, time
import torch
import nebulaml as nm
logging.basicConfig(format="%(message)s", stream=sys.stdout, force=True)
state = {"model": {"w": torch.zeros(1000)}}
with nm.Manager(sys.argv[1], save_every_steps=5, keep_last=3) as manager:
    found = manager.restore(state)
    print("from", found.step if found else 0, flush=True)
    for step in range((found.step if found else 0) + 1, 100_000):
        time.sleep(0.05)
        state["model"]["w"] += 1
        due = manager.should_save(step)
        if due:
            manager.save(step, state)
        print("step", step, flush=True)
        if due and manager.stop_requested:  # a notice after should_save() has answered is for the next step
            manager.leave()
            sys.exit(143)
"""


class Running:
    def __init__(self, place, command):
        """command: () is the trainer alone."""
        self.command, self.output = command, place.root / f"output{time.monotonic_ns()}"
        with self.output.open("w") as file:
            if command:
                self.process = subprocess.Popen(command, stdout=file, stderr=file, cwd=place.root, start_new_session=True)
            else:
                self.process = fork_server.start(JOB, place.storage, stdout=file.fileno(), stderr=file.fileno(), cwd=place.root)

    def text(self):
        return self.output.read_text()

    def until_step(self, step):
        until(lambda: f"step {step}\n" in self.text() or self.process.poll() is not None, 60)
        assert self.process.poll() is None, self.text()

    def last_step(self):
        return int(re.findall(r"^step (\d+)$", self.text(), re.MULTILINE)[-1])


@pytest.fixture
def job(place, monkeypatch):
    monkeypatch.setenv("NEBULA_PERSISTENT_TIME_INTERVAL", "1000")  # after the first, versions wait in memory
    (place.root / "job.py").write_text(textwrap.dedent(JOB))
    started = []

    def start(*command):
        started.append(Running(place, command))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            (os.killpg if one.command else os.kill)(one.process.pid, signal.SIGKILL)
            one.process.wait()


def check_left(place, running, job):
    """Checks that the step of the notice was saved and is durable, and that the log says so. The job that is queued again continues from there."""
    last = running.last_step()
    assert re.search(rf"SIGTERM: global_step{last} is durable after [\d.]+ s, of [\d.]+ s", running.text()), running.text()
    subprocess.run([os.environ.get("NEBULA_AGENT_PATH") or nm._session.locate.agent_path(), "stop", "--now", "--yes"], check=True, capture_output=True, timeout=60)
    again = job()
    again.until_step(last + 1)
    assert f"from {last}\n" in again.text()


# fault (Elastic jobs): Slurm signals before the time limit, the tasks or the batch script.
# result: The tasks save and leave. A trap of the script hands the signal on.
def test_slurms_signal_before_the_time_limit_goes_to_the_tasks_which_save_and_leave(place, job):
    """#SBATCH --signal=TERM@<seconds>: slurmstepd signals each task. At the limit come SIGCONT and SIGTERM, and SIGKILL 30 s (KillWait) later."""
    task = job()
    task.until_step(7)
    task.process.send_signal(signal.SIGTERM)
    assert task.process.wait(25) == 143, task.text()  # before the limit
    check_left(place, task, job)


BATCH = """#!/bin/bash
# --signal=B:USR1@120: only this shell is signalled, which hands it on.
{python} job.py {storage} &
trap 'kill -TERM $!' USR1
wait $!
wait $!
"""


# fault: as test_slurms_signal_before_the_time_limit_goes_to_the_tasks_which_save_and_leave
@pytest.mark.nightly
def test_slurms_signal_to_the_batch_shell_is_handed_on_by_its_trap(place, job):
    (place.root / "batch.sh").write_text(BATCH.format(python=sys.executable, storage=place.storage))
    batch = job("bash", "batch.sh")
    batch.until_step(7)
    batch.process.send_signal(signal.SIGUSR1)  # slurmstepd, to the batch step's shell alone
    assert batch.process.wait(25) == 143, batch.text()
    check_left(place, batch, job)


# fault (Elastic jobs): The kubelet runs a `preStop` hook, then signals, and kills at the end of the grace period.
# result: The hook makes the newest version durable while training goes on, and the trainer saves at the signal.
def test_the_kubelet_runs_the_hook_then_signals_and_kills_when_the_grace_period_is_over(place, job):
    """A preStop hook is a command in the container. The grace period runs from its begin; SIGTERM to the first process comes after it."""
    program = os.environ.get("NEBULA_AGENT_PATH") or nm._session.locate.agent_path()
    container = job()
    container.until_step(12)
    grace_ends = time.monotonic() + 30
    hook = subprocess.run([program, "flush", "--path", place.storage], capture_output=True, text=True, timeout=60)
    flushed = re.fullmatch(r"global_step(\d+) is durable\n", hook.stdout)
    assert hook.returncode == 0 and flushed, hook.stdout + hook.stderr
    assert int(flushed[1]) >= 10 and (place.storage / f"global_step{flushed[1]}/.nebula/manifest-1.json").exists()  # the job trains on
    assert container.process.poll() is None  # it trains meanwhile
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(max(0.1, grace_ends - time.monotonic())) == 143, container.text()
    check_left(place, container, job)
