"""accelerate through nebulaml.attach(accelerator): save_state and load_state, with the same files as without Nebula, complete and durable."""

import os
import subprocess

import pytest
from conftest import Result, directory_only, files_below, full, interpreter
from waiting import until

ENV = "hf"


@pytest.fixture(autouse=True, params=["hf", pytest.param("hf-oldest", marks=full)])
def environment(request):
    global ENV
    ENV = request.param


def job(node, *more, directory="run", **options):
    return node.run(interpreter(ENV), "accelerate_job.py", "--output", node.base / directory, *more, **options)


def stock(node, *more, **options):
    return job(node, "--way", "stock", *more, directory="stock", **options)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=full)])
def test_load_state_after_sigkill_equals_uninterrupted_training(node, ranks):
    whole = stock(node, ranks=ranks)
    job(node, "--kill-at", 5, ranks=ranks, check=False)
    again = job(node, "--resume", node.base / "run" / "step_4", ranks=ranks)  # at once: the checkpoint may not be durable yet
    assert files_below(node.base / "run" / "step_4") == files_below(node.base / "stock" / "step_4")
    assert again.resumed == 4
    assert again.losses == whole.losses_after(4)
    assert again.end["weights"] == whole.end["weights"]


@directory_only("the agents of both nodes end without a word")
@pytest.mark.parametrize("is_swapped", [False, True])
def test_all_nodes_load_the_state_that_one_of_them_puts_in_place(node, is_swapped, monkeypatch):
    job(node, "--automatic", "--steps", 2, ranks=2, nodes=True)
    for rank in (0, 1):
        node.forget_memory(rank)
    node.environment["NEBULA_STORE_MBPS"] = "0.02"
    job(node, "--automatic", "--resume", "newest", "--kill-at", 4, ranks=2, nodes=True, check=False)
    assert os.listdir(node.base / "run" / "checkpoints") == ["checkpoint_0"], "storage was too fast for this test"
    if is_swapped:
        of_rank = node.of_rank
        monkeypatch.setattr(node, "of_rank", lambda rank: of_rank(1 - rank))
    log = node.base / "accelerate_job-rank1.log"
    before = log.stat().st_size
    first = job(node, "--automatic", "--resume", "newest", "--start", ranks=2, nodes=True)
    second = Result(log.read_text(errors="replace")[before:], [])
    assert [line["started"] for line in first.lines + second.lines if "started" in line] == [4, 4]


# fault: as test_two_ranks_resume_bit_for_bit
def test_all_ranks_load_the_newest_state_that_rank_0_finds(node):
    job(node, "--automatic", "--steps", 4, ranks=2)
    log = node.base / "accelerate_job-rank1.log"
    before = log.stat().st_size
    first = job(node, "--automatic", "--resume", "newest", "--start", "--hide", "checkpoint_1", ranks=2)
    second = Result(log.read_text(errors="replace")[before:], [])
    assert [line["started"] for line in first.lines + second.lines if "started" in line] == [4, 4]


# fault (Arguments of the caller): accelerate saves the gradient scaler and the data loader's state on every rank under one name.
# result: Rank 0's files are in the checkpoint, and ranks of several nodes save and load it.
@pytest.mark.parametrize("environment", ["hf"], indirect=True)
def test_files_that_accelerate_saves_on_every_rank_are_saved_once(node):
    job(node, "--scaled", "--steps", 2, ranks=2, nodes=True)
    folder = node.base / "run" / "step_2"
    until(folder.exists)
    assert {"dl_state_dict.bin", "scaler.pt"} <= set(files_below(folder))
    reading = "import sys, torch; print(torch.load(sys.argv[1])['rank'], torch.load(sys.argv[2])['scale'])"
    done = subprocess.run([interpreter(ENV), "-c", reading, folder / "dl_state_dict.bin", folder / "scaler.pt"], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "8.0"], done.stderr
    again = job(node, "--scaled", "--resume", folder, "--steps", 4, ranks=2, nodes=True)
    assert again.resumed == 2
    until((node.base / "run" / "step_4").exists)


@full
@pytest.mark.parametrize("environment", ["hf"], indirect=True)
def test_fsdp2_loads_its_state_after_sigkill_bit_for_bit_and_stock_loads_it(node):
    whole = stock(node, "--fsdp", ranks=2)
    job(node, "--fsdp", "--kill-at", 5, ranks=2, check=False)
    newest = node.base / "run" / "step_4"
    until(newest.exists)
    files = files_below(newest)
    assert files == files_below(node.base / "stock" / "step_4")
    assert {f"{part}/__{rank}_0.distcp" for part in ("pytorch_model_fsdp_0", "optimizer_0") for rank in (0, 1)} <= set(files)
    for again in (stock, job):
        result = again(node, "--fsdp", "--resume", newest, ranks=2)
        assert result.losses == whole.losses_after(4)
        assert result.end["weights"] == whole.end["weights"]


@full
@pytest.mark.parametrize("environment", ["hf-deepspeed"], indirect=True)
def test_deepspeed_loads_its_state_after_sigkill_bit_for_bit_and_stock_loads_it(node):
    whole = stock(node, "--deepspeed", 1, ranks=2)
    job(node, "--deepspeed", 1, "--kill-at", 5, ranks=2, check=False)
    newest = node.base / "run" / "step_4"
    until(newest.exists)
    assert files_below(newest) == files_below(node.base / "stock" / "step_4")
    for again in (stock, job):
        result = again(node, "--deepspeed", 1, "--resume", newest, ranks=2)
        assert result.losses == whole.losses_after(4)
        assert result.end["weights"] == whole.end["weights"]


