"""The documents by which nodes commit together, `captured-*`, `committed-*` and `wanted-*`, explored exhaustively.

Two nodes, A with rank 0 and B; one tag, two runs of the job that both write it. commit_model.py begins where this ends: with
the records and the manifest, which are one step each here. An agent decides by the documents that it saw last, and may
look again at any time, and it may be stopped before it writes: then it writes a decision that another has made long before. A
node may die once. A client may ask for durability on one node at any time.

The promise: if a node calls a version committed, both nodes have captured it in one run. When the only steps left are to
give up, and both nodes hold the version of the last run, both have committed it, they agree whether it shall be durable, and it
is. When no step is left, no client waits: a version that a node wants durable is durable, or that node has given it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import search

NODES = (0, 1)
Runs = frozenset[int]
Decision = bool | None  # whether to persist; None: there is no decision
Seen = tuple[int, bool] | None  # run, persist


@dataclass(frozen=True)
class Rules:
    """The protocol, and the mistakes that the model must find."""

    announce_captured: bool = True  # else: a node speaks for ranks that have only begun
    same_run: bool = True  # else: captured documents of any run complete a version
    decide_once: bool = True  # else: each agent decides by its own clock whether to persist
    tell_wanted: bool = True  # else: a node that wants durability writes no `wanted` document
    write_once: bool = True  # else: a later decision on a run replaces the first one
    by_document: bool = True  # else: a node that knows that all have captured commits by itself
    give_up: bool = True  # else: a node that has written its records waits for the others without a limit


class State(NamedTuple):  # quicker to make, to compare and to hash than a dataclass
    run: int = 1
    held: tuple[Runs, Runs] = (frozenset(), frozenset())  # per node: the runs whose images it holds
    ever: tuple[Runs, Runs] = (frozenset(), frozenset())  # the same without deaths: only for the promise
    captured: tuple[int, int] = (0, 0)  # the run of each node's captured document; 0: none
    decided: tuple[Decision, Decision] = (None, None)  # the `committed` document of each run
    told: Runs = frozenset()  # the runs that have a `wanted` document
    seen_captured: tuple[int, int] = (0, 0)  # the other's document, as each agent last saw it
    seen_committed: tuple[Seen, Seen] = (None, None)
    adopted: tuple[Runs, Runs] = (frozenset(), frozenset())
    wanted: tuple[Runs, Runs] = (frozenset(), frozenset())
    recorded: tuple[int, int] = (0, 0)
    manifest: int = 0
    given_up: tuple[Runs, Runs] = (frozenset(), frozenset())
    asked: bool = False
    died: bool = False


def put(pair: tuple, node: int, value: object) -> tuple:
    return (value, pair[1]) if node == 0 else (pair[0], value)


def mirrored(state: State) -> State:
    """Swaps the nodes, which have the same steps."""
    run, held, ever, captured, decided, told, seen_captured, seen_committed, adopted, wanted, recorded, manifest, given_up, asked, died = state
    return State(
        run, held[::-1], ever[::-1], captured[::-1], decided, told, seen_captured[::-1], seen_committed[::-1],
        adopted[::-1], wanted[::-1], recorded[::-1], manifest, given_up[::-1], asked, died,
    )  # fmt: skip


def work(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Yields the steps that agents take by themselves."""
    for node, name in enumerate("AB"):
        other, held = 1 - node, state.held[node]
        newest = max(held, default=0)
        spoken = newest if rules.announce_captured else state.run
        if spoken > state.captured[node]:
            yield f"{name} announces run {spoken}", state._replace(captured=put(state.captured, node, spoken))
        open_version = newest and newest not in state.adopted[node]
        if open_version and state.seen_captured[node] != state.captured[other]:
            seen = put(state.seen_captured, node, state.captured[other])
            yield f"{name} sees what the other has captured", state._replace(seen_captured=seen)
        seen = state.seen_committed[node]
        decision = state.decided[newest - 1] if newest else None
        if open_version and decision is not None and seen != (newest, decision):
            read = put(state.seen_committed, node, (newest, decision))
            yield f"{name} reads the decision on run {newest}", state._replace(seen_committed=read)
        covered = state.seen_captured[node] == newest if rules.same_run else state.seen_captured[node] > 0
        if open_version and covered and not (seen and seen[0] == newest):
            # Two agents that decide at once differ only in `persist`: the first document stays, and both read it.
            for persist in (False, True) if decision is None or not rules.write_once else ():
                yield (
                    f"{name} commits run {newest}, persist {persist}",
                    state._replace(decided=put(state.decided, newest - 1, persist)),
                )
        if open_version and covered and not rules.by_document:
            yield (
                f"{name} commits run {newest} by itself",
                state._replace(adopted=put(state.adopted, node, state.adopted[node] | {newest})),
            )
        if open_version and seen and seen[0] == newest:
            for persist in (seen[1],) if rules.decide_once else (False, True):
                wanted = state.wanted[node] | {newest} if persist else state.wanted[node]
                yield (
                    f"{name} adopts run {newest}, wanted {persist}",
                    state._replace(
                        adopted=put(state.adopted, node, state.adopted[node] | {newest}),
                        wanted=put(state.wanted, node, wanted),
                    ),
                )
        if newest in state.wanted[node] - state.told and seen == (newest, False) and rules.tell_wanted:
            yield f"{name} tells that run {newest} is wanted", state._replace(told=state.told | {newest})
        if newest in (state.adopted[node] & state.told) - state.wanted[node]:
            wanted = put(state.wanted, node, state.wanted[node] | {newest})
            yield f"{name} hears that run {newest} is wanted", state._replace(wanted=wanted)
        if newest in state.wanted[node] and state.recorded[node] < newest:
            yield f"{name} records run {newest}", state._replace(recorded=put(state.recorded, node, newest))
    if state.recorded[0] == state.recorded[1] > state.manifest:
        yield f"the manifest of run {state.recorded[0]} is written", state._replace(manifest=state.recorded[0])


