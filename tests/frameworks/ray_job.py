"""Ray Train with two workers on CPU, one of which is killed once. Rank 0 writes its observations into the file --log, one JSON object a line."""

import argparse
import json
import os
import signal
import sys


def train(config):
    import torch
    from nebulaml.integrations import ray_train
    from ray.train import get_checkpoint, get_context
    from ray.train.torch import prepare_model

    rank = get_context().get_world_rank()

    def say(**line):
        if rank == 0:
            with open(config["log"], "a") as file:
                print(json.dumps(line), file=file)

    torch.manual_seed(3)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 1
    found = ray_train.latest()
    if found is not None:
        state = found.load(f"rank-{rank}.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
        known = get_checkpoint()
        say(resumed=found.tag, known=known and os.path.basename(known.path))
    for step in range(first, config["steps"] + 1):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        say(step=step, loss=loss.item())
        checkpoint = ray_train.checkpoint(f"step-{step}")
        checkpoint.save(f"rank-{rank}.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
        ray_train.report({"step": step}, checkpoint)
        if step == config["kill_at"] and rank == 1 and first == 1:
            checkpoint.wait("committed", timeout=60)
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--kill-at", type=int, default=-1)
    args = parser.parse_args()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=True)
    trainer = TorchTrainer(
        train, train_loop_config={"log": args.log, "steps": 6, "kill_at": args.kill_at}, torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=args.storage, failure_config=FailureConfig(max_failures=1)),
    )  # fmt: skip
    result = trainer.fit()
    print(json.dumps({"end": True, "last": os.path.basename(result.checkpoint.path), "files": sorted(os.listdir(result.checkpoint.path))}), flush=True)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
