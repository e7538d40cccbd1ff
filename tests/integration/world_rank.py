"""One rank, which a test controls by lines on its standard input. It does not import torch, so that many ranks are cheap.

Arguments: storage path ("" for none), rank, world, local world, run, persist interval in seconds, job, replicas. Each
line is a command, each answer one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

from nebulaml import _nebula


def content(tag: str, rank: int, index: int, size: int, writing: str = "") -> bytes:
    """Returns the bytes of the index-th file that a rank saves under a tag. They differ for each rank, tag and writing, so that a mixture is noticed."""
    block = hashlib.sha256(f"{tag} {rank} {index} {writing}".encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def open_session(arguments: list[str]) -> _nebula.Session:
    path, rank, world, local_world, run, interval, job, replicas = arguments
    return _nebula.Session(
        persist_path=path or None,
        rank=int(rank),
        world=int(world),
        local_rank=int(rank) % max(int(local_world), 1),
        local_world=int(local_world),
        run=run,
        job=job,
        persist_interval_s=float(interval),
        retention_count=2,
        replica_count=int(replicas),
    )


class Rank:
    def __init__(self, arguments: list[str]) -> None:
        self.rank = int(arguments[1])
        self.session = open_session(arguments)
        self.checkpoints: dict[str, _nebula.Checkpoint] = {}

    def save(self, tag: str, goal: int, files: int, size: int, writing: str = "", commit: bool = True) -> str:
        checkpoint = self.session.begin(tag, goal)
        for index in range(files):
            checkpoint.save_bytes(f"r{self.rank}-{index}.bin", content(tag, self.rank, index, size, writing))
        self.checkpoints[tag] = checkpoint
        if commit:
            checkpoint.commit()
        return "saved"

    def wait(self, tag: str, state: str, seconds: float) -> str:
        self.checkpoints[tag].wait(state, int(seconds * 1000))
        return state

    def report(self, tag: str) -> object:
        return json.loads(self.checkpoints[tag].report())

    def versions(self) -> object:
        return json.loads(self.session.report(_nebula.REPORT_VERSIONS, None))["versions"]

    def latest(self) -> object:
        found = self.session.latest(None)
        self.checkpoints[found.tag] = found
        return json.loads(found.report())

    def find(self, tag: str) -> object:
        return json.loads(self.session.find(tag, None).report())

    def load(self, tag: str, files: list[str], own: bool = False) -> object:
        """Returns the digest of each file. own: of the checkpoint that this rank has saved, without a search."""
        found = self.checkpoints[tag] if own else self.session.find(tag, None)
        return {name: hashlib.sha256(memoryview(found.map(name))).hexdigest() for name in files}

    def load_version(self, tag: str, sequence: int, name: str) -> str:
        """Returns the digest of a file of exactly that version."""
        found = self.session.find(tag, None, sequence)
        return hashlib.sha256(memoryview(found.map(name))).hexdigest()

    def flush(self, seconds: float) -> str:
        self.session.flush(None, int(seconds * 1000))
        return "flushed"


def main() -> None:
    try:
        rank = Rank(sys.argv[1:])
        answer: object = {"ok": os.getpid()}
    except Exception as failure:
        answer = {"error": f"{type(failure).__name__}: {failure}"}
        rank = None  # type: ignore[assignment]
    while True:
        os.write(1, (json.dumps(answer) + "\n").encode())
        line = sys.stdin.readline()
        if not line:
            return
        name, *arguments = json.loads(line)
        if name == "raise":
            raise RuntimeError("the training loop failed")
        try:
            answer = {"ok": getattr(rank, name)(*arguments)}
        except Exception as failure:
            answer = {"error": f"{type(failure).__name__}: {failure}"}


if __name__ == "__main__":
    main()
