"""Calls that appear as ranges in a PyTorch profiler that runs, on the thread of the program that makes them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

__all__ = ["PREFIX", "traced"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

PREFIX = "nebula: "  # of the ranges' names


def traced(verb: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """For a method. Without a profiler that runs it costs one look."""

    def wrap(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, /, *arguments: P.args, **named: P.kwargs) -> R:
            autograd = getattr(sys.modules.get("torch"), "autograd", None)  # None: nothing has imported torch, or it is half imported
            if autograd is None or not autograd._profiler_enabled():
                return method(self, *arguments, **named)
            words = [verb, str(getattr(self, "tag", "")), *(one for one in arguments[:1] if isinstance(one, str))]
            with autograd.profiler.record_function(PREFIX + " ".join(filter(None, words))):
                return method(self, *arguments, **named)

        return call

    return wrap
