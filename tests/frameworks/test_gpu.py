"""A real CUDA GPU, with the frameworks of the Python that runs pytest: a save during training has the values of its call, bit for bit.

NEBULA_TEST_DEVICE=cpu runs the same jobs without a GPU.
"""

import importlib.util
import os
import warnings

import pytest
import torch
from conftest import files_below

DEVICE = os.environ.get("NEBULA_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")


def needs(*packages):
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package} in the environment of this Python")


@pytest.fixture
def job(node, this_python):
    """Runs a job to its end, then resumes from its step 4 in another process and compares. Returns the output of the first process."""
    node.environment["DS_ACCELERATOR"] = DEVICE
    node.environment["DS_SKIP_CUDA_CHECK"] = "1"  # of nvcc's version with torch's: nothing is compiled
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        node.environment.setdefault(name, "lo")  # all there is where nothing outside can be reached

    def run(what, *more):
        command = ("cuda_job.py", what, node.base, "--device", DEVICE, *more)
        whole = node.run(this_python, *command, timeout=120)
        again = node.run(this_python, *command, "--resume", timeout=120)
        print(whole.end, again.end, sep="\n")
        assert again.losses == whole.losses_after(4) and set(again.losses) == {5, 6}
        assert again.end["weights"] == whole.end["weights"]
        return whole

    return run


def overlapped(end):
    """Checks that a save returned while its large tensors were still being copied."""
    if DEVICE == "cpu":
        return
    assert end["copies"], "nothing large came from the device"
    if not all(end["registered"]):
        warnings.warn(f"shared memory could not be registered with the device: {end['registered']}", stacklevel=1)
        return
    assert any(end["overlapped"]), "no save returned before its copies had ended"


def as_stock(node, whole, folders):
    """Checks that the same training without Nebula has the same results and files."""
    assert whole.end["stock"] == whole.end["weights"]
    assert whole.end["stock_losses"] == {str(step): loss for step, loss in whole.losses.items()}
    for folder in folders:
        ours, stock = (node.base / place / folder for place in ("out", "stock"))
        assert files_below(ours) == files_below(stock)
        assert (ours / "model.safetensors").read_bytes() == (stock / "model.safetensors").read_bytes()


@pytest.mark.parametrize("way", ["attach", "section"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(job, stage, way):
    needs("deepspeed")
    end = job("deepspeed", "--stage", stage, "--way", way).end
    assert end["engine"] == "NebulaDeepSpeedEngine" and end["latest"] == "global_step6"
    assert end["compared"] >= (2 if stage == 0 else 4)  # files of the two versions that stay
    overlapped(end)


def test_transformers_trainer(job, node):
    needs("transformers", "accelerate")
    whole = job("hf")
    assert whole.end["compared"] >= 8  # weights, optimizer, scheduler, generators
    as_stock(node, whole, ["checkpoint-2", "checkpoint-4", "checkpoint-6"])
    overlapped(whole.end)


@pytest.mark.parametrize("way", ["auto", "ddp"])
def test_lightning(job, way):
    needs("lightning")
    end = job("lightning", "--way", way).end
    assert end["compared"] == 3 and end["files"] == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert DEVICE == "cpu" or end["copies"]


@pytest.mark.parametrize("way", ["save", "async", "nebula-async"])
def test_fsdp2_through_torch_distributed_checkpoint(job, way):
    end = job("dcp", "--way", way).end
    assert end["compared"] >= 4  # a file of tensors, and the metadata
    assert DEVICE == "cpu" or way == "async" or end["copies"]  # torch's own is staged on the host


def test_ddp(job):
    end = job("ddp").end
    assert end["compared"] >= 2
    overlapped(end)


@pytest.mark.parametrize("way", ["plain", "ddp", "fp16"])
def test_accelerate(job, node, way):
    needs("accelerate")
    whole = job("accelerate", "--way", way)
    assert whole.end["compared"] >= 8
    as_stock(node, whole, ["step_2", "step_4"])
    overlapped(whole.end)
