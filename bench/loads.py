"""``make bench-loads``: loads from memory, page cache and disk, into new or existing tensors, and training that goes on after SIGKILL.

Nebula's memory tier is gone for the loads from page cache and disk. The tables of bench/results/loads.md are replaced.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from . import environment, peers, report, run, workloads
from .resuming import WIDTH

LOADERS = ["nebula", "nebula_lazy", "safetensors_file", "torch_save", "torch_save_mmap"]
RESUMERS = {
    "nebula": "Nebula",
    "dcp": "DCP async_save (thread)",
    "torch_save": "torch.save + fsync, torch.load",
    "torch_save_mmap": "torch.save + fsync, torch.load(mmap=True)",
}
LAYERS, QUICK_LAYERS = 22, 4  # 22 * 2048 * 2048 * 4 bytes * (weights + two moments of Adam) = 1,056 MiB
SAVES = 3  # before the kill
LATER_S = 1.0  # from the last of these saves to the kill
BOUND_S, BOUND_S_PER_GIB = 0.05, 0.025
Found = dict[str, Any]


def load_once(name: str, workload: Any, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One version saved by one process, and loaded by others: seconds until all tensors are there, and until every byte was touched.

    Keys that end with "_into": the tensors existed, and have the values at the end.
    """
    peer = peers.load(name)
    with run.places(args.dir) as (folder, memory):

        def start(task: str, fresh: bool, *more: str) -> run.Worker:
            flags = ["--quick"] if args.quick else []
            variables = {**peer.environment(folder, memory, fresh), **workload.environment}
            arguments = [task, name, workload.name, str(folder), str(memory), *flags, *more]
            return run.Worker(arguments, sys.executable, variables, folder / "stderr.txt")

        def clean(fresh: bool) -> None:
            peer.clean({**os.environ, **peer.environment(folder, memory, fresh)})

        found = {}
        try:
            rounds = run.save(start("save", False, "--count", "2"), memory)["rounds"]
            last = ["--tag", "step2", "--version", str(rounds[-1]["version"])]
            places = {"memory": [], "cached": ["--cached"], "cold": ["--cold"]}
            ways = {"": [], "_into": ["--into"]}
            for (where, flags), (way, more) in itertools.product(places.items(), ways.items()):
                found[where + way] = result = run.load(start("load", where != "memory", *last, *flags, *more))
                if where != "memory" or way:  # memory has the version for both ways
                    clean(where != "memory")
                if result["wrong"]:
                    raise RuntimeError(result["wrong"])
        finally:
            clean(False)
            clean(True)
    return found


class Life:
    """One process of the training job, and the lines that it says."""

    def __init__(self, name: str, folder: Path, memory: Path, layers: int) -> None:
        self.log = folder / "stderr.txt"
        variables = peers.load("nebula").environment(folder, memory, fresh=False)
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.resuming", name, str(folder), str(layers)],
            stdout=subprocess.PIPE,
            stderr=open(self.log, "a"),  # noqa: SIM115 - the process owns it
            env={**os.environ, "OMP_WAIT_POLICY": "passive", **variables},
        )
        self.saved: dict[int, list[float]] = {}

    def wait_for(self, at: str) -> Found:
        """The next line of that kind; what the lines before it say of saves is kept."""
        for line in self.process.stdout:
            said = json.loads(line)
            if said["at"] == "saved":
                self.saved[said["step"]] = said["digest"]
            if said["at"] == at:
                return said
        raise RuntimeError(f"it ended: {(self.log.read_text().splitlines() or ['no reason given'])[-1]}")

    def kill(self) -> tuple[float, float]:
        """When it was killed, and when it was gone."""
        killed = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        gone = time.monotonic()
        for line in self.process.stdout:  # what it said before
            said = json.loads(line)
            if said["at"] == "saved":
                self.saved[said["step"]] = said["digest"]
        self.process.stdout.close()
        return killed, gone


def resume_once(name: str, layers: int, root: Path) -> Found:
    """One job that is killed and goes on: seconds of each part of that."""
    with run.places(root) as (folder, memory):
        lives: list[Life] = []
        try:
            lives.append(Life(name, folder, memory, layers))
            for _ in range(SAVES):
                lives[0].wait_for("saved")
            time.sleep(LATER_S)
            killed, gone = lives[0].kill()
            lives.append(Life(name, folder, memory, layers))
            said = lives[1].wait_for("loaded")
            if said["digest"] != lives[0].saved.get(said["step"]):
                raise RuntimeError(f"step {said['step']} does not have the values that were saved")
            first, *later = lives[1].wait_for("trained")["taken"]
            return {
                "gone": gone - killed,
                "loaded": said["loaded"] - said["ready"],
                "until_step": lives[1].begun - killed + said["loaded"] - said["ready"],
                "step_longer": first - median(later),
            }
        finally:
            for life in lives:
                if life.process.poll() is None:
                    life.kill()
            peers.load("nebula").clean({**os.environ, **peers.load("nebula").environment(folder, memory, fresh=False)})


