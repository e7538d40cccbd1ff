"""ElasticSampler: decides which samples each rank takes at each global step. Any number of ranks together takes the same samples.

The order of an epoch depends only on the number of samples, the seed and the epoch, by the code of this module. It uses no generator
of torch or Python, so neither a resume nor a newer version changes it. It is computed a batch at a time, so its memory does not grow
with the data.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from .._session import pulse, ranks
from ..errors import NebulaConfigError

__all__ = ["ElasticSampler", "Share", "order"]

_ROUNDS = 8
_AT_ONCE = 4096  # samples of this rank whose order is computed together
_MOST = 1 << 48  # samples: rows and columns then stay far below the 32 bits of a round
_LOW_32 = 0xFFFFFFFF


class Share(list[int]):
    """The indices of the samples that one rank takes at one global step.

    step: the global step, counted from the begin of the epoch. size: the number of samples of all ranks in it. weight: the factor for the
    mean loss of these samples. With it, gradients that are averaged over the ranks, as DistributedDataParallel does, equal those of the
    mean over the whole global batch, for any number of ranks.
    """

    def __init__(self, indices: Sequence[int], step: int, size: int, world_size: int, filler: int) -> None:
        super().__init__(indices)
        self.step, self.size, self.weight = step, size, len(indices) * world_size / size
        self._most = -(-size // world_size)  # samples of the largest share
        self._world_size, self._filler = world_size, filler

    def parts(self, samples: int) -> list[Share]:
        """Divides this share for gradient accumulation: into parts of at most ``samples`` samples, the same number of parts on every rank.

        Add up the gradients of ``loss(part) * part.weight``. Every rank must take part in every collective, so a part without samples gets
        one sample of the global step, with weight 0. Raises NebulaConfigError if ``samples`` is less than 1.
        """
        samples = _whole("samples", samples, 1)
        count = -(-self._most // samples)
        result = []
        for part in range(count):
            indices = self[len(self) * part // count : len(self) * (part + 1) // count]
            made = Share(indices or [self._filler], self.step, self.size, self._world_size, self._filler)
            if not indices:
                made.weight = 0.0
            result.append(made)
        return result


class ElasticSampler:
    """Divides the samples of each global step among the ranks of the present world.

    n: the number of samples of the data set. global_batch: the samples of one step, over all ranks, for any number of ranks.
    rank, world_size: None: those of this process. shuffle: True shuffles each epoch; False keeps 0, 1, 2, ...
    drop_last: True leaves out an incomplete last step.

    Global step k of an epoch has samples k * global_batch up to (k + 1) * global_batch of its order, for every world size. The
    ranks' shares, one after the other, are these samples in this order. Their lengths differ by at most one.
    """

    def __init__(
        self,
        n: int,
        *,
        global_batch: int,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise NebulaConfigError("give both rank and world_size, or neither")
        if rank is None or world_size is None:
            here = ranks.current()
            rank, world_size = here.rank, here.world
        self.n, self.global_batch = _whole("n", n, 0), _whole("global_batch", global_batch, 1)
        self.rank, self.world_size = _whole("rank", rank, 0), _whole("world_size", world_size, 1)
        if self.rank >= self.world_size:
            raise NebulaConfigError(f"rank {rank} is none of {world_size}: they are numbered from 0")
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last

    def __len__(self) -> int:
        """Returns the number of global steps of an epoch."""
        return self.n // self.global_batch if self.drop_last else -(-self.n // self.global_batch)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Share]:
        """Yields this rank's share of each global step of the epoch, beginning with step ``start``.

        start: the number of global steps of this epoch that are done. If the last step has fewer samples than ranks, some shares are empty.
        """
        epoch, start = _whole("epoch", epoch, 0), _whole("start", start, 0)
        # Several steps at once: the order of a few samples takes as long as that of many.
        at_once = max(1, _AT_ONCE * self.world_size // self.global_batch)
        shares = itertools.chain.from_iterable(
            self._shares(epoch, range(first, min(first + at_once, len(self)))) for first in range(start, len(self), at_once)
        )
        return map(self._counted, shares)

    @staticmethod
    def _counted(share: Share) -> Share:
        pulse.progress()
        return share

    def position(self, step: int) -> tuple[int, int]:
        """Returns (epoch, start) for batches() after ``step`` global steps from the begin of the first epoch."""
        if not len(self):
            raise NebulaConfigError(f"{self.n} samples are too few for a step of {self.global_batch}")
        return divmod(_whole("step", step, 0), len(self))

    def sample_seed(self, epoch: int, index: int) -> int:
        """Returns a seed for random changes of this sample. It does not depend on the rank that takes the sample."""
        return _number(f"sample {self.seed} {epoch} {index}")

    def rank_seed(self, epoch: int, step: int) -> int:
        """Returns a seed for this rank at this global step (dropout). It differs between ranks, and is the same after a resume."""
        return _number(f"rank {self.seed} {epoch} {step} {self.rank}")

    def _shares(self, epoch: int, steps: range) -> list[Share]:
        firsts = [step * self.global_batch for step in steps]
        sizes = [min(self.global_batch, self.n - first) for first in firsts]
        places = [
            # the last one is the filler
            [*range(first + size * self.rank // self.world_size, first + size * (self.rank + 1) // self.world_size), first]
            for first, size in zip(firsts, sizes, strict=True)
        ]
        every = list(itertools.chain.from_iterable(places))
        samples = iter(order(every, self.n, self.seed, epoch) if self.shuffle else every)
        result = []
        for step, size, mine in zip(steps, sizes, places, strict=True):
            *indices, filler = itertools.islice(samples, len(mine))
            result.append(Share(indices, step, size, self.world_size, filler))
        return result


def order(positions: Sequence[int], n: int, seed: int, epoch: int) -> list[int]:
    """Returns the samples at these positions of the order of an epoch, which is a permutation of range(n).

    It is a Feistel network over rows x columns >= n places, applied again until the result is below n (Black and Rogaway, Ciphers with
    Arbitrary Finite Domains, 2002). So it can compute each position by itself.
    """
    import torch

    rows = math.isqrt(n) + 1  # with one row, a round would change almost nothing
    columns = max(1, -(-n // rows))
    digest = hashlib.blake2b(f"order {seed} {epoch} {n}".encode(), digest_size=4 * _ROUNDS).digest()
    keys = [int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(_ROUNDS)]

    def shuffled(values: Any) -> Any:
        row, column = values // columns, values % columns
        for key, other in zip(keys[::2], keys[1::2], strict=True):
            row = (row + _mixed(column ^ key)) % rows
            column = (column + _mixed(row ^ other)) % columns
        return row * columns + column

    found = shuffled(torch.tensor(positions, dtype=torch.int64))
    while bool((outside := found >= n).any()):
        found[outside] = shuffled(found[outside])
    return list(found.tolist())


def _mixed(values: Any) -> Any:
    """Maps 32 bits to 32 bits. The factors are below 2^31, so that each product fits an int64."""
    values = (values ^ (values >> 16)) & _LOW_32
    values = (values * 0x7FEB352D) & _LOW_32
    values = values ^ (values >> 15)
    values = (values * 0x46CA6B53) & _LOW_32
    return values ^ (values >> 16)


def _number(text: str) -> int:
    """Returns 63 bits, which torch.Generator.manual_seed, random.Random and numpy accept."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _whole(name: str, value: Any, least: int, most: int = _MOST) -> int:
    """Returns the number as an int, also one of NumPy or torch."""
    try:
        number = operator.index(value)
    except (TypeError, ValueError):  # a tensor of several numbers
        number = -1
    if not least <= number <= most or isinstance(value, bool):
        raise NebulaConfigError(f"{name} is a whole number from {least} to {most}, not {value!r:.100}")
    return number
