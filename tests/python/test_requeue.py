"""Random stories of a job that moves between nodes: what each node loads is what the model allows (tests/campaign/requeue.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import Node
from requeue import InProcess, explain, judge, shrink, write
from requeue_real import Real

ROOT = Path(__file__).resolve().parents[2]
LONG = bool(os.environ.get("NEBULA_TEST_NIGHTLY"))
SHORT_STORIES, REAL_STORIES = (10_000, 300) if LONG else (600, 6)


@pytest.fixture(params=["file", "mem"])
def player(request: pytest.FixtureRequest) -> Iterator[InProcess]:
    built = [path for path in ROOT.glob("build*/tests/campaign/requeue-player") if "san" not in path.parts[-4]]
    if not built:
        pytest.skip("requeue-player is not built: scripts/build.sh build")
    player = InProcess(max(built, key=lambda path: path.stat().st_mtime), request.param)
    yield player
    player.close()


def test_no_node_loads_an_older_a_mixed_or_a_removed_version_in_short_stories(player):
    for seed in range(SHORT_STORIES):
        story = write(seed, faults=player.faults)
        if judge(story, player.play(story)):
            shorter = shrink(story, lambda one: judge(one, player.play(one)) is not None)
            pytest.fail(f"story {seed}, of which this is left:\n{explain(shorter, player.play(shorter))}")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.timeout(7200 if LONG else 300)
def test_no_node_loads_an_older_a_mixed_or_a_removed_version_in_stories_of_real_trainers(place: Any, monkeypatch):
    player = Real(place.storage, lambda name: Node(place, name, monkeypatch))
    for seed in range(REAL_STORIES):
        story = write(seed, length=10, faults=(-1,), is_left=False)
        answers = player.play(story)
        problem = judge(story, answers, has_threads=True)
        assert problem is None, f"story {seed}:\n{explain(story, answers, has_threads=True)}"
