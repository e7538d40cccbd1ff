"""Lightning's Fabric, and FSDP and ModelParallel of Trainer and Fabric: killed, resumed, and stock Lightning reads the files."""

import shutil
import subprocess

import pytest
from conftest import FULL, Url, files_below, full, interpreter
from waiting import until

SHARDED = ["fabric-parallel", *(pytest.param(kind, marks=full) for kind in ("fabric-fsdp", "parallel", "fsdp"))]


def job(node, kind, *more, directory="ckpts", ranks=2, **options):
    return node.run(
        interpreter("lightning"), "sharded_job.py", "--kind", kind, "--dirpath", node.base / directory, *more, ranks=ranks, **options
    )


def name(kind, step):
    return f"step-{step}.ckpt" if kind.startswith("fabric") else f"step={step}.ckpt"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=full)])
def test_fabric_resumes_bit_for_bit_after_sigkill_and_its_files_are_those_of_stock(node, ranks):
    whole = job(node, "fabric", "--stock", directory="stock", ranks=ranks)
    node.environment["NEBULA_STORE_MBPS"] = "0.01"  # memory alone has the newest one when the job resumes
    job(node, "fabric", "--persist", node.persist, "--kill-at", 5, ranks=ranks, check=False)
    newest = node.base / "ckpts" / "step-4.ckpt"
    assert not newest.exists()
    again = job(node, "fabric", "--persist", node.persist, "--ckpt", "newest", ranks=ranks)
    assert again.resumed == 4 and again.end["seen"] == [1, 2, 3, 4, 5, 6]
    assert len(again.losses) == 2 and again.losses == whole.losses_after(4)
    until(newest.exists)
    if not FULL:
        return
    from_stock = job(node, "fabric", "--ckpt", node.base / "stock" / "step-4.ckpt", ranks=ranks)
    to_stock = job(node, "fabric", "--stock", "--ckpt", node.base / "ckpts" / "step-4.ckpt", directory="stock", ranks=ranks)
    assert from_stock.losses == to_stock.losses == whole.losses_after(4)


@pytest.mark.nightly("test_fabric_resumes_bit_for_bit_after_sigkill_and_its_files_are_those_of_stock", "frameworks/test_dcp.py::test_fsdp2_resumes_bit_for_bit_after_sigkill_and_stock_load_reads_it")
@pytest.mark.parametrize("kind", SHARDED)
def test_sharded_checkpoints_resume_bit_for_bit_after_sigkill_and_stock_reads_them(node, kind):
    whole = job(node, kind, "--stock", directory="stock")
    node.environment["NEBULA_STORE_MBPS"] = "0.01"  # nothing of it is in storage when the job resumes
    job(node, kind, "--kill-at", 5, check=False)
    path = node.base / "ckpts" / name(kind, 4)
    assert not path.exists()
    again = job(node, kind, "--ckpt", path)
    assert len(again.losses) == 2 and again.losses == whole.losses_after(4)
    until(path.exists)  # the agent goes on after the jobs
    assert files_below(path) == files_below(node.base / "stock" / name(kind, 4))
    if not FULL:
        return
    to_stock = job(node, kind, "--stock", "--ckpt", path, directory="stock")
    assert to_stock.losses == whole.losses_after(4)
    node.forget_memory()
    shutil.rmtree(node.base / ".nebula")
    if isinstance(node.persist, Url):  # what the object store has is lost, too
        node.environment["NEBULA_PERSISTENT_STORAGE_PATH"] = node.persist / "empty"
    from_files = job(node, kind, "--ckpt", path)
    assert from_files.losses == whole.losses_after(4)


@full
@pytest.mark.parametrize("kind", ["fsdp", "parallel"])
def test_sharded_checkpoints_that_lightning_removes_go_everywhere(node, kind):
    whole = job(node, kind, "--keep", 1)
    assert whole.end["files"] == [name(kind, 6)]


# fault (Deaths): A job starts again, and the node that had rank 0 still writes the directory of a sharded checkpoint, and has another rank now.
# result: All ranks wait for that directory, and load it.
def test_all_nodes_load_the_directory_that_the_node_of_another_rank_still_writes(node, monkeypatch):
    whole = job(node, "fabric-parallel", "--stock", directory="stock")
    node.environment["NEBULA_STORE_MBPS"] = "0.01"
    job(node, "fabric-parallel", "--kill-at", 5, nodes=True, check=False)
    path = node.base / "ckpts" / "step-4.ckpt"
    assert not path.exists(), "storage was too fast for this test"
    of_rank = node.of_rank
    monkeypatch.setattr(node, "of_rank", lambda rank: of_rank(1 - rank))
    again = job(node, "fabric-parallel", "--ckpt", path, nodes=True)
    assert again.resumed == 4 and again.losses == whole.losses_after(4)


def test_the_state_beside_the_shards_is_loaded_as_torch_load_does_by_itself(node):
    text = """
import types
from nebulaml.integrations import lightning_sharded
seen = []
kind = lightning_sharded._for_trainer("FSDPStrategy", None, "model", lambda *given: None)
strategy = kind.__new__(kind)
strategy._model, strategy._optimizers = None, []
strategy._lightning_module = types.SimpleNamespace(trainer=types.SimpleNamespace(state=types.SimpleNamespace(fn="test")), strict_loading=True)
strategy._nebula_find = lambda path: types.SimpleNamespace(load_file=lambda name, weights_only: seen.append(weights_only) or {})
for given in (None, False, True):
    strategy.load_checkpoint("a.ckpt", weights_only=given)
assert seen == [True, False, True], seen
"""
    done = subprocess.run([interpreter("lightning"), "-W", "ignore", "-c", text], env=node.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


# fault (The machine and other users): The agent of one rank does not answer when Lightning saves a sharded checkpoint.
# result: All ranks raise, and none waits for another one.
def test_a_rank_that_has_no_place_for_a_sharded_checkpoint_is_heard_by_all_ranks(node):
    text = """
import types
from nebulaml.errors import NebulaUnavailable
from nebulaml.integrations import lightning_sharded, together
told = []
kind = lightning_sharded._for_trainer("FSDPStrategy", None, "model", lambda *given: None)

def fail(path):
    raise NebulaUnavailable("no agent answers")

for of_all, home in ((lambda value: told.append(value) or [value], fail), (lambda value: [value, "OSError: a disk"], lambda path: (None, ""))):
    together._of_all = of_all
    strategy = kind.__new__(kind)
    strategy._checkpoint_io = types.SimpleNamespace(home=home)
    try:
        strategy._nebula_save({}, {}, "/x/a.ckpt")
    except Exception as failure:
        told.append(f"{type(failure).__name__}: {failure}")
assert told == ["NebulaUnavailable: no agent answers"] * 2 + ["NebulaStorageError: rank 1: OSError: a disk. No rank saves it"], told
"""
    done = subprocess.run([interpreter("lightning"), "-W", "ignore", "-c", text], env=node.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
