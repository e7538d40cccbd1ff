"""A limit of the machine in the form of a competitor: it writes as many bytes as a state has, with O_DIRECT, and saves nothing."""

from __future__ import annotations

import subprocess
from statistics import median

from ..peer import Peer, State
from ..run import LIMITS


class BareWrite(Peer):
    title = "a bare write"
    trains = 48

    def save(self, tag: str, state: State) -> None:
        if not hasattr(self, "writer"):
            size = sum(tensor.nbytes for tensor in state.values())
            command = [LIMITS, "write", str(self.folder / "bare.bin"), str(size)]
            self.writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.took: list[float] = []
            return  # the helper answers once when it is ready, as it does for each request
        self.writer.stdin.write("\n")
        self.writer.stdin.flush()

    def wait_durable(self, tag: str) -> None:
        answer = self.writer.stdout.readline()
        if not answer:
            raise RuntimeError(f"{LIMITS} ended")
        self.took.append(float(answer))

    def ends_after(self, tags: list[str]) -> float:
        return median(self.took)

    def close(self) -> None:
        self.writer.stdin.close()
        self.writer.wait()


PEER = BareWrite
