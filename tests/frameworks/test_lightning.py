"""Lightning through NebulaCallback and NebulaCheckpointIO: stock Lightning finds the same files and behaves the same."""

import json
import os
import subprocess
import tempfile
import time

import ports
import pytest
import torch
from conftest import HERE, Result, Url, directory_only, full, interpreter
from nebulaml._session import locate

ENV = "lightning"
PACKAGES = ["lightning.pytorch", pytest.param("pytorch_lightning", marks=full)]


@pytest.fixture(autouse=True, params=["lightning", pytest.param("lightning-oldest", marks=full)])
def environment(request):
    global ENV
    ENV = request.param


def job(node, *more, directory="ckpts", persist=True, **options):
    where = ["--persist", node.persist] if persist else []
    return node.run(interpreter(ENV), "lightning_job.py", "--dirpath", node.base / directory, *where, *more, **options)


def stock(node, *more, **options):
    return job(node, "--way", "stock", *more, directory="stock", **options)


def settled(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("way", ["nebula", pytest.param("io", marks=full)])
def test_resume_by_path_after_sigkill_equals_uninterrupted_training(node, package, way):
    whole = stock(node, "--package", package)
    job(node, "--way", way, "--package", package, "--kill-at", 5, check=False)
    again = job(node, "--way", way, "--package", package, "--ckpt", node.base / "ckpts" / "step=4.ckpt")
    assert sorted(again.losses) == [5, 6, 7, 8]
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > 4}
    assert again.end["weights"] == whole.end["weights"]
    assert again.end["files"] == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt", "step=8.ckpt"]


@directory_only("a dead link in place of the directory makes storage fail")
def test_a_name_that_only_memory_has_is_resumed(node):
    whole = stock(node)
    node.persist.symlink_to("nowhere")  # storage is not there
    job(node, "--kill-at", 5, check=False)
    assert not (node.base / "ckpts" / "step=4.ckpt").exists()
    os.unlink(node.persist)
    again = job(node, "--ckpt", node.base / "ckpts" / "step=4.ckpt")
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > 4}


@pytest.mark.nightly("test_resume_by_path_after_sigkill_equals_uninterrupted_training", "test_best_and_load_from_checkpoint_read_the_published_path")
@pytest.mark.parametrize("package", PACKAGES)
def test_last_is_found_after_sigkill_and_files_are_those_of_stock(node, package):
    more = ["--package", package, "--save-last", "--top-k", 2]
    whole = stock(node, *more)
    job(node, *more, "--kill-at", 5, check=False)
    again = job(node, *more, "--ckpt", "last")
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > 4}
    assert again.end["files"] == whole.end["files"] == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"]


SLOW = """
import os, sys, torch, nebulaml as nm
callback = nm.NebulaCallback(dirpath=os.getcwd() + "/ckpts")
io, state = nm.NebulaCheckpointIO(), {"global_step": 1, "state_dict": {"w": torch.arange(500000.0)}}
def path(name):
    return os.path.join(callback.dirpath, name)
def save(name):
    io.save_checkpoint(state, path(name))
    assert not os.path.exists(path(name))
"""


