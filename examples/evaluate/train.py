"""Trains a small net and saves every few steps. It knows nothing of the evaluator."""

import argparse
import time

import nebulaml as nm
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--path", default="evaluate")
parser.add_argument("--steps", type=int, default=300)
options = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with nm.Manager(options.path, save_every_steps=10, keep_last=3) as manager:
    found = manager.restore({"model": model, "optimizer": optimizer})
    for step in range(found.step + 1 if found else 1, options.steps + 1):
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if manager.should_save(step):
            manager.save(step, {"model": model, "optimizer": optimizer})
            print(f"trainer: saved step {step}", flush=True)
        time.sleep(0.02)
    manager.wait()
