"""Agreement: all ranks choose the same version, one that every rank can load."""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import fork_server
import nebulaml
import pytest
import torch.distributed
from nebulaml import _nebula, api
from nebulaml._session import agree, config, engine, ranks
from nebulaml.errors import NebulaConfigError, NebulaUnavailable
from nebulaml.integrations import guards
from processes import stop
from waiting import until


def version(step, sequence, tag=None):
    name = tag or f"global_step{step}"
    return {
        "tag": name, "writing": 1, "sequence": sequence, "step": step, "run": "r", "shared": True, "state": "committed", "ranks": None, "world": 1,
        "was_removed": False,
    }  # fmt: skip


def tags(versions):
    return [one["tag"] for one in versions]


def choose(inventories):
    return agree.choose([agree.Inventory.of(versions) for versions in inventories])


def refusal(inventories, path):
    return agree.refusal([agree.Inventory.of(versions) for versions in inventories], path)


def test_the_newest_that_all_hold_is_chosen_though_one_is_ahead_and_one_has_lost_its_memory():
    ahead, normal, lost = (
        [version(6, 60), version(5, 50), version(4, 40)],
        [version(5, 50), version(4, 40)],
        [version(4, 40)],
    )
    assert tags(choose([ahead, normal, normal])) == ["global_step5", "global_step4"]
    assert tags(choose([ahead, normal, lost])) == ["global_step4"]
    assert choose([ahead, normal, []]) == []


def test_the_order_of_ranks_is_that_of_storage():
    """Its rules are those of unit/store/order_test.c: here, that each fact arrives."""
    facts = [("a", 0, 5, False), ("global_step30", 0, 1, False), ("global_step9", 4, 4, False), ("global_step10", 4, 6, True), ("b", 0, 7, True)]
    assert _nebula.order(facts) == [0, 2, 1, 4, 3] and _nebula.order([]) == []
    for wrong in ([("a", 0, 5)], ["a"], [("a", "b", 5, False)], 3):
        with pytest.raises(TypeError):
            _nebula.order(wrong)


def test_ranks_begin_from_nothing_only_if_storage_has_nothing_for_any_of_them():
    stored, held = [version(5, 50) | {"state": "durable"}], [version(5, 50) | {"state": "committed"}]
    other = [version(6, 60) | {"state": "durable"}]
    assert "rank 1 finds global_step5 in storage and rank 0 does not" in refusal([[], stored], "/p")
    assert "rank 0 finds global_step5 in storage and rank 1 does not" in refusal([stored, other], "/p")
    assert not refusal([[], []], "/p") and not refusal([[], held], "/p") and not refusal([stored, stored + held], "/p")
    assert not refusal([[], [stored[0] | {"shared": False}]], None)
    lost = [[stored[0] | {"world": 3, "ranks": [rank]}] for rank in (0, 1)]  # the files in storage were removed, and node 2 with its share is gone
    assert not refusal(lost, "/p")


def test_the_newest_of_the_latest_line_is_chosen_and_what_it_abandoned_comes_last():
    inventory = [
        version(400, 40) | {"abandoned": True, "began": 0},
        version(300, 30) | {"abandoned": False, "began": 0},
        version(310, 50) | {"abandoned": False, "began": 50},
    ]
    assert tags(choose([inventory, inventory[::-1]])) == ["global_step310", "global_step300", "global_step400"]
    assert tags(choose([inventory, inventory[:2]])) == ["global_step300", "global_step400"]


def test_a_version_that_one_rank_knows_to_be_removed_is_removed_for_all():
    here, there = version(4, 40) | {"was_removed": False}, version(4, 40) | {"was_removed": True}
    assert [one["was_removed"] for one in choose([[here], [here]])] == [False]
    for first, second in ([here], [there]), ([there], [here]):
        assert [one["was_removed"] for one in choose([first, second])] == [True]
    stored = here | {"state": "durable"}
    assert [one["was_removed"] for one in choose([[stored], [there]])] == [True]


def test_a_launcher_passes_over_one_writing_of_a_tag_and_without_shared_storage_all_of_them(monkeypatch):
    monkeypatch.setenv("NEBULA_PASSED_OVER", "40 global_step4")
    older, first, second = version(3, 30), version(4, 40), version(4, 41)
    assert agree._without_poison([second, first, older]) == [second, older]
    assert agree._without_poison([second | {"shared": False}, older | {"shared": False}]) == [older | {"shared": False}]


def test_two_writings_of_one_tag_are_not_the_same_version():
    first, second = version(4, 40), version(4, 41)
    assert choose([[second, first], [first]]) == [first]
    assert choose([[second], [first]]) == []


def test_nodes_without_shared_storage_compare_the_writings_of_their_run():
    def of_node(sequence, writing, run="r"):
        return version(4, sequence) | {"shared": False, "writing": writing, "run": run}

    assert choose([[of_node(40, 1)], [of_node(45, 1)]]) == [of_node(40, 1)]
    assert choose([[of_node(40, 2)], [of_node(40, 1)]]) == choose([[of_node(40, 1)], [of_node(40, 1, "other")]]) == []


def test_a_version_of_which_a_node_that_is_gone_had_a_share_is_not_chosen():
    def share(*ranks):
        return [version(5, 50) | {"world": 3, "ranks": list(ranks)}, version(4, 40)]

    stored = [version(5, 50) | {"world": 3, "ranks": None}, version(4, 40)]
    assert tags(choose([share(0), share(1), share(2)])) == ["global_step5", "global_step4"]
    assert tags(choose([share(2), share(0, 1)])) == ["global_step5", "global_step4"]
    assert tags(choose([share(0), share(1)])) == ["global_step4"]
    assert tags(choose([share(0), stored])) == ["global_step5", "global_step4"]


def test_every_rank_comes_to_the_same_list():
    inventories = [[version(3, 1), version(-1, 9, tag="best")], [version(-1, 9, tag="best"), version(3, 1)]]
    assert choose(inventories) == choose(inventories[::-1])
    assert tags(choose(inventories)) == ["best", "global_step3"]


