"""The items that a manager saves and restores: modules, optimizers, other objects with a state_dict(), and plain values."""

from __future__ import annotations

import fnmatch
import logging
import operator
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._session import config, late
from ..errors import NebulaConfigError, NebulaError
from ..tensors import named_states, names

if TYPE_CHECKING:
    import torch

__all__ = ["check_keys", "check_restorable", "load", "plan", "selector", "state_of", "without_a_match"]

log = logging.getLogger("nebulaml")

_WRAPPERS = (("DistributedDataParallel", "module"), ("OptimizedModule", "_orig_mod"))  # of torch; their names would be part of every key

# The state of torch's optimizers that has the shape of its parameter.
_SHAPED_AS_PARAMETER = frozenset((
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq",
    "momentum_buffer", "prev", "square_avg", "step_size", "sum",
))  # fmt: skip


def _is_torchs(item: Any, kind: str) -> bool:
    """Returns whether an item is a "nn.Module", for example. Without torch there is none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(item, operator.attrgetter(kind)(torch))


def _bare(item: Any) -> Any:
    """Returns the module inside the wrappers of DistributedDataParallel and torch.compile."""
    for _ in range(4):
        inner = next((attribute for name, attribute in _WRAPPERS if type(item).__name__ == name and hasattr(item, attribute)), None)
        if inner is None:
            break
        item = getattr(item, inner)
    return item


def state_of(item: Any) -> Any:
    """Returns the value to save of an item: its state_dict(), if it has one."""
    item = _bare(item)
    state = item.state_dict() if callable(getattr(item, "state_dict", None)) else item
    return names.plain_keys(state) if _is_torchs(item, "nn.Module") else state


def check_keys(keys: Sequence[str] | str | None, names: Sequence[str]) -> list[str] | None:
    """Returns the patterns as a list. Raises NebulaConfigError for a pattern that begins with no item."""
    if keys is None:
        return None
    patterns = [keys] if isinstance(keys, str) else list(keys)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise NebulaConfigError(f"keys are patterns, as 'model' or 'model.encoder.*', not {pattern!r:.200} ({type(pattern).__name__})")
        if not any(fnmatch.fnmatchcase(name, pattern.partition(".")[0]) for name in names):
            raise NebulaConfigError(f"keys={pattern!r} begins with the name of none of the items {', '.join(names)}: write item, or item.key")
    return patterns


def selector(name: str, patterns: list[str] | None, matched: set[str]) -> Callable[[str], bool] | bool:
    """Returns True to restore the whole item, False to skip it, or else a function that is True for the keys to restore.

    The function adds the patterns that match a key to ``matched``.
    """
    if patterns is None or any("." not in pattern and fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        return True
    inner = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern.partition(".")[0])]
    if not inner:
        return False

    def select(key: str) -> bool:
        found = {pattern for pattern in inner if fnmatch.fnmatchcase(f"{name}.{key}", pattern)}
        matched.update(found)
        return bool(found)

    return select


def without_a_match(patterns: list[str] | None, matched: set[str]) -> list[str]:
    """Returns a sentence for each pattern of keys that no key has matched, neither of the target nor of the checkpoint."""
    return [f"keys={pattern!r} matches no key of its item" for pattern in patterns or () if "." in pattern and pattern not in matched]


def check_restorable(name: str, taken: Any) -> None:
    """Raises NebulaConfigError for an item that restore() would refuse without weights_only=False."""
    needed = [] if taken.is_plain or taken.whole else late.unpickling.refused(taken.pickle)
    if needed:
        raise NebulaConfigError(
            f"item {name!r} needs {', '.join(needed)}, which restore() of this manager refuses: save plain values, allow them by "
            "torch.serialization.add_safe_globals([...]), or trust all files of the path by Manager(..., weights_only=False)"
        )


def _refusal(checkpoint: Any, file: str, failure: Exception) -> NebulaConfigError:
    return NebulaConfigError(f"{checkpoint.tag}, {file}: {failure}. Manager(..., weights_only=False) trusts all files of its path")


def load(checkpoint: Any, file: str, weights_only: bool) -> Any:
    """Loads the object of a file, with tensors in memory of their own, so that none keeps the file mapped."""
    try:
        return late.loading.load_own(checkpoint._map(file, lazily=True), file, weights_only)
    except pickle.UnpicklingError as failure:
        raise _refusal(checkpoint, file, failure) from failure


def plan(
    checkpoint: Any, file: str, target: Any, select: Callable[[str], bool] | bool, strict: bool, weights_only: bool
) -> Callable[[], list[str]]:
    """Checks that a file fits its target, and returns a function that restores in place. That returns a sentence for each part left out."""
    target = _bare(target)
    part = None if select is True else select
    if not _is_torchs(target, "nn.Module") and callable(getattr(target, "load_state_dict", None)):
        if part is not None:
            raise NebulaConfigError(f"{file}: a {type(target).__name__} can only be restored as a whole")
        return _plan_stateful(checkpoint, file, target, strict, weights_only)
    if not (isinstance(target, (dict, list)) or _is_torchs(target, "nn.Module") or _is_torchs(target, "Tensor")):
        raise NebulaConfigError(
            f"{file}: nothing can be restored into a {type(target).__name__}: give a module, an optimizer, something else with "
            "load_state_dict, a tensor, a dict or a list; what was saved as 'extra' is in the result"
        )
    assert part is not False
    try:
        return late.loading.plan_part(checkpoint._map(file, lazily=True), target, file, weights_only, part, strict)
    except pickle.UnpicklingError as failure:
        raise _refusal(checkpoint, file, failure) from failure


def _plan_stateful(checkpoint: Any, file: str, target: Any, strict: bool, weights_only: bool) -> Callable[[], list[str]]:
    fill = _plan_refill(checkpoint, file, target, weights_only) if _is_torchs(target, "optim.Optimizer") else None
    if fill is not None:
        return fill
    saved = load(checkpoint, file, weights_only)
    problems: list[str] = []
    if _is_torchs(target, "optim.Optimizer"):
        saved, problems = named_states.in_order_of(saved, target.state_dict(), file)
        problems = problems or _misfits(target, saved, file)
    if problems and strict:
        kind = type(target).__name__
        raise NebulaConfigError(f"{file} does not fit the {kind} that it is restored into:\n  {config.in_lines(problems)}")

    def run() -> list[str]:
        if problems:
            return problems
        try:
            target.load_state_dict(saved)
        except NebulaError:
            raise
        except (ValueError, KeyError, TypeError, RuntimeError) as failure:
            if strict:
                raise NebulaConfigError(f"{file} does not fit the {type(target).__name__} that it is restored into: {failure}") from failure
            return [f"{file}: {failure}"]
        return []

    return run


def _misfits(optimizer: torch.optim.Optimizer, saved: Any, file: str) -> list[str]:
    """Returns a sentence for each part of a saved state that does not fit the parameters.

    load_state_dict() takes tensors of other shapes, and a later step fails, or changes the wrong values.
    """
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict) or not isinstance(saved.get("param_groups"), list):
        return []
    now_groups, groups = [len(group["params"]) for group in optimizer.param_groups], [len(group["params"]) for group in saved["param_groups"]]
    if now_groups != groups:
        return [f"{file}['param_groups']: groups of {now_groups} parameters expected, the checkpoint has groups of {groups}"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    problems = []
    for index, parameter in enumerate(parameters):
        now, state = optimizer.state.get(parameter, {}), saved["state"].get(index)
        for key, value in state.items() if isinstance(state, dict) else ():
            present = now.get(key)
            is_alike = present.shape == parameter.shape if _is_torchs(present, "Tensor") else is_torchs and key in _SHAPED_AS_PARAMETER
            if is_alike and _is_torchs(value, "Tensor") and value.shape != parameter.shape:
                problems.append(
                    f"{file}['state'][{index}][{key!r}]: shape {tuple(parameter.shape)} expected, the checkpoint has {tuple(value.shape)}"
                )
    return problems


def _plan_refill(checkpoint: Any, file: str, optimizer: torch.optim.Optimizer, weights_only: bool) -> Callable[[], list[str]] | None:
    """As plan(), into the tensors that an optimizer already has. None: it has none yet, or others."""
    current = optimizer.state_dict()
    if not current["state"]:
        return None
    into = {"state": current["state"], "param_groups": [dict(group) for group in current["param_groups"]]}
    try:
        fill = late.loading.plan_part(checkpoint._map(file, lazily=True), into, file, weights_only)
    except pickle.UnpicklingError as failure:
        raise _refusal(checkpoint, file, failure) from failure
    except NebulaConfigError:
        return None

    def run() -> list[str]:
        fill()
        optimizer.load_state_dict(into)
        return []

    return run
