"""Training with a framework on a GPU, saved through Nebula while it continues: cuda_job.py WHAT DIRECTORY [--resume].

It saves after the steps 2 and 4, makes the next step at once, and ends after step 6. It clones each object that the framework saves, and
compares the clones with storage at the end. --resume loads step 4 in another process, and continues. --device cpu runs all of it on gloo.
It prints the losses, and a last line: a digest of all weights and moments, the number of compared files, and whether a save
returned while the device still copied.
"""

import argparse
import hashlib
import json
import os
import sys
import warnings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

warnings.filterwarnings("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["deepspeed", "hf", "lightning", "dcp", "ddp", "accelerate"])
parser.add_argument("directory")
parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
parser.add_argument("--way", default="")
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
ON_GPU = args.device == "cuda"
STEPS, SAVED, RESUMED = 6, (2, 4), 4
WIDTH = 1024  # a square of it is more than device.SMALL_BYTES, in bf16 as well
LATE = 600_000_000  # cycles of the device: some 0.3 s

if args.what in ("hf", "accelerate", "lightning") and args.way != "ddp":  # one process, and no group of processes
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
if args.what == "deepspeed":
    os.environ["DS_ACCELERATOR"] = args.device
if ON_GPU:
    torch.cuda.set_device(0)
torch.use_deterministic_algorithms(True, warn_only=True)

import nebulaml as nm  # noqa: E402
from nebulaml.tensors import device, device_backends  # noqa: E402

persist = os.path.join(args.directory, "persist")
losses, given, copies, overlapped = {}, {}, [], []


class Parts(list):
    """The parts that save_bytes was called with."""


def cloned(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: cloned(part) for key, part in value.items()}
    return [cloned(part) for part in value] if isinstance(value, (list, tuple)) else value


def bytes_of(value):
    """Returns the bytes of a tensor, on the host."""
    if not isinstance(value, torch.Tensor):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same(found, wanted, where):
    """Compares bit for bit. Returns the first difference."""
    if isinstance(wanted, torch.Tensor):
        kinds = [(tensor.dtype, tensor.shape, tensor.device) for tensor in (found, wanted)]
        assert kinds[0] == kinds[1], f"{where}: {kinds[0]}, and was {kinds[1]}"
        differ = int((bytes_of(found) != bytes_of(wanted)).sum())
        assert not differ, f"{where}: {differ} of {wanted.nbytes} bytes are not those of the save"
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            same(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for index, part in enumerate(wanted):
            same(found[index], part, f"{where}[{index}]")
    elif isinstance(wanted, (int, float, str, type(None))):
        assert found == wanted, f"{where}: {found!r}, and was {wanted!r}"


def watch():
    """Clones the saved objects, and makes large copies begin late: a save that did not wait for them would have later values."""
    plain_save, plain_bytes, plain_copy = nm.Checkpoint.save, nm.Checkpoint.save_bytes, device_backends.Cuda.copy

    def save(self, name, obj, *rest, **options):
        given[self.tag, name] = cloned(obj)
        return plain_save(self, name, obj, *rest, **options)

    def save_bytes(self, name, parts, *rest, **options):
        parts = list(parts)
        given[self.tag, name] = Parts(cloned(parts))
        return plain_bytes(self, name, parts, *rest, **options)

    def copy(self, stream, wanted):
        is_large = any(size > device.SMALL_BYTES for _, _, size in device.PIECE.iter_unpack(wanted))
        if is_large:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LATE)
        plain_copy(self, stream, wanted)
        if is_large:
            copies.append(torch.cuda.Event())
            copies[-1].record(stream)

    nm.Checkpoint.save, nm.Checkpoint.save_bytes, device_backends.Cuda.copy = save, save_bytes, copy


def returned():
    """Called when a save has returned: records whether the device still copies."""
    overlapped.append(bool(copies) and not copies[-1].query())


def compare():
    """Compares storage with the clones. Returns the number of files."""
    assert nm.flush_persistence(timeout=60), "it did not become durable"
    count = 0
    for (tag, name), wanted in given.items():
        path = os.path.join(persist, tag, name)
        if not os.path.isdir(os.path.dirname(path)):
            continue  # an older version than the two that stay
        count += 1
        if isinstance(wanted, Parts):
            with open(path, "rb") as file:
                same(bytes_of(file.read()), torch.cat([bytes_of(part) for part in wanted]), f"{tag}/{name}")
        else:
            same(torch.load(path, weights_only=False), wanted, f"{tag}/{name}")
    return count


def digest(*values):
    result = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            result.update(bytes_of(value).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for part in value:
                add(part)

    add(values)
    return result.hexdigest()


def say(**line):
    print(json.dumps(line), flush=True)


def ended(weights, **more):
    """Prints the last line of a job."""
    for step, loss in sorted(losses.items()):
        say(step=step, loss=float(loss))
    registered = [place is not None for place in device._devices.images._registered.values()]
    count = 0 if args.resume else compare()
    say(end=True, weights=weights, compared=count, overlapped=overlapped, registered=registered, copies=len(copies), **more)


def data(step):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 + step))
    return x.to(args.device), x.sum(dim=1, keepdim=True).to(args.device)