def script(node, text):
    """Runs code in one process of Lightning's environment, with storage that needs two seconds for `state`."""
    node.environment["NEBULA_STORE_MBPS"] = "1"
    command = [interpreter(ENV), "-W", "ignore", "-c", SLOW + text]
    done = subprocess.run(command, env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_last_that_is_on_its_way_is_waited_for_without_init_and_loggers_find_the_files_at_the_end(node):
    script(node, """
save("last.ckpt")
nm._shutdown()  # as in a new process
assert callback._find_last_checkpoints(None) == {path("last.ckpt")}
save("best.ckpt")
callback.teardown(None, None, "fit")  # the loggers' finalize() is next
assert os.path.exists(path("best.ckpt"))
""")  # fmt: skip


def test_loggers_find_the_file_when_they_are_told_of_a_save_and_when_the_run_ends(node):
    script(node, """
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from nebulaml.integrations.lightning import _may_read

class Reader(Logger):
    name, version = "reader", 0
    def __init__(self):
        super().__init__()
        self.saved, self.ended = [], []
    def log_metrics(self, metrics, step=None): pass
    def log_hyperparams(self, params, *args, **kwargs): pass
    def after_save_checkpoint(self, callback):
        self.path = callback.best_model_path
        self.saved.append(os.path.isfile(self.path))
    def finalize(self, status):
        self.ended.append(os.path.isfile(self.path))

class AtTheEnd(Reader):  # as Lightning's own are
    _log_model = True
AtTheEnd.__module__ = "lightning.pytorch.loggers.wandb"

def fit(logger, place):
    model = BoringModel()
    model.register_buffer("large", torch.zeros(200000))
    callback = ModelCheckpoint(dirpath=path(place), every_n_train_steps=1)
    options = dict(accelerator="cpu", max_steps=2, limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False)
    Trainer(logger=logger, callbacks=[callback], plugins=[nm.NebulaCheckpointIO()], **options).fit(model)

reader, at_the_end = Reader(), AtTheEnd()
fit(reader, "one")
assert reader.saved == [True, True] and reader.ended == [True], (reader.saved, reader.ended)
fit(at_the_end, "two")
assert at_the_end.ended == [True]

kept, all_kept = ModelCheckpoint(), ModelCheckpoint(save_top_k=-1)
assert not _may_read(at_the_end, kept) and _may_read(at_the_end, all_kept)
for value, reads in (("all", True), (False, False)):
    at_the_end._log_model = value
    assert _may_read(at_the_end, kept) == reads
assert not any(_may_read(one, all_kept) for one in (CSVLogger("."), DummyLogger(), TensorBoardLogger.__new__(TensorBoardLogger)))
""")  # fmt: skip


def test_a_link_to_a_file_that_is_on_its_way_is_loaded(node):
    script(node, """
nm.init("persist", 0)
save("step=1.ckpt")
os.symlink("step=1.ckpt", path("last.ckpt"))  # as save_last="link" makes it
assert torch.equal(io.load_checkpoint(path("last.ckpt"))["state_dict"]["w"], state["state_dict"]["w"])
assert not os.path.exists(path("step=1.ckpt"))
""")  # fmt: skip


def test_a_load_from_memory_does_as_torch_is_told_and_a_missing_file_is_what_it_is_in_lightning(node):
    script(node, """
import pathlib, pickle
state["hyper_parameters"] = pathlib.PurePosixPath("data")  # more than tensors and plain values
save("step=1.ckpt")
try:
    io.load_checkpoint(path("step=1.ckpt"))
except pickle.UnpicklingError as error:
    assert "PurePosixPath" in str(error), error
else:
    raise AssertionError("loaded")
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
assert io.load_checkpoint(path("step=1.ckpt"))["hyper_parameters"] == state["hyper_parameters"]
del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]
torch.__version__, version = "2.5.1+cpu", torch.__version__  # whose own default is another one
assert io.load_checkpoint(path("step=1.ckpt"))["hyper_parameters"] == state["hyper_parameters"]
torch.__version__ = version
assert not os.path.exists(path("step=1.ckpt"))
try:
    io.load_checkpoint(path("nothing.ckpt"))
except FileNotFoundError as error:
    assert isinstance(error, nm.NebulaNotFound) and "nothing.ckpt" in str(error)
else:
    raise AssertionError("loaded")
""")  # fmt: skip


def test_a_name_whose_file_waits_to_go_is_free_as_in_stock(node):
    script(node, """
from types import SimpleNamespace as Some
trainer = Some(is_global_zero=True, strategy=Some(checkpoint_io=io, broadcast=lambda value: value))
save("epoch=0.ckpt")
nm.flush_persistence()
save("epoch=0-v1.ckpt")
assert callback.file_exists(path("epoch=0.ckpt"), trainer) and callback.file_exists(path("epoch=0-v1.ckpt"), trainer)
io.remove_checkpoint(path("epoch=0.ckpt"))
assert os.path.exists(path("epoch=0.ckpt")) and not callback.file_exists(path("epoch=0.ckpt"), trainer)
state["global_step"] = 2
io.save_checkpoint(state, path("epoch=0.ckpt"))
assert callback.file_exists(path("epoch=0.ckpt"), trainer)
io.teardown()
assert torch.load(path("epoch=0.ckpt"))["global_step"] == 2 and torch.load(path("epoch=0-v1.ckpt"))["global_step"] == 1
""")  # fmt: skip


@directory_only("the adapter's own place for its storage is a directory")
def test_an_init_that_names_no_path_leaves_the_path_to_the_plugin_and_keeps_what_it_says(node):
    script(node, """
from nebulaml._session import engine
nm.init(num_of_version_in_retention=3, keep_last=5)
save("step=1.ckpt")
io.teardown()
assert os.path.exists(path("step=1.ckpt")) and nm.persist_path() == os.getcwd() + "/.nebula/ckpts"
assert (engine.settings().retention_count, engine.settings().keep_last) == (3, 5)
""")  # fmt: skip


NEVER_SAVED = """
import os, nebulaml as nm
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
open("train.py", "w").close()
io = nm.NebulaCheckpointIO()
io.save_checkpoint({"global_step": 1}, os.path.abspath("step=1.ckpt"))
for plugin in (TorchCheckpointIO(), io):
    for path in (ModelCheckpoint().best_model_path, os.getcwd()):
        try:
            plugin.remove_checkpoint(path)
        except ValueError:
            continue
        assert path == "", path  # fsspec of another version sees no file there
nm.flush_persistence()
assert sorted(os.listdir()) == ["step=1.ckpt", "train.py"], os.listdir()
"""


def test_a_path_that_was_never_published_is_not_removed(node):
    (node.base / "work").mkdir()
    environment = {**node.environment, "NEBULA_PERSISTENT_TIME_INTERVAL": "0"}
    subprocess.run([interpreter(ENV), "-c", NEVER_SAVED], env=environment, cwd=node.base / "work", check=True, timeout=120)


@pytest.mark.parametrize(("lost", "on_error"), [("_save", "warn"), ("_publish", "warn"), ("_open", "raise")])
def test_nothing_is_removed_for_a_checkpoint_that_failed_until_one_is_saved(node, lost, on_error):
    script(node, f"""
import contextlib
from nebulaml.checkpoint import Checkpoint
os.environ.pop("NEBULA_STORE_MBPS")
nm.init(on_error={on_error!r})
def refuse(*arguments):
    if {lost!r} == "_publish":
        return False
    raise nm.NebulaUnavailable("no agent for this one")
def names():
    nm.flush_persistence()
    return sorted(name for name in os.listdir(callback.dirpath) if name.endswith(".ckpt"))
def save(step, older):
    state["global_step"] = step
    with contextlib.suppress(nm.NebulaUnavailable):
        io.save_checkpoint(state, path(f"step={{step}}.ckpt"))
    if older:
        io.remove_checkpoint(path(f"step={{older}}.ckpt"))  # as save_top_k=1 does
    return names()
assert save(1, 0) == ["step=1.ckpt"]
plain = getattr(Checkpoint, {lost!r})
setattr(Checkpoint, {lost!r}, refuse)
found = save(2, 1)
setattr(Checkpoint, {lost!r}, plain)
assert "step=1.ckpt" in found, found
assert "step=1.ckpt" not in save(3, 2) and "step=3.ckpt" in names()
""")  # fmt: skip


def test_a_callback_that_was_given_to_transformers_says_what_to_do_there(node):
    script(node, """
class Handler:  # as transformers' does: it asks for each event by name
    def __init__(self, callback):
        getattr(callback, "on_init_end")("arguments", "state", "control", model=None)
try:
    Handler(callback)
except nm.NebulaConfigError as error:
    assert "nebulaml.attach(trainer)" in str(error), error
else:
    raise AssertionError("taken")
""")  # fmt: skip


def warned(node, text):
    script(node, """
import io as plain, logging
lines = plain.StringIO()
logging.getLogger("nebulaml").addHandler(logging.StreamHandler(lines))
""" + text)  # fmt: skip


def test_a_deepspeed_strategy_without_nebula_in_its_configuration_is_warned_of(node):
    warned(node, """
from nebulaml.integrations.lightning import _warn_about
def said(config, name="DeepSpeedStrategy"):
    strategy = type(name, (type("DeepSpeedStrategy", (), {}),), {})()
    strategy.config = config
    lines.truncate(0)
    _warn_about(strategy)
    return lines.getvalue()
for config in (None, {}, {"nebula": {}}, {"nebula": {"enabled": False}}, {"zero_optimization": {}}):
    assert "Nebula is not in use" in said(config) and "Nebula is not in use" in said(config, "NebulaDeepspeedStrategy")
assert "the same tag" in said({"nebula": {"enabled": True}}) and not said({"nebula": {"enabled": True}}, "NebulaDeepspeedStrategy")
""")  # fmt: skip


@full
@pytest.mark.parametrize("environment", ["lightning-deepspeed", "lightning-deepspeed-oldest"], indirect=True)
def test_our_deepspeed_strategy_without_nebula_in_its_configuration_says_so_when_it_is_made(node):
    warned(node, """
nm.NebulaDeepspeedStrategy(config={"nebula": {"enabled": True, "persistent_storage_path": "x"}})
assert not lines.getvalue(), lines.getvalue()
nm.NebulaDeepspeedStrategy(config={"zero_optimization": {"stage": 1}})
assert "Nebula is not in use" in lines.getvalue()
""")  # fmt: skip


def test_a_deepspeed_path_leads_to_what_lies_there_and_to_nothing_else(node):
    script(node, """
from nebulaml.integrations.lightning import _look_into
def problem(name):
    tag, words = _look_into(path(name))
    assert tag is None and path(name) in words, (tag, words)
problem("step=5.ckpt")
os.makedirs(path("step=4.ckpt/global_step4"))
problem("step=4.ckpt")
problem(".")
open(path("step=4.ckpt/global_step4/mp_rank_00_model_states.pt"), "w").close()
assert _look_into(path("step=4.ckpt")) == ("global_step4", "")  # killed before `latest` was written
problem(".")
def listdir(folder, real=os.listdir):
    if folder == path("step=4.ckpt/lost+found"):
        raise PermissionError(13, "Permission denied", folder)
    return real(folder)
os.mkdir(path("step=4.ckpt/lost+found"))
os.listdir, real = listdir, os.listdir
assert _look_into(path("step=4.ckpt")) == ("global_step4", "")  # beside a directory that this user may not read
os.listdir = real
open(path("step=4.ckpt/latest"), "w").close()
assert _look_into(path("step=4.ckpt")) == (None, "")

import types
from nebulaml.integrations.lightning import _candidates, _chosen
def put(tag, seconds):
    os.makedirs(path("last.ckpt/" + tag), exist_ok=True)
    open(path(f"last.ckpt/{tag}/mp_rank_00_model_states.pt"), "w").close()
    os.utime(path("last.ckpt/" + tag), (seconds, seconds))
put("global_step4-last.ckpt", 1)
put("global_step6-last.ckpt", 2)
tags = ["global_step6-last.ckpt", "global_step6", "global_step4-last.ckpt", "global_step4"]
assert _candidates(path("last.ckpt")) == tags
with open(path("last.ckpt/latest"), "w") as latest:
    latest.write("global_step4-last.ckpt")
assert _candidates(path("last.ckpt")) == [*tags[2:], *tags[:2]]
def chosen(*complete, enable_load=True):
    return _chosen(types.SimpleNamespace(enable_load=enable_load, resolve_together=lambda tag: tag if tag in complete else None), tags)
assert chosen("global_step6", "global_step4", "global_step100") == "global_step6" and chosen("global_step4") == "global_step4"
for newest, wanted in (("global_step100", tags[0]), ("global_step2", None), ("other", None)):
    engine = types.SimpleNamespace(enable_load=True, resolve_together=lambda tag: types.SimpleNamespace(tag=newest) if tag is None else None)
    assert _chosen(engine, tags) == wanted, "a checkpoint of a later step is not what lies there"
assert chosen("global_step6", enable_load=False) is None and _chosen(object(), tags) is None
""")  # fmt: skip


@full
@pytest.mark.parametrize("environment", ["lightning-deepspeed", "lightning-deepspeed-oldest"], indirect=True)
def test_a_mistyped_path_of_our_deepspeed_strategy_is_named_and_loads_nothing(node):
    job(node, "--deepspeed", 1, "--steps", 2)
    result = job(node, "--deepspeed", 1, "--ckpt", node.base / "ckpts" / "step=3.ckpt", check=False)
    errors = [line["error"] for line in result.lines if "error" in line]
    assert not result.losses and f"no DeepSpeed checkpoint {node.base}/ckpts/step=3.ckpt" in errors[0]


def test_a_deepspeed_checkpoint_whose_name_lightning_has_numbered_has_a_tag_of_its_own(node):
    script(node, """
from nebulaml.integrations.lightning import checkpoint_tag
for name in ("step=10.ckpt", "epoch=3-step=10.ckpt", "a/step=10-loss=0.25.ckpt/", "step=10"):
    assert checkpoint_tag(name, 10) == "global_step10", name
for name in ("step=10-v1.ckpt", "epoch=3-step=10-v12.ckpt", "step=10-loss=0.25-v2", "last.ckpt", "last-v1.ckpt", "step=100.ckpt", "step=10.5.ckpt"):
    assert checkpoint_tag(name, 10) == "global_step10-" + name, name
assert checkpoint_tag("x/step=10.ckpt", None) == "step=10.ckpt"
""")  # fmt: skip


def test_callbacks_with_directories_of_their_own_may_give_files_the_same_name(node):
    script(node, """
nm.init(path("persist"), 0)
io._names = {(f"global_step{step + 100}", "x"): "checkpoint" for step in range(998)}  # a long run
places = [path(f"{folder}/{name}") for folder in "abc" for name in ("step=1.ckpt", "last.ckpt")]
for place in places:
    io.save_checkpoint({"global_step": 1, "place": place}, place)
for place in places:
    assert io.load_checkpoint(place, weights_only=False)["place"] == place
nm.flush_persistence()
for place in places:
    assert torch.load(place, weights_only=False)["place"] == place
tag = nm.get_checkpoint("global_step1")
assert sorted(tag.load(name)["place"] for name in tag.files) == sorted(places), list(tag.files)
""")  # fmt: skip


@pytest.mark.parametrize("named", [True, False])
@directory_only("the adapter's own place for its storage is a directory")
def test_trainers_of_one_process_with_directories_of_their_own_have_versions_of_their_own(node, named):
    script(node, f"""
os.environ.pop("NEBULA_STORE_MBPS")
if {named}:
    nm.init(path("persist"), 0)
places = [path(f"{{folder}}/{{name}}") for folder in ("a", "b/a") for name in ("step=1.ckpt", "last.ckpt")]
for plugin, mine in ((io, places[:2]), (nm.NebulaCheckpointIO(), places[2:])):
    for place in mine:
        plugin.save_checkpoint({{"global_step": 1, "place": place}}, place)
for place in places:
    assert io.load_checkpoint(place, weights_only=False)["place"] == place
nm.flush_persistence()
for place in places:
    assert torch.load(place, weights_only=False)["place"] == place
if {named}:
    one, other = nm.checkpoints()
    assert one.tag != other.tag and "global_step1" in (one.tag, other.tag), (one, other)
    assert all(len(nm.get_checkpoint(row.tag).files) == 2 for row in (one, other))
else:
    assert all(os.path.isdir(path(f"{{parent}}.nebula/a/global_step1")) for parent in ("", "b/"))
""")  # fmt: skip


# fault: as a_handle_finds_files_that_a_later_writing_carried_over_and_not_those_that_it_replaced
def test_every_existing_file_is_loaded_after_later_saves(node):
    """save_last commits each tag twice, a second run commits the tags once more, and memory holds the newest two."""
    more = ["--save-last", "--then", "every"]

    def loaded(*options, **named):
        lines = job(node, *more, *options, **named).lines
        return {line["loaded"]: line["step"] for line in lines if "loaded" in line}

    steps = {"ckpts/last.ckpt": 8, **{f"ckpts/step={step}.ckpt": step for step in (2, 4, 6, 8)}}
    assert loaded() == steps  # and "best", in the same process
    again = loaded("--steps", 4, directory="second")
    assert again == {**steps, "second/last.ckpt": 4, "second/step=2.ckpt": 2, "second/step=4.ckpt": 4}
    assert loaded("--steps", 8, "--ckpt", node.base / "second" / "step=2.ckpt", directory="third").items() >= again.items()
    node.forget_memory()
    assert loaded("--ckpt", node.base / "ckpts" / "step=4.ckpt", directory="fourth").items() >= again.items()


@directory_only("the adapter's own place for its storage is a directory")
def test_a_file_is_loaded_when_what_nebula_knows_of_it_cannot_be_had_and_the_log_says_so(node):
    warned(node, """
os.environ.pop("NEBULA_STORE_MBPS")
io.save_checkpoint(state, path("step=1.ckpt"))
nm.flush_persistence()
def gone(*arguments, **named):
    raise nm.NebulaUnavailable("it was written again")
from nebulaml import api
from nebulaml._session import engine
for place, name in ((nm.Checkpoint, "load"), (api, "find_published"), (engine.Engine, "session")):
    nm._shutdown()
    plain = getattr(place, name)
    setattr(place, name, gone)
    lines.truncate(0)
    assert io.load_checkpoint(path("step=1.ckpt"))["global_step"] == 1
    assert path("step=1.ckpt") in lines.getvalue() and "written again" in lines.getvalue(), (name, lines.getvalue())
    try:
        io.load_checkpoint(path("step=2.ckpt"))
    except nm.NebulaError:
        pass
    else:
        raise AssertionError("loaded")
    setattr(place, name, plain)
""")  # fmt: skip


def test_best_and_load_from_checkpoint_read_the_published_path(node):
    result = job(node, "--top-k", 1, "--then", "best")
    best = next(line for line in result.lines if "best" in line)["best"]
    loaded = next(line for line in result.lines if "loaded" in line)["loaded"]
    assert best == str(node.base / "ckpts" / "step=8.ckpt")
    assert result.end["files"] == ["step=8.ckpt"]
    assert loaded == torch.load(best, weights_only=False)["state_dict"]["net.0.weight"].double().sum().item()
    again = job(node, "--ckpt", "best", "--steps", 10, check=False)
    assert "best" in again.output or again.codes[0] != 0  # as in stock: a new Trainer knows no best one


def test_a_checkpoint_of_nebula_is_resumed_by_stock_lightning_and_the_other_way(node):
    whole = stock(node, "--steps", 8)
    job(node, "--steps", 4)
    again = stock(node, "--ckpt", node.base / "ckpts" / "step=4.ckpt")
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > 4}
    back = job(node, "--ckpt", node.base / "stock" / "step=4.ckpt")
    assert back.losses == again.losses


