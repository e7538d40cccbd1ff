"""log_to: sends metrics and references to versions to TensorBoard, Weights & Biases or MLflow. It uploads no checkpoint."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import numbers
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from .. import _nebula
from .._session import config, ranks, session
from ..errors import NebulaConfigError, NebulaError
from ..events import Event
from .metrics import MetricsLog, plain

__all__ = ["Tracker", "log_to"]

log = logging.getLogger("nebulaml")

STEPS_KEPT = 10_000

_COLUMNS = {  # columns of stats() -> scalars at the version's step
    "size_bytes": "nebula/size_bytes",
    "blocked_ms": "nebula/blocked_ms",
    "copy_ms": "nebula/copy_ms",
    "persist_seconds": "nebula/persist_seconds",
}


class _Tool(Protocol):
    """The interface to one of the three tools."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...
    def version(self, step: int, values: Mapping[str, float], facts: Mapping[str, Any]) -> None: ...
    def rewind(self, step: int, rows: Sequence[Mapping[str, Any]], origin: Mapping[str, Any] | None) -> None: ...
    def close(self) -> None: ...


def log_to(tool: str, *, metrics: MetricsLog | str | os.PathLike[str] | None = None, session: Any = None, **options: Any) -> Tracker:
    """Returns a writer of metrics: ``log(step, loss=0.5)``. A step is recorded once, even if it was computed several times.

    tool: "tensorboard", "wandb" or "mlflow". options: those of its SummaryWriter, init() or start_run(). Without options it writes to the
    run of W&B or MLflow that is active already, if there is one. metrics: a MetricsLog, or its path, that gets the same values.
    session: a Session or Manager, whose versions are logged when they become durable. None: the session of the package's functions.
    Raises NebulaConfigError for another tool.
    """
    if tool not in _TOOLS:
        raise NebulaConfigError(f"log_to() knows {', '.join(map(repr, _TOOLS))}, not {tool!r}")
    made = MetricsLog(metrics) if metrics is not None and not isinstance(metrics, MetricsLog) else metrics
    return Tracker(tool, made, session, options)


