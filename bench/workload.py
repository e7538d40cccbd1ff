"""A workload: named tensors. Their values depend on the version, so each version can be checked."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace

import torch

VALUES = 1 << 20  # so small that a float32 holds value + version exactly


@dataclass(frozen=True)
class Workload:
    """Names and numbers of float32 elements; version v of a tensor is its random base plus v."""

    name: str
    title: str
    sizes: dict[str, int]
    quick_sizes: dict[str, int] = field(default_factory=dict)
    huge: bool | None = None  # True: torch allocates in huge pages; False: in small ones; None: torch's default
    variables: dict[str, str] = field(default_factory=dict)  # more environment variables of every process that makes these tensors

    def quick(self) -> Workload:
        """Returns a smaller workload, for a short run."""
        return replace(self, title=self.title + " (quick)", sizes=self.quick_sizes or self.sizes)

    def scaled(self, scale: float) -> Workload:
        """Returns the workload with smaller tensors, to check that everything runs. Its figures mean nothing."""
        if scale == 1:
            return self
        sizes = {name: max(1, int(size * scale)) for name, size in self.sizes.items()}
        return replace(self, title=f"{self.title} (scaled by {scale:g})", sizes=sizes)

    @property
    def environment(self) -> dict[str, str]:
        """Returns environment variables of every process that makes these tensors. torch's switch applies to tensors of 2 MiB and more."""
        return self.variables | ({} if self.huge is None else {"THP_MEM_ALLOC_ENABLE": "1" if self.huge else "0"})

    @property
    def bytes(self) -> int:
        return 4 * sum(self.sizes.values())

    def base(self, name: str) -> torch.Tensor:
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.empty(self.sizes[name]).random_(0, VALUES, generator=random)

    def state(self) -> dict[str, torch.Tensor]:
        """Returns version 0 of all tensors."""
        return {name: self.base(name) for name in self.sizes}

    @staticmethod
    def next_version(state: dict[str, torch.Tensor]) -> None:
        """Changes every element of every tensor in place, as an optimizer step does."""
        for tensor in state.values():
            tensor.add_(1)

    def differs(self, state: dict[str, torch.Tensor], version: int) -> str | None:
        """Returns the first difference of a state from that version. None: every bit is equal."""
        if list(state) != list(self.sizes) and set(state) != set(self.sizes):
            return f"{len(state)} tensors instead of {len(self.sizes)}"
        for name in self.sizes:
            if not torch.equal(state[name], self.base(name).add_(version)):
                return f"{name} does not hold the values of version {version}"
        return None
