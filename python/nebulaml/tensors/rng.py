"""The state of all random number generators of a training program, as one value that can be saved."""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

import torch

from ..errors import NebulaConfigError

__all__ = ["rng_state", "set_rng_state"]

log = logging.getLogger("nebulaml")


def rng_state() -> dict[str, Any]:
    """Returns the state of the generators of torch, Python, numpy (if it is loaded) and all CUDA devices.

    It consists of tensors and plain values, so weights_only=True can read it. Each rank has its own state: save it under a name of
    that rank.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = _plain(sys.modules["numpy"].random.get_state(legacy=False))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Sets the generators to a state that ``rng_state()`` returned. Generators that are not in it stay as they are.

    Raises NebulaConfigError for any other value.
    """
    if not isinstance(state, dict) or "torch" not in state:
        raise NebulaConfigError(f"set_rng_state() takes what rng_state() returned, not {type(state).__name__}")
    torch.set_rng_state(state["torch"].cpu())
    if "python" in state:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(_arrays(state["numpy"], numpy))
    if "cuda" in state:
        count = torch.cuda.device_count()
        if count != len(state["cuda"]):
            log.warning(
                "nebula: random state of %d CUDA devices, but %d are here: restoring what fits", len(state["cuda"]), count
            )
        for device, saved in enumerate(state["cuda"][:count]):
            torch.cuda.set_rng_state(saved.cpu(), device)


def _plain(value: Any) -> Any:
    """Converts arrays to tensors, and numpy's scalars to Python's. pickle.loads cannot read tensors of unsigned types: they become signed."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if hasattr(value, "__array__"):
        signed = value.view(f"i{value.itemsize}") if value.dtype.kind == "u" else value
        return torch.from_numpy(signed.copy()) if value.ndim else value.item()
    return value


def _arrays(value: Any, numpy: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays(part, numpy) for key, part in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    array = value.cpu().numpy()
    return array.view(f"u{array.itemsize}")  # all arrays of numpy's generators are unsigned