@directory_only("torch.load reads no URL")
def test_the_latest_checkpoint_path_and_the_storage_options(node):
    result = job(node, "--then", "api", "--save-last")
    latest = next(line for line in result.lines if "latest" in line)
    assert latest["latest"] == str(node.persist / "global_step8" / "checkpoint")
    assert "state_dict" in latest["keys"]
    other = next(line for line in job(node, "--then", "options").lines if "other" in line)
    assert other == {"other": str(node.base / "ckpts-other" / "global_step8" / "checkpoint"), "step": 8, "own": "global_step8"}
    for path in ("ckpts/own.ckpt", "ckpts/best.ckpt", "ckpts-other/global_step8/checkpoint"):
        assert torch.load(node.base / path, weights_only=False)["global_step"] == 8


def test_a_persist_path_of_one_checkpoint_gets_whole_versions_that_survive_the_process(node):
    script(node, """
nm.init(path("persist"), 0)
other = path("other")
for step in (1, 2):
    state["global_step"] = step
    io.save_checkpoint(state, path(f"step={step}.ckpt"), {"persist_path": other})
io.teardown()
assert sorted(name for name in os.listdir(other) if name != ".nebula") == ["global_step1", "global_step2", "latest"], os.listdir(other)
assert [nm.get_latest_checkpoint(place).tag for place in (None, other)] == ["global_step2", "global_step2"]
io.save_checkpoint({"global_step": 3}, path("step=3.ckpt"), {"persist_path": path("persist")})
io.teardown()
assert torch.load(nm.get_latest_checkpoint_path("checkpoint"), weights_only=False)["global_step"] == 3
""")  # fmt: skip
    node.forget_memory()
    node.environment["NEBULA_COMMAND"] = locate.agent_path()
    script(node, """
import subprocess
for place in (path("other"), path("persist")):
    subprocess.run([os.environ["NEBULA_COMMAND"], "verify", "--path", place], check=True)
found = nm.get_latest_checkpoint_path("checkpoint", path("other"))
assert found == path("other/global_step2/checkpoint") and torch.load(found)["global_step"] == 2
assert torch.equal(nm.get_latest_checkpoint(path("other")).load("checkpoint")["state_dict"]["w"], state["state_dict"]["w"])
""")  # fmt: skip


