"""A ``nebula status --serve`` process, which keeps what it has read of the storage from one look to the next."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from ..errors import NebulaUnavailable

__all__ = ["Looks"]

_SILENT_S = 300.0  # seconds without a byte of an answer; the drivers themselves repeat a request for 2 minutes


class Looks:
    """Asks for the status of one path. One thread asks; any thread may close. If the process has died, the next look starts another one."""

    def __init__(self, command: str, path: str) -> None:
        self._command = command
        self._path = path
        self._lock = threading.Lock()  # guards what follows
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._storage: dict[str, Any] = {}  # of the last answer; the asking thread's
        self._received = b""  # of the next line; the asking thread's

    def ask(self, on_progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Returns the status. Before the first one, calls on_progress about once a second with what is known so far.

        Raises NebulaUnavailable if the process ends or says nothing for a long time.
        """
        process = self._running()
        try:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            while "reading" in (answer := json.loads(self._line(process))):
                on_progress(answer)
            if answer["storage"].get("same"):
                answer["storage"] = self._storage
            self._storage = answer["storage"]
            return dict(answer)
        except (OSError, EOFError, ValueError) as failure:
            self._end()
            raise NebulaUnavailable(f"`nebula status` does not answer: {failure}") from failure
        except BaseException:
            self._end()  # the rest of its answer would be taken for the next one
            raise

    def close(self) -> None:
        """Ends the process, and with it a look that is under way."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()  # the asking thread may wait for its pipes

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise NebulaUnavailable("the studio ends")
            if self._process is None:
                # A URL can hold a secret, which a command line would show to all users of the machine. A session of its own: Ctrl-C must
                # reach only the studio.
                environment = os.environ | {"NEBULA_PERSISTENT_STORAGE_PATH": self._path, "NO_COLOR": "1"}
                try:
                    self._process = subprocess.Popen(
                        [self._command, "status", "--serve"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
                    )  # fmt: skip
                except OSError as failure:
                    raise NebulaUnavailable(f"`nebula status` does not start: {failure}") from failure
            return self._process

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        """Returns one line. It can have 40 MB."""
        assert process.stdout is not None
        answers = select.poll()  # select.select takes no descriptor above 1023
        answers.register(process.stdout, select.POLLIN)
        pieces = [self._received]
        while b"\n" not in pieces[-1]:
            if not answers.poll(_SILENT_S * 1000):
                raise EOFError(f"it has said nothing for {_SILENT_S:.0f} s")
            pieces.append(os.read(process.stdout.fileno(), 1 << 20))
            if not pieces[-1]:
                raise EOFError(f"it has ended with {process.wait(10)}")
        end, _, self._received = pieces.pop().partition(b"\n")
        return b"".join([*pieces, end])

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        self._received = b""
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
