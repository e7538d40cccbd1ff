"""One document about a job: rows of versions, the loss of a failure now, the timeline, nodes, configuration and advice.

Times are seconds since 1970, sizes bytes. The document holds plain JSON values. Texts are unchanged; the page escapes them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from .._session import config
from ..plan import interval, limits
from ..plan.show import seconds_text as duration

__all__ = ["Watch", "build"]

SHOWN_VERSIONS = 5000
VERDICTS = ("fine", "at risk", "broken")
ADVICE_MTBF_S = 12 * 3600.0
FEW = 3  # failures: fewer say little about the time between them
LOADABLE = ("committed", "replicated", "durable")
PATIENCE_S = 30.0  # ranks commit within that time of each other, or one of them does not come
RESTART_FACTOR = 5.0  # if the time per step between two saves is this many times the usual one, the job did not train in between

# Settings that the agent reads from its environment, and their defaults.
SETTINGS = {
    "NEBULA_MEMORY_BUFFER_SIZE": "a safe share of the free memory",
    "NEBULA_PERSIST_GIVE_UP": "600",
    "NEBULA_AGENT_LINGER": "600",
    "NEBULA_STORE_MBPS": "no bound",
    "NEBULA_NODE_ID": "the host's name",
}


@dataclasses.dataclass
class Watch:
    """The events seen since the page is served: starts and ends of sessions and agents. Newest last."""

    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    sessions: dict[int, dict[str, Any]] | None = None
    agent_pid: int | None = None
    started: bool = False

    def look(self, status: dict[str, Any], now: float) -> None:
        """Records the differences from the previous look."""
        sessions = {one["pid"]: one for one in status.get("sessions", [])}
        pid = (status.get("agent") or {}).get("pid")
        if self.started:
            for gone in (self.sessions or {}).keys() - sessions.keys():
                one = (self.sessions or {})[gone]
                self._add(now, "end", f"rank {one['rank']} (pid {gone}) is gone")
            for new in sessions.keys() - (self.sessions or {}).keys():
                self._add(now, "start", f"rank {sessions[new]['rank']} of {sessions[new]['world']} (pid {new}) has connected")
            if pid != self.agent_pid:
                text = f"agent pid {pid} runs" if pid else f"agent pid {self.agent_pid} has ended"
                self._add(now, "agent", text)
        self.sessions, self.agent_pid, self.started = sessions, pid, True

    def _add(self, now: float, kind: str, text: str) -> None:
        self.events.append({"kind": kind, "at": now, "text": text})
        del self.events[:-500]


# The characters that the agent (src/base/text.c) replaces in its history.
_RANGES = ((0, 0x1F), (0x7F, 0x9F), (0x200B, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F), (0xFFF9, 0xFFFB))
_BLANKS = {one: " " for first, last in _RANGES for one in range(first, last + 1)} | dict.fromkeys((0xAD, 0x61C, 0x115F, 0x180E, 0xFEFF), " ")


def _history_tag(tag: str) -> str:
    """Returns the tag as the history spells it, where a version is one line without hidden characters."""
    return tag.translate(_BLANKS)


def _identity(job: str, tag: str, sequence: int) -> str:
    return "\0".join((job, tag, str(sequence)))


def _rows(status: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns versions by identity. History has no job: its row belongs to the version of that tag and sequence."""
    rows: dict[str, dict[str, Any]] = {}
    found: dict[tuple[str, int], str] = {}
    for one in (status.get("storage") or {}).get("versions", []):
        key = _identity(one["job"], one["tag"], one["sequence"])
        found[_history_tag(one["tag"]), one["sequence"]] = key
        rows[key] = {**_EMPTY, **one, "error": one["reason"]}
    reasons = {key: row["error"] for key, row in rows.items()}
    for one in [*history, *status.get("history", [])]:
        written = (_history_tag(one["tag"]), one["sequence"])
        key = found.get(written)
        if key is None or (not one["sequence"] and key not in reasons):  # of a tag's writings that were not committed the last one counts
            key = found[written] = _identity("", one["tag"], one["sequence"])
            rows[key] = {**_EMPTY, "tag": one["tag"], "sequence": one["sequence"], "step": one["step"], "size": one["size_bytes"]}
            rows[key]["state"] = one["result"] if one["result"] != "durable" else "removed"
            rows[key]["committed_at"] = one["committed"] or one["begun"]
        row = rows[key]
        row |= {name: one[name] or None for name in ("begun", "captured", "committed", "durable")}
        row |= {"world": one["world"], "blocked_ms": one["blocked_ms"], "persist_seconds": one["persist_seconds"] or None}
        row["error"] = (row["error"] if one["sequence"] else reasons.get(key)) or one["error"]
        if row["persist_seconds"]:
            row["written"] = min(row["size"], one["persist_mib_per_s"] * one["persist_seconds"] * (1 << 20))
    return rows


