"""A job moves between two nodes whose agents live on. What a node remembers of a tag, or of the newest step, is compared with storage."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nodes import Node

START = """
nm.init(sys.argv[1], 0, 2, on_error="raise", **eval(sys.argv[2]))
def save(tag, **files):
    with nm.Checkpoint(tag) as checkpoint:
        for name, text in files.items():
            checkpoint.save_bytes(name, text.encode())
    checkpoint.wait("durable", 60)
def has(checkpoint):
    return " ".join(f"{name}={bytes(checkpoint.read_bytes(name)).decode()}" for name in sorted(checkpoint.files)) if checkpoint else "none"
def newest():
    return nm.get_latest_checkpoint()
def by_tag(tag):
    return nm.get_checkpoint(tag)
"""


class Turns(Node):
    def run(self, code: str, **settings: object) -> list[str]:
        """A run of the job on this node: its lines."""
        with self.here():
            return self.place.run(START + code, self.storage, settings).splitlines()


@pytest.fixture
def nodes(place: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Turns]]:
    made: dict[str, Turns] = {}

    def node(name: str) -> Turns:
        if name not in made:
            made[name] = Turns(place, name, monkeypatch)
        return made[name]

    yield node
    for one in made.values():
        one.place.close()


# fault (Storage): A job moves to another node, writes a tag again, and comes back to a node whose memory has the
# earlier writing.
# result: Each node loads the last writing, by tag, as the newest, and through an object that the program made for the
# tag. Files that a save keeps are of that writing. The earlier one leaves memory.
@pytest.mark.parametrize("tag", ["last", pytest.param("global_step5", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("agent", ["lives on", pytest.param("was killed", marks=pytest.mark.nightly("test_a_tag_has_the_bytes_of_its_last_writing_on_each_node_that_a_job_comes_back_to"))])
def test_a_tag_has_the_bytes_of_its_last_writing_on_each_node_that_a_job_comes_back_to(nodes, tag, agent):
    nodes("a").run(f"save({tag!r}, x='A')")
    assert nodes("b").run(f"say(has(newest())); save({tag!r}, x='B')") == ["x=A"]
    if agent == "was killed":
        nodes("a").place.kill_agent()
    looks = f"say(has(by_tag({tag!r}))); say(has(newest())); say(bytes(nm.Checkpoint({tag!r}).read_bytes('x')).decode())"
    assert nodes("a").run(looks) == ["x=B", "x=B", "B"]
    assert nodes("a").run(f"say(bytes(nm.Checkpoint({tag!r}).read_bytes('x')).decode())") == ["B"]
    nodes("a").forget()
    assert nodes("a").run(looks) == ["x=B", "x=B", "B"]


def test_an_object_that_only_names_a_tag_loads_what_storage_alone_has(nodes):
    nodes("a").run("save('last', x='A')")
    assert nodes("b").run("say(bytes(nm.Checkpoint('last').read_bytes('x')).decode())") == ["A"]


# fault: as test_a_tag_has_the_bytes_of_its_last_writing_on_each_node_that_a_job_comes_back_to
@pytest.mark.parametrize("look", ["by_tag('last')", *(pytest.param(look, marks=pytest.mark.nightly) for look in ("newest()", "None"))])
def test_files_that_a_save_keeps_are_those_of_the_writing_before_it_in_storage(nodes, look):
    nodes("a").run("save('last', x='A', y='A')")
    nodes("b").run("newest(); save('last', x='B', y='B')")
    nodes("a").run(f"{look}; save('last', x='C')")
    for node in "a", "b", "c":
        assert nodes(node).run("say(has(by_tag('last')))") == ["x=C y=B"]


# fault: as test_a_tag_has_the_bytes_of_its_last_writing_on_each_node_that_a_job_comes_back_to
def test_a_tag_that_was_removed_elsewhere_lends_no_files(nodes, place):
    nodes("a").run("save('last', x='A', y='A')")
    subprocess.run(["rm", "-r", str(place.storage / "last")], check=True)
    nodes("a").run("save('last', x='B')")
    for node in "a", "c":
        assert nodes(node).run("say(has(by_tag('last')))") == ["x=B"]


# fault: as a_search_that_fails_once_is_repeated_before_memory_answers
def test_steps_that_another_node_has_saved_are_the_newest_and_are_not_removed(nodes, place):
    nodes("a").run("for s in 1, 2, 3: save(f'global_step{s}', x=str(s))")
    nodes("b").run("newest(); [save(f'global_step{s}', x=str(s)) for s in (4, 5, 6)]", keep_last=3)
    assert nodes("a").run("say(has(newest())); save('global_step7', x='7')", keep_last=3) == ["x=6"]
    assert nodes("a").run("say(*(row.tag for row in nm.checkpoints() if not row.abandoned))")[0].split()[:3] == [
        "global_step7", "global_step6", "global_step5",
    ]


# fault (Storage): A storage path loses its mount, and the empty directory below shows.
# result: Reads fail as writes do, and name the path. A version in memory is loaded. `passed_over` names the failure.
# The next agent knows it, too, if it takes memory over.
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("agent", ["lives on", pytest.param("was killed", marks=pytest.mark.nightly)])
def test_a_path_that_has_lost_its_mount_is_named_and_memory_serves(nodes, place, agent):
    place.storage.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place.storage)], check=True)
    nodes("a").run("save('global_step1', x='1'); save('last', x='2')")
    subprocess.run(["umount", str(place.storage)], check=True)
    if agent == "was killed":
        nodes("a").place.kill_agent()
    found = nodes("a").run("found = newest(); say(has(found)); say(found.passed_over[0][1]); say(has(by_tag('last')))")
    assert found[0] == "x=2" and "is gone, and with it its file system" in found[1] and found[2] == "x=2"
    assert not list(place.storage.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_manager_removes_nothing_and_lists_nothing_while_its_path_cannot_be_read(nodes, place):
    place.storage.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place.storage)], check=True)
    lines = nodes("a").run("""