def test_ranks_agree_on_a_version_that_could_not_become_durable_while_memory_holds_it(place, monkeypatch):
    monkeypatch.setenv("NEBULA_PERSIST_GIVE_UP", "100ms")
    nebulaml.init(str(place.storage), 0)
    place.storage.write_text("not a directory")
    checkpoint = nebulaml.Checkpoint("global_step1", -2)
    checkpoint.save("a.pt", [1])
    checkpoint.commit()
    until(lambda: checkpoint.state == "failed")
    found, passed = agree._look(engine.default, None)
    assert tags(found) == ["global_step1"] and [tag for tag, _ in passed] == [agree.UNSEEN]


class CountingStore:
    """The store of a process group, which counts its keys and the bytes that ranks send and read."""

    def __init__(self):
        self.store, self.lock, self.bytes = torch.distributed.HashStore(), threading.Lock(), 0

    def _count(self, value):
        with self.lock:
            self.bytes += len(value)
        return value

    def set(self, key, value):
        self.store.set(key, self._count(value))

    def get(self, key):
        return self._count(self.store.get(key))

    def compare_set(self, key, expected, value):
        return self.store.compare_set(key, expected, self._count(value))

    def __getattr__(self, name):
        return getattr(self.store, name)


def ask_all(store, inventories, turn, spent):
    """Asks on a thread for each rank, as if each was a process of its own. Returns the answers by rank."""
    answers = {}

    def ask(rank):
        place = ranks.Place(rank, len(inventories), 0, 1)
        answers[rank] = agree._through_store(store, place, f"q{turn}", "/p", agree.Inventory.of(inventories[rank]), spent[rank])

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(inventories))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[rank] for rank in range(len(inventories))]


class PerThread(set):
    """Stands for a set of each process: here a thread is a rank."""

    def __init__(self):
        super().__init__()
        self.local = threading.local()

    def add(self, item):
        self.local.__dict__.setdefault("items", set()).add(item)

    def __contains__(self, item):
        return item in self.local.__dict__.get("items", ())


# fault: as test_ranks_on_two_nodes_load_the_oldest_of_many_versions_by_its_tag
@pytest.mark.parametrize("count", [65, *(pytest.param(count, marks=pytest.mark.nightly("test_ranks_agree_on_all_versions_and_send_a_list_that_all_of_them_have_once")) for count in (1, 64, 1000))])
def test_ranks_agree_on_all_versions_and_send_a_list_that_all_of_them_have_once(monkeypatch, count):
    world = 16
    for name in ("_counted", "_sent"):
        monkeypatch.setattr(agree, name, PerThread())
    stored = [version(step, 10 * step) | {"state": "durable"} for step in range(1, count + 1)]
    ahead = version(count + 1, 10 * count + 10)
    inventories = [stored + [ahead] * (rank != 3) for rank in range(world)]
    store, spent = CountingStore(), [[] for _ in range(world)]
    before = store.num_keys()
    for turn in (1, 2, 3):
        for versions, refused in ask_all(store, inventories, turn, spent):
            assert tags(versions) == [f"global_step{step}" for step in range(count, 0, -1)] and not refused
    one = len(json.dumps(stored))
    assert store.bytes < 3 * (one + world * 1500), "the stored versions were sent by more ranks than one"
    assert store.num_keys() - before <= 4, "keys of answered questions stay in the store"


def test_ranks_that_see_other_lists_agree_on_the_versions_that_all_lists_have(monkeypatch):
    for name in ("_counted", "_sent"):
        monkeypatch.setattr(agree, name, PerThread())
    stored = [version(step, 10 * step) | {"state": "durable"} for step in range(1, 9)]
    in_memory = [one | {"state": "committed"} for one in stored[:3]]
    inventories = [stored, stored[:7], in_memory, stored[1:]]
    answers = ask_all(CountingStore(), inventories, 1, [[], [], [], []])
    assert [tags(versions) for versions, _ in answers] == [["global_step3", "global_step2"]] * 4


RANK = """
    import json, os, sys
    import nebulaml as nm
    from nebulaml import _nebula
    rank, group = sys.argv[1], sys.argv[3]
    if group == "late":
        nm.init(sys.argv[2], 1000, 3, on_error="raise")
    if group != "none":
        import datetime, torch.distributed as dist
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    nm.init(sys.argv[2], 1000, 3, on_error="raise")
    for line in sys.stdin:
        command = line.split()
        try:
            if command[0] == "save":
                # Without begun_saving(): it is the same process that resumes here.
                checkpoint = nm._session.engine.session().begin(command[1], -2)
                checkpoint.save_bytes(f"r{rank}", (command[1] + os.environ.get("MARK", "")).encode())
                checkpoint.commit()
                checkpoint.wait(command[2], 30000)
                answer = "saved"
            elif command[0] == "close":
                with nm.Checkpoint(command[1], -2) as checkpoint:
                    checkpoint.save_bytes(f"r{rank}", command[1].encode())
                answer = "closed"
            elif command[0] == "only":
                nm._session.engine.session().begin(command[1], 1).save_bytes(f"r{rank}", b"x")
                answer = "saved"
            elif command[0] == "init":
                answer = nm.init(command[1])
            elif command[0] == "own":
                found = nm.get_latest_checkpoint(sys.argv[2])
                answer = [found.tag, nm.get_latest_checkpoint_path(f"r{rank}")]
            elif command[0] == "steps":
                manager = nm.Manager(sys.argv[2])
                answer = [manager.latest_step(), manager.all_steps(), manager.restore({}, manager.latest_step()).step]
            elif command[0] == "remove":
                manager = nm.Manager(sys.argv[2])
                manager.pin(int(command[2]), "to compare with")
                manager.delete(int(command[1]))
                answer = sorted(tag for tag, one in nm.list_checkpoints().items() if "storage" in one["source"])
            elif command[0] == "far":
                manager = nm.Manager(sys.argv[2], far=nm.Far(command[1]))
                answer = [manager.latest_step(), manager.restore({}).step, manager.restore({}, 1).step]
            elif command[0] == "manage":
                manager = nm.Manager(sys.argv[2])
                answer = "managed"
            elif command[0] == "store":
                manager.save(int(command[1]), {"model": {"rank": rank}}, force=True)
                answer = "stored"
            elif command[0] == "spoil":
                manager.save(int(command[1]), {"model": {"rank": lambda: rank}}, force=True)
                answer = "stored"
            elif command[0] == "due":
                answer = manager.should_save(int(command[1]))
            elif command[0] == "restore":
                done = manager.restore({}, *map(int, command[1:]))
                answer = done and done.step
            elif command[0] == "together":
                from nebulaml.integrations import together
                found = together.find(nm.api.default, *command[1:])
                answer = found and found.tag
            elif command[0] == "dcp":
                import torch, torch.distributed.checkpoint as dcp
                from nebulaml.dcp import NebulaStorageReader
                try:
                    dcp.load({"w": torch.zeros(2)}, storage_reader=NebulaStorageReader(os.path.join(sys.argv[2], command[1])))
                    answer = "loaded"
                except dcp.api.CheckpointException as failure:
                    answer = {rank: "no complete checkpoint 'ckpt'" in str(one[0]) for rank, one in failure.failures.items()}
            elif command[0] == "patience":
                os.environ["NEBULA_AGREE_TIMEOUT"] = answer = command[1]
            elif command[0] == "read":
                answer = found.read_bytes(command[1]).decode()
            elif command[0] == "passed":
                answer = found.passed_over
            elif command[0] == "files":
                answer = [found.state, *sorted(found.files)]
            else:
                found = nm.get_latest_checkpoint() if command[0] == "latest" else nm.get_checkpoint(command[1])
                answer = found and found.tag
        except Exception as failure:
            answer = f"{type(failure).__name__}: {failure}"
        os.write(1, (json.dumps(answer) + chr(10)).encode())
"""


