"""verl's interface of checkpoint engines: two ranks of FSDP2 are the actor, the third one is a rollout, and this program is verl's driver.

It calls the engines in the order of verl's CheckpointEngineManager. Rank 0 says for each step whether the rollout has the actor's weights.
"""

import argparse
import asyncio
import json
import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

parser = argparse.ArgumentParser()
parser.add_argument("--path", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--steps", required=True, help="numbers with commas")
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--kill", action="store_true")
args = parser.parse_args()


async def received(engine, step):
    return {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=step)}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    mesh = DeviceMesh("cpu", [0, 1])
    model = torch.nn.Sequential(torch.nn.Linear(30, 70), torch.nn.Linear(70, 30), torch.nn.BatchNorm1d(30))
    if rank < 2:
        fully_shard(model, mesh=mesh)
    import_external_libs("nebulaml.integrations.verl_weights")  # as custom_backend_module
    kind = CheckpointEngineRegistry.get("nebula")
    role = {"is_master": rank == 0} if rank < 2 else {}
    engine = CheckpointEngineRegistry.new("nebula", bucket_size=1 << 20, path=args.path, timeout=60, **role)

    def gathered():  # as get_per_tensor_param() of verl's FSDP engine
        for name, tensor in model.state_dict().items():
            yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    for step in map(int, args.steps.split(",")):
        if rank < 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().add_(step + args.seed)
            whole = dict(gathered())
            if rank == 0:
                torch.save(whole, f"{args.out}/{args.seed}-{step}.pt")
        metadata = [None] * 3
        dist.all_gather_object(metadata, engine.prepare())
        actors, rollouts = kind.build_topology(2, 1, metadata)
        engine.init_process_group(**{name: (actors[name] + rollouts[name])[rank] for name in actors})
        if rank < 2:
            asyncio.run(engine.send_weights(gathered(), global_steps=step))
        else:
            found = asyncio.run(received(engine, step))
            wanted = torch.load(f"{args.out}/{args.seed}-{step}.pt")
            same = found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
        engine.finalize()
        said = [None] * 3
        dist.all_gather_object(said, same if rank == 2 else None)
        if rank == 0:
            print(json.dumps({"step": step, "same": said[2]}), flush=True)
    if args.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


main()
