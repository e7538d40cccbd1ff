"""Computes how often to save, and for which share of the time a job then makes progress.

Two tiers: a save puts a version into memory (tier 1), and some of these versions are made durable in storage (tier 2). All times are in
seconds. Failures are random, with an exponential distribution.

| symbol | is |
| --- | --- |
| M | mean time between failures of the job |
| phi | the share of the failures after which memory still has the newest version |
| d1 | the time for which a save blocks training |
| s1 | time from the end of that block until the version is complete in memory, or on a peer |
| c2 | training time that one persist costs |
| P | time from the commit until the version is durable |
| R1, R2 | time from a failure until training goes on: from memory, from storage |
"""

from __future__ import annotations

import dataclasses
import math

__all__ = ["Costs", "daly", "goodput", "intervals", "one_tier", "young"]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The symbols of the module's table, for one way to save."""

    mtbf_s: float
    survives: float  # phi
    blocked_s: float  # d1
    captured_s: float  # s1
    slowdown_s: float  # c2
    durable_s: float  # P
    resume_memory_s: float  # R1
    resume_storage_s: float  # R2


def young(blocked_s: float, mtbf_s: float) -> float:
    """Returns the training time between saves that wastes least, to first order. J. W. Young, CACM 17(9), 1974."""
    return math.sqrt(2 * blocked_s * mtbf_s)


def daly(blocked_s: float, mtbf_s: float) -> float:
    """Returns the same to higher order. J. T. Daly, Future Generation Computer Systems 22, 2006, equation 37."""
    if blocked_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(blocked_s / (2 * mtbf_s))
    return math.sqrt(2 * blocked_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - blocked_s


def one_tier(interval_s: float, blocked_s: float, lag_s: float, resume_s: float, mtbf_s: float) -> float:
    """Returns the share of the time that is progress, with one kind of checkpoint.

    interval_s: training time between the saves. lag_s: from the end of the block until the version can be loaded after a failure. Only one
    save runs at a time. The formula is exact for exponential failures, which may also come during a resume: after a resume, n versions are
    complete if the next failure comes R + P + n C later, and E[n] is the sum of these probabilities.
    """
    cycle = max(interval_s, lag_s) + blocked_s
    progress = max(interval_s, lag_s)
    rate = cycle / mtbf_s
    if rate < 1e-12:
        return progress / cycle
    if rate > 700:
        return 0.0
    return progress * math.exp(-(resume_s + lag_s) / mtbf_s) / (math.expm1(rate) * mtbf_s)


def goodput(costs: Costs, memory_s: float, storage_s: float) -> float:
    """Returns the share of the time that is progress, with both tiers.

    memory_s, storage_s: training time between saves, time between the starts of persists. Failures that memory survives cost progress
    at the rate of tier 1 alone. For tier 2 the job goes on at that rate, and all other failures roll it back. Each factor is `one_tier`,
    which is exact. The product neglects that a rollback to storage can interrupt a resume from memory.
    """
    rate = 1.0
    if costs.survives > 0:
        rate = one_tier(memory_s, costs.blocked_s, costs.captured_s, costs.resume_memory_s, costs.mtbf_s / costs.survives)
    else:
        rate = memory_s / (memory_s + costs.blocked_s)
    if not math.isfinite(storage_s):
        return rate
    rate *= storage_s / (storage_s + costs.slowdown_s)
    if costs.survives < 1:
        rate *= one_tier(storage_s, 0.0, costs.durable_s, costs.resume_storage_s, costs.mtbf_s / (1 - costs.survives))
    return rate


def intervals(costs: Costs, least_s: float = 0.0) -> tuple[float, float]:
    """Returns the training time between saves, and the time between the starts of persists, that waste least.

    The waste is d1/T1 + c2/T2 + phi (T1/2 + s1 + R1)/M + (1 - phi)(T2/2 + P + R2)/M. It is least at T1 = sqrt(2 d1 M / phi) and
    T2 = sqrt(2 c2 M / (1 - phi)). A persist needs a save: if this T1 is larger than T2, both are sqrt(2 (d1 + c2) M). A persist
    starts after the one before has ended, and a save after the one before is complete: T2 >= P, T1 >= s1 and T1 >= least_s, the time of
    a step. If memory survives every failure, T2 is inf.
    """
    lost = 1 - costs.survives
    memory_s = math.sqrt(2 * costs.blocked_s * costs.mtbf_s / costs.survives) if costs.survives > 0 else math.inf
    storage_s = math.sqrt(2 * costs.slowdown_s * costs.mtbf_s / lost) if lost > 0 else math.inf
    if memory_s > storage_s:
        storage_s = math.sqrt(2 * (costs.blocked_s + costs.slowdown_s) * costs.mtbf_s)
    storage_s = max(storage_s, costs.durable_s)
    memory_s = max(min(memory_s, storage_s), costs.captured_s, least_s)
    return memory_s, max(storage_s, memory_s)
