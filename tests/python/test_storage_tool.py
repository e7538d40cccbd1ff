"""A manager's calls of the `nebula` command: neither the command line nor the errors show a URL, which can hold a secret."""

from __future__ import annotations

import os

import pytest
from nebulaml._session import locate
from nebulaml.errors import NebulaUnavailable
from nebulaml.manager import pins, storage_tool


@pytest.fixture
def watched(place, monkeypatch):
    """Returns a command that logs its arguments and calls the real one."""
    seen, script = place.root / "seen", place.root / "watched"
    real = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {seen}\nexec {real} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("NEBULA_AGENT_PATH", str(script))
    return seen


def test_a_command_line_does_not_tell_the_path(place, watched):
    path = str(place.storage)
    pins.add(path, "global_step1", "the best")
    assert pins.read(path) == {"global_step1": "the best"}
    pins.remove(path, "global_step1")
    assert pins.read(path) == {}
    told = watched.read_text()
    assert len(told.splitlines()) == 4 and path not in told


def test_a_command_that_does_not_end_is_told_without_the_path(place, monkeypatch):
    script = place.root / "stuck"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setenv("NEBULA_AGENT_PATH", str(script))
    monkeypatch.setattr(storage_tool, "LIMIT_S", 0.5)
    with pytest.raises(NebulaUnavailable) as failure:
        pins.read(f"az://account/container/{place.root.name}?sig=secret")
    assert "sig=secret" not in str(failure.value)
