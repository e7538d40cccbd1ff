"""Two runs of a job that write the same tag, each by its own agent, explored exhaustively.

Agent A holds the version of run 1, agent B that of run 2. Each may sleep between any two steps for any time: this
models a hanging node, or slow storage. `after`: run 2 found a version of run 1 when it began, like a job that is started
again; else the two jobs do not know each other. A look at storage and the write that follows it are one step here,
because only a few instructions lie between them.

The promise: a manifest in storage names a record and a file of its own run. A durable version stays, unless a run that
came after replaces it. When no step is left, each agent has its version in storage, or knows that it gave way, or
a run that came after has replaced it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import search

RUNS = (1, 2)
LOOK, STAGE, RECORD, PLACE, MANIFEST, DURABLE, GAVE_WAY = range(7)  # the next step of an agent, or its end


@dataclass(frozen=True)
class Rules:
    """The protocol, and the mistakes that the model must find."""

    give_way: bool = True  # else: a manifest of any run is replaced
    look_again: bool = True  # else: an agent still trusts what it saw before it staged its bytes
    own_record: bool = True  # else: an agent that has written a record later takes any record in that place for its own


class State(NamedTuple):  # quicker to make, to compare and to hash than a dataclass
    steps: tuple[int, int] = (LOOK, LOOK)
    seen: tuple[int, int] = (0, 0)  # the run of the manifest that each agent saw
    records: tuple[int, int] = (0, 0)  # by entry of the log, the first and the next: the run that wrote it; 0: none
    files: tuple[int, int] = (0, 0)
    manifest: tuple[int, int] = (0, 0)  # run, entry
    durable: frozenset[int] = frozenset()  # the runs that have been called durable


def put(pair: tuple[int, int], index: int, value: int) -> tuple[int, int]:
    return (value, pair[1]) if index == 0 else (pair[0], value)


def may_replace(run: int, other: int, after: bool) -> bool:
    return other in (0, run) or (after and run == 2)


def work(state: State, rules: Rules, after: bool) -> Iterator[tuple[str, State]]:
    for index, run in enumerate(RUNS):
        step, seen, there = state.steps[index], state.seen[index], state.manifest[0]
        entry = 1 if seen else 0  # a file of a later entry waits in another place
        name = "AB"[index]

        def to(next_step: int, index: int = index, **changes: object) -> State:
            return state._replace(steps=put(state.steps, index, next_step), **changes)

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
        lost = rules.own_record and step > RECORD and state.records[entry] != run
        if stale or lost:
            yield f"{name} begins anew", to(LOOK)
        elif step == RECORD:
            # The agent takes over another run's record that has no manifest. Its writer may only be asleep.
            yield f"{name} writes its record", to(PLACE, records=put(state.records, entry, run))
        elif step == PLACE:
            yield f"{name} puts its file in place", to(MANIFEST, files=put(state.files, entry, run))
        else:
            durable = state.durable | {run}
            yield f"{name} writes the manifest", to(DURABLE, manifest=(run, entry), durable=durable)


def broken(state: State, rules: Rules, after: bool) -> str | None:
    """Returns the broken promise. None: all hold."""
    run, entry = state.manifest
    if run and (state.records[entry] != run or state.files[entry] != run):
        of = (state.records[entry], state.files[entry])
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
    """Explores every reachable state. Returns (number of states, first broken promise or None, the steps that lead to it)."""
    return search.explore(State(), lambda state: work(state, rules, after), lambda state: broken(state, rules, after))
