"""Measures samples per second with a growing number of ranks of one torchrun, and prints the distance from linear scaling.

Each rank has the same number of samples in each step (weak scaling): linear is n times the samples per second with n ranks.
"""

import argparse
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def counts_up_to(world):
    """Returns 1, 2, 4, ... and the world size."""
    return sorted({world, *(1 << n for n in range(world.bit_length()) if 1 << n <= world)})


def make_model(width, layers):
    layer = torch.nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def settle(group, device):
    """Waits until all ranks of the group are here and the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(group)


def seconds_per_step(model, inputs, steps, group):
    model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(-2, steps):  # the first two steps allocate memory and buckets
        if step == 0:
            settle(group, inputs.device)
            begin = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    settle(group, inputs.device)
    return (time.perf_counter() - begin) / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; 1, 2, 4, ... without it. The first one is the 100 %%")
    parser.add_argument("--batch", type=int, default=8, help="samples of each rank in a step")
    parser.add_argument("--length", type=int, default=64, help="tokens in a sample")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="steps in each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each number of ranks; the median counts")
    parser.add_argument("--at-least", type=float, default=0.0, help="if an efficiency is lower, such as 0.9, the exit code is 1")
    arguments = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = arguments.ranks or counts_up_to(world)
    if not all(1 <= count <= world for count in counts):
        parser.error(f"--ranks: from 1 to {world}, because torchrun started {world}")
    groups = {count: dist.new_group(list(range(count))) for count in counts}
    torch.manual_seed(0)
    model = make_model(arguments.width, arguments.layers).to(device)
    inputs = torch.randn(arguments.batch, arguments.length, arguments.width, device=device)
    seconds = {count: [] for count in counts}
    for _ in range(arguments.rounds):  # all numbers of ranks run in each round, so that a disturbance does not affect only one of them
        for count in counts:
            if rank < count:
                seconds[count].append(seconds_per_step(model, inputs, arguments.steps, groups[count]))
            dist.barrier()

    low = torch.zeros(1, device=device)  # rank 0 tells the others, so that all end with one exit code
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{parameters / 1e6:.1f}M parameters on {device.type}, {arguments.batch} samples a rank and step")
        print(f"{'ranks':>5}{'step':>12}{'samples/s':>12}{'efficiency':>12}")
        rates = {count: count * arguments.batch / statistics.median(seconds[count]) for count in counts}
        for count, rate in rates.items():
            efficiency = rate / count / (rates[counts[0]] / counts[0])
            low += efficiency < arguments.at_least
            print(f"{count:5}{count * arguments.batch / rate * 1e3:9.1f} ms{rate:12.1f}{efficiency:12.1%}")
        if low:
            print(f"an efficiency is below {arguments.at_least:.1%}")
        sys.stdout.flush()
    dist.broadcast(low, 0)
    dist.destroy_process_group()
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