def test_with_overlap_a_save_returns_before_the_device_has_copied(node):
    assert node.run(interpreter(ENV), "overlap_job.py", node.base / "run", "lightning").end


def test_tied_weights_stay_one_storage(node):
    job(node, "--steps", 2)
    state = torch.load(node.base / "ckpts" / "step=2.ckpt", weights_only=False)["state_dict"]
    assert state["tied"].data_ptr() == state["net.0.weight"].data_ptr()


@pytest.mark.parametrize("package", PACKAGES)
def test_two_ranks_resume_bit_for_bit(node, package):
    whole = stock(node, "--package", package, ranks=2)
    job(node, "--package", package, "--kill-at", 5, ranks=2, check=False)
    again = job(node, "--package", package, "--ckpt", node.base / "ckpts" / "step=4.ckpt", ranks=2)
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > 4}
    assert again.end["weights"] == whole.end["weights"]


# fault: as test_two_ranks_resume_bit_for_bit
@pytest.mark.parametrize("package", PACKAGES)
def test_all_ranks_of_a_node_load_the_last_file_that_rank_0_finds(node, package):
    more = ["--package", package, "--save-last"]
    job(node, *more, "--kill-at", 5, ranks=2, check=False)
    assert started(node, *more, "--ckpt", "last", "--hide", start=lambda *given: job(*given, ranks=2)) == [4, 4]


