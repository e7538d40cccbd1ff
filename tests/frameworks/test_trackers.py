"""nm.log_to: a killed job computes some steps twice, but TensorBoard, W&B and MLflow have each step once, with the versions."""

import json
import subprocess
import sys

import pytest
from conftest import HERE, Url, interpreter

SIZE_MIN = 4000  # of a checkpoint of 1,000 floats


def read(node, tool, place):
    command = [interpreter("trackers"), HERE / "tracker_read.py", tool, str(place)]
    done = subprocess.run(command, env=node.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def trained(node):
    """Kills the job at step 5 and at step 8, each time two steps after its checkpoint. Then it runs to step 10."""
    node.environment.update(WANDB_MODE="offline", WANDB_SILENT="true")
    node.environment.update(MLFLOW_TRACKING_URI=f"file://{node.base}/mlruns", MLFLOW_ALLOW_FILE_STORE="true")

    def run(tool, **options):
        python = interpreter("trackers")
        for kill_at in (5, 8, -1):
            more = ["--persist", node.persist, "--metrics", node.base / "metrics.jsonl", "--tool", tool]
            more += ["--steps", 10, "--kill-at", kill_at, "--options", json.dumps(options)]
            result = node.run(python, "tracker_job.py", *more, check=kill_at < 0)
        assert result.end

    return run


def check(node, found, tags=("global_step3", "global_step6", "global_step9")):
    steps = range(1, 11)
    assert [step for step, _ in found["losses"]] == list(steps)
    assert [value for _, value in found["losses"]] == pytest.approx([1 / step for step in steps])
    assert {step for step, _ in found["sizes"]} == {3, 6, 9} and all(size > SIZE_MIN for _, size in found["sizes"])
    versions = {version["tag"]: version for version in found["versions"]}
    assert set(versions) == set(tags)
    for tag, version in versions.items():
        step = int(tag.removeprefix("global_step"))
        assert version["state"] == "durable" and version["path"] == f"{node.persist}/{tag}" and version["size_bytes"] > SIZE_MIN
        assert version["step"] == step and version["sequence"] > 0
        assert version["metrics"] == {"loss": pytest.approx(1 / step), "lr": 0.5}
        assert version["resumed_from"] == {3: None, 6: "global_step3", 9: "global_step6"}[step]
    assert found["resumed_from"] == {"tag": "global_step6", "step": 6, "path": f"{node.persist}/global_step6"}


def test_tensorboard_has_each_step_once(node, trained):
    trained("tensorboard", log_dir=str(node.base / "board"))
    check(node, read(node, "tensorboard", node.base / "board"))


def test_wandbs_newest_part_has_each_step_once_and_references_to_versions(node, trained):
    """W&B's own process keeps an offline run in memory for a while, and ends at once with the trainer: so the part of a killed run is empty."""
    trained("wandb", project="p", id="run7", dir=str(node.base), resume="allow")
    found = read(node, "wandb", node.base)
    check(node, found, tags=["global_step9"])
    (version,) = found["versions"]
    if isinstance(node.persist, Url):
        assert version["refs"] == [f"{node.persist}/global_step9"]
    else:
        assert f"file://{node.persist}/global_step9/model.pt" in version["refs"]
        assert all(ref.startswith(f"file://{node.persist}/global_step9/") for ref in version["refs"])
    assert found["uploads"] == 0


def test_mlflow_has_each_step_once_and_no_files(node, trained):
    code = "import mlflow; print(mlflow.MlflowClient().create_run('0').info.run_id)"
    command = [interpreter("trackers"), "-c", code]
    run = subprocess.run(command, env=node.environment, capture_output=True, text=True, check=True).stdout.split()[-1]
    trained("mlflow", run_id=run)
    found = read(node, "mlflow", f"file://{node.base}/mlruns#{run}")
    check(node, found)
    assert found["newest"] == "global_step9" and found["files"] == []


def test_other_tools_are_refused_and_other_ranks_import_none():
    code = """
import os, sys
os.environ.update(RANK="1", WORLD_SIZE="2")
import nebulaml as nm
try:
    nm.log_to("comet")
except nm.NebulaConfigError as error:
    assert "'wandb'" in str(error)
else:
    raise AssertionError("taken")
with nm.log_to("wandb", project="p") as tracker:
    tracker.log(1, loss=0.5)
    tracker.rewind(0)
assert "wandb" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
