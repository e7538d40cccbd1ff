"""`make demo-studio PICTURES=DIR` in its short form."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import CHROMIUM
from waiting import until

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly("studio/test_page.py::test_a_job_is_followed_live_through_a_kill_and_a_resume")
@pytest.mark.skipif(CHROMIUM is None, reason="this machine has no Chromium: scripts/studio.sh browser")
def test_the_demo_makes_its_pictures_and_leaves_nothing_running(tmp_path):
    work = Path(tempfile.mkdtemp(dir="/tmp"))  # the path of a socket must be short
    line = [sys.executable, "-m", "demo.studio", "--steps", "12", "--pictures", tmp_path / "pictures"]
    done = subprocess.run(line, cwd=ROOT, env={**os.environ, "TMPDIR": str(work)}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SIGKILL") == 2 and done.stdout.count("training, pid") == 3
    made = sorted(one.name for one in (tmp_path / "pictures").iterdir())
    assert made == ["studio-checkpoints.png", "studio-metrics.png", "studio-now.png", "studio-timeline.png", "studio-version.png"]
    assert list(work.glob("nebula-*")) == []
    shutil.rmtree(work)
    until(lambda: not [one for one in Path("/proc").glob("[0-9]*/environ") if str(work) in read(one)], what="the end of what the studio had started")


def read(file: Path) -> str:
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""
