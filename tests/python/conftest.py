"""Each test has its own agent, memory tier and storage, and all of them are removed afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fork_server
import nebulaml
import processes
import pytest
from hypothesis import settings
from nebulaml._session import pulse
from ports import held_port
from processes import stop
from trainers import IMPORTS
from waiting import until

# The same examples each time, so that the suite says something of the change and not of its luck; NEBULA_TEST_NIGHTLY=1
# looks for new ones.
settings.register_profile("suite", derandomize=True)
if not os.environ.get("NEBULA_TEST_NIGHTLY"):
    settings.load_profile("suite")

# A shell that starts the suite in the background has it ignore SIGINT, and nohup SIGHUP. The trainers would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Place:
    """The directories of one test's Nebula."""

    def __init__(self, root: Path, memory: Path) -> None:
        self.root, self.memory = root, memory
        self.runtime, self.storage = root / "run", root / "storage"
        self._held: socket.socket | None = None

    @property
    def port(self) -> int:
        """A port for this test alone, where rank 0 of its trainers can listen."""
        if self._held is None:
            self._held = held_port()
        return int(self._held.getsockname()[1])

    def close(self) -> None:
        for pid in self.agents():
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
                os.kill(pid, signal.SIGKILL)
        if self._held is not None:
            self._held.close()
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def images(self) -> Iterator[os.stat_result]:
        """Yields the state of each image in memory. The agent may remove one meanwhile."""
        for path in self.memory.glob("*.img"):
            with contextlib.suppress(FileNotFoundError):
                yield path.stat()

    def memory_bytes(self) -> int:
        return sum(image.st_blocks * 512 for image in self.images())

    def agents(self) -> list[int]:
        return processes.agents(lambda variables: f"NEBULA_RUNTIME_DIR={self.runtime}" in variables)

    def kill_agent(self, wait: bool = True) -> None:
        pids = self.agents()
        assert pids, "no agent is running"
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if wait:
            until(lambda: not set(pids) & set(self.agents()), 60, "the end of the agent")  # a successor may be there already

    def lose_memory(self) -> None:
        """The agent dies, and memory with it. The agent stops first: if a thread of this process starts the next one at once, that finds nothing to adopt."""
        for pid in self.agents():
            stop(pid)
        shutil.rmtree(self.memory)
        self.kill_agent()

    def kill_all(self, *trainers: subprocess.Popen[str] | fork_server.Trainer) -> None:
        """Kills trainers and agents. The agents stop first: so they persist nothing that the trainers leave, and no trainer starts another one."""
        for pid in self.agents():
            stop(pid)
        for trainer in trainers:
            trainer.kill()
            trainer.wait(timeout=60)
            trainer.stdout.close()
        self.kill_agent()

    def trainer(self, code: str, *arguments: object, stdin: bool = False, prefix: Sequence[str] = (), modules: tuple[str, ...] = ("torch",)) -> subprocess.Popen[str] | fork_server.Trainer:
        """A trainer process that runs this code; `say(...)` in it is a line that the test can read. With a prefix, it is an interpreter of its own.

        modules: what its server has imported.
        """
        text = IMPORTS + "import os, signal, sys, time\n"
        text += "def say(*words): os.write(1, (' '.join(map(str, words)) + chr(10)).encode())\n"  # whole lines only
        text += textwrap.dedent(code)
        if not prefix:
            return fork_server.start(text, *arguments, cwd=self.root, stdin=subprocess.PIPE if stdin else None, modules=modules)
        command = [*prefix, sys.executable, "-W", "ignore", "-c", text, *map(str, arguments)]
        source = subprocess.PIPE if stdin else subprocess.DEVNULL
        return subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, text=True, cwd=self.root)

    def run(self, code: str, *arguments: object, returncode: int = 0) -> str:
        process = self.trainer(code, *arguments)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == returncode, output
        return output


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    memory = Path(tempfile.mkdtemp(prefix="nebula-test-", dir=parent))
    here = Place(Path(tempfile.mkdtemp(prefix="nb-")), memory)  # short: it holds a socket
    for name in list(os.environ):
        if name.startswith("NEBULA_") and name not in ("NEBULA_AGENT_PATH",):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NEBULA_RUNTIME_DIR", str(here.runtime))
    monkeypatch.setenv("NEBULA_MEMORY_DIR", str(memory))
    monkeypatch.setenv("NEBULA_AGENT_LINGER", "300")
    monkeypatch.setenv("NEBULA_OUTPUT_DIR", str(here.root / "output"))
    package = str(Path(nebulaml.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])))
    nebulaml._shutdown()
    pulse._session = None  # of a session that an earlier test has never closed
    pulse._sessions.clear()
    try:
        yield here
    finally:
        nebulaml._shutdown()
        here.close()


@pytest.fixture
def nm(place: Place) -> object:
    """Returns the package, initialised with this test's storage. Every version is persisted at once."""
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    return nebulaml


@pytest.fixture
def through(nm: object) -> Callable[[object], object]:
    """Saves an object, commits, and loads it again through the newest checkpoint."""

    def run(obj: object) -> object:
        checkpoint = nebulaml.Checkpoint()
        checkpoint.save("object.pt", obj)
        assert checkpoint.commit()
        found = nebulaml.get_latest_checkpoint()
        assert found is not None and found.tag == checkpoint.tag
        return found.load("object.pt")

    return run
