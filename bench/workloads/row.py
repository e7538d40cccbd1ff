"""500 MB in 50 tensors, in huge pages, for ten saves in a row."""

from ..workload import Workload

WORKLOAD = Workload(
    name="row",
    title="500 MB in 50 tensors",
    sizes={f"layer{i:02d}.weight": 2_500_000 for i in range(50)},
    quick_sizes={f"layer{i:02d}.weight": 2_500_000 for i in range(10)},
    huge=True,
)