class Ranks:
    """Two ranks, each on its own node."""

    def __init__(self, place, group, run, monkeypatch, timeout="30", storages=None):
        self.processes = []
        with_port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port)}
        for rank in (0, 1):
            memory = place.memory / f"node{rank}"
            environment = {
                **os.environ,
                **with_port,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "NEBULA_NODE_ID": f"n{rank}",
                "NEBULA_MEMORY_DIR": str(memory),
                "NEBULA_AGREE_TIMEOUT": timeout,
            }
            if group == "none":
                environment["NEBULA_RUN"] = run
            self.processes.append(
                fork_server.start(
                    textwrap.dedent(RANK), rank, (storages or [place.storage] * 2)[rank], group, env=environment, stdin=subprocess.PIPE
                )
            )

    def ask(self, *command, only=None):
        chosen = [self.processes[only]] if only is not None else self.processes
        for process in chosen:
            self.send(process, *command)
        return [json.loads(process.stdout.readline()) for process in chosen]

    def send(self, process, *command):
        process.stdin.write(" ".join(command) + "\n")
        process.stdin.flush()

    def kill(self):
        for process in self.processes:
            process.kill()
            process.stdin.close()
            process.stdout.close()
            process.wait()

    def end(self):
        for process in self.processes:
            process.stdin.close()
            process.stdout.read()
            process.stdout.close()
            assert process.wait(timeout=60) == 0


# fault (The machine and other users): A program writes into the documents by which the ranks of several nodes agree on a version.
# result: They count as not written yet: each rank writes its own over them.
@pytest.mark.nightly("test_an_earlier_start_of_the_same_name_answers_for_no_rank")
def test_ranks_agree_though_others_have_written_into_their_documents(place, monkeypatch):
    first = Ranks(place, "none", "one", monkeypatch)
    for step in (1, 2):
        assert first.ask("save", f"global_step{step}", "durable") == ["saved"] * 2
    first.end()
    second = Ranks(place, "none", "two", monkeypatch)
    assert second.ask("latest") == ["global_step2"] * 2
    second.end()
    folder = place.storage / ".nebula"
    (stored,) = [path for path in folder.glob("inventory-*") if path.stem.count("-") == 3]
    digest = stored.stem.split("-")[-1]
    assert [tag for tag, _ in agree._read_stored(stored, digest)] == ["global_step2", "global_step1"]
    stored.write_text(stored.read_text().replace("global_step2", "global_step7"))
    assert agree._read_stored(stored, digest) is None
    theirs = next(folder.glob("inventory-*-0.0.1-00001.json"))
    third = Ranks(place, "none", "two", monkeypatch)
    assert third.ask("patience", "1", only=0) == ["1"]
    for wrong in ('{"nebula": "inventory"}', '{"token": "x", "stored": "y", "failure": "", "versions": [{"tag": 3}]}'):
        theirs.write_text(wrong)
        assert third.ask("latest", only=0)[0].startswith("NebulaTimeout: rank 0 waited 1 s")
    assert third.ask("patience", "60", only=0) == ["60"]
    assert third.ask("latest") == ["global_step2"] * 2
    third.end()


# fault (Storage): One rank of several nodes cannot find the checkpoint that `torch.distributed.checkpoint` is to load.
# result: All ranks raise torch's `CheckpointException`, which names that rank and the checkpoint. None waits for it.
@pytest.mark.nightly("test_a_rank_that_cannot_look_ends_the_question_of_all_with_its_reason")
def test_a_rank_that_finds_no_checkpoint_keeps_no_other_rank_of_dcp_waiting(place, monkeypatch, tmp_path):
    import torch.distributed.checkpoint as dcp
    from nebulaml.dcp import NebulaStorageWriter

    nebulaml.init(place.storage)
    dcp.save({"w": torch.ones(2)}, storage_writer=NebulaStorageWriter(place.storage / "ckpt"))
    assert nebulaml.flush_persistence()
    place.lose_memory()
    started = Ranks(place, "gloo", "one", monkeypatch, storages=[place.storage, tmp_path / "other"])
    for process in started.processes:
        started.send(process, "close", "ahead_1")
    assert [json.loads(process.stdout.readline()) for process in started.processes] == ["closed"] * 2
    assert started.ask("dcp", "ckpt") == [{"1": True}] * 2
    started.kill()


