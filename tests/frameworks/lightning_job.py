"""A small Lightning job on CPU: fits, may be killed or fail, resumes. Prints one JSON line per step on rank 0.

--way nebula: NebulaCallback; io: NebulaCheckpointIO as a plugin; stock: Lightning's own, to compare with. With --deepspeed the way is that
of the strategy: NebulaDeepspeedStrategy, or Lightning's own.
"""

import argparse
import importlib
import json
import os
import signal
import sys
import time
import warnings

import torch

warnings.filterwarnings("ignore")


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", default="lightning.pytorch")
    parser.add_argument("--way", choices=["nebula", "io", "stock"], default="nebula")
    parser.add_argument("--persist")
    parser.add_argument("--dirpath", required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--save-last", nargs="?", const=True)
    parser.add_argument("--interval", type=float, default=0)
    parser.add_argument("--ckpt")
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--interrupt-at", type=int, default=-1)
    parser.add_argument("--devices", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--deepspeed", type=int, metavar="STAGE")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--then", choices=["", "best", "options", "twice", "api", "every", "start"], default="")  # start: it ends there
    parser.add_argument("--hide", action="store_true", help='the other ranks have looked for "last" before it was there')
    return parser.parse_args()


args = arguments()
pl = importlib.import_module(args.package)
callbacks = importlib.import_module(args.package + ".callbacks")


def rank():
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0"))


if args.hide and rank():
    callbacks.ModelCheckpoint._find_last_checkpoints = lambda self, trainer: set()


def say(**line):
    if rank() == 0:
        print(json.dumps(line), flush=True)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        return x, x.sum().reshape(1)


class Module(pl.LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        first = torch.nn.Linear(8, width)
        self.net = torch.nn.Sequential(first, torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
        self.tied = first.weight

    def training_step(self, batch, index):
        # Lightning starts its loader anew when it resumes inside an epoch, so the data are a function of the step.
        generator = torch.Generator().manual_seed(1000 * self.global_step + rank())
        x = torch.randn(4, 8, generator=generator)
        y = x.sum(dim=1, keepdim=True)
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, on_step=True)
        self.log("step_number", float(self.global_step), on_step=True)
        return loss

    def test_step(self, batch, index):
        pass

    def on_train_batch_end(self, outputs, batch, index):
        step = self.trainer.global_step
        say(step=step, loss=outputs["loss"].item())
        if step == args.fail_at:
            raise RuntimeError("the user's own error")
        if step == args.interrupt_at:
            raise KeyboardInterrupt

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]


class Kill(callbacks.Callback):
    """Kills all ranks at once, after the checkpoint callbacks."""

    def on_train_start(self, trainer, *rest):
        if args.then == "start":
            from nebulaml._session import ranks

            place = ranks.current()
            print(json.dumps({"started": trainer.global_step, "place": place}), flush=True)  # on each rank
            trainer.strategy.barrier()
            os._exit(0)

    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step == args.kill_at:
            time.sleep(0.2 if trainer.world_size > 1 else 0)
            os.kill(os.getpid(), signal.SIGKILL)


class Host(importlib.import_module(args.package + ".accelerators").CUDAAccelerator):
    """A user's accelerator for the CPU that is a CUDAAccelerator, because Lightning's DeepSpeed strategy accepts only that class."""

    def setup(self, trainer):
        pass

    def setup_device(self, device):
        pass

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def is_available():
        return True


def deepspeed_strategy():
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.deepspeed, "reduce_bucket_size": 100000, "allgather_bucket_size": 100000},
    }
    if args.way == "stock":
        return importlib.import_module(args.package + ".strategies").DeepSpeedStrategy(config=config)
    import nebulaml as nm

    config["nebula"] = {
        "enabled": True,
        "persistent_storage_path": args.persist,
        "persistent_time_interval": args.interval,
        "num_of_version_in_retention": 20,
    }
    return nm.NebulaDeepspeedStrategy(config=config)


