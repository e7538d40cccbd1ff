"""Ranks on several nodes: when a version is complete, which agent writes the commit, and how incomplete versions end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from world_nodes import ALL_RANKS, OPEN, RankFailed, RankProcess, World, a_world, together, until
from world_rank import content

TWO = {"a": [0, 1], "b": [2]}


@pytest.fixture
def world() -> Iterator[World]:
    with a_world(NEBULA_QUIET_S="2", NEBULA_TAKEOVER_S="2") as one:
        yield one


@pytest.fixture
def patient() -> Iterator[World]:
    """Ranks take turns, and an open-ended version waits for each of them, also on a slow machine."""
    with a_world(NEBULA_QUIET_S="8", NEBULA_TAKEOVER_S="2") as one:
        yield one


def digest(tag: str, rank: int, index: int = 0, size: int = 10_000, writing: str = "") -> str:
    return hashlib.sha256(content(tag, rank, index, size, writing)).hexdigest()


def test_a_version_of_two_nodes_is_complete_when_both_have_captured_and_then_durable(world):
    ranks = world.start(TWO, "r1")
    for rank in ranks[:2]:
        rank.ask("save", "global_step1", ALL_RANKS, 1, 10_000)
    with pytest.raises(RankFailed, match="Timeout"):
        ranks[0].ask("wait", "global_step1", "committed", 0.5)
    assert "rank 2 of 3" in ranks[0].ask("report", "global_step1")["error"]
    ranks[2].ask("save", "global_step1", ALL_RANKS, 1, 10_000)
    together(ranks, "wait", "global_step1", "durable", 60)
    manifest = world.manifest("global_step1")
    assert sorted(record["rank"] for record in manifest["records"]) == [0, 2]  # one for each node, named after its lowest rank
    assert len({rank.ask("latest")["sequence"] for rank in ranks}) == 1
    # Every rank reads every file, also those that were never in its node's memory.
    for rank in ranks:
        assert rank.ask("load", "global_step1", ["r0-0.bin", "r2-0.bin"]) == {
            "r0-0.bin": digest("global_step1", 0),
            "r2-0.bin": digest("global_step1", 2),
        }
    assert not list((world.storage / "global_step1" / ".nebula").glob("captured-*"))


def test_ranks_may_save_nothing_or_several_files(world):
    ranks = world.start(TWO, "r1")
    for rank, files in zip(ranks, (3, 0, 1), strict=True):
        rank.ask("save", "mixed", ALL_RANKS, files, 500)
    together(ranks, "wait", "mixed", "durable", 60)
    assert sorted(file["name"] for file in world.manifest("mixed")["files"]) == [
        "r0-0.bin",
        "r0-1.bin",
        "r0-2.bin",
        "r2-0.bin",
    ]


def test_a_number_of_files_is_counted_over_all_nodes(world):
    ranks = world.start(TWO, "r1")
    ranks[2].ask("save", "counted", 3, 1, 500)
    ranks[1].ask("save", "counted", 3, 1, 500)
    with pytest.raises(RankFailed, match="Timeout"):
        ranks[2].ask("wait", "counted", "committed", 0.3)
    ranks[1].ask("save", "counted", 3, 2, 500)
    for rank in ranks[1:]:
        rank.ask("wait", "counted", "durable", 60)
    assert len(world.manifest("counted")["files"]) == 3


def test_an_open_ended_version_does_not_wait_for_ever_for_ranks_that_never_begin(world):
    ranks = world.start(TWO, "r1")
    ranks[0].ask("save", "open", OPEN, 1, 500)
    ranks[0].ask("wait", "open", "durable", 60)
    assert [file["rank"] for file in world.manifest("open")["files"]] == [0]


@pytest.mark.parametrize("lost", [False, pytest.param(True, marks=pytest.mark.nightly("test_a_save_that_came_too_late_for_an_open_ended_version_is_not_mixed_with_the_next_writing"))])
def test_a_save_that_came_too_late_for_an_open_ended_version_is_not_mixed_with_the_next_writing(patient, lost):
    ranks = patient.start({"a": [0], "b": [1]}, "r1")
    for rank in ranks:
        rank.ask("save", "last", OPEN, 1, 10_000, "first")
    together(ranks, "wait", "last", "durable", 60)
    ranks[0].ask("save", "last", OPEN, 1, 10_000, "second")
    ranks[0].ask("wait", "last", "durable", 60)
    if lost:  # its next agent finds in storage the writing that its rank has no part in
        patient.lose_memory("b")
        assert ranks[1].ask("find", "last")
    ranks[1].ask("save", "last", OPEN, 1, 10_000, "second")
    ranks[0].ask("save", "last", OPEN, 1, 10_000, "third")
    with pytest.raises(RankFailed, match="came too late"):
        ranks[1].ask("wait", "last", "durable", 60)
    ranks[1].ask("save", "last", OPEN, 1, 10_000, "third")
    together(ranks, "wait", "last", "durable", 60)
    names = {f"r{rank}-0.bin": digest("last", rank, writing="third") for rank in range(2)}
    assert ranks[0].ask("load", "last", list(names)) == names


def test_a_tag_written_twice_is_two_versions_on_all_nodes(world):
    ranks = world.start(TWO, "r1")
    for turn in ("first", "second"):
        for rank in ranks:
            rank.ask("save", "last", ALL_RANKS, 1 if turn == "first" or rank.rank else 0, 10_000, turn)
        together(ranks, "wait", "last", "durable", 60)
    manifest = world.manifest("last")
    own = {file["name"]: manifest["records"][file["record"]]["sequence"] == manifest["sequence"] for file in manifest["files"]}
    assert own == {"r0-0.bin": False, "r1-0.bin": True, "r2-0.bin": True}
    assert ranks[2].ask("load", "last", ["r0-0.bin", "r1-0.bin"]) == {
        "r0-0.bin": digest("last", 0, writing="first"),
        "r1-0.bin": digest("last", 1, writing="second"),
    }


@pytest.mark.parametrize("nodes", [pytest.param({"a": [0, 1]}, marks=pytest.mark.nightly("test_open_versions_of_a_killed_run_are_not_mixed_with_those_of_the_next_run")), {"a": [0, 1], "b": [2, 3]}])
def test_open_versions_of_a_killed_run_are_not_mixed_with_those_of_the_next_run(world, nodes):
    ranks = world.start(nodes, "r1")
    tag, last = "global_step1", len(ranks) - 1
    for rank in ranks[:1] + ranks[2:]:  # not rank 1
        rank.ask("save", tag, ALL_RANKS, 1, 10_000, "r1")
    world.kill_agents()
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.end()
    again = world.start(nodes, "r2")  # before the agent knows that they are gone
    for rank in [again[1], again[0], *again[2:]]:
        rank.ask("save", tag, ALL_RANKS, 1, 10_000, "r2")
    together(again, "wait", tag, "durable", 60)
    names = {f"r{rank}-0.bin": digest(tag, rank, writing="r2") for rank in range(last + 1)}
    for rank in again:
        assert rank.ask("load", tag, list(names)) == names


def test_a_version_that_a_rank_never_commits_fails_when_a_newer_one_is_complete_and_leaves_nothing(world):
    ranks = world.start(TWO, "r1")
    for rank in ranks[:2]:
        rank.ask("save", "global_step1", ALL_RANKS, 1, 500)
    until(lambda: any((world.storage / "global_step1" / ".nebula").glob("captured-*-00000-*")))
    for rank in ranks:
        rank.ask("save", "global_step2", ALL_RANKS, 1, 500)
    together(ranks, "wait", "global_step2", "durable", 60)
    until(lambda: ranks[0].ask("report", "global_step1")["state"] == "failed")
    error = ranks[0].ask("report", "global_step1")["error"]
    assert "rank 2 of 3" in error and "global_step2" in error
    until(lambda: not (world.storage / "global_step1").exists(), what="its documents' removal")


def test_runs_are_never_mixed(world):
    first = world.start(TWO, "r1")
    for rank in first[:2]:
        rank.ask("save", "global_step1", ALL_RANKS, 1, 10_000, "run 1")
    until(lambda: any((world.storage / "global_step1" / ".nebula").glob("captured-*-00000-*")))
    for rank in first:
        rank.kill()
        rank.end()
    second = world.start(TWO, "r2")
    second[2].ask("save", "global_step1", ALL_RANKS, 1, 10_000, "run 2")
    with pytest.raises(RankFailed, match="Timeout"):
        second[2].ask("wait", "global_step1", "committed", 1)
    for rank in second[:2]:
        rank.ask("save", "global_step1", ALL_RANKS, 1, 10_000, "run 2")
    together(second, "wait", "global_step1", "durable", 60)
    assert second[2].ask("load", "global_step1", ["r0-0.bin"]) == {
        "r0-0.bin": digest("global_step1", 0, writing="run 2")
    }


def test_an_agent_that_dies_between_capturing_and_committing_is_replaced_by_one_that_goes_on(world):
    ranks = world.start(TWO, "r1")
    for rank in ranks[:2]:
        rank.ask("save", "global_step1", ALL_RANKS, 1, 10_000)
    world.kill_agents("a")
    ranks[2].ask("save", "global_step1", ALL_RANKS, 1, 10_000)
    for rank in ranks[:2]:
        rank.ask("versions")  # finds, and starts, the new agent
    together(ranks, "wait", "global_step1", "durable", 60)


def test_a_rank_that_begins_after_its_node_has_announced_is_not_spoken_for_before_it_has_captured(world):
    early = world.start({"a": [0], "b": [2]}, "r1", world=3)
    for rank in early:
        rank.ask("save", "global_step1", ALL_RANKS, 1, 10_000)
    until(lambda: any((world.storage / "global_step1" / ".nebula").glob("captured-*-00000-*")))
    (late,) = world.start({"a": [1]}, "r1", world=3)
    late.ask("save", "global_step1", ALL_RANKS, 1, 10_000, "", False)
    with pytest.raises(RankFailed, match="Timeout"):
        early[0].ask("wait", "global_step1", "committed", 1.5)
    late.ask("save", "global_step1", ALL_RANKS, 2, 10_000)
    together([*early, late], "wait", "global_step1", "durable", 60)
    assert len(world.manifest("global_step1")["files"]) == 4


def test_another_agent_commits_when_the_one_of_rank_0_is_gone(world):
    ranks = world.start({"a": [0], "b": [1]}, "r1")
    ranks[0].ask("save", "global_step1", ALL_RANKS, 1, 10_000)
    until(lambda: any((world.storage / "global_step1" / ".nebula").glob("captured-*-00000-*")))
    world.kill_agents("a")
    ranks[0].kill()
    ranks[0].end()
    ranks[1].ask("save", "global_step1", ALL_RANKS, 1, 10_000)
    ranks[1].ask("wait", "global_step1", "committed", 60)


def test_with_an_interval_all_nodes_persist_the_same_versions_and_flush_by_one_is_heard_by_all(world):
    ranks = world.start(TWO, "r1", interval=1000)
    for step in range(1, 5):
        for rank in ranks:
            rank.ask("save", f"global_step{step}", ALL_RANKS, 1, 10_000)
        together(ranks, "wait", f"global_step{step}", "committed", 60)
    assert world.manifest("global_step4") is None
    ranks[1].ask("flush", 30)
    assert world.manifest("global_step4") is not None


def test_two_jobs_on_one_path_are_refused_with_both_names(world):
    one = world.start({"a": [0]}, "r1", job="gpt", world=2)
    other = world.start({"c": [0]}, "r9", job="bert", world=2)
    one[0].ask("save", "global_step1", ALL_RANKS, 1, 500)
    until(lambda: any((world.storage / "global_step1" / ".nebula").glob("captured-*-00000-*")))
    other[0].ask("save", "global_step1", ALL_RANKS, 1, 500)
    failed = until(
        lambda: next(
            (rank for rank in (one[0], other[0]) if rank.ask("report", "global_step1")["state"] == "failed"), None
        )
    )
    error = failed.ask("report", "global_step1")["error"]
    assert '"gpt"' in error and '"bert"' in error


@pytest.mark.parametrize("restarts", [pytest.param(False, marks=pytest.mark.nightly("test_a_job_that_goes_on_with_fewer_nodes_loads_what_is_whole_without_the_others")), True])
def test_a_job_that_goes_on_with_fewer_nodes_loads_what_is_whole_without_the_others(world, restarts):
    ranks = world.start({"a": [0], "b": [1]}, "r1", interval=3600)
    for tag, goal, state in (
        ("global_step1", ALL_RANKS, "durable"),
        ("global_step2", 1, "committed"),
        ("global_step3", ALL_RANKS, "committed"),
    ):
        saving = ranks[:1] if goal == 1 else ranks
        together(saving, "save", tag, goal, 1, 10_000)
        together(saving, "wait", tag, state, 30)
    world.lose_memory("b")
    if restarts:
        world.kill_agents("a")
    for rank in ranks:
        rank.kill()
        rank.end()
    (alone,) = world.start({"a": [0]}, "r2", interval=3600)
    assert alone.ask("latest")["tag"] == "global_step2", "its only file is in this node's memory"
    with pytest.raises(RankFailed, match="NotFound"):
        alone.ask("load", "global_step3", ["r0-0.bin"])
    assert sorted(file["name"] for file in alone.ask("find", "global_step1")["files"]) == ["r0-0.bin", "r1-0.bin"]


def replace_b(world: World, *states: str) -> list[RankProcess]:
    """Replaces node b after global_step1 is durable and global_step2 has reached these states."""
    ranks = world.start({"a": [0], "b": [1]}, "r1", interval=3600, replicas=1)
    for tag, reached in (("global_step1", ["durable"]), ("global_step2", states)):
        together(ranks, "save", tag, ALL_RANKS, 1, 10_000)
        for state in reached:
            together(ranks, "wait", tag, state, 30)
    world.lose_memory("b")
    for rank in ranks:
        rank.kill()
        rank.end()
    return world.start({"a": [0], "b2": [1]}, "r2", replicas=1)


def test_a_lost_node_s_share_that_only_peers_hold_delays_no_durable_version(world):
    ranks = replace_b(world, "replicated")
    assert ranks[1].ask("latest")["source"] == ["peer"]
    with pytest.raises(RankFailed, match="is only in other nodes' memory"):
        ranks[1].ask("wait", "global_step2", "durable", 60)
    together(ranks, "save", "global_step3", ALL_RANKS, 1, 10_000)
    together(ranks, "wait", "global_step3", "durable", 60)
    assert ranks[1].ask("flush", 10) == "flushed"


def test_a_lost_node_finds_all_of_what_is_durable_though_peers_hold_its_share(world):
    ranks = replace_b(world, "replicated", "durable")
    found = ranks[1].ask("latest")
    assert (found["tag"], found["state"]) == ("global_step2", "durable")
    assert sorted(file["name"] for file in found["files"]) == ["r0-0.bin", "r1-0.bin"]
    assert ranks[1].ask("wait", "global_step2", "durable", 60) == "durable"
    for rank in (0, 1):
        assert ranks[1].ask("load", "global_step2", [f"r{rank}-0.bin"]) == {f"r{rank}-0.bin": digest("global_step2", rank)}


def load_all(rank: RankProcess, tag: str, count: int, writing: str = "") -> None:
    """Loads the file of every rank, by this rank."""
    wanted = {f"r{other}-0.bin": digest(tag, other, writing=writing) for other in range(count)}
    assert rank.ask("load", tag, list(wanted)) == wanted


def listed(rank: RankProcess, tag: str) -> list[str]:
    return sorted(file["name"] for file in rank.ask("find", tag)["files"])


def rows(rank: RankProcess, tag: str) -> list[list[str]]:
    return [row["source"] for row in rank.ask("versions") if row["tag"] == tag]


@pytest.mark.parametrize("room", [pytest.param("", marks=pytest.mark.nightly("test_a_rank_loads_what_another_node_saved_from_that_node_s_memory")), "4K"])
def test_a_rank_loads_what_another_node_saved_from_that_node_s_memory(room):
    """Storage has no file of the version. The nodes have no memory for copies, so each node has only its own share."""
    with a_world(**({"NEBULA_PEER_MEMORY": room} if room else {})) as world:
        ranks = world.start(TWO, "r1", interval=3600, replicas=1)
        for tag, state in (("global_step1", "durable"), ("global_step2", "committed" if room else "replicated")):
            together(ranks, "save", tag, ALL_RANKS, 1, 10_000)
            together(ranks, "wait", tag, state, 30)
        for rank in ranks:
            load_all(rank, "global_step2", 3)
            assert rows(rank, "global_step2") == [["memory"]]
            assert listed(rank, "global_step2") == ["r0-0.bin", "r1-0.bin", "r2-0.bin"]
        assert world.manifest("global_step2") is None
        # The tag's second writing in this run is the second on each node, even if its agent does not know the first.
        together(ranks, "save", "global_step2", ALL_RANKS, 1, 10_000, "again")
        together(ranks, "wait", "global_step2", "durable", 60)
        assert world.manifest("global_step2")["writing"] == 2
        load_all(ranks[2], "global_step2", 3, "again")


def test_a_node_whose_ranks_saved_nothing_loads_the_others_files_and_its_next_writing_is_theirs(world):
    """The node has no share in memory, so it must find the files in another way."""
    ranks = world.start(TWO, "r1", interval=3600, replicas=1)
    together(ranks, "save", "global_step1", ALL_RANKS, 1, 10_000)
    together(ranks, "wait", "global_step1", "durable", 60)
    for rank, files in zip(ranks, (1, 1, 0), strict=True):
        rank.ask("save", "global_step2", ALL_RANKS, files, 10_000)
    together(ranks, "wait", "global_step2", "committed", 60)
    wanted = {f"r{rank}-0.bin": digest("global_step2", rank) for rank in (0, 1)}
    assert ranks[2].ask("load", "global_step2", list(wanted), True) == wanted
    assert world.manifest("global_step2") is None
    together(ranks, "save", "global_step2", ALL_RANKS, 1, 10_000, "again")
    together(ranks, "wait", "global_step2", "durable", 60)
    load_all(ranks[0], "global_step2", 3, "again")


# fault (Storage): A node is lost with its memory, and the newest version is replicated, but not durable.
# result: Every rank loads every file of it, also on the node that replaces the lost one. Copies come from the nodes
# that kept them, and files of other nodes from the memory of those nodes.
@pytest.mark.nightly("test_a_rank_loads_what_another_node_saved_from_that_node_s_memory", "integration/test_replicas.py::test_a_lost_node_loads_its_newest_version_from_its_peers_memory")
def test_after_a_node_was_replaced_all_ranks_load_all_files_though_storage_has_none(world):
    """The other node's memory has copies of the files that the lost node saved, and its own files."""
    ranks = replace_b(world, "replicated")
    for rank in ranks:
        assert listed(rank, "global_step2") == ["r0-0.bin", "r1-0.bin"], "before any of them was loaded"
        load_all(rank, "global_step2", 2)
        assert len(rows(rank, "global_step2")) == 1
    assert world.manifest("global_step2") is None
    together(ranks, "save", "global_step3", ALL_RANKS, 1, 10_000)
    together(ranks, "wait", "global_step3", "durable", 60)


