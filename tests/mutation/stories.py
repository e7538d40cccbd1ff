"""Plays so many short stories (tests/campaign/requeue.py) with a requeue-player: stories.py PLAYER COUNT. The exit code is 1 if one goes wrong."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "campaign"), str(Path(__file__).resolve().parents[1])]

from requeue import InProcess, judge, write  # noqa: E402

for storage in ("file", "mem", "late"):
    player = InProcess(Path(sys.argv[1]), storage)
    for seed in range(int(sys.argv[2])):
        story = write(seed, faults=player.faults)
        if judge(story, player.play(story)):
            sys.exit(1)
    player.close()
