"""Lightning's Fabric and its sharding strategies on CPU: trains, may be killed, resumes. Prints one JSON line per step on rank 0.

--kind fabric: one rank or DDP, NebulaCheckpointIO as a plugin. fabric-fsdp, fabric-parallel, fsdp, parallel: Nebula's strategies of Fabric
and of the Trainer. --stock: Lightning's own, to compare with.
"""

import argparse
import json
import os
import signal
import sys
import time
import warnings

import lightning
import nebulaml as nm
import torch
from lightning.fabric import strategies as fabric_strategies
from lightning.pytorch import callbacks
from lightning.pytorch import strategies as trainer_strategies

warnings.filterwarnings("ignore")

parser = argparse.ArgumentParser()
parser.add_argument("--kind", required=True)
parser.add_argument("--dirpath", required=True)
parser.add_argument("--stock", action="store_true")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--keep", type=int, default=-1)
parser.add_argument("--ckpt")
parser.add_argument("--persist")
parser.add_argument("--kill-at", type=int, default=-1)
args = parser.parse_args()
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICES = int(os.environ.get("LOCAL_WORLD_SIZE", WORLD))  # of a node
os.environ.setdefault("NODE_RANK", str(RANK // DEVICES))


def say(**line):
    if RANK == 0:
        print(json.dumps(line), flush=True)


def kill(step):
    if step == args.kill_at:
        time.sleep(0.3 if WORLD > 1 else 0)
        os.kill(os.getpid(), signal.SIGKILL)


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def batch(step):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + RANK))
    return x, x.sum(dim=1, keepdim=True)


def parallelize(model, mesh):
    from torch.distributed.fsdp import fully_shard

    net = getattr(model, "net", model)
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(net, mesh=mesh["data_parallel"])
    return model


def wrap(net):
    """Wraps the model as some programs do by hand: Lightning gives FSDP no device if it is a CPU, and FSDP then looks for another one."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({torch.nn.Linear})
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), auto_wrap_policy=policy, use_orig_params=True)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def configure_model(self):
        if getattr(self, "is_ready", False):
            return
        self.is_ready = True
        if args.kind == "parallel":
            parallelize(self, self.device_mesh)
        else:
            self.net = wrap(self.net)

    def training_step(self, _, index):
        x, y = batch(self.global_step)
        return torch.nn.functional.mse_loss(self.net(x), y)

    def on_train_batch_end(self, outputs, *_):
        say(step=self.trainer.global_step, loss=outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)


class Kill(callbacks.Callback):
    def on_train_batch_end(self, trainer, *rest):
        kill(trainer.global_step)


def strategy_of(module, name, **options):
    if args.stock:  # of a type of its own: Lightning refuses its FSDPStrategy itself on CPUs
        base = getattr(module, name)
        return type("Stock", (base,), {})(**options)
    return getattr(nm, ("NebulaFabric" if module is fabric_strategies else "Nebula") + name)(**options)


def make_strategy(module):
    if args.kind.endswith("fsdp"):
        return strategy_of(module, "FSDPStrategy", state_dict_type="sharded")
    options = {"parallelize_fn": parallelize} if module is fabric_strategies else {}
    return strategy_of(module, "ModelParallelStrategy", data_parallel_size=WORLD, tensor_parallel_size=1, **options)


def fabric_job():
    plugins = [] if args.stock or args.kind != "fabric" else [nm.NebulaCheckpointIO()]
    strategy = ("ddp" if WORLD > 1 else "auto") if args.kind == "fabric" else make_strategy(fabric_strategies)
    fabric = lightning.Fabric(accelerator="cpu", devices=DEVICES, num_nodes=WORLD // DEVICES, strategy=strategy, plugins=plugins)
    fabric.launch()
    model = fabric.setup_module(wrap(network()) if args.kind == "fabric-fsdp" else network())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0, "seen": []}
    if args.persist:
        nm.init(args.persist)
    if args.ckpt == "newest":
        args.ckpt = os.path.join(args.dirpath, f"{nm.get_latest_checkpoint().tag}.ckpt")
    if args.ckpt:
        fabric.load(args.ckpt, state)
        say(resumed=state["step"])
    for step in range(state["step"] + 1, args.steps + 1):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        state.update(step=step, seen=[*state["seen"], step])
        say(step=step, loss=loss.item())
        if step % 2 == 0:
            fabric.save(os.path.join(args.dirpath, f"step-{step}.ckpt"), state)
        kill(step)
    say(end=True, seen=state["seen"], files=sorted(os.listdir(args.dirpath)))


def trainer_job():
    options = {"dirpath": args.dirpath, "every_n_train_steps": 2, "save_top_k": args.keep, "filename": "{step}"}
    options.update(monitor="step", mode="max") if args.keep > 0 else None
    saver = callbacks.ModelCheckpoint(**options) if args.stock else nm.NebulaCallback(**options)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=WORLD, strategy=make_strategy(trainer_strategies), max_steps=args.steps, logger=False,
        callbacks=[saver, Kill()], enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(range(100)), ckpt_path=args.ckpt)
    nm.flush_persistence() if not args.stock else None
    say(end=True, seen=[], files=sorted(os.listdir(args.dirpath)))


if __name__ == "__main__":
    fabric_job() if args.kind.startswith("fabric") else trainer_job()
    sys.exit(0)
