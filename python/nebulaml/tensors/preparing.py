"""Makes memory for the first save in the background."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from .._session import engine
from . import device, pickling

__all__ = ["prepare", "state_to_come"]


def prepare(owner: engine.Engine, state: Any, item: Any) -> None:
    """Announces the file of ``state``, the value that is saved of ``item``. The agent makes images for it.

    The tensors of ``state`` move to huge pages. Returns at once. State that an optimizer makes at its first step is counted.
    """
    owner.is_prepared = True
    taken = pickling.outline(state)
    pickle, found = taken.pickle, taken.storages
    device.expect(found)
    for size in state_to_come(item):
        found.append(0, size, None)
    owner.session(patient=True).prepare(len(pickle), found)
    owner.watch()  # its thread may keep the interpreter's lock for 5 ms when it starts


def state_to_come(item: Any) -> list[int]:
    """Returns the bytes of each tensor that the first step of an optimizer of torch makes. It is empty for other objects.

    It is also empty if the optimizer has state already. A copy of the optimizer on the meta device takes that step.
    """
    if not isinstance(item, torch.optim.Optimizer) or item.state or not type(item).__module__.startswith("torch.optim"):
        return []
    twin = copy.copy(item)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        group | {"params": [_without_memory(each) for each in group["params"]]} for group in item.param_groups
    ]
    # The program's hooks must run only at its own steps.
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        with torch.no_grad():
            inspect.unwrap(type(item).step)(twin)
    except Exception:  # the step needs a closure, or values
        return []
    return [each.nbytes for state in twin.state.values() for each in state.values() if isinstance(each, torch.Tensor)]


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    twin = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        twin.grad = torch.empty_like(twin)
    return twin
