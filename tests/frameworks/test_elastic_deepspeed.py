"""ZeRO's state, divided among one number of ranks, is loaded by another number, without a command between."""

import os

import pytest
from conftest import full, interpreter


def job(node, env, persist, stage, ranks, *more, **options):
    arguments = ["--persist", node.base / persist, "--save-dir", node.base / f"{persist}-save", "--stage", stage]
    return node.run(interpreter(env), "elastic_deepspeed_job.py", *arguments, *more, ranks=ranks, **options)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("env", "more"),
    [
        ("deepspeed-0.19.8", []),
        pytest.param("deepspeed-0.19.8", ["--bf16"], marks=full),
        pytest.param("deepspeed-0.19.8", ["--way", "import"], marks=full),
        pytest.param("deepspeed-0.19.6", [], marks=full),
    ],
)
def test_two_one_three_and_two_ranks_of_zero_train_as_one_though_killed(node, env, more, stage):
    node.environment["TMPDIR"] = str(node.base / "tmp")
    os.mkdir(node.base / "tmp")
    whole = job(node, env, "whole", stage, 1, "--steps", 16, *more)
    found = {}
    for ranks, begin, end in [(2, 0, 4), (1, 4, 8), (3, 8, 12), (2, 12, 16)]:
        kill = [] if end == 16 else ["--kill-at", end]
        part = job(node, env, "elastic", stage, ranks, "--steps", 16, *kill, *more, check=not kill)
        assert part.resumed == begin
        found.update(part.losses)
    assert list(found) == list(range(1, 17))
    rel = 0.1 if "--bf16" in more else 1e-4
    for step, loss in found.items():
        assert loss == pytest.approx(whole.losses[step], rel=rel), (step, found, whole.losses)
    rates = {line["step"]: line["lr"] for line in part.lines if "lr" in line}
    assert rates == {line["step"]: line["lr"] for line in whole.lines if line.get("step", 0) > 12}
    assert not [path for path in (node.base / "tmp").iterdir() if path.name.startswith("nebula-universal")]


@pytest.mark.parametrize("which", ["module", pytest.param("optimizer", marks=full)])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=full)])
def test_another_number_of_ranks_that_asks_for_the_weights_alone_gets_a_fresh_optimizer_and_converts_nothing(node, stage, which):
    saved = job(node, "deepspeed-0.19.8", "run", stage, 2, "--steps", 3)
    (found,) = [line for line in job(node, "deepspeed-0.19.8", "run", stage, 1, "--steps", 3, "--only-weights", which).lines if "fresh" in line]
    assert found == {"fresh": True, "sums": saved.end["sums"]}
    assert "universal layout" not in node.logs()
