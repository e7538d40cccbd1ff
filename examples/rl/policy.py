"""What trainer and rollout share: the policy, its task and reward, and the directory of batches between them."""

import argparse
import io
import sys
import time
import zlib
from pathlib import Path

import torch

DIGITS, LENGTH = 8, 6  # the task: count up from the prompt, for example 6 -> 7 0 1 2 3 4
PROMPTS, GROUP = 8, 16  # of a batch: so many prompts, and so many answers to each one
AHEAD = 2  # batches that may wait for the trainer


class Policy(torch.nn.Module):
    """Gives the logits of the next digit after each one."""

    def __init__(self):
        super().__init__()
        self.digits = torch.nn.Embedding(DIGITS, 32)
        self.memory = torch.nn.GRU(32, 64, batch_first=True)
        self.head = torch.nn.Linear(64, DIGITS)

    def forward(self, text, state=None):
        hidden, state = self.memory(self.digits(text), state)
        return self.head(hidden), state

    @torch.no_grad()
    def answers(self, prompts):
        """Returns the texts, prompt and answer, and the log-probability of each digit of an answer."""
        text, logs, state = prompts[:, None], [], None
        for _ in range(LENGTH):
            logits, state = self(text[:, -1:], state)
            choice = torch.distributions.Categorical(logits=logits[:, -1])
            digits = choice.sample()
            text = torch.cat([text, digits[:, None]], 1)
            logs.append(choice.log_prob(digits))
        return text, torch.stack(logs, 1)

    def weights_sum(self):
        """Returns a checksum of all weights."""
        total = 0
        for tensor in self.state_dict().values():
            total = zlib.crc32(tensor.numpy().tobytes(), total)
        return f"{total:08x}"


def rewards_of(text):
    """Returns the share of right digits in each answer."""
    right = (text[:, :1] + torch.arange(1, LENGTH + 1)) % DIGITS
    return (text[:, 1:] == right).float().mean(1)


class Batches:
    """A directory with a file for each batch. A batch is complete when its file has its name, so either side may be killed."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def _waiting(self):
        return sorted(self.directory.glob("*.pt"))

    def put(self, batch):
        while len(self._waiting()) >= AHEAD:
            time.sleep(0.005)
        part = self.directory / "part"
        torch.save(batch, part)
        part.rename(self.directory / f"{time.time_ns()}.pt")

    def take(self, is_over):
        """Waits for a batch, and returns the oldest one. Its file is removed first: no batch is used twice. None: is_over() is true."""
        while not (waiting := self._waiting()):
            if is_over():
                return None
            time.sleep(0.005)
        data = waiting[0].read_bytes()
        waiting[0].unlink()
        return torch.load(io.BytesIO(data))


def say(line):
    sys.stdout.write(f"{line}\n")  # one write: the lines of both processes stay whole
    sys.stdout.flush()


def parser():
    result = argparse.ArgumentParser()
    result.add_argument("--path", type=Path, default=Path("runs/rl"), help="where checkpoints, published weights and batches go")
    result.add_argument("--steps", type=int, default=100)
    return result