import subprocess
manager = nm.Manager(sys.argv[1] + "/m", save_every_steps=1, keep_last=1)
manager.save(1, {"x": 1})
manager.wait()
subprocess.run(["umount", "-l", sys.argv[1]], check=True)
try:
    say(manager.all_steps())
except nm.NebulaStorageError:
    say("cannot be read")
""")
    assert lines == ["cannot be read"]


# fault: as test_a_path_that_has_lost_its_mount_is_named_and_memory_serves
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_path_that_has_lost_its_mount_is_no_empty_path(nodes, place):
    place.storage.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place.storage)], check=True)
    lines = nodes("a").run("""
import subprocess
assert newest() is None
subprocess.run(["umount", sys.argv[1]], check=True)
for look in newest, lambda: by_tag("x"), nm.checkpoints:
    try:
        say("found", look())
    except nm.NebulaError as failure:
        say(type(failure).__name__, "is gone" in str(failure))
""")
    assert lines == ["NebulaStorageError True"] * 3


RANK = """
managers = []
def manager():
    if not managers:
        managers.append(nm.Manager(sys.argv[1]))
    return managers[0]
for line in sys.stdin:
    try:
        said = eval(line)
        say(has(said) if said is None or isinstance(said, nm.Checkpoint) else said)
    except nm.NebulaUnavailable as refusal:
        say("refused:", refusal)
