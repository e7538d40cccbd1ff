"""Runs the loop of the README unchanged, except for the storage path. The argument --ddp wraps the model."""

import argparse
import json
import os
import random
import re
import signal
import sys
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--persist", required=True)
parser.add_argument("--ddp", action="store_true")
parser.add_argument("--kill-at", type=int, default=-1)
arguments = parser.parse_args()
text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
loop = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "for step in range" in block)
assert loop.count('"/scratch/run7"') == 1

rank = int(os.environ["RANK"])
steps = 250
torch.manual_seed(3)
random.seed(rank)
numpy.random.seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 8))
if arguments.ddp:
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, step):
    """Draws from all three generators, so that a resume without one of them gives other values."""
    scale = random.random() + numpy.random.rand()
    inputs = torch.randn(16, 8) * scale
    optimizer.zero_grad()
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
    if step == arguments.kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


exec(compile(loop.replace("/scratch/run7", arguments.persist), "README.md", "exec"))  # noqa: S102
if arguments.ddp:
    dist.barrier()
    dist.destroy_process_group()
sys.exit(0)
