"""A small network on coloured shapes with DeepSpeed ZeRO-2. Only its JSON names Nebula."""

import argparse
import json
import os
import pickle
from pathlib import Path

import torch
from torch.nn import functional as F


def made_images(count, seed):
    """Returns images of ten classes, by shape and colour, on noise: 32 x 32 in three colours like CIFAR-10's."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = torch.rand(count, 3, 32, 32, generator=generator)
    places = torch.randint(2, 18, (count, 2), generator=generator).tolist()
    for image, label, (top, left) in zip(images, labels.tolist(), places, strict=True):
        height, width = ((12, 12), (6, 12), (12, 6), (3, 12))[label % 4]
        image[label % 3, top : top + height, left : left + width] += 1.0
    return images, labels


def read_cifar(folder):
    """Reads CIFAR-10's "python version", unpacked: data_batch_1 to 5. They are pickles: read only files that you trust."""
    batches = [pickle.loads(path.read_bytes(), encoding="bytes") for path in sorted(Path(folder).glob("data_batch_*"))]
    images = torch.cat([torch.from_numpy(batch[b"data"]) for batch in batches]).reshape(-1, 3, 32, 32).float() / 255
    return images, torch.tensor([label for batch in batches for label in batch[b"labels"]])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=str(Path(__file__).with_name("ds.json")))
    parser.add_argument("--path", help="instead of the JSON's persistent_storage_path")
    parser.add_argument("--data", help="folder with CIFAR-10's batches; images are made without it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--tensorboard", help="folder for TensorBoard: the loss and the versions")
    parser.add_argument("--flops", help="file for what DeepSpeed's flops profiler counts at step 5")
    parser.add_argument("--local_rank", type=int, default=0)
    arguments = parser.parse_args()

    import deepspeed
    import nebulaml as nm
    import nebulaml.deepspeed  # noqa: F401  needed from DeepSpeed 0.19.7 on, harmless before

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # saves two minutes of compiling
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = json.loads(Path(arguments.config).read_text())
    if arguments.path:
        config["nebula"]["persistent_storage_path"] = arguments.path
    if arguments.flops:
        config["flops_profiler"] = {"enabled": True, "profile_step": 5, "output_file": arguments.flops}
    persisted = config["nebula"]["persistent_storage_path"]

    torch.manual_seed(0)
    images, labels = read_cifar(arguments.data) if arguments.data else made_images(2048, seed=1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 5, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 5, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(32 * 25, 10),
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    # The files that save_checkpoint itself leaves are small. They are in a directory even if the checkpoints are in an object store.
    is_url = "://" in persisted
    placeholders = "runs/cifar-placeholders" if is_url else os.path.join(persisted, "..", Path(persisted).name + "-placeholders")
    path, state = engine.load_checkpoint(persisted if is_url else placeholders)
    first = state["step"] + 1 if path else 1
    board = nm.log_to("tensorboard", log_dir=arguments.tensorboard) if arguments.tensorboard else None
    if board and path:
        board.rewind(state["step"])
    if rank == 0 and path:
        print(f"resumed after step {state['step']}", flush=True)
    for step in range(first, arguments.steps + 1):
        chosen = torch.randint(0, len(images), (32,), generator=torch.Generator().manual_seed(step * world + rank))
        scores = engine(images[chosen].to(engine.device))
        loss = F.cross_entropy(scores, labels[chosen].to(engine.device))
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
            if board:
                board.log(step, loss=loss)
        if step % arguments.save_every == 0:
            engine.save_checkpoint(placeholders, client_state={"step": step})
    nm.flush_persistence()  # a container or a batch system may end the agent together with this process
    if board:
        board.close()
    engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
