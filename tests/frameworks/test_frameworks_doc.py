"""The examples of docs/frameworks.md run as printed, each with its framework. `...` in them stands for the reader's own settings."""

import re
import subprocess

import pytest
from conftest import LIMIT_S, ROOT, full, interpreter

PAGE = (ROOT / "docs/frameworks.md").read_text()
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)

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
# For the examples under each heading, in their order: the environment, code before the example, and after it.
AROUND = {
    "Lightning": [("lightning-deepspeed", "import lightning\n" + TRAINER, "")],
    "Sharded checkpoints": [("lightning", "import lightning\n" + TRAINER, "")],
    "Lightning Fabric": [("lightning", "import lightning\n" + FABRIC, "")],
    "Hugging Face": [("hf", HF, "")],
    "DeepSpeed": [("deepspeed-0.19.8", MODEL + DEEPSPEED, CHECK_ENGINE)] * 2,
    "torch.distributed.checkpoint": [
        ("", ONE_RANK + MODEL + "state = model.state_dict()\n", "future.result()"),
    ],
    "torchtitan": [
        ("torchtitan", "class config: pass\n", "assert config.checkpoint.enable"),
    ],
    "Data": [("torchdata", MODEL + DATA, 'assert manager.restore({"data": loader}).step == 1')],
}


def examples(heading):
    return EXAMPLE.findall(re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#)", PAGE, re.M | re.S)[1])


@full
@pytest.mark.parametrize("heading", AROUND)
def test_the_examples_run_as_printed(node, this_python, heading):
    found = examples(heading)
    assert len(found) == len(AROUND[heading])
    for example, (environment, before, after) in zip(found, AROUND[heading], strict=True):
        own = example.replace("{..., ", "{" + SETTINGS + ", ").replace("{...}", "{" + SETTINGS + "}")
        for path, real in (("/scratch/run7", node.persist), ("<path>/<tag>", node.persist / "step1")):
            own = own.replace(path, str(real))
        code = f"import torch\nimport nebulaml as nm\n{before}\n{own}\n{after}\nnm.flush_persistence()\n"
        python = interpreter(environment) if environment else this_python
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        command = [python, "-W", "ignore", "-c", code]
        done = subprocess.run(command, env=node.environment | variables, cwd=node.base, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr[-3000:]
