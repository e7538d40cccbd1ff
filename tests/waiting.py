"""Waits for conditions that other processes bring about."""

import re
import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], object], seconds: float = 60, what: str = "it") -> object:
    """Calls the condition until it returns a true value, and returns that. Fails after so many seconds, in which a call counts for a second at most: while
    a virtual machine stands still, its clock goes on."""
    left, begun = float(seconds), time.monotonic()
    while not (value := condition()):
        now = time.monotonic()
        left, begun = left - min(now - begun, 1.0), now
        assert left > 0, f"{what} did not come about in {seconds} s"
        time.sleep(0.005)
    return value


def until_refused(checkpoint: Any, words: str) -> str:
    """Waits until the checkpoint is not durable for a reason that has these words, a regular expression. Returns the message."""
    from nebulaml import NebulaError

    def reason() -> str | None:
        try:
            checkpoint.wait("durable", 0.5)
        except NebulaError as failure:
            return str(failure) if re.search(words, str(failure)) else None
        raise AssertionError("it is durable")

    return str(until(reason, what=repr(words)))
