"""The `nebula` command as it is built, versions that C wrote, and an emulator of Azure Blob Storage."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import uuid

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from test_azure import SCRIPT, make_container  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]


def find_built(name: str, variable: str) -> pathlib.Path:
    """The program under test: from the environment, else the youngest build directory's."""
    if os.environ.get(variable):
        return pathlib.Path(os.environ[variable])
    where = "src" if name == "nebula" else "tests/unit/cli"
    found = [path for pattern in ("build*", "build/*") for path in ROOT.glob(f"{pattern}/{where}/{name}")]
    if not found:
        pytest.skip(f"{name} is not built: meson setup build -Dtests=true && ninja -C build")
    return max(found, key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="session")
def nebula() -> pathlib.Path:
    return find_built("nebula", "NEBULA_BIN")


@pytest.fixture(scope="session")
def maker(nebula) -> pathlib.Path:
    beside = nebula.parent.parent / "tests/unit/cli/make_version"
    return beside if beside.exists() else find_built("make_version", "NEBULA_MAKE_VERSION")


@pytest.fixture
def run(nebula, tmp_path):
    """Runs the command without any agent around; returns the finished process."""
    runtime = tmp_path / "runtime"

    def call(*arguments, cwd=tmp_path, **extra):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("NEBULA_")}
        environment |= {"NEBULA_RUNTIME_DIR": str(runtime), "NEBULA_MEMORY_DIR": str(tmp_path / "memory")}
        return subprocess.run(
            [nebula, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            env=environment | extra,
            timeout=60,
        )

    return call


@pytest.fixture
def make(maker, tmp_path):
    def call(tag, *arguments, store=tmp_path / "store"):
        subprocess.run([maker, store, tag, *map(str, arguments)], check=True, timeout=60)
        return store

    return call


@pytest.fixture(scope="session")
def azurite():
    """The variables that lead to an emulator with the container `training`; it ends with the tests."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not here, which installs the emulator Azurite")
    emulator = subprocess.Popen(
        [SCRIPT, "run", "sh", "-c", 'echo "$AZURE_STORAGE_CONNECTION_STRING"; exec cat'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    variables = {"AZURE_STORAGE_CONNECTION_STRING": emulator.stdout.readline().strip()}
    assert variables["AZURE_STORAGE_CONNECTION_STRING"], "the emulator does not start"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*next(iter(variables.items())))
        make_container("training")
    yield variables
    emulator.stdin.close()
    emulator.wait(60)


@pytest.fixture(params=["directory", "azure"])
def storage(request, tmp_path, monkeypatch):
    """A storage path that holds nothing yet, of each kind."""
    if request.param == "directory":
        return str(tmp_path / "other storage")
    for name, value in request.getfixturevalue("azurite").items():
        monkeypatch.setenv(name, value)
    return f"az://devstoreaccount1/training/{uuid.uuid4().hex[:8]}"
