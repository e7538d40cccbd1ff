"""MetricsLog: the values of each step. A step has one entry, even if it was computed several times.

It is a file of JSON lines; each call adds one line. A resume goes back to the step of its checkpoint: ``rewind`` adds a line for that, and
readers then ignore earlier lines of later steps. A killed process leaves at most one incomplete line, which readers ignore.
"""

from __future__ import annotations

import json
import logging
import numbers
import os
import re
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from .._session import config, ranks
from ..errors import NebulaConfigError, NebulaNotFound

__all__ = ["MetricsLog", "plain"]

log = logging.getLogger("nebulaml")

NAME = "metrics.jsonl"
_URL = re.compile(r"(az|abfss?|s3|gs|https?):/")  # pathlib leaves one slash of a URL


class MetricsLog:
    """The metrics of one training, in one file. Rank 0 writes; on other ranks ``log`` and ``rewind`` do nothing.

    path: the file, or a directory, in which the file is ``metrics.jsonl``. A failure to write is logged once and never raised. A URL of an
    object store raises NebulaConfigError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fspath(path)
        if _URL.match(os.fsdecode(text)):
            shown = os.fsdecode(text).partition("?")[0]  # the rest can be a secret
            raise NebulaConfigError(f"a metrics log is no part of the storage, and {shown} is a URL: give a path of this machine")
        local = config.local_path("the path of a metrics log", text)
        is_folder = os.path.isdir(local) or (isinstance(text, str) and text.endswith("/"))
        self.path = os.path.join(local, NAME) if is_folder else local
        self._writer = secrets.token_hex(4)  # distinguishes the lines of this object from those of an older process that still runs
        self._lock = threading.Lock()  # guards all below
        self._fd: int | None = None
        self._is_torn = False  # the file may end within a line
        self._has_warned = False

    def __repr__(self) -> str:
        return f"<nebulaml.MetricsLog {self.path}>"

    def log(self, step: int, **values: Any) -> None:
        """Adds the values of a step: numbers, strings, tensors of one number, or other values that JSON holds.

        A second call for a step adds values, or replaces those of the same name.
        """
        _check_step(step)
        self._append({"step": step, "by": self._writer, "values": {name: plain(name, value) for name, value in values.items()}})

    def rewind(self, step: int) -> None:
        """Records that training continues after this step. Readers then ignore earlier lines of later steps, and all lines that another
        process writes from now on.
        """
        _check_step(step)
        self._append({"rewind": step, "by": self._writer})

    def read(self) -> list[dict[str, Any]]:
        """Returns one dict for each step, in order: ``{"step": 7, "loss": 0.5}``. Any rank may call it, also while another process writes.

        Returns [] if there is no file. Raises NebulaNotFound if it cannot be read.
        """
        try:
            with open(self.path, "rb", opener=_opened) as file:
                return _read(file.read())
        except FileNotFoundError:
            return []
        except OSError as failure:
            raise NebulaNotFound(f"the metrics log {self.path} cannot be read: {failure.strerror}") from failure

    def close(self) -> None:
        """Closes the file. Another ``log`` opens it again."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _append(self, document: dict[str, Any]) -> None:
        if ranks.current().rank != 0:
            return
        line = json.dumps(document, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            try:
                if self._fd is None:
                    self._open()
                data = b"\n" + line if self._is_torn else line
                self._is_torn = True
                self._is_torn = os.write(self._fd, data) < len(data)  # one call: the line is whole or torn
                if not self._is_torn:
                    return
                reason = "the file system is full"
            except OSError as failure:
                reason = failure.strerror or repr(failure)
        if not self._has_warned:
            self._has_warned = True
            log.warning("nebula: the metrics log %s cannot be written: %s. Training goes on without it.", self.path, reason)

    def _open(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._fd = _opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self._fd).st_size
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"


def _opened(path: str, flags: int) -> int:
    """Opens the file. If it is a FIFO, a write fails when it is full: otherwise it would hold the training."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)


def _lines(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        try:
            found = json.loads(line)
            whole = isinstance(found, dict) and isinstance(found["by"], str) and isinstance(found.get("values", {}), dict)
            if whole and isinstance(found["rewind" if "rewind" in found else "step"], int):
                yield found
        except (ValueError, KeyError, RecursionError):  # a part of a line, or a line of another format
            continue


def _read(content: bytes) -> list[dict[str, Any]]:
    steps: dict[int, tuple[str, dict[str, Any]]] = {}  # by step: the writer of its last line, and the values
    writers: set[str] = set()
    ended: set[str] = set()
    for line in _lines(content):
        writer = line["by"]
        if writer in ended:
            continue
        if "rewind" in line:
            steps = {step: found for step, found in steps.items() if step <= line["rewind"]}
            ended |= writers - {writer}
            writers = {writer}
            continue
        writers.add(writer)
        step, values = line["step"], line.get("values", {})
        before = steps.get(step)
        steps[step] = (writer, {**before[1], **values} if before is not None and before[0] == writer else values)
    return [{"step": step, **steps[step][1]} for step in sorted(steps)]


def plain(name: str, value: Any) -> Any:
    """Returns a value as JSON holds it. Raises NebulaConfigError for a value that JSON cannot hold."""
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:  # a tensor, or an array, of one number
        value = value.item()
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, int, float)):
        value = float(value)
    try:
        json.dumps(value)
    except (TypeError, ValueError) as failure:
        raise NebulaConfigError(f"the value of {name!r} must be a JSON value, not {value!r:.100} ({failure})") from failure
    return value


def _check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, numbers.Integral):
        raise NebulaConfigError(f"a step is a whole number, not {step!r}")
