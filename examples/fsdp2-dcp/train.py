"""A small language model, sharded with FSDP2 and checkpointed through torch.distributed.checkpoint and Nebula.

Start it with torchrun, on any number of processes. A resume may use another number.
"""

import argparse
import ast
import os
import sysconfig
from pathlib import Path

import nebulaml as nm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nebulaml.dcp import NebulaStorageReader, async_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

LENGTH, WIDTH = 64, 128


def found_text():
    """Returns the docstrings of Python's own library: several hundred kilobytes of English that every machine has."""
    pieces = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_text(errors="replace"))
        documented = (node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)))
        pieces += [text for node in documented if (text := ast.get_docstring(node))]
    return "\n\n".join(pieces).encode()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = torch.nn.Embedding(256, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, text):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        hidden = self.letters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return self.head(hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default="runs/fsdp2")
    parser.add_argument("--data", help="a text file; Python's docstrings without it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    text = torch.frombuffer(bytearray(Path(arguments.data).read_bytes() if arguments.data else found_text()), dtype=torch.uint8)

    torch.manual_seed(0)
    model = Model().to(device)
    mesh = init_device_mesh(device, (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state(step):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    nm.init(persistent_storage_path=arguments.path, persistent_time_interval=0)
    first = 1
    latest = nm.get_latest_checkpoint()
    if latest is not None:
        loaded = state(0)
        dcp.load(loaded, storage_reader=NebulaStorageReader(os.path.join(arguments.path, latest.tag)))
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        first = loaded["step"] + 1
        if rank == 0:
            print(f"resumed after step {loaded['step']} on {world} ranks", flush=True)

    for step in range(first, arguments.steps + 1):
        places = torch.randint(0, len(text) - LENGTH - 1, (16,), generator=torch.Generator().manual_seed(step))
        batch = torch.stack([text[place : place + LENGTH + 1] for place in places.tolist()]).long().to(device)
        mine = batch.chunk(world)[rank]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item() / world:.6f}", flush=True)
        if step % arguments.save_every == 0:
            async_save(state(step), checkpoint_id=os.path.join(arguments.path, f"global_step{step}"))
    nm.flush_persistence()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
