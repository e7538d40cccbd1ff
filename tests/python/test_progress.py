"""The line on the terminal of a call that waits: shown after a second, gone when the call returns, and nowhere but on a terminal."""

from __future__ import annotations

import io
import re
import sys
import threading
import time

import pytest
from nebulaml._session import engine, progress
from waiting import until


@pytest.mark.parametrize("variables", [{"NEBULA_PROGRESS": "0"}, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}])
def test_one_rank_of_a_node_shows_it_unless_it_is_turned_off(place, monkeypatch, variables):
    monkeypatch.setattr(sys, "stderr", Terminal())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(progress, "AFTER_S", 0.01)
    with progress.waiting(engine.default, "looking for something"):
        time.sleep(0.1)
    assert not sys.stderr.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_short_call_shows_nothing_and_a_program_without_a_terminal_neither(place, monkeypatch):
    for terminal in (Terminal(), io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress.waiting(engine.default, "looking for something"):
            pass
        assert terminal is None or not terminal.getvalue()


def test_a_wait_without_bytes_shows_for_how_long_and_one_line_at_a_time(place, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "AFTER_S", 0.01)
    monkeypatch.setattr(progress, "REDRAW_S", 0.01)

    def fail_after_a_while():
        with progress.waiting(engine.default, "looking for a\x1b[2Jb"):
            with progress.waiting(engine.default, "an inner call"):
                until(sys.stderr.getvalue, what="a line")
            raise KeyError

    with pytest.raises(KeyError):
        fail_after_a_while()
    _, *lines, last = sys.stderr.getvalue().split("\r\033[K")
    assert not last and all(re.fullmatch(r"nebula: looking for a\\x1b\[2Jb  \d+ s", line) for line in lines), lines
    assert not [thread for thread in threading.enumerate() if thread.name == "nebula-progress"]


@pytest.mark.parametrize(
    ("seconds", "first", "now", "text"),
    [
        (2, (0, 100 << 20), (50 << 20, 100 << 20), "50 %  50.0 MiB of 100.0 MiB  25.0 MiB/s  2 s left"),
        (2, (40 << 20, 100 << 20), (50 << 20, 100 << 20), "50 %  50.0 MiB of 100.0 MiB  5.0 MiB/s  10 s left"),
        (4, (0, 0), (8 << 20, 0), "8.0 MiB  2.0 MiB/s"),
        (2, (0, 4 << 20), (5 << 20, 4 << 20), "100 %  4.0 MiB of 4.0 MiB  2.5 MiB/s"),
        (3, (0, 4 << 20), (0, 4 << 20), "3 s"),
        (3, None, (1, 2), "3 s"),
    ],
)
def test_the_line(seconds, first, now, text):
    assert progress._line("loading m.pt", seconds, first, now) == f"nebula: loading m.pt  {text}"
