"""A ResNet-18 on CIFAR-shaped images with DDP. Its nodes may come and go: start it with torchrun, see README.md."""

import argparse
import itertools
import pickle
import time
from pathlib import Path

import nebulaml as nm
import torch
import torch.distributed as dist
from torch.nn import functional as F


class Block(torch.nn.Module):
    """Two convolutions and a shortcut. Group norm, because the statistics of batch norm change with the number of ranks."""

    def __init__(self, before, width, stride):
        super().__init__()
        self.first = torch.nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.second = torch.nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = torch.nn.ModuleList(torch.nn.GroupNorm(4, width) for _ in range(2))
        self.shortcut = torch.nn.Conv2d(before, width, 1, stride, bias=False) if (before, stride) != (width, 1) else torch.nn.Identity()

    def forward(self, x):
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


def resnet18(width):
    widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
    blocks = [Block(before, after, 2 if after > before else 1) for before, after in itertools.pairwise(widths)]
    stem = torch.nn.Conv2d(3, width, 3, 1, 1, bias=False)
    return torch.nn.Sequential(
        stem, torch.nn.ReLU(), *blocks, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8 * width, 10)
    )


def made_images(count, seed):
    """Ten classes by shape and colour on noise, 32 x 32 in three colours like CIFAR-10's."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = torch.rand(count, 3, 32, 32, generator=generator)
    places = torch.randint(2, 18, (count, 2), generator=generator).tolist()
    for image, label, (top, left) in zip(images, labels.tolist(), places, strict=True):
        height, width = ((12, 12), (6, 12), (12, 6), (3, 12))[label % 4]
        image[label % 3, top : top + height, left : left + width] += 1.0
    return images, labels


def read_cifar(folder):
    """CIFAR-10's "python version", unpacked: data_batch_1 to 5. They are pickles: read only those that you trust."""
    batches = [pickle.loads(path.read_bytes(), encoding="bytes") for path in sorted(Path(folder).glob("data_batch_*"))]
    images = torch.cat([torch.from_numpy(batch[b"data"]) for batch in batches]).reshape(-1, 3, 32, 32).float() / 255
    return images, torch.tensor([label for batch in batches for label in batch[b"labels"]])


def main():
    begun = time.time()
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default="runs/elastic-cifar")
    parser.add_argument("--data", help="folder with CIFAR-10's batches; images are made without it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=48)
    parser.add_argument("--micro-batch", type=int, default=32, help="samples that fit into a rank's memory at once")
    parser.add_argument("--evictions", choices=["azure", "aws", "gce"], help="ask this cloud whether the machine is about to go")
    parser.add_argument("--width", type=int, default=8, help="64 is ResNet-18")
    arguments = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    images, labels = read_cifar(arguments.data) if arguments.data else made_images(2048, seed=1)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(resnet18(arguments.width).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.9)
    sampler = nm.ElasticSampler(len(images), global_batch=arguments.global_batch, seed=7)
    metrics = nm.MetricsLog(Path(arguments.path) / "metrics.jsonl")

    # All is the same on every rank: rank 0 saves it, and any number of ranks restores it.
    state = {"model": model, "optimizer": optimizer}
    settings = {"replicated": list(state), "replicas": 1, "evictions": arguments.evictions}
    manager = nm.Manager(arguments.path, save_every_steps=arguments.save_every, **settings)
    before = time.monotonic()
    found = manager.restore(state)
    done = 0 if found is None else found.step
    metrics.rewind(done)
    restored = time.monotonic() - before

    while done < arguments.steps:
        epoch, start = sampler.position(done)
        for indices in sampler.batches(epoch, start):
            total = torch.zeros((), device=device)
            optimizer.zero_grad()
            parts = indices.parts(arguments.micro_batch)
            for part in parts:
                model.require_backward_grad_sync = part is parts[-1]
                loss = F.cross_entropy(model(images[list(part)].to(device)), labels[list(part)].to(device)) * part.weight
                loss.backward()
                total += loss.detach()
            optimizer.step()
            done += 1
            dist.all_reduce(total)
            loss = total.item() / dist.get_world_size()
            metrics.log(done, loss=loss, world=dist.get_world_size(), at=time.time(), begun=begun, restored_s=restored)
            if dist.get_rank() == 0 and done % 10 == 0:
                print(f"step {done} loss {loss:.6f} ranks {dist.get_world_size()}", flush=True)
            if manager.should_save(done):
                manager.save(done, state)
            if manager.stop_requested:  # this node is to leave, or another one joins: torchrun starts the workers again
                manager.leave()
                raise SystemExit(143)
            if done == arguments.steps:
                break
    manager.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
