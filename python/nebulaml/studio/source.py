"""Gets the data of the page from the `nebula` command. This module reads no format of storage or memory itself."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .. import _nebula
from .._session import about, config, documents, locate, notices
from ..elastic.cells import CellUnreachable
from ..elastic.store_cells import StoreProcess
from ..errors import NebulaConfigError, NebulaError, NebulaUnavailable, from_status
from .looks import Looks
from .works import Work

__all__ = ["Source", "shell_word"]

ASK_S = 120.0  # for commands that only list
WORK_S = 3600.0  # for commands that read every byte
HISTORY = "checkpointHistories.csv"
SETTINGS = ".nebula/settings-"
NUMBERS = ("size_bytes", "blocked_ms", "copy_ms", "begun", "captured", "committed", "durable", "persist_seconds", "persist_mib_per_s")
ADDED = ("stopped", "stepped", "read", "read_step", "written_bytes", "read_tier")  # columns that the header of an older file may lack
_GUARDED = re.compile("'[' ]*[=+\\-@\uff1d\uff0b\uff0d\uff20]")


class Source:
    """One storage path, and the agent of this machine. Any thread may ask."""

    def __init__(self, path: str, history: str | None = None, is_one_of_several: bool = False) -> None:
        """is_one_of_several: the variables that move the history are of another job, or of none."""
        command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
        if command is None:
            raise NebulaUnavailable("the `nebula` command of this installation is not found; install the package again")
        self.command = command
        self.path = path
        self.is_local = not config.is_url(path)
        self._history = history
        self._is_one_of_several = is_one_of_several
        self._store = StoreProcess(path)
        self._looks = Looks(command, path)
        self._metrics: dict[tuple[str, int], dict[str, float]] = {}
        self._settings: dict[tuple[str, int], dict[str, Any]] = {}  # by key and time

    def close(self) -> None:
        self._looks.close()
        self._store.close()

    @property
    def shown_path(self) -> str:
        """The path without the query of a URL, which can be a secret."""
        return config.shown(self.path)

    def _environment(self) -> dict[str, str]:
        # A URL can hold a secret, which a command line would show to all users of the machine.
        return os.environ | {"NEBULA_PERSISTENT_STORAGE_PATH": self.path, "NO_COLOR": "1", "NEBULA_PYTHON": sys.executable}

    def ask(self, *arguments: str, limit_s: float = ASK_S) -> tuple[int, Any]:
        """Runs `nebula ARGUMENTS --json`. Returns its exit code and its answer. If the answer is an error, raises it."""
        try:
            done = subprocess.run(
                [self.command, *arguments], env=self._environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, cwd="/"
            )
        except subprocess.TimeoutExpired as failure:
            raise NebulaUnavailable(f"`nebula {arguments[0]}` has not ended after {limit_s:.0f} s") from failure
        except OSError as failure:
            raise NebulaUnavailable(f"`nebula {arguments[0]}` does not start: {failure}") from failure
        return done.returncode, _answer(arguments[0], done.returncode, done.stdout, done.stderr.decode(errors="replace"))

    def work(self, work: Work, *arguments: str) -> tuple[int, Any]:
        """The same, with the progress of the command, and until someone stops it."""

        def start() -> subprocess.Popen[str]:
            # A session of its own: Ctrl-C must reach only the studio.
            return subprocess.Popen(
                [self.command, *arguments], env=self._environment() | {"NEBULA_PROGRESS": "json"}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", text=True, errors="replace", start_new_session=True,
            )  # fmt: skip

        code, output, said = work.run(start)
        return code, _answer(arguments[0], code, output, said)

    def status(self, on_progress: Callable[[dict[str, Any]], None] = lambda status: None) -> dict[str, Any]:
        """Returns the agent, its jobs, sessions, queue and history, and the versions in memory and storage.

        The first answer for a bucket with 100,000 versions takes a minute or more. Until then, on_progress gets a status about once a
        second, with the newest versions so far.
        """
        return self._looks.ask(on_progress)

    def inspect(self, tag: str) -> dict[str, Any]:
        """Returns files, ranks, sizes and times of one version."""
        answer: dict[str, Any] = self.ask("inspect", "--json", "--", tag)[1]
        return answer

    def records(self, tag: str, name: str) -> dict[str, Any]:
        """Returns the records inside one torch file."""
        answer: dict[str, Any] = self.ask("inspect", "--json", "--", tag, name)[1]
        return answer

    def verify(self, work: Work, tag: str) -> dict[str, Any]:
        """Reads every byte of a version, and returns the result."""
        code, answer = self.work(work, "verify", "--json", "--", tag)
        return {"ok": code == 0, "answer": answer}

    def diff(self, work: Work, tag: str, other: str) -> dict[str, Any]:
        """Returns the tensors of two versions that differ."""
        answer: dict[str, Any] = self.work(work, "diff", "--json", "--", tag, other)[1]
        return answer

    def copy(self, work: Work, tag: str, to: str) -> dict[str, Any]:
        """Copies a version to another storage path."""
        answer: dict[str, Any] = self.work(work, "copy", "--json", "--tag", tag, "--", self.path, to)[1]
        return answer

    def export(self, work: Work, tag: str, to: str, config: str, dtype: str) -> dict[str, Any]:
        """Writes a Hugging Face directory. config, dtype: "" for none."""
        options = [*([f"--config={config}"] if config else []), *([f"--dtype={dtype}"] if dtype else [])]
        answer: dict[str, Any] = self.work(work, "restore", "--json", f"--hf={to}", *options, "--", tag)[1]
        return answer

    def prune_preview(self, keep_last: int | None, abandoned: bool) -> dict[str, Any]:
        """Returns the versions that `nebula prune` would remove by these rules, and those that stay."""
        if not keep_last and not abandoned:
            raise NebulaConfigError("give keep_last, or ask to remove abandoned versions")
        rules = ["--keep-last", str(keep_last)] if keep_last else []
        rules += ["--abandoned"] if abandoned else []
        answer: dict[str, Any] = self.ask("prune", *rules, "--json")[1]
        return answer

    def prune(self, work: Work, versions: list[tuple[str, int]]) -> list[dict[str, Any]]:
        """Removes these versions, one by one. Each is a tag and an entry of its log, which the caller has seen in a preview.

        A version that was written again since then stays. Each result gives the reason if the version stays.
        """
        results = []
        for i, (tag, entry) in enumerate(versions):
            work.report(i, len(versions))
            reason = ""
            try:
                self.work(work, "prune", "--yes", "--json", "--tag", tag, "--entry", str(entry))
            except NebulaError as failure:
                reason = str(failure)
            results.append({"tag": tag, "removed": not reason, "reason": reason})
        return results

    def flush(self, tag: str) -> Any:
        """Makes a version in memory durable."""
        return self.ask("flush", "--json", "--timeout", "600", "--", tag, limit_s=WORK_S)[1]

    def save_now(self) -> None:
        """Asks a job that saves with a Manager to save at its next step."""
        notices.ask_to_save(self.path)

    def pin(self, tag: str, reason: str) -> None:
        self.ask("pin", "--early", "--json", *([f"--reason={reason}"] if reason else []), "--", tag)

    def unpin(self, tag: str) -> None:
        self.ask("unpin", "--json", "--", tag)

    def doctor(self) -> list[dict[str, Any]]:
        """Returns the checks of `nebula doctor`."""
        checks: list[dict[str, Any]] = self.ask("doctor", "--json")[1]["checks"]
        return checks

    def nodes(self) -> list[dict[str, Any]]:
        """Returns name and time of the nodes whose agents have announced themselves in storage."""
        prefix = ".nebula/nodes/"
        try:
            entries = self._store.ask(do="list", prefix=prefix)["entries"]
        except (NebulaError, CellUnreachable):
            return []
        return [
            {"node": one["key"][len(prefix) :].removesuffix(".json"), "since": one["time_ns"] / 1e9}
            for one in entries
            if one["key"].endswith(".json")
        ]

    def settings(self) -> list[dict[str, Any]]:
        """Returns the settings that jobs gave to init(), which storage has. []: it does not answer, or has none."""
        try:
            entries = self._store.ask(do="list", prefix=SETTINGS)["entries"]
        except (NebulaError, CellUnreachable):
            return list(self._settings.values())
        found = {}
        for key, stamp in ((one["key"], (one["key"], one["time_ns"])) for one in entries):
            with contextlib.suppress(NebulaError, CellUnreachable, ValueError):
                found[stamp] = self._settings.get(stamp) or documents.parse(self._store.ask(do="get", key=key)["value"])
        self._settings = found
        return list(found.values())

    def knows_metrics(self, tag: str, sequence: int) -> bool:
        return (tag, sequence) in self._metrics

    def metrics(self, tag: str, sequence: int, entry: int | None) -> dict[str, float | None]:
        """Returns the metrics of a durable version; {}: it has none. They are kept, because a version does not change.

        Raises NebulaUnavailable if storage does not answer.
        """
        key = (tag, sequence)
        if key not in self._metrics:
            try:
                self._metrics[key] = self._read_metrics(tag, entry)
            except CellUnreachable as failure:
                raise NebulaUnavailable(str(failure)) from failure
            except NebulaError:
                self._metrics[key] = {}
        return {name: value if math.isfinite(value) else None for name, value in self._metrics[key].items()}

    def _read_metrics(self, tag: str, entry: int | None) -> dict[str, float]:
        """The file beside a tag that was written again may be that of the first writing: only the manifest says which one counts."""
        if entry != 1:
            found: dict[str, float] = self.inspect(tag).get("metrics") or {}
            return {name: math.nan if value is None else value for name, value in found.items()}
        value = self._store.ask(do="get", key=f"{_nebula.encode_name(tag)}/{about.FILE}")["value"]
        return about.decode(value.encode()).metrics

    def history(self) -> list[dict[str, Any]]:
        """Returns the rows of checkpointHistories.csv, oldest first. []: there is no such file."""
        try:
            with open(self.history_file(), encoding="utf-8", errors="replace", newline="", opener=_without_wait) as opened:
                return _rows(opened)
        except OSError:
            return []

    def history_file(self) -> str:
        """Returns the absolute path of the first history that exists, or else of the first place for one; "": there is no place."""
        folders = [os.environ.get("NEBULA_OUTPUT_DIR"), "outputs/nebula" if os.environ.get("AZUREML_RUN_ID") else None]
        folders = [] if self._is_one_of_several else folders
        folders += [os.path.join(config.without_scheme(self.path), ".nebula")] if self.is_local else []
        files = [os.path.abspath(os.path.join(folder, HISTORY)) for folder in folders if folder]
        if self._history:
            files = [os.path.abspath(self._history if self._history.endswith(".csv") else os.path.join(self._history, HISTORY))]
        return next((file for file in files if os.path.exists(file)), files[0] if files else "")

    def tensors(self, tag: str, name: str) -> dict[str, Any]:
        """Returns dtype, shape, norm, NaN and infinity counts of the tensors of one file. The command runs no code of the file."""
        answer: dict[str, Any] = self.ask("inspect", "--tensors", "--json", "--", tag, name, limit_s=WORK_S)[1]
        return answer

    def goodput(self) -> dict[str, Any] | None:
        """Returns the ledger of the job, from its history. None: there is none yet."""
        try:
            answer: dict[str, Any] = self.ask("goodput", "--json", "--history", self.history_file())[1]
        except NebulaError:
            return None
        return answer

    def restore_command(self, tag: str) -> str:
        """Returns a shell command that restores the tag, even if the tag holds quotes or control characters."""
        return f"nebula restore --path {shell_word(self.shown_path)} --to ./restored -- {shell_word(tag)}"


def _without_wait(path: str, flags: int) -> int:
    """Opens a file. A FIFO in its place would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _answer(name: str, code: int, output: str | bytes, said: str) -> Any:
    """Returns the last JSON value of a command's output. If it is an error, raises it."""
    try:
        answer = json.loads(output)
    except ValueError:
        try:
            answer = json.loads(output.splitlines()[-1])  # of a command that prints a line for each event
        except (ValueError, IndexError) as failure:
            raise NebulaUnavailable(f"`nebula {name}`: {said.strip() or f'it ended with {code}'}") from failure
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        raise from_status(str(error.get("status")), str(error.get("message")), 0, 0)
    return answer


