"""Memory for the first saves, without a call of the program: where it shows its modules and optimizers, or at the first step of an optimizer.

It is prepared once for a session, before the session's first save. The agent makes it in the background, within its bounds, and gives it back
if memory is short. Nothing here raises, or calls code of the program.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._session import engine
from . import preparing

__all__ = ["expect", "follow"]

log = logging.getLogger("nebulaml")

DEVICES = ("cpu", "cuda")  # tensors of others would be copied to look at them

_waiting: weakref.WeakSet[engine.Engine] = weakref.WeakSet()  # sessions that were opened since an optimizer has stepped
_is_hooked = False


def expect(owner: engine.Engine, items: Iterable[Any]) -> None:
    """Prepares for a file of each module and optimizer, unless the session has saved or prepared already."""
    if owner.is_reader or owner.is_prepared or not owner.has_session():
        return
    owner.is_prepared = True
    for item in items:
        try:
            tensors = _tensors_of(item)
            if (tensors or isinstance(item, torch.optim.Optimizer)) and all(tensor.device.type in DEVICES for tensor in tensors):
                preparing.prepare(owner, tensors, item)
        except Exception as failure:  # the first save makes its memory itself
            log.debug("nebula: no memory was prepared for the first saves: %s", failure)
            return


def follow(owner: engine.Engine) -> None:
    """Prepares for the parameters and the state of the first optimizer of torch that steps, if nothing else comes before."""
    global _is_hooked
    _waiting.add(owner)
    if not _is_hooked:
        _is_hooked = True
        register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _waiting or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return
    owners = list(_waiting)
    _waiting.clear()
    if len(owners) == 1:  # of several, nobody knows which one will save
        expect(owners[0], [[each for group in optimizer.param_groups for each in group["params"]], optimizer])


def _tensors_of(item: Any) -> list[torch.Tensor]:
    """Returns the tensors, or this rank's parts of them. It is empty for an object of another kind, whose state is small or not known."""
    found: list[Any]
    if isinstance(item, torch.nn.Module):
        found = [*item.parameters(), *item.buffers()]
    elif isinstance(item, torch.optim.Optimizer):
        found = [each for state in item.state.values() if isinstance(state, dict) for each in state.values()]
    else:
        found = item if isinstance(item, list) else []
    tensors = [getattr(each, "_local_tensor", each) for each in found if isinstance(each, torch.Tensor)]
    return [each.detach() for each in tensors]
