"""Turns rounds into figures: medians, ratios to the machine's limits, tables in Markdown."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from . import peers
from .workload import Workload

WARMING = 3  # the first saves of a process, in which engines still allocate the memory that they keep


def steady(rounds: list[dict[str, Any]], key: str) -> float:
    """Returns the median of value ``key`` over the saves of one process, without the first WARMING ones."""
    return median(entry[key] for entry in rounds[WARMING:] if key in entry)


def first_saves(rounds: list[list[dict[str, Any]]]) -> str:
    """How long each of the first saves of a process blocks: the median over processes."""
    return " / ".join(seconds(median(entries[i]["blocked"] for entries in rounds)) for i in range(WARMING))


def figures(rounds: list[dict[str, Any]], bounds: list[dict[str, float]], size: int) -> dict[str, Any]:
    """Returns the medians over the rounds of one competitor. A ratio is computed within each round, before the median."""
    failed = [r["failed"] for r in rounds if "failed" in r]
    if failed:
        return {"failed": failed[0]}

    def middle(key: str) -> list[float]:
        return [steady(r["rounds"], key) for r in rounds]

    def ratio(values: list[float], limit: str) -> float:
        return median(value / bound[limit] for value, bound in zip(values, bounds, strict=True))

    blocked, durable, cold = middle("blocked"), middle("durable"), [r["cold"]["load"] for r in rounds]
    gates = [r["gate"] for r in rounds if r["gate"]]
    return {
        "blocked_first": first_saves([r["rounds"] for r in rounds]),
        "blocked_s": median(blocked),
        "blocked_to_copy": ratio(blocked, "copy"),
        "change_slower_s": median(middle("change_slower")),
        "durable_s": median(durable),
        "write_to_durable": 1 / ratio(durable, "write"),
        "cpu_s": median(middle("cpu")),
        "idle_cpu": median(r["idle_cpu"] for r in rounds),
        "memory_bytes": max(r["memory"] for r in rounds),
        "memory_images": max(r["memory"] for r in rounds) / size,
        "warm_s": median(r["warm"]["load"] for r in rounds),
        "warm_touched_s": median(r["warm"]["touched"] for r in rounds),
        "cold_s": median(cold),
        "cold_touched_s": median(r["cold"]["touched"] for r in rounds),
        "read_to_cold": 1 / ratio(cold, "read"),
        "gate": gates[0] if gates else "passed",
    }


def seconds(value: float) -> str:
    return (
        f"{value * 1e3:.1f} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms" if value < 0.9995 else f"{value:.2f} s"
    )


def table(workload: Workload, limits: dict[str, float], results: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the table of one workload, with a row for each competitor."""
    gib = workload.bytes / 2**30
    lines = [
        f"### {workload.title} ({workload.bytes / 2**20:.0f} MiB)",
        "",
        f"The machine: streaming copy {seconds(limits['copy'])}, O_DIRECT write + fsync {seconds(limits['write'])} "
        f"({gib / limits['write']:.2f} GiB/s), read {seconds(limits['read'])} ({gib / limits['read']:.2f} GiB/s).",
        "",
        "| | blocked, first saves | blocked, steady | / copy | writes after it slower by | durable after | of write limit "
        "| CPU | memory | load, warm | load, cold | + every byte touched | of read limit | verified | gate |",
        "|---|" + "---:|" * 12 + "---|---|",
    ]
    for name, f in results.items():
        peer = peers.load(name)
        if "failed" in f:
            lines.append(f"| {peer.title} | did not run: {f['failed']} |" + " |" * 13)
            continue
        cells = [
            peer.title,
            f["blocked_first"],
            f"**{seconds(f['blocked_s'])}**",
            f"{f['blocked_to_copy']:.2f}",
            seconds(max(0.0, f["change_slower_s"])),
            seconds(f["durable_s"]),
            f"{f['write_to_durable']:.2f}",
            f"{f['cpu_s']:.2f} s",
            f"{f['memory_bytes'] / 2**20:.0f} MiB",
            seconds(f["warm_s"]),
            seconds(f["cold_s"]),
            seconds(f["cold_touched_s"]),
            f"{f['read_to_cold']:.2f}",
            "yes" if peer.verified else "no",
            f["gate"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def targets(results: dict[str, dict[str, Any]], retained: int, workload: Workload) -> list[str]:
    """Returns Nebula's targets for large tensors, with the measured values."""
    ours, theirs = results.get("nebula", {"failed": ""}), results.get("torch_save", {"failed": ""})
    if "failed" in ours or "failed" in theirs:
        return []
    gib = workload.bytes / 2**30
    beyond = ours["memory_bytes"] / 2**20 - retained * workload.bytes / 2**20
    rows = [
        ("steady blocked time / streaming copy", "≤ 1.25", ours["blocked_to_copy"], ours["blocked_to_copy"] <= 1.25),
        ("durable throughput / O_DIRECT write", "≥ 0.85", ours["write_to_durable"], ours["write_to_durable"] >= 0.85),
        ("durable throughput / torch.save + fsync", "≥ 1.5", theirs["durable_s"] / ours["durable_s"], None),
        ("verified cold load / fastest read", "≥ 0.8", ours["read_to_cold"], ours["read_to_cold"] >= 0.8),
        ("cold load of torch.load / of Nebula", "≥ 1", theirs["cold_s"] / ours["cold_s"], None),
        ("load from memory, ms/GiB", "≤ 25", ours["warm_s"] * 1e3 / gib, ours["warm_s"] * 1e3 / gib <= 25),
        (f"memory beyond {retained} images, MiB", "≤ 64", beyond, beyond <= 64),
        ("CPU of an idle agent, of one core", "0", ours["idle_cpu"], ours["idle_cpu"] <= 0.005),
    ]
    lines = [f"### Targets ({workload.title})", "", "| | target | measured | reached |", "|---|---|---:|---|"]
    for title, target, value, reached in rows:
        if reached is None:
            reached = value >= float(target.removeprefix("≥ "))
        lines.append(f"| {title} | {target} | {value:.2f} | {'yes' if reached else '**no**'} |")
    return [*lines, ""]


def environment(block: dict[str, str]) -> list[str]:
    return ["### Where", "", "| | |", "|---|---|", *[f"| {key} | {value} |" for key, value in block.items()], ""]


def publish(name: str, command: str, title: str, lines: list[str]) -> Path:
    """Replaces the page of a benchmark's tables: bench/results/<name>.md."""
    page = Path(__file__).parent / "results" / f"{name}.md"
    head = [f"# {title}", f"`{command}` makes this page. [README.md](../README.md) says how it measures.", ""]
    page.write_text("\n".join([*head, *lines]).rstrip() + "\n")
    return page
