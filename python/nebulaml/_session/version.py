"""Version: a version that exists, as a reader sees it: its state, and its files."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

from .. import _nebula
from ..errors import NebulaConfigError, NebulaError, NebulaNotFound, NebulaUnavailable
from . import about, config, engine, late, progress
from .printing import escaped, human_bytes, printable
from .tags import WHOLE
from .traced import traced
from .waits import milliseconds, patiently, refuse_within_save

log = logging.getLogger("nebulaml")


def _sizes(report: dict[str, Any]) -> dict[str, int]:
    return {file["name"]: file["size"] for file in report.get("files", [])}


def _escaped(text: str) -> str:
    return escaped(printable(text))


class Version:
    """The half of a Checkpoint that reads. It has no state of a save: ``Checkpoint`` adds that."""

    def __init__(self, owner: engine.Engine, tag: str, handle: _nebula.Checkpoint | None, persist_path: str | None) -> None:
        self._engine = owner
        self._tag = tag
        self._handle = handle  # None: no agent has answered yet
        self._persist_path = persist_path  # where this checkpoint is persisted, even if init() has named another path since
        self._about: about.About | None = None
        self._failure: NebulaError | None = None  # the newest one
        self._was_durable = False  # at the last look
        self._is_silent = False  # the log has said that no agent answers for this checkpoint
        # (tag, reason) of versions that may be newer, if get_latest_checkpoint() made this object
        self.passed_over: list[tuple[str, str]] = handle.passed_over() if handle is not None else []

    def __repr__(self) -> str:
        return f"<nebulaml.Checkpoint {self._tag!r}>"

    def _repr_html_(self) -> str:
        """Returns the state and the files as HTML, for a notebook. If no agent answers, it returns only the name."""
        try:
            state, report = self._state(), self._report()
        except NebulaError:
            return escaped(repr(self))
        error = report.get("error")
        lines = [f"<b>{_escaped(self._tag)}</b>, {state}" + (f": {_escaped(error)}" if error else "")]
        lines += [f"{_escaped(name)}: {human_bytes(size)}" for name, size in _sizes(report).items()]
        return "<br>".join(lines)

    def _known(self) -> _nebula.Checkpoint:
        if self._handle is None:
            raise NebulaUnavailable(f"checkpoint {self._tag!r} was never started: {self._failure}")
        refuse_within_save()
        return self._handle

    # -- state

    @property
    def tag(self) -> str:
        """The name of the checkpoint."""
        return self._tag

    @property
    def state(self) -> str:
        """The state: "capturing", "captured", "committed", "replicated", "durable" or "failed".

        With on_error="warn" it is also "failed" while no agent answers, unless this object has already seen it durable; ``error`` says why.
        """
        try:
            return self._state()
        except NebulaError as failure:
            self._note_silence(failure)
            return "durable" if self._was_durable else "failed"

    def _state(self) -> str:
        """Returns the state. Raises if no agent answers."""
        state = "failed" if self._handle is None else self._known().state()
        self._was_durable = state == "durable"
        return state

    @property
    def step(self) -> int | None:
        """The step in the tag (``global_step<n>``), or None."""
        step = _nebula.step_of(self._tag)
        return step if step >= 0 else None

    @property
    def files(self) -> dict[str, int]:
        """Name and size in bytes of each file."""
        return _sizes(self._report_or_silence())

    def all_files(self) -> dict[str, int]:
        """Returns ``files`` with those of other nodes. If their memory does not list its files, it waits until the checkpoint is durable."""
        try:
            return self._all_files()
        except NebulaError as failure:
            self._note_silence(failure)
            return {}

    def _all_files(self) -> dict[str, int]:
        """As all_files(), for loading code. It raises if no agent answers, because a checkpoint without files would not be loaded."""
        if self._lies_elsewhere() and not self._report().get("gathered"):
            self._bring_together("what other nodes have saved")
        return _sizes(self._report())

    @property
    def error(self) -> str | None:
        """The reason why the checkpoint failed, or why it is not durable yet. None: there is no problem."""
        return self._report_or_silence().get("error") or (str(self._failure) if self._failure else None)

    def _report_or_silence(self) -> dict[str, Any]:
        """Returns the report, or only an error: a training loop reads the attributes and should not stop."""
        try:
            return self._report()
        except NebulaError as failure:
            self._note_silence(failure)
            return {"error": str(failure)}

    def _note_silence(self, failure: NebulaError) -> None:
        """Raises the failure with on_error="raise". Otherwise it logs once that no agent answers for this checkpoint."""
        refuse_within_save()
        if self._engine.settings().on_error == "raise":
            raise failure
        if not self._is_silent:
            log.error("nebula: the state of checkpoint %r is unknown, because no agent answers: %s. Training goes on.", self._tag, failure)
        self._is_silent = True

    def _report(self) -> dict[str, Any]:
        if self._handle is None:
            return {}
        try:
            return json.loads(self._known().report())
        except NebulaError as failure:
            if failure.status != "failed":
                raise
            return {"error": str(failure)}  # it was committed once, and lost since

    @traced("wait for")
    def wait(self, state: str = "durable", timeout: float | None = None) -> None:
        """Waits until ``state`` is reached. Waiting for "durable" also asks the agent to persist the checkpoint now.

        timeout: seconds; None sets no limit. Raises NebulaTimeout, or the error that made the checkpoint fail.
        """
        config.check_text("a state", state)
        if state == "durable" and self._handle is not None and self._persist_path is None and self.state != "durable":
            raise NebulaConfigError(
                f"checkpoint {self._tag!r} will never be durable: there is no storage path; "
                "give persistent_storage_path to init()"
            )
        try:
            wait = self._known().wait
            with progress.sending(self._engine, f"saving {self._tag}", self._tag):
                patiently(f"checkpoint {self._tag!r}", lambda limit: wait(state, limit), milliseconds(timeout))
            self._was_durable |= state == "durable"
        except ValueError as failure:
            raise failure if isinstance(failure, NebulaError) else NebulaConfigError(str(failure)) from None

    # -- files

    def _map(self, name: str, lazily: bool = False) -> _nebula.Map:
        config.check_text("a file name", name)
        why = ""
        try:
            return self._map_now(name, lazily)
        except NebulaNotFound as first:
            failure = first
        if self._lies_elsewhere():
            why = self._bring_together(name)
            try:
                return self._map_now(name, lazily)
            except NebulaNotFound as second:
                failure = second
        try:
            files = _sizes(self._report())
        except NebulaError:
            files = {}
        if name in files:
            raise failure
        known = ", ".join(sorted(files)) or "none"
        raise NebulaNotFound(f"checkpoint {self._tag!r} has no file {name!r}; it has: {known}{why}") from failure

    def _fetching(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Shows the progress of a load of that file."""
        return progress.fetching(self._engine, f"loading {name} of {self._tag}", lambda: _sizes(self._report()).get(name, 0))

    def _map_now(self, name: str, lazily: bool) -> _nebula.Map:
        return self._known().map_lazily(name) if lazily else self._known().map(name)

    def _bring_together(self, name: str) -> str:
        """Waits until files that no other node's memory can give are in storage. Returns "", or the reason why they are not.

        There is no limit of its own: the agents give a version up if storage fails or a node does not come. After that, the
        caller asks the other nodes once more.
        """
        log.warning("nebula: %r of checkpoint %r is not on this node: waiting for storage to have all files", name, self._tag)
        try:
            self.wait("durable")
        except NebulaError as failure:
            return f"; storage does not have the files of other nodes: {failure}"
        return ""

    def _lies_elsewhere(self) -> bool:
        """True if files of the checkpoint may be in other nodes' memory alone. An incomplete one does not count: it may wait for this
        process.
        """
        place = self._engine.place()
        if place.local_world >= place.world or self._engine.settings().persist_path is None:
            return False
        try:
            report = self._report()
        except NebulaError:
            return False
        return bool(report.get("spread")) and report["state"] in WHOLE

    @traced("load")
    def load(self, name: str, map_location: Any = None, weights_only: bool | None = None, lazy: bool = False) -> Any:
        """Loads the object of file ``name``, verified, from the fastest place that has it.

        Works like torch.load, except that ``weights_only`` is False unless this call or NEBULA_WEIGHTS_ONLY=1 says otherwise.
        The tensors belong to the program, which may write to them. Raises NebulaNotFound, with the names that exist, if
        there is no such file.
        lazy: for a load_state_dict() of the program's. Tensors on the CPU, of a file that the page cache has, are read when they
            are used, ``target.copy_(tensor)`` reads straight into the target, and an error about damaged bytes is raised
            there. All others are loaded as usual: they are mapped, or reading the disk takes most of the time.
        """
        with self._fetching(name):
            mapped = self._map(name, lazily=lazy)
            rest = mapped.rest()
            if rest == "page cache":
                loaded = late.loading.load_lazily(mapped, map_location, weights_only)
                if loaded is not None:
                    return loaded
            if rest:
                mapped.fetch(0, len(memoryview(mapped)))
            holders = sys.getrefcount(mapped)
            loaded = late.loading.load(mapped, map_location, weights_only, name=name)
        if sys.getrefcount(mapped) > holders:  # tensors lie in it
            mapped.own()
        return loaded

    @contextlib.contextmanager
    def view(self, name: str) -> Iterator[memoryview]:
        """Gives the verified bytes of file ``name``, read-only and without a copy. The view is valid inside the ``with`` block."""
        with self._fetching(name):
            mapped = self._map(name)
        mapped.write_sums()
        with memoryview(mapped).toreadonly() as data:
            yield data

    def read_bytes(self, name: str) -> bytes:
        """Returns a copy of the verified bytes of file ``name``."""
        with self.view(name) as data:
            return bytes(data)

    def load_into(self, name: str, state_dict: Any, weights_only: bool | None = None) -> Any:
        """Copies the values of file ``name`` into the tensors of ``state_dict`` (or of a module), in place. Returns ``state_dict``.

        Keys, lengths, shapes and dtypes must be the same; otherwise it raises and changes nothing. The bytes are verified
        while they are copied, so after an error about damaged or unreadable bytes some values have already been replaced. Values of a damaged
        chunk of 4 MiB are then 0 or as they were.
        """
        with self._fetching(name):
            return late.loading.load_into(self._map(name, lazily=True), state_dict, name, weights_only)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of this checkpoint, by name. If another object wrote them, they are read from its file. {}: it has none."""
        return dict(self._said().metrics)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of this checkpoint, by name; read like ``metrics``. A copy: changes of it are saved nowhere."""
        return copy.deepcopy(self._said().metadata)

    def _said(self) -> about.About:
        if self._about is None:
            try:
                self._about = about.decode(bytes(memoryview(self._map_now(about.FILE, False))))
            except NebulaNotFound:
                return about.About({}, {}, {})
        return self._about