@pytest.mark.nightly("test_a_version_that_one_rank_knows_to_be_removed_is_removed_for_all", "python/test_requeue.py::test_no_node_loads_an_older_a_mixed_or_a_removed_version_in_short_stories")
def test_one_rank_removes_and_pins_versions_before_the_others_ask_for_any(place, monkeypatch):
    first = Ranks(place, "none", "one", monkeypatch)
    for step in (1, 2, 3):
        assert first.ask("save", f"global_step{step}", "durable") == ["saved"] * 2
    first.end()
    second = Ranks(place, "none", "two", monkeypatch, timeout="5")
    assert second.ask("remove", "1", "2", only=0) == [["global_step2", "global_step3"]]
    assert second.ask("remove", "1", "2", only=0)[0].endswith("it has the steps: 2, 3")
    assert second.ask("latest") == ["global_step3"] * 2
    second.end()


def test_a_failure_that_is_no_damage_counts_before_damage():
    damaged, unread, fine = (agree.Inventory.of([], *said) for said in (("a sum differs", "corrupt"), ("not mounted", "storage"), ()))
    for inventories, status in (([fine, damaged], "corrupt"), ([damaged, unread, fine], "storage"), ([unread, damaged], "storage")):
        assert agree._status(inventories) == status
    assert "rank 1 cannot say what it can load: not mounted" in agree.refusal([damaged, unread], "/p")


# Their storage paths are two directories here, so they can't agree through documents in it.
def test_ranks_take_the_far_storage_together_if_one_node_alone_meets_damage(place, monkeypatch, tmp_path):
    far, other = tmp_path / "far", tmp_path / "other"
    with nebulaml.Manager(place.storage, far=nebulaml.Far(far)) as manager:
        manager.save(1, {"model": {"w": torch.ones(3)}}, force=True)
        manager.wait(1)
    assert nebulaml.wait_for_exports(120) and (far / "global_step1").is_dir()
    place.lose_memory()
    shutil.copytree(place.storage, other)
    manifest = other / "global_step1" / ".nebula" / "manifest-1.json"
    manifest.chmod(0o600)
    manifest.write_bytes(manifest.read_bytes()[:-30] + b"x" * 30)
    started = Ranks(place, "gloo", "one", monkeypatch, storages=[place.storage, other])
    assert started.ask("far", str(far)) == [[1, 1, 1]] * 2
    started.kill()


@pytest.mark.parametrize("group", [pytest.param("none", marks=pytest.mark.nightly), "gloo"])
def test_ranks_on_two_nodes_load_what_both_can_when_one_is_ahead(place, group, monkeypatch):
    first = Ranks(place, group, "one", monkeypatch)
    assert first.ask("save", "global_step1", "durable") == ["saved"] * 2
    assert first.ask("save", "global_step2", "committed") == ["saved"] * 2
    assert first.ask("only", "ahead_9", only=1) == ["saved"]  # a version that rank 0 has never heard of
    first.end()
    second = Ranks(place, group, "two", monkeypatch)
    assert second.ask("latest") == ["global_step2"] * 2
    assert second.ask("tag", "global_step1") == ["global_step1"] * 2
    second.kill()


@pytest.mark.parametrize("group", [pytest.param("none", marks=pytest.mark.nightly), "gloo"])
def test_ranks_on_two_nodes_load_the_durable_version_after_one_lost_its_memory(place, group, monkeypatch):
    first = Ranks(place, group, "one", monkeypatch)
    assert first.ask("save", "global_step1", "durable") == ["saved"] * 2
    assert first.ask("save", "global_step2", "committed") == ["saved"] * 2
    place.kill_all(*first.processes)
    shutil.rmtree(place.memory / "node1")
    second = Ranks(place, group, "two", monkeypatch)
    assert second.ask("latest") == ["global_step1"] * 2  # rank 0 alone still has global_step2
    if group == "none":  # the list of what storage has is the same for a node with memory and for one without
        lists = [path.name for path in (place.storage / ".nebula").glob("inventory-*") if path.stem.count("-") == 3]
        assert len(lists) == 1, lists
    second.end()


# fault (Storage): A rank asks for a version that it has saved, and its agent does not know yet whether the ranks of other nodes have.
# result: The search waits for that rank, so both ranks get the same version.
@pytest.mark.parametrize(("question", "poison"), [("latest", ""), ("latest", "7 global_step0"), ("tag global_step2", "")])
@pytest.mark.parametrize("group", [pytest.param("none", marks=pytest.mark.nightly), "gloo"])
def test_ranks_on_two_nodes_that_search_right_after_their_saves_get_the_same_answer(place, group, question, poison, monkeypatch):
    monkeypatch.setenv("NEBULA_PASSED_OVER", poison)
    ranks = Ranks(place, group, "one", monkeypatch)
    assert ranks.ask("close", "global_step1") == ["closed"] * 2
    assert ranks.ask("latest") == ["global_step1"] * 2
    first, took, step = ranks.processes[0], math.inf, 1
    while took > 4:  # the search waits for five seconds: if the machine stood still meanwhile, the next version is looked for
        step += 1
        asked = question.replace("global_step2", f"global_step{step}").split()
        assert ranks.ask("close", f"global_step{step}", only=0) == ["closed"]
        begun = time.monotonic()
        ranks.send(first, *asked)
        assert not select.select([first.stdout], [], [], 1)[0], "an answer before rank 1 has saved"
        assert ranks.ask("close", f"global_step{step}", only=1) == ["closed"]
        found = [*ranks.ask(*asked, only=1), json.loads(first.stdout.readline())]
        took = time.monotonic() - begun
    assert found == [f"global_step{step}"] * 2
    ranks.kill()