def network(*more):
    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Linear(64, WIDTH), torch.nn.GELU(), *more, torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 1)
    )  # fmt: skip


def deepspeed():
    """--way attach: nm.attach, and the user's own torch optimizer; section: the configuration names both."""
    import deepspeed

    if not ON_GPU:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 4000000, "allgather_bucket_size": 4000000},
    }
    if args.way == "section":
        import nebulaml.deepspeed  # noqa: F401

        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        config["nebula"] = {
            "enabled": True, "persistent_storage_path": persist, "persistent_time_interval": 0, "num_of_version_in_retention": 2, "overlap": True,
        }  # fmt: skip
        config["timers"] = {"throughput": {"enabled": False}}  # which waits for the whole device at each step
    deepspeed.init_distributed(dist_backend="nccl" if ON_GPU else "gloo")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if args.way == "attach" else None
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config)
    if args.way == "attach":
        nm.init(persist, 0)
        nm.attach(engine, overlap=True)
    folder, first = os.path.join(args.directory, "save"), 0
    if args.resume:
        path, state = engine.load_checkpoint(folder, tag=f"global_step{RESUMED}")
        assert path is not None and state["step"] == RESUMED, f"loaded {path}"
        first = RESUMED
    for step in range(first + 1, STEPS + 1):
        x, y = (value.bfloat16() for value in data(step))
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses[step] = loss.detach()
        if not args.resume and step in (*SAVED, STEPS):
            engine.save_checkpoint(folder, client_state={"step": step})
            returned()
    kinds = {"engine": type(engine.checkpoint_engine).__name__, "zero": type(engine.optimizer).__name__}
    weights = digest(engine.module_state_dict(), engine.optimizer.state_dict() if engine.optimizer else None)
    engine.destroy()  # the last one is committed here
    if not args.resume:
        with open(os.path.join(folder, "latest")) as latest:
            kinds["latest"] = latest.read()
    ended(weights, **kinds)