def started(node, *more, start=None, **options):
    """Resumes on two nodes. Returns the steps from which the ranks go on."""
    log = node.base / "lightning_job-rank1.log"
    before = log.stat().st_size
    first = (start or two_nodes)(node, "--then", "start", *more, **options)
    second = Result(log.read_text(errors="replace")[before:], first.codes)
    return [line["started"] for line in first.lines + second.lines if "started" in line]


def two_nodes(node, *more, **options):
    return job(node, "--nodes", 2, "--devices", 1, "--save-last", "--width", 2000, *more, ranks=2, nodes=True, **options)


@directory_only("the agents of both nodes end without a word")
@pytest.mark.parametrize("way", ["nebula", pytest.param("io", marks=full)])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_all_nodes_resume_from_the_file_that_one_of_them_still_had_in_memory(node, way, is_swapped, monkeypatch):
    two_nodes(node, "--way", way, "--steps", 2)
    for rank in (0, 1):
        node.forget_memory(rank)
    node.environment["NEBULA_STORE_MBPS"] = "0.08"
    path = node.base / "ckpts" / "last.ckpt"
    two_nodes(node, "--way", way, "--ckpt", path, "--kill-at", 5, check=False)
    assert torch.load(path, weights_only=False)["global_step"] == 2, "storage was too fast for this test"
    if is_swapped:
        of_rank = node.of_rank
        monkeypatch.setattr(node, "of_rank", lambda rank: of_rank(1 - rank))
    assert started(node, "--way", way, "--ckpt", path) == [4, 4]


