"""Small things: the module as a command, the texts of listings and checkpoints, and an import that changes nothing for child processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.nightly
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


def test_type_checkers_see_each_lazy_name_where_it_is_defined_and_no_other_name():
    """A module's own __getattr__ would make every name, also a misspelled one, Any."""
    branches = [part for part in ast.parse(Path(nebulaml.__file__).read_text()).body if isinstance(part, ast.If) and "TYPE_CHECKING" in ast.unparse(part.test)]
    seen, listed = {}, set()
    for part in (part for branch in branches for part in branch.body):
        if isinstance(part, ast.ImportFrom):
            seen |= {name.name: "." * part.level + part.module for name in part.names}
        elif isinstance(part, ast.AnnAssign):
            seen |= {part.target.id: nebulaml._LAZY[part.target.id]}
        elif isinstance(part, ast.AugAssign):
            listed = set(ast.literal_eval(part.value))
    assert seen == nebulaml._LAZY and listed == set(seen)
    assert [ast.unparse(branch.test) for branch in branches if "__getattr__" in ast.unparse(branch)] == ["not TYPE_CHECKING"]
    old = (Path(nebulaml.__file__).parent.parent / "torch_nebula" / "__init__.py").read_text()
    assert "if TYPE_CHECKING:\n    from nebulaml import *" in old


def test_files_are_listed_by_name_and_not_in_the_order_of_the_saves(nm, place):
    with nm.Checkpoint("global_step1") as checkpoint:
        for name in ("c", "a", "d", "b"):
            checkpoint.save(name, 1)
    assert list(checkpoint.files) == list("abcd")
    checkpoint.wait("durable")
    place.kill_agent()
    nm._shutdown()
    nm.init(str(place.storage), 0)
    assert list(nm.get_latest_checkpoint().files) == list("abcd") == [one["name"] for one in nm.list_checkpoints()["global_step1"]["files"]]
