"""DLRover's flash checkpoint: it copies into shared memory, and a saver process writes from there to storage."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from ..peer import Peer, State, own_environment

SAVER = """
import os, sys
from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver
AsyncCheckpointSaver.start_async_saving_ckpt()
sys.stdin.read()
os._exit(0)
"""
SAVER_GONE = 120  # a version counts as lost after so many seconds without progress


class DLRover(Peer):
    title = "DLRover flash checkpoint"
    python = own_environment("dlrover")
    packages = ("dlrover",)
    durable = False

    @classmethod
    def environment(cls, folder: Path, memory: Path, fresh: bool) -> dict[str, str]:
        # Sockets and shared memory are named after the job; the role says that a launcher has started the saver.
        return {"ROLE_NAME": "dlrover-trainer", "TORCHELASTIC_RUN_ID": f"{memory.name}-{'fresh' if fresh else 'kept'}"}

    def prepare(self) -> None:
        from dlrover.trainer.torch.flash_checkpoint import ddp

        self.module = ddp

    def open(self) -> None:
        (self.folder / "storage").mkdir(exist_ok=True)
        # DLRover's launcher runs the saver in a process beside the trainer. A saver that the trainer itself forks sometimes hangs,
        # because the trainer has threads.
        self.saver = subprocess.Popen([sys.executable, "-c", SAVER], stdin=subprocess.PIPE)
        self.checkpointer = self.module.DdpCheckpointer(str(self.folder / "storage"))

    def save(self, tag: str, state: State) -> bool:
        step = int(tag.removeprefix("step"))
        self.checkpointer.save_checkpoint(step, state)
        # DLRover skips a version, without an error, while it still persists the previous one.
        return self.checkpointer._engine.latest_step == step

    def wait_durable(self, tag: str) -> None:
        # DLRover's own wait checks only every three seconds.
        step, tracker = int(tag.removeprefix("step")), self.folder / "storage" / "dlrover_latest.txt"
        given_up = time.monotonic() + SAVER_GONE
        while not (tracker.exists() and int(tracker.read_text() or 0) >= step):  # one after the other
            if time.monotonic() > given_up:
                raise RuntimeError(f"{tag} was not persisted")
            time.sleep(0.001)

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        path = self.folder / "storage" / tag.removeprefix("step") / "rank_0.pt"
        return self.checkpointer.load_checkpoint(str(path))

    def close(self) -> None:
        self.saver.stdin.close()
        self.saver.wait(timeout=30)

    @classmethod
    def clean(cls, environment: dict[str, str]) -> None:
        job = environment["TORCHELASTIC_RUN_ID"]
        shutil.rmtree(Path("/tmp/ckpt_sock") / job, ignore_errors=True)
        for path in Path("/dev/shm").glob(f"{job}*"):
            path.unlink(missing_ok=True)


PEER = DLRover