# fault (Deaths): A job on two nodes that was killed resumes by ckpt_path="last", with rank 0 on another node than before.
# result: All ranks resume from the last checkpoint, which at first only the agent of the other node knows of.
@directory_only("the agents of both nodes end without a word")
@pytest.mark.parametrize("way", ["nebula", pytest.param("io", marks=full)])
def test_last_is_the_checkpoint_that_another_nodes_memory_had(node, way, monkeypatch):
    two_nodes(node, "--way", way, "--steps", 2)
    for rank in (0, 1):
        node.forget_memory(rank)
    node.environment["NEBULA_STORE_MBPS"] = "0.08"
    two_nodes(node, "--way", way, "--ckpt", "last", "--kill-at", 5, check=False)
    path = node.base / "ckpts" / "last.ckpt"
    assert torch.load(path, weights_only=False)["global_step"] == 2, "storage was too fast for this test"
    path.unlink()  # rank 0 finds nothing, which without Nebula is a start from nothing
    of_rank = node.of_rank
    monkeypatch.setattr(node, "of_rank", lambda rank: of_rank(1 - rank))
    assert started(node, "--way", way, "--ckpt", "last") == [4, 4]


@directory_only("each node has a file in a directory of its own")
def test_nodes_that_find_other_files_load_none(node, monkeypatch):
    two_nodes(node, "--steps", 4, "--top-k", -1)
    of_rank = node.of_rank
    monkeypatch.setattr(node, "of_rank", lambda rank: of_rank(rank) | {"HOME": str(node.base / f"home{rank}")})

    def give(rank, step):
        path = node.base / f"home{rank}" / "a.ckpt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((node.base / "ckpts" / f"step={step}.ckpt").read_bytes())

    give(0, 2)
    give(1, 2)
    assert started(node, "--ckpt", "~/a.ckpt") == [2, 2]
    give(0, 4)
    refused = two_nodes(node, "--then", "start", "--ckpt", "~/a.ckpt").lines[0]["error"]
    assert refused.startswith("rank 1: ") and "a.ckpt is another file than the one that rank 0 found there" in refused


@pytest.mark.parametrize("way", ["nebula", pytest.param("io", marks=full)])
def test_ranks_that_lightning_itself_starts_resume_bit_for_bit(node, way):
    """``python train.py`` with devices=2: each process runs the script again, and calls Nebula before it knows its rank."""

    def launch(*more):
        command = [interpreter(ENV), HERE / "lightning_job.py", "--way", way, "--devices", 2, "--dirpath", node.base / "ckpts", "--persist", node.persist]
        environment = {name: value for name, value in node.environment.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        with open(node.base / "launched.log", "ab") as log:
            done = subprocess.run([*map(str, command), *map(str, more)], env=environment, stdout=subprocess.PIPE, stderr=log, timeout=240)
        return Result(done.stdout.decode(), [done.returncode])

    whole = stock(node, ranks=2)
    launch("--kill-at", 5)
    again = launch("--ckpt", node.base / "ckpts" / "step=4.ckpt")
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > 4}, (node.base / "launched.log").read_text()[-3000:]
    assert again.end["weights"] == whole.end["weights"]


# fault (Deaths): Lightning's own launcher starts ranks on several nodes, and tells none how many ranks its node has.
# result: The Trainer knows the number of nodes, so the ranks agree on a version as with other launchers.
def test_lightnings_own_launcher_does_not_hide_that_there_are_two_nodes(node):
    words = [interpreter(ENV), HERE / "lightning_job.py", "--devices", 1, "--nodes", 2, "--dirpath", node.base / "ckpts", "--persist", node.persist, "--then", "start"]
    usual = {name: value for name, value in node.environment.items() if name not in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "NEBULA_NODE_ID")}
    with ports.held_port() as held, tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        started = []
        for rank, machine in enumerate((first, second)):
            environment = {"NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
            environment |= {"NEBULA_RUNTIME_DIR": machine, "NEBULA_MEMORY_DIR": os.path.join(machine, "memory"), "NEBULA_AGENT_LINGER": "0"}
            started.append(subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, text=True, env=usual | environment))
        said = [process.communicate(timeout=240)[0] for process in started]
    places = [json.loads(text.splitlines()[-1])["place"] for text in said]
    assert places == [[0, 2, 0, 1], [1, 2, 0, 1]]


@full
@pytest.mark.parametrize(
    ("environment", "stage"),
    [("lightning-deepspeed", 1), ("lightning-deepspeed", 2), ("lightning-deepspeed", 3), ("lightning-deepspeed-oldest", 1)],
    indirect=["environment"],
)
def test_our_deepspeed_strategy_resumes_bit_for_bit_from_memory_and_from_storage(node, stage):
    more = ["--deepspeed", stage, "--save-last"]
    whole = stock(node, *more, ranks=2)
    job(node, *more, "--kill-at", 5, ranks=2, check=False)
    newest = ["--ckpt", node.base / "ckpts" / "step=4.ckpt"]
    again = job(node, *more, *newest, ranks=2)
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > 4}
    assert again.end["weights"] == whole.end["weights"]
    assert again.end["files"] == whole.end["files"]
    node.wait_durable("global_step8")
    node.forget_memory()
    assert job(node, *more, *newest, ranks=2).losses == again.losses
    last = job(node, *more, "--ckpt", "last", "--steps", 10, "--then", "options", ranks=2)
    assert sorted(last.losses) == [9, 10]
    assert "storage_options are not supported by NebulaDeepspeedStrategy" in (node.base / "lightning_job-rank0.log").read_text()


