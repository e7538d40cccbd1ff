"""Fixtures: the `nebula` command of the build, versions that C has written, and an emulator of Azure Blob Storage."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from store_servers import shared  # noqa: E402
from test_object_stores import STORES  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in tests/python/conftest.py, for the commands that a test interrupts


def find_built(name: str, variable: str) -> pathlib.Path:
    """Returns the program under test: from the environment, else from the newest build directory."""
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
    """Runs the command where no agent runs. Returns the finished process."""
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
def servers():
    """The servers of stores. They end with the tests."""
    return shared()


@pytest.fixture(scope="session")
def serve(servers):
    """Starts the server of a store of test_object_stores. Returns the variables that clients need."""
    return servers.variables


@pytest.fixture(scope="session")
def azurite(serve):
    """Returns the variables for an emulator of Azure Blob Storage with the container `training`."""
    return serve("azure")


def open_storage(kind, request, tmp_path, monkeypatch):
    if kind == "directory":
        return str(tmp_path / "other storage")
    servers = request.getfixturevalue("servers")
    for name, value in servers.variables(kind).items():
        monkeypatch.setenv(name, value)
    return servers.new_path(kind)


@pytest.fixture(params=["directory", pytest.param("azure", marks=pytest.mark.nightly)])
def storage(request, tmp_path, monkeypatch):
    """Returns an empty storage path: with NEBULA_TEST_NIGHTLY=1, also one in an object store."""
    return open_storage(request.param, request, tmp_path, monkeypatch)


EACH = ["directory", *(pytest.param(name, marks=pytest.mark.nightly) for name in STORES)]  # the C tests try each driver each time


@pytest.fixture(params=EACH)
def each_storage(request, tmp_path, monkeypatch):
    """Returns an empty storage path of each kind: with NEBULA_TEST_NIGHTLY=1, of every driver."""
    return open_storage(request.param, request, tmp_path, monkeypatch)
