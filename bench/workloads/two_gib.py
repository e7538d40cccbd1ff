"""2 GiB in 64 tensors of 32 MiB, in pages of 4 KiB."""

from ..workload import Workload

WORKLOAD = Workload(
    name="two_gib",
    title="2 GiB in 64 tensors, pages of 4 KiB",
    sizes={f"layer{i:02d}.weight": 8 << 20 for i in range(64)},
    quick_sizes={f"layer{i:02d}.weight": 4 << 20 for i in range(16)},
    huge=False,
)
