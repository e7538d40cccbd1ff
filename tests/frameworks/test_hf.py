"""transformers.Trainer and accelerate through nebulaml.attach: the directories are the same as without Nebula, complete and durable."""

import json
import os
import shutil
import subprocess

import pytest
from conftest import Url, directory_only, files_below, full, interpreter
from waiting import until

ENV = "hf"


@pytest.fixture(autouse=True, params=["hf", pytest.param("hf-oldest", marks=full)])
def environment(request):
    global ENV
    ENV = request.param


def job(node, *more, directory="run", **options):
    return node.run(interpreter(ENV), "hf_job.py", "--output", node.base / directory, *more, **options)


def stock(node, *more, **options):
    return job(node, "--way", "stock", *more, directory="stock", **options)


def stored(node):
    """Returns the checkpoints in the storage of a job that names none: the object store, or the adapter's own directory."""
    if isinstance(node.persist, Url):
        return sorted(os.path.basename(tag) for tag in node.stored())
    return sorted(name for name in os.listdir(node.base / ".nebula" / "run") if name.startswith("checkpoint"))


@pytest.mark.parametrize("way", ["attach", pytest.param("mixin", marks=full), pytest.param("subclass", marks=full)])
def test_resume_after_sigkill_equals_uninterrupted_training(node, way):
    whole = stock(node)
    job(node, "--way", way, "--kill-at", 5, check=False)
    until(lambda: (node.base / "run" / "checkpoint-4").exists())
    again = job(node, "--way", way, "--resume")
    assert sorted(again.losses) == [5, 6, 7, 8]
    assert again.losses == whole.losses_after(4)
    assert again.end["weights"] == whole.end["weights"] == again.end["loaded"]
    assert again.end["names"] == whole.end["names"]


def test_the_directory_is_stocks_and_stock_resumes_from_it(node):
    whole = stock(node)
    job(node, "--kill-at", 5, check=False)
    until(lambda: (node.base / "run" / "checkpoint-4").exists())
    for step in (2, 4):
        mine, theirs = node.base / "run" / f"checkpoint-{step}", node.base / "stock" / f"checkpoint-{step}"
        assert files_below(mine) == files_below(theirs)
        assert (mine / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    again = job(node, "--way", "stock", "--resume")
    assert again.losses == whole.losses_after(4)


@directory_only("a dead link in place of the directory makes storage fail")
def test_a_directory_appears_only_whole(node):
    node.persist.symlink_to("nowhere")  # storage is not there
    job(node, "--persist", node.persist, "--kill-at", 5, check=False)
    assert [n for n in os.listdir(node.base / "run") if n.startswith("checkpoint")] == []
    os.unlink(node.persist)
    until(lambda: (node.base / "run" / "checkpoint-4").exists())
    assert "optimizer.pt" in files_below(node.base / "run" / "checkpoint-4")


def test_save_total_limit_counts_as_in_stock_and_frees_the_space(node):
    whole = stock(node, "--limit", 2)
    result = job(node, "--limit", 2)
    assert result.end["names"] == whole.end["names"] == ["checkpoint-6", "checkpoint-8"]
    until(lambda: stored(node) == ["checkpoint-6", "checkpoint-8"])
    reading = "import sys, torch, transformers; print(torch.load(sys.argv[1], weights_only=False).save_total_limit)"
    arguments = node.base / "run" / "checkpoint-8" / "training_args.bin"
    done = subprocess.run([interpreter(ENV), "-c", reading, arguments], env=node.environment, capture_output=True, text=True)
    assert done.stdout.split() == ["2"], done.stderr


def test_save_total_limit_removes_nothing_for_a_checkpoint_that_failed(node):
    assert job(node, "--limit", 1, "--steps", 4, "--lose", 4).end["names"] == ["checkpoint-2"]
    assert job(node, "--limit", 2, "--steps", 6, "--lose", 4, directory="more").end["names"] == ["checkpoint-2", "checkpoint-6"]


@directory_only("the adapter's own place for its storage is a directory")
def test_the_output_directory_has_the_entries_of_stock_and_nothing_is_left_where_nothing_is_stored(node):
    stock(node, "--steps", 4)
    job(node, "--steps", 4)
    assert sorted(os.listdir(node.base / "run")) == sorted(os.listdir(node.base / "stock"))
    assert os.listdir(node.base / ".nebula") == ["run"]
    job(node, "--steps", 4, "--persist", node.persist, directory="more/run")
    assert os.listdir(node.base / "more") == ["run"]
    assert sorted(os.listdir(node.base / "more" / "run")) == sorted(os.listdir(node.base / "stock"))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=full)])
