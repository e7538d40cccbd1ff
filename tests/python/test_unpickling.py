"""A file is loaded as torch.load loads it, the usual ones without torch's reader."""

from __future__ import annotations

import gc
import io
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nebulaml import unpickling
from nebulaml.errors import NebulaError
from same import assert_same
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def state() -> dict[str, Any]:
    shared = torch.arange(12.0)
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    values = {"a": torch.ones(2, 3), "view": shared[2:8:2], "all": shared, "p": parameter, "none": torch.zeros(0), "k": [1, "x", None]}
    return {**values, "conj": torch.ones(2, dtype=torch.complex64).conj(), "grad": torch.ones(2, requires_grad=True), "size": torch.Size([2])}


@pytest.fixture
def saved(nm) -> Callable[[Any], Any]:
    """save(obj, change=None) gives a checkpoint with it as file "x.pt"; ``change(name, content)`` gives records other content."""

    def save(obj: Any, change: Callable[[str, bytes], bytes] | None = None) -> Any:
        checkpoint = nm.Checkpoint("x")
        if change is None:
            checkpoint.save("x.pt", obj)
        else:
            file, made = io.BytesIO(), io.BytesIO()
            torch.save(obj, file)
            with zipfile.ZipFile(file) as source, zipfile.ZipFile(made, "w") as target:
                for entry in source.infolist():
                    target.writestr(entry.filename, change(entry.filename.partition("/")[2], source.read(entry)))
            checkpoint.save_bytes("x.pt", [made.getvalue()])
        checkpoint.commit()
        return checkpoint

    return save


@pytest.fixture
def torchs_reader(monkeypatch) -> list[Any]:
    """The calls to it."""
    calls, load = [], torch.serialization._load

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return load(*arguments, **options)

    monkeypatch.setattr(torch.serialization, "_load", counted)
    return calls


class Own:
    """Something that is not plain."""

    def __init__(self) -> None:
        self.tensor = torch.ones(2)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("map_location", [None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, place: storage], ids=str)
def test_usual_files_are_those_of_torch_load_without_its_reader(saved, torchs_reader, weights_only, map_location):
    found = saved(state()).load("x.pt", map_location, weights_only=weights_only)
    assert not torchs_reader
    assert_same(state(), found)
    assert found["view"].untyped_storage().data_ptr() == found["all"].untyped_storage().data_ptr()
    assert found["conj"].is_conj()


def test_objects_of_the_programs_own_classes_come_without_torchs_reader_too(saved, torchs_reader):
    found = saved([Own(), torch.ones(3).to_sparse(), torch.nn.Linear(2, 2)]).load("x.pt")
    assert (found[0].tensor == 1).all() and (found[1].to_dense() == 1).all() and found[2](torch.ones(2)).shape == (2,)
    assert not torchs_reader


def test_sparse_tensors_are_checked_where_torch_is_told_to(saved, torchs_reader):
    sparse = torch.ones(2).to_sparse()  # data/0: its indices, 0 and 1
    checkpoint = saved(sparse, lambda name, content: content[:8] + b"\xff" + content[9:] if name == "data/0" else content)
    with torch.sparse.check_sparse_tensor_invariants(), pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        checkpoint.load("x.pt")
    assert not torchs_reader


def test_under_a_fake_mode_tensors_are_fake(saved, torchs_reader):
    checkpoint = saved({"w": torch.ones(3)})
    with FakeTensorMode():
        assert isinstance(checkpoint.load("x.pt")["w"], FakeTensor)
    assert len(torchs_reader) == 1


@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=repr)
def test_on_the_meta_device_tensors_have_no_values(saved, torchs_reader, device):
    assert saved({"w": torch.ones(3)}).load("x.pt", device)["w"].is_meta
    assert len(torchs_reader) == 1


def test_where_torch_is_told_to_skip_the_data_it_is_asked(saved, torchs_reader):
    checkpoint = saved({"w": torch.ones(3)})
    with torch.serialization.skip_data():
        assert checkpoint.load("x.pt")["w"].shape == (3,)
    assert len(torchs_reader) == 1


def test_a_file_of_the_other_byte_order_is_turned(saved, torchs_reader):
    def turned(name: str, content: bytes) -> bytes:
        return {"byteorder": b"big", "data/0": content[::-1]}.get(name, content)

    assert torch.equal(saved(torch.tensor([3], dtype=torch.int32), turned).load("x.pt"), torch.tensor([3], dtype=torch.int32))
    assert len(torchs_reader) == 1


@pytest.mark.parametrize("weights_only", [False, True])
def test_what_a_pickle_asks_for_and_is_not_there_is_an_error(saved, weights_only):
    def of_another(name: str, content: bytes) -> bytes:
        return content.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x009") if name == "data.pkl" else content

    checkpoint = saved({"w": torch.ones(3)}, of_another)
    with pytest.raises((RuntimeError, pickle.UnpicklingError)):
        checkpoint.load("x.pt", weights_only=weights_only)


def test_more_bytes_than_a_record_has_are_never_taken_from_it(saved, nm):
    mapped = saved({"w": torch.ones(3)})._map("x.pt")
    records = unpickling._Records(mapped, torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage())
    assert records.storage("0", 12).nbytes() == 12
    for size in (13, -1):
        with pytest.raises(unpickling._Unusual, match="which has 12"):
            records.storage("0", size)


def test_records_are_those_of_the_file_and_other_bytes_have_none(saved, nm):
    checkpoint = saved({"a": torch.ones(3), "b": torch.zeros(5)})
    mapped = checkpoint._map("x.pt")
    with checkpoint.view("x.pt") as data, zipfile.ZipFile(io.BytesIO(data)) as file:
        assert list(mapped.records()) == file.namelist()
        assert all(data[offset : offset + size] == file.read(name) for name, (offset, size) in mapped.records().items())
    other = nm.Checkpoint("other")
    other.save_bytes("b.bin", [b"no zip" * 100])
    other.commit()
    with pytest.raises(NebulaError, match="zip"):
        other._map("b.bin").records()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_cycle_collector_rests_meanwhile_and_is_as_before_then(saved, enabled):
    checkpoint = saved({f"k{i}": torch.zeros(1) for i in range(2000)})
    broken = saved([Own()], lambda name, content: content[:-20] if name == "data.pkl" else content)
    ran: list[str] = []
    gc.callbacks.append(lambda phase, _: ran.append(phase))
    (gc.enable if enabled else gc.disable)()
    try:
        mapped = checkpoint._map("x.pt")
        storage = torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
        ran.clear()
        with unpickling._uncollected():
            kept = [[] for _ in range(5000)]
            assert not ran and not gc.isenabled()
        assert len(kept) == 5000
        assert len(unpickling.read(mapped, None, storage)) == 2000
        assert gc.isenabled() is enabled
        with pytest.raises(Exception):  # noqa: B017 - of any kind
            broken.load("x.pt")
        assert gc.isenabled() is enabled
    finally:
        gc.callbacks.pop()
        gc.enable()
