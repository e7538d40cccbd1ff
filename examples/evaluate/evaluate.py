"""Follows a training run, and computes the loss on held-out data for each checkpoint that it finds.

It may start before the trainer, on the same machine or on another one. It may be killed and started again: it goes on after the last line
of its table.
"""

import argparse
import csv
import os

import nebulaml as nm
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--path", default="evaluate")
parser.add_argument("--table", default="losses.csv")
parser.add_argument("--picture", default="losses.png")
parser.add_argument("--timeout", type=float, default=60.0, help="seconds without a new checkpoint after which it ends")
options = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(10**6))
wanted = inputs.sum(1, keepdim=True).sin()


def rows() -> list[tuple[int, float]]:
    if not os.path.exists(options.table):
        return []
    with open(options.table, newline="") as file:
        return [(int(step), float(loss)) for step, loss in csv.reader(file)]


known = {step for step, _ in rows()}
with nm.Reader(options.path) as reader, open(options.table, "a", newline="") as file:
    for checkpoint in reader.follow(timeout=options.timeout):
        if checkpoint.step in known:
            continue
        checkpoint.load_into("model.pt", model)
        with torch.no_grad():
            loss = (model(inputs) - wanted).square().mean().item()
        csv.writer(file).writerow([checkpoint.step, loss])
        file.flush()
        print(f"evaluator: step {checkpoint.step} loss {loss:.4f}", flush=True)

try:
    from matplotlib import pyplot
except ImportError:
    print("evaluator: no picture, because matplotlib is not installed", flush=True)
else:
    steps, losses = zip(*sorted(rows()), strict=True)
    pyplot.plot(steps, losses, marker=".")
    pyplot.xlabel("step")
    pyplot.ylabel("loss on held-out data")
    pyplot.savefig(options.picture)
    print(f"evaluator: {options.picture}", flush=True)
