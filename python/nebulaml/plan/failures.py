"""Published failure rates of jobs, the mean time between failures that they give, and how soon a launcher restarts a job."""

from __future__ import annotations

import dataclasses

from ..errors import NebulaConfigError

__all__ = ["LAUNCHERS", "PRESETS", "Failures", "Launcher", "job_mtbf_s"]

DAY_S = 86400.0


@dataclasses.dataclass(frozen=True)
class Failures:
    """per_node_day: failures of one node a day.

    per_job_day: failures of the job a day that do not grow with its size, from `full_nodes` nodes on.
    local, with_replica: the share of failures after which the newest version is still in the memory of the job's nodes, without and
    with a copy on a peer.
    """

    source: str
    per_node_day: float
    per_job_day: float = 0.0
    full_nodes: int = 1
    local: float = 0.23
    with_replica: float = 0.99


# The causes of Llama 3's failures: software and network 23 %, after which every node keeps its memory; a GPU 63 %, after which its node is
# replaced; the rest loses the host. A copy on a peer helps against all failures except those of both nodes.
PRESETS = {
    "llama3": Failures(
        "Llama 3 405B (arXiv 2407.21783): 419 unexpected interruptions in 54 days on 16,384 H100 (2,048 nodes)", 419 / 54 / 2048
    ),
    "rsc": Failures(
        "Meta RSC-1 (arXiv 2410.21680): 6.50 failures per 1,000 node-days; 2.2 a day per job of 128 nodes and more is a fit to its MTTF of "
        "7.9 h at 1,024 GPUs",
        6.50e-3,
        2.2,
        128,
    ),
    "rsc2": Failures("Meta RSC-2 (arXiv 2410.21680): 2.34 failures per 1,000 node-days", 2.34e-3),
    "opt": Failures(
        "OPT-175B (arXiv 2205.01068 and its logbook): about 105 restarts in 60 days on 992 A100 (124 nodes)", 105 / 60 / 124
    ),
    "spot": Failures(
        "spot machines: one eviction of the job an hour, an assumption; give --mtbf from your provider's history", 0.0, 24.0, 1, 0.0, 0.99
    ),
}


@dataclasses.dataclass(frozen=True)
class Launcher:
    """detect_s: from a failure until it is noticed. restart_s: from there to the first step, without the load."""

    detect_s: float
    restart_s: float
    source: str


_BENCH = "on two nodes of one worker, without NCCL: bench/results/recover.md"
LAUNCHERS = {
    "scheduler": Launcher(60.0, 300.0, "assumed: a scheduler starts the job again"),
    "nebula-run": Launcher(2.2, 0.5, f"`nebula run`, a node falls silent, {_BENCH}"),
    "torchrun": Launcher(1.1, 46.0, f"`torchrun` with its defaults, a node is killed, {_BENCH}"),
}


def job_mtbf_s(failures: Failures, nodes: int) -> float:
    """Returns the mean time between failures of a job of that many nodes, in seconds. Raises NebulaConfigError for a rate of 0."""
    per_day = failures.per_node_day * nodes + failures.per_job_day * min(1.0, nodes / failures.full_nodes)
    if per_day <= 0:
        raise NebulaConfigError("a job that never fails needs no checkpoint: give --mtbf")
    return DAY_S / per_day
