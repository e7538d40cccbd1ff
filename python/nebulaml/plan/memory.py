"""Memory of model and optimizer states by ZeRO stage, and the sizes of checkpoints. All sizes are bytes; Adam, 16-bit weights."""

from __future__ import annotations

import dataclasses

__all__ = ["ESTIMATOR_SOURCE", "GUIDE_SOURCE", "STAGES", "Share", "autotuner", "checkpoint", "estimator", "guide", "seed_stage"]

STAGES = (0, 1, 2, 3)
GUIDE_SOURCE = "the guide's 20 bytes a parameter: 2 weights, 2 gradients, 8 Adam, 4 master weights, 4 gradients in 32 bit"
ESTIMATOR_SOURCE = (
    "DeepSpeed 0.19.6: estimate_zero2_model_states_mem_needs, estimate_zero3_model_states_mem_needs; it has none for stages 0 and 1"
)
WEIGHTS = 2
OPTIMIZER = 12  # 32-bit master weights and Adam's two moments
ESTIMATOR_FACTOR = 1.5  # DeepSpeed's additional_buffer_factor, of host memory


@dataclasses.dataclass(frozen=True)
class Share:
    """Bytes of one GPU, and of its node's host memory."""

    gpu: float
    host: float


def guide(parameters: int, stage: int, gpus: int) -> float:
    """Returns bytes per GPU by the rule of 20 bytes a parameter. The states that a stage partitions are divided by the number of GPUs."""
    whole = {0: 20, 1: 4, 2: 2, 3: 0}[stage]
    return parameters * (whole + (20 - whole) / gpus)


def estimator(parameters: int, largest_layer: int, stage: int, gpus_per_node: int, nodes: int, offload: str = "none") -> Share | None:
    """Returns the result of DeepSpeed's estimators with zero_init. offload: "none", "optimizer" or "all". None: DeepSpeed has none."""
    gpus = gpus_per_node * nodes
    if stage == 2:
        if offload == "none":
            return Share(2 * parameters + int(18 * parameters / gpus), parameters * 4 * gpus_per_node * ESTIMATOR_FACTOR)
        return Share(2 * parameters, parameters * max(4 * gpus, 16) * ESTIMATOR_FACTOR)
    if stage != 3:
        return None
    layer = 4 * largest_layer
    if offload == "none":
        return Share(layer + int(18 * parameters / gpus), layer * gpus_per_node * ESTIMATOR_FACTOR)
    if offload == "optimizer":
        return Share(layer + int(2 * parameters / gpus), parameters * 16 / nodes * ESTIMATOR_FACTOR)
    return Share(layer, parameters * 18 / nodes * ESTIMATOR_FACTOR)


def autotuner(parameters: int, stage: int, gpus: int) -> float:
    """Returns bytes per GPU by DeepSpeed's autotuner: 2 weights, 2 gradients, 16 optimizer (get_instantiation_memory_required_per_gpu)."""
    return parameters * (
        (2 / gpus if stage >= 3 else 2) + (2 / gpus if stage >= 2 else 2) + (16 / gpus if stage >= 1 else 16)
    )


def checkpoint(parameters: int, stage: int, gpus_per_node: int, nodes: int) -> tuple[float, float, float]:
    """Returns bytes of a checkpoint: of the rank with the largest share, of the node with the largest share, and in all.

    It counts 14 bytes a parameter: 2 for 16-bit weights, 12 for optimizer states. Up to stage 2 every rank has all weights, and rank 0
    writes them. From stage 1 on each rank writes its part of the optimizer states; at stage 0 rank 0 writes all.
    """
    gpus = gpus_per_node * nodes
    total = float(parameters * (WEIGHTS + OPTIMIZER))
    if stage == 0:
        return total, total, total
    shard = parameters * OPTIMIZER / gpus
    if stage == 3:
        shard = total / gpus
        return shard, shard * gpus_per_node, total
    weights = parameters * WEIGHTS
    return shard + weights, shard * gpus_per_node + weights, total


def seed_stage(parameters: int) -> int:
    """Returns the stage to try first: partitioning costs communication, and small models gain nothing."""
    for stage, limit in ((0, 300e6), (1, 1e9), (2, 10e9)):
        if parameters < limit:
            return stage
    return 3
