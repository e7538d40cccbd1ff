"""Prints a plan as tables of text."""

from __future__ import annotations

import math

from . import memory
from .planning import COPIES, Plan, Short

__all__ = ["bytes_text", "seconds_text", "short_text", "text"]

DOUBTED = 1e12  # bytes/s that a storage of a whole cluster seldom takes


def bytes_text(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1023.95 or unit == "PiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def seconds_text(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    for limit, unit, name, digits in ((1, 1e-3, "ms", 1), (10, 1, "s", 1), (120, 1, "s", 0), (7200, 60, "min", 0), (172800, 3600, "h", 1)):
        if value < limit:
            return f"{value / unit:.{digits}f} {name}"
    return f"{value / 86400:.1f} days"


def _count(value: float) -> str:
    for limit, unit, name in ((1e3, 1, ""), (1e6, 1e3, "K"), (1e9, 1e6, "M"), (1e12, 1e9, "B")):
        if value < limit:
            return f"{value / unit:.4g}{name}"
    return f"{value / 1e12:.4g}T"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _memory(plan: Plan) -> list[str]:
    job = plan.job
    rows = [["ZeRO stage", "guide", "DeepSpeed", "autotuner", "with activations", ""]]
    for one in plan.stages:
        chosen = one.stage == plan.stage.stage and plan.stage.offload == "none"
        rows.append(
            [
                str(one.stage),
                bytes_text(one.guide),
                bytes_text(one.estimator) if one.estimator is not None else "-",
                bytes_text(one.autotuner),
                bytes_text(one.need + job.activations.value),
                ("fits" if one.fits else "too much") + ("  <- use this" if chosen and not plan.short else ""),
            ]
        )
    if plan.stage.offload != "none":
        need = bytes_text(plan.stage.need)
        fits = "fits  <- use this" if plan.stage.fits else "too much"
        rows.append([f"3, {plan.stage.offload} offloaded", "-", need, "-", bytes_text(plan.stage.need + job.activations.value), fits])
    lines = [f"memory per GPU, of {bytes_text(job.gpu_memory.value)}", *_table(rows)]
    lines.append(f"  stage {plan.stage.stage}: {plan.reason}")
    if plan.stage.host:
        lines.append(f"  offloaded states take {bytes_text(plan.stage.host)} of host memory per node")
    return lines


def _checkpoint(plan: Plan) -> list[str]:
    job = plan.job
    node = bytes_text(plan.node_bytes)
    load, read_rate = bytes_text(plan.load_bytes), bytes_text(job.read_rate.value)
    notice = f"{seconds_text(job.detect_s.value)} to notice, {seconds_text(job.restart_s.value)} to restart"
    goes_on = "; the copy goes on during training" if plan.captured_s > plan.blocked_s else ""
    held = "a version of its share" if plan.versions == 1 else "2 versions of its share: a save comes before the last one is durable"
    copies = f", and {COPIES} of each of {job.replicas} peers" if job.replicas > 1 else f", and {COPIES} of a peer's" if job.replicas else ""
    rows = [
        ["a checkpoint", bytes_text(plan.total_bytes), f"{bytes_text(plan.rank_bytes)} of the largest rank, {node} of its node"],
        ["memory of a node", bytes_text(plan.node_memory), f"{held}{copies}"],
        ["a save blocks", seconds_text(plan.blocked_s), f"{node} at {bytes_text(job.copy_rate.value)}/s{goes_on}"],
    ]
    if job.nodes > 1:
        rows.append(["on a peer after", seconds_text(plan.replicated_s), f"at {bytes_text(job.network_rate.value)}/s per node"])
    rows += [
        ["durable after", seconds_text(plan.durable_s), f"at {bytes_text(job.write_rate.value)}/s per node"],
        ["resume, memory", seconds_text(plan.resume_memory_s), notice],
    ]
    if job.nodes > 1:
        rows.append(["resume, a peer", seconds_text(plan.resume_peer_s), f"{load} for a node that was replaced"])
    rows.append(["resume, storage", seconds_text(plan.resume_storage_s), f"{load} for each node at {read_rate}/s"])
    doubt = "; hardly any storage takes so much" if plan.write_load > DOUBTED else ""
    limit = "" if math.isfinite(job.storage_rate.value) else f"{doubt}; --storage-total gives what yours takes"
    at_once = f"from {job.nodes} nodes at once" if job.nodes > 1 else "from the node"
    rates = f"{bytes_text(plan.average_load)}/s on average; a resume reads {bytes_text(plan.read_load)}/s"
    rows.append(["storage takes", bytes_text(plan.write_load) + "/s", f"{at_once}, {rates}{limit}"])
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return ["checkpoints", *(f"  {a.ljust(widths[0])}  {b.rjust(widths[1])}  {c}" for a, b, c in rows)]


def _intervals(plan: Plan) -> list[str]:
    job = plan.job
    rows = [["", "save every", "durable every", "progress", "lost a day"]]
    for one in plan.ways:
        every = seconds_text(one.memory_interval_s) if one.memory_interval_s is not None else "-"
        if one.memory_interval_s is not None and job.step_s:
            every += f", {max(1, round(one.memory_interval_s / job.step_s))} steps"
        rows.append([one.name, every, seconds_text(one.storage_interval_s), f"{one.goodput:.2%}", seconds_text((1 - one.goodput) * 86400)])
    local, copies = f"{job.survives_local.value:.0%}", f"{job.survives_replica.value:.0%}"
    return [
        f"a failure every {seconds_text(job.mtbf_s.value)}: {job.mtbf_s.source}",
        *_table(rows),
        f"  memory has the newest version after {local} of the failures, with copies on peers after {copies}",
    ]


def _sources(plan: Plan) -> list[str]:
    job = plan.job
    origin = {name: "assumed: --" + name if name in job.assumed else "given" for name in ("nodes", "gpus")}
    rows = [
        ["nodes", str(job.nodes), origin["nodes"]],
        ["GPUs of a node", str(job.gpus_per_node), origin["gpus"]],
        ["parameters", _count(job.model.parameters), job.model.source],
        ["largest layer", _count(job.model.largest_layer), job.model.layer_source],
    ]
    for name, figure, shown in (
        ("memory of a GPU", job.gpu_memory, bytes_text),
        ("activations per GPU", job.activations, bytes_text),
        ("host memory of a node", job.host_memory, bytes_text),
        ("memory copy", job.copy_rate, lambda rate: bytes_text(rate) + "/s"),
        ("network", job.network_rate, lambda rate: bytes_text(rate) + "/s"),
        ("storage write", job.write_rate, lambda rate: bytes_text(rate) + "/s"),
        ("storage read", job.read_rate, lambda rate: bytes_text(rate) + "/s"),
        ("a persist costs", job.slowdown, lambda share: f"{share:.1%} of its time"),
        ("price of a GB a month", job.price, lambda price: f"${price:.4g}"),
    ):
        rows.append([name, shown(figure.value), figure.source])
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return ["computed from", *(f"  {a.ljust(widths[0])}  {b.rjust(widths[1])}  {c}" for a, b, c in rows)]


def short_text(one: Short) -> str:
    """Returns the name of the number that is too small, the difference, and advice."""
    shown = {"bytes": bytes_text, "bytes/s": lambda rate: bytes_text(rate) + "/s", "seconds": seconds_text}[one.unit]
    return f"{one.name}: {shown(one.have)}, needed {shown(one.need)}: short by {shown(one.by)}; {one.advice}"


def text(plan: Plan) -> str:
    """Returns the whole plan as text."""
    job = plan.job
    head = f"{_count(job.model.parameters)} parameters on {job.gpus} GPUs, {job.nodes} node{'s' * (job.nodes != 1)} of {job.gpus_per_node}"
    head += ", assumed: give --nodes" if "nodes" in job.assumed else ""
    chosen = plan.chosen
    stored, cost = bytes_text(plan.stored_bytes), f"${plan.cost_per_month:,.2f}"
    storage = f"storage: {stored} for the newest {job.keep_last} and the version being written, {cost} a month"
    settings = f"settings: keep_last={job.keep_last}, replicas={job.replicas}"
    if math.isfinite(chosen.storage_interval_s):
        settings += f", persistent_time_interval={math.ceil(chosen.storage_interval_s)}"
    sections = [[head], _memory(plan), _checkpoint(plan), _intervals(plan), [storage, settings], _sources(plan)]
    sections[-1] += [f"  guide: {memory.GUIDE_SOURCE}", f"  DeepSpeed: {memory.ESTIMATOR_SOURCE}"]
    if plan.short:
        sections.append(["THIS DOES NOT FIT", *(f"  {short_text(one)}" for one in plan.short)])
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"
