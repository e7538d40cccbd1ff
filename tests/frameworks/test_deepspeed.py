"""Stock DeepSpeed, nothing patched: training resumed after SIGKILL equals uninterrupted training bit for bit.

A short selection runs by default; NEBULA_TEST_FRAMEWORKS=all runs every version, stage and precision.
"""

import math
import shutil
import subprocess
from pathlib import Path

import nebulaml
import pytest
from conftest import ENDING, FULL, HERE, Url, directory_only, full, interpreter
from ports import held_port

STOCK = ["deepspeed-0.19.6", "deepspeed-0.18.4"]
NEW = "deepspeed-0.19.8"
WAYS = [*[(name, "stock") for name in STOCK], (NEW, "import"), (NEW, "attach"), ("deepspeed-0.19.6", "attach")]
SHORT = [(NEW, "import", 1, False)]
ALL = [(env, way, stage, bf16) for env, way in WAYS for stage in (0, 1, 2, 3) for bf16 in (False, True)]
CASES = ALL if FULL else SHORT
BOTH = pytest.mark.parametrize(
    ("env", "way"), [("deepspeed-0.19.6", "stock"), pytest.param(NEW, "attach", marks=full)]
)


def job(node, env, way, *more, **options):
    return node.run(
        interpreter(env), "deepspeed_job.py", "--way", way, "--persist", node.persist, "--save-dir", node.base / "save",
        *more, **options,
    )  # fmt: skip


_whole = {}


def uninterrupted(node, env, *more, ranks=2):
    """Returns the losses of DeepSpeed alone, with its own torch.save. Every resumed run is compared with them. They are bit-reproducible, so one run is enough."""
    key = (env, ranks, *map(str, more))
    if key not in _whole:
        _whole[key] = alone(node, env, *more, ranks=ranks)
        assert all(math.isfinite(loss) for loss in _whole[key].losses.values())
    return _whole[key]


def alone(node, env, *more, **options):
    return node.run(
        interpreter(env), "deepspeed_job.py", "--way", "torch", "--persist", node.base / "x", "--save-dir", node.base / "plain",
        *more, **options,
    )  # fmt: skip


def equal(again, whole, step):
    assert again.resumed == step
    assert again.losses == {at: loss for at, loss in whole.losses.items() if at > step}
    assert again.end["weights"] == whole.end["weights"]


def logs(node):
    return "\n".join(path.read_text(errors="replace") for path in node.base.glob("*-rank*.log"))


@pytest.mark.parametrize(("env", "way", "stage", "bf16"), CASES)
def test_resume_after_sigkill_of_all_ranks_equals_uninterrupted_training(node, env, way, stage, bf16):
    more = ["--stage", stage, *(["--bf16"] if bf16 else [])]
    whole = uninterrupted(node, env, *more)
    if (env, stage, bf16) == ("deepspeed-0.18.4", 0, True):
        # It does not save the fp32 weights of a model in bf16, so that its own resume is not exact either: that one counts here.
        alone(node, env, *more, ranks=2)
        whole = alone(node, env, *more, "--resume", "--tag", "global_step4", ranks=2)
    job(node, env, way, *more, "--kill-at", 5, ranks=2, check=False)
    equal(job(node, env, way, *more, "--resume", ranks=2), whole, 4)


@pytest.mark.parametrize(
    ("env", "way"), [("deepspeed-0.19.6", "stock"), pytest.param("deepspeed-0.18.4", "stock", marks=full), pytest.param(NEW, "import", marks=full)]
)
def test_resume_from_storage_when_the_node_lost_its_memory_and_its_save_dir(node, env, way):
    if way == "stock" and isinstance(node.persist, Url):
        pytest.skip("this DeepSpeed looks for names in a directory")
    whole = uninterrupted(node, env, "--stage", 2)
    job(node, env, way, "--stage", 2, "--kill-at", 5, ranks=2, check=False)
    node.wait_durable("global_step4")
    node.forget_memory()
    shutil.rmtree(node.base / "save")
    equal(job(node, env, way, "--stage", 2, "--resume", "--load-dir", node.persist, ranks=2), whole, 4)