_EMPTY: dict[str, Any] = {
    "tag": "", "job": "", "step": -1, "sequence": 0, "entry": None, "state": "", "size": 0, "file_count": None, "committed_at": 0.0,
    "where": [], "abandoned": False, "error": "", "begun": None, "captured": None, "committed": None, "durable": None, "world": None,
    "blocked_ms": None, "persist_seconds": None, "written": None, "metrics": {}, "pinned": None, "inflation": None,
    "line": [], "verified_at": None, "verified_ok": None,
}  # fmt: skip


def _begun(row: dict[str, Any]) -> float:
    return float(row["begun"] or row["committed_at"] or 0)


def _ledger(answer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the answer of `nebula goodput` in the form of the page. None: there is no answer yet."""
    if not answer or not answer.get("step_seconds"):
        return None
    return {"ratio": answer["goodput"], "span_s": answer["wall_seconds"], "step_s": answer["step_seconds"], **answer["spent"]}


def _restarts(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the ends and loads in the history, each once."""
    # checkpointHistories.csv has six decimals, the agent's answer has more.
    ends = {round(one["stopped"], 6) for one in history if one.get("stopped")}
    loads = {(round(one["read"], 6), int(one["read_step"]), one.get("read_tier", "")) for one in history if one.get("read")}
    found = [{"kind": "end", "at": at, "text": "the last trainer on this node had ended"} for at in ends]
    for at, step, tier in loads:
        source = {"memory": " from memory", "peer": " from a peer", "storage": " from storage"}.get(tier, "")
        found.append({"kind": "restore", "at": at, "text": f"the ranks had loaded {f'step {step}' if step >= 0 else 'a version'}{source}"})
    return found


def _mark(rows: list[dict[str, Any]], ledger: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Sets `inflation` of each row: the time per step before its save, divided by the usual one, minus 1.

    Returns events for the places where the job went back or paused.
    """
    found = []
    previous: dict[str, Any] | None = None
    # A commit can come after the begin of the next save. So compare begins, and commits only if no begin is known.
    known = sorted((row for row in rows if row["begun"]), key=_begun) or [row for row in rows if row["committed_at"]]
    for row in known:
        at = _begun(row)
        if previous is not None and row["step"] >= 0 <= previous["step"]:
            gap, steps = at - _begun(previous), row["step"] - previous["step"]
            if steps <= 0:
                back = f", {-steps} step{'s' * (steps < -1)} back" if steps else ""
                text = f"the job saves step {row['step']} again{back}"
                found.append({"kind": "restore", "at": at, "text": text})
            elif ledger:
                if gap > max(1.0, RESTART_FACTOR * steps * ledger["step_s"]):
                    found.append({"kind": "pause", "at": at, "text": f"{_duration(gap)} without a save before step {row['step']}"})
                else:
                    row["inflation"] = gap / steps / ledger["step_s"] - 1
        previous = row
    return found


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _newest(rows: list[dict[str, Any]], places: tuple[str, ...]) -> dict[str, Any] | None:
    for row in reversed(rows):
        if row["state"] in LOADABLE and not row["abandoned"] and set(row["where"]) & set(places):
            return row
    return None


def _stuck(rows: list[dict[str, Any]], now: float) -> dict[str, Any] | None:
    """Returns the number of versions that are newer than the newest loadable one and cannot be loaded, and the newest one's tag and reason."""
    newer: list[dict[str, Any]] = []
    for row in reversed(rows):
        if row["state"] in LOADABLE and not row["abandoned"] and row["where"]:
            break
        is_late = row["state"] in ("capturing", "captured") and now - _begun(row) > PATIENCE_S
        if row["error"] and not row["abandoned"] and (row["state"] == "failed" or is_late):
            newer.append(row)
    return {"count": len(newer), "tag": newer[0]["tag"], "state": newer[0]["state"], "error": newer[0]["error"]} if newer else None


def _worst(jobs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the agent's worst verdict on these jobs, with the name of the job. None: no agent has one."""
    verdicts = [{**one["verdict"], "job": one["job"]} for one in jobs if one.get("verdict")]
    return max(verdicts, key=lambda one: VERDICTS.index(one["state"]), default=None)


def _named(row: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the values of a row that the page needs. `at`: if this version is lost, all training after this time is lost, too."""
    if row is None:
        return None
    return {"tag": row["tag"], "step": row["step"], "where": row["where"], "state": row["state"], "at": _begun(row)}


def _advice(rows: list[dict[str, Any]], settings: list[dict[str, Any]], goodput: dict[str, Any] | None) -> list[str]:
    """goodput: the answer of `nebula goodput`. With FEW failures or more, the intervals are for those of this job."""
    durable = [one for one in rows if one["durable"] and one["committed"] and one["blocked_ms"] is not None][-20:]
    advice = []
    if len(durable) >= 3:
        blocked_s = statistics.median(one["blocked_ms"] for one in durable) / 1e3
        lag_s = statistics.median(one["persist_seconds"] or 0 for one in durable)
        captured_s = statistics.median(max(0.0, (one["captured"] or 0) - (one["begun"] or 0)) for one in durable)
        measured = limits.seconds_of(goodput) if goodput and goodput.get("restarts", 0) >= FEW else {}
        mtbf_s = measured.get("mtbf", ADVICE_MTBF_S)
        costs = interval.Costs(mtbf_s, 0.23, max(blocked_s, 1e-4), captured_s, max(0.02 * lag_s, 1e-3), lag_s, 360.0, 400.0)
        memory_s, storage_s = interval.intervals(costs)
        advice.append(
            f"With a failure every {duration(mtbf_s)}{', as so far' if measured else ''}, these saves (blocked {blocked_s * 1e3:.1f} ms, "
            f"written in {lag_s:.2f} s) lose least if the job saves every {memory_s:.0f} s and persists every {storage_s:.0f} s. "
            f"The command nebula plan {'--goodput ' if measured else ''}computes it for your {'machines' if measured else 'failures'}."
        )
        for job in settings:
            now = job["settings"]["persistent_time_interval"]
            if now > 4 * storage_s:
                advice.append(f"persistent_time_interval is {now:.0f} s: a lost node costs more than it needs to.")
    return advice


def _settings(status: dict[str, Any], path: str, kept: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the settings of each job of the path: of its trainers if they are connected here, else those that are kept in storage."""
    live = [
        {"job": one["job"], "settings": one["settings"], "origin": "as the agent has it"}
        for one in status.get("jobs", [])
        if one["path"] == path and one["trainer_count"]
    ]
    known = {one["job"] for one in live}
    return live + [{**one, "origin": "kept with the versions"} for one in kept if _is_settings(one) and one["job"] not in known]


def _is_settings(found: Any) -> bool:
    """Whether an agent has written a document of settings, and not another program, or a Nebula that has other settings."""
    try:
        return isinstance(found["job"], str) and found["settings"]["persistent_time_interval"] >= 0 and bool(_named_settings(found["settings"]))
    except (LookupError, TypeError, ValueError, AttributeError):
        return False


def _config(status: dict[str, Any], path: str, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the settings of the jobs, and those of this machine's agent if it has one of them."""
    values = []
    for job in settings:
        origin = f"init() of job {job['job']!r}" if job["job"] else "init()"
        values += [{"name": name, "value": value, "origin": f"{origin}, {job['origin']}"} for name, value in _named_settings(job["settings"])]
    agent = status.get("agent") or {}
    if agent and any(one["path"] == path for one in status.get("jobs", [])):
        values += [
            {"name": "memory of the agent", "value": str(agent["memory_budget"]), "unit": "bytes", "origin": "the agent"},
            {"name": "memory directory", "value": agent["memory_directory"] or "memfds", "origin": "the agent"},
        ]
        environment = _environment(agent["pid"])
        for name, default in SETTINGS.items() if environment is not None else ():
            value = (environment or {}).get(name)
            origin = f"environment of the agent, pid {agent['pid']}" if value else "default of the agent"
            values.append({"name": name, "value": config.shown(value or default), "origin": origin})
    return values


def _named_settings(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the settings that the job's trainers gave, by the names of init()."""
    settings = [("persistent_time_interval", f"{answer['persistent_time_interval']:g} s")]
    names = ("num_of_version_in_retention", "on_full", "replicas", "world")
    settings += [(name, str(answer[name])) for name in names if answer[name] != ""]
    for rule in answer["rules"]:
        words = [f"{name}={rule[name]}" for name in rule if name.startswith("keep_") and name != "keep_best" and rule[name]]
        mode = "max" if rule["largest"] else "min"
        words += [f"keep_best=Best({rule['metric']!r}, {mode!r}, {rule['keep_best']})"] if rule["keep_best"] else []
        settings.append(("stays in storage", ", ".join(words)))
    if not answer["rules"]:
        settings.append(("stays in storage", "all versions"))
    return settings + ([("keep_items", answer["keep_items"])] if answer["keep_items"] else [])


def _environment(pid: int) -> dict[str, str] | None:
    """Returns the environment with which a process of this user was started. None: it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().decode(errors="replace").split("\0")
    except OSError:
        return None
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def build(
    status: dict[str, Any],
    history: list[dict[str, Any]],
    nodes: list[dict[str, Any]],
    answer: dict[str, Any] | None,
    watch: Watch,
    now: float,
    kept: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the document. `rows`: by identity; the rest is small. kept: the jobs' settings in storage."""
    storage = status.get("storage") or {}
    path = status.get("path") or storage.get("path") or ""  # as the jobs of the agent spell it
    by_key = _rows(status, history)
    rows = sorted(by_key.values(), key=lambda one: (one["committed_at"] or _begun(one), one["tag"]))
    hidden = max(0, len(rows) - SHOWN_VERSIONS)
    if hidden:
        shown = {id(one) for one in rows[hidden:]}
        by_key = {key: one for key, one in by_key.items() if id(one) in shown}
    sessions = [one for one in status.get("sessions", []) if one["path"] == path]
    queue = [one for one in status.get("queue", []) if one["path"] == path]
    jobs = [one for one in status.get("jobs", []) if one["path"] == path]
    ledger = _ledger(answer)
    settings = _settings(status, path, kept)
    events = _mark(rows, ledger) + _restarts([*history, *status.get("history", [])])
    failure = storage.get("error") or {}
    problems = [text for text in ((status.get("error") or {}).get("message"), failure.get("message"), storage.get("first_unreadable")) if text]
    verdict = _worst(jobs)
    problems = [text for text in problems if not verdict or text not in verdict.get("reason", "")]  # the banner says it
    waiting = sum(one["size"] for one in queue)
    oldest = [row["committed_at"] for row in rows if row["tag"] in {one["tag"] for one in queue} and row["committed_at"]]
    return {
        "time": now,
        "path": path,
        "agent": {name: value for name, value in (status.get("agent") or {}).items() if name != "uptime_seconds"} or None,
        "running": bool(status.get("running")),
        "problems": problems,
        "verdict": verdict,
        "now": {
            "trains": bool(sessions),
            # False: there may be versions that this machine cannot see.
            "readable": not failure or failure["status"] == "not_found",
            "newest": _named(_newest(rows, ("memory", "peer", "storage"))),
            "stuck": _stuck(rows, now),
            "after_node": _named(_newest(rows, ("peer", "storage"))),
            "queue": queue,
            "waiting_bytes": waiting,
            "stored_bytes": sum(row["size"] for row in rows if "storage" in row["where"]),
            "stored": sum("storage" in row["where"] for row in rows),
            "in_memory": sum("memory" in row["where"] for row in rows),
            "failed": sum(row["state"] == "failed" for row in rows),
            "goodput": ledger,
        },
        "hidden": hidden,
        "reading": None,  # {"read", "of"} while storage is read for the first time: the rest is of the newest versions so far
        "events": sorted([*events, *watch.events], key=lambda one: one["at"])[-500:],
        "nodes": {
            "here": {"sessions": sessions, "jobs": jobs, "oldest": min(oldest) if oldest else None, "waiting": len(queue)},
            "others": nodes,
        },
        "config": {"values": _config(status, path, settings), "advice": _advice(rows, settings, answer)},
        "rows": by_key,
    }
