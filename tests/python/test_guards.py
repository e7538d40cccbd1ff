"""Wrong uses through a framework that would otherwise fail silently. The framework itself is not needed."""

from __future__ import annotations

import sys
import types

import nebulaml
import pytest
from nebulaml.errors import NebulaConfigError
from nebulaml.integrations import guards

BROKEN = ["0.17.1", "0.18.3", "0.18.3+cu121", "0.18.3.post1", "0.18.2rc1", "0.17.1.dev0+g1a2b", "0.18"]
SOUND = ["0.17.0", "0.18.4", "0.18.4+cu121", "0.18.4rc1", "0.19.0rc1", "0.19.0.dev3", "v0.19.2", "0.19", "1.0", "", "unknown"]


@pytest.fixture
def deepspeed(monkeypatch):
    module = types.ModuleType("deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    monkeypatch.setitem(sys.modules, guards.STOCK_ENGINE, types.ModuleType(guards.STOCK_ENGINE))
    return module


@pytest.mark.parametrize("version", BROKEN)
def test_a_deepspeed_that_cannot_commit_is_refused_however_its_version_ends(deepspeed, version):
    deepspeed.__version__ = version
    with pytest.raises(NebulaConfigError, match=r"install deepspeed 0\.18\.4 or later"):
        nebulaml.init()


@pytest.mark.parametrize("version", SOUND)
def test_other_versions_of_deepspeed_and_unreadable_ones_are_accepted(deepspeed, version):
    deepspeed.__version__ = version
    nebulaml.init()


def test_a_versions_numbers_are_those_that_it_begins_with():
    assert guards.numbers_of("0.19.0rc1") == (0, 19, 0) and guards.numbers_of("0.18.14+cu121") == (0, 18, 14)
    assert guards.numbers_of("0.19") == (0, 19, 0) and guards.numbers_of("unknown") is None