def test_a_callback_that_reads_the_directory_in_on_save_finds_what_was_saved(node, ranks):
    if ENV != "hf":
        pytest.skip("one transformers is enough")
    result = job(node, "--reader", ranks=ranks)
    assert [(line["read"], line["equal"]) for line in result.lines if "read" in line] == [(2, True), (4, True), (6, True), (8, True)]


def test_load_best_model_at_end(node):
    more = ["--best", "--limit", 1, "--output", "run"]
    whole = job(node, "--way", "stock", *more)
    shutil.rmtree(node.base / "run")
    result = job(node, *more)
    assert result.end["best"] == whole.end["best"]  # the very path: one that is relative stays so, and the run may be moved
    assert result.end["weights"] == whole.end["weights"]
    assert result.end["names"] == whole.end["names"]


@pytest.mark.parametrize(
    ("limit", "more"),
    [
        (1, ["--metric", "worse"]),
        (1, ["--metric", "better"]),
        (1, ["--metric", "worse", "--best"]),
        (2, ["--metric", "worse", "--only-model"]),
        pytest.param(1, ["--metric", "worse", "--only-model"], marks=full),
        pytest.param(1, ["--metric", "better", "--best", "--only-model"], marks=full),
        pytest.param(2, ["--metric", "worse", "--best"], marks=full),
        pytest.param(2, [], marks=full),
        pytest.param(None, ["--metric", "worse"], marks=full),
    ],
    ids=lambda value: "-".join(word.lstrip("-") for word in value) or "plain" if isinstance(value, list) else f"limit {value}",
)
def test_the_directories_at_the_end_are_those_of_stock_also_where_storage_is_slow(node, limit, more):
    options = [*more, *(["--limit", limit] if limit else [])]
    whole = stock(node, *options)
    node.environment["NEBULA_STORE_MBPS"] = "0.5"
    result = job(node, *options)
    assert result.end["names"] == whole.end["names"]
    assert (result.end["best"] or "").replace("run", "stock") == (whole.end["best"] or "")
    assert result.end["weights"] == whole.end["weights"]
    until(lambda: stored(node) == result.end["names"])


def test_a_run_that_goes_on_from_an_older_checkpoint_keeps_what_it_saves_as_stock_does(node):
    more = ["--limit", 2, "--metric", "worse"]
    for run in (stock, job):
        run(node, "--metric", "worse")
        for step in (2, 4, 6, 8):  # as if there had been time between them
            os.utime(node.base / ("stock" if run is stock else "run") / f"checkpoint-{step}", (step * 100, step * 100))
    whole = stock(node, *more, "--steps", 6, "--resume", node.base / "stock" / "checkpoint-2")
    again = job(node, *more, "--steps", 6, "--resume", node.base / "run" / "checkpoint-2")
    assert again.end["names"] == whole.end["names"]
    assert again.losses == whole.losses


@directory_only("a dead link in place of the directory makes storage fail")
def test_a_run_whose_storage_has_failed_ends_all_the_same(node):
    node.persist.symlink_to("nowhere")  # storage is not there
    node.environment["NEBULA_PERSIST_GIVE_UP"] = "2"
    result = job(node, "--persist", node.persist, "--limit", 1, "--metric", "worse", "--steps", 4)
    assert result.end["step"] == 4 and result.end["names"] == []


