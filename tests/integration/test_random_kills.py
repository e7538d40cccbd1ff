"""Random SIGKILLs over a running job of four ranks: the version that loads was committed, is complete, and is not older than the newest durable one."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time

from world_nodes import ALL_RANKS, RankFailed, World, a_world
from world_rank import content

NODES = ({"a": [0, 1, 2, 3]}, {"a": [0, 1], "b": [2, 3]})
SIZE = 40_000


def test_random_kills():
    kills = 1000 if os.environ.get("NEBULA_TEST_NIGHTLY") == "1" else 5
    seed = int(os.environ.get("NEBULA_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    done = 0
    while done < kills:
        # A job of its own for every fifty, on one node and on two in turn, so that a failure is quick to repeat.
        with a_world(NEBULA_TAKEOVER_S="2") as world:
            world.quiet = True
            job = Job(world, NODES[(done // 50) % 2] if kills > 50 else NODES[seed % 2], seed + done)
            try:
                done += job.run(min(50, kills - done))
            except BaseException as failure:
                logs = "\n".join(world.log(node)[-3000:] for node in ("a", "b"))
                raise AssertionError(
                    f"NEBULA_TEST_SEED={seed}, in the fifty from kill {done}: {failure!r}\n{logs}"
                ) from failure
    print(f"{done} kills, seed {seed}")


class Job:
    def __init__(self, world: World, nodes: dict[str, list[int]], seed: int) -> None:
        self.world, self.nodes = world, nodes
        self.random = random.Random(seed)
        self.saved_by: dict[int, set[str]] = {}  # step -> the runs that wrote it on every rank
        self.run_count = 0

    def run(self, kills: int) -> int:
        count, step = 0, 0
        while count < kills:
            ranks = self.start()
            step = self.check(ranks)
            count += self.train(ranks, step)
        self.check(self.start())
        return count

    def start(self):
        """Starts a run. It waits for the end of the last one, because two trainers of one rank may not live at once."""
        self.run_count += 1
        return self.world.start(self.nodes, f"run{self.run_count}", interval=self.random.choice([0, 0, 0.3]))

    def durable(self) -> int:
        """Returns the newest version whose manifest is in storage."""
        steps = [
            int(path.parent.parent.name.removeprefix("global_step"))
            for path in self.world.storage.glob("global_step*/.nebula/manifest-*.json")
        ]
        return max(steps, default=0)

    def check(self, ranks) -> int:
        """Checks that all ranks load the same version, with the right bytes. Returns its step."""
        durable = self.durable()
        held = []
        for rank in ranks:
            rows = rank.ask("versions")
            held.append(
                {
                    (row["step"], row["sequence"])
                    for row in rows
                    if row["state"] in ("committed", "replicated", "durable") and row["source"]
                }
            )
        common = set.intersection(*held)
        if not common:
            assert not durable, f"global_step{durable} is durable, and the ranks have nothing in common: {held}"
            return 0
        step, sequence = max(common)
        assert step >= durable, f"global_step{durable} is durable, and global_step{step} is loaded"
        assert step in self.saved_by, f"global_step{step} was never saved by all ranks"
        tag = f"global_step{step}"
        digests = [rank.ask("load_version", tag, sequence, f"r{rank.rank}-0.bin") for rank in ranks]
        runs = [self.run_of(tag, rank.rank, digest) for rank, digest in zip(ranks, digests, strict=True)]
        assert runs[0] in self.saved_by[step] and len(set(runs)) == 1, (
            f"{tag} sequence {sequence}: the ranks hold {runs}, and {sorted(self.saved_by[step])} saved it; "
            f"they had {[sorted(row for row in rows if row[0] == step) for rows in held]}"
        )
        return step

    def run_of(self, tag: str, rank: int, digest: str) -> str | None:
        """Returns the run that wrote these bytes. None: no run did."""
        for run in (f"run{number}" for number in range(self.run_count, 0, -1)):
            if hashlib.sha256(content(tag, rank, 0, SIZE, run)).hexdigest() == digest:
                return run
        return None

    def train(self, ranks, step: int) -> int:
        """Trains in lock step until a process is killed. Returns the number of kills."""
        run, pick = f"run{self.run_count}", self.random.random()
        lives = self.random.randint(0, 4)
        while True:
            step += 1
            lives -= 1
            for rank in ranks:
                rank.send("save", f"global_step{step}", ALL_RANKS, 1, SIZE, run)
            # A rank that answers has fixed its bytes; a killed one may have, too. The load shows it.
            self.saved_by.setdefault(step, set()).add(run)
            if lives < 0:
                time.sleep(self.random.random() * 0.03)
                if pick < 0.25:
                    self.kill_agent()  # and the ranks go on with the next one
                    if self.answers(ranks):
                        lives, pick = self.random.randint(0, 3), 0.25 + 0.75 * self.random.random()
                        self.extra = getattr(self, "extra", 0) + 1
                        continue
                elif pick < 0.5:
                    self.kill_agent()
                elif pick < 0.75:
                    ranks[self.random.randrange(len(ranks))].kill(signal.SIGKILL)
                break
            if not self.answers(ranks):
                break
        for rank in ranks:
            rank.kill(signal.SIGKILL)
        for rank in ranks:
            rank.end()
        killed = 1 + getattr(self, "extra", 0)
        self.extra = 0
        return killed

    def kill_agent(self) -> None:
        self.world.kill_agents(self.random.choice(list(self.nodes)), wait=False)

    def answers(self, ranks) -> bool:
        fine = True
        for rank in ranks:
            try:
                rank.answer()
            except RankFailed:
                fine = False
        return fine
