"""A workload: named tensors whose values say which version they are of."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace

import torch

VALUES = 1 << 20  # small enough that adding a version number to a float32 stays exact


@dataclass(frozen=True)
class Workload:
    """Names and numbers of float32 elements; version v of a tensor is its random base plus v."""

    name: str
    title: str
    sizes: dict[str, int]
    quick_sizes: dict[str, int] = field(default_factory=dict)
    huge: bool | None = None  # in huge pages or small ones, by torch's own switch; None: as a program gets them
    variables: dict[str, str] = field(default_factory=dict)  # of every process that makes these tensors, beside that switch

    def quick(self) -> Workload:
        """The same in less, for a short look."""
        return replace(self, title=self.title + " (quick)", sizes=self.quick_sizes or self.sizes)

    def scaled(self, scale: float) -> Workload:
        """The same tensors, each smaller: for a look at whether all runs, not for figures."""
        if scale == 1:
            return self
        sizes = {name: max(1, int(size * scale)) for name, size in self.sizes.items()}
        return replace(self, title=f"{self.title} (scaled by {scale:g})", sizes=sizes)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every process that makes these tensors. With the switch torch advises tensors of 2 MiB and more."""
        return self.variables | ({} if self.huge is None else {"THP_MEM_ALLOC_ENABLE": "1" if self.huge else "0"})

    @property
    def bytes(self) -> int:
        return 4 * sum(self.sizes.values())

    def base(self, name: str) -> torch.Tensor:
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.empty(self.sizes[name]).random_(0, VALUES, generator=random)

    def state(self) -> dict[str, torch.Tensor]:
        """Version 0 of everything."""
        return {name: self.base(name) for name in self.sizes}

    @staticmethod
    def next_version(state: dict[str, torch.Tensor]) -> None:
        """Changes every element of every tensor in place, as an optimizer step does."""
        for tensor in state.values():
            tensor.add_(1)

    def differs(self, state: dict[str, torch.Tensor], version: int) -> str | None:
        """What is wrong with a state that should be that version, or None when every bit is right."""
        if list(state) != list(self.sizes) and set(state) != set(self.sizes):
            return f"{len(state)} tensors instead of {len(self.sizes)}"
        for name in self.sizes:
            if not torch.equal(state[name], self.base(name).add_(version)):
                return f"{name} does not hold the values of version {version}"
        return None
