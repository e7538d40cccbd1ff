"""The interface of a competitor. To add one, add a module to bench/peers that defines PEER."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import torch

State = dict[str, torch.Tensor]


class Peer:
    """One way to save and load. It runs in a process of its own, and its methods are called in the order below.

    ``folder`` is this run's directory in storage. ``memory`` is a directory in shared memory; its files count as memory of this peer.
    """

    title: ClassVar[str]
    verified: ClassVar[bool] = False  # whether load() checks every byte against a checksum
    python: ClassVar[str | None] = None  # the interpreter of an environment of its own
    packages: ClassVar[tuple[str, ...]] = ("torch",)  # packages whose versions the figures depend on
    trains: ClassVar[int] = 24  # saves in the training loop: more if one save costs little compared with the noise of the machine
    durable: ClassVar[bool] = True  # whether it syncs its files; otherwise the benchmark syncs, and the row says so

    def __init__(self, folder: Path, memory: Path) -> None:
        self.folder, self.memory = folder, memory

    @classmethod
    def environment(cls, folder: Path, memory: Path, fresh: bool) -> dict[str, str]:
        """Returns environment variables for the process. ``fresh``: it must behave as on a new machine, which has only the storage."""
        return {}

    def prepare(self) -> None:
        """Imports the engine. Not timed; its memory does not count."""

    def open(self) -> None:
        """Does what a program does once at its start. Not timed, but its memory counts."""

    def expect(self, state: State) -> None:
        """Prepares the first save, after the program has made its tensors. Not timed."""

    def helpers(self) -> list[int]:
        """Returns the other processes of this peer. Their CPU time and memory count."""
        return []

    def save(self, tag: str, state: State) -> bool | None:
        """Saves a version. After this and before_change() have returned, the caller changes all tensors at once.

        Returns False if the peer skipped this version. Then it is never loaded.
        """
        raise NotImplementedError

    def before_change(self) -> None:
        """Waits until training may change the tensors, for a peer that copies while training computes."""

    def copying_cpu(self, tags: list[str]) -> float | None:
        """Returns the median CPU seconds of the copies of these versions. None: the peer does not report them."""
        return None

    def ends_after(self, tags: list[str]) -> float | None:
        """Returns the seconds from a save until the engine has finished its work on it. None: the peer does not report them."""
        return None

    def wait_durable(self, tag: str) -> None:
        """Waits until the version would survive a power loss. A peer that never syncs waits until it reports the version as done."""

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        """Returns the version's tensors by name. ``sizes`` are their numbers of elements."""
        raise NotImplementedError

    def load_into(self, tag: str, target: State) -> None:
        """Gives existing tensors the values of the version."""
        state = self.load(tag, {name: tensor.numel() for name, tensor in target.items()})
        for name, tensor in target.items():
            tensor.copy_(state[name])

    @classmethod
    def stored(cls, folder: Path, tag: str) -> Path | None:
        """Returns the file with all bytes of the version. None: there are several."""
        return None

    def close(self) -> None:
        """Closes the engine, at the end of the program."""

    @classmethod
    def clean(cls, environment: dict[str, str]) -> None:
        """Ends processes of the peer that still run, after the last process of the benchmark."""


def own_environment(name: str) -> str:
    """Returns the interpreter of an environment that scripts/peers.sh made."""
    return f".envs/peer-{name}/bin/python"


def sync_file(path: Path) -> None:
    """Makes a finished file durable: syncs its data, then its directory."""
    for target in (path, path.parent):
        fd = os.open(target, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
