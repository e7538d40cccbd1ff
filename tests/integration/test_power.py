"""Cuts the power below a real agent and its trainer (tests/power/power.py). `make power` makes more cuts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import power
import pytest

ROOT = Path(__file__).resolve().parents[2]
CUTS = 10_000 if os.environ.get("NEBULA_TEST_NIGHTLY") == "1" else 22


# fault (The machine and other users): The power goes at any moment, below a real agent and its trainer.
# result: What was reported as durable loads bit for bit. Nothing is a mixture, comes back after its removal, or is left after a sweep.
@pytest.mark.timeout(4 * 3600 if CUTS == 10_000 else 300)
def test_after_any_loss_of_power_durable_versions_load_and_nothing_is_mixed_comes_back_or_is_left(capsys):
    if not os.access("/dev/fuse", os.W_OK) or os.geteuid() != 0:
        pytest.skip("only root mounts a file system here")
    if subprocess.run(["pkg-config", "--exists", "fuse3"]).returncode or not shutil.which("ninja"):
        pytest.skip("libfuse3 or ninja is not here")
    subprocess.run(["scripts/build.sh", power.BUILD], cwd=ROOT, check=True, env=os.environ | {"TARGETS": "tests/power/powerfs"})
    wrong = power.main(["--cuts", str(CUTS)])
    assert not wrong, capsys.readouterr().out


def test_a_state_that_lost_what_was_durable_is_called_wrong(tmp_path):
    events = [
        {"at": 0, "what": "begun", "storage": "a", "tag": "global_step1", "files": {"model": "0"}},
        {"at": 5, "what": "durable", "storage": "a", "tag": "global_step1"},
    ]
    (tmp_path / "a").mkdir()
    faults = power.Child(lambda: power.judge(tmp_path, events)).end()
    assert any("there is no newest version" in fault for fault in faults)
    assert any("global_step1 was durable and is not there" in fault for fault in faults)