# fault (Storage): A rank asks DeepSpeed to load, and another rank saves its part only after the 5 s for which the search waits.
# result: No rank loads another version than the others.
def test_ranks_that_search_together_get_one_version_though_one_saved_its_part_late(place, monkeypatch):
    ranks = Ranks(place, "gloo", "one", monkeypatch)
    assert ranks.ask("close", "global_step1") == ["closed"] * 2
    assert ranks.ask("together") == ranks.ask("together", "global_step1") == ["global_step1"] * 2
    assert ranks.ask("together", "global_step9") == [None] * 2
    assert ranks.ask("close", "global_step2", only=0) == ["closed"]
    first = ranks.processes[0]
    ranks.send(first, "together")
    assert not select.select([first.stdout], [], [], 6.5)[0], "an answer before rank 1 has searched"
    assert ranks.ask("close", "global_step2", only=1) == ["closed"]
    (found,) = ranks.ask("together", only=1)
    assert json.loads(first.stdout.readline()) == found in ("global_step1", "global_step2")
    ranks.kill()


# fault (Storage): All ranks call restore() of a Manager after saves, and one of them saves its part more than 5 s after the others ask.
# result: All ranks restore the same version: restore() then asks the ranks anew. If a rank has no version of a step, it raises on all.
@pytest.mark.nightly("test_ranks_that_search_together_get_one_version_though_one_saved_its_part_late")
@pytest.mark.parametrize("group", [pytest.param("none", marks=pytest.mark.nightly), "gloo"])
def test_ranks_that_restore_after_saves_get_one_version_though_one_saved_its_part_late(place, group, monkeypatch):
    ranks = Ranks(place, group, "one", monkeypatch)
    assert ranks.ask("manage") == ["managed"] * 2
    assert ranks.ask("restore") == [None] * 2
    assert ranks.ask("store", "1") == ["stored"] * 2
    assert ranks.ask("restore") == ranks.ask("restore", "1") == [1, 1]
    assert ranks.ask("store", "2", only=0) == ["stored"]
    first = ranks.processes[0]
    ranks.send(first, "restore")
    assert not select.select([first.stdout], [], [], 6.5)[0], "an answer before rank 1 has searched"
    assert ranks.ask("store", "2", only=1) == ["stored"]
    (found,) = ranks.ask("restore", only=1)
    assert json.loads(first.stdout.readline()) == found in (1, 2)
    assert ranks.ask("store", "3", only=0) == ["stored"]
    for answer in ranks.ask("restore", "3"):
        assert "there is no checkpoint of step 3" in str(answer), answer
    ranks.kill()


# fault (Arguments of the caller): The ranks of several nodes restore different steps after saves, for example what latest_step() says to each.
# result: All raise `NebulaConfigError`, which names two ranks and their steps.
@pytest.mark.parametrize("group", [pytest.param("none", marks=pytest.mark.nightly), "gloo"])
def test_ranks_that_are_to_restore_different_steps_restore_none(place, group, monkeypatch):
    ranks = Ranks(place, group, "one", monkeypatch)
    assert ranks.ask("manage") == ["managed"] * 2
    for step in (1, 2):
        assert ranks.ask("store", str(step)) == ["stored"] * 2
    ranks.send(ranks.processes[0], "restore", "1")
    (second,) = ranks.ask("restore", only=1)
    said = "NebulaConfigError: rank 0 is to load global_step1, and rank 1 the newest: give all ranks the same step"
    assert [json.loads(ranks.processes[0].stdout.readline()), second] == [said, said]
    assert ranks.ask("restore", "2") == ranks.ask("restore") == [2, 2]
    ranks.kill()


# fault (Deaths): One rank fails in save(force=True) before it has saved anything, and all ranks restore an earlier version.
# result: They ask should_save() for the steps after it anew, and each rank gets rank 0's answer.
def test_ranks_that_restore_after_the_save_of_one_has_failed_ask_each_other_again(place, monkeypatch):
    ranks = Ranks(place, "gloo", "one", monkeypatch)
    assert ranks.ask("manage") == ["managed"] * 2
    assert ranks.ask("store", "1") == ["stored"] * 2
    assert ranks.ask("restore") == [1, 1]
    assert ranks.ask("store", "2", only=0) == ["stored"]
    assert ranks.ask("spoil", "2", only=1)[0].startswith("NebulaPicklingError")
    assert ranks.ask("restore") == [1, 1]
    assert ranks.ask("due", "2") == ranks.ask("due", "3") == [True, True]
    ranks.kill()


# fault (Deaths): A rank asks for a version that it has saved, and another rank never saves its part.
# result: The search ends after 5 s. It takes an older version, with the missing ranks in `passed_over`. A rank that saves after all is heard.
def test_a_search_after_a_save_that_another_rank_never_makes_names_that_rank(place, monkeypatch):
    ranks = Ranks(place, "none", "one", monkeypatch)
    assert ranks.ask("close", "global_step1", only=0) == ["closed"]
    assert ranks.ask("tag", "global_step1", only=0) == [None]
    assert ranks.ask("close", "global_step1", only=1) == ["closed"]
    assert ranks.ask("latest") == ["global_step1"] * 2
    assert ranks.ask("close", "global_step2", only=0) == ["closed"]
    assert ranks.ask("latest", only=0) == ["global_step1"]
    assert ranks.ask("passed", only=0) == [[["global_step2", "waits for rank 1 of 2"]]]
    ranks.kill()


# fault (Deaths): A job on several nodes has resumed, begins its first save, and asks for a version of an earlier run, which one node alone has.
# result: It still gets the version that its ranks have agreed on, until the first one of its own is complete, also if it names the path.
def test_a_rank_that_saves_gets_no_version_that_the_ranks_have_not_agreed_on(place, monkeypatch):
    first = Ranks(place, "none", "one", monkeypatch)
    assert first.ask("save", "global_step1", "durable") == ["saved"] * 2
    assert first.ask("save", "global_step2", "committed") == ["saved"] * 2
    place.kill_all(*first.processes)
    shutil.rmtree(place.memory / "node1")
    second = Ranks(place, "none", "two", monkeypatch)
    assert second.ask("latest") == ["global_step1"] * 2
    assert second.ask("close", "global_step3", only=0) == ["closed"]
    assert second.ask("latest", only=0) == ["global_step1"]
    assert second.ask("tag", "global_step2", only=0) == [None]
    assert second.ask("tag", "global_step1", only=0) == ["global_step1"]
    assert second.ask("own", only=0) == [["global_step1", str(place.storage / "global_step1" / "r0")]]  # the path, named
    assert second.ask("close", "global_step3", only=1) == ["closed"]
    assert second.ask("latest") == ["global_step3"] * 2
    second.kill()


