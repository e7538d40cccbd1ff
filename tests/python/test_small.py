"""Small things: the module as a command, the texts of listings and checkpoints, and an import that changes nothing for child processes."""

from __future__ import annotations

import subprocess
import sys

import nebulaml
import pytest


def test_the_module_is_the_command(place):
    done = subprocess.run([sys.executable, "-m", "nebulaml", "version"], capture_output=True, text=True, check=True)
    assert nebulaml.__version__ in done.stdout
    done = subprocess.run([sys.executable, "-m", "nebulaml", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode and "nonsense" in done.stderr and "python" not in done.stderr


def test_a_listing_is_typed_rows_that_show_themselves(nm):
    assert repr(nm.checkpoints()) == "(no rows)" and "no rows" in nm.checkpoints()._repr_html_()
    for step in (1, 2):
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("a<b.pt", step)
    assert nm.flush_persistence()
    newest, older = nm.checkpoints()
    assert (newest.tag, newest.step, newest.state, older.step) == ("global_step2", 2, "durable", 1) and newest.size > 0
    assert repr(nm.checkpoints()).splitlines()[1].startswith("global_step2  2")
    assert "<td>global_step1</td>" in nm.checkpoints()._repr_html_()
    assert "durable" in checkpoint._repr_html_() and "a&lt;b.pt" in checkpoint._repr_html_()


@pytest.mark.parametrize("imports", ["import nebulaml, torch", "import torch, nebulaml", "import nebulaml"])
def test_an_import_changes_nothing_for_child_processes(imports):
    code = f"""
import os, subprocess, sys
before = dict(os.environ)
{imports}
assert dict(os.environ) == before
inherited = subprocess.run(["/usr/bin/env"], capture_output=True, text=True).stdout
assert "THP_MEM" not in inherited, inherited
import importlib.util, torch
assert torch.__spec__.loader.get_source("torch") and importlib.util.find_spec("torch") is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True)
