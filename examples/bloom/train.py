"""Pretrains a small BLOOM with torch's tensor and pipeline parallelism, and saves checkpoints through Nebula.

Start it with torchrun. The ranks are a grid of pipeline stages, data-parallel copies and shares of each matrix. A resume may use another grid.
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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

LENGTH = 64
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # each stage has its own parameters: their names are the keys


def found_text():
    """Returns the docstrings of Python's own library: several hundred kilobytes of English that every machine has."""
    pieces = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_text(errors="replace"))
        documented = (node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)))
        pieces += [text for node in documented if (text := ast.get_docstring(node))]
    return "\n\n".join(pieces).encode()


class Block(torch.nn.Module):
    """A layer of BLOOM: attention with ALiBi in the place of positions, GELU, a norm before each half."""

    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)  # by head: query, key, value. So a share of its rows is a share of the heads
        self.out = torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.register_buffer("slopes", torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)]), persistent=False)

    def forward(self, hidden):
        batch, length, _ = hidden.shape
        heads = self.qkv(self.norms[0](hidden)).view(batch, length, -1, 3, self.head_width).transpose(1, 2)
        distance = torch.arange(length, device=hidden.device)[None, :] - torch.arange(length, device=hidden.device)[:, None]
        bias = (self.slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
        mixed = F.scaled_dot_product_attention(*heads.unbind(3), attn_mask=bias)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))


class Stage(torch.nn.Module):
    """The layers of one pipeline stage. Layers have their number in the whole model, so each parameter has one name on every grid."""

    def __init__(self, stage, stages, layers, width, heads):
        super().__init__()
        self.embed = torch.nn.Sequential(torch.nn.Embedding(256, width), torch.nn.LayerNorm(width)) if stage == 0 else None
        mine = range(stage * layers // stages, (stage + 1) * layers // stages)
        self.layers = torch.nn.ModuleDict({str(layer): Block(width, heads) for layer in mine})
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 256)) if stage == stages - 1 else None

    def forward(self, x):
        hidden = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden if self.head is None else self.head(hidden)

    def initialise(self):
        """Initialises each parameter from its name, so that the weights do not depend on the grid."""
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + parameter.numel())
            if parameter.dim() > 1:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            elif name.endswith("bias"):
                parameter.data.zero_()


def share(stage, mesh):
    """Divides the matrices of a layer over the mesh: by columns, then by rows, so that each half of the layer needs one sum."""
    for layer in stage.layers.values():
        rank, size = mesh.get_local_rank(), mesh.size()
        layer.slopes = layer.slopes.chunk(size)[rank].clone()
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default="runs/bloom")
    parser.add_argument("--data", help="a text file; Python's docstrings without it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pipeline", type=int, default=2, help="stages")
    parser.add_argument("--tensor", type=int, default=2, help="shares of each matrix")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    arguments = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    copies = dist.get_world_size() // (arguments.pipeline * arguments.tensor)
    grid = init_device_mesh(device.type, (arguments.pipeline, copies, arguments.tensor), mesh_dim_names=("pipeline", "data", "tensor"))
    at, copy = grid["pipeline"].get_local_rank(), grid["data"].get_local_rank()
    speaks = at == arguments.pipeline - 1 and copy == 0 and grid["tensor"].get_local_rank() == 0
    text = torch.frombuffer(bytearray(Path(arguments.data).read_bytes() if arguments.data else found_text()), dtype=torch.uint8)

    model = Stage(at, arguments.pipeline, arguments.layers, arguments.width, arguments.heads)
    model.initialise()
    model.to(device)
    share(model, grid["tensor"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    stage = PipelineStage(model, at, arguments.pipeline, device, group=grid["pipeline"].get_group())
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()))

    def state(step):
        weights, moments = get_state_dict(model, optimizer, options=FLAT)
        return {"model": weights, "optimizer": moments, "step": step}

    nm.init(persistent_storage_path=arguments.path, persistent_time_interval=0)
    first = 1
    latest = nm.get_latest_checkpoint()
    if latest is not None:
        loaded = state(0)
        dcp.load(loaded, storage_reader=NebulaStorageReader(os.path.join(arguments.path, latest.tag)))
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=FLAT)
        first = loaded["step"] + 1
        if speaks:
            print(f"resumed after step {loaded['step']} on {arguments.pipeline} x {copies} x {arguments.tensor} ranks", flush=True)

    for step in range(first, arguments.steps + 1):
        places = torch.randint(0, len(text) - LENGTH - 1, (16,), generator=torch.Generator().manual_seed(step))
        batch = torch.stack([text[place : place + LENGTH + 1] for place in places.tolist()]).long().to(device).chunk(copies)[copy]
        optimizer.zero_grad()
        losses = []
        schedule.step(*([batch[:, :-1]] if at == 0 else []), target=batch[:, 1:] if model.head is not None else None, losses=losses)
        for parameter in model.parameters() if copies > 1 else []:
            local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            dist.all_reduce(local, group=grid["data"].get_group())
            local /= copies
        optimizer.step()
        if speaks and step % 10 == 0:
            print(f"step {step} loss {torch.stack(losses).mean().item():.6f}", flush=True)
        if step % arguments.save_every == 0:
            async_save(state(step), checkpoint_id=os.path.join(arguments.path, f"global_step{step}"))
    nm.flush_persistence()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
