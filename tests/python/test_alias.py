"""torch_nebula is nebulaml under another name. A broken installation raises an error that DeepSpeed does not hide."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import nebulaml


def python(code: str, *paths: str) -> str:
    prefix = f"import sys; sys.path[:0] = {list(paths)!r}\n"
    done = subprocess.run([sys.executable, "-c", prefix + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_both_names_are_one_module_with_one_state():
    code = """
import torch_nebula, nebulaml
import torch_nebula.api as old, nebulaml.api as new
from torch_nebula.errors import NebulaError
assert torch_nebula is nebulaml and old is new and NebulaError is nebulaml.NebulaError
assert new.__spec__.name == "nebulaml.api"
import importlib
assert importlib.import_module("torch_nebula.events") is importlib.import_module("nebulaml.events")
try:
    import torch_nebula.nothing
except ModuleNotFoundError as error:
    print("absent", error.name)
"""
    assert python(code) == "absent torch_nebula.nothing"


def test_importing_takes_neither_torch_nor_a_framework():
    code = "import sys, nebulaml\nprint([m for m in ('torch', 'numpy', 'deepspeed', 'lightning') if m in sys.modules])"
    assert python(code) == "[]"


def test_importing_takes_no_standard_module_that_loads_slowly():
    """They took a third of the time of the import. A later Python may need some of them for the others."""
    code = """
import contextlib, importlib.util, json, logging, pickle, sys, threading, typing
before = set(sys.modules)
import nebulaml
print(sorted({"ast", "asyncio", "ctypes", "dataclasses", "hashlib", "inspect", "shutil", "ssl", "subprocess", "urllib.request"} & (set(sys.modules) - before)))
"""
    assert python(code) == "[]"


def test_a_missing_extension_is_no_import_error_and_names_no_other_package(tmp_path):
    package = Path(nebulaml.__file__).parent
    shutil.copytree(package, tmp_path / "nebulaml", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code = """
try:
    import nebulaml
except ImportError:
    print("ImportError")
except RuntimeError as error:
    print(type(error).__name__, "pip install --force-reinstall ." in str(error), "reinstall nebulaml" in str(error))
"""
    assert python(code, str(tmp_path)) == "NebulaUnavailable True False"


def test_type_hints_are_announced():
    assert (Path(nebulaml.__file__).parent / "py.typed").exists()
