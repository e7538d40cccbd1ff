"""torch.distributed.checkpoint and FSDP2: stock readers, other world sizes, saves in flight, real kills."""

import io
import pickle
import subprocess
import sys
import textwrap

import pytest
from conftest import ENDING, LIMIT_S, Url, directory_only, full
from ports import held_port


def job(node, *more, **options):
    return node.run(sys.executable, "dcp_job.py", "--path", node.persist, *more, **options)


def close(losses, others):
    assert losses.keys() == others.keys()
    for step, loss in losses.items():
        assert loss == pytest.approx(others[step], rel=1e-4), step


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the losses of an uninterrupted run on two ranks."""
    from conftest import Node

    node = Node(tmp_path_factory.mktemp("whole"))
    try:
        yield job(node, ranks=2).losses
    finally:
        node.close()


@pytest.mark.parametrize("way", [pytest.param("save", marks=full), "nebula-async", pytest.param("stock-async", marks=full)])
def test_fsdp2_resumes_bit_for_bit_after_sigkill_and_stock_load_reads_it(node, way, whole):
    killed = job(node, "--way", way, "--kill-at", 3, ranks=2, check=False)
    assert killed.codes == [-9, -9], node.logs()
    assert job(node, "--load", 3, ranks=2).losses == {step: loss for step, loss in whole.items() if step > 3}
    node.wait_durable("step3")
    node.forget_memory()
    reader = [] if isinstance(node.persist, Url) else ["--stock-load"]  # which would need s3fs, adlfs or gcsfs
    assert job(node, "--load", 3, *reader, "--steps", 4, ranks=2).losses == {4: whole[4]}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_another_number_of_ranks_resumes_from_the_same_files(node, before, after, whole):
    """130, 47 and 5 rows: shards are uneven, and one of three ranks has none of the last layer's bias."""
    job(node, "--steps", 3, ranks=before)
    node.wait_durable("step3")
    close(job(node, "--load", 3, ranks=after).losses, {step: loss for step, loss in whole.items() if step > 3})


