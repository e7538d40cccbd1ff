"""The weights of bench.publish: bfloat16 tensors, of which a share of the elements changes before each publication."""

from __future__ import annotations

from typing import Any

TENSORS = 32


def make(gib: float) -> dict[str, Any]:
    import torch

    elements = int(gib * (1 << 30) / 2 / TENSORS)
    return {f"layer.{index}.weight": torch.randn(elements).to(torch.bfloat16) for index in range(TENSORS)}


def change(state: dict[str, Any], percent: float, seed: int) -> None:
    """Changes so many percent of the elements."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        count = int(tensor.numel() * percent / 100)
        at = torch.randint(0, tensor.numel(), (count,), generator=generator)
        tensor.view(torch.int16)[at] ^= torch.randint(1, 8, (count,), generator=generator).to(torch.int16)
