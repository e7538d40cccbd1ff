"""Trains a small model of transformers a little, saves it as the argument says, and exports it. Prints whether from_pretrained gives the trainer's values."""

import argparse
import contextlib
import json
import os

import nebulaml as nm
import torch
import transformers
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--persist", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--way", choices=["plain", "ddp", "fsdp2", "zero", "trainer", "lightning", "accelerate"], default="plain")
parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
parser.add_argument("--dtype")
parser.add_argument("--background", action="store_true", help="the adapter exports, and not a call of export_hf()")
parser.add_argument("--stage", type=int, default=0, help="of ZeRO")
parser.add_argument("--bf16", action="store_true", help="DeepSpeed trains in bf16, and keeps fp32 masters")
parser.add_argument("--universal", action="store_true", help="DeepSpeed's own converter makes the universal layout, which is exported")
parser.add_argument("--shard", default="5GB")
args = parser.parse_args()
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

torch.manual_seed(7)
if args.model == "gpt2":  # its head is tied to its embedding
    config = transformers.GPT2Config(vocab_size=63, n_positions=31, n_embd=15, n_layer=2, n_head=3, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config)
else:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    model = transformers.LlamaForCausalLM(config)

export = nm.HFExport(args.out, config=model, dtype=args.dtype, max_shard_size=args.shard, replace=True)
if world > 1 and args.way not in ("trainer", "lightning", "accelerate"):
    torch.distributed.init_process_group("gloo")
trained = model


class Ids(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.randint(0, 63, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def train_with_trainer():
    options = {"save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    trainer = transformers.Trainer(model, transformers.TrainingArguments(args.out + "-trainer", **options), train_dataset=Ids())
    trainer.remove_callback(transformers.PrinterCallback)
    nm.attach(trainer, export=nm.HFExport(args.out, dtype=args.dtype, max_shard_size=args.shard, replace=True))
    trainer.train()


def train_with_lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return self.net(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    callback = nm.NebulaCallback(dirpath=args.out + "-lightning", every_n_train_steps=2, save_top_k=-1, export=export)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", callbacks=[callback], logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Ids(), batch_size=2))


if args.way == "ddp":
    trained = torch.nn.parallel.DistributedDataParallel(model)
if args.way == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    blocks = model.transformer.h if args.model == "gpt2" else model.model.layers
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
if args.way == "accelerate":  # FSDP2
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin  # without a device accelerate leaves the plugin out and trains as DDP; told that it counts, all else works
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    nm.attach(accelerator, export=nm.HFExport(args.out, config=config.to_dict() | {"architectures": [type(model).__name__.removeprefix("FSDP")]},
                                              dtype=args.dtype, max_shard_size=args.shard, replace=True))  # fmt: skip
    trained = model
if args.way == "zero":
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    frozen = [value for name, value in model.named_parameters() if name.endswith(("ln_f.weight", "model.norm.weight"))]
    for one in frozen:
        one.requires_grad = False
    trained, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[value for value in model.parameters() if value.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
            **({"bf16": {"enabled": True}} if args.bf16 else {}),
        },
    )
if args.way in ("trainer", "lightning"):
    nm.init(args.persist, 0, on_error="raise")
    (train_with_trainer if args.way == "trainer" else train_with_lightning)()
if args.way != "accelerate":
    optimizer = None if args.way == "zero" else torch.optim.AdamW(trained.parameters(), 1e-2)
for step in range(0 if args.way in ("trainer", "lightning") else 3):
    ids = torch.randint(0, 63, (2, 16), generator=torch.Generator().manual_seed(step * world + rank))
    loss = trained(input_ids=ids, labels=ids).loss
    if optimizer is None:
        trained.backward(loss)
        trained.step()
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

nm.init(args.persist, 0, on_error="raise")
if args.way in ("trainer", "lightning"):
    nm.flush_persistence()
    wanted = model.state_dict()
elif args.way == "accelerate":
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    accelerator.save_state(args.out + "-accelerate")
    nm.flush_persistence()
    wanted = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
elif args.way == "fsdp2":
    import nebulaml.dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

    own, states = get_state_dict(model, optimizer)
    nebulaml.dcp.async_save({"model": own, "optim": states}, checkpoint_id=os.path.join(args.persist, "global_step3")).result(120)
    wanted = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
elif args.way == "zero":
    import nebulaml.deepspeed

    nm.attach(trained, export=export if args.background else None)
    trained.save_checkpoint(os.path.join(args.out + "-names"), "global_step3")
    nm.flush_persistence()
    whole = deepspeed.zero.GatheredParameters(list(model.parameters())) if args.stage == 3 else contextlib.nullcontext()
    with whole:
        wanted = {name: value.detach().clone() for name, value in model.state_dict().items()}
else:
    with nm.Checkpoint("global_step3", -2) as checkpoint:
        if rank == 0:
            checkpoint.save("state.pt", {"step": 3, "model": trained.state_dict(), "optimizer": optimizer.state_dict()})
    checkpoint.wait("durable", 120)
    wanted = model.state_dict()

if rank == 0:
    version = os.path.join(args.persist, "global_step3")
    if args.universal:
        from deepspeed.checkpoint import ds_to_universal

        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True, "inject_missing_state": True}
        ds_to_universal.main(argparse.Namespace(input_folder=version, output_folder=args.out + "-universal", **options))
        version = args.out + "-universal"
    if args.background:
        assert nm.wait_for_exports(120)
    else:
        nm.export_hf(version, args.out, config=model, dtype=args.dtype, max_shard_size=args.shard)
    found, about = AutoModelForCausalLM.from_pretrained(args.out, output_loading_info=True)
    kind = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    state = found.state_dict()
    same = state.keys() == wanted.keys() and all(
        torch.equal(state[name], value.to(kind)) and state[name].dtype == kind for name, value in wanted.items()
    )
    files = sorted(os.listdir(args.out))
    print(json.dumps({"end": True, "same": same, "info": {name: sorted(value) for name, value in about.items() if value}, "files": files}), flush=True)
if world > 1:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
