"""A ResNet-18 on CIFAR-shaped images with DDP. Its nodes may come and go: start it with torchrun, see README.md."""

import argparse
import time
from pathlib import Path

import nebulaml as nm
import torch
import torch.distributed as dist
from resnet import made_images, read_cifar, resnet18
from torch.nn import functional as F


def main():
    begun = time.time()
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default="runs/elastic-cifar", help="the directory of the metrics, and of the checkpoints without --storage")
    parser.add_argument("--storage", help="where checkpoints go: also an object store")
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

    # Every rank has the same state: rank 0 saves it, and any number of ranks can restore it.
    state = {"model": model, "optimizer": optimizer}
    settings = {"replicated": list(state), "replicas": 1, "evictions": arguments.evictions}
    manager = nm.Manager(arguments.storage or arguments.path, save_every_steps=arguments.save_every, **settings)
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
                if manager.stop_requested:  # this node must leave, or another one joins: torchrun starts the workers again
                    manager.leave()
                    raise SystemExit(143)
            if done == arguments.steps:
                break
    manager.wait()  # a container or a batch system may end the agent together with this process
    manager.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