@full
@pytest.mark.parametrize(
    ("environment", "save_last", "tags_of_a_step"),
    [
        ("lightning-deepspeed", "link", ["global_step8"]),  # which Lightning knows from 2.2 on
        ("lightning-deepspeed", True, ["global_step8", "global_step8-last.ckpt"]),
        ("lightning-deepspeed-oldest", True, ["global_step8", "global_step8-last.ckpt"]),
    ],
    indirect=["environment"],
)
def test_last_of_our_deepspeed_strategy_resumes_bit_for_bit_and_costs_no_second_tag_as_a_link(node, save_last, tags_of_a_step):
    more = ["--deepspeed", 1, "--save-last", *(["link"] if save_last == "link" else [])]
    whole = stock(node, "--deepspeed", 1, ranks=2)
    job(node, *more, "--kill-at", 5, ranks=2, check=False)
    again = job(node, *more, "--ckpt", "last", ranks=2)
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > 4}
    assert again.end["weights"] == whole.end["weights"]
    for tag in tags_of_a_step:
        node.wait_durable(tag)
    assert sorted(tag for tag in node.stored() if tag.startswith("global_step8")) == tags_of_a_step


@full
@pytest.mark.parametrize("environment", ["lightning-deepspeed", "lightning-deepspeed-oldest"], indirect=True)
def test_our_deepspeed_strategy_loads_one_file_with_all_weights(node):
    script(node, """
from lightning.pytorch.plugins.io import TorchCheckpointIO
strategy = nm.NebulaDeepspeedStrategy(config={"zero_optimization": {"stage": 3}}, load_full_weights=True)
strategy.checkpoint_io = TorchCheckpointIO()
torch.save(state, "full.ckpt")
assert strategy.load_checkpoint("full.ckpt")["global_step"] == 1
""")  # fmt: skip


def test_without_init_files_appear_all_the_same(node):
    result = job(node, persist=False)
    assert result.end["files"] == [f"step={n}.ckpt" for n in (2, 4, 6, 8)]
    stored = node.stored() if isinstance(node.persist, Url) else os.listdir(node.base / ".nebula" / "ckpts")
    assert {"global_step6", "global_step8"} <= set(stored)


@directory_only("the adapter's own place for its storage is a directory")
def test_a_load_from_a_foreign_directory_does_not_decide_where_checkpoints_go(node):
    script(node, """
os.makedirs("pretrained")
torch.save(state, "pretrained/base.ckpt")
assert io.load_checkpoint("pretrained/base.ckpt")["global_step"] == 1
assert os.listdir("pretrained") == ["base.ckpt"] and nm.persist_path() is None and not nm.is_initialized()
save("step=1.ckpt")
io.teardown()
assert nm.persist_path() == os.getcwd() + "/.nebula/ckpts" and os.listdir("ckpts") == ["step=1.ckpt"]
""")  # fmt: skip


def test_last_as_a_link_is_one_as_in_stock(node):
    if ENV != "lightning":
        pytest.skip("Lightning knows it from 2.2 on")
    for run in (stock, job):
        assert run(node, "--save-last", "link", "--steps", 4).end["files"] == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert os.readlink(node.base / "ckpts" / "last.ckpt") == os.readlink(node.base / "stock" / "last.ckpt") == "step=4.ckpt"
    assert sorted(job(node, "--save-last", "link", "--ckpt", "last", "--steps", 6).losses) == [5, 6]


@pytest.mark.parametrize("how", ["--fail-at", "--interrupt-at"])
def test_exception_and_interrupt_leave_what_was_saved(node, how):
    result = job(node, how, 5, check=False)
    assert any("error" in line or "interrupted" in line for line in result.lines)
    settled(lambda: (node.base / "ckpts" / "step=4.ckpt").exists())
    assert torch.load(node.base / "ckpts" / "step=4.ckpt", weights_only=False)["global_step"] == 4


def test_teardown_twice_and_a_save_after_the_fit(node):
    result = job(node, "--then", "twice")
    assert "after.ckpt" in result.end["files"]


AFTER_FIT = """
import os, signal, sys, inspect, logging, torch, nebulaml as nm
import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
lines = []
logging.getLogger("nebulaml").addHandler(type("Lines", (logging.Handler,), {"emit": lambda self, record: lines.append(record.getMessage())})())
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(200000))
    def training_step(self, batch, index):
        return (self.w * batch.mean()).pow(2).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
def make(*callbacks, steps=4, **more):
    return pl.Trainer(accelerator="cpu", max_steps=steps, logger=False, callbacks=list(callbacks), enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=os.getcwd(), **more)
def fit(trainer):
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(64, 2)))
def callback(**more):
    return nm.NebulaCallback(**{"dirpath": os.getcwd() + "/ckpts", "every_n_train_steps": 2, "save_top_k": -1} | more)
"""


