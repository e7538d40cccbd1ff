"""What the benchmark asks of a competitor. A new one is one module in bench/peers that defines PEER."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import torch

State = dict[str, torch.Tensor]


class Peer:
    """One way to save and load. Lives in a process of its own, in the order of the methods below.

    ``folder`` is this run's directory in storage; ``memory`` one in shared memory, counted as memory of this peer.
    """

    title: ClassVar[str]
    verified: ClassVar[bool] = False  # whether load() checks every byte against a checksum
    python: ClassVar[str | None] = None  # the interpreter of an environment of its own
    packages: ClassVar[tuple[str, ...]] = ("torch",)  # whose versions a figure depends on
    trains: ClassVar[int] = 24  # saves in the training loop; more where one costs little and must be told from the noise of the machine
    durable: ClassVar[bool] = True  # whether it syncs by itself; otherwise the benchmark does, and the row says so

    def __init__(self, folder: Path, memory: Path) -> None:
        self.folder, self.memory = folder, memory

    @classmethod
    def environment(cls, folder: Path, memory: Path, fresh: bool) -> dict[str, str]:
        """Variables of the process. ``fresh``: as on a machine that has nothing of this job but its storage."""
        return {}

    def prepare(self) -> None:
        """Imports; not timed, and part of the memory that is there anyway."""

    def open(self) -> None:
        """What a program does once at its start; not timed, but its memory counts."""

    def expect(self, state: State) -> None:
        """What a program does before its first save once its tensors are there; not timed."""

    def helpers(self) -> list[int]:
        """Other processes that work for this peer; their CPU time and memory count."""
        return []

    def save(self, tag: str, state: State) -> bool | None:
        """The part that blocks: when it and before_change() have returned, the caller changes all tensors at once.

        Returns False when the peer skipped this version, which is then never loaded.
        """
        raise NotImplementedError

    def before_change(self) -> None:
        """For a peer that copies while training computes and asks training to wait with its next change."""

    def copying_cpu(self, tags: list[str]) -> float | None:
        """CPU seconds that copying one of these versions took, the median, where the peer tells."""
        return None

    def ends_after(self, tags: list[str]) -> float | None:
        """Seconds from a save of these versions until its engine has nothing left to do, where it tells."""
        return None

    def wait_durable(self, tag: str) -> None:
        """Returns when the version would survive a loss of power; of one that never syncs, when it calls itself done."""

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        """The version's tensors, by name; ``sizes`` are their numbers of elements."""
        raise NotImplementedError

    @classmethod
    def stored(cls, folder: Path, tag: str) -> Path | None:
        """The file that all bytes of the version lie in, where there is one."""
        return None

    def close(self) -> None:
        """The end of the program."""

    @classmethod
    def clean(cls, environment: dict[str, str]) -> None:
        """After the last process: ends what still runs."""


def own_environment(name: str) -> str:
    """The interpreter of an environment that scripts/peers.sh made."""
    return f".envs/peer-{name}/bin/python"


def sync_file(path: Path) -> None:
    """Makes a finished file durable: its data, then its name."""
    for target in (path, path.parent):
        fd = os.open(target, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
