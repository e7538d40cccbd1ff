"""`nebula list --stats, --find, --best`: what the versions take, where a tensor is, and which version is the best."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from nebulaml._session import locate

SAVE = """
    nm.init(sys.argv[1], 0, 2, on_error="raise")
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3), (4, None)):
        checkpoint = nm.Checkpoint(f"global_step{step}", metrics=None if loss is None else {"val_loss": loss, "<b>acc": 1 - loss})
        checkpoint.save("model.pt", {"layer.0.attn.weight": torch.full((3, 4), float(step)), "head": torch.ones(2)})
        if step > 2:
            for rank in range(12):
                checkpoint.save(f"rng{rank}.pt", {"state": torch.ones(5)})
        assert checkpoint.commit()
        checkpoint.wait("durable")
"""


def nebula(*words, code=0):
    done = subprocess.run([os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), *map(str, words)], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout) if "--json" in words else done.stdout


@pytest.fixture
def stored(place):
    place.run(SAVE, place.storage)
    return place.storage


def test_what_versions_take_is_counted_by_job_item_and_month_and_rules_say_what_they_would_free(stored):
    told = nebula("list", "--stats", "--path", stored, "--json")
    versions = nebula("list", "--path", stored, "--json")["versions"]
    assert told["version_count"] == 4 and told["bytes"] == sum(one["size"] for one in versions) and told["written"] == sum(one["written"] for one in versions)
    assert [(one["job"], one["version_count"], one["bytes"]) for one in told["jobs"]] == [("", 4, told["bytes"])]
    assert {one["name"]: one["file_count"] for one in told["items"]} == {"model.pt": 4, "rng*.pt": 24, "nebula-metadata.json": 3}
    assert sum(one["bytes"] for one in told["items"]) == told["bytes"] == sum(one["bytes"] for one in told["months"])
    for rule in told["rules"]:
        plan = nebula("prune", *rule["rule"].split(), "--path", stored, "--json")
        assert (rule["removed_count"], rule["bytes"]) == (len(plan["removed"]), plan["bytes"]), rule
    assert "rng*.pt" in nebula("list", "--stats", "--path", stored)


def test_a_name_finds_files_and_tensors_of_all_versions(stored):
    found = nebula("list", "--find", "*.attn.*", "--path", stored, "--json")["matches"]
    assert [(one["tag"], one["file"], one["tensor"], one["dtype"], one["shape"]) for one in found] == [
        (f"global_step{step}", "model.pt", "layer.0.attn.weight", "float32", [3, 4]) for step in (1, 2, 3, 4)
    ]
    found = nebula("list", "--find", "rng11", "--path", stored, "--json")["matches"]
    assert [(one["step"], one["file"]) for one in found] == [(3, "rng11.pt"), (4, "rng11.pt")]
    assert "layer.0.attn.weight" in nebula("list", "--find", "attn", "--path", stored)
    assert nebula("list", "--find", "nothing", "--path", stored, "--json", code=3)["matches"] == []


def test_the_best_comes_first_and_versions_without_the_metric_last(stored):
    def steps(*words):
        return [one["step"] for one in nebula("list", *words, "--path", stored, "--json")["versions"]]

    assert steps("--best", "val_loss") == [2, 3, 1, 4] == steps("--best", "<b>acc:max")
    assert nebula("list", "--best", "val_loss", "--path", stored, "--json")["newest"] == "global_step4"
    assert steps("--best", "other") == steps() == [1, 2, 3, 4]
    for words in (("--best", "x:other"), ("--stats", "--jobs"), ("--find", "")):
        nebula("list", *words, "--path", stored, code=2)
