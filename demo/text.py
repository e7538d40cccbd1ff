"""Real text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def corpus(limit: int = 8 << 20) -> torch.Tensor:
    """Returns the first ``limit`` bytes of the top-level modules of the standard library, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batch(text: torch.Tensor, size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``size`` random pieces, and the same pieces shifted by one byte. torch's random state decides which ones."""
    starts = torch.randint(len(text) - context - 1, (size,))
    pieces = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return pieces[:, :-1], pieces[:, 1:]