# fault: as test_after_a_node_was_replaced_all_ranks_load_all_files_though_storage_has_none
@full
@pytest.mark.parametrize(("stage", "lost"), [(1, 0), (2, 1), (3, 0), (1, None)])
def test_two_nodes_resume_from_each_others_memory_though_one_is_replaced(node, stage, lost):
    """Storage has no file of the newest checkpoint when the ranks are killed. Every rank loads files that ranks of the other node have saved, and each node sees only its own directory."""
    whole = uninterrupted(node, NEW, "--stage", stage)
    more = ["--stage", stage, "--interval", 3600, "--replicas", 1, "--save-dir", node.base / "save{rank}"]
    loses = ["--lose-node", -1 if lost is None else lost]
    killed = job(node, NEW, "import", *more, *loses, "--slow-step", 1, "--kill-at", 5, ranks=2, check=False, nodes=True)
    assert [line["state"] for line in killed.lines if "state" in line] == ["replicated"], "storage has it already"
    if lost is not None:
        node.forget_memory(lost)
        shutil.rmtree(node.base / f"save{lost}")
    equal(job(node, NEW, "import", *more, "--resume", ranks=2, nodes=True), whole, 4)


@BOTH
def test_a_rank_that_dies_inside_save_leaves_the_version_before(node, env, way):
    whole = uninterrupted(node, env, "--stage", 1)
    job(node, env, way, "--stage", 1, "--die-inside-save", 6, ranks=2, check=False, timeout=60)
    equal(job(node, env, way, "--stage", 1, "--resume", ranks=2), whole, 4)


@pytest.mark.parametrize("way", ["import", pytest.param("attach", marks=full)])
def test_a_commit_at_the_next_step_is_exact_and_the_last_one_is_not_lost(node, way):
    more = ["--stage", 2, "--bf16", "--overlap"]
    whole = uninterrupted(node, NEW, "--stage", 2, "--bf16")
    job(node, NEW, way, *more, "--steps", 6, ranks=2)
    assert (node.base / "save" / "latest").read_text() == "global_step6"
    equal(job(node, NEW, way, *more, "--resume", ranks=2), whole, 6)


def test_with_overlap_a_save_returns_before_the_device_has_copied(node):
    assert node.run(interpreter(NEW), "overlap_job.py", node.base / "run", "deepspeed").end


def test_a_tag_saved_again_with_16_bit_weights_is_one_whole_version(node):
    env = "deepspeed-0.19.6"
    more = ["--stage", 1, "--save-16bit"]
    whole = uninterrupted(node, env, *more)
    job(node, env, "stock", *more, "--kill-at", 7, ranks=2, check=False)
    equal(job(node, env, "stock", *more, "--resume", "--tag", "global_step4", ranks=2), whole, 4)
    node.wait_durable("global_step8")
    for tag in ("global_step6", "global_step8"):
        names = {file["name"] for file in node.inspect(tag)["files"]}
        assert {"mp_rank_00_model_states.pt", "pytorch_model.bin", "zero_pp_rank_1_mp_rank_00_optim_states.pt"} <= names
    node.forget_memory()
    equal(job(node, env, "stock", *more, "--resume", "--tag", "global_step6", ranks=2), whole, 6)


WITHOUT_NEBULA = """
import os, types, torch
import nebulaml as nm
import nebulaml.deepspeed
from nebulaml.integrations.stand_in import StandIn
nm.init(os.path.abspath("persist"), 0, on_error="raise")
engine = nebulaml.deepspeed.NebulaDeepSpeedEngine()
deepspeed = types.SimpleNamespace(checkpoint_engine=engine, load_universal_checkpoint=lambda: False, seq_dp_world_size=1)
name = "mp_rank_00_model_states.pt"
load = nebulaml.deepspeed._wrap_load(lambda self, load_dir, tag: engine.load(f"{load_dir}/{tag}/{name}"))

def save(tag, value, place="save"):
    info = types.SimpleNamespace(tag=tag, save_dir=place, save_latest=True)
    engine.create(info)
    engine.save({"w": value}, f"{place}/{tag}/{name}")
    engine.commit(info)
    with open(f"{place}/latest", "w") as latest:
        latest.write(tag)

save("global_step2", 2)
os.makedirs("save/global_step4")
torch.save({"w": 4}, f"save/global_step4/{name}")
with open("save/latest", "w") as latest:
    latest.write("global_step4")
assert load(deepspeed, "save") == {"w": 4}, "an older one of Nebula"
assert load(deepspeed, "save", "global_step2") == {"w": 2}
save("global_step4", 5)
assert load(deepspeed, "save") == {"w": 5}
assert type(torch.load(f"save/global_step4/{name}", weights_only=False)) is StandIn, "the values of before"
with open("save/latest", "w") as latest:
    latest.write("global_step6")  # it was never completed
os.makedirs("save/global_step6")
torch.save(StandIn("this file is only a placeholder for x"), f"save/global_step6/{name}")
assert load(deepspeed, "save") == {"w": 5}
save("global_step8", 8, "persist")
nm.flush_persistence()
save("global_step8", 9, "persist")
assert torch.load(f"persist/global_step8/{name}", weights_only=False) in ({"w": 8}, {"w": 9}), "a file of the storage path"
nm.flush_persistence()
assert torch.load(f"persist/global_step8/{name}", weights_only=False) == {"w": 9}
"""


