"""Runs scripts for the price of one import: python forked.py MODULES RUNS

Imports the modules, whose names are divided by commas. RUNS is a JSON list, of one object per run: `script`, `ranks` and `arguments`. Each rank
of a run is a fork of this process. A run begins when the one before has ended. A line "-- ended: [exit codes]" follows the output of each run.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

import ending

sys.path.append(str(Path(__file__).parents[1]))

from ports import held_port  # noqa: E402

LIMIT_S = 120  # of one run


def become_rank(script: str, arguments: list[str], rank: int, ranks: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    signal.alarm(LIMIT_S)
    ending.end(ending.run(script))


def run(script: str, arguments: list[str], ranks: int) -> list[int]:
    """Runs the script on so many ranks. Returns their exit codes; a signal is a negative number."""
    with held_port() as held:
        started = []
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                become_rank(script, arguments, rank, ranks, held.getsockname()[1])
            started.append(pid)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]


if __name__ == "__main__":
    modules, runs = sys.argv[1:]
    for name in modules.split(","):
        importlib.import_module(name)
    sys.stdout.flush()
    for one in json.loads(runs):
        print(f"-- ended: {run(one['script'], one['arguments'], one['ranks'])}", flush=True)
