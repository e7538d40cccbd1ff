"""``make bench-peers``: measures all engines side by side, on workloads that matter to users."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from . import environment, loops, peers, report, run, workloads
from .peer import Peer
from .workload import Workload

SAVING = ("two_gib_huge", "two_gib", "small")  # workloads of single saves
WORKLOADS = (*SAVING, "row", "train")
FEW = {
    "two_gib": ["nebula", "nebula_cow", "torch_save", "safetensors_file"]
}  # workloads that only some engines run
COUNT = 9  # versions that a process saves; figures come from those after the third
LOADS = 3  # cold loads of the last version
SECONDS = 20.0  # a slow engine saves no more versions after this time

Result = dict[str, Any]


class Runner:
    """Starts the workers of one peer, in new directories."""

    def __init__(self, name: str, workload: Workload, args: argparse.Namespace) -> None:
        self.name, self.peer, self.workload, self.args = name, peers.load(name), workload, args

    def tasks(self, folder: Path, memory: Path) -> Callable[..., run.Worker]:
        python = self.peer.python or sys.executable

        def start(task: str, *more: str, fresh: bool = False, **variables: str) -> run.Worker:
            arguments = [task, self.name, self.workload.name, str(folder), str(memory), "--scale", str(self.args.scale)]
            variables = {**self.peer.environment(folder, memory, fresh), **self.workload.environment, **variables}
            return run.Worker([*arguments, *more], python, variables, folder / "stderr.txt")

        return start

    def measure(self, what: Callable[[Runner, Path, Path], Result]) -> Result:
        with run.places(self.args.dir) as (folder, memory):
            try:
                return what(self, folder, memory)
            finally:
                for fresh in (False, True):
                    self.peer.clean({**os.environ, **self.peer.environment(folder, memory, fresh)})


def single(runner: Runner, folder: Path, memory: Path) -> Result:
    """Saves versions one by one, and loads the last one as a new machine would, which has only the storage."""
    start = runner.tasks(folder, memory)
    result = run.save(start("save", "--count", str(COUNT), "--seconds", str(SECONDS)), memory)
    tag = f"step{len(result['rounds'])}"
    stored = runner.peer.stored(folder, tag)
    last = ["--tag", tag, "--version", str(result["rounds"][-1]["version"])]
    runner.peer.clean({**os.environ, **runner.peer.environment(folder, memory, False)})
    loads, reads = [], []
    for _ in range(LOADS):
        loads.append(run.load(start("load", *last, "--cold", fresh=True)))
        runner.peer.clean({**os.environ, **runner.peer.environment(folder, memory, True)})
        if stored:
            reads.append(run.read_limits(stored, memory))
    result["loads"], result["reads"] = loads, reads
    result["cold"] = {key: median(load[key] for load in loads) for key in ("load", "touched")}
    result["gate"] = next((load["wrong"] for load in loads if load["wrong"]), None)
    return result


def finished(worker: run.Worker, at: str) -> Result:
    try:
        said = worker.wait_for(at)
        worker.go_on()
    finally:
        worker.end()
    return said


def in_a_row(runner: Runner, folder: Path, memory: Path) -> Result:
    start = runner.tasks(folder, memory)
    result = finished(start("in-a-row"), "saved")
    loaded = finished(start("load-row", fresh=True, BENCH_TAKEN=json.dumps(result["taken"])), "loaded")
    return {**result, **loaded, "gate": loaded["wrong"]}


def train(runner: Runner, folder: Path, memory: Path) -> Result:
    start = runner.tasks(folder, memory)
    result = finished(start("train"), "saved")
    return {**result, "gate": finished(start("load-trained", fresh=True), "loaded")["wrong"]}


def beside_a_write(workload: Workload, args: argparse.Namespace) -> dict[str, float]:
    """Returns the seconds that training loses if a process only writes the bytes of a save: no engine can avoid this part."""

    def trained(runner: Runner, folder: Path, memory: Path) -> Result:
        return finished(runner.tasks(folder, memory)("train"), "saved")

    found = Runner("bare_write", workload, args).measure(trained)
    return {"write": found["lost"], "write_error": found["error"]}


def asked_for(workload: Workload, args: argparse.Namespace) -> list[str]:
    return [name for name in FEW.get(workload.name, peers.others()) if name in args.peers]


def everybody(
    what: Callable[..., Result], workload: Workload, title: str, args: argparse.Namespace, names: list[str]
) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for name in names:
        begun = time.monotonic()
        python = peers.load(name).python
        try:
            if python and not Path(python).exists():
                raise RuntimeError(f"it is not installed: scripts/peers.sh makes {Path(python).parents[1]}")
            found[name] = Runner(name, workload, args).measure(what)
        except (RuntimeError, OSError) as error:
            found[name] = {"failed": str(error)}
        note = found[name].get("failed") or found[name]["gate"] or "gate passed"
        print(f"{title:<34} {peers.load(name).title:<28} {time.monotonic() - begun:5.1f} s  {note}", file=sys.stderr)
    return found


def measure_limits(workload: Workload, args: argparse.Namespace) -> dict[str, float]:
    limits = run.limits(workload, args.dir)
    if workload.name == "small":
        with run.places(args.dir) as (folder, _):
            command = [
                "torch-in-memory",
                "torch_save",
                workload.name,
                str(folder),
                str(folder),
                "--scale",
                str(args.scale),
            ]
            limits["torch_memory"] = finished(run.Worker(command, sys.executable, {}, folder / "stderr.txt"), "saved")[
                "seconds"
            ]
    return limits


def beside_limits(workload: Workload, args: argparse.Namespace) -> Result:
    """Measures Nebula, and the machine before and after it, because the disk may be half as fast a minute later; then all others."""
    names = asked_for(workload, args)
    before = measure_limits(workload, args)
    results = everybody(single, workload, workload.title, args, names[:1])
    after = measure_limits(workload, args)
    limits = {key: (before[key] + after[key]) / 2 for key in before}
    reads = [read for result in results.values() for read in result.get("reads", [])]
    if reads:  # measured on the files of the versions: a disk is not equally fast everywhere
        limits |= {key: median(read[key] for read in reads) for key in reads[0]}
    return {"limits": limits, "results": results | everybody(single, workload, workload.title, args, names[1:])}


def gate(result: Result) -> str:
    return "passed" if result["gate"] is None else f"**failed**: {result['gate']}"


def durable(peer: type[Peer], result: Result, size: int) -> str:
    """Returns "yes" if a version was on the disk when its peer reported it as done, by the peer's source and the kernel's page counts."""
    left = result["rounds"][-1]["unsynced"]
    if not peer.durable:
        return "no"
    # Logs and similar small files are not part of a version.
    return "yes" if left is None or left < max(size // 100, 1 << 20) else f"**no**: {left >> 20} MiB were not synced"


def rows(results: dict[str, Result], columns: list[str], cells: Callable[[type[Peer], Result], list[str]]) -> list[str]:
    lines = ["| " + " | ".join(["", *columns, "gate"]) + " |", "|---|" + "---:|" * len(columns) + "---|"]
    for name, result in results.items():
        peer = peers.load(name)
        if "failed" in result:
            lines.append(f"| {peer.title} | did not run: {result['failed']} |" + " |" * len(columns))
        else:
            lines.append("| " + " | ".join([peer.title, *cells(peer, result), gate(result)]) + " |")
    return [*lines, ""]


def steady(result: Result, key: str) -> float:
    return report.steady(result["rounds"], key)


def single_table(workload: Workload, limits: dict[str, float], results: dict[str, Result]) -> list[str]:
    def cells(peer: type[Peer], result: Result) -> list[str]:
        blocked, until, cpu, slower = (steady(result, key) for key in ("blocked", "durable", "cpu", "change_slower"))
        return [
            report.first_saves([result["rounds"]]),
            f"**{report.seconds(blocked)}**",
            f"{blocked / limits['copy']:.3f}",
            report.seconds(max(0.0, slower)),
            report.seconds(steady(result, "durable_changed")),
            report.seconds(until),
            durable(peer, result, workload.bytes),
            f"{limits['write'] / until:.2f}",
            f"{cpu:.2f} s",
            f"{result['memory'] / 2**20:.0f} MiB",
            report.seconds(result["cold"]["touched"]),
            f"{limits['read'] / result['cold']['touched']:.2f}",
        ]

    columns = ["blocked, first saves", "blocked, steady", "/ copy", "change slower by", "synced after that"]
    columns += ["synced after", "durable by itself", "of write limit", "CPU", "memory", "load, cold", "of read limit"]
    head = [
        f"### {workload.title} ({workload.bytes / 2**20:.0f} MiB)",
        "",
        f"The machine: streaming copy {report.seconds(limits['copy'])}, O_DIRECT write + fsync "
        f"{report.seconds(limits['write'])}, read {report.seconds(limits['read'])}, read into new memory {report.seconds(limits['read_new'])}.",
        "",
    ]
    return head + rows(results, columns, cells)


def row_table(workload: Workload, results: dict[str, Result]) -> list[str]:
    def cells(peer: type[Peer], result: Result) -> list[str]:
        blocked = sorted(result["blocked"])
        return [
            report.seconds(median(blocked)),
            f"**{report.seconds(blocked[-1])}**",
            report.seconds(result["lasted"]),
            str(loops.IN_A_ROW - len(result["taken"])),
            f"{result['right']} of {loops.IN_A_ROW}",
            report.seconds(result["until_durable"]),
            "yes" if peer.durable else "no",
        ]

    columns = ["blocked, median", "blocked, longest (= p99)", "all ten begun within", "skipped", "persisted and right"]
    columns += ["all done after", "durable by itself"]
    title = f"### Ten saves in a row ({workload.bytes / 1e6:.0f} MB every {loops.PERIOD} s)"
    return [title, "", *rows(results, columns, cells)]


def with_error(value: float, error: float) -> str:
    return f"{1e3 * value:.1f} ± {1e3 * error:.1f} ms"


def train_table(limits: dict[str, float], results: dict[str, Result]) -> list[str]:
    def cells(peer: type[Peer], result: Result) -> list[str]:
        return [
            f"{result['bytes'] / 1e6:.0f} MB",
            report.seconds(result["step"]),
            report.seconds(median(result["blocked"])),
            f"**{with_error(result['lost'], result['error'])}**",
            str(result["slowed"]),
            f"{result['lost'] / (loops.EVERY * result['step']):.1%}",
            f"{result['took']} of {result['saves']}",
            "yes" if peer.durable else "no",
        ]

    columns = ["state", "step without saves", "call to save", "time lost per save", "in how many steps", "ten steps slower by"]
    columns += ["saved", "durable by itself"]
    alone = with_error(limits["write"], limits["write_error"])
    machine = f"The machine: training loses {alone} where as many bytes are written with O_DIRECT, synced, and no more."
    return [f"### A training loop, saved every {loops.EVERY} steps", "", machine, "", *rows(results, columns, cells)]


def compared(title: str, target: str, value: float, good: bool, unit: str = "") -> str:
    return f"| {title} | {target} | {value:.3g}{unit} | {'yes' if good else '**no**'} |"


def at_most(title: str, value: float, limit: float, unit: str = "") -> str:
    return compared(title, f"≤ {limit:g}{unit}", value, value <= limit, unit)


def at_least(title: str, value: float, limit: float) -> str:
    return compared(title, f"≥ {limit:g}", value, value >= limit)


def overwritten(result: Result, limits: dict[str, float]) -> float:
    """Returns (save + change of all tensors right after it) / (streaming copy + the same change without a save)."""
    return (steady(result, "blocked") + steady(result, "change")) / (limits["copy"] + steady(result, "quiet_change"))


def large_targets(workload: Workload, limits: dict[str, float], results: dict[str, Result]) -> list[str]:
    ours, torchs, safe = (results[name] for name in ("nebula", "torch_save", "safetensors_file"))
    blocked, cold, gib = steady(ours, "blocked"), ours["cold"]["touched"], workload.bytes / 2**30
    where = "2 GiB, huge pages: "
    return [
        at_most(where + "blocked, of a streaming copy", 100 * blocked / limits["copy"], 1, " %"),
        at_most(where + "blocked, of torch.save + fsync", 100 * blocked / steady(torchs, "blocked"), 0.1, " %"),
        at_most(
            where + "save, then overwrite all at once / streaming copy, then overwrite", overwritten(ours, limits), 1.15
        ),
        at_least(where + "durable throughput / O_DIRECT write + fsync", limits["write"] / steady(ours, "durable"), 0.9),
        # Nebula's load() has read and verified every byte when it returns. Other engines read at the first access, so the comparison with
        # them includes that access for both.
        at_least(where + "verified cold load / fastest read", limits["read"] / ours["cold"]["load"], 0.9),
        at_least(where + "the same / fastest read into new memory, which a load needs", limits["read_new"] / ours["cold"]["load"], 0.9),
        at_least(where + "cold load of torch.load / of Nebula", torchs["cold"]["touched"] / cold, 1),
        at_least(where + "cold load of safetensors / of Nebula", safe["cold"]["touched"] / cold, 1),
        at_most(
            where + "CPU per GiB until durable (limit: copy + checksums + 0.1 s)",
            round(steady(ours, "cpu") / gib, 3),
            round((limits["copy_cpu"] + limits["sum_cpu"]) / gib + 0.1, 3),
            " s",
        ),
    ]


def page_targets(workload: Workload, limits: dict[str, float], results: dict[str, Result]) -> list[str]:
    where = "2 GiB, pages of 4 KiB: "
    percent = 100 * steady(results["nebula_cow"], "blocked") / limits["copy"]
    return [
        at_most(where + "blocked with NEBULA_CAPTURE=cow, of a streaming copy", percent, 60, " %"),
        at_most(
            where + "save, then overwrite all at once / streaming copy, then overwrite",
            overwritten(results["nebula"], limits),
            1.15,
        ),
    ]


def small_targets(workload: Workload, limits: dict[str, float], results: dict[str, Result]) -> list[str]:
    blocked, where = steady(results["nebula"], "blocked"), f"{len(workload.sizes)} small tensors: "
    return [
        at_most(where + "blocked per tensor", 1e6 * blocked / len(workload.sizes), 3, " µs"),
        at_least(where + "torch.save into memory (BytesIO) / blocked", limits["torch_memory"] / blocked, 10),
    ]


def row_targets(workload: Workload, limits: dict[str, float], results: dict[str, Result]) -> list[str]:
    ours, where = results["nebula"], f"{workload.bytes / 1e6:.0f} MB, huge pages, ten times every {loops.PERIOD} s: "
    return [
        at_most(where + "longest time blocked (= p99)", 1e3 * max(ours["blocked"]), 10, " ms"),
        at_least(where + "not skipped, persisted, and right", ours["right"], loops.IN_A_ROW),
    ]


def lost(result: Result) -> float:
    """Returns the seconds that training lost per save, at least 1 ms: the measurement cannot resolve less."""
    return max(result["lost"], 1e-3)


def by_copies(result: Result) -> float:
    return lost(result) / result["copying_cpu"]


def train_targets(workload: Workload, limits: dict[str, float], results: dict[str, Result]) -> list[str]:
    ours, where = results["nebula"], f"training loop, saved every {loops.EVERY} steps: "
    passed = [result for name, result in results.items() if name in peers.others()[1:] and result.get("gate", "") is None]
    others = [lost(result) for result in passed if result["took"] == result["saves"]]
    lines = [at_most(where + "time lost / CPU time of the copies", by_copies(ours), 1.1)]
    beyond = (lost(ours) - limits["write"]) / ours["copying_cpu"]
    lines.append(at_most(where + "the same beyond what a bare write takes from the training", beyond, 1.1))
    if "nebula_interval" in results:
        in_memory = by_copies(results["nebula_interval"])
        lines.append(at_most(where + "the same while versions stay in memory (the default: one is persisted every 100 s)", in_memory, 1.1))
    if others:
        lines.append(
            at_least(
                where + "time lost by the best other that passes the gate and skips nothing / by Nebula",
                min(others) / lost(ours),
                5,
            )
        )
    return lines


TARGETS = {
    "two_gib_huge": large_targets,
    "two_gib": page_targets,
    "small": small_targets,
    "row": row_targets,
    "train": train_targets,
}


def targets(found: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Returns a table with a line for each target: its name, the limit, the measured value, and whether it is reached."""
    lines = ["### Targets", "", "| | target | measured | reached |", "|---|---:|---:|---|"]
    for name, entry in found.items():
        try:
            lines += TARGETS[name](workload_of(name, args), entry.get("limits", {}), entry["results"])
        except KeyError as missing:  # the run left a competitor out, or it failed
            lines.append(f"| {workload_of(name, args).title} | | not measured: no figures of {missing} | **no** |")
    return [*lines, ""]