# fault (Deaths): A job without a process group starts again with the same run's name, as torchrun gives it, and one node has lost its memory.
# result: No rank takes the inventory of the earlier start for one of this start: all ranks load the version that all still have.
def test_an_earlier_start_of_the_same_name_answers_for_no_rank(place, monkeypatch):
    first = Ranks(place, "none", "one", monkeypatch)
    assert first.ask("save", "global_step1", "durable") == ["saved"] * 2
    assert first.ask("save", "global_step2", "committed") == ["saved"] * 2
    assert first.ask("latest") == ["global_step2"] * 2
    place.kill_all(*first.processes)
    shutil.rmtree(place.memory / "node1")
    second = Ranks(place, "none", "one", monkeypatch)
    second.send(second.processes[0], "latest")
    assert not select.select([second.processes[0].stdout], [], [], 2)[0], "an answer before rank 1 has asked"
    assert second.ask("latest", only=1) == ["global_step1"] and json.loads(second.processes[0].stdout.readline()) == "global_step1"
    assert len(list((place.storage / ".nebula").glob("inventory-*-0.0.1-0000?-*"))) == 2, "confirmations of the earlier start are removed"
    second.kill()


# fault (Deaths): The memory of one of two nodes is lost, and a program asks a Manager for its newest step, and restores that step.
# result: Before the first save, the steps are those that all ranks can load, so each rank restores the same one.
@pytest.mark.nightly("test_ranks_on_two_nodes_load_what_both_can_when_one_is_ahead")
def test_the_steps_of_a_manager_are_those_that_all_ranks_can_load(place, monkeypatch):
    first = Ranks(place, "none", "one", monkeypatch)
    assert first.ask("save", "global_step1", "durable") == ["saved"] * 2
    assert first.ask("save", "global_step2", "committed") == ["saved"] * 2
    place.kill_all(*first.processes)
    shutil.rmtree(place.memory / "node1")
    second = Ranks(place, "none", "two", monkeypatch)
    assert second.ask("steps") == [[1, [1], 1]] * 2
    second.kill()


# fault (Deaths): A launcher passes a version over after whose load a job failed, and it is the only one that all ranks have.
# result: All ranks load it. One rank's other version, of which the others have never heard, changes nothing.
def test_a_version_that_is_passed_over_is_loaded_if_no_other_one_is_there_for_all_ranks(place, monkeypatch):
    first = Ranks(place, "none", "one", monkeypatch)
    assert first.ask("save", "global_step2", "durable") == ["saved"] * 2
    assert first.ask("save", "global_step1", "committed") == ["saved"] * 2
    place.kill_all(*first.processes)
    shutil.rmtree(place.memory / "node0")
    (manifest,) = (place.storage / "global_step2" / ".nebula").glob("manifest-*")
    monkeypatch.setenv("NEBULA_PASSED_OVER", f"{json.loads(manifest.read_text())['sequence']} global_step2")
    second = Ranks(place, "none", "two", monkeypatch)
    assert second.ask("latest") == ["global_step2"] * 2
    second.kill()


# fault (Storage): One rank cannot tell which versions it could load, for example because storage is damaged and its node has no memory of any.
# result: All ranks raise after three looks, and name that rank and its reason. No rank waits for it as for one that never asks.
@pytest.mark.parametrize("group", [pytest.param("none", marks=pytest.mark.nightly), "gloo"])
def test_a_rank_that_cannot_look_ends_the_question_of_all_with_its_reason(place, group, monkeypatch):
    first = Ranks(place, group, "one", monkeypatch)
    assert first.ask("save", "global_step1", "durable") == ["saved"] * 2
    place.kill_all(*first.processes)
    shutil.rmtree(place.memory / "node1")
    for manifest in (place.storage / "global_step1" / ".nebula").glob("manifest-*"):
        manifest.write_bytes(manifest.read_bytes().replace(b"global", b"gl0bal"))
    second = Ranks(place, group, "two", monkeypatch, timeout="200")
    said = second.ask("latest")
    assert said[1].startswith("NebulaCorrupt: no checkpoint can be loaded"), said
    assert said[0].startswith("NebulaCorrupt: rank 1 cannot say what it can load: no checkpoint can be loaded"), said
    place.kill_all(*second.processes)
    shutil.rmtree(place.memory / "node0")
    third = Ranks(place, group, "three", monkeypatch, timeout="200")
    for question in ("latest", "steps"):
        said = third.ask(question)
        assert all(one.startswith("NebulaCorrupt: no checkpoint can be loaded") for one in said), said
    third.kill()


# fault (Deaths): A launcher starts a job again under the name of the run before (a fixed port, `--rdzv-id`, NEBULA_RUN). One rank of that run had saved its
# part of a version, and its node's memory still has it.
# result: The version of the new start has the parts of the new start alone, and becomes durable.
@pytest.mark.parametrize("group", [pytest.param("none", marks=pytest.mark.nightly("test_a_version_that_an_earlier_start_has_left_half_saved_is_not_completed_by_the_next_one")), "late"])  # late: it begins after init()
@pytest.mark.parametrize("saved", [pytest.param(0, marks=pytest.mark.nightly("test_a_version_that_an_earlier_start_has_left_half_saved_is_not_completed_by_the_next_one")), 1])
def test_a_version_that_an_earlier_start_has_left_half_saved_is_not_completed_by_the_next_one(place, group, saved, monkeypatch):
    monkeypatch.setenv("MARK", " of the first")
    first = Ranks(place, group, "same", monkeypatch)
    assert first.ask("save", "global_step1", "durable") == ["saved"] * 2
    assert first.ask("close", "global_step2", only=saved) == ["closed"]
    place.kill_all(*first.processes)
    monkeypatch.setenv("MARK", " of the second")
    second = Ranks(place, group, "same", monkeypatch)
    assert second.ask("latest") == ["global_step1"] * 2
    for tag in ("global_step1", "global_step2"):
        assert second.ask("save", tag, "durable") == ["saved"] * 2
        assert [(place.storage / tag / f"r{rank}").read_text() for rank in (0, 1)] == [f"{tag} of the second"] * 2
    second.kill()


