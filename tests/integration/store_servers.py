"""The servers of test_object_stores.STORES. Each starts when a test needs it first."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest
from test_object_stores import STORES, prepare

ROOT = Path(__file__).resolve().parents[2]


class Servers:
    """The running servers. close() ends them."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[subprocess.Popen, dict[str, str]]] = {}

    def variables(self, name: str) -> dict[str, str]:
        """Starts the server of a store, unless it runs. Returns the environment variables that clients need."""
        if name not in self._running:
            store = STORES[name]
            if shutil.which(store.needs) is None:
                pytest.skip(f"{store.needs} is not here, which the server takes")
            command = [ROOT / store.server[0], *store.server[1:], "sh", "-c", "env -0; echo; exec cat"]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            found = dict(
                one.split("=", 1) for one in server.stdout.readline().decode().rstrip("\n").split("\0") if "=" in one
            )
            assert found, f"the server of {name} does not start"
            new = {key: value for key, value in found.items() if os.environ.get(key) != value}
            self._running[name] = server, new
            with pytest.MonkeyPatch.context() as patch:
                for key, value in new.items():
                    patch.setenv(key, value)
                prepare(name)
        return self._running[name][1]

    def new_path(self, name: str) -> str:
        """Returns an empty storage path in a store."""
        return f"{STORES[name].path.rsplit('/', 1)[0]}/{uuid.uuid4().hex[:8]}"

    def process(self, name: str) -> int:
        """Returns the process of a store's server, which its script has started first."""
        script = self._running[name][0].pid
        return int(Path(f"/proc/{script}/task/{script}/children").read_text().split()[0])

    def close(self) -> None:
        for server, _ in self._running.values():
            server.stdin.close()
            server.wait(60)


@functools.cache
def shared() -> Servers:
    """Returns the servers of this process. They end with it."""
    made = Servers()
    atexit.register(made.close)
    return made