def test_stock_loads_it_and_the_other_way(node):
    whole = stock(node)
    job(node)
    assert stock(node, "--resume", node.base / "run" / "step_4").losses == whole.losses_after(4)
    assert job(node, "--resume", node.base / "stock" / "step_4").losses == whole.losses_after(4)


def test_directories_that_accelerate_numbers_and_limits_are_found_by_it(node):
    whole = stock(node, "--automatic")
    job(node, "--automatic", "--kill-at", 5, check=False)
    again = job(node, "--automatic", "--resume", "newest")
    assert again.losses == whole.losses_after(4)
    assert sorted(os.listdir(node.base / "stock" / "checkpoints")) == ["checkpoint_2", "checkpoint_3"]
    until(lambda: sorted(os.listdir(node.base / "run" / "checkpoints")) == ["checkpoint_2", "checkpoint_3"])
    assert job(node, "--automatic", "--resume", "newest", "--way", "stock").resumed == 8


def program(node, code):
    """Runs code in one process of accelerate's environment. `accelerator` is attached, and has a model and its optimizer."""
    text = """
import os, sys, torch, accelerate, nebulaml as nm
from nebulaml._session import engine
base = sys.argv[1]
def attached(**options):
    accelerator = nm.attach(accelerate.Accelerator(cpu=True, **options))
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator
"""
    command = [interpreter(ENV), "-W", "ignore", "-c", text + code, str(node.base)]
    done = subprocess.run(command, env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@directory_only("the adapter's own place for its storage is a directory")
def test_an_init_that_names_no_path_or_a_question_before_leaves_the_path_to_the_adapter(node):
    program(node, """
assert nm.persist_path() is None and not nm.is_initialized()
nm.init(num_of_version_in_retention=3)
accelerator = attached()
accelerator.save_state(base + "/step_1")
assert nm.flush_persistence() and os.path.exists(base + "/step_1/model.safetensors")
assert nm.persist_path() == os.path.dirname(base) + "/.nebula/" + os.path.basename(base) and engine.settings().retention_count == 3
""")  # fmt: skip


def test_total_limit_removes_nothing_for_a_checkpoint_that_failed(node):
    program(node, """
from nebulaml.checkpoint import Checkpoint
configuration = accelerate.utils.ProjectConfiguration(project_dir=base, automatic_checkpoint_naming=True, total_limit=1)
accelerator, plain = attached(project_config=configuration), Checkpoint._open
def refuse(checkpoint):
    if checkpoint.tag.endswith("checkpoint_1"):
        raise nm.NebulaUnavailable("no agent for this one")
    return plain(checkpoint)
Checkpoint._open = refuse
for names in (["checkpoint_0"], ["checkpoint_0"], ["checkpoint_2"]):
    accelerator.save_state()
    nm.flush_persistence()
    assert sorted(os.listdir(base + "/checkpoints")) == names, os.listdir(base + "/checkpoints")
""")  # fmt: skip


# fault (Storage): The directory in which accelerate writes its own small files is full, or cannot be written.
# result: That checkpoint fails, with the reason, and training goes on.
@directory_only("the adapter's own place for its storage is a directory")
def test_save_state_goes_on_where_storage_refuses_its_files(node):
    said = program(node, """
accelerator = attached()
accelerator.register_save_state_pre_hook(lambda models, weights, directory: open(directory + "/mine.txt", "w").close())
staging = os.path.dirname(base) + "/.nebula/" + os.path.basename(base) + "-staging"
os.makedirs(staging)
os.symlink("nowhere/else", staging + "/step_1")
accelerator.save_state(base + "/step_1")
accelerator.save_state(base + "/step_2")
assert nm.flush_persistence()
assert not os.path.exists(base + "/step_1") and os.path.exists(base + "/step_2/mine.txt"), os.listdir(base)
""")  # fmt: skip
    assert "step_1 failed: its files cannot be written: [Errno 17] File exists" in said


@pytest.mark.parametrize("named", [False, True], ids=["beside", "named"])
@directory_only("the adapter's own place for its storage is a directory")
def test_checkpoints_of_one_name_in_several_directories_share_no_file(node, named):
    program(node, f"""
if {named}:
    nm.init({str(node.persist)!r}, 0)
whole, weights = attached(), nm.attach(accelerate.Accelerator(cpu=True))
weights.prepare(torch.nn.Linear(2, 2))
project = nm.attach(accelerate.Accelerator(cpu=True, project_dir=base + "/c"))
project.prepare(torch.nn.Linear(2, 2))
for accelerator, place in ((whole, "a/newest"), (weights, "b/newest"), (project, "c/newest"), (whole, "c/d/newest"), (project, "c/d/e/newest")):
    accelerator.save_state(f"{{base}}/{{place}}")
nm.flush_persistence()
for place, has in (("a", True), ("b", False), ("c", False), ("c/d", True), ("c/d/e", False)):
    assert os.path.exists(f"{{base}}/{{place}}/newest/optimizer.bin") == has, place
    assert os.path.exists(f"{{base}}/{{place}}/newest/model.safetensors"), place
""")  # fmt: skip
