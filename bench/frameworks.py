"""``python -m bench.frameworks``: the time for which a framework's own save call blocks training, with Nebula and without.

Both sides take turns in one process of the framework's own environment (`.envs`, made by ``make bench-frameworks``). The state has about
500 MB, and every element changes after each save, as in training. At the end the files of Nebula's last save, which have the framework's
own format, must hold the values at the time of that save. The run replaces the tables of bench/results/frameworks.md.
"""

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH, LAYERS = 2048, 10  # 10 * 2048 * 2048 * 4 bytes * (weights + two moments of Adam) = 503 MB
WARMING = 3  # saves that are not counted: in them the engines allocate the memory that later saves use again
PAUSE_S = 3  # after each round: training saves every few minutes, and Nebula prepares memory for seconds between two saves
# Name -> (environment below .envs, "" for .venv; target: how many times faster than the stock call; title)
FRAMEWORKS = {
    "hf": ("hf", 20, "Hugging Face `Trainer`"),
    "lightning": ("lightning", 20, "Lightning `trainer.save_checkpoint`"),
    "dcp": ("", 20, "`dcp.async_save`"),
    "deepspeed": ("deepspeed-0.19.8", 10, "DeepSpeed `engine.save_checkpoint`, ZeRO-1"),
}


class Side:
    """One way to save: the benchmark times `save(step)`, then changes `weights()`. `finish()` waits for background work. `read()` returns
    the weights of the last save."""

    def __init__(self, save, weights, read=None, finish=lambda: None):
        self.save, self.weights, self.read, self.finish = save, weights, read, finish
        self.taken = []


def net():
    import torch

    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def settle(directory):
    """Finishes the writes of a save, so that they do not slow down the other side."""
    import nebulaml as nm

    nm.flush_persistence()
    for path in Path(directory).rglob("*"):
        if path.is_file() and not path.is_symlink():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)


def measure(sides, directory, saves):
    """Measures all sides in turn; Nebula's side is the last. Returns the median blocked time of each, in seconds. Raises RuntimeError if
    Nebula's last save does not hold the values at the time of the call."""
    import torch

    nebula = sides[-1]
    for step in range(1, WARMING + saves + 1):
        for side in sides[:: 1 if step % 2 else -1]:
            kept = {name: value.detach().clone() for name, value in side.weights().items()} if side is nebula else None
            start = time.perf_counter()
            side.save(step)
            side.taken.append(time.perf_counter() - start)
            with torch.no_grad():
                for value in side.weights().values():
                    value.add_(1)
            side.finish()
            settle(directory)
            if side is nebula and step == WARMING + saves:
                found = side.read()
                for name, value in kept.items():
                    if not torch.equal(found[name], value):
                        raise RuntimeError(f"{name} is not what it was at the save")
        shutil.rmtree(os.path.join(directory, "stock"), ignore_errors=True)
        time.sleep(PAUSE_S)
    return [statistics.median(side.taken[WARMING:]) for side in sides]


def lightning(directory, saves):
    import torch

    pl = importlib.import_module("lightning.pytorch")
    import nebulaml as nm

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    class Step(pl.Callback):
        def __init__(self, then):
            self.on_train_batch_end = lambda *_: then()

    def side(io, then):
        """Calls `then` in a step of the fit: a save after a fit waits until it is durable, because nothing else would wait for it."""
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, plugins=[io] if io else [], callbacks=[Step(lambda: then(found))],
        )  # fmt: skip
        model = Module()
        path = os.path.join(directory, "nebula" if io else "stock", "{}.ckpt")
        last = []

        def save(step):
            last[:] = [path.format(step)]
            trainer.save_checkpoint(last[0])

        found = Side(save, lambda: dict(model.named_parameters()), lambda: torch.load(last[0], weights_only=False)["state_dict"])
        trainer.fit(model, torch.utils.data.DataLoader(torch.randn(2, WIDTH), batch_size=2))

    measured = []
    side(None, lambda stock: side(nm.NebulaCheckpointIO(), lambda ours: measured.append(measure([stock, ours], directory, saves))))
    return [("", *measured[0])], pl.__version__


def hf(directory, saves):
    import nebulaml as nm
    import torch
    import transformers
    from safetensors.torch import load_file

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.net = net()
            self.post_init()

        def _init_weights(self, module):
            pass

        def forward(self, x, labels=None):
            return {"loss": self.net(x).square().mean()}

    data = [{"x": torch.randn(WIDTH), "labels": 0} for _ in range(4)]

    def side(attached):
        output = os.path.join(directory, "nebula" if attached else "stock")
        training = transformers.TrainingArguments(
            output_dir=output, max_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, save_total_limit=2,
        )  # fmt: skip
        trainer = transformers.Trainer(model=Model(transformers.PretrainedConfig()), args=training, train_dataset=data)
        if attached:
            nm.attach(trainer)
        trainer.train()

        def save(step):
            trainer.state.global_step = step
            trainer._save_checkpoint(trainer.model, None)

        def read():
            return load_file(os.path.join(output, f"checkpoint-{trainer.state.global_step}", "model.safetensors"))

        return Side(save, lambda: dict(trainer.model.named_parameters()), read)

    return [("", *measure([side(False), side(True)], directory, saves))], transformers.__version__