class Tracker:
    """The writer that log_to() returns. Rank 0 writes; other ranks import nothing. A failure of the tool is logged once."""

    def __init__(self, name: str, metrics: MetricsLog | None, chosen: Any, options: dict[str, Any]) -> None:
        self._name, self._metrics = name, metrics
        self._events: collections.deque[Event] = collections.deque(maxlen=1000)
        self._session = getattr(chosen, "_session", chosen) or session.default
        self._has_warned = False
        self._begun = time.time()
        self._logged: dict[str, float] = {}  # tag -> the time at which its last logged version became durable
        self._values: dict[int, dict[str, float]] = {}  # of the newest steps, for the versions
        self._origin: dict[str, Any] | None = None  # the version that this process goes on from
        self._tool: _Tool | None = None
        if ranks.current().rank == 0:
            self._tool = _TOOLS[name](options)
            self._session._engine.listeners.append(self._hear)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def log(self, step: int, **values: Any) -> None:
        """Logs the values of a step: numbers, and for the MetricsLog also other values that JSON holds."""
        found = {name: plain(name, value) for name, value in values.items()}
        if self._metrics is not None:
            self._metrics.log(step, **found)
        self._say_versions()
        self._values[step] = {**self._values.get(step, {}), **_scalars(found)}
        if len(self._values) > STEPS_KEPT:
            del self._values[next(iter(self._values))]
        self._guarded(lambda tool: tool.scalars(step, _scalars(found)))

    def rewind(self, step: int) -> None:
        """Records that training continues after this step, and the version of that step as its origin.

        TensorBoard drops later steps. W&B and MLflow cannot: there a step keeps its first value. If W&B lost values when its process was
        killed, it gets them again from the MetricsLog.
        """
        rows = []
        if self._metrics is not None:
            self._metrics.rewind(step)
            rows = self._metrics.read() if self._tool is not None else []
        self._origin = self._version_of(step) if self._tool is not None else None
        self._guarded(lambda tool: tool.rewind(step, rows, self._origin))

    def close(self) -> None:
        """Logs the versions that are durable now, and ends the tool's file or run."""
        with contextlib.suppress(ValueError):
            self._session._engine.listeners.remove(self._hear)
        self._say_versions()
        self._say_unheard()
        self._guarded(lambda tool: tool.close())
        self._tool = None
        if self._metrics is not None:
            self._metrics.close()

    def _version_of(self, step: int) -> dict[str, Any] | None:
        """Returns the newest version of a step that can be loaded. None: there is none."""
        try:
            rows = self._session.checkpoints()
        except NebulaError as failure:
            log.warning("nebula: the version of step %d is not logged: %s", step, failure)
            return None
        found = next((row for row in rows if row.step == step and row.committed_at and not row.error and not row.abandoned), None)
        return {"tag": found.tag, "step": step, "path": self._place(found.tag)} if found is not None else None

    def _place(self, tag: str) -> str | None:
        path = self._session.persist_path
        return config.below(config.shown(path), _nebula.encode_name(tag)) if path else None

    def _hear(self, event: Event) -> None:
        """Keeps an event. Nebula's thread calls it."""
        if event.kind in ("durable", "lost"):
            self._events.append(event)

    def _say_versions(self) -> None:
        """Logs the kept events on the program's thread, to which the tools' runs belong."""
        if not self._events or self._tool is None:
            return
        rows = {row["tag"]: row for row in self._session.stats()}
        while self._events:
            event = self._events.popleft()
            row = rows.get(event.tag, {})
            if float(row.get("durable") or self._begun) >= self._begun:  # an event of before may come late
                self._say_version(event, row)

    def _say_unheard(self) -> None:
        """Logs the durable versions of which Nebula's thread has not heard yet."""
        if self._tool is None or self._session.persist_path is None or not self._session._engine.has_session():
            return
        try:
            rows = self._session.stats()
        except NebulaError as failure:
            log.warning("nebula: the newest versions are not logged: %s", failure)
            return
        for row in rows:
            durable = float(row.get("durable") or 0)
            if durable >= self._begun and durable > self._logged.get(row["tag"], 0.0):
                step = int(row["step"])
                self._say_version(Event("durable", row["tag"], step if step >= 0 else None), row)

    def _say_version(self, event: Event, row: Mapping[str, Any]) -> None:
        self._logged[event.tag] = float(row.get("durable") or 0)
        values = {name: float(row[column]) for column, name in _COLUMNS.items() if column in row}
        facts = {
            "tag": event.tag,
            "step": event.step,
            "sequence": int(row.get("sequence", 0)),
            "state": "durable" if event.kind == "durable" else "failed",
            "path": self._place(event.tag),
            "size_bytes": int(row.get("size_bytes", event.size)),
            "error": event.text if event.kind == "lost" else "",
            "metrics": self._values.get(event.step, {}) if event.step is not None else {},
            "resumed_from": self._origin["tag"] if self._origin else None,
        }
        step = event.step if event.step is not None else 0
        if self._metrics is not None:
            self._metrics.log(step, **values)
        self._guarded(lambda tool: tool.version(step, values, facts))

    def _guarded(self, call: Callable[[_Tool], None]) -> None:
        if self._tool is None:
            return
        try:
            call(self._tool)
        except Exception as failure:
            if not self._has_warned:
                self._has_warned = True
                log.warning("nebula: %s takes no metrics: %r. Training goes on without it.", self._name, failure)


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, numbers.Real)}


