"""Megatron-Core's dist_checkpointing through Nebula: a save that was not durable is not finalized, and a killed run resumes bit for bit."""

import pytest
from conftest import full, interpreter

ENVIRONMENTS = ["megatron", "megatron-0.16"]


def job(node, environment, run, *more, **options):
    return node.run(interpreter(environment), "megatron_job.py", "--run", node.base / run, *more, ranks=2, **options)


@full
@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("way", ["strategy", "used"])
def test_megatron_finalizes_what_is_durable_and_resumes_bit_for_bit_after_sigkill(node, environment, way):
    whole = job(node, environment, "whole", "--way", way)
    node.environment["NEBULA_STORE_MBPS"] = "0.01"  # step 4 is not durable yet when all ranks are killed
    job(node, environment, "run", "--way", way, "--kill-at", 4, check=False)
    assert (node.base / "run" / "latest_checkpointed_iteration.txt").read_text() == "2"
    del node.environment["NEBULA_STORE_MBPS"]
    again = job(node, environment, "run", "--way", way)
    assert again.resumed == 2 and again.losses == whole.losses_after(2) and len(again.losses) == 4
    assert {".metadata", "__0_0.distcp", "__1_0.distcp", "metadata.json"} <= set(again.end["files"])
