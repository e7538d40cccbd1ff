"""The commit protocol of docs/protocol.md as a small state machine, explored exhaustively.

Two nodes: A runs ranks 0 and 1, B runs rank 2. One tag, two runs of the job: run 1 may be killed at any point, run 2
writes the same tag again. Each step of each process may come at any time; a node may crash (its memory and its agent's
plans are lost, storage stays), a whole run may be killed while its agents live on, and a listing may be stale: an agent
may see any set of documents that was true at some moment since it last looked.

The promise in every reachable state: a manifest that a reader accepts names, for every rank, a record and a file of
the manifest's own run; and once a version was accepted, a reader finds some version ever after.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import search

RANKS = (0, 1, 2)
NODES = {"A": (0, 1), "B": (2,)}
CRASHES = 2  # at most, of both nodes together


@dataclass(frozen=True)
class Rules:
    """The protocol, and the mistakes that the model must find."""

    manifest_after_records: bool = True  # else: written when the files are captured
    same_run: bool = True  # else: records of any run complete a version
    record_after_file: bool = True  # else: the record may be written before its file is durable
    digests: bool = True  # else: a reader believes a manifest without comparing the records and files
    crashes: int = CRASHES


class State(NamedTuple):  # quicker to make, to compare and to hash than a dataclass
    run: int = 1
    memory: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())  # per node: (run * 10 + rank) captured
    files: tuple[int, int, int] = (0, 0, 0)  # the run whose bytes lie in storage, per rank; 0: none
    records: tuple[int, int, int] = (0, 0, 0)
    views: tuple[tuple[int, int, int], tuple[int, int, int]] = (
        (0, 0, 0),
        (0, 0, 0),
    )  # records as each agent last saw them
    manifest: tuple[int, tuple[int, int, int]] | None = None  # (run, the record of each rank that it names)
    accepted: bool = False
    crashes: int = 0


def put(values: tuple[int, int, int], index: int, value: int) -> tuple[int, int, int]:
    changed = list(values)
    changed[index] = value
    return (changed[0], changed[1], changed[2])


def put_one(pair: tuple, index: int, value: object) -> tuple:
    return (value, pair[1]) if index == 0 else (pair[0], value)


@functools.cache
def held(memory: frozenset[int]) -> tuple[int, int, int]:
    """Returns the newest run of each rank that a node's memory has; 0: none."""
    return tuple(max((run // 10 for run in memory if run % 10 == rank), default=0) for rank in RANKS)


@functools.cache
def swapped(memory: frozenset[int]) -> frozenset[int]:
    return frozenset(run // 10 * 10 + 1 - run % 10 for run in memory)


def mirrored(state: State) -> State:
    """Swaps ranks 0 and 1, which are of one node and have the same steps."""
    run, (a, b), (f0, f1, f2), (r0, r1, r2), ((a0, a1, a2), (b0, b1, b2)), manifest, accepted, crashes = state
    if manifest is not None:
        of, (m0, m1, m2) = manifest
        manifest = of, (m1, m0, m2)
    return State(run, (swapped(a), b), (f1, f0, f2), (r1, r0, r2), ((a1, a0, a2), (b1, b0, b2)), manifest, accepted, crashes)


def sound(state: State, rules: Rules) -> bool:
    """Returns whether a reader accepts the manifest: each record that it names exists unchanged, and so does the record's file."""
    if state.manifest is None:
        return False
    if not rules.digests:
        return True
    _, named = state.manifest
    return all(named[rank] != 0 and state.records[rank] == named[rank] == state.files[rank] for rank in RANKS)


def steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    whole = sound(state, rules)
    for index, (node, ranks) in enumerate(NODES.items()):
        memory, view = state.memory[index], state.views[index]
        newest = held(memory)
        for rank in ranks:
            # A run that finds the tag complete would begin another writing with its own files, which this model does not have.
            if state.run * 10 + rank not in memory and not whole:
                yield (
                    f"rank {rank} captures in run {state.run}",
                    state._replace(memory=put_one(state.memory, index, memory | {state.run * 10 + rank})),
                )
            # An agent continues to persist its images, also those of a killed run; only the newest of each rank.
            run = newest[rank]
            if run == 0 or whole:
                continue
            if state.files[rank] != run and (rules.record_after_file or state.records[rank] == run):
                yield f"{node} writes the file of rank {rank}, run {run}", state._replace(files=put(state.files, rank, run))
            ready = state.files[rank] == run or not rules.record_after_file
            if state.records[rank] != run and ready:
                yield (
                    f"{node} writes the record of rank {rank}, run {run}",
                    state._replace(records=put(state.records, rank, run)),
                )
        for rank in RANKS if view != state.records else ():
            # An agent sees documents one by one, in any order: this models a stale listing.
            if view[rank] != state.records[rank]:
                fresh = put(view, rank, state.records[rank])
                yield f"{node} sees the record of rank {rank}", state._replace(views=put_one(state.views, index, fresh))
        if memory and state.manifest is None:
            run = max(newest)
            if rules.manifest_after_records:
                complete = all(view) if not rules.same_run else all(seen == run for seen in view)
                named = view
            else:
                complete = all(run * 10 + rank in memory for rank in ranks)
                named = (run, run, run)
            if complete:
                yield f"{node} writes the manifest of run {run}", state._replace(manifest=(run, named))
        if state.crashes < rules.crashes:
            left, views = put_one(state.memory, index, frozenset()), put_one(state.views, index, (0, 0, 0))
            yield f"node {node} dies", state._replace(memory=left, views=views, crashes=state.crashes + 1)
    if state.run == 1:
        # At its start the new run drops an invalid manifest, and trusts a valid one.
        yield "the job is killed and started again", state._replace(run=2, manifest=state.manifest if whole else None)
    if whole and not state.accepted:
        yield "a reader loads", state._replace(accepted=True)


def broken(state: State, rules: Rules) -> str | None:
    """Returns the broken promise. None: all hold."""
    if sound(state, rules):
        assert state.manifest is not None
        run, named = state.manifest
        if any(state.records[rank] != named[rank] or state.files[rank] != named[rank] for rank in RANKS):
            return f"a reader accepts a manifest of run {run}, but the files are of runs {state.files}, the records of runs {state.records}"
        if any(of != run for of in named):
            return f"a reader accepts a mixture: the manifest of run {run} names records of runs {named}"
    elif state.accepted:
        return "a version that was loaded can not be loaded any more"
    if state.manifest is not None and not sound(state, rules) and state.run == state.manifest[0]:
        if not all(state.records):
            return "a manifest is there before all records are"
    return None


def explore(rules: Rules) -> tuple[int, str | None, list[str]]:
    """Explores every reachable state. Returns (number of states, first broken promise or None, the steps that lead to it)."""
    return search.explore(State(), lambda state: steps(state, rules), lambda state: broken(state, rules), mirrored)
