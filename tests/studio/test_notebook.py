"""nm.watch(): a live view in a notebook, run by nbconvert, and lines elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SAVE = """
def save(step):
    checkpoint = nm.Checkpoint(f"global_step{step}")
    checkpoint.save("model.pt", {"weight": torch.ones(1000)})
    assert checkpoint.commit()
    checkpoint.wait("durable")
"""
CELLS = [
    "import nebulaml as nm, torch\nnm.init({path!r}, 0, 2, on_error='raise')\n" + SAVE + "save(1)",
    "view = nm.watch(every=0.2)",
    "save('2<b>x')\nview.stop()",
    "nm.list_checkpoints()",
]


@pytest.mark.nightly("test_without_a_notebook_a_line_tells_each_change_once")
def test_a_notebook_shows_the_verdict_and_the_newest_version_and_follows_them(place, tmp_path):
    pytest.importorskip("nbconvert")
    pytest.importorskip("ipykernel")
    cells = [
        {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": one.replace("{path!r}", repr(str(place.storage)))} for one in CELLS
    ]
    notebook = tmp_path / "job.ipynb"
    notebook.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    line = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--output", "done.ipynb", str(notebook)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=110, env={**os.environ, "IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = [cell["outputs"] for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"]]
    (shown,) = outputs[1]
    page = "".join(shown["data"]["text/html"])
    assert ">fine</b>" in page and "newest: <b>global_step2&lt;b&gt;x</b>" in page, "the view shows what came after its cell"
    assert "global_step1" in page and "<b>x" not in page.replace("<b>global", "")
    assert "".join(shown["data"]["text/plain"]) == "fine; newest: global_step2<b>x"


# fault (Reports): A look at the job fails, and later ones succeed.
# result: The view says once that it does not know, and then goes on.
def test_a_view_goes_on_after_a_look_that_failed(place):
    told = place.run(
        SAVE + """
import io, time
from nebulaml.errors import NebulaUnavailable
nm.init(sys.argv[1], 0, 2, on_error="raise")
save(1)
sys.stderr = io.StringIO()
view = nm.watch(every=0.2)
look, looks, fails = view._looks.ask, 0, True
def ask(on_progress):
    global looks
    looks += 1
    if fails:
        raise NebulaUnavailable("the machine is busy")
    return look(on_progress)
view._looks.ask = ask
while looks < 3:
    time.sleep(0.01)
fails = False
save(2)
while "global_step2" not in view._said:
    time.sleep(0.01)
view.stop()
print(sys.stderr.getvalue().count("the machine is busy"))
""",
        place.storage,
    )
    assert told.splitlines()[-2:] == ["fine; newest: global_step2", "1"], told


def test_without_a_notebook_a_line_tells_each_change_once(place):
    told = place.run(
        SAVE + """
nm.init(sys.argv[1], 0, 2, on_error="raise")
save(1)
view = nm.watch(every=60)
view.refresh()
save(2)
view.stop()
""",
        place.storage,
    )
    assert told.splitlines()[-2:] == ["fine; newest: global_step1", "fine; newest: global_step2"], told