# fault (Deaths): A job saves without having asked for a checkpoint, and another session of its ranks asks while a version waits for a rank.
# result: The run keeps its name, so the version becomes complete.
@pytest.mark.nightly
def test_a_question_of_another_session_does_not_part_the_ranks_of_a_version_that_waits(place, monkeypatch):
    ranks = Ranks(place, "none", "one", monkeypatch)
    assert ranks.ask("close", "global_step1") == ["closed"] * 2
    assert ranks.ask("latest") == ["global_step1"] * 2
    assert ranks.ask("close", "global_step2", only=0) == ["closed"]
    assert ranks.ask("steps") == [[1, [1], 1]] * 2
    assert ranks.ask("close", "global_step2", only=1) == ["closed"]
    assert ranks.ask("latest") == ["global_step2"] * 2
    ranks.kill()


# fault (Storage): A path has many versions, on one node or on several.
# result: Every search, rule and list counts all of them. Ranks send the list of the versions in storage once.
@pytest.mark.nightly("test_ranks_on_two_nodes_load_what_both_can_when_one_is_ahead")
@pytest.mark.parametrize("group", [pytest.param("none", marks=pytest.mark.nightly), "gloo"])
def test_ranks_on_two_nodes_load_the_oldest_of_many_versions_by_its_tag(place, group, monkeypatch):
    place.run(
        """
        nm.init(sys.argv[1], 0, on_error="raise")
        for step in range(1, 71):
            with nm.Checkpoint(f"global_step{step}", -2) as checkpoint:
                checkpoint.save_bytes("r0", b"x")
        nm.flush_persistence()
        """,
        place.storage,
    )
    both = Ranks(place, group, "one", monkeypatch)
    assert both.ask("latest") == ["global_step70"] * 2
    assert both.ask("tag", "global_step1") == ["global_step1"] * 2 and both.ask("read", "r0") == ["x"] * 2
    both.end()


