"""Computes the plan of a job from its description. Sizes are bytes, times seconds, rates bytes per second of one node."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from . import interval, memory
from .model import Model

__all__ = ["Figure", "Job", "Plan", "Short", "StageNeed", "Way", "document", "make"]

GB = 1e9
MOST_NODES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number of the job and its origin: given, measured, assumed, or a publication."""

    value: float
    source: str


@dataclasses.dataclass(frozen=True)
class Job:
    """The description of a job."""

    model: Model
    nodes: int
    gpus_per_node: int
    gpu_memory: Figure
    host_memory: Figure
    activations: Figure
    copy_rate: Figure
    network_rate: Figure
    write_rate: Figure
    read_rate: Figure
    storage_rate: Figure  # of all nodes together; inf: no limit
    storage_space: Figure  # inf: no limit
    detect_s: Figure
    restart_s: Figure
    slowdown: Figure  # the share of a persist's time by which training takes longer
    price: Figure  # of a GB (10^9 bytes) a month
    mtbf_s: Figure
    survives_local: Figure
    survives_replica: Figure
    keep_last: int
    replicas: int
    overlap: bool = False
    blocked_s: Figure | None = None
    step_s: float = 0.0
    assumed: tuple[str, ...] = ()  # "nodes" and "gpus", unless they were given
    stage: int | None = None

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclasses.dataclass(frozen=True)
class Short:
    """A number that is too small for the job."""

    name: str
    have: float
    need: float
    unit: str  # "bytes", "bytes/s", "seconds"
    advice: str

    @property
    def by(self) -> float:
        return self.need - self.have


