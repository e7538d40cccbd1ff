"""accelerate through nebulaml.attach(accelerator): save_state and load_state, the files of the stock, whole and durable."""

import os
import time

import pytest
from conftest import full, interpreter

ENV = "hf"


@pytest.fixture(autouse=True, params=["hf", pytest.param("hf-oldest", marks=full)])
def environment(request):
    global ENV
    ENV = request.param


def job(node, *more, directory="run", **options):
    return node.run(interpreter(ENV), "accelerate_job.py", "--output", node.base / directory, *more, **options)


def stock(node, *more, **options):
    return job(node, "--way", "stock", *more, directory="stock", **options)


def appears(path, seconds=30):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


def names_below(directory):
    return sorted(path.name for path in directory.rglob("*") if path.is_file() and path.name != ".nebula.json")


def after(result, step):
    return {at: loss for at, loss in result.losses.items() if at > step}


@pytest.mark.parametrize("ranks", [1, 2])
def test_load_state_after_sigkill_equals_uninterrupted_training(node, ranks):
    whole = stock(node, ranks=ranks)
    job(node, "--kill-at", 5, ranks=ranks, check=False)
    appears(node.base / "run" / "step_4")
    assert names_below(node.base / "run" / "step_4") == names_below(node.base / "stock" / "step_4")
    again = job(node, "--resume", node.base / "run" / "step_4", ranks=ranks)
    assert again.resumed == 4
    assert again.losses == after(whole, 4)
    assert again.end["weights"] == whole.end["weights"]


def test_stock_loads_it_and_the_other_way(node):
    whole = stock(node)
    job(node)
    assert stock(node, "--resume", node.base / "run" / "step_4").losses == after(whole, 4)
    assert job(node, "--resume", node.base / "stock" / "step_4").losses == after(whole, 4)


def test_directories_that_accelerate_numbers_and_limits(node):
    whole = stock(node, "--automatic")
    job(node, "--automatic", "--kill-at", 5, check=False)
    newest = node.base / "run" / "checkpoints" / "checkpoint_1"
    appears(newest)
    again = job(node, "--automatic", "--resume", newest)
    assert again.losses == after(whole, 4)
    appears(node.base / "run" / "checkpoints" / "checkpoint_3")
    left = [sorted(name for name in os.listdir(node.base / way / "checkpoints") if name.startswith("checkpoint")) for way in ("run", "stock")]
    assert left == [["checkpoint_2", "checkpoint_3"]] * 2
