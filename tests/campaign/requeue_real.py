"""Plays the stories of requeue.py with real trainers, agents and kills.

Other than in requeue_player.c, an agent has threads, and persists when it likes. So a run's versions wait for ``persist`` (an interval of an
hour), a run that is left without it ends by a kill of trainer and agent together, and a story never says ``scan``. ``fault -1`` takes the mount of
the storage path away, ``fault 0`` brings it back; other faults are left out.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nebulaml._session import locate
from nodes import Node
from requeue import Story

TRAINER = """
HOUR = 3600
nm.init(sys.argv[1], HOUR, 16, keep_last=int(sys.argv[2]), on_error="raise")
def show(found):
    if found is None:
        return "none"
    files = " ".join(f"{name}={bytes(found.read_bytes(name)).decode()}" for name in sorted(found.files))
    return f"{found.tag} {len(found.passed_over)} {files}"
def do(word, *rest):
    if word == "newest":
        return show(nm.get_latest_checkpoint())
    if word == "load":
        return show(nm.get_checkpoint(*rest))
    if word == "save":
        with nm.Checkpoint(rest[0], -2) as checkpoint:
            for one in rest[1:]:
                name, _, value = one.partition("=")
                checkpoint.save_bytes(name, value.encode())
        return "ok"
    try:
        nm.flush_persistence(timeout=60)
    except nm.NebulaError as failure: # a version that gave way, or whose base was removed
        print(failure, file=sys.stderr)
    return "ok"
for line in sys.stdin:
    try:
        say(do(*line.split()))
    except nm.NebulaError as failure:
        say("error", *str(failure).split())
"""


class Real:
    """The player. ``make``: makes a node of that name."""

    def __init__(self, storage: Path, make: Callable[[str], Node]) -> None:
        self._storage, self._make = storage, make
        self._nodes: dict[str, Node] = {}
        self._node: Node
        self._trainer: Any = None

    def play(self, story: Story) -> list[str]:
        """Plays one story in an empty storage. It ends with no agent and no mount left."""
        kept = self._storage.with_name("kept")
        kept.mkdir(exist_ok=True)
        self._storage.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", kept], check=True)
        try:
            self._mount(True)
            return [self._command(*command.split(" ")) for command in story]
        finally:
            self._leave(is_killed=True)
            for node in self._nodes.values():
                node.place.close()
            self._nodes = {}
            self._mount(False)
            subprocess.run(["umount", "-l", kept], check=True)

    def _mount(self, wanted: bool) -> None:
        if wanted and not self._storage.is_mount():
            subprocess.run(["mount", "--bind", self._storage.with_name("kept"), self._storage], check=True)
        elif not wanted and self._storage.is_mount():
            subprocess.run(["umount", "-l", self._storage], check=True)

    def _command(self, word: str, *rest: str) -> str:
        if word == "node":
            self._leave()
            if rest[0] not in self._nodes:
                self._nodes[rest[0]] = self._make(rest[0])
            self._node = self._nodes[rest[0]]
        elif word == "run":
            self._leave()
            with self._node.here():
                self._trainer = self._node.place.trainer(TRAINER, self._storage, rest[1], stdin=True)
        elif word in ("kill", "forget"):
            self._leave(is_killed=True)
            if word == "forget":
                self._node.forget()
        elif word == "fault":
            self._mount(rest[0] != "-1")
        elif word == "prune":
            with self._node.here():
                removed = subprocess.run(
                    [locate.agent_path(), "prune", "--path", self._storage, "--tag", rest[0], "--yes"], capture_output=True, timeout=60
                )
            return "none" if removed.returncode else "ok"
        elif word == "persist":
            self._ask(word)
            return " ".join(sorted(path.name for path in self._storage.glob("[!.]*") if (path / ".nebula").is_dir()))
        elif word != "scan":
            return self._ask(word, *rest)
        return "ok"

    def _ask(self, *words: str) -> str:
        self._trainer.stdin.write(" ".join(words) + "\n")
        self._trainer.stdin.flush()
        return str(self._trainer.stdout.readline().strip())

    def _leave(self, is_killed: bool = False) -> None:
        """Ends the trainer. is_killed: together with the agent of its node, which persists nothing more."""
        trainer, self._trainer = self._trainer, None
        if is_killed and self._nodes and self._node.place.agents():
            self._node.place.kill_all(*([trainer] if trainer else []))
        elif trainer:
            trainer.stdin.close()
            trainer.wait(timeout=60)
            trainer.stdout.close()
