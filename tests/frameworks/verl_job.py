"""verl's FSDP checkpoint manager on two CPU ranks, and its checkpoint callback on rank 0, which takes the part of the driver.

One JSON line per step on rank 0. --stock: verl's own manager and callback, to compare with.
"""

import argparse
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import verl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

parser = argparse.ArgumentParser()
parser.add_argument("--run", required=True)
parser.add_argument("--stock", action="store_true")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--from-step", type=int, help="resume from this step, as with verl's resume_path")
parser.add_argument("--seed", type=int, default=0, help="of the data")
args = parser.parse_args()


def say(**line):
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


class Config(dict):
    """The part of verl's configuration that the callback uses."""

    trainer = {} if args.stock else {"checkpoint_callback_class": "nebulaml.integrations.verl.NebulaCheckpointCallback"}


def manager_class():
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    if args.stock:
        return FSDPCheckpointManager
    from nebulaml.integrations.verl import make_manager
    from verl.workers.engine.base import EngineRegistry

    # verl has loaded the entry point, and its registry answers with the engine of this vendor.
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "NebulaFSDPEngineWithLMHead", verl.__file__
    return make_manager()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.transformer.h[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    manager = manager_class()(model, optimizer, schedule)
    callback = build_checkpoint_callback(Config())
    found = find_latest_ckpt_path(args.run) if args.from_step is None else os.path.join(args.run, f"global_step_{args.from_step}")
    first = 0
    if found is not None:
        manager.load_checkpoint(os.path.join(found, "actor"))
        first = int(found.rpartition("_")[2])
    say(resumed=first)
    for step in range(first + 1, args.steps + 1):
        ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(args.seed + 100 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        say(step=step, loss=loss.item())
        if step % 2 == 0:
            folder = os.path.join(args.run, f"global_step_{step}")
            manager.save_checkpoint(os.path.join(folder, "actor"), None, step, max_ckpt_to_keep=2)
            if dist.get_rank() == 0:
                callback.on_save(None, step, folder, async_save=True)
                if step == 2 and not args.stock:
                    assert callback.wait(60)
        if step == args.kill_at:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 0 and not args.stock:
        assert callback.wait(60)
    say(end=True, files=sorted(os.listdir(args.run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
