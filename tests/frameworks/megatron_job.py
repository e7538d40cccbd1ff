"""Megatron-Core's distributed checkpoints on two CPU ranks: a toy model whose weights are sharded. One JSON line per step on rank 0.

--way strategy: the job gives NebulaSaveStrategy; used: use() makes Megatron take it; stock: Megatron's own strategy, which needs no GPU for a synchronous save of CPU tensors.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_dist

parser = argparse.ArgumentParser()
parser.add_argument("--run", required=True)
parser.add_argument("--way", choices=["strategy", "used", "stock"], default="strategy")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--kill-at", type=int, default=-1)
args = parser.parse_args()


def say(**line):
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


def begin_save(state, folder):
    """Saves as Megatron-LM does. Returns the request that Megatron's queue would get, or None if the save is done."""
    from nebulaml.integrations import megatron

    if args.way == "stock":
        return dist_checkpointing.save(state, folder)
    strategy, more = megatron.NebulaSaveStrategy() if args.way == "strategy" else None, {}
    if hasattr(torch_dist, "get_async_strategy"):  # Megatron-Core 0.17 and later
        more = {"async_strategy": "mcore"}
        if args.way == "used":
            from megatron.training import checkpointing  # save_checkpoint() there takes its strategy by this name

            strategy = checkpointing.TorchDistSaveShardedStrategy()
    return dist_checkpointing.save(state, folder, strategy, async_sharded_save=True, **more)


def latest(run):
    """Returns the step that the tracker names, as Megatron-LM's finalization writes it."""
    tracker = run / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


class Pending:
    """Like Megatron's AsyncCallsQueue without a device: the request runs in a process, and is finalized when that process ends."""

    def __init__(self, run):
        self.run, self.step, self.request, self.pid = run, 0, None, 0

    def begin(self, step, request):
        self.end(blocking=True)
        self.step, self.request, self.pid = step, request, os.fork()
        if self.pid == 0:
            request.async_fn(*request.async_fn_args)
            os._exit(0)

    def end(self, blocking):
        if self.request is None:
            return
        ended = torch.tensor(int(os.waitpid(self.pid, 0 if blocking else os.WNOHANG)[0] != 0))
        if not blocking:
            if int(ended):
                self.pid = -1
            dist.all_reduce(ended, dist.ReduceOp.MIN)
            if not int(ended):
                return
        for finalize in self.request.finalize_fns:
            finalize()
        if dist.get_rank() == 0:
            (self.run / "latest_checkpointed_iteration.txt").write_text(str(self.step))
        self.request = None
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    run = Path(args.run)
    torch.manual_seed(rank)
    weight, moment = torch.randn(8, 16), torch.zeros(8, 16)  # this rank's rows
    generator = torch.Generator().manual_seed(7)

    def state(step):
        return {
            "weight": ShardedTensor.from_rank_offsets("weight", weight, (0, rank, world)),
            "moment": ShardedTensor.from_rank_offsets("moment", moment, (0, rank, world)),
            "rng": ShardedObject("rng", generator.get_state(), (world,), (rank,)),
            "step": step,
        }

    if args.way == "used":
        from nebulaml.integrations.megatron import use

        use()
    first, pending = latest(run), Pending(run)
    if first:
        loaded = dist_checkpointing.load(state(0), str(run / f"iter_{first:07d}"))
        assert loaded["step"] == first
        weight, moment = loaded["weight"], loaded["moment"]
        generator.set_state(loaded["rng"])
    say(resumed=first)
    for step in range(first + 1, args.steps + 1):
        x = torch.randn(4, 16, generator=generator)
        part = x @ weight.T
        loss = part.square().mean()
        moment = 0.9 * moment + 2 * part.T @ x / part.numel()
        weight = weight - 0.1 * moment
        dist.all_reduce(loss)
        say(step=step, loss=loss.item())
        if step % 2 == 0:
            folder = run / f"iter_{step:07d}"
            folder.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            request = begin_save(state(step), str(folder))
            if request is not None:
                pending.begin(step, request)
            elif rank == 0:
                (run / "latest_checkpointed_iteration.txt").write_text(str(step))
        if step == args.kill_at:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3:
            pending.end(blocking=True)  # so that a run which is killed later has one
    pending.end(blocking=True)
    say(end=True, files=sorted(os.listdir(run / f"iter_{args.steps:07d}")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