# fault (Storage): The directory in which transformers writes its own small files is full, or cannot be written.
# result: That checkpoint fails, with the reason, and training goes on.
@pytest.mark.parametrize(("ranks", "place", "link", "reason"), [
    (1, "checkpoint-4/trainer_state.json", "/dev/full", "[Errno 28] No space left on device"),
    (1, "checkpoint-4", "nowhere/else", "[Errno 17] File exists"),
    pytest.param(2, "checkpoint-4", "nowhere/else", "[Errno 17] File exists", marks=full),
])  # fmt: skip
@directory_only("the adapter's own place for its storage is a directory")
def test_a_full_disk_fails_the_checkpoint_whose_small_files_it_refuses_and_nothing_else(node, ranks, place, link, reason):
    if ENV != "hf" and ranks > 1:
        pytest.skip("one transformers is enough")
    refused = node.base / ".nebula" / "run-staging" / place
    refused.parent.mkdir(parents=True)
    refused.symlink_to(link)
    result = job(node, ranks=ranks)
    assert result.end["step"] == 8 and result.end["names"] == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
    assert f"checkpoint-4 failed: its files cannot be written: {reason}" in node.logs()


def test_every_rank_knows_where_the_best_model_lies_and_loads_it(node):
    if ENV != "hf":
        pytest.skip("one transformers is enough")
    job(node, "--best", "--steps", 4, "--ends", ranks=2)
    ends = [json.loads((node.base / "run" / f"end-{rank}.json").read_text()) for rank in (0, 1)]
    assert ends[0] == ends[1] and os.path.dirname(ends[0]["best"]) == str(node.base / "run"), ends


# fault (Storage): The agent of a node that has left the job puts a checkpoint in place while the ranks list the directory for the newest.
# result: All ranks load what rank 0 finds.
def test_two_ranks_resume_bit_for_bit(node):
    if ENV != "hf":
        pytest.skip("transformers 4.48 alone cannot resume on two CPU ranks with this torch: 'tagged with cpu:0'")
    whole = stock(node, ranks=2)
    job(node, "--kill-at", 5, ranks=2, check=False)
    until(lambda: (node.base / "run" / "checkpoint-4").exists())
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(files_below(node.base / "run" / "checkpoint-4"))
    again = job(node, "--resume", "--hide", "checkpoint-4", ranks=2)
    assert again.losses == whole.losses_after(4)
    assert again.end["weights"] == whole.end["weights"]


@full
def test_fsdp2_resumes_bit_for_bit_after_sigkill_and_stock_resumes_from_its_directory(node):
    if ENV != "hf":
        pytest.skip("one transformers is enough")
    whole = stock(node, "--fsdp", ranks=2)
    job(node, "--fsdp", "--kill-at", 5, ranks=2, check=False)
    newest = node.base / "run" / "checkpoint-4"
    until(newest.exists)
    files = files_below(newest)
    assert files == files_below(node.base / "stock" / "checkpoint-4")
    assert {f"{part}/__{rank}_0.distcp" for part in ("pytorch_model_fsdp_0", "optimizer_0") for rank in (0, 1)} <= set(files)
    for again in (job(node, "--fsdp", "--resume", newest, directory="other", ranks=2), job(node, "--fsdp", "--way", "stock", "--resume", ranks=2)):
        assert again.losses == whole.losses_after(4)
        assert again.end["weights"] == whole.end["weights"]


# fault (Arguments of the caller): transformers is to save on each of several nodes, each time under the same names.
# result: The Trainer refuses that before it trains.
def test_a_trainer_that_saves_on_each_node_is_refused(node):
    found = job(node, "--each-node", ranks=2, nodes=True).lines
    assert found[0]["error"].startswith("save_on_each_node=True: all nodes save one checkpoint with Nebula")
    assert not any("loss" in line for line in found)


def test_an_exception_leaves_what_was_saved(node):
    result = job(node, "--fail-at", 5)
    assert any("error" in line for line in result.lines)
    assert result.end["names"] == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=full)])
