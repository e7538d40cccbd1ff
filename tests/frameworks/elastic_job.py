"""An elastic job of torchrun: DDP, or FSDP2 through nebulaml.dcp. It trains up to the gate, and saves after each step.

The gate is a file "<step> <world>": training waits at that step, and while it has fewer ranks than <world>. A worker that is ahead of the gate fails.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

import nebulaml as nm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

parser = argparse.ArgumentParser()
parser.add_argument("--persist", required=True)
parser.add_argument("--place", type=Path, required=True, help="the gate, the metrics and what is said of each start")
parser.add_argument("--way", choices=["ddp", "fsdp2"], default="ddp")
parser.add_argument("--interval", default="0")
parser.add_argument("--replicas", type=int, default=0)
parser.add_argument("--steps", type=int, default=1000)
args = parser.parse_args()

GLOBAL_BATCH, WIDTH = 12, 512

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(16, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 16)).double()
data = torch.randn(500, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
if args.way == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
nm.init(args.persist, args.interval, 3, replicas=args.replicas)
metrics = nm.MetricsLog(args.place / "metrics.jsonl")


def say(**words):
    line = json.dumps({"node": os.environ["NEBULA_NODE_ID"], "rank": rank, "world": world, "at": time.time(), **words}) + "\n"
    with open(args.place / "said.jsonl", "ab", buffering=0) as file:
        file.write(line.encode())


def whole_state(step):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "extra": {"step": step}}


def save(step):
    tag = f"global_step{step}"
    if args.way == "fsdp2":
        nm.dcp.async_save(whole_state(step), checkpoint_id=f"{args.persist}/{tag}")
        return nm.Checkpoint(tag)
    checkpoint = nm.Checkpoint(tag, -2)
    if rank == 0:
        checkpoint.save("state.pt", {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step})
    checkpoint.save(f"rng{rank}.pt", nm.rng_state())
    checkpoint.commit()
    return checkpoint


def load():
    began = time.monotonic()
    latest = nm.get_latest_checkpoint()
    if latest is None:
        say(resumed=0)
        return 0
    if args.way == "fsdp2":
        found = whole_state(-1)
        dcp.load(found, storage_reader=nm.dcp.NebulaStorageReader(f"{args.persist}/{latest.tag}"))
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
        step = found["extra"]["step"]
    else:
        found = latest.load("state.pt")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optim"])
        step = found["step"]
    assert step == latest.step, (step, latest.tag)
    say(resumed=step, seconds=time.monotonic() - began, state=latest.state)
    return step


def gate():
    try:
        return tuple(map(int, (args.place / "gate").read_text().split()))
    except (OSError, ValueError):
        return (0, 0)


if args.way == "fsdp2":
    import nebulaml.dcp
first = load()
metrics.rewind(first)
sampler = nm.ElasticSampler(len(data), global_batch=GLOBAL_BATCH, rank=rank, world_size=world, seed=3)
last = None
for step in range(first, args.steps):
    stopped = False
    while not (step < gate()[0] and world >= gate()[1]):
        if not stopped:
            stopped = True
            if last is not None:
                with contextlib.suppress(nm.NebulaTimeout):
                    last.wait("replicated" if args.replicas and world > 1 else "committed", timeout=30)
            say(waits=step, state=None if last is None else last.state)
        if 0 < gate()[0] < step:
            sys.exit(1)
        time.sleep(0.05)
    epoch, start = sampler.position(step)
    mine = next(iter(sampler.batches(epoch, start)))
    inputs = data[list(mine)]
    optimizer.zero_grad()
    loss = (model(inputs) - inputs).square().mean()
    (loss * mine.weight).backward()
    optimizer.step()
    total = loss.detach() * len(mine)
    dist.all_reduce(total)
    metrics.log(step + 1, loss=total.item() / mine.size, world=world)
    last = save(step + 1)
say(end=True)
nm.flush_persistence()
dist.barrier()
dist.destroy_process_group()
sys.exit(0)
