"""Each recipe of examples/ runs, stops, and resumes where it was."""

import subprocess
import sys

import pytest
from conftest import ENDING, ROOT, interpreter

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
RECIPES = {
    "mnist": (None, []),
    "cifar-deepspeed": ("deepspeed-0.19.8", [*TORCHRUN, "2"]),
    "bert": ("hf", []),
    "bert-lightning": ("lightning", []),
    "fsdp2-dcp": (None, [*TORCHRUN, "2"]),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_resumes(node, name):
    environment, launcher = RECIPES[name]
    python = interpreter(environment) if environment else sys.executable

    def run(steps):
        script = ROOT / "examples" / name / "train.py"
        command = [python, *launcher, ENDING, script, "--steps", steps, "--save-every", 10, "--path", node.persist]
        done = subprocess.run(list(map(str, command)), env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert not [line for line in run(20).splitlines() if line.startswith("resum")]
    again = run(40)
    if name == "bert":
        assert "resuming from checkpoint-20" in again
        assert again.count("'loss'") == 2
    else:
        assert "resumed after step 20" in again
        assert "step 40 loss" in again
        assert "step 20 loss" not in again
