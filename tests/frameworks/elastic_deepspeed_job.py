"""ZeRO with a changing number of ranks and a constant global batch. Rank 0 prints one JSON line per step. The job may kill all its ranks."""

import argparse
import json
import os
import signal
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import nebulaml as nm
import nebulaml.deepspeed
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--persist", required=True)
parser.add_argument("--save-dir", required=True)
parser.add_argument("--stage", type=int, required=True)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--only-weights", choices=["module", "optimizer"], help="load_module_only, or load_optimizer_states=False; the job ends then")
parser.add_argument("--way", choices=["attach", "import"], default="attach")
args = parser.parse_args()
GLOBAL_BATCH = 12

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
model = torch.nn.Sequential(torch.nn.Linear(16, 130), torch.nn.ReLU(), torch.nn.Linear(130, 47), torch.nn.Linear(47, 1))
config = {
    "train_batch_size": GLOBAL_BATCH,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": args.stage,
        "reduce_bucket_size": 100000,
        "allgather_bucket_size": 100000,
        "stage3_param_persistence_threshold": 0,
    },
}
if args.bf16:
    config["bf16"] = {"enabled": True}
if args.way == "import":
    config["nebula"] = {"enabled": True, "persistent_storage_path": args.persist, "persistent_time_interval": 0}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
if args.way == "attach":
    nm.init(args.persist, 0)
    nm.attach(engine)
options = {"module": {"load_module_only": True}, "optimizer": {"load_optimizer_states": False}}.get(args.only_weights, {})
path, state = engine.load_checkpoint(args.save_dir, **options)
if args.only_weights:
    moments = [value for held in engine.optimizer.optimizer.state.values() for name, value in held.items() if name.startswith("exp_avg")]
    sums = [parameter.double().sum().item() for parameter in engine.module.parameters()]
    print(json.dumps({"fresh": not any(value.any() for value in moments), "sums": sums}), flush=True)
    sys.exit(0)
first = state["step"] if path else 0
if rank == 0:
    print(json.dumps({"resumed": first, "world": world}), flush=True)
data = torch.randn(500, 16, generator=torch.Generator().manual_seed(1))
sampler = nm.ElasticSampler(len(data), global_batch=GLOBAL_BATCH, rank=rank, world_size=world, seed=3)
for step in range(first, args.steps):
    epoch, start = sampler.position(step)
    x = data[list(next(iter(sampler.batches(epoch, start))))]
    y = x.sum(dim=1, keepdim=True)
    if args.bf16:
        x, y = x.bfloat16(), y.bfloat16()
    loss = torch.nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    total = loss.detach().float()
    dist.all_reduce(total)
    if rank == 0:
        print(json.dumps({"step": step + 1, "loss": total.item() / world, "lr": engine.get_lr()[0]}), flush=True)
    engine.save_checkpoint(args.save_dir, client_state={"step": step + 1})
    if step + 1 == args.kill_at:
        nm.Checkpoint(f"global_step{step + 1}").wait("committed", timeout=30)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    print(json.dumps({"end": True, "sums": [parameter.double().sum().item() for parameter in engine.module.parameters()]}), flush=True)
engine.destroy()
dist.barrier()
dist.destroy_process_group()
sys.exit(0)
