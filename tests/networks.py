"""Network namespaces for the nodes of a job on this machine. They need root, and the command ip."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

NODES = (2, 3, 4)
NOWHERE = "02:00:00:00:00:99"


class NoNetworks(Exception):
    """This machine does not permit network namespaces."""


def ip(*words: object, said: str | None = None) -> None:
    done = subprocess.run(["ip", *map(str, words)], input=said, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworks(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")


class Networks:
    """A namespace for each node, and one with a bridge between them. Nothing of it is in the namespace of this process."""

    def __init__(self, nodes: Sequence[int] = NODES) -> None:
        self.nodes = nodes
        if shutil.which("ip") is None:
            raise NoNetworks("the command ip is not here (package iproute2)")
        self.mark = f"nb{os.getpid()}"
        try:
            ip("netns", "add", self.mark)
            ip("-n", self.mark, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.mark, "link", "set", "bridge", "up")
            for n in nodes:
                ip("netns", "add", self.name(n))
                ip("-n", self.mark, "link", "add", f"to{n}", "type", "veth", "peer", "name", "eth0", "netns", self.name(n))
                ip("-n", self.mark, "link", "set", f"to{n}", "master", "bridge", "up")
                ip("-n", self.name(n), "link", "set", "eth0", "address", self.hardware(n))
                ip("-n", self.name(n), "address", "add", f"{self.address(n)}/24", "dev", "eth0")
                ip("-n", self.name(n), "link", "set", "lo", "up")
                ip("-n", self.name(n), "link", "set", "eth0", "up")
                self.heal(n)
        except NoNetworks:
            self.close()
            raise

    def name(self, n: int) -> str:
        return f"{self.mark}-{n}"

    def address(self, n: int) -> str:
        return f"10.77.0.{n}"

    def hardware(self, n: int) -> str:
        return f"02:00:00:00:00:{n:02x}"

    def lose(self, n: int, *others: int) -> None:
        """What node n sends to the others is lost; what they send arrives."""
        self._neighbours(n, dict.fromkeys(others or self.nodes, NOWHERE))

    def cut(self, n: int) -> None:
        ip("-n", self.name(n), "link", "set", "eth0", "down")

    def heal(self, n: int) -> None:
        ip("-n", self.name(n), "link", "set", "eth0", "up")
        self._neighbours(n, {other: self.hardware(other) for other in self.nodes})

    def _neighbours(self, n: int, places: dict[int, str]) -> None:
        lines = [f"neigh replace {self.address(other)} lladdr {place} dev eth0 nud permanent\n" for other, place in places.items() if other != n]
        ip("-n", self.name(n), "-batch", "-", said="".join(lines))

    def close(self) -> None:
        for name in [*map(self.name, self.nodes), self.mark]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