def hf():
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 256

        def __getitem__(self, index):
            ids = torch.randint(0, 2048, (16,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids}

    class Watch(TrainerCallback):
        def __init__(self, losses):
            self.losses = losses

        def on_log(self, args_, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                self.losses[state.global_step] = logs["loss"]

        def on_step_begin(self, args_, state, control, **kwargs):
            if state.global_step in SAVED and self.losses is losses and not args.resume:
                returned()

    def train(folder, losses, is_attached):
        training = TrainingArguments(
            output_dir=folder, max_steps=STEPS, save_steps=2, logging_steps=1, logging_nan_inf_filter=False, per_device_train_batch_size=4,
            report_to=[], use_cpu=not ON_GPU, seed=3, disable_tqdm=True, learning_rate=1e-3, bf16=True, dataloader_pin_memory=ON_GPU,
        )  # fmt: skip
        torch.manual_seed(3)
        config = GPT2Config(n_layer=2, n_head=4, n_embd=384, vocab_size=2048, n_positions=32, attn_implementation="eager")
        trainer = Trainer(model=GPT2LMHeadModel(config), args=training, train_dataset=Data(), callbacks=[Watch(losses)])
        trainer.remove_callback(transformers.PrinterCallback)
        if is_attached:
            nm.attach(trainer, overlap=True)
        trainer.train(resume_from_checkpoint=os.path.join(folder, f"checkpoint-{RESUMED}") if args.resume else None)
        return digest(trainer.model.state_dict(), trainer.optimizer.state_dict())

    nm.init(persist, 0)
    weights = train(os.path.join(args.directory, "out"), losses, True)
    plain = {}
    if not args.resume:
        stock = train(os.path.join(args.directory, "stock"), plain, False)
        plain = {"stock": stock, "stock_losses": {str(step): loss for step, loss in plain.items()}}
    ended(weights, **plain)


def lightning():
    """--way ddp: on a process group of one."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network(torch.nn.BatchNorm1d(WIDTH))

        def training_step(self, batch, index):
            x, y = data(self.global_step + 1)
            loss = torch.nn.functional.mse_loss(self.net(x), y)
            losses[self.global_step + 1] = loss.detach()
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]

    folder = os.path.join(args.directory, "ckpts")
    saver = nm.NebulaCallback(
        dirpath=folder, every_n_train_steps=2, save_top_k=-1, filename="{step}",
        config_params={"persistent_storage_path": persist, "persistent_time_interval": 0, "num_of_version_in_retention": 3},
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="gpu" if ON_GPU else "cpu", devices=1, strategy="ddp" if args.way == "ddp" else "auto", max_steps=STEPS, logger=False,
        callbacks=[saver], enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, precision="bf16-mixed",
    )  # fmt: skip
    model = Module()
    loader = torch.utils.data.DataLoader(torch.arange(64), batch_size=4)
    trainer.fit(model, loader, ckpt_path=os.path.join(folder, f"step={RESUMED}.ckpt") if args.resume else None)
    ended(digest(model.state_dict(), trainer.optimizers[0].state_dict()), files=sorted(os.listdir(folder)))


def dcp():
    """FSDP2. --way save, async (stock's own) or nebula-async."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter, async_save
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    side = dist.new_group(backend="gloo")
    model = network().to(args.device)
    mesh = init_device_mesh(args.device, (1,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    nm.init(persist, 0)

    def state(step):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments, "extra": {"step": step}}

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value.to_local() if hasattr(value, "to_local") else value]
        return [tensor for part in value.values() for tensor in tensors(part)] if isinstance(value, dict) else []

    def save(value, path):
        if args.way == "save":
            return dcp.save(value, storage_writer=NebulaStorageWriter(path))
        if args.way == "nebula-async":
            return async_save(value, checkpoint_id=path)
        return dcp.async_save(value, storage_writer=NebulaStorageWriter(path), process_group=side)

    def train(step):
        x, y = data(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()

    def load(step, **how):
        whole = state(-1)
        dcp.load(whole, **how)
        assert whole["extra"]["step"] == step
        return whole

    def path(step):
        return os.path.join(persist, f"global_step{step}")

    if args.resume:
        train(1)  # the optimizer has moments to load into
        losses.clear()
        whole = load(RESUMED, storage_reader=NebulaStorageReader(path(RESUMED)))
        set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optim"])
        for step in range(RESUMED + 1, STEPS + 1):
            train(step)
        ended(digest(tensors(state(STEPS))))
        return
    wanted, futures = {}, []
    for step in range(1, STEPS + 1):
        train(step)
        if step in SAVED:
            now = state(step)
            wanted[step] = cloned(tensors(now))
            if futures and args.way == "async":
                futures[-1].result()  # two of torch's own at once on a group deadlock
            futures.append(save(now, path(step)))
    last = state(STEPS)
    weights = digest(tensors(last))
    wanted[STEPS] = cloned(tensors(last))
    if args.way == "async":
        futures[-1].result()
    futures.append(save(last, path(STEPS)))
    if ON_GPU:
        with torch.cuda.stream(torch.cuda.Stream()):  # a stream that nothing has told to wait
            for tensor in tensors(last):
                tensor.fill_(-1)
        torch.cuda.synchronize()
    else:
        for tensor in tensors(last):
            tensor.fill_(-1)
    for future in futures:
        if hasattr(future, "result"):
            future.result()
    for step in (RESUMED, STEPS):
        same(tensors(load(step, storage_reader=NebulaStorageReader(path(step)))), wanted[step], f"step{step}")
    assert nm.flush_persistence(timeout=60)
    for step in (RESUMED, STEPS):
        same(tensors(load(step, checkpoint_id=path(step))), wanted[step], f"step{step}, as torch itself reads it")
    ended(weights)


def ddp():
    import torch.distributed as dist

    dist.init_process_group("nccl" if ON_GPU else "gloo")
    model = network(torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(WIDTH)).to(args.device)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0] if ON_GPU else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    nm.init(persist, 0)
    first = 0
    if args.resume:
        state = nm.get_checkpoint(f"global_step{RESUMED}").load("train.pt", map_location=args.device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        nm.set_rng_state(state["rng"])
        first = state["step"]
        assert first == RESUMED
    for step in range(first + 1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        if step in SAVED and not args.resume:
            checkpoint = nm.Checkpoint(f"global_step{step}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": nm.rng_state(), "step": step}
            assert checkpoint.save("train.pt", state, overlap=True) and checkpoint.commit()
            returned()
    ended(digest(model.state_dict(), optimizer.state_dict()))


def accelerate():
    """--way ddp: on a process group of one; fp16: with a scaler, which only a GPU has."""
    from accelerate import Accelerator
    from accelerate.utils import GradScalerKwargs, set_seed

    class Counter:
        def __init__(self):
            self.step = 0

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state):
            self.step = state["step"]

    precision = "fp16" if args.way == "fp16" and ON_GPU else "bf16"

    def train(folder, losses, is_attached):
        accelerator = Accelerator(cpu=not ON_GPU, mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
        set_seed(5)
        model = network(torch.nn.Dropout(0.2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        if is_attached:
            nm.attach(accelerator, overlap=True)
        if args.resume:
            accelerator.load_state(os.path.join(folder, f"step_{RESUMED}"))
            assert counter.step == RESUMED
        else:
            set_seed(6)
        for step in range(counter.step + 1, STEPS + 1):
            x, y = data(step)
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.step = step
            losses[step] = loss.detach()
            if step in SAVED and not args.resume:
                accelerator.save_state(os.path.join(folder, f"step_{step}"))
                if is_attached:
                    returned()
        return digest(accelerator.unwrap_model(model).state_dict(), optimizer.state_dict())

    nm.init(persist, 0)
    weights = train(os.path.join(args.directory, "out"), losses, True)
    plain = {}
    if not args.resume:
        stock = train(os.path.join(args.directory, "stock"), plain, False)
        plain = {"stock": stock, "stock_losses": {str(step): float(loss) for step, loss in plain.items()}}
    ended(weights, **plain)


if __name__ == "__main__":
    watch()
    globals()[args.what]()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    sys.exit(0)
