"""A loop with accelerate on CPU: trains, saves with save_state, may be killed, resumes. Prints one JSON line per step on rank 0."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--way", choices=["attach", "stock"], default="attach")
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--persist", help="the storage path, in place of the adapter's own beside the output")
parser.add_argument("--automatic", action="store_true", help="directories that accelerate numbers, of which it keeps two")
parser.add_argument("--fsdp", action="store_true", help="FSDP2")
parser.add_argument("--deepspeed", type=int, metavar="STAGE", help="ZeRO")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--resume", help='a directory, or "newest" to let accelerate find it')
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--scaled", action="store_true", help="with a gradient scaler and a StatefulDataLoader's state, which every rank writes")
parser.add_argument("--start", action="store_true", help="each rank says where it starts, and ends")
parser.add_argument("--hide", metavar="NAME", help="the other ranks have listed directories before this one was there")
args = parser.parse_args()
if args.hide and os.environ["RANK"] != "0":
    listed = os.listdir
    os.listdir = lambda *where: [name for name in listed(*where) if name != args.hide]


class Counter:
    """An object that the user registers. It is saved as custom_checkpoint_0.pkl."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Loader:
    """The part of accelerate's loader that its checkpoints use. The state names the rank that it is of."""

    use_stateful_dataloader = True
    dataset = None

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {"rank": self.rank}

    def load_state_dict(self, state):
        self.loaded = state["rank"]


def deepspeed_plugin():
    import deepspeed
    from accelerate import DeepSpeedPlugin

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    buckets = {"reduce_bucket_size": 100000, "allgather_bucket_size": 100000}
    return DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": args.deepspeed, **buckets},
        }
    )  # fmt: skip


def main():
    zero = deepspeed_plugin() if args.deepspeed is not None else None
    configuration = ProjectConfiguration(project_dir=str(args.output), automatic_checkpoint_naming=args.automatic, total_limit=2)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False) if args.fsdp else None
    accelerator = Accelerator(cpu=zero is None, project_config=configuration, fsdp_plugin=plugin, deepspeed_plugin=zero)
    assert (zero is not None) == (accelerator.distributed_type == DistributedType.DEEPSPEED)
    if args.fsdp:  # without a device accelerate leaves the plugin out and trains as DDP; told that it counts, all else works
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
    rank = accelerator.process_index
    set_seed(5)
    tied = torch.nn.Linear(8, 8, bias=False)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), tied, torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if args.way == "attach":
        import nebulaml as nm

        if args.persist:
            nm.init(args.persist, 0)
        assert nm.attach(accelerator) is accelerator
    if args.scaled:  # as with fp16, and with torchdata's StatefulDataLoader
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        accelerator._dataloaders.append(Loader(rank))
    if args.resume:
        accelerator.load_state(None if args.resume == "newest" else args.resume)
        accelerator.project_configuration.iteration = counter.step // 2
        if rank == 0:
            print(json.dumps({"resumed": counter.step}), flush=True)
    if args.start:
        print(json.dumps({"started": counter.step}), flush=True)
        accelerator.wait_for_everyone()
        return 0
    for step in range(counter.step + 1, args.steps + 1):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))  # dropout draws from the saved state
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.step = step
        if rank == 0:
            print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
        if step % 2 == 0:
            accelerator.save_state(None if args.automatic else str(args.output / f"step_{step}"))
        if step == args.kill_at:
            accelerator.wait_for_everyone()
            time.sleep(0.2)  # the other rank is past the barrier too
            os.kill(os.getpid(), signal.SIGKILL)
    state = accelerator.get_state_dict(model)
    if rank == 0:
        print(json.dumps({"end": True, "weights": {name: value.double().sum().item() for name, value in state.items()}}), flush=True)
    accelerator.wait_for_everyone()
    return 0


if __name__ == "__main__":
    sys.exit(main())
