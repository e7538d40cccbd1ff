"""The examples of docs/frameworks.md run as printed, each with its framework. `...` in them stands for the reader's own settings.

An example that is not Python, such as settings, is the variable `example` of the code after it.
"""

import re
import subprocess
import textwrap

import pytest
from conftest import LIMIT_S, ROOT, full, interpreter

PAGE = (ROOT / "docs/frameworks.md").read_text()
EXAMPLE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
SECTION = re.compile(r"^#+ ([^\n]+)\n((?:(?!^#+ ).)*)", re.M | re.S)

MODEL = "model = torch.nn.Linear(3, 2)\n"
ONE_RANK = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""
SETTINGS = '"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}'
DEEPSPEED = """
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
deepspeed.init_distributed("gloo")
"""
CHECK_ENGINE = """
engine.save_checkpoint("ckpts", tag="step1")
nm.flush_persistence()
assert nm.get_latest_checkpoint().tag == "step1"
"""
# The strategies ask for a GPU, or for ranks, when a Trainer begins with them: here they are only made.
TRAINER = """
def Trainer(strategy=None, **given):
    return lightning.Trainer(logger=False, accelerator="cpu", **given)
"""
FABRIC = """
parallelize_fn = None
def Fabric(strategy=None, **given):
    return lightning.Fabric(accelerator="cpu", **given)
"""
FABRIC_SAVED = """
fabric = Fabric(plugins=[nm.NebulaCheckpointIO()])
nm.init(persistent_storage_path="/scratch/run7")
fabric.save("ckpts/step-4.ckpt", {"step": 4})
state = {"step": 0}
"""
HF = """
from accelerate import Accelerator
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments
model = BertForMaskedLM(BertConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
trainer = Trainer(model=model, args=TrainingArguments(output_dir="out", report_to=[]))
accelerator = Accelerator()
"""
DATA = """
from torchdata.stateful_dataloader import StatefulDataLoader
loader, step = StatefulDataLoader(list(range(8)), batch_size=4), 1
"""
TRL = """
from pathlib import Path
import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
words = Tokenizer(models.WordLevel({"one": 0, "two": 1, "<pad>": 2, "<end>": 3, "<unk>": 4}, "<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
settings = {
    "model": GPT2LMHeadModel(GPT2Config(vocab_size=5, n_positions=8, n_embd=8, n_layer=1, n_head=2, eos_token_id=3, pad_token_id=2)),
    "args": SFTConfig(output_dir="out", max_steps=2, save_steps=1, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=8),
    "train_dataset": datasets.Dataset.from_dict({"text": ["one two one"] * 16}),
    "processing_class": PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>"),
}
"""
# The example is that of a second start: the first ends after one step.
FIRST_START = """
first = SFTTrainer(**settings)
nm.attach(first)
first.args.max_steps = 1
first.train()
"""
CHECK_TRL = """
assert trainer.state.global_step == 2
nm.flush_persistence()
assert {path.parent.name for path in Path("out").glob("*/.nebula.json")} == {"checkpoint-1", "checkpoint-2"}
"""
AXOLOTL = """
import yaml
from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault
"""
CHECK_AXOLOTL = """
config = DictDefault(yaml.safe_load(example))
for name in config.plugins:  # as axolotl's own prepare_plugins does
    PluginManager.get_instance().register(name)
from nebulaml.integrations.axolotl import NebulaArgs
assert "nebulaml.integrations.axolotl.NebulaArgs" in PluginManager.get_instance().get_input_args()
assert NebulaArgs(**config).nebula["replicas"] == 1
trainer = SFTTrainer(**settings)
PluginManager.get_instance().post_trainer_create(config, trainer)
trainer.train()
nm.flush_persistence()
assert Path("out/checkpoint-2/.nebula.json").exists()
"""
MEGATRON = """
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from pathlib import Path
folder = Path("<path>", "iter_0000001")
folder.mkdir(parents=True)
state = {"weight": ShardedTensor.from_rank_offsets("weight", torch.randn(8, 16))}
"""
# verl's trainer has its settings from hydra.
VERL = """
import os, shlex
"""
CHECK_VERL = """
export, *overrides = [shlex.split(line, comments=True) for line in example.splitlines()]
assert export[0] == "export"
os.environ.update(dict([export[1].split("=")]), VERL_ENGINE_DEVICE="cpu")
import verl
from hydra import compose, initialize_config_dir
with initialize_config_dir(os.path.dirname(verl.__file__) + "/trainer/config", version_base=None):
    config = compose("ppo_trainer", [one for (one,) in overrides])
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.workers.engine.base import EngineRegistry
assert config.actor_rollout_ref.actor.checkpoint.async_save is True
assert type(build_checkpoint_callback(config)).__name__ == "NebulaCheckpointCallback"
assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "NebulaFSDPEngineWithLMHead"
"""
CHECK_VERL_WEIGHTS = """
overrides = [word for line in example.splitlines() for word in shlex.split(line, comments=True)]
import verl
from hydra import compose, initialize_config_dir
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs
with initialize_config_dir(os.path.dirname(verl.__file__) + "/trainer/config", version_base=None):
    settings = compose("ppo_trainer", overrides).actor_rollout_ref.rollout.checkpoint_engine
import_external_libs(settings.custom_backend_module)
assert CheckpointEngineRegistry.get(settings.backend).__module__ == "nebulaml.integrations.verl_weights"
assert settings.engine_kwargs[settings.backend].path.endswith("/weights")
"""
RAY = """
import os
os.environ["HOME"] = os.getcwd()  # Ray keeps a token there
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
def train():
    step, rank, loss, state = 1, 0, 0.5, {"step": 1}
    """