def test_one_node_for_the_whole_world_writes_no_document_of_its_own(world):
    ranks = world.start({"a": [0, 1]}, "r1")
    ranks[0].ask("save", "global_step1", ALL_RANKS, 1, 500)
    with pytest.raises(RankFailed, match="Timeout"):
        ranks[0].ask("wait", "global_step1", "committed", 0.3)
    assert not world.storage.exists()
    ranks[1].ask("save", "global_step1", ALL_RANKS, 1, 500)
    together(ranks, "wait", "global_step1", "durable", 60)
    assert not [
        path
        for path in (world.storage / "global_step1" / ".nebula").iterdir()
        if path.name.startswith(("capt", "comm"))
    ]


# fault: as test_a_save_after_going_back_is_the_newest_in_memory_and_in_storage
def test_a_job_of_two_nodes_that_goes_back_has_one_line_of_history_on_both(world):
    ranks = world.start(TWO, "r1")
    for step in 300, 400:
        for rank in ranks:
            rank.ask("save", f"global_step{step}", ALL_RANKS, 1, 500)
        together(ranks, "wait", f"global_step{step}", "durable", 60)
    for rank in ranks:
        rank.kill()
        rank.end()
    again = world.start(TWO, "r2")
    again[2].ask("load", "global_step300", ["r2-0.bin"])  # of one node only: its ranks say so to the others
    for step in 310, 320:
        for rank in again:
            rank.ask("save", f"global_step{step}", ALL_RANKS, 1, 500)
        together(again, "wait", f"global_step{step}", "durable", 60)
    assert {rank.ask("latest")["tag"] for rank in again} == {"global_step320"}
    lines = [world.manifest(f"global_step{step}")["line"] for step in (310, 320)]
    assert lines[0] == lines[1] and len(lines[0]) == 1
    for rank in again:
        rank.kill()
        rank.end()
    world.kill_agents()
    third = world.start(TWO, "r3")
    assert {rank.ask("latest")["tag"] for rank in third} == {"global_step320"}
    assert all([one["tag"] for one in rank.ask("versions") if one["abandoned"]] == ["global_step400"] for rank in third)
