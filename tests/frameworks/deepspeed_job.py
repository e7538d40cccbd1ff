"""A small DeepSpeed job on CPU: trains, saves, may be killed, resumes. Prints one JSON line per step on rank 0.

The job patches only the build of an optional C++ extension of DeepSpeed. The argument --way selects the integration:
  --way stock    the "nebula" section of the configuration, DeepSpeed up to 0.19.6
  --way import   the same section and `import nebulaml.deepspeed`
  --way attach   no section, nebulaml.attach(engine)
  --way torch    DeepSpeed's own torch.save engine, to compare with
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from importlib.metadata import version

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=["stock", "import", "attach", "torch"], required=True)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--persist", required=True)
    parser.add_argument("--load-path")
    parser.add_argument("--no-nebula-load", action="store_true")
    parser.add_argument("--save-dir", required=True)
    parser.add_argument("--load-dir")
    parser.add_argument("--tag")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--interval", type=float, default=0)
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--kill-at", type=int, default=-1, help="SIGKILL all ranks after this step")
    parser.add_argument("--lose-node", type=int, default=-1, help="then the agent of this rank's node goes with it, and the others 2 s later")
    parser.add_argument("--die-inside-save", type=int, default=-1, help="rank 1 dies inside the save of this step")
    parser.add_argument("--slow-step", type=float, default=0)
    parser.add_argument("--save-16bit", action="store_true", help="save_16bit_model under the same tag too")
    parser.add_argument("--universal", action="store_true", help="load what ds_to_universal made")
    parser.add_argument("--overlap", action="store_true", help="commit at the next step, as on a device, not in save_checkpoint")
    parser.add_argument("--local_rank", type=int, default=0)
    return parser.parse_args()


def configuration(args: argparse.Namespace) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 100000, "allgather_bucket_size": 100000},
    }
    if args.stage == 3 and tuple(map(int, version("deepspeed").split(".")[:3])) < (0, 19, 8):
        # DeepSpeed before 0.19.8 gathers parameters that stay whole with a collective each, and waits for the last one only: on gloo, which
        # runs several at a time, training then continues with memory that was never filled.
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if args.bf16:
        config["bf16"] = {"enabled": True}
    if args.universal:
        config["checkpoint"] = {"load_universal": True}
    if args.way in ("stock", "import"):
        config["nebula"] = {
            "enabled": True,
            "persistent_storage_path": args.persist,
            "persistent_time_interval": args.interval,
            "num_of_version_in_retention": 2,
            "enable_nebula_load": not args.no_nebula_load,
        }
        if args.load_path:
            config["nebula"]["nebula_load_path"] = args.load_path
    return config


def kill_agent() -> None:
    """Kills the agent of this node."""
    mine = {f"{name}={os.environ[name]}".encode() for name in ("NEBULA_RUNTIME_DIR", "NEBULA_NODE_ID")}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                is_agent = b"agent" in file.read().split(b"\0")[1:2]
            with open(f"/proc/{entry}/environ", "rb") as file:
                if is_agent and mine <= set(file.read().split(b"\0")):
                    os.kill(int(entry), signal.SIGKILL)
                    return
    raise RuntimeError(f"no agent of {mine}")


def main() -> int:
    args = arguments()
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if args.way == "import":
        import nebulaml.deepspeed  # noqa: F401
    if args.replicas:
        import nebulaml as nm

        nm.init(args.persist, args.interval, replicas=args.replicas)
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(11)
    torch.use_deterministic_algorithms(True)
    layers = [torch.nn.Linear(16, args.width), torch.nn.ReLU(), torch.nn.BatchNorm1d(args.width), torch.nn.Linear(args.width, 1)]
    if args.stage == 3 or args.bf16:
        del layers[2]  # batch statistics stay fp32, and ZeRO-3 does not gather them
    model = torch.nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration(args))
    if args.way == "attach":
        import nebulaml as nm

        nm.init(persistent_storage_path=args.persist, persistent_time_interval=args.interval)
        nm.attach(engine)
    if args.overlap:
        sys.modules["nebulaml.deepspeed"]._on_cpu = lambda engine: False
    first = 0
    if args.resume:
        path, state = engine.load_checkpoint(args.load_dir or args.save_dir, tag=args.tag)
        if rank == 0:
            print(json.dumps({"resumed": state and state.get("step"), "path": path}), flush=True)
        if path is not None:
            first = state["step"]
            assert state["note"] == f"client state of step {first}"
    blocked = []
    for step in range(first + 1, args.steps + 1):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(4, 16, generator=generator)
        y = x.sum(dim=1, keepdim=True)
        if args.bf16:
            x, y = x.bfloat16(), y.bfloat16()
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
        time.sleep(args.slow_step)
        if step % args.save_every == 0:
            if step == args.die_inside_save and rank == world - 1:
                saver = engine.checkpoint_engine.save

                def die(*a, **k):
                    os.kill(os.getpid(), signal.SIGKILL)

                engine.checkpoint_engine.save = die if saver else None
            start = time.perf_counter()
            engine.save_checkpoint(args.save_dir, client_state={"step": step, "note": f"client state of step {step}"})
            if args.save_16bit:
                engine.save_16bit_model(os.path.join(args.save_dir, f"global_step{step}"))
            blocked.append(time.perf_counter() - start)
        if step == args.kill_at:
            if args.replicas:
                import nebulaml

                newest = nebulaml.Checkpoint(f"global_step{step // args.save_every * args.save_every}")
                newest.wait("replicated", timeout=60)
                if rank == 0:
                    print(json.dumps({"state": newest.state}), flush=True)
                torch.distributed.barrier()
            if args.lose_node == rank:
                kill_agent()
            elif args.lose_node >= 0:
                time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)
    assert (args.way == "torch") == ("nebulaml" not in sys.modules)
    if rank == 0:
        weights = {name: value.double().sum().item() for name, value in engine.module.state_dict().items()}
        print(json.dumps({"end": True, "weights": weights, "blocked": blocked}), flush=True)
    engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
