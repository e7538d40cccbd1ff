"""Ranks that publish their shards: a follower has whole tensors, all of one step, and no rank ever has them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import types

import fork_server
import nebulaml as nm
import processes
import pytest
import torch
from nebulaml import _nebula
from nebulaml.errors import NebulaConfigError, NebulaError
from nebulaml.integrations.redirect import safetensors_header, safetensors_parts
from nebulaml.weights import shards
from nebulaml.weights.publication import About, tag_of
from ports import held_port
from processes import stop
from safetensors.torch import load_file
from trainers import IMPORTS
from waiting import until

strided = pytest.mark.skipif(not hasattr(shards._kinds(), "_StridedShard"), reason="torch 2.4 has no state dict of FSDP2 over tensor parallelism")
KILLS, SEED = int(os.environ.get("NEBULA_TEST_KILLS", "2")), int(os.environ.get("NEBULA_TEST_SEED", "1"))  # a test has no such variables

# Most of the CPU time of a rank that only begins. torch 2.4 lacks the second one.
IMPORTED = ("torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.device_mesh")

RANK = """
import contextlib, json, os, sys
import nebulaml as nm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter
from nebulaml.errors import NebulaUnavailable
from nebulaml.weights import shards
from torch.distributed.device_mesh import init_device_mesh
try:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed._tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

storage, kind, out = sys.argv[1:4]
dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(1)
if kind == "2d":
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.norm = torch.nn.Linear(16, 331), torch.nn.Linear(331, 9), torch.nn.LayerNorm(9)  # odd: shards of several sizes
            self.narrow = torch.nn.Linear(4, 3)  # two ranks have a row of it, and the others one or none
    weights = Net()
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(weights, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel(), "narrow": ColwiseParallel()})
    fully_shard(weights, mesh=both["data"])
    assert any(type(placement).__name__ == "_StridedShard" for placement in weights.up.weight.placements)
    tensors = lambda: weights.state_dict()
elif kind == "fsdp2":
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.deep = torch.nn.Embedding(64, 96), torch.nn.Linear(96, 333)  # 333: ranks have shards of two sizes
            self.head = torch.nn.Linear(96, 64, bias=False)
            self.head.weight = self.embed.weight
            self.small = torch.nn.Parameter(torch.ones(1))  # the second rank has nothing of it
            self.register_buffer("count", torch.zeros(()))
    weights = Net()
    fully_shard(weights, mesh=mesh)
    tensors = lambda: weights.state_dict()
else:
    if kind == "slices":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"]
    made = {"columns": torch.randn(30, 50), "middle": torch.randn(4, 6, 5), "same": torch.randn(7), "plain": torch.randn(3)}
    placed = {"columns": Shard(1), "middle": Shard(1), "same": Replicate()}
    weights = {name: distribute_tensor(t, mesh, [placed[name]]) if name in placed else t for name, t in made.items()}
    tensors = lambda: weights
