"""Waiting for what other processes bring about."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 30, what: str = "it") -> object:
    """Returns what the condition gave once that counts as true; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come about in {seconds} s"
        time.sleep(0.005)
    return value
