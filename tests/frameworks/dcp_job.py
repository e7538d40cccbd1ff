"""FSDP2 on gloo and CPU, saved and loaded through torch.distributed.checkpoint. One JSON line per step on rank 0."""

import argparse
import json
import os
import signal
import sys
import time
import warnings

import nebulaml as nm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter, async_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.filterwarnings("ignore")

WAYS = {
    "save": lambda state, path: dcp.save(state, storage_writer=NebulaStorageWriter(path)),
    "nebula-async": lambda state, path: async_save(state, checkpoint_id=path),
    "stock-async": lambda state, path: stock_async(state, path),
}
side = None
last = None


def stock_async(state, path):
    """Stock async_save talks in the background, each call on a thread of its own: it deadlocks with FSDP on the default group, and
    with another save on a group of its own. Ours never does."""
    global last
    if last is not None:
        last.result()
    last = dcp.async_save(state, storage_writer=NebulaStorageWriter(path), process_group=side)
    return last


def main() -> int:
    global side
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", required=True)
    parser.add_argument("--way", choices=WAYS, default="nebula-async")
    parser.add_argument("--load", type=int)
    parser.add_argument("--stock-load", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--kill-at", type=int, default=-1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    side = dist.new_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(5, 130), torch.nn.ReLU(), torch.nn.Linear(130, 47), torch.nn.Linear(47, 5))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    nm.init(persistent_storage_path=args.path, persistent_time_interval=0)

    def step_of(number):
        inputs = torch.randn(args.batch, 5, generator=torch.Generator().manual_seed(number))
        mine = inputs.chunk(world)[rank]
        optimizer.zero_grad()
        loss = (model(mine) - mine).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss)
        return loss.item() / world

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments}

    first = 0
    if args.load is not None:
        first = args.load
        whole = {**state(), "extra": {"step": -1}}
        path = os.path.join(args.path, f"step{first}")
        if args.stock_load:
            dcp.load(whole, checkpoint_id=path)
        else:
            dcp.load(whole, storage_reader=NebulaStorageReader(path))
        assert whole["extra"]["step"] == first, whole["extra"]
        set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optim"])
    futures, blocked = [], []
    for number in range(first + 1, args.steps + 1):
        loss = step_of(number)
        if rank == 0:
            print(json.dumps({"step": number, "loss": loss}), flush=True)
        start = time.perf_counter()
        futures.append(WAYS[args.way]({**state(), "extra": {"step": number}}, os.path.join(args.path, f"step{number}")))
        blocked.append(time.perf_counter() - start)
        if number == args.kill_at:
            if args.way == "stock-async":
                futures[-1].result()  # its thread may not have begun the checkpoint that is looked for next
            nm.Checkpoint(f"step{number}").wait("committed", timeout=60)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    for future in futures:
        if hasattr(future, "result"):
            future.result()
    if rank == 0:
        print(json.dumps({"end": True, "blocked": blocked}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
