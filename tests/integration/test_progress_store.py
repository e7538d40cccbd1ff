"""The line on the terminal of a save to an object store, a flush, and a load from it: bytes, rate, time left."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# NEBULA_STORE_MBPS makes each of the three take four seconds.
JOB = """
import os, subprocess, sys
import torch
import nebulaml as nm

path = "gs://nebula/training/progress"
state = {"state": torch.arange(96 << 18, dtype=torch.float32)}
nm.init(path, 3600, 2, on_error="raise")  # the first one is persisted at once
with nm.Checkpoint("global_step1") as checkpoint:
    checkpoint.save("m.pt", state)
checkpoint.wait("durable", 60)
print("saved", file=sys.stderr)
state["state"].neg_()
with nm.Checkpoint("global_step2") as checkpoint:
    checkpoint.save("m.pt", state)
checkpoint.wait("committed", 60)
subprocess.run([os.environ["NEBULA_AGENT_PATH"], "flush", "--path", path], check=True, stdout=subprocess.DEVNULL)
print("flushed", file=sys.stderr)
nm._shutdown()
subprocess.run([os.environ["NEBULA_AGENT_PATH"], "stop", "--now", "--yes"], check=True, capture_output=True)  # its memory goes with it
nm.init(path, 0, 2, on_error="raise")
found = nm.get_latest_checkpoint()
print("found", file=sys.stderr)
assert found.load("m.pt")["state"].equal(state["state"])
print("loaded", file=sys.stderr)
"""


def said_on_a_terminal(command, environment):
    """Runs a command with a terminal as its stderr, and returns what it wrote there."""
    ours, theirs = pty.openpty()
    read = []

    def take():
        try:
            while part := os.read(ours, 65536):
                read.append(part)
        except OSError:  # the other end is closed
            pass

    taker = threading.Thread(target=take)
    taker.start()
    try:
        done = subprocess.run(command, stderr=theirs, env=environment, cwd=ROOT, timeout=120, check=False)
    finally:
        os.close(theirs)
        taker.join(10)
        os.close(ours)
    text = b"".join(read).decode()
    assert not done.returncode, text
    return text


def shares(text, what):
    """Returns the percentages that the line showed. The text must end without it."""
    *lines, last = text.split("\r\033[K")
    form = rf"{re.escape(what)}  +(\d+) %  [\d.]+ [KM]?i?B of 96\.0 MiB  [\d.]+ [KM]?i?B/s(  [\d.]+ m?s left)?"
    assert not last, text
    return [int(found[1]) for line in lines if (found := re.fullmatch(form, line))]


@pytest.mark.nightly
def test_a_slow_save_a_slow_flush_and_a_slow_load_show_how_far_they_are(nebula, tmp_path):
    environment = {
        **os.environ, "NEBULA_RUNTIME_DIR": str(tmp_path / "run"), "NEBULA_MEMORY_DIR": str(tmp_path / "memory"), "NEBULA_AGENT_PATH": str(nebula),
        "NEBULA_OUTPUT_DIR": str(tmp_path / "output"), "NEBULA_STORE_MBPS": "24",
    }  # fmt: skip
    text = said_on_a_terminal(["tests/servers/gs.py", sys.executable, "-W", "ignore", "-c", JOB], environment)
    saving, text = text.split("saved\r\n")
    flushing, text = text.split("flushed\r\n")
    loading = text.split("found\r\n")[1].split("loaded\r\n")[0]
    for said, what in (
        (saving, "nebula: saving global_step1"),
        (flushing, "flushing global_step2"),
        (loading, "nebula: loading m.pt of global_step2"),
    ):
        found = shares(said, what)
        assert len(found) >= 2 and found == sorted(found) and found[0] < found[-1] <= 100, said
