"""Builds a DeepSpeed configuration for a plan, which stock DeepSpeed can read: Nebula, autotuning, flops profiler and TensorBoard."""

from __future__ import annotations

import math
from typing import Any

from .planning import Plan

__all__ = ["build"]


def build(plan: Plan, persist_path: str | None) -> dict[str, Any]:
    """Returns the keys of ds_config.json. `nebula` needs a storage path: None means "checkpoints" in the working directory of the job."""
    zero: dict[str, Any] = {"stage": plan.stage.stage}
    if plan.stage.stage in (1, 2):
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if plan.stage.stage == 3:
        zero |= {"overlap_comm": True, "contiguous_gradients": True, "stage3_gather_16bit_weights_on_model_save": False}
        if plan.stage.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if plan.stage.offload == "all":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    every = plan.chosen.storage_interval_s
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "nebula": {
            "enabled": True,
            "persistent_storage_path": persist_path or "checkpoints",
            "persistent_time_interval": math.ceil(every) if math.isfinite(every) else 86400,
            "num_of_version_in_retention": 1,
            "enable_nebula_load": True,
        },
        # `deepspeed --autotuning tune train.py --deepspeed_config ds_config.json` searches the micro batch, with this switched on.
        "autotuning": {"enabled": False, "fast": True, "metric": "throughput", "start_profile_step": 3, "end_profile_step": 5},
        "flops_profiler": {"enabled": False, "profile_step": 5, "module_depth": -1, "top_modules": 3, "detailed": True},
        "tensorboard": {"enabled": False, "output_path": "tensorboard", "job_name": "nebula"},
        "steps_per_print": 100,
    }