chosen = {"full": False}
given = lambda: {n: t.full_tensor() if chosen["full"] and hasattr(t, "full_tensor") else t for n, t in tensors().items()}
publisher = nm.Publisher(given if kind == "columns" else weights, storage, dtype=torch.bfloat16, full_every=5, files={"config.json": kind.encode()})
local = lambda t: t.to_local() if hasattr(t, "to_local") else t
for line in sys.stdin:
    command, step = line.split()
    if command in ("publish", "fail", "unnamed", "full"):
        torch.manual_seed(int(step))  # plain and replicated tensors are equal on all ranks
        with torch.no_grad():
            for tensor in tensors().values():
                if tensor.dim():
                    torch.flatten(local(tensor))[int(step) % 3 :: 97] += 1
        full = {name: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for name, t in tensors().items()}
        if rank == 0:
            torch.save(full, f"{out}/{step}.tmp")
            os.rename(f"{out}/{step}.tmp", f"{out}/{step}.pt")
        dist.barrier()
        taken = publisher._session.checkpoint
        if command == "fail" and rank == 1:
            def refuse(tag):
                raise NebulaUnavailable("no agent")
            publisher._session.checkpoint = refuse
        reader, shards.AGREE_S = shards.Reader, 3 if command == "unnamed" else 60
        if command == "unnamed":
            def away(path):
                raise NebulaUnavailable("storage is away")
            shards.Reader = away
        chosen["full"] = command == "full"
        try:
            answer = publisher.publish(int(step))
        except nm.NebulaError as failure:
            answer = str(failure)
        publisher._session.checkpoint, shards.Reader = taken, reader
    elif command == "wait":
        try:
            publisher.wait(60)
            answer = "durable"
        except nm.NebulaError as failure:
            answer = str(failure)
    elif command == "checkpoint":  # through torch.distributed.checkpoint, and back
        path, kept = f"{storage}-dcp/step{step}", {name: local(t).clone() for name, t in tensors().items()}
        dcp.save({"model": tensors()}, storage_writer=NebulaStorageWriter(path))
        read = {"model": {name: torch.zeros_like(t) for name, t in tensors().items()}}
        dcp.load(read, storage_reader=NebulaStorageReader(path))
        answer = all(torch.equal(local(read["model"][name]), kept[name]) for name in kept)
    elif command == "maker":
        answer = publisher._maker.pid
    else:
        publisher.close()
        answer = "closed"
    os.write(1, (json.dumps(answer) + chr(10)).encode())
