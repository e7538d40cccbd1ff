"""The state of all random number generators of a training program, as one value that can be saved."""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

from .._session import late
from ..errors import NebulaConfigError

__all__ = ["rng_state", "set_rng_state"]

log = logging.getLogger("nebulaml")


def rng_state() -> dict[str, Any]:
    """Returns the state of the generators of torch (if it is installed), Python, numpy (if it is loaded) and all CUDA devices.

    It consists of tensors and plain values, so weights_only=True can read it. Each rank has its own state: save it under a name of
    that rank.
    """
    state: dict[str, Any] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if not late.has_torch():
        return state
    import torch

    state["torch"] = torch.get_rng_state()
    if "numpy" in state:
        state["numpy"] = _plain(state["numpy"], torch)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Sets the generators to a state that ``rng_state()`` returned. Generators that are not in it stay as they are.

    Raises NebulaConfigError for any other value.
    """
    if not isinstance(state, dict) or not state.keys() & {"torch", "python"}:
        raise NebulaConfigError(f"set_rng_state() takes what rng_state() returned, not {type(state).__name__}")
    if "python" in state:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(_arrays(state["numpy"]))
    if "torch" not in state:
        return
    import torch

    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state:
        count = torch.cuda.device_count()
        if count != len(state["cuda"]):
            log.warning(
                "nebula: random state of %d CUDA devices, but %d are here: restoring what fits", len(state["cuda"]), count
            )
        for device, saved in enumerate(state["cuda"][:count]):
            torch.cuda.set_rng_state(saved.cpu(), device)


def _plain(value: Any, torch: Any) -> Any:
    """Converts arrays to tensors, and numpy's scalars to Python's. pickle.loads cannot read tensors of unsigned types: they become signed."""
    if isinstance(value, dict):
        return {key: _plain(part, torch) for key, part in value.items()}
    if hasattr(value, "__array__"):
        signed = value.view(f"i{value.itemsize}") if value.dtype.kind == "u" else value
        return torch.from_numpy(signed.copy()) if value.ndim else value.item()
    return value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays(part) for key, part in value.items()}
    if not hasattr(value, "cpu"):
        return value
    array = value.cpu().numpy()
    return array.view(f"u{array.itemsize}")  # all arrays of numpy's generators are unsigned
