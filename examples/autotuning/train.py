"""A small network whose micro batch DeepSpeed's autotuner finds; the run that follows saves through Nebula and resumes."""

import argparse

import torch
from torch.nn import functional as F


def main():
    parser = argparse.ArgumentParser()
    # The autotuner puts the configuration of each experiment in place of this argument, as base64.
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=0)
    arguments = parser.parse_args()

    import deepspeed
    import nebulaml as nm
    import nebulaml.deepspeed  # noqa: F401  needed from DeepSpeed 0.19.7 on, harmless before

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # spares two minutes of compiling
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=arguments.deepspeed_config)
    batch = engine.train_micro_batch_size_per_gpu()
    tuning = engine.autotuning_enabled()  # an experiment neither resumes nor saves
    path, state = (None, None) if tuning else engine.load_checkpoint("runs/autotuning-placeholders")
    first = state["step"] + 1 if path else 1
    if rank == 0 and not tuning:
        print(f"micro batch {batch}, ZeRO stage {engine.zero_optimization_stage()}", flush=True)
    if rank == 0 and path:
        print(f"resumed after step {state['step']}", flush=True)
    for step in range(first, arguments.steps + 1):
        inputs = torch.randn(batch, 256, generator=torch.Generator().manual_seed(step * world + rank)).to(engine.device)
        loss = F.mse_loss(engine(inputs), inputs)
        engine.backward(loss)
        engine.step()  # ends an experiment of the autotuner after its last profiled step
        if step % arguments.save_every == 0 and not tuning:
            engine.save_checkpoint("runs/autotuning-placeholders", client_state={"step": step})
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
    nm.flush_persistence()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
