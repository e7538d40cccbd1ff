"""A small convolutional network on generated digits, in plain PyTorch. It can be killed at any time."""

import argparse
import struct
from pathlib import Path

import nebulaml as nm
import torch
from torch.nn import functional as F

FONT = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717"]  # five rows of three points a digit


def made_digits(count, seed):
    """Returns digits of 3 x 5 points, enlarged, shifted and covered with noise: 28 x 28 like MNIST's."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    glyphs = torch.tensor([[[int(row) >> (2 - x) & 1 for x in range(3)] for row in digit] for digit in FONT]).float()
    large = glyphs.repeat_interleave(4, 1).repeat_interleave(4, 2)  # 20 x 12
    images = torch.rand(count, 1, 28, 28, generator=generator) * 0.6
    shifts = torch.randint(0, 8, (count, 2), generator=generator)
    for image, label, (down, right) in zip(images, labels, shifts.tolist(), strict=True):
        image[0, down : down + 20, right * 2 : right * 2 + 12] += large[label] * 0.8
    return images, labels


def read_mnist(folder):
    """Reads the four files of MNIST, unpacked: train-images-idx3-ubyte and so on."""

    def read(name):
        data = (Path(folder) / name).read_bytes()
        dimensions = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
        return torch.frombuffer(bytearray(data[4 + 4 * data[3] :]), dtype=torch.uint8).reshape(dimensions)

    return read("train-images-idx3-ubyte").unsqueeze(1).float() / 255, read("train-labels-idx1-ubyte").long()


parser = argparse.ArgumentParser()
parser.add_argument("--path", default="runs/mnist", help="where checkpoints go")
parser.add_argument("--data", help="folder with MNIST's files; digits are made without it")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--tensorboard", help="folder for TensorBoard: the loss and the versions")
arguments = parser.parse_args()

torch.manual_seed(0)
images, labels = read_mnist(arguments.data) if arguments.data else made_digits(4096, seed=1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 5, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 5, stride=2), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Dropout(0.2), torch.nn.Linear(32 * 16, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

nm.init(persistent_storage_path=arguments.path, persistent_time_interval=0)
board = nm.log_to("tensorboard", log_dir=arguments.tensorboard) if arguments.tensorboard else None
first = 1
latest = nm.get_latest_checkpoint()
if latest is not None:
    latest.load_into("model.pt", model)
    optimizer.load_state_dict(latest.load("optimizer.pt"))
    nm.set_rng_state(latest.load("rng.pt"))
    first = latest.step + 1
    if board:
        board.rewind(latest.step)
    print(f"resumed after step {latest.step}, which was {latest.state}", flush=True)

for step in range(first, arguments.steps + 1):
    chosen = torch.randint(0, len(images), (64,))
    scores = model(images[chosen])
    loss = F.cross_entropy(scores, labels[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        right = (scores.argmax(1) == labels[chosen]).float().mean()
        print(f"step {step} loss {loss.item():.6f} right {right:.0%}", flush=True)
        if board:
            board.log(step, loss=loss, right=right)
    if step % arguments.save_every == 0:
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("model.pt", model.state_dict())
            checkpoint.save("optimizer.pt", optimizer.state_dict())
            checkpoint.save("rng.pt", nm.rng_state())

nm.flush_persistence()  # a container or a batch system may end the agent together with this process
if board:
    board.close()
