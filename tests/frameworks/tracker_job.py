"""A training that logs to one tool and saves; it may kill itself. It prints nothing: the test reads the files of the tool."""

import argparse
import json
import os
import signal
import sys
import time

import nebulaml as nm
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--persist", required=True)
parser.add_argument("--metrics", required=True)
parser.add_argument("--tool", required=True)
parser.add_argument("--options", type=json.loads, default={})
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--kill-at", type=int, default=-1)
args = parser.parse_args()

nm.init(args.persist, 0)
tracker = nm.log_to(args.tool, metrics=args.metrics, **args.options)
latest = nm.get_latest_checkpoint()
first = 0 if latest is None else latest.step
if latest is not None:
    tracker.rewind(first)
for step in range(first + 1, args.steps + 1):
    tracker.log(step, loss=1.0 / step, lr=torch.tensor(0.5))
    if step % 3 == 0:
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("model.pt", torch.zeros(1000))
        checkpoint.wait("durable", timeout=60)
        time.sleep(0.5)  # the thread that listens has heard of it
    if step == args.kill_at:
        time.sleep(1)  # W&B's own process has received all values
        os.kill(os.getpid(), signal.SIGKILL)
tracker.close()
print(json.dumps({"end": True}), flush=True)
sys.exit(0)