def dcp(directory, saves):
    import nebulaml.dcp
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def side(kind, call):
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        last = []

        def save(step):
            last[:] = [os.path.join(directory, kind, f"{call.__name__}{step}")]
            weights, moments = get_state_dict(model, optimizer)
            future = call({"model": weights, "optimizer": moments}, checkpoint_id=last[0])
            last[1:] = [future] if hasattr(future, "result") else []

        def read():
            found = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
            dcp.load(found, checkpoint_id=last[0])
            return found["model"]

        return Side(save, lambda: dict(model.named_parameters()), read, lambda: [future.result() for future in last[1:]])

    calls = (("stock", dcp.save), ("stock", dcp.async_save), ("nebula", nebulaml.dcp.async_save))
    save, background, ours = measure([side(kind, call) for kind, call in calls], directory, saves)
    rows = [("against stock's `dcp.async_save`", background, ours), ("against `dcp.save`", save, ours)]
    dist.destroy_process_group()
    return rows, torch.__version__


def deepspeed(directory, saves):
    import deepspeed
    import nebulaml as nm
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    os.environ["MASTER_PORT"] = str(store.port)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 100000, "allgather_bucket_size": 100000},
    }

    def side(attached):
        model = net()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        if attached:
            nm.attach(engine)
        engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
        engine.step()
        last = []

        def save(step):
            last[:] = [f"global_step{step}"]
            engine.save_checkpoint(os.path.join(directory, "nebula" if attached else "stock"), tag=last[0])

        def read():
            return torch.load(os.path.join(directory, "persist", last[0], "mp_rank_00_model_states.pt"), weights_only=False)["module"]

        return Side(save, lambda: dict(engine.module.named_parameters()), read)

    return [("", *measure([side(False), side(True)], directory, saves))], deepspeed.__version__


def worker(name, directory, saves):
    import nebulaml as nm

    # Training only logs a failed save; here it must not count as a fast save.
    persist = os.path.join(directory, "nebula" if name == "dcp" else "persist")
    nm.init(persist, 0, 2, on_error="raise")
    rows, version = globals()[name](directory, saves)
    print(json.dumps({"rows": rows, "version": version}))


def run(name, base, saves):
    """Runs a worker. Returns its rows and the framework's version."""
    environment = FRAMEWORKS[name][0]
    python = ROOT / (f".envs/{environment}" if environment else ".venv") / "bin" / "python"
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nebula-frameworks-", dir=base) as directory:
        command = [python, __file__, "--worker", name, "--dir", directory, "--saves", str(saves)]
        settings = {**os.environ, "DS_ACCELERATOR": "cpu", "NEBULA_OUTPUT_DIR": os.path.join(directory, "nebula-output")}
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=settings, timeout=1200)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"rows"')))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(FRAMEWORKS)}; the page is then left alone")
    parser.add_argument("--saves", type=int, default=6, help="counted saves of each side")
    parser.add_argument("--dir", type=Path, default=Path("out"), help="a directory of the file system to measure")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, str(args.dir), args.saves)
        return 0
    if unknown := set(args.names) - set(FRAMEWORKS):
        parser.error(f"no framework {', '.join(sorted(unknown))}")
    from bench import environment, report

    lines = [
        "| the framework's own call, 503 MB | version | as it comes | with Nebula | less by | target |", "|---|---|---:|---:|---:|---|",
    ]  # fmt: skip
    for name in args.names or FRAMEWORKS:
        _, target, title = FRAMEWORKS[name]
        result = run(name, args.dir.resolve(), args.saves)
        for more, stock, nebula in result["rows"]:
            reached = f"≥ {target}: " + ("yes" if stock / nebula >= target else "**no**")
            cells = [f"{title} {more}".strip(), result["version"], report.seconds(stock), f"**{report.seconds(nebula)}**"]
            lines.append(f"| {' | '.join(cells)} | {stock / nebula:.1f} times | {reached} |")
            print(lines[-1], flush=True)
    where = environment.describe(args.dir)
    keys = ("processor", "cores", "kernel", "file system", "commit")
    lines += ["", "Where: " + "; ".join(f"{key} {where[key]}" for key in keys if key in where) + f"; load at the end {os.getloadavg()[0]:.1f}."]
    if not args.names:
        report.publish("frameworks", "make bench-frameworks", "The blocked time of a framework's own call", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