def main():
    world = args.devices * args.nodes
    if args.nodes > 1:
        os.environ.setdefault("NODE_RANK", os.environ.get("RANK", "0"))
    options = {
        "dirpath": args.dirpath,
        "every_n_train_steps": args.every,
        "save_top_k": args.top_k,
        "save_last": args.save_last or None,
        "monitor": "step_number" if args.top_k > 0 or args.then == "every" else None,
        "mode": "max",
        "filename": "{step}",
    }
    plugins = []
    if args.way == "stock":
        saver = callbacks.ModelCheckpoint(**options)
    elif args.way == "io":
        import nebulaml as nm

        nm.init(args.persist, args.interval)
        saver, plugins = callbacks.ModelCheckpoint(**options), [nm.NebulaCheckpointIO()]
    else:
        import nebulaml as nm

        params = (
            {"persistent_storage_path": args.persist, "persistent_time_interval": args.interval}
            if args.persist
            else None
        )
        saver = nm.NebulaCallback(**options, config_params=params)
    pl.seed_everything(3)
    accelerator, strategy = "cpu", "ddp" if world > 1 else "auto"
    if args.deepspeed is not None:
        accelerator, strategy = Host(), deepspeed_strategy()
    trainer = pl.Trainer(
        accelerator=accelerator, devices=args.devices, num_nodes=args.nodes, strategy=strategy, max_steps=args.steps, logger=False,
        callbacks=[saver, Kill()], plugins=plugins, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=args.dirpath,
    )  # fmt: skip
    model = Module(args.width)
    loader = torch.utils.data.DataLoader(Data(), batch_size=4)
    try:
        trainer.fit(model, loader, ckpt_path=args.ckpt)
        if trainer.interrupted:  # in Lightning 2.1 fit() returns
            say(interrupted=True)
    except RuntimeError as error:
        say(error=str(error))
    except SystemExit:
        say(interrupted=True)
    if args.then == "best":
        say(best=saver.best_model_path, score=float(saver.best_model_score))
        again = Module.load_from_checkpoint(saver.best_model_path, map_location="cpu")
        say(loaded=again.net[0].weight.double().sum().item())
    if args.then == "options":
        trainer.save_checkpoint(
            os.path.join(args.dirpath, "own.ckpt"),
            storage_options={"is_best": True, "persist_path": args.dirpath + "-other", "unknown": 1},
        )
        if args.deepspeed is None:
            path = nm.get_latest_checkpoint_path("checkpoint", args.dirpath + "-other")
            say(other=path, step=torch.load(path, weights_only=False)["global_step"], own=nm.get_latest_checkpoint().tag)
        trainer.strategy.checkpoint_io.teardown()
    if args.then == "twice":
        trainer.strategy.teardown()
        trainer.save_checkpoint(os.path.join(args.dirpath, "after.ckpt"))
        trainer.strategy.checkpoint_io.teardown()
        trainer.strategy.checkpoint_io.teardown()
    if args.then == "api":
        path = nm.get_latest_checkpoint_path("checkpoint", args.persist)
        say(latest=path, keys=sorted(torch.load(path, weights_only=False)))
    if args.then == "every":
        for folder in sorted(os.scandir(os.path.dirname(args.dirpath)), key=lambda entry: entry.name):
            for name in sorted(os.listdir(folder.path)) if folder.is_dir() else ():
                if name.endswith(".ckpt"):
                    path = os.path.join(folder.path, name)
                    ours, plain = trainer.strategy.checkpoint_io.load_checkpoint(path, weights_only=False), torch.load(path, weights_only=False)
                    assert str(ours) == str(plain), path
                    say(loaded=f"{folder.name}/{name}", step=ours["global_step"])
        if not args.ckpt:
            trainer.test(model, loader, ckpt_path="best")
    weights = {name: value.double().sum().item() for name, value in model.state_dict().items()}
    say(end=True, weights=weights, global_step=trainer.global_step, files=sorted(os.listdir(args.dirpath)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
