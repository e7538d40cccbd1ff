"""States of optimizers whose parameters have names: they are restored by name, whatever the order of the parameters is."""

from __future__ import annotations

from typing import Any

from .names import plain_name

__all__ = ["in_order_of"]


def in_order_of(source: Any, target: Any, path: str) -> tuple[Any, list[str]]:
    """Returns an optimizer's state with its parameters in the order of another one's, and a sentence for each group that does not fit.

    torch keeps the state by the position of its parameter: in another order each parameter would get another one's state. Values other
    than two such states with names are returned as they are.
    """
    groups, now_groups = _groups(source), _groups(target)
    if groups is None or now_groups is None or len(groups) != len(now_groups):
        return source, []
    places: dict[Any, Any] = {}  # of the target, by that of the source
    ordered, problems = [], []
    for number, (group, now) in enumerate(zip(groups, now_groups, strict=True)):
        names, now_names = ([plain_name(name) for name in one["param_names"]] for one in (group, now))
        at = dict(zip(names, group["params"], strict=True))
        if names != now_names and (len(at) < len(names) or sorted(names) != sorted(now_names)):
            problems.append(_difference(f"{path}['param_groups'][{number}]", names, now_names))
            continue
        places.update(zip(group["params"] if names == now_names else map(at.get, now_names), now["params"], strict=True))
        ordered.append({**group, "params": now["params"], "param_names": now["param_names"]})
    if problems:
        return source, problems
    state = {places.get(place, place): value for place, value in source["state"].items()}
    return {**source, "state": state, "param_groups": ordered}, []


def _groups(state: Any) -> list[dict[str, Any]] | None:
    """Returns the groups of an optimizer's state if each names its parameters."""
    groups = state.get("param_groups") if isinstance(state, dict) and isinstance(state.get("state"), dict) else None
    if not isinstance(groups, list) or not groups:
        return None
    for group in groups:
        names, params = (group.get(key) if isinstance(group, dict) else None for key in ("param_names", "params"))
        if not isinstance(names, list) or not isinstance(params, list) or len(names) != len(params):
            return None
        if not all(isinstance(name, str) for name in names):
            return None
    return groups


def _difference(path: str, names: list[str], now_names: list[str]) -> str:
    missing = [name for name in now_names if name not in set(names)]
    other = [name for name in names if name not in set(now_names)]
    if missing or other:
        there = f"{_few(names)}; only here: {_few(missing)}; only there: {_few(other)}"
        return f"{path}: parameters {_few(now_names)} expected, the checkpoint has {there}"
    return f"{path}: names that differ from each other expected, the checkpoint has {_few(names)}"


def _few(names: list[str]) -> str:
    return (", ".join(names[:4]) or "none") + (f" and {len(names) - 4} more" if len(names) > 4 else "")
