"""Two runs of a job that write the same tag, each by an agent of its own, explored exhaustively.

Agent A holds the version of run 1, agent B that of run 2. Either may sleep between any two steps for as long as it takes: that
is a node that hangs, or slow storage. `after`: run 2 found a version of run 1 when it began, as a job does that is started
again; else the two jobs know nothing of each other. A look at storage and the one write that follows it are one step here,
since nothing but a few instructions lies between them.

What must hold: a manifest that is in storage names a record and a file of its own run. What is durable stays, unless a run that
came after replaces it. When nothing is left to do, each agent has its version in storage, or has been told that it gave way, or
a run that came after has replaced it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import search

RUNS = (1, 2)
LOOK, STAGE, RECORD, PLACE, MANIFEST, DURABLE, GAVE_WAY = range(7)  # what an agent does next, or has come to


@dataclass(frozen=True)
class Rules:
    """The protocol, and the mistakes that the model must find."""

    give_way: bool = True  # else: a manifest of any run is replaced
    look_again: bool = True  # else: what was seen before the bytes were staged is still believed
    own_record: bool = True  # else: whoever has written a record takes it for his own later


@dataclass(frozen=True)
class State:
    steps: tuple[int, int] = (LOOK, LOOK)
    seen: tuple[int, int] = (0, 0)  # the run of the manifest, as each agent saw it
    records: tuple[int, int] = (0, 0)  # by generation: the run that wrote it; 0: none
    files: tuple[int, int] = (0, 0)
    manifest: tuple[int, int] = (0, 0)  # run, generation
    durable: frozenset[int] = frozenset()  # the runs that have been called durable


def put(pair: tuple[int, int], index: int, value: int) -> tuple[int, int]:
    return (value, pair[1]) if index == 0 else (pair[0], value)


def may_replace(run: int, other: int, after: bool) -> bool:
    return other in (0, run) or (after and run == 2)


def work(state: State, rules: Rules, after: bool) -> Iterator[tuple[str, State]]:
    for index, run in enumerate(RUNS):
        step, seen, there = state.steps[index], state.seen[index], state.manifest[0]
        generation = 1 if seen else 0  # a file of a generation that follows another waits elsewhere
        name = "AB"[index]

        def to(next_step: int, index: int = index, **changes: object) -> State:
            return replace(state, steps=put(state.steps, index, next_step), **changes)

        if step == LOOK:
            if rules.give_way and not may_replace(run, there, after):
                yield f"{name} gives way", to(GAVE_WAY)
            elif there == run:
                yield f"{name} finds its own manifest", to(DURABLE)
            else:
                yield f"{name} looks at the manifest", to(STAGE, seen=put(state.seen, index, there))
            continue
        if step == STAGE:
            yield f"{name} stages its bytes", to(RECORD)
            continue
        if step > MANIFEST:
            continue
        stale = rules.look_again and there != seen
        lost = rules.own_record and step > RECORD and state.records[generation] != run
        if stale or lost:
            yield f"{name} begins anew", to(LOOK)
        elif step == RECORD:
            # Where another run's record lies, and nothing more comes of it, it is taken over: whoever wrote it may sleep only.
            yield f"{name} writes its record", to(PLACE, records=put(state.records, generation, run))
        elif step == PLACE:
            yield f"{name} puts its file in place", to(MANIFEST, files=put(state.files, generation, run))
        else:
            durable = state.durable | {run}
            yield f"{name} writes the manifest", to(DURABLE, manifest=(run, generation), durable=durable)


def broken(state: State, rules: Rules, after: bool) -> str | None:
    """The promise that does not hold, or None."""
    run, generation = state.manifest
    if run and (state.records[generation] != run or state.files[generation] != run):
        of = (state.records[generation], state.files[generation])
        return f"the manifest of run {run} names a record and a file of runs {of}"
    for other in state.durable:
        if other != run and not may_replace(run, other, after):
            return f"run {run} has replaced what run {other} had made durable"
    if next(work(state, rules, after), None):
        return None
    for index, own in enumerate(RUNS):
        if state.steps[index] == DURABLE and run != own and not may_replace(run, own, after):
            return f"run {own} was told that its version is durable, and storage has that of run {run}"
    return None


def explore(rules: Rules, after: bool) -> tuple[int, str | None, list[str]]:
    """Every reachable state: (how many, the first broken promise or None, the steps that lead to it)."""
    return search.explore(State(), lambda state: work(state, rules, after), lambda state: broken(state, rules, after))
