"""Keys of a module's state without the wrappers of torch around the module or its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["own_keys", "plain_key", "plain_keys", "plain_name"]

_COMPILED = "_orig_mod"  # the attribute of torch.compile's wrapper, which becomes a part of each key below it


def plain_key(key: str) -> str:
    """Returns the key that a value would have if no module was compiled."""
    return ".".join(part for part in key.split(".") if part != _COMPILED) if _COMPILED in key else key


def plain_name(name: str) -> str:
    """Returns the name of a parameter in the module inside DistributedDataParallel and torch.compile."""
    name = plain_key(name)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def plain_keys(state: Any) -> Any:
    """Returns a state_dict() with plain keys: the same object if its keys are plain, or if two of them would become one."""
    if not isinstance(state, dict) or not any(isinstance(key, str) and _COMPILED in key for key in state):
        return state
    renamed = _renamed(state, lambda key: plain_key(key) if isinstance(key, str) else key)
    return renamed if len(renamed) == len(state) else state


def own_keys(state: Any, like: dict[str, Any]) -> Any:
    """Returns a state with plain keys under the keys of another one, which is that of a module with compiled parts."""
    own = {plain_key(key): key for key in like}
    return _renamed(state, lambda key: own.get(key, key)) if isinstance(state, dict) and own.keys() != like.keys() else state


def _renamed(state: dict[Any, Any], name: Callable[[Any], Any]) -> dict[Any, Any]:
    renamed = type(state)((name(key), value) for key, value in state.items())
    if hasattr(state, "_metadata"):  # the versions of the modules, by which they read older states
        renamed._metadata = {name(key): value for key, value in state._metadata.items()}  # type: ignore[attr-defined]
    return renamed
