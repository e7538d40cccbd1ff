"""A loop whose data have a position: torchdata's StatefulDataLoader and Hugging Face datasets. Prints the samples of each step.

--kind map: a datasets.Dataset, shuffled by the loader. stream: a sharded datasets.IterableDataset in the loader. own: the same without a
loader, with the dataset's own state. loop: the loop of docs/frameworks.md unchanged, except for the storage path, the interval and the
number of workers, with a model that has dropout. Its lines have losses.
"""

import argparse
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import nebulaml as nm
import torch
from torchdata.stateful_dataloader import StatefulDataLoader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--persist", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--term-at", type=int, default=-1, help="the step at which the workers get SIGTERM from another process")
    args = parser.parse_args()
    torch.manual_seed(5)
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"value": list(range(64))})
    if args.kind == "loop":
        return loop(args, data)
    if args.kind == "map":
        source = loader = StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=2)
    else:
        stream = data.to_iterable_dataset(num_shards=4).map(lambda row: {"value": row["value"] * 2})
        source = stream if args.kind == "own" else StatefulDataLoader(stream, batch_size=4, num_workers=2)
        loader = stream.batch(4) if args.kind == "own" else source
        source = loader
    manager = nm.Manager(args.persist)
    found = manager.restore({"data": source})
    step = found.step if found else 0
    print(json.dumps({"resumed": step}), flush=True)
    while step < args.steps:
        for batch in loader:  # an epoch is 16 steps
            step += 1
            print(json.dumps({"step": step, "loss": [int(value) for value in batch["value"]]}), flush=True)
            manager.save(step, {"data": source})
            if step == args.term_at:
                pids = [str(child.pid) for child in multiprocessing.active_children()]
                assert len(pids) == 2
                subprocess.run(["kill", "-TERM", *pids], check=True)
            if step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == args.steps:
                break
    manager.close()
    return 0


def loop(args, data):
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = 0

    def train(model, optimizer, batch):
        nonlocal done
        optimizer.zero_grad()
        loss = model(batch["value"].float()[:, None] / 64).square().mean()
        loss.backward()
        optimizer.step()
        done += 1
        print(json.dumps({"step": done + (0 if names["found"] is None else names["found"].step), "loss": loss.item()}), flush=True)
        if done == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    text = (Path(__file__).resolve().parents[2] / "docs/frameworks.md").read_text().split("## Data\n")[1]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    for before, after in (("/scratch/run7", args.persist), ("num_workers=2", f"num_workers={args.workers}"), ("save_every_steps=500", "save_every_steps=1")):
        assert before in code
        code = code.replace(before, after)
    names = {"nm": nm, "StatefulDataLoader": StatefulDataLoader, "model": model, "optimizer": optimizer, "data": data, "train": train, "steps": args.steps}
    exec(compile(code, "docs/frameworks.md", "exec"), names)  # noqa: S102
    names["manager"].close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
