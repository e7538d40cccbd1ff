"""``python -m nebulaml.studio.tensors FILE`` prints the tensors of a torch file as JSON. It runs no code of the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

MOST = 20000


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _walk(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _walk(part, f"{name}[{index}]")
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        yield name, value


def _describe(name: str, tensor: Any) -> dict[str, Any]:
    import torch

    row: dict[str, Any] = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    row["bytes"] = tensor.numel() * tensor.element_size()
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        flat = tensor.detach()
        row["nan"] = int(torch.isnan(flat).sum())
        row["inf"] = int(torch.isinf(flat).sum())
        finite = flat[torch.isfinite(flat)]
        wide = finite.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)
        row["norm"] = float(torch.linalg.vector_norm(wide)) if wide.numel() else 0.0
    return row


def main(file: str) -> int:
    import torch

    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    rows, more = [], 0
    for name, tensor in _walk(loaded, ""):
        if len(rows) < MOST:
            rows.append(_describe(name, tensor))
        else:
            more += 1
    json.dump({"tensors": rows, "more": more}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
