"""Waits for conditions that other processes bring about."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 30, what: str = "it") -> object:
    """Calls the condition until it returns a true value, and returns that. Fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come about in {seconds} s"
        time.sleep(0.005)
    return value