def test_a_deepspeed_json_through_the_trainer_resumes_bit_for_bit(node, stage):
    if ENV != "hf":
        pytest.skip("one transformers is enough")

    def run(directory, *more, **options):
        where = ["--output", node.base / directory, "--way", "stock", "--deepspeed", stage]
        return node.run(interpreter("hf-deepspeed"), "hf_job.py", *where, *more, ranks=2, **options)

    whole = run("stock")
    run("run", "--persist", node.persist, "--kill-at", 5, check=False)
    again = run("run", "--persist", node.persist, "--resume")
    assert again.losses == whole.losses_after(4)
    assert again.end["weights"] == whole.end["weights"]


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=full)])
def test_attach_to_a_trainer_with_deepspeed_resumes_bit_for_bit_and_its_directory_is_stocks(node, stage):
    if ENV != "hf":
        pytest.skip("one transformers is enough")

    def run(directory, *more, **options):
        where = ["--output", node.base / directory, "--deepspeed", stage]
        return node.run(interpreter("hf-deepspeed"), "hf_job.py", *where, *more, ranks=2, **options)

    whole = run("stock", "--way", "stock")
    run("run", "--way", "attach", "--kill-at", 5, check=False)
    until(lambda: (node.base / "run" / "checkpoint-4").exists())
    assert files_below(node.base / "run" / "checkpoint-4") == files_below(node.base / "stock" / "checkpoint-4")
    again = run("run", "--way", "attach", "--resume")
    assert again.losses == whole.losses_after(4)
    assert again.end["weights"] == whole.end["weights"]


def test_jit_checkpoint_on_sigterm(node):
    if ENV != "hf":
        pytest.skip("this transformers has no enable_jit_checkpoint")
    stock_result = stock(node, "--jit", "--every", 100, "--term-at", 3)
    result = job(node, "--jit", "--every", 100, "--term-at", 3)
    assert result.end["names"] == stock_result.end["names"] != []
    newest = result.end["names"][-1]
    assert files_below(node.base / "run" / newest) == files_below(node.base / "stock" / newest)
    again = job(node, "--resume")
    assert min(again.losses) == int(newest.split("-")[1]) + 1


def test_with_overlap_a_save_returns_before_the_device_has_copied(node):
    assert node.run(interpreter(ENV), "overlap_job.py", node.base / "run", "hf").end


