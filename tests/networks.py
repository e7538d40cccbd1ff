"""Network namespaces for the nodes of a job on this machine. They need root, and the command ip."""

from __future__ import annotations

import os
import shutil
import subprocess

NODES = (2, 3, 4)
NOWHERE = "02:00:00:00:00:99"


class NoNetworks(Exception):
    """This machine does not permit network namespaces."""


def ip(*words: object) -> None:
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworks(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")


class Networks:
    """A namespace for each node, and one with a bridge between them. Nothing of it is in the namespace of this process."""

    def __init__(self) -> None:
        if shutil.which("ip") is None:
            raise NoNetworks("the command ip is not here (package iproute2)")
        self.mark = f"nb{os.getpid()}"
        try:
            ip("netns", "add", self.mark)
            ip("-n", self.mark, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.mark, "link", "set", "bridge", "up")
            for n in NODES:
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
        for other in others or NODES:
            if other != n:
                ip("-n", self.name(n), "neigh", "replace", self.address(other), "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")

    def cut(self, n: int) -> None:
        ip("-n", self.name(n), "link", "set", "eth0", "down")

    def heal(self, n: int) -> None:
        ip("-n", self.name(n), "link", "set", "eth0", "up")
        for other in NODES:
            if other != n:
                address = self.hardware(other)
                ip("-n", self.name(n), "neigh", "replace", self.address(other), "lladdr", address, "dev", "eth0", "nud", "permanent")

    def close(self) -> None:
        for name in [*map(self.name, NODES), self.mark]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
