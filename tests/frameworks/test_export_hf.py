"""Hugging Face directories of what frameworks save: stock from_pretrained reads them, and gives the trainer's values bit for bit."""

import subprocess

import pytest
from conftest import interpreter

SMALL = ["README.md", "config.json", "generation_config.json"]


@pytest.mark.parametrize(
    ("way", "model", "dtype", "shard", "ranks"),
    [("plain", "gpt2", None, "5GB", 1), ("plain", "llama", "bf16", "5KB", 1), ("ddp", "gpt2", "fp16", "5KB", 2), ("fsdp2", "gpt2", "bf16", "5KB", 2), ("fsdp2", "llama", None, "5GB", 2)],
)  # fmt: skip
def test_from_pretrained_gives_the_trainers_values(node, way, model, dtype, shard, ranks):
    options = ["--way", way, "--model", model, "--shard", shard, *(["--dtype", dtype] if dtype else [])]
    end = node.run(interpreter("hf"), "export_job.py", "--persist", node.persist, "--out", node.base / "out", *options, ranks=ranks).end
    assert end["same"] and end["info"] == {}
    files = [one for one in end["files"] if one not in SMALL]
    assert set(SMALL) < set(end["files"])
    assert files == ["model.safetensors"] if shard == "5GB" else "model.safetensors.index.json" in files and len(files) > 3


@pytest.mark.parametrize(
    ("environment", "options", "ranks"),
    [("hf", ["--way", "trainer"], 1), ("lightning", ["--way", "lightning", "--dtype", "bf16"], 1), ("hf-deepspeed", ["--way", "zero", "--stage", 3], 2),
     ("hf", ["--way", "accelerate", "--model", "llama"], 2)],
)  # fmt: skip
def test_an_adapter_exports_the_last_checkpoint_in_the_background(node, environment, options, ranks):
    where = ["--persist", node.persist, "--out", node.base / "out", "--shard", "5KB"]
    end = node.run(interpreter(environment), "export_job.py", *where, *options, "--background", ranks=ranks).end
    assert end["same"] and end["info"] == {}
    assert "model.safetensors.index.json" in end["files"]


@pytest.mark.parametrize(
    ("stage", "more", "dtype"),
    [(0, ["--model", "gpt2"], None), (1, ["--model", "gpt2", "--bf16"], "bf16"), (2, ["--model", "gpt2"], None), (3, ["--model", "gpt2"], None),
     (3, ["--model", "llama", "--bf16"], "bf16"), (2, ["--model", "gpt2", "--universal"], None)],
)  # fmt: skip
def test_from_pretrained_gives_what_deepspeed_trained(node, stage, more, dtype):
    options = ["--way", "zero", "--stage", stage, *more, *(["--dtype", dtype] if dtype else [])]
    end = node.run(interpreter("hf-deepspeed"), "export_job.py", "--persist", node.persist, "--out", node.base / "out", *options, ranks=2).end
    assert end["same"] and end["info"] == {}


REFUSALS = """
import os, sys, torch, transformers
from nebulaml.errors import NebulaConfigError
from nebulaml.export import export_hf
config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
model = transformers.GPT2LMHeadModel(config)
state = {name: value.clone() for name, value in model.state_dict().items()}
def refused(change, words):
    torch.save(change, "model.pt")
    try:
        export_hf("./model.pt", "out/step", config=model)
    except NebulaConfigError as failure:
        assert words in str(failure) and len(str(failure).splitlines()) == 1, failure
    else:
        raise AssertionError(words)
    assert not os.path.exists("out") or os.listdir("out") == [], os.listdir("out")
refused(state | {"lm_head.weight": torch.ones(64, 16)}, "lm_head.weight is tied to transformer.wte.weight in the model, and the checkpoint has other values")
refused({name: value for name, value in state.items() if "ln_f" not in name}, "the checkpoint lacks transformer.ln_f.bias, transformer.ln_f.weight: rename=")
refused(state | {"extra": torch.ones(1)}, "the model has no extra: rename=")
refused(state | {"transformer.wpe.weight": torch.ones(3, 16)}, "transformer.wpe.weight has the shape (3, 16) in the checkpoint, and (32, 16) in the model")
torch.save({name: value for name, value in state.items() if name != "transformer.wte.weight"}, "model.pt")  # under the other of its names
export_hf("./model.pt", "out/step", config=model)
assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained("out/step").lm_head.weight, model.lm_head.weight)
"""


def test_weights_that_are_not_those_of_the_model_are_refused_in_one_sentence(node):
    done = subprocess.run([interpreter("hf"), "-c", REFUSALS], env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