def _rows(lines: Iterator[str]) -> list[dict[str, Any]]:
    """Returns the rows of a history. A line that was cut, by a full disk for example, is left out, and changes no other."""
    header = _fields(next(lines, ""))
    names = [*header, *(name for name in ADDED if name not in header)]  # an older agent's header lacks them
    rows = [_row(dict(zip(names, fields, strict=False))) for line in lines if len(fields := _fields(line)) >= len(header)]
    return [row for row in rows if row is not None]


def _fields(line: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error:
        return []


def _row(line: dict[str, str]) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = {name: _number(line[name]) for name in NUMBERS}
        row |= {"tag": _content(line["tag"]), "step": int(line["step"]), "sequence": int(line["sequence"]), "world": int(line["world"])}
        row |= {name: _number(line.get(name) or "0") for name in ("stopped", "read", "read_step")}
    except (KeyError, ValueError):
        return None  # another program has written the line, or it was cut
    return row | {"read_tier": line.get("read_tier") or "", "result": line.get("result") or "", "error": _content(line.get("error") or "")}


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def _content(cell: str) -> str:
    """Returns a text of the history without the apostrophe that keeps a spreadsheet from taking it for a formula (src/base/text.h)."""
    return cell[1:] if _GUARDED.match(cell) else cell


def shell_word(text: str) -> str:
    """Returns one word for bash. Characters that a terminal acts on, or that change the order of others, are written as escapes."""
    if all(one.isprintable() and one.isascii() for one in text):
        return shlex.quote(text)
    return "$'" + "".join(map(_escape, text)) + "'"


def _escape(one: str) -> str:
    if one.isprintable() and one.isascii() and one not in "'\\":
        return one
    return "".join(f"\\x{byte:02x}" for byte in one.encode(errors="surrogateescape"))
