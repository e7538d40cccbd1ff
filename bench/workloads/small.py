"""3,000 tensors of 256 B to 64 KiB. The cost of names, records and calls dominates that of bytes."""

from ..workload import Workload

SIZES = (64, 256, 1024, 4096, 16384)

WORKLOAD = Workload(
    name="small",
    title="3,000 small tensors",
    sizes={f"block{i // 10:03d}.part{i % 10}.weight": SIZES[i % len(SIZES)] for i in range(3000)},
)
