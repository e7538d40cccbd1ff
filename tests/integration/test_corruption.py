"""Damages what Nebula has stored (tests/campaign/corruption.py), in a short form; the nightly run has more trials."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nebulaml as nm
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "campaign"))

import copies  # noqa: E402
import corruption  # noqa: E402
from power import loaded  # noqa: E402

IS_LONG = os.environ.get("NEBULA_TEST_NIGHTLY") == "1"
TRIALS = {"storage": (10, 1000), "memory": (3, 300), "gs": (8, 300), "s3": (4, 300), "copies": (4, 200)}


# fault (Storage): A file, an object, a version in memory or a copy on another node is damaged anywhere, is swapped, or comes from an older backup; or
# bytes between two nodes change.
# result: A load gives the exact values of a version, or an error that names it. The next save becomes durable.
@pytest.mark.timeout(3600 if IS_LONG else 300)
@pytest.mark.parametrize("tier", [pytest.param(tier, marks=() if tier in ("storage", "memory") else pytest.mark.nightly) for tier in TRIALS])
def test_after_any_damage_a_load_gives_exact_values_or_an_error_that_names_the_version(tier, capsys):
    before = dict(os.environ)
    try:
        assert not corruption.campaign(tier, TRIALS[tier][IS_LONG], 7), capsys.readouterr().out
    finally:  # keys of an object store
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


# fault (Memory): Bytes of the only copy of the newest version have changed in another node's memory.
# result: The load fails once, and names the version and the cure. That node drops the copy, so the next search finds an older version.
def test_a_copy_that_is_damaged_in_another_nodes_memory_fails_one_load_and_is_not_found_again(tmp_path):
    def judge(path: Path, _: str) -> list[str]:
        nm.init(str(path), 0, 16, replicas=1)
        said = []
        for _look in range(2):
            found = nm.get_latest_checkpoint()
            try:
                said.append(f"{found.tag} {loaded(found) in corruption.DIGESTS[found.tag]}")
            except nm.NebulaCorrupt as failure:
                said.append(str(failure))
        return said

    newest = list(corruption.WRITINGS["best"][1].values())  # it alone is damaged
    _, said = copies.trial(
        tmp_path, 1, newest, lambda path: corruption.save(path, "replicated", replicas=1), judge, where="memory"
    )
    assert "damaged in the memory of the node" in said[0] and "'best'" in said[0].replace('"', "'")
    assert said[1] == "global_step3 True"


# fault (Memory): A connection breaks while a node that has lost its memory asks another one for its copies.
# result: The node asks once more, and loads the newest version.
@pytest.mark.parametrize("at", [200, 1500, 2500, 4000])
def test_a_connection_that_breaks_once_does_not_cost_the_copies_of_a_node(tmp_path, at):
    def judge(path: Path, _: str) -> list[object]:
        nm.init(str(path), 0, 16, replicas=1)
        found = nm.get_latest_checkpoint()
        return [found.tag, loaded(found) == corruption.DIGESTS["best"][1]]

    _, said = copies.trial(tmp_path, 1, [b"any"], lambda path: corruption.save(path, "replicated", replicas=1), judge, where="fetching", at=at)
    assert said == ["best", True]
