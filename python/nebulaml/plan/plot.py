"""Draws a plan: memory per GPU by stage, and the share of the time that is lost, by interval."""

from __future__ import annotations

from typing import Any

from ..errors import NebulaConfigError, NebulaStorageError, NebulaUnavailable
from . import interval
from .planning import Plan
from .show import seconds_text

__all__ = ["draw"]

GIB = 1 << 30
POINTS = 200
COLOURS = ("#888888", "#d08a2e", "#3b6ea5")


def draw(plan: Plan, file: str) -> None:
    """Writes the picture. The ending of the file name gives the format, for example .png, .svg or .pdf."""
    try:
        import matplotlib
    except ImportError as failure:
        raise NebulaUnavailable(f"--plot needs matplotlib ({failure}): install it, or leave --plot out") from failure
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _memory(left, plan)
    _progress(right, plan)
    try:
        figure.savefig(file, dpi=120)
    except ValueError as failure:
        raise NebulaConfigError(f"--plot {file}: {failure}") from failure
    except OSError as failure:
        raise NebulaStorageError(f"{file} cannot be written: {failure.strerror or failure}") from failure
    finally:
        pyplot.close(figure)


def _memory(axes: Any, plan: Plan) -> None:
    """Draws memory per GPU. A bar that is far higher than a GPU's memory is cut, and its height is written on it."""
    stages = [str(one.stage) for one in plan.stages]
    states = [one.need / GIB for one in plan.stages]
    activations = plan.job.activations.value / GIB
    top = 2.2 * max(plan.job.gpu_memory.value / GIB, min(states) + activations)
    axes.bar(stages, states, label="model and optimizer states", color="#3b6ea5")
    axes.bar(stages, [activations] * len(stages), bottom=states, label="activations", color="#b9cde0")
    axes.axhline(plan.job.gpu_memory.value / GIB, color="#b23b3b", linestyle="--", label="memory of a GPU")
    for at, one in enumerate(states):
        axes.text(at, min(one + activations, top * 0.94), f"{one + activations:,.0f}", ha="center", va="bottom")
    axes.set_ylim(0, top)
    axes.set_xlabel("ZeRO stage")
    axes.set_ylabel("GiB per GPU")
    axes.set_title("Memory per GPU")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=3, fontsize="small", frameon=False)


def _progress(axes: Any, plan: Plan) -> None:
    """Draws the lost share of the time over the seconds of training between saves, around the best intervals of all ways."""
    best = [one.memory_interval_s or one.storage_interval_s for one in plan.ways]
    low, high = min(best) / 10, max(best) * 10
    points = [low * (high / low) ** (i / POINTS) for i in range(POINTS + 1)]
    for way, at, colour in zip(plan.ways, best, COLOURS, strict=False):
        costs = way.costs
        if way.memory_interval_s is None:
            lost = [1 - interval.one_tier(one, costs.blocked_s, 0.0, costs.resume_storage_s, costs.mtbf_s) for one in points]
        else:
            lost = [1 - interval.goodput(costs, one, max(one, way.storage_interval_s)) for one in points]
        axes.plot(points, lost, color=colour, label=f"{way.name}: {1 - way.goodput:.2%} at {seconds_text(at)}")
        axes.plot([at], [1 - way.goodput], "o", color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3%}".rstrip("0%").rstrip(".") + " %")
    axes.set_xlabel("seconds of training between saves")
    axes.set_ylabel("share of the time that is lost")
    axes.set_title(f"A failure every {seconds_text(plan.job.mtbf_s.value)}")
    axes.legend()
