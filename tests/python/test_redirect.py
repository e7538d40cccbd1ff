"""A framework's writers while they save through Nebula: files that Nebula does not take are written by the framework as usual."""

import copyreg
import io
import pickle
import threading
import types

import pytest
import torch
from nebulaml.integrations.redirect import Capture, captured

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def staging(tmp_path):
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


def test_a_pickle_module_of_the_callers_own_is_used(nm, staging):
    class Pickler(pickle.Pickler):
        dispatch_table = {**copyreg.dispatch_table, types.GeneratorType: lambda _: (int, (5,))}

    own = types.ModuleType("own")
    own.Pickler = Pickler
    with captured(Capture("tag", str(staging), -2)):
        torch.save({"generator": (number for number in ())}, staging / "x.pt", pickle_module=own)
    assert torch.load(staging / "x.pt", weights_only=False) == {"generator": 5}


def test_tensors_that_only_safetensors_can_write_are_written_and_others_refused(nm, staging):
    tensors = {"scale": torch.arange(8, dtype=torch.uint8).view(torch.float8_e8m0fnu), "w": torch.ones(3)}
    shared = torch.ones(4)
    with captured(Capture("tag", str(staging), -2)) as capture:
        safetensors.save_file(tensors, staging / "model.safetensors")
        safetensors.save_file({"w": torch.ones(3)}, staging / "ours.safetensors")
        with pytest.raises(RuntimeError, match="share"):
            safetensors.save_file({"a": shared, "b": shared}, staging / "bad.safetensors")
    assert not (staging / "bad.safetensors").exists() and not (staging / "ours.safetensors").exists()
    assert list(capture.checkpoint.files) == ["ours.safetensors"]
    with safetensors.safe_open(staging / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["scale", "w"]
        assert file.get_slice("scale").get_dtype() == "F8_E8M0"


def test_a_file_object_is_written_to(nm, staging):
    buffer = io.BytesIO()
    with captured(Capture("tag", str(staging), -2)):
        torch.save([1], buffer)
    assert torch.load(io.BytesIO(buffer.getvalue())) == [1]


def test_an_exception_gives_the_checkpoint_up(nm, staging):
    capture = Capture("tag", str(staging), -2)

    def save():
        with captured(capture):
            torch.save([1], staging / "x.pt")
            raise KeyError("of the framework")

    with pytest.raises(KeyError):
        save()
    assert capture.checkpoint.state == "failed" and "of the framework" in capture.checkpoint.error


def test_two_threads_capture_at_once_and_the_last_to_end_puts_the_writers_back(nm, tmp_path):
    plain, plain_file = torch.save, safetensors.save_file
    begun, ended = threading.Event(), threading.Event()
    names = {}

    def first():
        with captured(Capture("first", str(tmp_path / "first"), -2)) as capture:
            begun.set()
            torch.save([1], tmp_path / "first" / "x.pt")
            second_has_begun.wait()
            torch.save([1], tmp_path / "second" / "of-the-other.pt")
        names["first"] = list(capture.checkpoint.files)
        ended.set()

    second_has_begun = threading.Event()
    (tmp_path / "second").mkdir()
    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    with captured(Capture("second", str(tmp_path / "second"), -2)) as capture:
        second_has_begun.set()
        ended.wait()
        torch.save([2], tmp_path / "second" / "y.pt")
        safetensors.save_file({"w": torch.ones(3)}, tmp_path / "second" / "z.safetensors")
        with captured(Capture("inner", str(tmp_path / "second" / "inner"), -2)) as inner:
            torch.save([3], tmp_path / "second" / "inner" / "i.pt")
            torch.save([4], tmp_path / "second" / "o.pt")
    thread.join()
    assert names["first"] == ["x.pt"] and (tmp_path / "second" / "of-the-other.pt").exists()
    assert sorted(capture.checkpoint.files) == ["o.pt", "y.pt", "z.safetensors"] and list(inner.checkpoint.files) == ["i.pt"]
    assert torch.save is plain and safetensors.save_file is plain_file
