"""Settings: the arguments of ``init()``, completed from the environment."""

from __future__ import annotations

import logging
import math
import numbers
import os
import re
import stat
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import NebulaConfigError, NebulaCorrupt

if TYPE_CHECKING:
    from .keeping import Best

__all__ = ["Settings", "check_text", "history_dir", "in_lines", "local_path", "parse_number", "parse_seconds", "resolve"]

log = logging.getLogger("nebulaml")

ON_FULL = ("wait", "stream", "skip")  # in the order of enum nebula_on_full
ON_ERROR = ("warn", "raise")
SIGNATURES = ("require", "prefer", "off")

LOOK_S = 5.0  # the longest look at a storage path when it is given

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE)
_SECONDS = {"": 1.0, "S": 1.0, "MS": 1e-3, "M": 60.0, "H": 3600.0, "D": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(MS|[SMHD]?)\s*", re.IGNORECASE)


class Settings(NamedTuple):
    """The settings of a session. Units are seconds and bytes."""

    persist_path: str | None = None
    persist_interval_s: float = 100.0
    retention_count: int = 1
    on_full: str = "wait"
    on_error: str = "warn"
    keep_last: int = 0
    keep_every: int = 0
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_within_s: float = 0.0
    keep_best: Best | None = None
    keep_items: str = ""  # as in nebula.h
    job: str = ""
    replica_count: int = 0
    memory_bytes: int = 0
    output_dir: str = ""  # as the user gave it; history_dir() returns the folder of the history
    run: str = ""
    alone: bool = False  # this process is a job of its own, whatever its launcher says


def within_seconds(value: Any) -> float:
    """Returns the whole seconds of keep_within, such as "14d". Raises NebulaConfigError."""
    seconds = parse_seconds("keep_within", value)
    if seconds and not 1 <= seconds < 2**32:
        raise NebulaConfigError(f"keep_within={value!r:.40}: a time from 1 s to 136 years")
    return float(int(seconds))


def parse_number(name: str, value: Any) -> float:
    """Returns a number that is 0 or more. Text may carry K, M, G or T (powers of 1024). Raises NebulaConfigError."""
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        if match is None:
            raise NebulaConfigError(f"{name}={value!r} is not a number; write for example 512M, 4G or 30")
        return _finite(name, value, float(match[1]) * _UNITS[match[2].upper()])
    return _plain_number(name, value)


def parse_seconds(name: str, value: Any) -> float:
    """Returns seconds, 0 or more. Text may carry ms, s, m, h or d. Raises NebulaConfigError."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            raise NebulaConfigError(f"{name}={value!r} is not a time; write for example 100, 250ms or 15m")
        return _finite(name, value, float(match[1]) * _SECONDS[match[2].upper()])
    return _plain_number(name, value)


def _plain_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):  # numpy's numbers are Real, too
        raise NebulaConfigError(f"{name}={value!r} is not a number but {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise NebulaConfigError(f"{name} has more than 308 digits and is too large") from None
    return _finite(name, value, number)


def _finite(name: str, value: Any, number: float) -> float:
    if not math.isfinite(number) or number < 0:
        raise NebulaConfigError(f"{name}={value!r} must be finite, and 0 or more")
    return number


def check_text(what: str, value: Any) -> str:
    """Returns the string if C can take it: UTF-8 without NUL. File names and arguments that are not UTF-8 have surrogates: it raises."""
    if not isinstance(value, str):
        raise NebulaConfigError(f"{what} is a string, not {value!r} ({type(value).__name__})")
    if "\0" in value or (not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value)):
        raise NebulaConfigError(f"{what} must be valid UTF-8 without NUL, not {value!r}")
    return value


def _count(name: str, value: Any, least: int) -> int:
    number = parse_number(name, value)
    if number != int(number) or not least <= number < 1 << 32:
        raise NebulaConfigError(f"{name}={value!r} must be a whole number from {least} to {(1 << 32) - 1}")
    return int(number)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise NebulaConfigError(f"{name}={value!r} is none of {', '.join(choices)}")
    return str(value)


def clean_path(path: Any) -> str | None:
    """Returns an absolute path or URL, or None for no path.

    A tuple of one element, which comes from a trailing comma, is unwrapped with a warning.
    """
    if isinstance(path, tuple) and len(path) == 1:
        log.warning("nebula: the storage path is a tuple, %r: is there a comma too many? Using its only element.", path)
        path = path[0]
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)):
        raise NebulaConfigError(f"the storage path must be a path, not {path!r} ({type(path).__name__})")
    text = check_text("the storage path", os.fspath(path))
    if not text:
        return None
    found = text if "://" in text else _absolute(text)
    _check_directory(found)
    return found


def _check_directory(path: str) -> None:
    """Raises for a local path that is no directory and can never become one. A mount that does not answer within LOOK_S seconds passes."""
    folder = without_scheme(path)
    answers: list[str] = []
    if not os.path.isabs(folder) or sys.is_finalizing():  # a new thread would never run
        return
    try:
        thread = threading.Thread(target=lambda: answers.append(_obstacle(folder)), name="nebula-look", daemon=True)
        thread.start()
        thread.join(LOOK_S)
    except RuntimeError:  # the interpreter is about to end
        return
    if answers and answers[0]:
        raise NebulaConfigError(f"the storage path {shown(path)} cannot be a directory, because {answers[0]}: give another path")


def _obstacle(folder: str) -> str:
    """Returns why no directory can be made there; "": nothing is known against it."""
    while True:
        try:
            found = os.stat(folder)
        except (FileNotFoundError, NotADirectoryError):
            folder = os.path.dirname(folder)
            continue
        except (OSError, ValueError):  # a later call finds out more, and says so
            return ""
        if not stat.S_ISDIR(found.st_mode):
            return f"{folder} is not one"
        views = [view for view in ("/proc", "/sys") if os.path.ismount(view) and os.stat(view).st_dev == found.st_dev]
        return f"it lies in {views[0]}, which is the kernel's" if views else ""


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(os.path.expanduser(path))
    except FileNotFoundError:
        raise NebulaConfigError(f"{path!r} is relative, and the working directory is gone: give an absolute path") from None


def without_scheme(path: str) -> str:
    """Returns the path of a file:// URL, and another URL or a path as it is."""
    return path.removeprefix("file://")


def is_url(path: str) -> bool:
    """Returns whether a storage path is a URL of an object store."""
    return "://" in without_scheme(path)


def below(path: str, *names: str) -> str:
    """Returns the path of something in a storage path. The query of a URL, which can be a signature, stays at its end."""
    place, question, query = path.partition("?") if is_url(path) else (path, "", "")
    return "/".join([place.rstrip("/"), *names]) + question + query


def shown(path: str | os.PathLike[str]) -> str:
    """Returns a path as others may see it: without the query of a URL, which can be a secret."""
    text = os.fspath(path)
    return text.partition("?")[0] if is_url(text) else text


def local_path(what: str, path: Any) -> str:
    """Returns the absolute path of a file or directory. Raises for "", which would mean the working directory."""
    given = os.fspath(path)
    if not given:
        raise NebulaConfigError(f"{what} is empty: give the path of a file or directory")
    return check_text(what, _absolute(given))


def refuse_unsigned(path: str) -> None:
    """Raises if signatures are required. Call it before a pickle is read that belongs to no version of Nebula: nothing can have signed it."""
    if os.environ.get("NEBULA_SIGNATURES") == "require":
        raise NebulaCorrupt(f"{shown(path)} is no version of Nebula, so no key can have signed it, and NEBULA_SIGNATURES is require: not read")


def history_dir(settings: Settings) -> str:
    """Returns the folder of checkpointHistories.csv. "": none is written.

    It is the folder that NEBULA_OUTPUT_DIR names. Without that, and with a storage path, it is the folder that AzureML keeps
    of a job, or else a folder in the storage path.
    """
    if settings.output_dir or settings.persist_path is None:
        return settings.output_dir
    if os.environ.get("AZUREML_RUN_ID"):
        try:
            return _absolute("outputs/nebula")
        except NebulaConfigError as failure:
            log.warning("nebula: checkpointHistories.csv is written beside the storage: %s", failure)
    return "" if is_url(settings.persist_path) else os.path.join(without_scheme(settings.persist_path), ".nebula")


def _defaults() -> Settings:
    environment = os.environ
    return Settings(
        persist_path=clean_path(environment.get("NEBULA_PERSISTENT_STORAGE_PATH")),
        persist_interval_s=parse_seconds(
            "NEBULA_PERSISTENT_TIME_INTERVAL", environment.get("NEBULA_PERSISTENT_TIME_INTERVAL") or 100
        ),
        memory_bytes=int(parse_number("NEBULA_MEMORY_BUFFER_SIZE", environment.get("NEBULA_MEMORY_BUFFER_SIZE") or 0)),
        job=check_text("NEBULA_JOB", environment.get("NEBULA_JOB", "")),
        output_dir=check_text("the output directory", _absolute(folder)) if (folder := environment.get("NEBULA_OUTPUT_DIR")) else "",
        run=check_text("NEBULA_RUN", environment.get("NEBULA_RUN", "")),  # "": ranks.run() finds it
    )


def check_names(call: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Raises TypeError for arguments that a call does not have, with the names that come next to them, or all."""
    names = list(names)
    for name in given:
        if name not in names:
            import difflib

            alike = difflib.get_close_matches(name, names, 3, 0.7) or names
            raise TypeError(f"{call}() has no argument {name!r}; it has {', '.join(alike)}")


def resolve(
    current: Settings | None,
    *,
    persistent_storage_path: Any = None,
    persistent_time_interval: Any = None,
    num_of_version_in_retention: Any = None,
    on_full: Any = None,
    on_error: Any = None,
    replicas: Any = None,
    keep_last: Any = None,
    keep_every: Any = None,
    keep_hourly: Any = None,
    keep_daily: Any = None,
    keep_weekly: Any = None,
    keep_within: Any = None,
    keep_best: Any = None,
    keep_items: Any = None,
    job: Any = None,
    world: Any = None,
    signatures: Any = None,
    **unknown: Any,
) -> Settings:
    """Returns settings from the arguments. An argument of None keeps the value of ``current``, or takes that of the environment."""
    check_names("init", unknown, NAMES)
    changes: dict[str, Any] = {}
    if persistent_storage_path is not None:
        changes["persist_path"] = clean_path(persistent_storage_path)
    if persistent_time_interval is not None:
        changes["persist_interval_s"] = parse_seconds("persistent_time_interval", persistent_time_interval)
    if num_of_version_in_retention is not None:
        changes["retention_count"] = _count("num_of_version_in_retention", num_of_version_in_retention, 1)
    if on_full is not None:
        changes["on_full"] = _choice("on_full", on_full, ON_FULL)
    if on_error is not None:
        changes["on_error"] = _choice("on_error", on_error, ON_ERROR)
    if replicas is not None:
        changes["replica_count"] = _count("replicas", replicas, 0)
    if keep_last is not None:
        changes["keep_last"] = _count("keep_last", keep_last, 0)
    counts = {"keep_every": keep_every, "keep_hourly": keep_hourly, "keep_daily": keep_daily, "keep_weekly": keep_weekly}
    changes |= {name: _count(name, value, 0) for name, value in counts.items() if value is not None}
    if keep_within is not None:
        changes["keep_within_s"] = within_seconds(keep_within)
    if keep_best is not None:
        from .keeping import Best

        if keep_best and not isinstance(keep_best, Best):
            raise NebulaConfigError(f"keep_best={keep_best!r}: give nebulaml.Best(metric, mode, count)")
        changes["keep_best"] = keep_best or None
    if keep_items is not None:
        from .keeping import items_text

        changes["keep_items"] = items_text(keep_items)
    if job is not None:
        changes["job"] = check_text("job", job)
    if signatures is not None:  # the agent, this process's workers and `nebula` take it from the environment
        os.environ["NEBULA_SIGNATURES"] = _choice("signatures", signatures, SIGNATURES)
    if world is not None:
        if world not in (0, 1) or isinstance(world, bool):
            raise NebulaConfigError(f"world={world!r}: give 1 for a process that uses Nebula alone, or 0 for the launcher's world")
        changes["alone"] = world == 1
    chosen = (current or _defaults())._replace(**changes)
    rules = {name: getattr(chosen, name) for name in ("keep_every", "keep_hourly", "keep_daily", "keep_weekly", "keep_within_s", "keep_best")}
    excepted = next((f"{name.removesuffix('_s')}={value}" for name, value in rules.items() if value), "")
    if excepted and not chosen.keep_last:
        raise NebulaConfigError(
            f"{excepted} excepts versions from keep_last, and has no effect without keep_last: every version stays. Give "
            "keep_last=1, say, to keep the newest, too"
        )
    return chosen


NAMES = tuple(resolve.__kwdefaults__)  # of init()'s arguments


def in_lines(problems: list[str]) -> str:
    """Joins the first twenty, and adds how many more there are."""
    return "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
