"""The C example, killed and resumed, with a real agent."""

import os
import pathlib
import shutil
import signal
import subprocess
import uuid

import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZE, STEPS, SAVE_EVERY, CRASH_AT = 96, 400, 50, 230


def build_directory():
    for directory in (os.environ.get("NEBULA_BUILD_DIR"), ROOT / "build"):
        if directory and (pathlib.Path(directory) / "examples" / "heat").exists():
            return pathlib.Path(directory)
    pytest.skip("the C examples are not built: set NEBULA_BUILD_DIR")


@pytest.fixture
def node(tmp_path):
    """A separate node: an environment in which no other agent is found. Its agent is stopped at the end."""
    build = build_directory()
    name = uuid.uuid4().hex[:8]
    runtime, memory = pathlib.Path(f"/tmp/nb-{name}"), pathlib.Path(f"/dev/shm/nb-{name}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEBULA_")} | {
        "NEBULA_RUNTIME_DIR": str(runtime),
        "NEBULA_MEMORY_DIR": str(memory),
        "NEBULA_AGENT_PATH": str(build / "src" / "nebula"),
    }

    def heat(path, *arguments):
        program = [build / "examples" / "heat", "--path", path, "--size", str(SIZE), "--steps", str(STEPS)]
        return subprocess.run(
            [*program, "--save-every", str(SAVE_EVERY), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    heat.environment, heat.memory, heat.storage = environment, memory, tmp_path
    yield heat
    subprocess.run(
        [build / "src" / "nebula", "stop", "--now", "--yes"], env=environment, capture_output=True, timeout=60
    )
    shutil.rmtree(runtime, ignore_errors=True)
    shutil.rmtree(memory, ignore_errors=True)


def end_of(result):
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def kill_agent(node):
    """SIGKILL for the process whose environment names this node's own directory."""
    for entry in pathlib.Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if f"NEBULA_RUNTIME_DIR={node.environment['NEBULA_RUNTIME_DIR']}".encode() in environment.split(b"\0"):
            os.kill(int(entry.name), signal.SIGKILL)


def test_a_killed_run_ends_as_one_that_was_not(node):
    whole = node(str(node.storage / "whole"))
    assert "starting from step 0" in whole.stdout
    killed = node(str(node.storage / "killed"), "--crash-at", str(CRASH_AT))
    assert killed.returncode == -signal.SIGKILL
    resumed = node(str(node.storage / "killed"))
    assert f"resuming from step {CRASH_AT // SAVE_EVERY * SAVE_EVERY}" in resumed.stdout
    assert end_of(resumed) == end_of(whole)


def test_the_file_is_a_dict_of_tensors(node):
    path = node.storage / "run"
    end_of(node(str(path)))
    for mmap in (False, True):
        for weights_only in (False, True):
            state = torch.load(path / f"step{STEPS}" / "plate.pt", mmap=mmap, weights_only=weights_only)
            assert list(state) == ["u", "step"]
            assert state["u"].shape == (SIZE, SIZE) and state["u"].dtype == torch.float64
            assert state["step"].item() == STEPS
            assert (state["u"][0] == 100).all() and 0 < state["u"][1, SIZE // 2] < 100


def test_the_agent_killed_too_costs_nothing_that_was_committed(node):
    whole = node(str(node.storage / "whole"))
    killed = node(str(node.storage / "killed"), "--crash-at", str(CRASH_AT))
    assert killed.returncode == -signal.SIGKILL
    kill_agent(node)
    resumed = node(str(node.storage / "killed"))
    assert f"resuming from step {CRASH_AT // SAVE_EVERY * SAVE_EVERY}" in resumed.stdout
    assert end_of(resumed) == end_of(whole)


def test_storage_alone_is_enough(node):
    path = str(node.storage / "run")
    first = end_of(node(path))
    kill_agent(node)
    shutil.rmtree(node.memory)  # as a reboot does
    again = node(path)
    assert f"resuming from step {STEPS}" in again.stdout
    assert end_of(again) == first


def test_a_program_built_against_the_installed_library_finds_its_agent(node, tmp_path):
    build = build_directory()
    meson, pkg_config = shutil.which("meson"), shutil.which("pkg-config")
    if not meson or not pkg_config:
        pytest.skip("needs meson and pkg-config")
    root = tmp_path / "root"
    subprocess.run([meson, "install", "-C", build, "--no-rebuild", "--destdir", root], check=True, capture_output=True)
    (described,) = root.rglob("nebula.pc")
    (prefix,) = (path.parent.parent for path in root.rglob("include/nebula.h"))
    flags = subprocess.run(
        [pkg_config, "--cflags", "--libs", f"--define-variable=prefix={prefix}", described],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    library = described.parent.parent
    subprocess.run(
        ["cc", "-O2", ROOT / "examples" / "heat.c", *flags, f"-Wl,-rpath,{library}", "-o", tmp_path / "heat"], check=True
    )
    environment = {key: value for key, value in node.environment.items() if key != "NEBULA_AGENT_PATH"}
    ran = subprocess.run(
        [tmp_path / "heat", "--path", tmp_path / "storage", "--size", "64", "--steps", "100"],
        env=environment | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    stopped = subprocess.run([prefix / "bin" / "nebula", "stop"], env=environment, capture_output=True, text=True, timeout=60)
    assert "has ended" in stopped.stdout
    assert list((tmp_path / "storage").rglob("manifest-*.json"))