def script(node, text):
    path = node.base / "script.py"
    path.write_text(text)
    done = subprocess.run([sys.executable, ENDING, path], env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


STATE = """
import os, torch, torch.distributed.checkpoint as dcp
import nebulaml as nm
from nebulaml.dcp import NebulaStager, NebulaStorageReader, NebulaStorageWriter, async_save
def state(value):
    big = torch.full((300, 7), float(value))
    return {"big": big, "tied": big, "row": big[3], "half": torch.full((5,), value, dtype=torch.bfloat16), "zero": torch.tensor(value),
            "empty": torch.empty(0, 4), "turned": torch.arange(12.0).reshape(3, 4).t() * value, "note": {"value": value, "list": [1, value]}}
def load(found, path, **options):  # by torch's own reader, which reads directories alone
    dcp.load(found, **({"storage_reader": NebulaStorageReader(path)} if "://" in path else {"checkpoint_id": path}), **options)
def same(found, value):
    wanted = state(value)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor) if name != "note" else found[name] == tensor, (name, found[name])
"""


@pytest.mark.nightly("test_fsdp2_resumes_bit_for_bit_after_sigkill_and_stock_load_reads_it")
@directory_only("the tools and the own reader of torch.distributed.checkpoint read files")
def test_stock_tools_read_what_one_process_saved(node):
    script(node, STATE + f"""
path = {str(node.persist / "tag7")!r}
given = state(7)
async_save(given, checkpoint_id=path).result(timeout=60)
assert {{".metadata", "__0_0.distcp"}} <= set(os.listdir(path)), os.listdir(path)
found = state(0)
dcp.load(found, checkpoint_id=path)
same(found, 7)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(path, "whole.pt")
same(torch.load("whole.pt", weights_only=True), 7)
""")  # fmt: skip


@pytest.mark.parametrize(("first", "second"), [("~/", "file://HOME/"), ("file://HOME/", "HOME/"), ("HOME/", "~/")])
def test_a_home_directory_and_a_file_url_lead_to_the_same_place(node, first, second):
    script(node, STATE + f"""
home = os.environ["HOME"] = os.getcwd()
first, second = ({first!r} + "persist/tag7").replace("HOME", home), ({second!r} + "persist").replace("HOME", home)
if second.startswith("file://"):
    nm.init(second)
async_save(state(7), checkpoint_id=first).result(timeout=60)
assert os.path.exists(home + "/persist/tag7/.metadata") and not {{"~", "file:"}} & set(os.listdir(home))
found = state(0)
dcp.load(found, storage_reader=NebulaStorageReader(second + "/tag7"))
same(found, 7)
try:
    async_save(state(7), checkpoint_id="ftp://host/tag7")
except nm.NebulaConfigError as error:
    assert "ftp://host/tag7" in str(error)
else:
    raise AssertionError("saved")
""")  # fmt: skip


def test_an_init_that_names_no_path_leaves_it_to_the_checkpoint_id(node):
    script(node, STATE + f"""
path = {str(node.persist / "tag7")!r}
nm.init(num_of_version_in_retention=3)
async_save(state(7), checkpoint_id=path).result(timeout=60)
assert nm.persist_path() == os.path.dirname(path)
nm._shutdown()  # as in a new process
found = state(0)
load(found, path)
same(found, 7)
""")  # fmt: skip


def test_it_loads_from_memory_before_anything_is_in_storage(node):
    script(node, STATE + f"""
path = {str(node.persist / "tag7")!r}
nm.init(persistent_storage_path={str(node.persist)!r}, persistent_time_interval=3600)
dcp.save(state(1), storage_writer=NebulaStorageWriter(path.replace("tag7", "tag6")))  # the first one persists at once
dcp.save(state(7), storage_writer=NebulaStorageWriter(path))
assert not os.path.exists(os.path.join(path, ".metadata"))
found = state(0)
dcp.load(found, storage_reader=NebulaStorageReader(path))
same(found, 7)
""")  # fmt: skip


@pytest.mark.parametrize("way", ["async_save(given, checkpoint_id=path)", "dcp.async_save(given, checkpoint_id=path, storage_writer=writer)"])
def test_saves_in_flight_hold_the_values_of_their_own_call(node, way):
    script(node, STATE + f"""
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1) if "dcp." in {way!r} else None
writer = NebulaStorageWriter()
given, futures = state(0), []
for value in range(1, 6):
    for name, tensor in state(value).items():
        if name == "note":
            given[name]["value"] = given[name]["list"][1] = value
        elif name not in ("tied", "row"):
            given[name].copy_(tensor)
    path = os.path.join({str(node.persist)!r}, f"tag{{value}}")
    futures.append({way})
for name in ("big", "half", "zero", "turned"):
    given[name].fill_(-1)
[future.result(timeout=60) for future in futures]
nm.flush_persistence()
for value in range(1, 6):
    found = state(0)
    load(found, os.path.join({str(node.persist)!r}, f"tag{{value}}"))
    same(found, value)
""")  # fmt: skip


ALIKE = """
import json, os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from nebulaml.dcp import NebulaStorageReader, async_save
dist.init_process_group("gloo")
def load(found, path, **options):  # by torch's own reader, which reads directories alone
    dcp.load(found, **({"storage_reader": NebulaStorageReader(path)} if "://" in path else {"checkpoint_id": path}), **options)
rank, planned, plain = dist.get_rank(), 0, dcp.save
def counted(*args, **kwargs):
    global planned
    planned += 1
    return plain(*args, **kwargs)
dcp.save = counted
def state(value, length=1, rows=3):  # what differs is rank 1's alone
    more = {"text1": "x" * length, "own1": torch.full((rows, 2), value + 0.5)} if rank else {"own0": torch.full((5,), value + 0.25)}
    return {"both": torch.full((300, 7), float(value)), "step": value, "zero": 0.0 if value % 2 else -0.0, **more}
kinds, counts, given = [{}, {}, {"length": 700}, {"length": 700}, {"rows": 4}, {"rows": 4}, {"length": 700}], [], {}
for value, kind in enumerate(kinds):
    path = os.path.join(sys.argv[1], f"tag{value}")
    future = async_save(state(value, **kind), checkpoint_id=path)
    counts.append(planned)
    assert future.result(timeout=60).storage_meta.checkpoint_id == path
dist.barrier()
for value, kind in enumerate(kinds):
    found, wanted = state(99, **kind), state(value, **kind)
    load(found, os.path.join(sys.argv[1], f"tag{value}"))
    for name, kept in wanted.items():
        assert torch.equal(found[name], kept) if isinstance(kept, torch.Tensor) else repr(found[name]) == repr(kept), (value, name, found[name])
print(json.dumps({"end": True, "counts": counts}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_plan_again_only_when_the_shape_of_some_ranks_state_has_changed(node):
    (node.base / "alike.py").write_text(ALIKE)
    assert node.run(sys.executable, node.base / "alike.py", node.persist, ranks=2).end["counts"] == [1, 1, 2, 2, 3, 3, 4]


SOME = """
import json, os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import nebulaml as nm
from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter, async_save
dist.init_process_group("gloo")
rank, persist = dist.get_rank(), sys.argv[1]
groups = {name: dist.new_group(ranks) for name, ranks in {"first": [0], "last": [2], "two": [1, 2]}.items()}
def state(value):  # `own` is another on each rank, and rank 1 has nothing but its share of `both`
    return {"both": torch.full((5, 3), float(value)), **({f"own{rank}": torch.full((4,), value + rank / 10)} if rank != 1 else {})}
def save(way, path, value, **options):
    if way == "ours":
        async_save(state(value), checkpoint_id=path, **options).result(timeout=60)
    else:
        dcp.save(state(value), storage_writer=NebulaStorageWriter(path), **options)
        assert nm.flush_persistence(os.path.basename(path), timeout=60)
def check(path, value, **options):
    for reader in (NebulaStorageReader(path), *([] if "://" in path else [dcp.FileSystemReader(path)])):
        found = state(0)
        dcp.load(found, storage_reader=reader, **options)
        assert all(torch.equal(found[name], kept) for name, kept in state(value).items()), (path, rank, found)
for way in ("ours", "torch"):
    for value in (1, 2):  # the second time ours knows the plan
        for name, group in groups.items():
            path = f"{persist}/{way}-{name}-{value}"
            if dist.get_rank(group) >= 0:
                save(way, path, value, process_group=group)
                check(path, value, process_group=group)
    for alone in (0, 1):
        if rank == alone:
            save(way, f"{persist}/{way}-alone{alone}", 3, no_dist=True)
            check(f"{persist}/{way}-alone{alone}", 3, no_dist=True)
    dist.barrier()
    path = f"{persist}/{way}-each"
    save(way, path, 4 + rank, use_collectives=False)
    dist.barrier()
    check(path, 4 + rank)
    files = nm.get_checkpoint(os.path.basename(path)).files
    assert {f"__{one}{name}" for one in range(3) for name in (".metadata", "_0.distcp")} <= set(files), files
    save(way, path + "-again", 7)
    dist.barrier()
    check(path + "-again", 7)
if rank in (1, 2):
    async_save(state(8 + rank), checkpoint_id=f"{persist}/two-each", process_group=groups["two"], use_collectives=False).result(timeout=60)
    check(f"{persist}/two-each", 8 + rank, process_group=groups["two"])
    if rank == 2:
        try:
            save("torch", f"{persist}/refused", 9, process_group=groups["last"], use_collectives=False)
        except nm.NebulaConfigError as error:
            assert "rank 2 saves" in str(error) and "use_collectives=True" in str(error), error
        else:
            raise AssertionError("saved")
dist.barrier()
assert nm.flush_persistence(timeout=60)
print(json.dumps({"end": True}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


# fault (Arguments of the caller): DCP saves with a part of the ranks (`process_group`, `no_dist`), or without
# collectives.
# result: The version is complete with the files of those ranks. Each rank loads what it saved.
@pytest.mark.parametrize("nodes", [False, True])
def test_a_save_by_some_ranks_is_complete_with_theirs_and_one_without_collectives_has_all_ranks_values(node, nodes):
    node.environment["NEBULA_TAKEOVER_S"] = "2"  # the agent of rank 0 does not know the saves of ranks on other nodes
    (node.base / "some.py").write_text(SOME)
    assert node.run(sys.executable, node.base / "some.py", node.persist, ranks=3, nodes=nodes).end


def test_a_stager_of_ours_serves_another_writer(node):
    script(node, STATE + """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
stager, given = NebulaStager(), state(1)
futures = []
for value in (1, 2, 3):
    given["big"].fill_(value)
    futures.append(dcp.async_save({"big": given["big"]}, checkpoint_id=f"plain{value}", async_stager=stager))
[future.result(timeout=60) for future in futures]
for value in (1, 2, 3):
    found = {"big": torch.zeros(300, 7)}
    dcp.load(found, checkpoint_id=f"plain{value}")
    assert (found["big"] == value).all()
""")  # fmt: skip


def test_staged_dtensors_keep_their_values_and_their_memory_is_used_again_when_they_are_gone(node):
    script(node, """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from nebulaml.dcp import NebulaStager
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
weight = distribute_tensor(torch.ones(40, 7), init_device_mesh("cpu", (1,)), [Shard(0)])
stager = NebulaStager()
def place(state):
    return state["weight"].to_local().data_ptr()
first = stager.stage({"weight": weight})
weight.mul_(2)
second = stager.stage({"weight": weight})
assert (first["weight"].to_local() == 1).all() and (second["weight"].to_local() == 2).all()
gone = place(first)
del first
assert place(stager.stage({"weight": weight})) == gone != place(second)
kept = stager.stage({"tensor": torch.ones(3)})["tensor"][1:]
stager.stage({"tensor": torch.zeros(3)})
assert (kept == 1).all()
""")  # fmt: skip


SHARDED = """
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.distributed._shard.sharded_tensor as sharded
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter, async_save
dist.init_process_group("gloo")
rank = dist.get_rank()
def state(value):
    tensor = sharded.zeros(ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"]), 5, 2)
    tensor.local_shards()[0].tensor.fill_(value + rank)
    return {"model": {"weight": tensor}}
def values(state):
    return [shard.tensor.unique().tolist() for shard in state["model"]["weight"].local_shards()]
for way in ("ours", "torch", "at once"):
    path, given = f"{PERSIST}/{way}", state(3)
    writer = NebulaStorageWriter(path)
    if way == "ours":
        future = async_save(given, checkpoint_id=path)
    elif way == "torch":
        future = dcp.async_save(given, storage_writer=writer, async_stager=writer, process_group=dist.new_group(backend="gloo"))
    else:
        future = dcp.save(given, storage_writer=writer)
    given["model"]["weight"].local_shards()[0].tensor.fill_(9)
    if way != "at once":
        future.result(timeout=60)
    for reader in (NebulaStorageReader(path), *([] if "://" in path else [dcp.FileSystemReader(path)])):
        if way != "ours" and isinstance(reader, dcp.FileSystemReader):
            continue  # nobody has waited until it is in storage
        found = state(0)
        dist.barrier()
        dcp.load(found, storage_reader=reader)
        assert values(found) == [[3.0 + rank]], (way, values(found))
print('{"end": true}', flush=True)
"""


def test_sharded_tensors_of_fsdp1_hold_the_values_of_the_call(node):
    (node.base / "sharded.py").write_text(SHARDED.replace("{PERSIST}", str(node.persist)))
    assert node.run(sys.executable, node.base / "sharded.py", ranks=2).end


@pytest.mark.parametrize(
    ("make", "what"),
    [
        ("torch.eye(3).to_sparse()", "layout torch.sparse_coo"),
        ("torch.eye(3).to_sparse_csr()", "layout torch.sparse_csr"),
        ("torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)", "a quantized tensor"),
        ("__import__('torch.testing._internal.two_tensor', fromlist=['']).TwoTensor(torch.ones(3), torch.ones(3))", "a TwoTensor"),
    ],
)
def test_a_tensor_that_is_more_than_its_bytes_is_refused_by_name(node, make, what):
    script(node, STATE + f"""
given = {{"model": {{"weight": torch.ones(2), "odd": {make}}}}}
writer = NebulaStorageWriter({str(node.persist)!r} + "/tag")
for attempt in (
    lambda: writer.stage(given),
    lambda: dcp.save(given, storage_writer=writer),
    lambda: async_save(given, checkpoint_id={str(node.persist)!r} + "/tag"),
):
    try:
        attempt()
    except BaseException as error:
        assert "model.odd: " in str(error) and {what!r} in str(error), error
    else:
        raise AssertionError("saved")
""")  # fmt: skip


def test_a_writer_behind_a_reader_persists_every_version_and_a_save_cannot_be_cancelled(node):
    script(node, STATE + f"""
path = {str(node.persist)!r} + "/tag"
future = async_save(state(1), checkpoint_id=path + "1")
assert not future.cancel()
future.result(timeout=60)
nm._shutdown()  # as in a new process
dcp.load(state(0), storage_reader=NebulaStorageReader(path + "1"))
for value in (2, 3, 4):
    dcp.save(state(value), storage_writer=NebulaStorageWriter(path + str(value)))
""")  # fmt: skip
    for tag in ("tag2", "tag3", "tag4"):  # tag3 is neither the first since the reader nor the newest
        node.wait_durable(tag)


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('ran')",))


def test_hostile_metadata_is_refused_before_it_runs():
    from nebulaml.dcp.reader import _MetadataUnpickler
    from nebulaml.errors import NebulaCorrupt


    with pytest.raises(NebulaCorrupt, match="exec"):
        _MetadataUnpickler(io.BytesIO(pickle.dumps(Evil()))).load()


def test_a_missing_checkpoint_is_named(node):
    script(node, STATE + f"""
try:
    dcp.load(state(0), storage_reader=NebulaStorageReader({str(node.persist / "tag1")!r}))
except dcp.CheckpointException as failure:  # docs/frameworks.md: torch's own, which no `except Exception` catches
    (error,) = (cause for cause, _ in failure.failures.values())
    assert "tag1" in str(error) and {str(node.persist)!r} in str(error), error
else:
    raise AssertionError("loaded")
""")  # fmt: skip


PROCESS = """
if __name__ == "__main__":
    import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    import nebulaml as nm
    from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    dist.init_process_group("gloo")
    nm.init(sys.argv[1], 0, on_error="raise")
    state, path = {"w": torch.ones(9)}, sys.argv[1] + "/step1"
    future = dcp.async_save(state, checkpoint_id=path, storage_writer=NebulaStorageWriter(), async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    try:
        future.result()
    except BaseException as failure:
        print(type(failure).__name__, "leave async_checkpointer_type out" in str(failure), flush=True)
    dcp.async_save(state, checkpoint_id=path, storage_writer=NebulaStorageWriter()).result()  # the trainer is still the only rank
    found = {"w": torch.zeros(9)}
    dcp.load(found, storage_reader=NebulaStorageReader(path))
    print(found["w"].sum().item(), flush=True)
    os._exit(0)
"""


@full
def test_a_save_in_a_process_of_torchs_own_is_refused_with_what_to_do(node, this_python):
    script = node.base / "process.py"
    script.write_text(textwrap.dedent(PROCESS))
    with held_port() as held:
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        command = [this_python, "-W", "ignore", script, str(node.persist)]
        done = subprocess.run(command, env=node.environment | variables, cwd=node.base, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.splitlines() == ["CheckpointException True", "9.0"], done.stderr
