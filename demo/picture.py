"""The demo's picture: the steps lost at the kill, the cost of each save, and the time until training continued."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from .job import UNREST, Job, Runner

INK, QUIET, GRID = "#1f2430", "#6b7280", "#e6e8ee"
OURS, OURS_LIGHT, THEIRS, PLAIN = "#4338ca", "#a5b4fc", "#ea7317", "#c3c8d4"
KILL = "#d11149"

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}


def title(axes: Axes, text: str, note: str) -> None:
    axes.text(0, 1.13, text, transform=axes.transAxes, fontsize=12, fontweight="bold", va="bottom")
    axes.text(0, 1.04, note, transform=axes.transAxes, fontsize=9.5, color=QUIET, va="bottom")


def losses(axes: Axes, reference: Job, nebula: Job, figures: dict[str, Any]) -> None:
    recovery = figures["nebula"]
    title(axes, "The resumed run is the run", "training loss; each dot lies on the line of a run that was never killed")
    steps = sorted(reference.steps)
    axes.plot(
        steps,
        [Runner.loss(reference.steps[s]) for s in steps],
        color=PLAIN,
        lw=6,
        solid_capstyle="round",
        label="uninterrupted, no saves",
    )
    for attempt, color, label in zip(nebula.attempts, (OURS_LIGHT, OURS), ("until the kill", "resumed"), strict=True):
        done = attempt.of("step")
        axes.plot(
            [e["step"] for e in done],
            [Runner.loss(e) for e in done],
            "o",
            color=color,
            ms=3.4,
            mew=0,
            label=f"Nebula, {label}",
        )
    killed = recovery["killed_at_step"] + 0.5
    axes.axvline(killed, color=KILL, lw=1.5)
    axes.text(
        killed + 1.2,
        0.95,
        f"SIGKILL\nresumed from step {recovery['resumed_from_step']}",
        transform=axes.get_xaxis_transform(),
        color=KILL,
        va="top",
        fontweight="bold",
        linespacing=1.5,
    )
    axes.set_xlabel("step")
    axes.set_xlim(0, steps[-1] + 1)
    axes.legend(loc="upper center", fontsize=9, bbox_to_anchor=(0.34, 1.0))


def blocked(axes: Axes, nebula: Job, torch: Job, figures: dict[str, Any]) -> None:
    ours, theirs = figures["nebula"]["blocked_ms_median"], figures["torch"]["blocked_ms_median"]
    title(axes, "What one save costs", "milliseconds that training stands still: each save, and the median")
    floor, edge = 1.0, 1.7 * max(nebula.blocked_ms + torch.blocked_ms)
    for place, (job, middle, color) in enumerate([(torch, theirs, THEIRS), (nebula, ours, OURS)]):
        axes.barh(place, middle - floor, left=floor, height=0.46, color=color, alpha=0.9)
        count = len(job.blocked_ms)
        spread = [place + 0.36 - 0.72 * (i + 0.5) / count for i in range(count)]
        axes.plot(job.blocked_ms, spread, "o", ms=3.6, color=INK, alpha=0.45, mew=0)
        # If a label does not fit into its bar, it stands beside the bar and beside dots of the same height.
        beside = [middle, *(value for value, y in zip(job.blocked_ms, spread, strict=True) if abs(y - place) < 0.15)]
        inside = math.log(middle / floor) > 0.25 * math.log(edge / floor)
        axes.text(
            floor * 1.12 if inside else max(beside) * 1.2,
            place,
            f"{middle:.0f} ms" if middle >= 10 else f"{middle:.1f} ms",
            color="white" if inside else color,
            va="center",
            fontweight="bold",
            fontsize=12,
        )
    axes.set_xscale("log")
    axes.set_xlim(floor, edge)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks([0, 1], ["torch.save\n+ fsync", "Nebula"], color=INK, fontsize=10.5)
    axes.set_ylim(-0.55, 1.55)
    axes.grid(axis="y", visible=False)


def step_times(axes: Axes, jobs: list[tuple[Job, str, str]], reference: Job, figures: dict[str, Any]) -> None:
    slower = {name: figures[name]["inflation"] for name in ("nebula", "torch")}
    title(
        axes,
        "What a step costs",
        f"milliseconds, with its save; slower than without by {slower['nebula']:.0%} (Nebula), "
        f"{slower['torch']:.0%} (torch.save + fsync)",
    )
    tops: list[float] = []
    for job, color, label in jobs:
        for attempt in job.attempts:
            # In the first step of a process the caches are cold.
            done = attempt.of("step")[1:]
            times = [(e["trained"] + (e["blocked"] or 0)) * 1e3 for e in done]
            tops += times
            axes.plot([e["step"] for e in done], times, color=color, lw=1.5, label=label)
            label = None
    axes.axhline(figures["reference"]["step_ms"], color=QUIET, lw=1, ls=(0, (4, 3)), label="no saves, median")
    axes.set_xlabel("step")
    axes.set_xlim(0, max(reference.steps) + 1)
    axes.set_ylim(0, 1.25 * max(tops))
    axes.legend(loc="upper right", fontsize=9, ncols=3)


def resuming(axes: Axes, figures: dict[str, Any], every: int) -> None:
    title(axes, "From kill to where it was", "seconds: start Python and torch, load, compute the lost steps again")
    step = figures["reference"]["step_ms"] / 1e3
    longest = 0.0
    for place, (name, color) in enumerate([("torch", THEIRS), ("nebula", OURS)]):
        run = figures[name]
        lost = run["steps_lost"] * step
        loading = run["load_ms"] / 1e3
        starting = run["kill_to_training_s"] - loading
        axes.barh(place, starting, height=0.46, color=GRID)
        axes.barh(place, loading, left=starting, height=0.46, color=color, alpha=0.55)
        axes.barh(place, lost, left=starting + loading, height=0.46, color=color)
        total = starting + loading + lost
        longest = max(longest, total)
        steps = "no step" if not run["steps_lost"] else f"{run['steps_lost']} steps"
        axes.text(
            total + 0.015 * longest,
            place,
            f"{steps} lost\nloaded in {run['load_ms']:.0f} ms",
            va="center",
            fontsize=9.5,
        )
    axes.set_xlim(0, longest * 1.42)
    axes.set_yticks([0, 1], ["torch.save\n+ fsync", "Nebula"], color=INK, fontsize=10.5)
    axes.set_ylim(-0.55, 1.55)
    axes.set_xlabel("seconds")
    axes.grid(axis="y", visible=False)


def headline(figures: dict[str, Any]) -> str:
    run = figures["nebula"]
    exact = all(run["equal"].values())
    lost = "nothing lost" if run["steps_lost"] == 0 else f"{run['steps_lost']} steps lost"
    return f"Killed at step {run['killed_at_step']}: {lost}, " + (
        "every loss and weight equal, bit for bit" if exact else "but the resumed run differs"
    )


def draw(path: Path, figures: dict[str, Any], reference: Job, nebula: Job, torch: Job) -> None:
    """Writes the picture as PNG."""
    every = sorted(e["step"] for e in nebula.attempts[0].of("saving"))[0]
    with plt.rc_context(STYLE):
        figure, places = plt.subplots(2, 2, figsize=(13.6, 8.2), width_ratios=[1.5, 1])
        figure.subplots_adjust(left=0.05, right=0.975, top=0.79, bottom=0.075, hspace=0.58, wspace=0.24)
        figure.text(0.05, 0.945, headline(figures), fontsize=18, fontweight="bold")
        size = figures["checkpoint_bytes"]
        note = (
            f"A GPT of {size / 12e6:.1f} M weights on {os.cpu_count()} cores, {size / 1e6:.0f} MB saved every {every} "
        )
        note += f"steps, SIGKILL {figures['kill_delay_s'] * 1e3:.0f} ms after a save began"
        if figures["unrest"] > UNREST:
            note += " (the machine was busy with other work)"
        figure.text(0.05, 0.91, note, fontsize=11, color=QUIET)
        losses(places[0][0], reference, nebula, figures)
        blocked(places[0][1], nebula, torch, figures)
        pairs = [(torch, THEIRS, "torch.save + fsync"), (nebula, OURS, "Nebula")]
        step_times(places[1][0], pairs, reference, figures)
        resuming(places[1][1], figures, every)
        figure.savefig(path, dpi=150)
        plt.close(figure)
