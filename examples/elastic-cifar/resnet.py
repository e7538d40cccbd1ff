"""ResNet-18 for images of 32 x 32, and images to train it on: CIFAR-10's, or generated ones of that shape."""

import itertools
import pickle
from pathlib import Path

import torch
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
