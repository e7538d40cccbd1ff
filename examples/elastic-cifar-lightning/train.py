"""The ResNet of examples/elastic-cifar, trained with Lightning. Its nodes may come and go: start it with torchrun, see README.md."""

import argparse
import os
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import nebulaml as nm
import torch
import torch.distributed as dist
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1] / "elastic-cifar"))
from resnet import made_images, read_cifar, resnet18  # noqa: E402


class Steps(torch.utils.data.IterableDataset):
    """Yields the samples of this rank for each global step, beginning with the trainer's step. For Lightning it is one epoch without end."""

    def __init__(self, images, labels, sampler, micro_batch, trainer):
        self.images, self.labels, self.sampler, self.micro_batch, self.trainer = images, labels, sampler, micro_batch, trainer

    def __iter__(self):
        done = self.trainer.global_step
        while True:
            epoch, start = self.sampler.position(done)
            for share in self.sampler.batches(epoch, start):
                done += 1
                yield [(self.images[list(part)], self.labels[list(part)], part.weight) for part in share.parts(self.micro_batch)]


class Net(pl.LightningModule):
    def __init__(self, width, metrics):
        super().__init__()
        self.net, self.metrics, self.begun = resnet18(width), metrics, time.time()

    def on_train_start(self):
        self.metrics.rewind(self.global_step)

    def training_step(self, batch, index):
        # All parts have one size for any number of ranks: in another order the sums would be rounded differently.
        return sum(F.cross_entropy(self.net(images), labels) * weight for images, labels, weight in batch)

    def on_train_batch_end(self, outputs, batch, index):
        loss = outputs["loss"].detach().clone()
        dist.all_reduce(loss)
        world = dist.get_world_size()
        self.metrics.log(self.global_step, loss=loss.item() / world, world=world, at=time.time(), begun=self.begun, restored_s=0.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.004, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default="runs/elastic-cifar-lightning", help="the directory of Lightning's files and the metrics")
    parser.add_argument("--storage", help="where Nebula's versions go: also an object store; PATH/nebula without it")
    parser.add_argument("--data", help="folder with CIFAR-10's batches; images are made without it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=48)
    parser.add_argument("--micro-batch", type=int, default=32, help="samples that a rank computes at once")
    parser.add_argument("--width", type=int, default=8, help="64 is ResNet-18")
    arguments = parser.parse_args()

    folder = Path(arguments.path)
    images, labels = read_cifar(arguments.data) if arguments.data else made_images(2048, seed=1)
    pl.seed_everything(0, verbose=False)
    saver = nm.NebulaCallback(
        dirpath=folder / "checkpoints", filename="{step}", every_n_train_steps=arguments.save_every, save_top_k=-1, save_last=True,
        config_params={
            "persistent_storage_path": arguments.storage or folder / "nebula", "persistent_time_interval": 0, "keep_last": 2, "replicas": 1,
        },
    )  # fmt: skip
    here, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        max_steps=arguments.steps, callbacks=[saver], strategy="ddp", devices=here, num_nodes=world // here, use_distributed_sampler=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    sampler = nm.ElasticSampler(len(images), global_batch=arguments.global_batch, seed=7)
    loader = torch.utils.data.DataLoader(Steps(images, labels, sampler, arguments.micro_batch, trainer), batch_size=None)
    model = Net(arguments.width, nm.MetricsLog(folder / "metrics.jsonl"))
    trainer.fit(model, loader, ckpt_path="last")


if __name__ == "__main__":
    main()
