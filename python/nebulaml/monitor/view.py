"""``nebulaml.watch()``: a small live view of a job in a notebook, or lines on a terminal."""

from __future__ import annotations

import datetime
import html
import os
import sys
import threading
from typing import Any

from .. import api
from .._session import config, locate
from ..errors import NebulaConfigError, NebulaError, NebulaUnavailable
from ..studio.looks import Looks

__all__ = ["View", "watch"]

SHOWN = 8  # versions
LEAST_S = 0.2
_COLOURS = {"fine": "#176f3d", "at risk": "#8a5300", "broken": "#b3261e"}


def watch(path: str | os.PathLike[str] | None = None, every: float | str = 2.0) -> View:
    """Shows the verdict on a job, its newest checkpoint, what waits for storage, and the newest versions, and keeps that up to date.

    In a notebook it is a table below the cell. Elsewhere it is a line that is printed when something has changed.

    path: a storage path; None: that of ``init()``. every: seconds between two looks; an object store is listed each time. The view ends with
    ``stop()``, or with the program. Raises NebulaConfigError if no path is known, NebulaUnavailable if the command does not answer.
    """
    found = config.clean_path(path) if path is not None else api.persist_path()
    if found is None:
        raise NebulaConfigError("no storage path is known: give it to watch(), or to init()")
    return View(found, max(config.parse_seconds("every", every), LEAST_S))


class View:
    """A live view. Any thread may call."""

    def __init__(self, path: str, every_s: float) -> None:
        command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
        if command is None:
            raise NebulaUnavailable("the `nebula` command of this installation is not found; install the package again")
        self._path, self._every_s = path, every_s
        self._looks = Looks(command, path)
        self._ended = threading.Event()
        self._lock = threading.Lock()  # of looks, so that a stop shows what is newer than the last one
        self._said = self._failed = ""  # what was said last, and why the last look failed
        self._page = ""  # of the last look that did not
        self._display = _display()
        self._handle: Any = None
        self.refresh()
        self._thread = threading.Thread(target=self._run, name="nebula-watch", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Looks now."""
        with self._lock:
            status = self._looks.ask(lambda status: None)
            self._failed = ""
            if self._display is None:
                line = _line(status)
                if line != self._said:
                    print(line, flush=True)
                self._said = line
                return
            self._page = _page(self._path, status)
            content = _Html(self._page, _line(status))
            if self._handle is None:
                self._handle = self._display(content, display_id=True)
            else:
                self._handle.update(content)

    def stop(self) -> None:
        """Looks once more, and ends the view. The last picture stays."""
        self._ended.set()
        self._thread.join()
        try:
            self.refresh()
        finally:
            self._looks.close()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self.refresh()
            except NebulaError as failure:  # the next look may succeed
                self._fail(str(failure))

    def _fail(self, reason: str) -> None:
        """Says once that what is shown is old."""
        with self._lock:
            if reason == self._failed:
                return
            self._failed, self._said = reason, ""
            print(f"nebula: {reason}", file=sys.stderr, flush=True)
            if self._handle is not None:
                now = datetime.datetime.now().isoformat(" ", "seconds")
                head = f"<b style='color:{_COLOURS['broken']}'>not known since {now}</b><br>{html.escape(_text(reason))}"
                old = f"{head}<br>before that:{self._page}"
                self._handle.update(_Html(old, f"not known since {now}: {_text(reason)}"))


class _Html:
    """What a notebook shows: HTML, or text where there is none."""

    def __init__(self, page: str, line: str) -> None:
        self._page, self._line = page, line

    def _repr_html_(self) -> str:
        return self._page

    def __repr__(self) -> str:
        return self._line


def _display() -> Any:
    """Returns IPython's display in a notebook, else None."""
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell else None
    if running is None or not hasattr(running, "kernel"):
        return None
    from IPython.display import display

    return display


def _jobs(status: dict[str, Any]) -> list[dict[str, Any]]:
    path = status.get("path")
    return [one for one in status.get("jobs", []) if one["path"] == path]


def _worst(status: dict[str, Any]) -> dict[str, Any] | None:
    verdicts = [one["verdict"] for one in _jobs(status) if one.get("verdict")]
    return max(verdicts, key=lambda one: list(_COLOURS).index(one["state"]), default=None)


def _verdict(status: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the state, the reason, and what to do."""
    verdict = _worst(status)
    if verdict is None:
        error = status.get("storage", {}).get("error", {})
        return ("no job here" if status.get("running") else "no agent runs"), error.get("message", ""), ""
    return verdict["state"], verdict.get("reason", ""), verdict.get("cure", "")


def _line(status: dict[str, Any]) -> str:
    state, reason, _ = _verdict(status)
    newest = status.get("storage", {}).get("newest")
    return f"{state}{f': {_text(reason)}' if reason else ''}; newest: {_text(newest) if newest else 'none yet'}"


def _text(text: str) -> str:
    """Without characters that show nothing or turn others around."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _cell(text: str, tag: str = "td") -> str:
    return f"<{tag} style='text-align:left'>{html.escape(_text(text))}</{tag}>"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1023.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _page(path: str, status: dict[str, Any]) -> str:
    state, reason, cure = _verdict(status)
    storage = status.get("storage", {})
    queue = [one for one in status.get("queue", []) if one["path"] == status.get("path")]
    parts = [f"<b style='color:{_COLOURS.get(state, 'inherit')}'>{html.escape(state)}</b>"]
    parts += [html.escape(_text(one)) for one in (reason, f"What to do: {cure}" if cure else "") if one]
    waits = f"{len(queue)} versions wait for storage, {_size(sum(one['size'] for one in queue))}" if queue else "nothing waits for storage"
    newest = storage.get("newest")
    parts += [f"newest: <b>{html.escape(_text(newest)) if newest else 'none yet'}</b>, {waits}"]
    rows = [f"<tr>{''.join(map(_cell, _cells(one)))}</tr>" for one in reversed(storage.get("versions", [])[-SHOWN:])]
    head = "<tr>" + "".join(_cell(one, "th") for one in ("Tag", "Step", "State", "Size", "Committed", "Where")) + "</tr>"
    table = f"<table aria-label='Newest checkpoints'><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""
    return f"<div><code>{html.escape(config.shown(path))}</code><br>{'<br>'.join(parts)}{table}</div>"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    step = str(row["step"]) if row["step"] >= 0 else "-"
    return row["tag"], step, row["reason"] or row["state"], _size(row["size"]), _time(row), " + ".join(row["where"])


def _time(row: dict[str, Any]) -> str:
    at = row["committed_at"]
    return datetime.datetime.fromtimestamp(at).isoformat(" ", "seconds") if at else "-"