def time_passes(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Yields the steps that agents take after a long wait, when no other step is left."""
    if not rules.give_up or next(work(state, rules), None):
        return
    for node, name in enumerate("AB"):
        newest = max(state.held[node], default=0)
        if (
            newest in state.wanted[node]
            and state.recorded[node] == newest != state.manifest
            and newest not in state.given_up[node]
        ):
            given_up = put(state.given_up, node, state.given_up[node] | {newest})
            yield f"{name} gives run {newest} up", state._replace(given_up=given_up)


def events(state: State) -> Iterator[tuple[str, State]]:
    """Yields events from outside: deaths, new runs and requests."""
    for node, name in enumerate("AB"):
        if state.run not in state.held[node] and not (state.died and state.run == 1):
            own = frozenset({state.run})
            yield (
                f"{name} captures in run {state.run}",
                state._replace(
                    held=put(state.held, node, state.held[node] | own),
                    ever=put(state.ever, node, state.ever[node] | own),
                ),
            )
        newest = max(state.held[node], default=0)
        if not state.asked and newest in state.adopted[node] and newest not in state.wanted[node]:
            wanted = put(state.wanted, node, state.wanted[node] | {newest})
            yield f"somebody on {name} flushes", state._replace(wanted=wanted, asked=True)
        if not state.died:
            nothing: Runs = frozenset()
            yield (
                f"node {name} dies",
                state._replace(
                    held=put(state.held, node, nothing),
                    adopted=put(state.adopted, node, nothing),
                    wanted=put(state.wanted, node, nothing),
                    seen_captured=put(state.seen_captured, node, 0),
                    seen_committed=put(state.seen_committed, node, None),
                    died=True,
                ),
            )
    if state.run == 1:
        yield "the job is killed and started again", state._replace(run=2)


def broken(state: State, rules: Rules) -> str | None:
    """Returns the broken promise. None: all hold."""
    for node, name in enumerate("AB"):
        if not state.adopted[node] <= state.ever[1 - node]:
            return f"{name} calls run {max(state.adopted[node])} committed, and the other node never captured it"
    if next(work(state, rules), None):
        return None
    if not next(time_passes(state, rules), None):
        for node, name in enumerate("AB"):
            newest = max(state.held[node], default=0)
            if newest in state.wanted[node] and newest not in state.given_up[node] and state.manifest != newest:
                return f"{name} wants run {newest} to be durable, nothing is left to do, and it waits for ever"
    if not all(state.run in held for held in state.held):
        return None
    if not all(state.run in adopted for adopted in state.adopted):
        return f"both hold run {state.run}, nothing is left to do, and not both have committed it"
    wanted = [state.run in one for one in state.wanted]
    if any(wanted) and not (all(wanted) and state.manifest == state.run):
        return f"run {state.run} is wanted by {wanted}, nothing is left to do, and it is not durable"
    return None


def explore(rules: Rules) -> tuple[int, str | None, list[str]]:
    """Explores every reachable state. Returns (number of states, first broken promise or None, the steps that lead to it)."""
    return search.explore(
        State(),
        lambda state: chain(work(state, rules), time_passes(state, rules), events(state)),
        lambda state: broken(state, rules),
        mirrored,
    )