"""


class Job:
    """Ranks on a node each."""

    def __init__(self, place, out, kind: str = "fsdp2", world: int = 2) -> None:
        self._ranks, self._memory = [], place.memory
        self._held = held_port()
        for rank in range(world):
            env = {
                **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._held.getsockname()[1]), "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1", "NEBULA_NODE_ID": f"n{rank}", "NEBULA_MEMORY_DIR": str(place.memory / f"node{rank}"),
            }  # fmt: skip
            self._ranks.append(fork_server.start(RANK, place.storage, kind, out, env=env, stdin=subprocess.PIPE, modules=IMPORTED))

    def ask(self, command: str, *steps: int) -> list[object]:
        """steps: one for all ranks, or one for each."""
        for rank, step in zip(self._ranks, steps if len(steps) > 1 else (steps or (0,)) * len(self._ranks), strict=True):
            rank.stdin.write(f"{command} {step}\n")
            rank.stdin.flush()
        return [json.loads(rank.stdout.readline()) for rank in self._ranks]

    def agents(self, rank: int) -> list[int]:
        return processes.agents(lambda variables: f"NEBULA_MEMORY_DIR={self._memory / f'node{rank}'}" in variables)

    def kill(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.kill()
            rank.__exit__()
        self._held.close()


@pytest.fixture
def out(tmp_path):
    (tmp_path / "full").mkdir()
    return tmp_path / "full"


@pytest.fixture
def job(place, out):
    job = Job(place, out)
    yield job
    job.kill()


@pytest.fixture
def follower(place, tmp_path):
    with nm.Subscriber(place.storage, tmp_path / "engine", poll=0.1) as subscriber:
        yield subscriber


def exact(version, out) -> bool:
    """Whether a follower has what the ranks had at that step."""
    wanted = torch.load(out / f"{version.step}.pt")
    found = version.tensors()
    assert set(wanted) - set(found) <= {"head.weight"}
    return all(torch.equal(tensor, wanted[name].to(tensor.dtype)) for name, tensor in found.items())


def test_a_follower_has_whole_tensors_of_each_step_and_reads_what_changed(job, follower, place, out, tmp_path):
    read = []
    last = 8 if os.environ.get("NEBULA_TEST_NIGHTLY") else 4
    for step in range(1, last):  # a whole one at each fifth number
        assert job.ask("publish", step) == [True, True]
        version = follower.prepare(60)
        assert version.step == step and exact(version, out)
        read.append(version.bytes_read)
    assert min(read) * 5 < max(read) and (version.commit() / "config.json").read_bytes() == b"fsdp2"
    assert job.ask("wait") == ["durable", "durable"]
    with nm.Subscriber(place.storage, tmp_path / "late", poll=0.1) as late:
        assert exact(late.prepare(60), out) and late._newest == version.number
    for step in range(last, last + 4):  # faster than they are made
        assert job.ask("publish", step) == [True, True]
    assert job.ask("close") == ["closed", "closed"]
    while version.step != last + 3:
        version = follower.prepare(60)
        assert exact(version, out)


@pytest.mark.nightly
def test_a_killed_maker_costs_no_publication(job, follower, out):
    assert job.ask("publish", 1) == [True, True] and exact(follower.prepare(60), out)
    assert job.ask("wait") == ["durable", "durable"]
    makers = job.ask("maker")
    stop(makers[1])
    assert job.ask("publish", 2) == [True, True] and job.ask("publish", 3) == [True, True]
    os.kill(makers[1], signal.SIGKILL)
    assert job.ask("wait") == ["durable", "durable"]
    until(lambda: exact(version := follower.prepare(60), out) and version.step == 3, 60)
    assert job.ask("publish", 4) == [True, True]
    version = follower.prepare(60)
    assert version.step == 4 and exact(version, out)


def test_a_step_that_one_rank_cannot_take_is_published_by_none(job, follower, out):
    assert job.ask("publish", 1) == [True, True] and exact(follower.prepare(60), out)
    assert job.ask("fail", 2) == [True, False]
    assert all("the newest publication" in str(answer) for answer in job.ask("wait"))
    assert job.ask("publish", 3) == [True, True] and job.ask("wait") == ["durable", "durable"]
    version = follower.prepare(60)
    assert version.step == 3 and exact(version, out)


STORE = """
store = torch.distributed.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
os.write(1, b"ready\\n")
sys.stdin.readline()
"""


def test_a_store_whose_host_hangs_keeps_a_publication_waiting_once_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(shards, "AGREE_S", 0.5)
    with held_port() as held:
        port = held.getsockname()[1]
        host = fork_server.start(IMPORTS + "import os, sys\n" + STORE, port, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert host.stdout.readline().strip() == "ready"
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        monkeypatch.setattr(shards.ranks, "store", lambda: store)
        shards.compare_steps("/p", 1, 1, 10)
        stop(host.pid)
        with pytest.raises(NebulaError, match="has not answered"):
            shards.compare_steps("/p", 1, 2, 20)
        with pytest.raises(NebulaError, match="does not answer"):
            shards.compare_steps("/p", 1, 3, 30)
        os.kill(host.pid, signal.SIGCONT)
        shards._asking.join(60)
        shards.compare_steps("/p", 1, 4, 40)
        host.communicate("\n", timeout=60)


@pytest.mark.nightly("test_a_step_that_one_rank_cannot_take_is_published_by_none")
def test_ranks_that_publish_different_steps_in_one_call_publish_none(job, follower, place, out):
    assert job.ask("publish", 1) == [True, True] and exact(follower.prepare(60), out)
    for steps in (2, 3), (5, 4):
        first, second = steps
        sentences = [
            f"rank 1 publishes step {second} in the call in which rank 0 publishes step {first}",
            f"rank 0 publishes step {first} in the call in which rank 1 publishes step {second}",
        ]
        assert sorted(job.ask("publish", *steps)) == [False, True]  # the first of them cannot know it yet
        assert all(any(sentence in str(answer) for sentence in sentences) for answer in job.ask("wait"))
        assert follower.prepare(0) is None
    os.kill(job.ask("maker")[1], signal.SIGKILL)
    assert sorted(job.ask("publish", 6, 7)) == [False, True]
    assert all("rank 0 publishes step 6" in str(answer) and "rank 1 publishes step 7" in str(answer) for answer in job.ask("wait"))
    assert job.ask("publish", 8) == [True, True] and job.ask("wait") == ["durable", "durable"]
    version = follower.prepare(60)
    assert version.step == 8 and exact(version, out)
    job.kill()
    again = Job(place, out)  # with the numbers of the last run in a store of its own
    try:
        assert sorted(again.ask("publish", 6, 7)) == [False, True] and follower.prepare(0) is None
        assert again.ask("publish", 8) == [True, True] and again.ask("wait") == ["durable", "durable"]
        assert exact(follower.prepare(60), out)
        with nm.Reader(place.storage) as reader:
            found = [reader.get(row.tag) for row in reader.versions()]
            assert {About.read(one.metadata).step for one in found if one is not None} <= {1, 8}
    finally:
        again.kill()


@pytest.mark.nightly("test_a_follower_has_whole_tensors_of_each_step_and_reads_what_changed", "python/test_weights.py::test_what_a_trainer_has_published_comes_although_it_dies_and_the_next_run_goes_on_after_it")
def test_after_a_kill_of_all_ranks_the_next_run_goes_on(job, follower, place, out):
    for step in (1, 2):
        assert job.ask("publish", step) == [True, True]
    first = follower.prepare(60)
    assert exact(first, out)
    job.kill()
    again = Job(place, out)
    try:
        assert again.ask("publish", 1) == [True, True] and again.ask("wait") == ["durable", "durable"]
        while (version := follower.prepare(60)).step != 1:  # the last maker may have completed the second one meanwhile
            assert exact(version, out)
        assert version.number > first.number and exact(version, out)
    finally:
        again.kill()


@pytest.mark.nightly
def test_a_first_number_that_storage_refuses_is_asked_for_again(job, follower, out):
    assert job.ask("unnamed", 1) == [False, False]
    assert job.ask("publish", 2) == [True, True] and job.ask("wait") == ["durable", "durable"]
    version = follower.prepare(60)
    assert version.step == 2 and exact(version, out)


@pytest.mark.nightly
def test_whole_tensors_after_shards_are_refused_and_never_shown(place, follower, out):
    job = Job(place, out, "columns")
    try:
        assert job.ask("publish", 1) == [True, True] and exact(follower.prepare(60), out)
        assert all("make another Publisher" in str(answer) for answer in job.ask("full", 2))
        assert job.ask("publish", 3) == [True, True]
        version = follower.prepare(60)
        assert version.step == 3 and exact(version, out)
    finally:
        job.kill()


# fault: as test_random_deaths_never_give_wrong_weights_and_never_go_back
@pytest.mark.nightly
def test_random_deaths_of_ranks_makers_and_agents_never_mix_steps(place, out, tmp_path):
    """NEBULA_TEST_KILLS: how many."""
    chance, job, step, newest = random.Random(SEED), Job(place, out), 0, 0
    subscriber = nm.Subscriber(place.storage, tmp_path / "engine", poll=0.1)
    try:
        for turn in range(KILLS):
            for _ in range(chance.randrange(1, 3)):
                step += 1
                job.ask("publish", step)
            if chance.random() < 0.5 and (version := subscriber.prepare(chance.random())) is not None:
                assert exact(version, out) and version.number > newest, (SEED, turn, version)
                version.commit()
                newest = version.number
            victim, rank = chance.choice(["job", "maker", "agent", "follower"]), chance.randrange(2)
            if victim == "job":
                job.kill()
                job = Job(place, out)
            elif victim == "follower":
                subscriber.close()  # as its death: only the directory is left
                subscriber = nm.Subscriber(place.storage, tmp_path / "engine", poll=0.1)
                newest -= 1  # a new one shows the newest again
            else:
                for pid in [job.ask("maker")[rank]] if victim == "maker" else job.agents(rank):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        step += 1
        while job.ask("publish", step) != [True, True] or job.ask("wait") != ["durable", "durable"]:
            step += 1
        for version in subscriber.follow(timeout=60):
            assert exact(version, out) and version.number > newest, (SEED, version)
            newest = version.number
            if version.step == step:
                break
        else:
            pytest.fail(f"seed {SEED}: the last publication did not come")
    finally:
        job.kill()
        subscriber.close()


@pytest.mark.nightly("test_a_follower_has_whole_tensors_of_each_step_and_reads_what_changed")
def test_columns_and_copies_of_tensors_are_put_together(place, follower, out):
    job = Job(place, out, "columns")
    try:
        for step in range(1, 4):
            assert job.ask("publish", step) == [True, True]
            assert exact(follower.prepare(60), out)
    finally:
        job.kill()


@pytest.mark.nightly
def test_of_slices_of_a_mesh_that_have_the_same_tensors_one_publishes(place, follower, out):
    job = Job(place, out, "slices", 4)
    try:
        for step in (1, 2):
            assert job.ask("publish", step) == [True] * 4
            assert exact(follower.prepare(60), out)
    finally:
        job.kill()


@pytest.mark.nightly("test_a_follower_has_whole_tensors_of_each_step_and_reads_what_changed")
@strided
def test_shards_of_fsdp2_and_tensor_parallelism_are_put_together_and_so_they_are_in_a_checkpoint(place, follower, out, tmp_path):
    """On a mesh of 2 x 2 ranks. FSDP2 divides the rows that tensor parallelism has left, so a rank has none that belong together."""
    job = Job(place, out, "2d", 4)
    try:
        for step in (1, 2):
            assert job.ask("publish", step) == [True] * 4
            version = follower.prepare(60)
            assert exact(version, out) and version.step == step
        assert job.ask("checkpoint", 2) == [True] * 4
        nm.export_hf(f"{place.storage}-dcp/step2", tmp_path / "exported")
        wanted, found = torch.load(out / "2.pt"), load_file(tmp_path / "exported" / "model.safetensors")
        assert wanted.keys() == found.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
        os.kill(job.ask("maker")[3], signal.SIGKILL)
        job.kill()
        job = Job(place, out, "2d", 4)
        assert job.ask("publish", 3) == [True] * 4
        while version.step != 3:
            version = follower.prepare(60)
            assert exact(version, out)
    finally:
        job.kill()


def planted(place, number: int, config: bytes = b"", value: int | None = None, is_durable: bool = True, **changes: object) -> nm.Session:
    """Writes a whole publication of two ranks, as their makers do, with changed documents. value: of the elements; None: the number.
    is_durable: False, it is that after the end of the session that this returns."""
    head, _ = safetensors_header({"w": torch.empty(4, dtype=torch.int16, device="meta")}, {})
    files = {"head": head} | ({"files/config.json": config} if config else {})
    for rank in range(2):
        data = safetensors_parts({"w": torch.tensor([number if value is None else value, rank], dtype=torch.int16)})
        data = data[0] + bytes(data[1].view(torch.uint8).tolist())
        begin = len(data) - 4
        (part,) = _nebula.delta_sums(data, [(len(head) + 4 * rank, 4, 2, 0, begin)])
        files |= {f"weights-{rank:05d}": data, f"parts-{rank:05d}": [list(part)]}
    ranks = changes.pop("ranks", 2)
    for name, change in changes.items():
        name = name.replace("_", "-")
        files[name] = change(files[name])
    about = About(number, number, number, 0, "model.safetensors", ranks)
    session = nm.Session(str(place.storage), world=1, persistent_time_interval=0 if is_durable else 10**6)
    with session.checkpoint(tag_of(number), metadata=about.stored()) as checkpoint:
        for name, content in files.items():
            checkpoint.save_bytes(name, content if isinstance(content, bytes) else json.dumps(content).encode())
    checkpoint.wait("durable" if is_durable else "committed")
    return session


HOSTILE = {
    "more ranks than files": {"ranks": 10**9},
    "a part beyond the end": {"parts_00001": lambda parts: [[10**15, *parts[0][1:]]]},
    "a part with a negative size": {"parts_00001": lambda parts: [[parts[0][0], -4, *parts[0][2:]]]},
    "a part of no number": {"parts_00001": lambda parts: [["x", *parts[0][1:]]]},
    "a part of another width": {"parts_00001": lambda parts: [[*parts[0][:2], 3, *parts[0][3:]]]},
    "a part with another sum": {"parts_00001": lambda parts: [[*parts[0][:3], 7, parts[0][4]]]},
    "a part with a negative sum": {"parts_00001": lambda parts: [[*parts[0][:3], -7, parts[0][4]]]},
    "no parts": {"parts_00001": lambda parts: []},
    "no list": {"parts_00001": lambda parts: b"no JSON"},
    "another rank's bytes": {"parts_00001": lambda parts: [[parts[0][0] - 4, *parts[0][1:]]]},
    "a header of many bytes": {"head": lambda head: safetensors_header({"w": torch.empty(1 << 40, device="meta")}, {})[0]},
    "a header of no JSON": {"head": lambda head: b"x" * 40},
}


def test_damaged_shards_are_never_shown(place, follower, caplog):
    planted(place, 1)
    for number, (name, changes) in enumerate(HOSTILE.items(), 1):
        version = follower.prepare(60)
        version.commit()
        planted(place, 2 * number, **changes)
        assert follower.prepare(0) is None and "cannot be staged yet" in caplog.text, name
        caplog.clear()
        kept = 2 * number - 1
        assert version.tensors()["w"].tolist() == [kept, 0, kept, 1], name
        planted(place, 2 * number + 1)


def test_a_chain_of_many_numbers_that_nobody_used_is_not_asked_for_one_by_one(place, follower, monkeypatch, caplog):
    planted(place, 1)
    follower.prepare(60).commit()
    session = nm.Session(str(place.storage), world=1, persistent_time_interval=0)
    for number, first in ((5000, 2), (5002, 1)):
        with session.checkpoint(tag_of(number), metadata=About(number, number, first, 0, "model.safetensors", 1).stored()) as checkpoint:
            checkpoint.save_bytes("delta-00000", b"")
        checkpoint.wait("durable")
        asked, get = [], follower._reader.get
        with monkeypatch.context() as patch:
            patch.setattr(follower._reader, "get", lambda tag, get=get, asked=asked: asked.append(tag) or get(tag))
            assert follower.prepare(0) is None and "cannot be staged yet" in caplog.text
        assert len(asked) < 20
    planted(place, 5003)
    assert follower.prepare(60).tensors()["w"].tolist() == [5003, 0, 5003, 1]


# fault (Memory): The memory of a subscriber fills up while it puts shards together.
# result: It has the space before it maps the file, or says so and tries again: it does not die of SIGBUS.
def test_a_subscriber_has_the_space_of_the_whole_file_before_it_maps_it(follower):
    head, _ = safetensors_header({"w": torch.empty(1 << 20, dtype=torch.int16, device="meta")}, {})
    whole = types.SimpleNamespace(read_bytes=lambda name: head, _all_files=lambda: {"head": len(head), "weights-00000": 3 << 20})
    about, slot = About(5, 5, 5, 0, "model.safetensors", 1), follower._slots[0]
    follower._begin_file(slot, [whole], about)
    file = os.stat(slot.directory / about.name)
    assert file.st_blocks * 512 >= file.st_size == len(head) + (2 << 20)


def test_the_files_beside_the_weights_are_those_of_the_run(place, follower):
    for number, config in enumerate([b"old", b"old", b"old", b"new", b"new", b"", b""], 1):
        planted(place, number, config)
        directory = follower.prepare(60).commit()
        assert b"".join(file.read_bytes() for file in directory.glob("config.json")) == config
        assert len(list(directory.iterdir())) == 1 + bool(config)


def test_a_delta_of_another_publication_with_the_same_number_does_not_stay(place, follower):
    planted(place, 1)
    follower.prepare(60).commit()
    planted(place, 2)
    for rank in range(2):
        follower._deltas[3, rank] = b"of a publication that was written again"
    with nm.Session(str(place.storage), world=1, persistent_time_interval=0).checkpoint(tag_of(3), metadata=About(3, 3, 2, 0, "model.safetensors", 2).stored()) as checkpoint:
        for rank in range(2):
            before, after = (torch.tensor([number, rank], dtype=torch.int16).numpy().tobytes() for number in (2, 3))
            (part,) = _nebula.delta_sums(before, [(0, 4, 2, 0)])
            size = os.stat(follower.current / "model.safetensors").st_size
            delta, _ = _nebula.delta_make(before, after, [(size - 8 + 4 * rank, 4, 2, part[3], 0)], 1 << 60, size)
            checkpoint.save_bytes(f"delta-{rank:05d}", delta)
    checkpoint.wait("durable")
    version = follower.prepare(60)
    assert version.number == 3 and version.tensors()["w"].tolist() == [3, 0, 3, 1]


@pytest.mark.parametrize("is_during_the_wait", [False, True])
def test_what_was_staged_of_a_publication_that_was_lost_is_not_shown_as_another_one_with_its_number(place, follower, monkeypatch, is_during_the_wait):
    planted(place, 1)
    follower.prepare(60).commit()
    lost = [planted(place, 2, value=7, is_durable=False)]
    wait, waits = nm.Checkpoint.wait, []

    def replace() -> None:
        place.lose_memory()
        lost.clear()
        planted(place, 2, value=8)

    def waited(checkpoint: nm.Checkpoint, state: str = "durable", timeout: float | None = None) -> None:
        waits.append(state)
        if len(waits) > 1:
            return wait(checkpoint, state, timeout)
        if not is_during_the_wait:
            raise nm.NebulaTimeout("storage is away")
        replace()

    monkeypatch.setattr(nm.Checkpoint, "wait", waited)
    if not is_during_the_wait:
        assert follower.prepare(0) is None and waits == ["durable"]
        replace()
    assert follower.prepare(60).tensors()["w"].tolist() == [8, 0, 8, 1]


def test_dtensors_without_a_process_group_are_refused(place):
    class Sharded(torch.Tensor):
        placements = ()

    with nm.Publisher({"w": torch.ones(3).as_subclass(Sharded)}, place.storage) as publisher:
        with pytest.raises(NebulaConfigError, match="process group"):
            publisher.publish(1)


def test_a_dimension_that_is_divided_twice_is_refused_if_torch_does_not_say_in_which_order(monkeypatch):
    kinds = shards._kinds()
    monkeypatch.setattr(shards, "_kinds", lambda: types.SimpleNamespace(Shard=kinds.Shard, Replicate=kinds.Replicate))  # as torch 2.4
    with pytest.raises(NebulaConfigError, match="full_tensor"):
        shards._local("w", types.SimpleNamespace(placements=(kinds.Shard(0), kinds.Shard(0))), 0)


PARTS = [  # the sizes of the whole, and the ranges of a rank in each dimension
    ((6, 4), [[(3, 2)], [(0, 4)]]),
    ((4, 6), [[(0, 4)], [(3, 2)]]),
    ((2, 3, 5), [[(0, 2)], [(2, 1)], [(0, 5)]]),
    ((2, 3, 5), [[(1, 1)], [(0, 3)], [(3, 2)]]),
    ((9, 2), [[(1, 2), (5, 3)], [(0, 2)]]),
    ((2, 7), [[(0, 2)], [(6, 1), (0, 2)]]),
    ((7, 6), [[(0, 1), (4, 2)], [(1, 1), (3, 3)]]),
    ((), []),
]


@pytest.mark.parametrize(("whole", "ranges"), PARTS)
def test_the_pieces_of_a_shard_are_its_elements_in_the_whole(whole, ranges):
    local = torch.arange(torch.Size(whole).numel()).reshape(whole)
    for dimension, each in enumerate(ranges):
        local = torch.cat([local.narrow(dimension, begin, count) for begin, count in each], dimension)
    found = [(inside + i, at + i) for inside, at, count in shards._runs(whole, ranges) for i in range(count)]
    assert found == list(enumerate(local.flatten().tolist()))


@strided
@pytest.mark.parametrize("size", [1, 3, 8, 9, 24, 47])
@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (4, 2), (3, 4)])
def test_the_rows_of_a_rank_are_those_that_fsdp2_and_tensor_parallelism_give_it_or_its_shard_is_refused(size, data, tensor):
    kinds = shards._kinds()
    placements = (kinds._StridedShard(0, split_factor=tensor), kinds.Shard(0))
    for first, second in itertools.product(range(data), range(tensor)):
        wanted = shards._chunks(shards._chunks(torch.arange(size), tensor)[second], data)[first].tolist()  # as both divide their tensors
        (ranges,) = shards._ranges((size,), (data, tensor), (first, second), placements)
        found = [begin + at for begin, count in ranges for at in range(count)]
        assert found == wanted or len(found) != len(wanted)  # a shard of another size is refused
        if size % (data * tensor) == 0:
            assert found == wanted