def test_attach_again_takes_the_new_options_and_keeps_those_that_are_not_given(node):
    code = """
import sys, torch, transformers, accelerate, nebulaml as nm
from nebulaml.integrations import hf
class Mine(hf.NebulaTrainerMixin, transformers.Trainer):
    nebula_overlap, nebula_sync_on_save = True, False
for kind, first in ((transformers.Trainer, (None, False)), (Mine, (False, True))):
    trainer, seen = kind.__new__(kind), []
    for given in ({}, {"overlap": True, "sync_on_save": True}, {}, {"overlap": False}):
        nm.attach(trainer, **given)
        seen.append((trainer.nebula_sync_on_save, trainer.nebula_overlap))
    assert seen == [first, (True, True), (True, True), (True, False)], seen
seen, plain = [], hf.Capture
class Told(plain):
    def __init__(self, *arguments):
        seen.append(arguments[3])
        super().__init__(*arguments)
hf.Capture = Told
accelerator = accelerate.Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(2, 2))
for number, given in enumerate(({}, {"overlap": True}, {}, {"overlap": False})):
    nm.attach(accelerator, **given).save_state(f"{sys.argv[1]}/step_{number}")
assert seen == [False, True, True, False], seen
"""
    done = subprocess.run([interpreter(ENV), "-c", code, node.base / "run"], env=node.environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


TWO = """
import os, sys, torch, transformers, nebulaml as nm
base, named = sys.argv[1], sys.argv[2:]
if named:
    nm.init(named[0], 0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        return {"loss": (self.one(x)[:, 0] - labels).pow(2).mean()}
data = [{"x": torch.full((4,), float(number)), "labels": torch.tensor(1.0)} for number in range(16)]
def train(directory, **options):
    options = {"max_steps": 2, "save_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, **options}
    trainer = transformers.Trainer(Model(), transformers.TrainingArguments(f"{base}/{directory}", **options), train_dataset=data)
    nm.attach(trainer).train()
train("a")
train("other/a", save_only_model=True)
"""

AGAIN = TWO.split('train("a")')[0] + """
import shutil
files = lambda: {name for name in os.listdir(base + "/a/checkpoint-2") if name != ".nebula.json"}
train("a")
whole = files()
assert "optimizer.pt" in whole
for _ in range(2):  # the run is removed, and begun anew
    shutil.rmtree(base + "/a")
    train("a", save_only_model=True)
    assert "optimizer.pt" not in files(), files()
train("a", save_only_model=True)  # the directory is there now: transformers replaces its files, and leaves others
assert "optimizer.pt" not in files(), files()
train("a")
assert files() == whole, files()
train("a", save_only_model=True)
assert files() == whole, files()
"""


HUB = TWO.split("def train(")[0] + """
options = {"max_steps": 4, "save_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
trainer = nm.attach(transformers.Trainer(Model(), transformers.TrainingArguments(base + "/a", **options), train_dataset=data))
trainer.args.push_to_hub, pushed = True, []  # the constructor would ask the hub
trainer._push_from_checkpoint = lambda folder: pushed.append((os.path.basename(folder), sorted(os.listdir(folder)) != []))
trainer.push_to_hub = lambda *args, **options: None
trainer.train()
print(pushed)
"""


# fault (Storage): Storage fails, and transformers is to push each checkpoint to the hub.
# result: Only checkpoints whose directories are there are pushed.
@directory_only("a dead link in place of the directory makes storage fail")
@pytest.mark.parametrize("is_broken", [False, True])
def test_only_checkpoints_that_are_there_are_pushed_to_the_hub(node, is_broken):
    if is_broken:
        node.persist.symlink_to("nowhere")  # storage is not there
        node.environment["NEBULA_PERSIST_GIVE_UP"] = "2"
    command = [interpreter(ENV), "-W", "ignore", "-c", HUB, str(node.base), str(node.persist)]
    done = subprocess.run(command, env=node.environment, capture_output=True, text=True, timeout=240)
    pushed = [] if is_broken else [("checkpoint-2", True), ("checkpoint-4", True)]
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == str(pushed), done.stderr[-3000:]


@directory_only("the adapter's own place for its storage is a directory")
def test_a_run_that_is_removed_and_begun_anew_takes_over_no_file_of_the_earlier_one(node):
    command = [interpreter(ENV), "-W", "ignore", "-c", AGAIN, str(node.base)]
    done = subprocess.run(command, env=node.environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("named", [False, pytest.param(True, marks=full)], ids=["beside", "named"])
@directory_only("the adapter's own place for its storage is a directory")
def test_trainers_of_one_process_with_output_directories_of_their_own_share_no_file(node, named):
    more = [str(node.persist)] if named else []
    command = [interpreter(ENV), "-W", "ignore", "-c", TWO, str(node.base), *more]
    done = subprocess.run(command, env=node.environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (set(files_below(node.base / place / "checkpoint-2")) for place in ("a", "other/a"))
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth"} <= first
    assert second == first - {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    if named:
        assert len(node.stored()) == 2
    else:
        assert [node.stored(node.base / place / ".nebula" / "a") for place in (".", "other")] == [["checkpoint-2"]] * 2


def test_lightnings_callback_names_attach_where_there_is_no_lightning(node):
    code = """
import nebulaml as nm
try:
    nm.NebulaCallback
except nm.NebulaConfigError as error:
    assert "nebulaml.attach(trainer)" in str(error), error
"""
    done = subprocess.run([interpreter(ENV), "-c", code], env=node.environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_a_trainer_publishes_its_weights_and_stock_tools_read_them_from_a_follower(node):
    done = job(node, "--way", "stock", "--every", 100, "--publish", node.base / "weights")
    assert [line for line in done.lines if "published" in line] == [{"published": 8, "equal": True}]


@full
@pytest.mark.parametrize("sharded", [[], ["--fsdp"]])
def test_ranks_publish_their_weights(node, sharded):
    done = job(node, "--way", "stock", "--every", 100, "--publish", node.base / "weights", *sharded, ranks=2)
    assert [line for line in done.lines if "published" in line] == [{"published": 8, "equal": True}]


@full
def test_of_a_peft_model_the_adapter_is_published(node):
    done = job(node, "--way", "stock", "--every", 100, "--publish", node.base / "weights", "--peft")
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert [line for line in done.lines if "published" in line] == [{"published": 8, "equal": True, "files": files}]
