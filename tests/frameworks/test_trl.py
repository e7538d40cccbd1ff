"""TRL's trainers with nm.attach: killed, resumed, equal to the uninterrupted run without Nebula; and axolotl's plugin."""

import pytest
from conftest import files_below, full, interpreter


def job(node, kind, *more, output="out", environment="trl", **options):
    return node.run(interpreter(environment), "trl_job.py", "--kind", kind, "--output", node.base / output, *more, **options)


@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=full), pytest.param("grpo", marks=full)])
def test_trl_resumes_bit_for_bit_after_sigkill(node, kind):
    whole = job(node, kind, "--way", "stock", output="stock")
    node.environment["NEBULA_STORE_MBPS"] = "0.1"  # the last checkpoint is not durable yet when the job is killed
    job(node, kind, "--kill-at", 4, check=False)
    del node.environment["NEBULA_STORE_MBPS"]
    again = job(node, kind, "--resume")
    assert len(again.losses) == 2 and again.losses == whole.losses_after(4)
    assert again.end["files"] == whole.end["files"]
    for folder in ("checkpoint-4", "checkpoint-6"):
        assert files_below(node.base / "out" / folder) == files_below(node.base / "stock" / folder)


@full
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_trainer_publishes_its_weights_and_a_follower_has_them_with_the_tokenizer(node, kind):
    done = job(node, kind, "--way", "stock", "--publish", node.base / "weights")
    (seen,) = [line for line in done.lines if "published" in line]
    assert seen == {"published": 6, "equal": True, "words": ["one", "two"]}


@full
def test_axolotls_plugin_manager_attaches_and_the_run_resumes_after_sigkill(node):
    whole = job(node, "sft", "--way", "stock", output="stock", environment="axolotl")
    job(node, "sft", "--way", "axolotl", "--kill-at", 4, check=False, environment="axolotl")
    again = job(node, "sft", "--way", "axolotl", "--resume", environment="axolotl")
    assert again.end["class"] == "NebulaTrainerMixin" and again.losses == whole.losses_after(4)
