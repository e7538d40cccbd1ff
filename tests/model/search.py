"""Exhaustive search: every state that the steps of a model reach, breadth first, so that a failure has the shortest path."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

State = TypeVar("State", bound=Hashable)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Looks for no cycles, which no state is part of: that would take a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@uncollected()
def explore(
    first: State,
    steps: Callable[[State], Iterator[tuple[str, State]]],
    broken: Callable[[State], str | None],
    mirrored: Callable[[State], State] | None = None,
) -> tuple[int, str | None, list[str]]:
    """Returns (number of states, first broken promise or None, the steps that lead to it).

    mirrored: swaps two processes that have the same steps and promises. The search then takes one of two states that it makes of each other.
    """
    before: dict[State, tuple[State, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        problem = broken(state)
        if problem:
            path, at = [], state
            while (came := before[at]) is not None:
                at, step = came
                path.append(step)
            return len(before), problem, path[::-1]
        for name, after in steps(state):
            if after not in before and (mirrored is None or mirrored(after) not in before):
                before[after] = (state, name)
                queue.append(after)
    return len(before), None, []