@dataclasses.dataclass(frozen=True)
class StageNeed:
    """Bytes per GPU at one ZeRO stage, by each rule. host: bytes of one node. need: the bytes per GPU that the plan uses."""

    stage: int
    offload: str
    guide: float
    estimator: float | None
    autotuner: float
    host: float
    need: float
    fits: bool


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to save, its best intervals, and the share of the time that is progress."""

    name: str
    costs: interval.Costs
    memory_interval_s: float | None  # None: it has no memory tier
    storage_interval_s: float
    goodput: float


COPIES = 2  # that a node keeps of a peer's share: the copy before stays until the next one has arrived


def versions(way: Way) -> int:
    """Returns how many versions of its share a node has in memory: one if each is durable before the next save begins, else two."""
    return 1 if way.memory_interval_s is None or way.memory_interval_s >= way.storage_interval_s else 2


@dataclasses.dataclass(frozen=True)
class Times:
    """The sizes of a checkpoint at one ZeRO stage, how long it takes, and the ways to save it."""

    rank_bytes: float
    node_bytes: float
    total_bytes: float
    blocked_s: float
    captured_s: float
    replicated_s: float
    durable_s: float
    resume_memory_s: float
    resume_peer_s: float
    resume_storage_s: float
    load_bytes: float
    ways: list[Way]
    chosen: Way
    node_memory: float  # for the versions of this node, and for copies of its peers' versions

    @property
    def versions(self) -> int:
        return versions(self.chosen)


@dataclasses.dataclass(frozen=True)
class Plan(Times):
    """The needs of a job. `short` is empty if it fits."""

    job: Job
    stages: list[StageNeed]
    stage: StageNeed
    reason: str
    stored_bytes: float
    cost_per_month: float
    short: list[Short]

    @property
    def write_load(self) -> float:
        """The bytes per second that storage takes from all nodes while they persist."""
        return min(self.job.nodes * self.job.write_rate.value, self.job.storage_rate.value)

    @property
    def read_load(self) -> float:
        """The bytes per second that storage gives to all nodes while they resume."""
        return min(self.job.nodes * self.job.read_rate.value, self.job.storage_rate.value)

    @property
    def average_load(self) -> float:
        """The bytes per second that are written on average."""
        return self.total_bytes / self.chosen.storage_interval_s


def _need(job: Job, stage: int, offload: str) -> StageNeed:
    parameters, gpus = job.model.parameters, job.gpus
    share = memory.estimator(parameters, job.model.largest_layer, stage, job.gpus_per_node, job.nodes, offload)
    guide = memory.guide(parameters, stage, gpus)
    need = share.gpu if share else guide
    # Without offload the estimators' host memory is needed only at the start: it is free again when training saves.
    host = share.host if share and offload != "none" else 0.0
    versions = _times(job, stage).node_memory
    fits = need + job.activations.value <= job.gpu_memory.value and host + versions <= job.host_memory.value
    return StageNeed(stage, offload, guide, share.gpu if share else None, memory.autotuner(parameters, stage, gpus), host, need, fits)


def _choose(job: Job) -> tuple[list[StageNeed], StageNeed, str]:
    stages = [_need(job, stage, "none") for stage in memory.STAGES]
    if job.stage is not None:
        return stages, stages[job.stage], "given"
    seed = memory.seed_stage(job.model.parameters)
    for one in stages[seed:]:
        if one.fits:
            if one.stage == seed:
                return stages, one, "the usual stage for this size, and it fits"
            return stages, one, f"the usual stage for this size is {seed}, which does not fit"
    for offload, what in (("optimizer", "optimizer"), ("all", "optimizer and weights")):
        one = _need(job, 3, offload)
        if one.fits:
            return stages, one, f"nothing smaller fits: {what} in host memory"
    return stages, stages[3], "none fits"


def _nodes_that_fit(job: Job) -> int | None:
    """Returns the fewest nodes of this kind on which some stage fits without offload. None: there is no such number."""
    nodes = job.nodes
    while nodes <= MOST_NODES:
        if any(_need(dataclasses.replace(job, nodes=nodes), stage, "none").fits for stage in memory.STAGES):
            low, high = max(job.nodes, nodes // 2), nodes
            while low < high:
                middle = (low + high) // 2
                if any(_need(dataclasses.replace(job, nodes=middle), stage, "none").fits for stage in memory.STAGES):
                    high = middle
                else:
                    low = middle + 1
            return high
        nodes *= 2
    return None


def _short(job: Job, stage: StageNeed, times: Times, stored: float) -> list[Short]:
    resume_s = times.resume_storage_s
    found = []
    more = _nodes_that_fit(job) if not stage.fits else None
    advice = f"{more} nodes of this kind would do" if more else "no number of nodes of this kind would do"
    gpu = stage.need + job.activations.value
    if gpu > job.gpu_memory.value:
        found.append(Short(f"memory of a GPU at stage {stage.stage}", job.gpu_memory.value, gpu, "bytes", advice))
    host = stage.host + times.node_memory
    if host > job.host_memory.value:
        if job.replicas and host - times.node_bytes * COPIES * job.replicas <= job.host_memory.value:
            advice = "without replicas it fits: --replicas 0"
        found.append(Short("host memory of a node", job.host_memory.value, host, "bytes", advice))
    if stored > job.storage_space.value:
        advice = f"it holds keep_last={job.keep_last} and the version being written"
        found.append(Short("storage", job.storage_space.value, stored, "bytes", advice))
    if job.mtbf_s.value < resume_s:
        advice = "a resume from storage takes longer than the time to the next failure"
        found.append(Short("time between failures", job.mtbf_s.value, resume_s, "seconds", advice))
    return found


def _too_slow(job: Job, times: Times) -> list[Short]:
    """Returns the rates at which failures interrupt every save, or every persist, so that the job makes no progress."""
    found = []
    node_bytes, blocked_s = times.node_bytes, times.blocked_s
    behind_s = max(0.0, times.captured_s - blocked_s)
    mtbf_s = job.mtbf_s.value
    copies = job.copy_rate.value
    if node_bytes / copies > mtbf_s:
        found.append(Short("memory copy", copies, node_bytes / mtbf_s, "bytes/s", "a copy takes longer than the time to the next failure"))
    if job.blocked_s and blocked_s > mtbf_s:
        found.append(Short("time between failures", mtbf_s, blocked_s, "seconds", "a save takes longer than the time to the next failure"))
    lost = 1 - (job.survives_replica if job.replicas else job.survives_local).value
    left_s = mtbf_s / lost - behind_s if lost > 0 else math.inf
    advice = "a version is not durable before the next failure that memory does not survive"
    for name, rate, size in (("storage write", job.write_rate, node_bytes), ("storage of all nodes", job.storage_rate, times.total_bytes)):
        if 0 < left_s < size / rate.value:
            found.append(Short(name, rate.value, size / left_s, "bytes/s", advice))
    return found


def _plain_way(job: Job, durable_s: float, resume_s: float) -> Way:
    """Models torch.save in the training loop, at the full speed of storage: one tier, and training stops until the version is durable."""
    costs = interval.Costs(job.mtbf_s.value, 0.0, durable_s, 0.0, 0.0, 0.0, resume_s, resume_s)
    every = max(job.step_s, interval.daly(durable_s, job.mtbf_s.value))
    return Way("torch.save", costs, None, every, interval.one_tier(every, durable_s, 0.0, resume_s, job.mtbf_s.value))


def _way(name: str, job: Job, costs: interval.Costs) -> Way:
    every, storage = interval.intervals(costs, job.step_s)
    return Way(name, costs, every, storage, interval.goodput(costs, every, storage))


def _times(job: Job, stage: int) -> Times:
    parameters = job.model.parameters
    rank_bytes, node_bytes, total_bytes = memory.checkpoint(parameters, stage, job.gpus_per_node, job.nodes)
    captured_s = node_bytes / job.copy_rate.value
    blocked_s = job.blocked_s.value if job.blocked_s else captured_s
    behind_s = max(0.0, captured_s - blocked_s)  # the part of the copy during which training goes on
    replicated_s = behind_s + node_bytes / job.network_rate.value
    durable_s = behind_s + max(node_bytes / job.write_rate.value, total_bytes / job.storage_rate.value)
    # Up to stage 2 each rank loads all weights; a node reads them once.
    shard_bytes = 0.0 if stage == 0 else parameters * memory.OPTIMIZER / job.gpus * job.gpus_per_node
    load_bytes = {0: total_bytes, 3: node_bytes}.get(stage, shard_bytes + parameters * memory.WEIGHTS)
    restart_s = job.detect_s.value + job.restart_s.value
    resume_memory_s = restart_s + load_bytes / job.copy_rate.value
    resume_peer_s = restart_s + load_bytes / job.network_rate.value
    resume_storage_s = restart_s + max(load_bytes / job.read_rate.value, load_bytes * job.nodes / job.storage_rate.value)

    slowdown_s = job.slowdown.value * durable_s
    local = interval.Costs(
        job.mtbf_s.value, job.survives_local.value, blocked_s, behind_s, slowdown_s, durable_s, resume_memory_s, resume_storage_s
    )
    ways = [_plain_way(job, captured_s + durable_s, resume_storage_s), _way("Nebula", job, local)]
    if job.nodes > 1:
        copies = dataclasses.replace(
            local, survives=job.survives_replica.value, captured_s=replicated_s, resume_memory_s=max(resume_memory_s, resume_peer_s)
        )
        ways.append(_way("Nebula, copies on peers", job, copies))
    chosen = ways[2 if job.replicas and len(ways) > 2 else 1]
    node_memory = node_bytes * (versions(chosen) + COPIES * job.replicas)
    return Times(
        rank_bytes, node_bytes, total_bytes, blocked_s, captured_s, replicated_s, durable_s, resume_memory_s, resume_peer_s, resume_storage_s,
        load_bytes, ways, chosen, node_memory,
    )  # fmt: skip


def make(job: Job) -> Plan:
    """Makes the plan of a job. A job that does not fit has a plan, too: `short` names the reasons."""
    stages, stage, reason = _choose(job)
    times = _times(job, stage.stage)
    stored = times.total_bytes * (job.keep_last + 1)
    return Plan(
        **vars(times), job=job, stages=stages, stage=stage, reason=reason, stored_bytes=stored,
        cost_per_month=stored / GB * job.price.value, short=_short(job, stage, times, stored) + _too_slow(job, times),
    )  # fmt: skip


def document(plan: Plan) -> dict[str, Any]:
    """Returns the plan as JSON values. An unbounded number is null."""
    job, chosen = plan.job, plan.chosen

    def plain(value: float | None) -> float | None:
        return None if value is None or not math.isfinite(value) else value

    inputs = {
        field.name: {"value": plain(value.value), "source": value.source}
        for field in dataclasses.fields(job)
        if isinstance(value := getattr(job, field.name), Figure)
    }
    described = {
        "parameters": job.model.parameters,
        "parameters_source": job.model.source,
        "largest_layer": job.model.largest_layer,
        "largest_layer_source": job.model.layer_source,
        "assumed": list(job.assumed),
        "nodes": job.nodes,
        "gpus_per_node": job.gpus_per_node,
        "gpus": job.gpus,
        "replicas": job.replicas,
        "versions_in_memory": plan.versions,
        "keep_last": job.keep_last,
        "overlap": job.overlap,
    }
    stages = [
        {
            "stage": one.stage,
            "guide_bytes": one.guide,
            "estimator_bytes": one.estimator,
            "autotuner_bytes": one.autotuner,
            "with_activations_bytes": one.need + job.activations.value,
            "fits": one.fits,
        }
        for one in plan.stages
    ]
    stage = plan.stage
    times = ("blocked_s", "captured_s", "replicated_s", "durable_s", "resume_memory_s", "resume_peer_s", "resume_storage_s")
    return {
        "fits": not plan.short,
        "short": [{**dataclasses.asdict(one), "short_by": one.by} for one in plan.short],
        "job": described,
        "inputs": inputs,
        "memory": {"guide_source": memory.GUIDE_SOURCE, "estimator_source": memory.ESTIMATOR_SOURCE, "stages": stages},
        "stage": {
            "stage": stage.stage,
            "offload": stage.offload,
            "reason": plan.reason,
            "gpu_bytes": stage.need,
            "host_bytes": stage.host,
        },
        "checkpoint": {
            "rank_bytes": plan.rank_bytes,
            "node_bytes": plan.node_bytes,
            "total_bytes": plan.total_bytes,
            "node_memory_bytes": plan.node_memory,
        },
        "times": {name: getattr(plan, name) for name in times},
        "ways": [
            {
                "name": one.name,
                "memory_interval_s": plain(one.memory_interval_s),
                "storage_interval_s": plain(one.storage_interval_s),
                "goodput": one.goodput,
            }
            for one in plan.ways
        ],
        "chosen": chosen.name,
        "storage": {
            "bytes": plan.stored_bytes,
            "cost_per_month_usd": plan.cost_per_month,
            "write_bytes_per_s": plan.write_load,
            "read_bytes_per_s": plan.read_load,
            "average_write_bytes_per_s": plan.average_load,
        },
    }
