"""Hugging Face directories of what frameworks save: stock from_pretrained reads them, and gives the trainer's values bit for bit."""

import pytest
from conftest import interpreter

SMALL = ["config.json", "generation_config.json"]


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