def workload_of(name: str, args: argparse.Namespace) -> Workload:
    if name == "train":  # the loop has its own model, in pages of the default size
        return replace(workloads.load("row"), title="training loop", huge=None, variables=loops.ALLOCATOR)
    return workloads.load(name).scaled(args.scale)


def versions(found: dict[str, Any]) -> list[str]:
    lines = ["### Versions", "", "| | |", "|---|---|"]
    seen: dict[str, str] = {}
    for entry in found.values():
        for name, result in entry["results"].items():
            if said := result.get("versions"):
                seen[peers.load(name).title] = ", ".join(f"{key} {value}" for key, value in said.items())
    return [*lines, *[f"| {title} | {text} |" for title, text in seen.items()], ""]


def tables(found: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Returns a table for each workload, and the description of the machine."""
    lines: list[str] = []
    for name, entry in found.items():
        workload = workload_of(name, args)
        if name in SAVING:
            lines += single_table(workload, entry["limits"], entry["results"])
        elif name == "row":
            lines += row_table(workload, entry["results"])
        else:
            lines += train_table(entry["limits"], entry["results"])
        lines += [f"Measured at commit {entry['commit']} on {entry['processor']}.", ""]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="sizes times this; the documentation is left alone")
    parser.add_argument("--peers", nargs="+", choices=peers.names(), default=peers.names())
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--dir", type=Path, default=Path("out"), help="a directory of the file system to measure")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    where = environment.describe(args.dir)
    measured: dict[str, Any] = {}
    for name in args.only:
        workload = workload_of(name, args)
        entry: dict[str, Any] = {key: where[key] for key in ("commit", "processor")}
        if name in SAVING:
            entry |= beside_limits(workload, args)
        elif name == "row":
            entry["results"] = everybody(in_a_row, workload, "ten in a row", args, asked_for(workload, args))
        else:
            names = [name for name in [*peers.others(), "nebula_interval"] if name in args.peers]
            entry["limits"] = beside_a_write(workload, args)
            entry["results"] = everybody(train, workload, "training loop", args, names)
        measured[name] = entry
    full = args.scale == 1 and args.peers == peers.names()
    path = Path("bench/results") / ("peers.json" if full else "peers-partial.json")
    path.parent.mkdir(exist_ok=True)
    found = measured
    if full and path.exists():  # workloads that this run did not measure keep their figures
        known = {**json.loads(path.read_text())["workloads"], **measured}
        found = {name: known[name] for name in WORKLOADS if name in known}
    path.write_text(json.dumps({"environment": where, "workloads": found}, indent=1) + "\n")
    lines = targets(found, args) + tables(found, args) + versions(found) + report.environment(where)
    if full:
        report.publish("peers", "make bench-peers", "Against every other engine that runs on CPUs", lines)
    print("\n".join(lines))
    ours = [entry["results"]["nebula"] for entry in measured.values() if "nebula" in entry["results"]]
    return 1 if any("failed" in result or result["gate"] for result in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
