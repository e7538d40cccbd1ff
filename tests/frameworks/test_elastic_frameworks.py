"""Frameworks with DDP, killed with one number of ranks and resumed with another: the results are those of the framework without Nebula."""

import pytest
from conftest import full, interpreter
from waiting import until

FRAMEWORKS = {
    "hf": ("hf", "hf_job.py", "--output", "checkpoint-4", lambda path: ["--resume"]),
    "accelerate": ("hf", "accelerate_job.py", "--output", "step_4", lambda path: ["--resume", path]),
    "lightning": ("lightning", "lightning_job.py", "--dirpath", "step=4.ckpt", lambda path: ["--ckpt", path]),
}


@full
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_another_number_of_ranks_resumes_as_with_stock_after_sigkill(node, framework, before, after):
    environment, script, option, name, resume = FRAMEWORKS[framework]
    found = {}
    for way in ("stock", "ours"):
        folder = node.base / way
        more = [option, folder, *(["--way", "stock"] if way == "stock" else ["--persist", node.persist] if framework == "lightning" else [])]
        node.run(interpreter(environment), script, *more, "--kill-at", 5, ranks=before, check=False)
        if framework == "hf":  # transformers looks for a directory before it asks anybody
            until(lambda folder=folder: (folder / name).exists())
        found[way] = node.run(interpreter(environment), script, *more, *resume(folder / name), ranks=after)
    assert list(found["ours"].losses) == [5, 6, 7, 8]
    assert found["ours"].losses == found["stock"].losses
    assert found["ours"].end["weights"] == found["stock"].end["weights"]
