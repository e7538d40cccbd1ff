"""The package in an environment that has no torch, and in one that has no NumPy either: one wheel serves all."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sysconfig
import textwrap
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nebulaml
import pytest
import torch

PACKAGES = Path(sysconfig.get_path("purelib"))
NUMPY = ("numpy", "numpy.libs")
Run = Callable[..., list[str]]


@pytest.fixture(scope="module", params=[pytest.param("NumPy", marks=pytest.mark.nightly), "neither"])
def interpreter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an environment that has the files of the package, and NumPy at most."""
    made = tmp_path_factory.mktemp("env") / "env"
    venv.create(made, symlinks=True)
    (into,) = made.glob("lib/python*/site-packages")
    of_package = {file.parts[0] for file in importlib.metadata.files("nebula-checkpoint") or () if file.parts[0] not in ("..", "__pycache__")}
    for name in [*of_package, *(NUMPY if request.param == "NumPy" else ())]:
        if (PACKAGES / name).exists():
            (into / name).symlink_to(PACKAGES / name)
    return made / "bin" / "python"


@pytest.fixture
def run(interpreter: Path, place: Any) -> Run:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "NEBULA_AGENT_PATH": str(Path(sysconfig.get_path("scripts")) / "nebula")
    }

    def run(*words: object, code: int = 0) -> list[str]:
        done = subprocess.run([interpreter, *map(str, words)], env=environment, cwd=place.root, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        return (done.stdout + done.stderr * bool(code)).splitlines()

    return run


def test_the_wheel_requires_nothing() -> None:
    assert all("extra ==" in needed for needed in importlib.metadata.requires("nebula-checkpoint") or ())


def test_an_import_loads_few_modules(run: Run) -> None:
    """Their number, since a time would depend on the machine: with 140 modules it takes 45 ms."""
    (said,) = run("-c", "import sys; before = set(sys.modules); import nebulaml; print(*set(sys.modules) - before)")
    assert len(said.split()) < 150
    assert not set(said.split()) & {"torch", "numpy", "asyncio", "multiprocessing", "importlib.resources", "tempfile", "urllib", "sysconfig", "difflib"}


SESSION = """
    import nebulaml as nm
    nm.init(sys.argv[1], 0, on_error="raise", keep_last=2)
    for step in range(1, 5):
        with nm.Checkpoint(f"global_step{step}", metrics={"loss": 1 / step}) as checkpoint:
            checkpoint.save_bytes("bytes", [b"abc", numbers])
            checkpoint.save("object", {"step": step, "rows": [numbers, (1, 2.5, None)]})
    nm.flush_persistence()
    latest = nm.get_latest_checkpoint()
    found = latest.load("object", weights_only=True)
    print(latest.tag, latest.metrics, latest.read_bytes("bytes")[:3], found["step"], bytes(found["rows"][0]) == bytes(numbers))
    print(latest.load_into("object", {"step": 0, "rows": [0, (1, 2.5, None)]})["step"])
    with nm.Reader(sys.argv[1]) as reader:
        print(reader.latest().tag, len(reader.latest().files))
    print(*sorted(nm.rng_state()))
    nm.set_rng_state(nm.rng_state())
"""
MANAGER = """
    import collections
    import nebulaml as nm

    class Loader:
        at = 0
        def state_dict(self):
            return {"at": self.at}
        def load_state_dict(self, state):
            self.at = state["at"]

    with nm.Manager(sys.argv[1], save_every_steps=5, keep_last=2, keep_best=nm.Best("loss")) as manager:
        state, loader = {"step": 0, "rows": numbers, "names": collections.OrderedDict(a=1)}, Loader()
        manager.prepare({"state": state, "loader": loader})
        restored = manager.restore({"state": state, "loader": loader})
        print(restored and (restored.step, restored.metrics, restored.extra), state["step"], loader.at, bytes(state["rows"]) == bytes(numbers))
        for step in range(state["step"] + 1, 23):
            state["step"], loader.at = step, 2 * step
            manager.save(step, {"state": state, "loader": loader, "extra": "text"}, metrics={"loss": abs(step - 5)})
            if restored is None and step == 17:
                manager.wait()
                os.kill(os.getpid(), 9)
        manager.wait()
        print(manager.all_steps(), manager.best_step())
        for wrong in ({"state": {"step": 0}}, {"state": Loader}, {"other": state}):
            try:
                manager.restore(wrong)
            except nm.NebulaError as failure:
                print(type(failure).__name__)
        try:
            manager.save(30, {"state": object()}, force=True)
        except nm.NebulaError as failure:
            print(str(failure)[:40])
"""
NUMBERS = "import os, sys\ntry:\n    import numpy; numbers = numpy.arange(1000.0)\nexcept ImportError:\n    numbers = bytearray(8000)\n"


def test_sessions_and_readers_save_and_load(run: Run, place: Any) -> None:
    said = run("-c", NUMBERS + textwrap.dedent(SESSION), place.storage)
    assert said[:3] == ["global_step4 {'loss': 0.25} b'abc' 4 True", "4", "global_step4 3"]
    assert said[3] in ("python", "numpy python")


def test_a_file_that_was_saved_without_torch_is_one_of_torch_and_back(run: Run, place: Any) -> None:
    run("-c", NUMBERS + textwrap.dedent(SESSION), place.storage)
    stored = torch.load(place.storage / "global_step4" / "object", weights_only=False)
    assert stored["step"] == 4 and stored["rows"][1] == (1, 2.5, None)
    nebulaml.init(str(place.storage), 0, on_error="raise")
    with nebulaml.Checkpoint("global_step9") as checkpoint:
        checkpoint.save("plain", {"step": 9})
        checkpoint.save("tensors", {"w": torch.ones(3)})
    checkpoint.wait()
    nebulaml._shutdown()
    code = """
        import nebulaml as nm
        nm.init(sys.argv[1], 0, on_error="raise")
        latest = nm.get_latest_checkpoint()
        print(latest.load("plain"))
        for weights_only in (True, False):
            try:
                latest.load("tensors", weights_only=weights_only)
            except nm.NebulaConfigError as failure:
                print(failure)
    """
    said = run("-c", NUMBERS + textwrap.dedent(code), place.storage)
    assert said[0] == "{'step': 9}" and len(said) == 3 and all("nebula-checkpoint[torch]" in line for line in said[1:])


def test_torch_may_be_forbidden_hidden_by_a_directory_or_come_later(run: Run, place: Any) -> None:
    code = """
        import os, sys
        import nebulaml as nm
        nm.init(sys.argv[1], 0, on_error="raise")
        os.mkdir("torch")
        sys.path.insert(0, "")
        for number, torch in enumerate((..., None)):
            if torch is None:
                sys.modules["torch"] = None
            with nm.Checkpoint(f"global_step{number}") as checkpoint:
                checkpoint.save("object", number)
                checkpoint.save_bytes("bytes", b"abc")
            print(checkpoint.load("object"))
        print(nm.get_latest_checkpoint().tag)
        from nebulaml._session import late
        os.mkdir("later")
        with open("later/torch.py", "w") as file:
            file.write("import types; UntypedStorage = Tensor = lambda size: None")
        sys.path.insert(0, "later")
        del sys.modules["torch"]
        sys.meta_path.append(object())  # Python passes over it
        import torch
        try:
            late.pickling
        except (ImportError, AttributeError) as failure:
            print("torch" in str(failure))  # this one is not enough, but it is asked
        sys.exit(3)
    """
    assert run("-c", textwrap.dedent(code), place.storage, code=3) == ["0", "1", "global_step1", "True"], "no error at the end"


def test_a_manager_of_plain_values_goes_on_after_sigkill(run: Run, place: Any) -> None:
    assert run("-c", NUMBERS + textwrap.dedent(MANAGER), place.storage, code=-9) in ([], ["None 0 0 True"])
    assert run("-c", NUMBERS + textwrap.dedent(MANAGER), place.storage) == [
        "(15, {'loss': 10.0}, 'text') 15 30 True", "[5, 15, 20] 5", "NebulaConfigError", "NebulaConfigError", "NebulaNotFound",
        "item 'state' needs __builtin__.object, w",
    ]  # fmt: skip


def test_commands_work_and_those_of_torch_say_so(run: Run, place: Any) -> None:
    run("-c", NUMBERS + textwrap.dedent(SESSION), place.storage)
    assert any("global_step4" in line for line in run("-m", "nebulaml", "list", "--path", place.storage))
    assert any("storage" in line for line in run("-m", "nebulaml", "plan", "--params", "7e9"))
    (said,) = run("-m", "nebulaml", "run", "--nnodes", "1", "x.py", code=2)
    assert "needs torch: pip install" in said
    said = "\n".join(run("-c", "import nebulaml.studio.collector, nebulaml.studio.fleet, nebulaml.studio.command; print('here')"))
    assert said == "here"
