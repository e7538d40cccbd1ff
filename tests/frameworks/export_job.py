"""Trains a small model of transformers a little, saves it as the argument says, and exports it. Prints whether from_pretrained gives the trainer's values."""

import argparse
import json
import os

import nebulaml as nm
import torch
import transformers
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--persist", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--way", choices=["plain", "ddp", "fsdp2"], default="plain")
parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
parser.add_argument("--dtype")
parser.add_argument("--shard", default="5GB")
args = parser.parse_args()
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

torch.manual_seed(7)
if args.model == "gpt2":  # its head is tied to its embedding
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config)
else:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    model = transformers.LlamaForCausalLM(config)

if world > 1:
    torch.distributed.init_process_group("gloo")
trained = model
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
optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
for step in range(3):
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step * world + rank))
    trained(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

nm.init(args.persist, 0, on_error="raise")
if args.way == "fsdp2":
    import nebulaml.dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

    own, states = get_state_dict(model, optimizer)
    nebulaml.dcp.async_save({"model": own, "optim": states}, checkpoint_id=os.path.join(args.persist, "global_step3")).result(120)
    wanted = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
else:
    with nm.Checkpoint("global_step3", -2) as checkpoint:
        if rank == 0:
            checkpoint.save("state.pt", {"step": 3, "model": trained.state_dict(), "optimizer": optimizer.state_dict()})
    checkpoint.wait("durable", 120)
    wanted = model.state_dict()

if rank == 0:
    with nm.Reader(args.persist) as reader:
        nm.export_hf(reader.latest(), args.out, config=model, dtype=args.dtype, max_shard_size=args.shard)
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