def in_rounds(names: list[str], rounds: int, title: str, measure: Any) -> dict[str, list[Any]]:
    """Everybody in turn, so that a slow minute of the machine meets all alike."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names[:: -1 if index % 2 else 1]:
            begun = time.monotonic()
            try:
                found[name].append(measure(name))
            except (RuntimeError, OSError) as error:
                found[name].append({"failed": str(error)})
            note = found[name][-1].get("failed", "")
            print(
                f"round {index + 1}/{rounds}, {title}: {name}, {time.monotonic() - begun:.1f} s {note}",
                file=sys.stderr,
                flush=True,
            )
    return found


def rows(columns: list[str], found: dict[str, list[Any]], titles: dict[str, str], cells: Any) -> list[str]:
    lines = ["| " + " | ".join(["", *columns]) + " |", "|---|" + "---:|" * len(columns)]
    for name, entries in found.items():
        failed = [entry["failed"] for entry in entries if "failed" in entry]
        values = [f"did not run: {failed[0]}", *[""] * (len(columns) - 1)] if failed else cells(entries)
        lines.append("| " + " | ".join([titles[name], *values]) + " |")
    return [*lines, ""]


def middle(entries: list[Any], *keys: str) -> float:
    values = entries
    for key in keys:
        values = [value[key] for value in values]
    return median(values)


def load_table(workload: Any, found: dict[str, list[Any]]) -> list[str]:
    def cells(entries: list[Any]) -> list[str]:
        return [
            report.seconds(middle(entries, where, key))
            for where in ("memory", "cached", "cold")
            for key in ("load", "touched")
        ]

    columns = [
        where + more
        for where in ("memory, or page cache", "page cache", "disk")
        for more in ("", ", every byte touched")
    ]
    titles = {name: peers.load(name).title for name in found}
    return [f"### Loads of {workload.title} ({workload.bytes >> 20} MiB)", "", *rows(columns, found, titles, cells)]


def into_table(workload: Any, found: dict[str, list[Any]]) -> list[str]:
    def cells(entries: list[Any]) -> list[str]:
        return [report.seconds(middle(entries, f"{where}_into", "load")) for where in ("memory", "cached", "cold")]

    titles = {name: peers.load(name).title for name in found}
    columns = ["memory, or page cache", "page cache", "disk"]
    return [
        f"### Loads into tensors that exist, {workload.title} ({workload.bytes >> 20} MiB)",
        "",
        *rows(columns, found, titles, cells),
    ]


def resume_table(size: int, found: dict[str, list[Any]]) -> list[str]:
    bound = BOUND_S + BOUND_S_PER_GIB * size / 2**30

    def cells(entries: list[Any]) -> list[str]:
        total = middle(entries, "until_step")
        keys = ("gone", "loaded", "until_step", "step_longer")
        return [
            *[report.seconds(max(0.0, middle(entries, key))) for key in keys],
            "yes" if total <= bound else "**no**",
        ]

    columns = ["the killed process is gone after", "model and optimizer loaded in", "**SIGKILL to the first step**"]
    columns += ["the first step longer than the next by", f"target: ≤ {report.seconds(bound)}"]
    return [
        f"### From SIGKILL to the first training step ({size >> 20} MiB)",
        "",
        *rows(columns, found, RESUMERS, cells),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.loads", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, less data; the documentation is left alone")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--dir", type=Path, default=Path("out"), help="a directory of the file system to measure")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.quick else 3)
    args.dir.mkdir(parents=True, exist_ok=True)
    where = environment.describe(args.dir)
    measured = [workloads.load(name).quick() if args.quick else workloads.load(name) for name in workloads.BASIC]
    layers = QUICK_LAYERS if args.quick else LAYERS
    loads = {
        workload.name: in_rounds(LOADERS, rounds, workload.title, lambda name, of=workload: load_once(name, of, args))
        for workload in measured
    }
    resumes = in_rounds(list(RESUMERS), rounds, "resumes", lambda name: resume_once(name, layers, args.dir))
    where["load when it ended"] = f"{os.getloadavg()[0]:.1f}"
    lines = [
        *itertools.chain.from_iterable(
            [*load_table(of, loads[of.name]), *into_table(of, loads[of.name])] for of in measured
        ),
        *resume_table(layers * WIDTH * WIDTH * 4 * 3, resumes),
        *report.environment(where),
    ]
    if not args.quick:
        found = {"environment": where, "loads": loads, "resumes": resumes}
        Path("bench/results/loads.json").write_text(json.dumps(found, indent=1) + "\n")
        report.publish("loads", "make bench-loads", "Loads, and from SIGKILL to the next training step", lines)
    print("\n".join(lines))
    own = itertools.chain(resumes["nebula"], *(of["nebula"] for of in loads.values()))
    return 1 if any("failed" in entry for entry in own) else 0


if __name__ == "__main__":
    sys.exit(main())
