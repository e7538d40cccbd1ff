"""Each framework with an object store as its storage: killed, robbed of its memory where storage alone must do, and resumed.

NEBULA_TEST_STORAGE lets the other tests of this folder run on an object store (conftest.py).
"""

import shutil
import sys

import pytest
from conftest import files_below, full, interpreter
from waiting import until


@pytest.fixture(autouse=True, params=["gs", *(pytest.param(name, marks=full) for name in ("s3", "azure", "adls"))])
def store(request, node, servers):
    node.use(servers, request.param)


def deepspeed(node, env, way, *more, **options):
    return node.run(
        interpreter(env), "deepspeed_job.py", "--way", way, "--stage", 2, "--persist", node.persist, "--save-dir", node.base / "save", *more,
        ranks=2, **options,
    )  # fmt: skip


@full
@pytest.mark.parametrize("way", ["import", "attach"])
def test_deepspeed_resumes_after_sigkill_from_the_url_of_an_object_store(node, way):
    killed = deepspeed(node, "deepspeed-0.19.8", way, "--kill-at", 5, check=False)
    node.wait_durable("global_step4")
    node.forget_memory()
    shutil.rmtree(node.base / "save")
    again = deepspeed(node, "deepspeed-0.19.8", way, "--resume", "--load-dir", node.persist)
    assert again.resumed == 4 and again.losses[5] == killed.losses[5] and sorted(again.losses) == [5, 6, 7, 8]
    assert next(line["path"] for line in again.lines if "path" in line).startswith(f"{node.persist}/global_step4/")
    assert not list(node.base.glob("*:"))  # no directory is named after the URL


@full
def test_stock_deepspeed_resumes_after_sigkill_with_an_object_store(node):
    killed = deepspeed(node, "deepspeed-0.19.6", "stock", "--kill-at", 5, check=False)
    node.wait_durable("global_step4")
    node.forget_memory()
    again = deepspeed(node, "deepspeed-0.19.6", "stock", "--resume")
    assert again.resumed == 4 and again.losses[5] == killed.losses[5] and sorted(again.losses) == [5, 6, 7, 8]


@full
def test_fsdp2_resumes_after_sigkill_from_an_object_store(node):
    def job(*more, **options):
        return node.run(sys.executable, "dcp_job.py", "--path", node.persist, *more, ranks=2, **options)

    killed = job("--kill-at", 4, check=False)
    node.wait_durable("step3")
    node.forget_memory()
    again = job("--load", 3)
    assert again.losses[4] == killed.losses[4] and sorted(again.losses) == [4, 5, 6]


@pytest.mark.parametrize("lost", [(1,), pytest.param((0, 1), marks=full)])
def test_two_nodes_resume_from_an_object_store_though_nodes_are_replaced(node, lost):
    def job(*more, **options):
        return node.run(sys.executable, "dcp_job.py", "--path", node.persist, *more, ranks=2, nodes=True, **options)

    killed = job("--kill-at", 4, check=False)
    node.wait_durable("step3")
    for rank in lost:
        node.forget_memory(rank)
    again = job("--load", 3)
    assert again.losses[4] == killed.losses[4] and sorted(again.losses) == [4, 5, 6]


@full
def test_trainer_resumes_after_sigkill_with_an_object_store(node):
    def job(*more, **options):
        return node.run(interpreter("hf"), "hf_job.py", "--output", node.base / "run", "--persist", node.persist, *more, **options)

    killed = job("--kill-at", 5, check=False)
    until(lambda: (node.base / "run" / "checkpoint-4").exists())
    until(lambda: any(tag.endswith("/checkpoint-4") for tag in node.stored()))
    again = job("--resume")
    assert again.losses[5] == killed.losses[5] and sorted(again.losses) == [5, 6, 7, 8]
    assert again.end["weights"] == again.end["loaded"]


@full
def test_the_trainers_directory_is_stocks_with_an_object_store_and_stock_resumes_from_it(node):
    def job(directory, *more, **options):
        return node.run(interpreter("hf"), "hf_job.py", "--output", node.base / directory, *more, **options)

    whole = job("stock", "--way", "stock")
    job("run", "--persist", node.persist, "--kill-at", 5, check=False)
    newest = node.base / "run" / "checkpoint-4"
    until(newest.exists)
    assert files_below(newest) == files_below(node.base / "stock" / "checkpoint-4")
    assert (newest / "model.safetensors").read_bytes() == (node.base / "stock" / "checkpoint-4" / "model.safetensors").read_bytes()
    assert job("run", "--way", "stock", "--resume").losses == whole.losses_after(4)


@full
def test_accelerate_resumes_after_sigkill_with_an_object_store(node):
    def job(*more, **options):
        return node.run(interpreter("hf"), "accelerate_job.py", "--output", node.base / "run", "--persist", node.persist, *more, ranks=2, **options)

    killed = job("--kill-at", 5, check=False)
    newest = node.base / "run" / "step_4"
    until(newest.exists)
    node.forget_memory()
    again = job("--resume", newest)
    assert again.losses[5] == killed.losses[5] and sorted(again.losses) == [5, 6, 7, 8]


@full
def test_lightning_resumes_after_sigkill_with_an_object_store(node):
    def job(*more, **options):
        return node.run(interpreter("lightning"), "lightning_job.py", "--dirpath", node.base / "ckpts", "--persist", node.persist, *more, **options)

    killed = job("--kill-at", 6, check=False)
    until(lambda: (node.base / "ckpts" / "step=4.ckpt").exists())
    again = job("--ckpt", node.base / "ckpts" / "step=4.ckpt")
    assert again.losses[5] == killed.losses[5] and sorted(again.losses) == [5, 6, 7, 8]
    assert again.end["files"] == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt", "step=8.ckpt"]