def test_a_run_of_deepspeed_without_nebula_is_continued_and_none_of_its_files_passes_for_a_later_one(node):
    done = subprocess.run([interpreter("deepspeed-0.19.6"), "-c", WITHOUT_NEBULA], env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


# fault (Deaths): One rank of a job with another number of ranks cannot load its part of a ZeRO checkpoint.
# result: All ranks raise, and none waits for another one.
def test_a_rank_that_cannot_load_a_converted_checkpoint_is_heard_by_all_ranks(node):
    text = """
import contextlib, types
import nebulaml.deepspeed
from nebulaml.deepspeed import universal
from nebulaml.integrations import together
told = []

def load(self, folder, tag):
    raise KeyError("w")

universal._folder_of = lambda checkpoint: contextlib.nullcontext(("folder", "tag"))
engine = types.SimpleNamespace(
    checkpoint_engine=types.SimpleNamespace(enable_load=True), _config=types.SimpleNamespace(load_universal_checkpoint=False), seq_dp_world_size=1
)
checkpoint = types.SimpleNamespace(tag="global_step1", _all_files=lambda: [])
for of_all, original in ((lambda value: told.append(value) or [value], load), (lambda value: [value, "KeyError: 'w'"], lambda *given: given)):
    together._of_all = of_all
    try:
        universal.load(engine, original, checkpoint)
    except Exception as failure:
        told.append(f"{type(failure).__name__}: {failure}")
assert told[:2] == ["KeyError: 'w'"] * 2 and told[2].startswith("NebulaStorageError: rank 1: KeyError: 'w'"), told
assert engine.checkpoint_engine.enable_load and not engine._config.load_universal_checkpoint
"""
    done = subprocess.run([interpreter("deepspeed-0.19.6"), "-c", text], env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@full
def test_a_url_as_save_dir_is_refused_before_a_directory_gets_its_name(node):
    text = """
import os, types
import nebulaml as nm
from nebulaml.deepspeed import NebulaDeepSpeedEngine, ds_engine
try:
    ds_engine.DeepSpeedEngine.save_checkpoint(types.SimpleNamespace(checkpoint_engine=NebulaDeepSpeedEngine()), "s3://bucket/run?sig=secret")
except nm.NebulaConfigError as error:
    assert "'s3://bucket/run'" in str(error) and "persistent_storage_path" in str(error), error
else:
    raise AssertionError("saved")
assert not [name for name in os.listdir() if name.startswith("s3")]
"""
    done = subprocess.run([interpreter(NEW), "-c", text], env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def test_deepspeeds_tools_are_told_where_the_values_are_by_the_files_that_stand_for_them(node):
    text = """
import os, torch, types
import nebulaml as nm
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from nebulaml.deepspeed import NebulaDeepSpeedEngine
nm.init(os.getcwd() + "/persist")
engine = NebulaDeepSpeedEngine()
info = types.SimpleNamespace(tag="global_step1", save_dir=os.getcwd() + "/save", save_latest=True)
engine.create(info)
os.makedirs("save")
with open("save/latest", "w") as latest:
    latest.write("global_step1")
name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
engine.save({"module": {}}, "save/global_step1/mp_rank_00_model_states.pt")
engine.save({"optimizer_state_dict": {}}, f"save/global_step1/{name}")
engine.commit(info)
try:
    get_fp32_state_dict_from_zero_checkpoint(os.getcwd() + "/save")
except nm.NebulaNotFound as error:
    assert "mp_rank_00_model_states.pt" in str(error) and os.getcwd() + "/persist" in str(error) and "global_step1" in str(error), error
else:
    raise AssertionError("read")
assert engine.load(f"save/global_step1/{name}") == {"optimizer_state_dict": {}}
"""
    done = subprocess.run([interpreter(NEW), "-c", text], env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@full
def test_a_load_path_elsewhere_never_hits_this_jobs_memory(node):
    env = "deepspeed-0.19.6"
    job(node, env, "stock", "--steps", 4, ranks=2)
    node.wait_durable("global_step4")
    first = node.persist
    node.persist = node.base / "other"
    assert job(node, env, "stock", "--steps", 4, "--width", 48, ranks=2).end
    again = job(node, env, "stock", "--steps", 6, "--resume", "--load-path", first, ranks=2)
    equal(again, uninterrupted(node, env, "--steps", 6), 4)


@full
@directory_only("DeepSpeed's tools and its own loader read files")
@pytest.mark.parametrize("env", STOCK)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_own_tools_read_the_persisted_directory(node, env, stage):
    job(node, env, "stock", "--stage", stage, "--steps", 4, ranks=2)
    node.wait_durable("global_step4")
    python = interpreter(env)

    def tool(*arguments):
        done = subprocess.run([python, "-m", *map(str, arguments)], env=node.environment, cwd=node.base, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

    tool("deepspeed.utils.zero_to_fp32", node.persist, node.base / "fp32", "-t", "global_step4")
    assert any((node.base / "fp32").iterdir())
    plain = job(node, env, "stock", "--stage", stage, "--resume", "--no-nebula-load", "--load-dir", node.persist, ranks=2)
    equal(plain, uninterrupted(node, env, "--stage", stage), 4)
    folder = node.base / "universal" / "global_step4_universal"
    tool("deepspeed.checkpoint.ds_to_universal", "--input_folder", node.persist / "global_step4", "--output_folder", folder, "--inject_missing_state")
    load = ["--stage", stage, "--resume", "--universal", "--load-dir", node.base / "universal", "--tag", folder.name]
    assert job(node, env, "stock", *load, "--no-nebula-load", ranks=2).end
    wrong = job(node, env, "stock", *load, ranks=2, check=False)
    assert any(wrong.codes)
    assert '"enable_nebula_load": false' in logs(node)


@full
@pytest.mark.parametrize(("env", "way"), WAYS)
def test_three_ranks_resume_exactly(node, env, way):
    whole = uninterrupted(node, env, "--stage", 2, ranks=3)
    job(node, env, way, "--stage", 2, "--kill-at", 5, ranks=3, check=False)
    equal(job(node, env, way, "--stage", 2, "--resume", ranks=3), whole, 4)


@full
def test_the_deepspeed_launcher_tells_ranks_enough(node):
    env = "deepspeed-0.19.6"
    launcher = Path(interpreter(env)).with_name("deepspeed")
    held = held_port()
    command = [
        launcher, "--num_gpus", 2, "--master_port", held.getsockname()[1], ENDING, HERE / "deepspeed_job.py", "--way", "stock", "--stage", 2,
        "--persist", node.persist, "--save-dir", node.base / "save", "--steps", 4,
    ]  # fmt: skip
    environment = {**node.environment, "PATH": f"{launcher.parent}:{node.environment['PATH']}"}
    with held:
        done = subprocess.run(list(map(str, command)), env=environment, cwd=node.base, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    node.wait_durable("global_step4")
    assert [rank["rank"] for rank in node.inspect("global_step4")["ranks"]] == [0, 1]


def test_a_package_that_cannot_load_its_library_stops_the_job(node):
    """DeepSpeed turns an ImportError into torch.save and one line in a log."""
    package = Path(nebulaml.__file__).parent
    for name in ("nebulaml", "torch_nebula"):
        shutil.copytree(package.parent / name, node.base / "broken" / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    node.environment["PYTHONPATH"] = str(node.base / "broken")
    done = job(node, "deepspeed-0.19.6", "stock", "--steps", 2, "--save-every", 2, check=False)
    assert done.codes != [0]
    assert "NebulaUnavailable: the C library of nebulaml cannot be loaded" in logs(node)


@full
def test_a_deepspeed_that_cannot_commit_is_refused_with_the_way_out(node):
    done = job(node, "deepspeed-0.18.3", "stock", "--steps", 2, "--save-every", 2, check=False)
    assert done.codes != [0]
    assert "install deepspeed 0.18.4 or later" in logs(node)


@pytest.mark.parametrize(("version", "taken"), [("0.19.0rc1", True), ("0.18.3+cu121", False), ("from-source", True)])
def test_attach_reads_versions_that_are_more_than_numbers(version, taken):
    code = f"import deepspeed; deepspeed.__version__ = {version!r}; import nebulaml.deepspeed"
    done = subprocess.run([interpreter("deepspeed-0.19.6"), "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode == 0) == taken, done.stderr
    assert taken or "NebulaConfigError: DeepSpeed 0.18.3+cu121 is too old" in done.stderr


def test_attach_to_an_engine_that_is_attached_takes_the_new_overlap_and_keeps_it_when_none_is_given(node):
    code = """
import nebulaml as nm, nebulaml.deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
engine.__dict__["checkpoint_engine"] = None
seen = [nm.attach(engine, **given).checkpoint_engine.overlap for given in ({}, {"overlap": True}, {}, {"overlap": False})]
assert seen == [False, True, True, False], seen
"""
    subprocess.run([interpreter("deepspeed-0.19.6"), "-c", code], check=True, timeout=240)


LATEST_OF_RANK_0 = """
import os, sys, types
import torch.distributed as dist
import nebulaml as nm
import nebulaml.deepspeed
from nebulaml._session import engine as default
rank = os.environ["RANK"]
dist.init_process_group("gloo")
nm.init(sys.argv[1], 0, 2, on_error="raise")
for tag in ("global_step1", "global_step2"):
    checkpoint = default.session().begin(tag, -2)  # no save of this session: it is the same process that resumes here
    checkpoint.save_bytes(f"r{rank}", b"x")
    checkpoint.commit()
    checkpoint.wait("durable", 60000)
folder = f"save{rank}"
os.mkdir(folder)
if rank == "0":
    with open(f"{folder}/latest", "w") as latest:
        latest.write("global_step1")
engine = types.SimpleNamespace(
    checkpoint_engine=nebulaml.deepspeed.NebulaDeepSpeedEngine(), load_universal_checkpoint=lambda: False, seq_dp_world_size=2
)
load = nebulaml.deepspeed._wrap_load(lambda self, load_dir, tag: tag)
print(load(engine, folder), flush=True)
if rank == "1":
    open(f"{folder}/global_step2", "w").close()  # no directory of stand-in files can be made there
for latest in (b"global_step2", bytes([255])):
    if rank == "0":
        with open(f"{folder}/latest", "wb") as file:
            file.write(latest)
    try:
        print(load(engine, folder))
    except Exception as failure:
        print(type(failure).__name__, str(failure).startswith("rank "))
"""


# fault (Storage): A node of a DeepSpeed job cannot write into the directory of the load, whether or not rank 0 can read DeepSpeed's `latest`.
# result: All ranks raise, and none waits for another one.
def test_all_ranks_load_what_latest_of_rank_0_names_though_other_nodes_have_no_such_file(node):
    with held_port() as held:
        shared = {
            **node.environment, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1]),
        }  # fmt: skip
        command = [interpreter("deepspeed-0.19.6"), "-c", LATEST_OF_RANK_0, str(node.persist)]
        ranks = [
            subprocess.Popen(
                command, env={**shared, "RANK": rank, "NEBULA_NODE_ID": f"n{rank}", "NEBULA_MEMORY_DIR": str(node.base / f"memory{rank}")},
                cwd=node.base, stdout=subprocess.PIPE, text=True,
            )
            for rank in "01"
        ]  # fmt: skip
        said = [rank.communicate(timeout=240)[0].splitlines()[-3:] for rank in ranks]
    assert said[0] == ["global_step1", "NebulaStorageError True", "NebulaStorageError True"]
    assert said[1] == ["global_step1", "FileExistsError False", "FileExistsError False"]


def test_a_checkpoint_that_memory_alone_will_have_is_warned_of_once(node):
    text = """
import logging, os, types, torch
import nebulaml as nm
from nebulaml.deepspeed import NebulaDeepSpeedEngine
logging.basicConfig(level="WARNING")
nm.init()
engine = NebulaDeepSpeedEngine()
for tag in ("global_step1", "global_step2"):
    info = types.SimpleNamespace(tag=tag, save_dir=os.getcwd(), save_latest=True)
    engine.create(info)
    engine.save({"w": torch.ones(3)}, f"{os.getcwd()}/{tag}/model.pt")
    engine.commit(info)
"""
    command = [interpreter(NEW), "-c", text]
    environment = {name: value for name, value in node.environment.items() if name != "NEBULA_PERSISTENT_STORAGE_PATH"}
    done = subprocess.run(command, env=environment, cwd=node.base, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("no storage path is set") == 1 and f"{node.base} holds small files" in done.stderr, done.stderr