def lightning_script(node, text):
    node.environment["NEBULA_STORE_MBPS"] = "1"
    command = [interpreter(ENV), "-W", "ignore", "-c", AFTER_FIT + text]
    done = subprocess.run(command, env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@directory_only("a dead link in place of the directory makes storage fail")
def test_a_stock_callback_gives_no_file_the_name_of_one_that_a_killed_run_left_in_memory(node):
    run = """
class End(Callback):
    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step == 5:
            assert not os.path.exists("ckpts/step=2.ckpt")
            if KILLED:
                os._exit(0)
            os.unlink("persist")
nm.init(os.getcwd() + "/persist")
fit(make(End(), ModelCheckpoint(dirpath=os.getcwd() + "/ckpts", every_n_train_steps=2, save_top_k=-1, filename="{step}"),
         plugins=[nm.NebulaCheckpointIO()], steps=5))
"""
    node.persist.symlink_to("nowhere")  # storage is not there
    lightning_script(node, "KILLED = True\n" + run)
    lightning_script(node, "KILLED = False\n" + run)
    expected = ["step=2-v1.ckpt", "step=2.ckpt", "step=4-v1.ckpt", "step=4.ckpt"]
    settled(lambda: sorted(os.listdir(node.base / "ckpts")) == expected)


def test_a_file_saved_outside_of_fit_is_there_when_the_call_returns_and_so_is_the_one_of_a_slurm_job_that_is_requeued(node):
    lightning_script(node, """
class Inside(Callback):
    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step == 3:
            trainer.save_checkpoint("inside.ckpt")
            self.was_there = os.path.exists("inside.ckpt")
            path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
            trainer.save_checkpoint(path)
            assert path == trainer._checkpoint_connector._hpc_resume_path and torch.load(path)["global_step"] == 3
            assert os.path.basename(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)) == "hpc_ckpt_2.ckpt"
for more in ({"plugins": [nm.NebulaCheckpointIO()]}, {}):
    inside = Inside()
    trainer = make(inside, callback() if not more else ModelCheckpoint(dirpath="plain"), **more)
    fit(trainer)
    assert not inside.was_there and os.path.exists("inside.ckpt")
    trainer.save_checkpoint("after.ckpt")
    assert torch.load("after.ckpt")["global_step"] == 4
    for name in ("inside.ckpt", "after.ckpt", "hpc_ckpt_1.ckpt"):
        os.unlink(name)
""")  # fmt: skip


def test_the_user_s_own_plugin_is_replaced_with_a_warning_and_still_reads_its_files(node):
    lightning_script(node, """
class Own(TorchCheckpointIO):
    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return {"by": "own", "path": str(path)}
fit(make(callback()))
assert not [line for line in lines if "plugin" in line], lines
trainer = make(callback(), plugins=[Own()])
fit(trainer)
assert [line for line in lines if "takes the place of the plugin Own" in line], lines
with open("own.bin", "w") as file:
    file.write("no torch file")
assert trainer.strategy.load_checkpoint(os.getcwd() + "/own.bin", weights_only=False)["by"] == "own"
assert trainer.strategy.load_checkpoint("s3://bucket/x.ckpt", weights_only=False) == {"by": "own", "path": "s3://bucket/x.ckpt"}
assert trainer.strategy.load_checkpoint(trainer.checkpoint_callback.best_model_path, weights_only=False)["global_step"] == 4
""")  # fmt: skip


def test_a_remote_path_is_refused_when_the_fit_begins_and_saved_as_without_nebula_by_the_plugin_alone(node):
    lightning_script(node, """
import fsspec
for path in ("memory://run/ckpts", "s3://bucket/run", "gs://bucket/run"):
    try:
        if path.startswith("memory"):
            fit(make(callback(dirpath=path)))
        else:  # no client for it is installed: what Lightning resolves comes first
            one = callback()
            one.dirpath = path
            type(one).__mro__[1].setup = lambda *arguments, **named: None
            one.setup(None, None, "fit")
    except nm.NebulaConfigError as error:
        assert path in str(error) and "ModelCheckpoint" in str(error), error
    else:
        raise AssertionError("taken")
""")  # fmt: skip
    lightning_script(node, """
import fsspec
fit(make(ModelCheckpoint(dirpath="memory://run/ckpts", every_n_train_steps=2, save_top_k=-1, filename="{step}"), plugins=[nm.NebulaCheckpointIO()]))
names = sorted(os.path.basename(name) for name in fsspec.filesystem("memory").ls("/run/ckpts", detail=False))
assert names == ["step=2.ckpt", "step=4.ckpt"], names
assert [line for line in lines if "memory://run/ckpts/step=2.ckpt" in line and "Lightning saves it itself" in line], lines
io = nm.NebulaCheckpointIO()
io.save_checkpoint({"global_step": 5}, "file://" + os.getcwd() + "/url.ckpt")
io.teardown()
assert torch.load("url.ckpt") == io.load_checkpoint("file://" + os.getcwd() + "/url.ckpt") == {"global_step": 5}
""")  # fmt: skip


def test_inspect_sees_the_arguments_of_the_class_that_ours_extends(node):
    lightning_script(node, """
theirs, ours = inspect.signature(ModelCheckpoint), inspect.signature(nm.NebulaCallback)
assert list(ours.parameters) == [*theirs.parameters, "config_params", "overlap", "export"], ours
assert all(ours.parameters[name] == one for name, one in theirs.parameters.items())
assert "save_last" in ours.parameters and ours.parameters["config_params"].kind is inspect.Parameter.KEYWORD_ONLY
bound = ours.bind("ckpts", save_last=True, config_params={})
assert nm.NebulaCallback(*bound.args, save_last=True).save_last
""")  # fmt: skip


def test_a_missing_path_is_named(node):
    result = job(node, "--ckpt", node.base / "ckpts" / "nothing.ckpt", check=False)
    assert result.codes[0] != 0
    log = (node.base / "lightning_job-rank0.log").read_text()
    assert "nothing.ckpt" in log


def test_importing_the_package_imports_no_framework(node):
    names = ("torch", "numpy", "lightning", "pytorch_lightning", "transformers", "accelerate", "safetensors", "deepspeed")
    code = f"import sys, nebulaml; print([name for name in {names} if name in sys.modules])"
    python = interpreter(ENV)  # where there is one
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=node.environment)
    assert done.stdout.strip() == "[]", done.stderr