"""


@pytest.fixture
def ask(nodes, monkeypatch) -> Iterator[Callable[[int, str], str]]:
    """Two ranks of a run on node b say what an expression gives on one of them."""
    ranks: list[Any] = []

    def ask(rank: int, look: str) -> str:
        while len(ranks) < 2:
            of_rank = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": len(ranks), "LOCAL_RANK": len(ranks), "NEBULA_RUN_ID": "r"}
            with nodes("b").here(), monkeypatch.context() as patch:
                for name, value in of_rank.items():
                    patch.setenv(name, str(value))
                ranks.append(nodes("b").place.trainer(START + RANK, nodes("b").storage, {}, stdin=True))
        ranks[rank].stdin.write(look + "\n")
        ranks[rank].stdin.flush()
        return str(ranks[rank].stdout.readline().strip())

    yield ask
    for rank in ranks:
        rank.stdin.close()
        assert rank.wait(60) == 0


# fault (Storage): While the ranks of one node look for a version one after the other, another node makes a newer one durable.
# result: All ranks load the version that the first of them has found, as the newest and by tag. If that is gone, a rank is refused another one.
# The steps that a manager lists are an answer for all ranks, too.
@pytest.mark.parametrize(
    ("tag", "look"),
    [
        ("global_step8", "newest()"), ("last", "by_tag('last')"),
        *(pytest.param(*one, marks=pytest.mark.nightly("test_all_ranks_of_a_node_load_the_version_that_the_first_of_them_has_found")) for one in (("last", "newest()"), ("global_step8", "by_tag('last')"))),
    ],
)  # fmt: skip
def test_all_ranks_of_a_node_load_the_version_that_the_first_of_them_has_found(nodes, ask, look, tag):
    nodes("a").run("save('last', x='A')")
    assert ask(0, look) == "x=A"
    nodes("a").run(f"newest(); save({tag!r}, x='B')")
    answers = [ask(1, look), ask(0, look), ask(1, look)]
    if tag == "last":
        assert "another rank of this node was given" in answers.pop(0)
    assert set(answers) == {"x=B" if tag == "last" else "x=A"}


# fault: as test_all_ranks_of_a_node_load_the_version_that_the_first_of_them_has_found
@pytest.mark.nightly("test_all_ranks_of_a_node_load_the_version_that_the_first_of_them_has_found")
def test_all_ranks_of_a_node_list_the_steps_that_the_first_of_them_has_listed(nodes, ask):
    nodes("a").run("save('global_step7', x='A')")
    assert ask(0, "manager().latest_step()") == "7"
    nodes("a").run("newest(); save('global_step8', x='B')")
    assert [ask(1, "manager().latest_step()"), ask(1, "manager().all_steps()"), ask(0, "manager().all_steps()")] == ["7", "[7]", "[7]"]
    assert "global_step8" in ask(1, "nm.list_checkpoints()"), "a list for people has all"


# fault: as test_all_ranks_of_a_node_load_the_version_that_the_first_of_them_has_found
@pytest.mark.nightly("test_all_ranks_of_a_node_load_the_version_that_the_first_of_them_has_found")
def test_all_ranks_of_a_node_load_one_version_of_another_path(nodes, ask):
    elsewhere = "nm.init(sys.argv[1] + '-2', 0, 2, on_error='raise'); "
    nodes("a").run(f"{elsewhere}save('global_step7', x='A')")
    look = "nm.get_latest_checkpoint(sys.argv[1] + '-2')"
    assert ask(0, look) == "x=A"
    nodes("a").run(f"{elsewhere}newest(); save('global_step8', x='B')")
    assert [ask(1, look), ask(0, look)] == ["x=A", "x=A"]


# fault: as test_all_ranks_of_a_node_load_the_version_that_the_first_of_them_has_found
@pytest.mark.nightly("test_all_ranks_of_a_node_load_the_version_that_the_first_of_them_has_found")
def test_a_rank_that_connects_when_another_one_has_left_gets_the_same_version(nodes, ask):
    nodes("a").run("save('last', x='A')")
    look = "(nm.init(sys.argv[1], 0, 2, on_error='raise'), newest(), nm._shutdown())[1].tag"
    assert {ask(0, "nm._shutdown()"), ask(1, "nm._shutdown()")} == {"none"}
    assert ask(0, look) == "last"
    nodes("a").run("newest(); save('global_step8', x='B')")
    assert ask(1, look) == "last"


def test_what_the_run_itself_has_saved_to_another_path_is_found_at_once(ask):
    look = "nm.get_latest_checkpoint(sys.argv[1] + '-2')"
    assert {ask(0, look), ask(1, look)} == {"none"}
    for rank in 0, 1:
        ask(rank, "managers.append(nm.Manager(sys.argv[1] + '-2')) or managers[-1].save(1, {'x': 1}).tag")
    for rank in 0, 1:
        assert ask(rank, f"managers[-1].wait() or ({look}).tag") == "global_step1"


# fault (Deaths): A rank makes its first checkpoint without a name later than another one, which has been completed without it, or another
# node has made one durable meanwhile.
# result: Both ranks save to checkpoints of one name: no checkpoint has the files of two steps.
@pytest.mark.nightly
def test_ranks_count_checkpoints_without_a_name_from_one_number(nodes, ask):
    nodes("a").run("save('checkpoint-4', x='A')")
    assert ask(0, "nm.Checkpoint().tag") == "checkpoint-5"
    nodes("a").run("newest(); save('checkpoint-7', x='A')")
    assert ask(1, "nm.Checkpoint().tag") == "checkpoint-5"


# fault: as test_ranks_count_checkpoints_without_a_name_from_one_number
def test_a_rank_that_comes_late_to_a_checkpoint_without_a_name_counts_as_the_first(ask):
    ask(1, "None")
    assert ask(0, "save(None, of_0='0') or newest()") == "of_0=0"
    assert ask(1, "save(None, of_1='0') or newest().tag") == "checkpoint-1"
