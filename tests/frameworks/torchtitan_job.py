"""torchtitan's checkpoint manager, optimizers and schedulers around a toy model with FSDP2 on CPU, in the order of its Trainer.

The Trainer itself asks for a device. One JSON line per step on rank 0; --stock: torchtitan's own manager, to compare with.
"""

import argparse
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

parser = argparse.ArgumentParser()
parser.add_argument("--dump", required=True)
parser.add_argument("--stock", action="store_true")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--keep", type=int, default=10)
parser.add_argument("--load-step", type=int, default=-1)
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--initial", help="initial_load_path")
parser.add_argument("--model-only", action="store_true", help="of the initial and of the last checkpoint only the model")
parser.add_argument("--exclude", nargs="*", default=[], help="exclude_from_loading")
parser.add_argument("--leave-open", action="store_true")
args = parser.parse_args()


def say(**line):
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


class TrainState(Stateful):
    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    adamw = default_adamw(lr=1e-2)
    adamw.implementation = "for-loop"
    optimizers = adamw.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=20)
    state = TrainState()
    kind = CheckpointManager
    if not args.stock:
        from nebulaml.integrations import torchtitan

        kind = torchtitan.NebulaCheckpointManager
    config = kind.Config(
        enable=True, interval=2, keep_latest_k=args.keep, last_save_model_only=args.model_only, export_dtype="bfloat16",
        initial_load_path=args.initial, initial_load_model_only=args.model_only, exclude_from_loading=args.exclude,
    )  # fmt: skip
    manager = config.build(
        dataloader=None, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers, states={"train_state": state}, sd_adapter=None,
        base_folder=args.dump,
    )  # fmt: skip
    manager.load(step=args.load_step)
    say(resumed=state.step)
    while state.step < args.steps:
        state.step += 1
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * state.step + dist.get_rank()))
        optimizers.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        say(step=state.step, loss=loss.item())
        manager.save(state.step, last_step=state.step == args.steps)
        if state.step == args.kill_at:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
    if args.leave_open:
        sys.modules["__main__"].kept = manager  # as a global of a script
        return 0
    manager.close()
    say(end=True, files=sorted(os.listdir(os.path.join(args.dump, "checkpoint"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