CHECK_RAY = """
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
run = RunConfig(name="run", storage_path="<path>")
result = TorchTrainer(train, torch_config=TorchConfig(backend="gloo"), scaling_config=ScalingConfig(num_workers=1), run_config=run).fit()
assert torch.load(result.checkpoint.path + "/rank-0.pt") == {"step": 1}
ray.shutdown()
"""
HDF5 = """
import numpy as np, xarray
step, plate, before = 5, np.arange(12.0).reshape(3, 4), np.arange(12.0).reshape(3, 4)
field = copy = xarray.Dataset({"heat": (("x", "y"), plate)}, attrs={"step": step})
"""
# For the examples under each heading, in their order: the environment, code before the example, and after it.
AROUND = {
    "Lightning": [("lightning-deepspeed", "import lightning\n" + TRAINER, "")],
    "Sharded checkpoints": [("lightning", "import lightning\n" + TRAINER, "")],
    "Lightning Fabric": [
        ("lightning", "import lightning\n" + FABRIC, ""),
        ("lightning", "import lightning\n" + FABRIC + FABRIC_SAVED, "assert state['step'] == 4"),
    ],
    "Hugging Face": [("hf", HF, "")],
    "DeepSpeed": [("deepspeed-0.19.8", MODEL + DEEPSPEED, CHECK_ENGINE)] * 2,
    "torch.distributed.checkpoint": [
        ("", ONE_RANK + MODEL + "state = model.state_dict()\n", "future.result()"),
    ],
    "torchtitan": [
        ("torchtitan", "class config: pass\n", "assert config.checkpoint.enable"),
    ],
    "TRL and axolotl": [
        ("trl", TRL + FIRST_START, CHECK_TRL),
        ("axolotl", TRL + AXOLOTL, CHECK_AXOLOTL),
    ],
    "Megatron-Core": [("megatron", ONE_RANK + MEGATRON, "nm.flush_persistence(); assert (folder / '.metadata').exists()")],
    "verl": [("verl", VERL, CHECK_VERL)],
    "verl's weights for rollouts": [("verl", VERL, CHECK_VERL_WEIGHTS)],
    "Ray Train": [("ray", RAY, CHECK_RAY)],
    "HDF5 and netCDF": [("hdf5", HDF5, "assert (plate == before).all() and field.identical(copy)")],
    "Data": [("torchdata", MODEL + DATA, 'assert manager.restore({"data": loader}).step == 1')],
}


SETTINGS_OF = {"{..., ": "{" + SETTINGS + ", ", "{...}": "{" + SETTINGS + "}", "(...)": "(**settings)"}


def examples(heading):
    """Returns language and text of each example under a heading."""
    return EXAMPLE.findall(dict(SECTION.findall(PAGE))[heading])


def test_each_heading_with_an_example_is_run():
    prose = EXAMPLE.sub("", PAGE)
    headings = re.findall(r"^#+ (.+)$", prose, re.M)
    assert len(headings) == len(set(headings)) > len(AROUND)
    assert {heading for heading in headings if examples(heading)} == set(AROUND)
    assert sum(len(examples(heading)) for heading in headings) == PAGE.count("```") // 2


@full
@pytest.mark.parametrize(("heading", "number"), [(heading, number) for heading in AROUND for number in range(len(AROUND[heading]))])
def test_the_examples_run_as_printed(node, this_python, heading, number):
    found = examples(heading)
    assert len(found) == len(AROUND[heading])
    (language, own), (environment, before, after) = found[number], AROUND[heading][number]
    if language == "python":
        for printed, given in SETTINGS_OF.items():
            own = own.replace(printed, given)
        own = textwrap.indent(own, re.search(r" *$", before)[0]).lstrip()  # an example in a function has its indentation
    else:
        own = f"example = {own!r}"
    code = f"import torch\nimport nebulaml as nm\n{before}{own}\n{after}\nnm.flush_persistence()\n"
    for path, real in (("/scratch/run7", node.persist), ("<path>/<tag>", node.persist / "step1"), ("<path>", node.persist)):
        code = code.replace(path, str(real))
    python = interpreter(environment) if environment else this_python
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [python, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=node.environment | variables, cwd=node.base, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
