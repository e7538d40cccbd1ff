"""Safetensors files in the background: their content, the process that makes them, and the effect of a failure."""

import os
import signal

import pytest
import torch
from nebulaml.integrations import export
from processes import stop
from waiting import until

safetensors = pytest.importorskip("safetensors.torch")


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.light = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.turned = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("empty", torch.empty(0, 3))


def header(path):
    with safetensors.safe_open(path, "pt") as file:
        return file.metadata()


@pytest.mark.nightly("test_the_file_appears_although_the_trainer_is_killed", "python/test_export_hf.py::test_a_directory_has_the_names_of_the_model_and_each_tied_tensor_once")
def test_the_file_is_what_save_model_writes_and_load_model_reads(nm, tmp_path):
    model = Tied()
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("state.pt", {"step": 1, "model": model.state_dict()})
        checkpoint.save("rng.pt", nm.rng_state())
        assert nm.export_safetensors(checkpoint, tmp_path / "new" / "mine.safetensors", "state.pt")  # asked for before the commit
    assert nm.wait_for_exports(120)
    safetensors.save_model(model, str(tmp_path / "theirs.safetensors"), {"format": "pt"})
    mine, theirs = safetensors.load_file(tmp_path / "new" / "mine.safetensors"), safetensors.load_file(tmp_path / "theirs.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in theirs)
    assert header(tmp_path / "new" / "mine.safetensors") == header(tmp_path / "theirs.safetensors")
    other = Tied()
    safetensors.load_model(other, str(tmp_path / "new" / "mine.safetensors"))
    assert torch.equal(other.head.weight, model.embedding.weight)
    assert os.listdir(tmp_path / "new") == ["mine.safetensors"]


@pytest.mark.nightly
def test_every_version_that_asks_gets_its_own_values_and_the_call_returns_at_once(nm, tmp_path):
    weights = torch.zeros(1000)
    for step in range(1, 4):
        weights.fill_(step)
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("model.pt", {"w": weights})
        assert nm.export_safetensors(checkpoint, tmp_path / f"{step}.safetensors")
        if step == 1:
            process = export._process
            stop(process.pid)  # who waited for it would now wait for ever
    process.send_signal(signal.SIGCONT)
    while os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0):
        assert process.poll() is None, "ended without lowering its priority"
    assert nm.wait_for_exports(120)
    for step in range(1, 4):
        assert (safetensors.load_file(tmp_path / f"{step}.safetensors")["w"] == step).all()


def test_the_file_appears_although_the_trainer_is_killed(place, tmp_path):
    trainer = place.trainer(
        """
        nm.init(sys.argv[1], 0)
        with nm.Checkpoint("global_step1") as checkpoint:
            checkpoint.save("model.pt", {"w": torch.arange(5.0)})
        nm.export_safetensors(checkpoint, sys.argv[2])
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        place.storage, tmp_path / "x.safetensors",
    )  # fmt: skip
    assert trainer.wait(60) == -signal.SIGKILL
    until((tmp_path / "x.safetensors").exists, 120)
    assert torch.equal(safetensors.load_file(tmp_path / "x.safetensors")["w"], torch.arange(5.0))


@pytest.mark.nightly
def test_a_wait_that_timed_out_can_be_waited_for_again(nm, tmp_path):
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", {"w": torch.arange(5.0)})
    assert nm.export_safetensors(checkpoint, tmp_path / "x.safetensors")
    process = export._process
    stop(process.pid)
    assert not nm.wait_for_exports(0.1)
    assert not nm.wait_for_exports(0.1)
    process.send_signal(signal.SIGCONT)
    assert nm.wait_for_exports(120)
    assert (tmp_path / "x.safetensors").exists()


@pytest.mark.nightly
def test_a_forked_worker_does_not_hold_the_exports_up(place, tmp_path):
    output = place.run(
        """
        nm.init(sys.argv[1], 0)
        with nm.Checkpoint("global_step1") as checkpoint:
            checkpoint.save("model.pt", {"w": torch.arange(5.0)})
        nm.export_safetensors(checkpoint, sys.argv[2])
        worker = os.fork()
        if not worker:
            signal.pause()
        say(nm.wait_for_exports(30))
        os.kill(worker, signal.SIGKILL)
        """,
        place.storage, tmp_path / "x.safetensors",
    )  # fmt: skip
    assert output == "True\n"


@pytest.mark.nightly("test_the_file_appears_although_the_trainer_is_killed")
def test_a_failed_export_is_reported_and_the_next_one_succeeds(nm, tmp_path, capfd):
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", {"optimizer": {"state": {}, "lr": 1.0}})
    assert nm.export_safetensors(checkpoint, tmp_path / "bad.safetensors")
    with nm.Checkpoint("global_step2") as checkpoint:
        checkpoint.save("model.pt", {"ema": {"w": torch.ones(2)}, "raw": {"w": torch.zeros(2)}})
    assert nm.export_safetensors(checkpoint, tmp_path / "good.safetensors", key="ema")
    assert not nm.wait_for_exports(120)
    assert "global_step1 is not exported" in capfd.readouterr().err
    assert (safetensors.load_file(tmp_path / "good.safetensors")["w"] == 1).all()
    assert os.listdir(tmp_path) == ["good.safetensors"]


@pytest.mark.nightly
def test_views_of_one_storage_that_none_covers_are_kept_apart(nm, tmp_path):
    storage = torch.arange(10.0)
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", {"a": storage[:6], "b": storage[4:], "c": storage[:0]})
    assert nm.export_safetensors(checkpoint, tmp_path / "x.safetensors") and nm.wait_for_exports(120)
    found = safetensors.load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["a"], storage[:6]) and torch.equal(found["b"], storage[4:]) and found["c"].numel() == 0
    assert header(tmp_path / "x.safetensors") == {"format": "pt"}


@pytest.mark.nightly("python/test_export_hf.py::test_a_file_with_classes_of_the_program_is_exported_and_none_of_its_code_runs")
def test_a_file_with_classes_of_the_program_is_exported_and_none_of_its_code_runs(place, tmp_path):
    place.run(
        """
        import collections
        class Config(dict):
            def __setstate__(self, state):
                open(sys.argv[2] + ".ran", "w")
        class Args:
            def __reduce__(self):
                return (os.system, ("touch " + sys.argv[2] + ".ran",))
        nm.init(sys.argv[1], 0)
        with nm.Checkpoint("global_step1", metrics={"loss": 1.0}) as checkpoint:
            config = Config(a=1)
            config.x = 2
            checkpoint.save("model.pt", {"model": {"w": torch.arange(5.0)}, "config": config, "args": Args(), "d": collections.deque([1, 2]), "s": {Args}})
        assert nm.export_safetensors(checkpoint, sys.argv[2]) and nm.wait_for_exports(120)
        """,
        place.storage,
        tmp_path / "x.safetensors",
    )
    assert torch.equal(safetensors.load_file(tmp_path / "x.safetensors")["w"], torch.arange(5.0))
    assert not (tmp_path / "x.safetensors.ran").exists()
