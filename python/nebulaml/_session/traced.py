"""Shows calls of the program as ranges in a running PyTorch profiler, on the thread that makes the call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

__all__ = ["PREFIX", "traced"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

PREFIX = "nebula: "  # of the names of the ranges


def traced(verb: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorates a method: each call becomes a range "nebula: <verb> <tag> <name>". Without a running profiler, a call costs one check."""

    def wrap(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, /, *arguments: P.args, **named: P.kwargs) -> R:
            autograd = getattr(sys.modules.get("torch"), "autograd", None)  # None: the program has not imported torch, or is importing it
            if autograd is None or not autograd._profiler_enabled():
                return method(self, *arguments, **named)
            words = [verb, str(getattr(self, "tag", "")), *(one for one in arguments[:1] if isinstance(one, str))]
            with autograd.profiler.record_function(PREFIX + " ".join(filter(None, words))):
                return method(self, *arguments, **named)

        return call

    return wrap
