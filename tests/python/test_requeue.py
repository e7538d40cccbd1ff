"""Stories of a job that moves between nodes: what each node loads is what the model allows (tests/campaign/requeue.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rivals
from nodes import Node
from requeue import InProcess, explain, judge, shrink, write
from requeue_real import Directories, Objects, Real, Shares, ways_here

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "integration"))
from nfs_client import built  # noqa: E402
from store_servers import shared  # noqa: E402

LONG = bool(os.environ.get("NEBULA_TEST_NIGHTLY"))
SHORT_STORIES = 10_000 if LONG else 60
RIVAL_STORIES = 5_000 if LONG else 20
REAL_STORIES = {"directories": 180, "nfs": 60, "s3": 60} if LONG else {"directories": 1, "nfs": 1, "s3": 1}
STORIES = sorted((ROOT / "tests" / "campaign" / "stories").glob("*/*"))

pytestmark = pytest.mark.timeout(14400 if LONG else 300)


@pytest.fixture(params=["file", "mem", "late"])
def player(request: pytest.FixtureRequest) -> Iterator[InProcess]:
    found = [path for path in ROOT.glob("build*/tests/campaign/requeue-player") if "san" not in path.parts[-4]]
    if not found:
        pytest.skip("requeue-player is not built: scripts/build.sh build")
    player = InProcess(max(found, key=lambda path: path.stat().st_mtime), request.param)
    yield player
    player.close()


def test_no_node_loads_an_older_a_mixed_or_a_removed_version_in_short_stories(player):
    for seed in range(SHORT_STORIES):
        story = write(seed, length=14 if seed % 10 else 40, faults=player.faults)
        if judge(story, player.play(story)):
            shorter = shrink(story, lambda one: judge(one, player.play(one)) is not None)
            pytest.fail(f"story {seed}, of which this is left:\n{explain(shorter, player.play(shorter))}")


# fault (Storage): Two runs of a job live at the same time, on two nodes, and write the same tags.
# result: A run replaces only versions of runs after which it came. Its other versions give way. No tag is a mixture, and retention leaves the
# versions of the other run.
def test_runs_that_live_at_the_same_time_mix_and_remove_nothing_of_each_other(player):
    for seed in range(RIVAL_STORIES):
        story = rivals.write(seed)
        if rivals.judge(story, player.play(story)):
            shorter = rivals.shrink(story, lambda one: rivals.judge(one, player.play(one)) is not None)
            pytest.fail(f"story {seed}, of which this is left:\n{rivals.explain(shorter, player.play(shorter))}")


@pytest.mark.parametrize(("is_persisted", "answer"), [(False, "3"), (False, "7"), (True, "7"), (True, "3")])
def test_a_first_writing_is_right_until_the_second_is_known_to_be_durable(is_persisted, answer):
    """The first version of an agent is due at once, so it may be durable before the same run writes its tag again and is killed."""
    story = ["way manager", "run r 0 A 1", "save global_step2 x=3", "save global_step2 x=7", *(["persist"] if is_persisted else []), "kill"]
    answers = ["ok"] * 4 + (["global_step2"] if is_persisted else []) + ["ok"]
    problem = judge([*story, "node 1", "run s 0 A 1", "newest"], [*answers, "ok", "ok", f"global_step2 0 x={answer}"], has_threads=True)
    assert (problem is not None) == (is_persisted and answer == "3")


def test_a_story_that_asks_a_manager_for_its_steps_keeps_the_manager():
    assert shrink(["way manager", "run r 0 A 1", "save global_step1 x=1", "steps"], lambda story: "steps" in story) == ["way manager", "run r 0 A 1", "steps"]


@pytest.fixture
def real(place: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Real]]:
    """Makes a player of real stories, with storage of this kind."""
    shares: list[Shares] = []

    def storage_of(kind: str) -> Directories | Objects | Shares:
        if kind == "directories":
            if os.geteuid() != 0:
                pytest.skip("mounting needs root")
            return Directories(place.root)
        if kind == "s3":
            for name, value in shared().variables("s3").items():
                monkeypatch.setenv(name, value)
            return Objects(lambda: shared().new_path("s3"), shared().process("s3"))
        program = built("nfs_fuse")
        if program is None or not os.access("/dev/fuse", os.W_OK):
            pytest.skip("tests/servers/nfs_fuse.c was not built, or /dev/fuse is not there")
        shares.append(Shares(program, place.root))
        return shares[-1]

    yield lambda kind: Real(storage_of(kind), lambda name: Node(place, name, monkeypatch), place.root / "files")
    for one in shares:
        one.close()


IN_SHORT = pytest.mark.nightly("test_no_node_loads_an_older_a_mixed_or_a_removed_version_in_short_stories")


@pytest.mark.parametrize("kind", ["directories", "nfs", pytest.param("s3", marks=IN_SHORT)])
def test_no_node_loads_an_older_a_mixed_or_a_removed_version_in_stories_of_real_trainers(real, kind):
    player, wrong = real(kind), []
    ways = ways_here() if kind == "directories" else ["api", "manager"]
    for seed in range(REAL_STORIES[kind]):
        story = write(seed, length=10, faults=player.faults, is_left=False, way=ways[seed % len(ways)])
        answers = player.play(story)
        if LONG and judge(story, answers, has_threads=True):
            story = shrink(story, lambda one: judge(one, player.play(one), has_threads=True) is not None)
            answers = player.play(story)
        if judge(story, answers, has_threads=True):
            wrong.append(f"story {seed}:\n{explain(story, answers, has_threads=True)}")
    assert not wrong, f"{len(wrong)} of {REAL_STORIES[kind]} stories\n" + "\n".join(wrong)


# fault: as a_file_appears_although_a_later_writing_that_has_carried_it_over_was_durable_first
# fault: as test_a_path_that_has_lost_its_mount_is_named_and_memory_serves
@pytest.mark.parametrize("story", [pytest.param(path, marks=[pytest.mark.nightly] if "lightning" in path.name else [], id=path.name) for path in STORIES])
def test_a_story_that_once_went_wrong_goes_right(real, story):
    commands = story.read_text().splitlines()
    answers = real(story.parent.name).play(commands)
    assert judge(commands, answers, has_threads=True) is None, explain(commands, answers, has_threads=True)