class _TensorBoard:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._open()

    def _open(self, **more: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(**self._options, **more)
        self._options["log_dir"] = self._writer.log_dir  # keep the directory that it chose by the clock

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a SIGKILL then loses nothing

    def version(self, step: int, values: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        self.scalars(step, values)
        self._text("nebula/version", facts, step)
        self._writer.flush()

    def _text(self, name: str, facts: Mapping[str, Any], step: int) -> None:
        self._writer.add_text(name, f"```\n{json.dumps(facts, indent=1)}\n```", step)

    def rewind(self, step: int, rows: Sequence[Mapping[str, Any]], origin: Mapping[str, Any] | None) -> None:
        self._writer.close()
        self._open(purge_step=step + 1)
        if origin is not None:
            self._text("nebula/resumed_from", origin, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, options: dict[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        self._is_ours = bool(options) or wandb.run is None
        self._run = wandb.init(**options) if self._is_ours else wandb.run
        self._run.define_metric("nebula/step")
        self._run.define_metric("nebula/*", step_metric="nebula/step")
        self._last = int(self._run.step) - 1  # the last step that W&B has of a resumed run; offline: -1
        self._named: set[str] | None = None  # what W&B has of that step; None: an earlier process has ended its row
        self._versions: collections.deque[dict[str, float]] = collections.deque(maxlen=1000)  # that have no row yet

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._last:  # W&B takes only growing steps
            if self._named is not None and self._versions:  # a row of its own would have the number of the next step
                self._run.log(self._versions.popleft(), step=self._last)
            self._last, self._named = step, set()
        if step < self._last or self._named is None:
            return
        new = {name: value for name, value in values.items() if name not in self._named}
        if new:
            self._named |= new.keys()
            of_version = {"nebula/step": step} if any(name.startswith("nebula/") for name in new) else {}
            self._run.log({**new, **of_version}, step=step)

    def version(self, step: int, values: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        self._versions.append({**values, "nebula/step": step})
        if facts["state"] == "durable" and facts["path"]:
            self._run.log_artifact(self._artifact(facts), aliases=["latest", re.sub("[/:]", "-", facts["tag"])])

    def _artifact(self, facts: Mapping[str, Any]) -> Any:
        """Returns a reference. All runs on one storage path have one collection, so that W&B's lineage leads from run to run."""
        folder = facts["path"].rpartition("/")[0]
        name = re.sub("[^A-Za-z0-9_.-]", "-", folder.rpartition("/")[2])[-60:]
        artifact = self._wandb.Artifact(f"checkpoints-{name}-{zlib.crc32(folder.encode()):08x}", type="checkpoint", metadata=dict(facts))
        self._refer(artifact, facts["path"])
        return artifact

    def _refer(self, artifact: Any, path: str) -> None:
        if config.is_url(path):
            # add_reference would need the package of that cloud and its credentials, although it reads nothing.
            from wandb.sdk.artifacts.artifact_manifest_entry import ArtifactManifestEntry

            artifact.manifest.add_entry(ArtifactManifestEntry(path="checkpoint", ref=path, digest=path))
        else:
            artifact.add_reference(path if "://" in path else f"file://{path}", name="checkpoint", checksum=False)

    def rewind(self, step: int, rows: Sequence[Mapping[str, Any]], origin: Mapping[str, Any] | None) -> None:
        for row in rows:
            self.scalars(row["step"], _scalars({name: value for name, value in row.items() if name != "step"}))
        if origin is not None:
            self._run.config.update({"nebula_resumed_from": dict(origin)}, allow_val_change=True)
            if origin["path"] and not self._run.offline:  # W&B takes no inputs of a run that is offline
                self._run.use_artifact(self._artifact(origin))

    def close(self) -> None:
        while self._versions:
            self._run.log(self._versions.popleft())
        if self._is_ours:
            self._run.finish()


class _Mlflow:
    def __init__(self, options: dict[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        self._is_ours = bool(options) or mlflow.active_run() is None
        self._run = (mlflow.start_run(**options) if self._is_ours else mlflow.active_run()).info.run_id
        self._client = mlflow.MlflowClient()
        self._last: dict[str, int] = {}  # the newest step of each metric, also from earlier processes

    def _known(self, name: str) -> int:
        if name not in self._last:
            history = self._client.get_metric_history(self._run, name)
            self._last[name] = max((one.step for one in history), default=-1)
        return self._last[name]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if step > self._known(name):
                self._client.log_metric(self._run, name, value, step=step)
                self._last[name] = step

    def version(self, step: int, values: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        self.scalars(step, values)
        self._client.set_tag(self._run, f"nebula.version.{facts['tag']}", json.dumps(facts))
        if facts["state"] == "durable":
            self._client.set_tag(self._run, "nebula.newest", facts["tag"])

    def rewind(self, step: int, rows: Sequence[Mapping[str, Any]], origin: Mapping[str, Any] | None) -> None:
        if origin is not None:
            self._client.set_tag(self._run, "nebula.resumed_from", json.dumps(origin))

    def close(self) -> None:
        if self._is_ours and self._mlflow.active_run() is not None:
            self._mlflow.end_run()


_TOOLS: dict[str, Callable[[dict[str, Any]], _Tool]] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow}