# fault (Storage): On one node of several, nothing is mounted at the path.
# result: A resume raises `NebulaStorageError` on all ranks, and names two of them. Training does not begin again from
# nothing.
@pytest.mark.parametrize("is_mounted_later", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_node_without_the_mount_makes_no_job_begin_from_nothing(place, monkeypatch, is_mounted_later):
    """Node 1 was replaced: its storage path is an empty directory of its own, because nothing is mounted there."""
    first = Ranks(place, "gloo", "one", monkeypatch)
    assert first.ask("save", "global_step1", "durable") == ["saved"] * 2
    first.end()
    mount = place.root / "mount"
    mount.mkdir()
    second = Ranks(place, "gloo", "two", monkeypatch, storages=[place.storage, mount])
    if is_mounted_later:
        for process in second.processes:
            process.stdin.write("latest\n")
            process.stdin.flush()
        time.sleep(1)
        shutil.copytree(place.storage, place.root / "whole")
        for entry in sorted((place.root / "whole").iterdir()):  # .nebula is the first, and no file is there in part
            entry.rename(mount / entry.name)
        assert [json.loads(process.stdout.readline()) for process in second.processes] == ["global_step1"] * 2
    else:
        for answer in second.ask("latest") + second.ask("latest"):
            assert answer.startswith("NebulaStorageError: rank 0 finds global_step1 in storage and rank 1 does not"), answer
    second.end()


def kill_with_one_in_memory(place, monkeypatch):
    """Kills everything. Storage then has the version before the newest."""
    ranks = Ranks(place, "none", "one", monkeypatch)
    assert ranks.ask("save", "global_step1", "durable") == ["saved"] * 2
    assert ranks.ask("save", "global_step2", "committed") == ["saved"] * 2
    place.kill_all(*ranks.processes)


@pytest.mark.nightly("test_a_file_that_storage_cannot_bring_is_not_found_and_the_reason_is_said")
def test_a_file_that_lies_in_another_nodes_memory_comes_through_storage(place, monkeypatch):
    kill_with_one_in_memory(place, monkeypatch)
    second = Ranks(place, "none", "two", monkeypatch)
    assert second.ask("latest") == ["global_step2"] * 2
    assert second.ask("read", "r1", only=1) == ["global_step2"]
    assert second.ask("files") == [["committed", "r0"], ["committed", "r1"]], "nothing was to wait for"
    assert second.ask("read", "r0", only=1) == ["global_step2"]
    assert second.ask("files", only=1) == [["durable", "r0", "r1"]]
    (answer,) = second.ask("read", "r2", only=1)
    assert answer == "NebulaNotFound: checkpoint 'global_step2' has no file 'r2'; it has: r0, r1"
    second.end()


def test_a_file_that_storage_cannot_bring_is_not_found_and_the_reason_is_said(place, monkeypatch):
    kill_with_one_in_memory(place, monkeypatch)
    monkeypatch.setenv("NEBULA_PERSIST_GIVE_UP", "2")
    second = Ranks(place, "none", "two", monkeypatch)
    assert second.ask("latest") == ["global_step2"] * 2
    for pid in place.agents():
        if b"NEBULA_NODE_ID=n0" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            stop(pid)
    (answer,) = second.ask("read", "r0", only=1)
    second.kill()
    assert answer.startswith("NebulaNotFound: checkpoint 'global_step2' has no file 'r0'; it has: r1; "), answer
    assert "rank 0" in answer, "whose share has not come"


@pytest.mark.parametrize("group", [pytest.param("none", marks=pytest.mark.nightly), "gloo"])
def test_after_an_init_with_another_path_ranks_agree_on_what_is_there(place, group, monkeypatch):
    other = str(place.root / "other")
    first = Ranks(place, group, "one", monkeypatch)
    assert first.ask("save", "global_step1", "durable") == ["saved"] * 2
    assert first.ask("init", other) == [None] * 2
    assert first.ask("save", "global_step2", "durable") == ["saved"] * 2
    first.end()
    second = Ranks(place, group, "two", monkeypatch, timeout="60")
    assert second.ask("latest") == ["global_step1"] * 2
    assert second.ask("init", other) == [None] * 2
    assert second.ask("latest") == ["global_step2"] * 2
    assert second.ask("init", str(place.storage)) == [None] * 2
    assert second.ask("patience", "1", only=0) == ["1"]
    assert "NebulaTimeout" in second.ask("latest", only=0)[0]
    assert second.ask("patience", "60", only=0) == ["60"]
    assert second.ask("init", other) == [None] * 2
    assert second.ask("latest") == ["global_step2"] * 2
    second.end()


@pytest.mark.parametrize("group", ["none", "gloo"])
def test_a_rank_that_never_asks_is_named_and_no_rank_hangs(place, group, monkeypatch):
    both = Ranks(place, group, "one", monkeypatch, timeout="1")
    (answer,) = both.ask("latest", only=0)
    assert "NebulaTimeout" in answer and "ranks 1 did not" in answer and "world=1" in answer
    both.kill()


@pytest.mark.nightly("test_a_rank_that_never_asks_is_named_and_no_rank_hangs")
@pytest.mark.parametrize("group", [pytest.param("none", marks=pytest.mark.nightly), "gloo"])
def test_a_rank_that_asks_again_after_a_timeout_meets_the_late_rank(place, group, monkeypatch):
    first = Ranks(place, group, "one", monkeypatch)
    assert first.ask("save", "global_step1", "durable") == ["saved"] * 2
    first.end()
    second = Ranks(place, group, "two", monkeypatch, timeout="60")
    assert second.ask("patience", "1", only=0) == ["1"]
    assert "NebulaTimeout" in second.ask("latest", only=0)[0]
    assert second.ask("patience", "60", only=0) == ["60"]
    assert second.ask("latest") == ["global_step1"] * 2
    second.end()


def test_a_silent_start_from_nothing_is_refused_on_several_nodes_too(place, monkeypatch):
    nebulaml.init(str(place.storage), 0, on_error="raise")
    nebulaml.Checkpoint("global_step1").save("a.pt", 1)
    assert nebulaml.flush_persistence()
    monkeypatch.setattr(agree.Agreement, "needed", lambda self: True)
    monkeypatch.setattr(agree.Agreement, "answer", lambda self, path: [])
    with pytest.raises(NebulaConfigError, match="global_step1 is a checkpoint, not a directory of checkpoints"):
        nebulaml.get_latest_checkpoint(str(place.storage / "global_step1"))
    assert nebulaml.get_latest_checkpoint() is None and nebulaml.get_checkpoint("global_step1_universal") is None
    monkeypatch.setitem(sys.modules, guards.STOCK_ENGINE, sys)
    with pytest.raises(NebulaConfigError, match="is a universal checkpoint"):
        nebulaml.get_checkpoint("global_step1_universal")


def test_a_process_that_uses_nebula_alone_in_a_larger_world_waits_for_no_rank(place, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    nebulaml.init(str(place.storage), 0, world=1, on_error="raise")
    assert nebulaml.get_latest_checkpoint() is None
    checkpoint = nebulaml.Checkpoint("global_step1", -2)
    checkpoint.save("m.pt", 1)
    assert checkpoint.commit()
    checkpoint.wait("durable", 60)
    assert not list(Path(place.storage / "global_step1" / ".nebula").glob("c*.json"))
    with pytest.raises(NebulaConfigError):
        config.resolve(None, world=2)


def test_runs_are_told_apart_by_what_launchers_say():
    of = ranks._run_of_launcher
    elastic = {"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert of(elastic) != of({**elastic, "TORCHELASTIC_RESTART_COUNT": "1"})
    rounds = [elastic | {"NEBULA_ROUND": f"job7/abc.{n}", "TORCHELASTIC_RESTART_COUNT": str(count)} for n, count in ((4, 0), (4, 2), (5, 0))]
    assert of(rounds[0]) == of(rounds[1]) != of(rounds[2]), "nodes of one round may have failed a different number of times"
    assert of(elastic | {"NEBULA_ROUND": "another/abc.4"}) == of(elastic), "the round of a launcher around this one"
    anonymous = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert of(anonymous) != of({**anonymous, "MASTER_PORT": "2"})
    slurm = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}
    assert of(slurm) != of({**slurm, "SLURM_RESTART_COUNT": "1"}) != of({**slurm, "SLURM_STEP_ID": "1"})
    assert of({"MASTER_ADDR": "a", "MASTER_PORT": "1"}) == "a:1" and of({}) == ""
    assert ranks._find_run(ranks.Place())[0] != ranks._find_run(ranks.Place())[0]


def test_ranks_load_the_agreed_version_and_never_another_writing_of_its_tag(place):
    nebulaml.init(str(place.storage), 0, 2)
    checkpoint = nebulaml.Checkpoint("global_step1")
    checkpoint.save("m.pt", {"a": 1})
    checkpoint.commit()
    (agreed,) = agree.inventory(engine.default, None)
    assert api.default._exactly(agreed, None).load("m.pt") == {"a": 1}
    with pytest.raises(NebulaUnavailable, match="all ranks agreed on"):
        api.default._exactly(agreed | {"sequence": agreed["sequence"] + 1}, None)


def test_a_node_that_knows_a_later_version_of_the_tag_loads_the_one_agreed_on(place):
    nebulaml.init(None, 0, 2)
    for turn in (1, 2):
        checkpoint = nebulaml.Checkpoint("global_step1")
        checkpoint.save("m.pt", {"a": turn})
        checkpoint.commit()
        checkpoint.wait("committed", 60)
    later, earlier = agree.inventory(engine.default, None)
    assert nebulaml.get_latest_checkpoint().load("m.pt") == {"a": 2} == api.default._exactly(later, None).load("m.pt")
    found = api.default._exactly(earlier, None)
    assert found.load("m.pt") == {"a": 1}
    place.kill_agent()
    assert found.load("m.pt") == {"a": 1}  # its successor is asked for the same
