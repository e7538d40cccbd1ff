"""A file is loaded as torch.load loads it, the usual ones without torch's reader."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import io
import os
import pickle
import resource
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from nebulaml import _nebula
from nebulaml.errors import NebulaError
from nebulaml.tensors import loading, unpickling, values
from same import assert_same
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def state() -> dict[str, Any]:
    shared = torch.arange(12.0)
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    values = {"a": torch.ones(2, 3), "view": shared[2:8:2], "all": shared, "p": parameter, "none": torch.zeros(0), "k": [1, "x", None]}
    return {**values, "conj": torch.ones(2, dtype=torch.complex64).conj(), "grad": torch.ones(2, requires_grad=True), "size": torch.Size([2])}


@pytest.fixture
def saved(nm) -> Callable[[Any], Any]:
    """Returns a function save(obj, change=None), which returns a checkpoint with the object as file "x.pt". ``change(name, content)`` changes records."""

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
    """Records the calls to torch's readers; an archive of TorchScript has one of its own."""
    calls: list[Any] = []

    def counted(load: Any) -> Any:
        return lambda *arguments, **options: calls.append(arguments) or load(*arguments, **options)

    for module, name in ((torch.serialization, "_load"), (torch.jit, "load")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return calls


class Own:
    """A class of the program, so not plain."""

    def __init__(self) -> None:
        self.tensor = torch.ones(2)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("map_location", [None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, place: storage], ids=lambda place: getattr(place, "__name__", str(place)))
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


@pytest.mark.skipif(not hasattr(torch.serialization, "skip_data"), reason="torch 2.4 cannot be told to skip the data")
def test_torch_itself_loads_if_it_is_set_to_skip_the_data(saved, torchs_reader):
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
def test_a_missing_record_that_a_pickle_names_is_an_error(saved, weights_only):
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
        with pytest.raises(pickle.UnpicklingError, match="which has 12"):
            records.storage("0", size)


def test_records_are_those_of_the_file_and_other_bytes_have_none(saved, nm):
    checkpoint = saved({"a": torch.ones(3), "b": torch.zeros(5)})
    checkpoint.wait("durable", timeout=60)  # then zipfile finds each CRC-32, too
    mapped = checkpoint._map("x.pt")
    with checkpoint.view("x.pt") as data, zipfile.ZipFile(io.BytesIO(data)) as file:
        assert list(mapped.records()) == file.namelist()
        assert all(data[offset : offset + size] == file.read(name) for name, (offset, size) in mapped.records().items())
    other = nm.Checkpoint("other")
    other.save_bytes("b.bin", [b"no zip" * 100])
    other.commit()
    with pytest.raises(NebulaError, match="zip"):
        other._map("b.bin").records()


def test_readers_that_do_not_agree_on_a_file_are_not_added_to(saved, nm, torchs_reader):
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    with zipfile.ZipFile(file) as source:
        records = [(entry.filename, source.read(entry)) for entry in source.infolist()]
    pickled = next(content for name, content in records if name.endswith("data.pkl"))
    for changed in (
        [*records, ("archive/data.pkl", pickled)],
        [*records, ("other/data.pkl", pickled)],
        [*records, ("archive/constants.pkl", b"")],
        [record for record in records if not record[0].endswith("/version")],
    ):
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as target, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, content in changed:
                target.writestr(name, content)
        checkpoint = nm.Checkpoint("changed")
        checkpoint.save_bytes("x.pt", [made.getvalue()])
        checkpoint.commit()
        torchs_reader.clear()
        with contextlib.suppress(Exception):
            checkpoint.load("x.pt")
        assert len(torchs_reader) == 1 or changed[-1][0] != "archive/constants.pkl"
        assert not unpickling_alone(checkpoint)


def unpickling_alone(checkpoint: Any) -> bool:
    mapped = checkpoint._map("x.pt")
    try:
        unpickling._Records(mapped, torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage())
    except unpickling._Unusual:
        return False
    return True


@pytest.fixture
def packages() -> Iterator[Callable[..., None]]:
    """Returns register(priority, restore), which adds a package to those that torch asks for the device of a storage."""
    before = list(torch.serialization._package_registry)
    yield lambda priority, restore: torch.serialization.register_package(priority, lambda _: None, restore)
    torch.serialization._package_registry[:] = before


@pytest.mark.parametrize("weights_only", [False, True])
def test_packages_that_are_registered_are_asked(saved, packages, weights_only):
    checkpoint = saved({"w": torch.ones(3)})
    packages(21.5, lambda storage, place: storage if place.startswith("mine") else None)
    assert (checkpoint.load("x.pt", "mine:0", weights_only=weights_only)["w"] == 1).all()
    packages(1, lambda storage, place: storage.clone() if place == "cpu" else None)
    assert checkpoint.load("x.pt", weights_only=weights_only)["w"].untyped_storage().resizable()


def test_tensors_of_one_empty_storage_keep_their_dtypes(saved):
    empty = torch.zeros(0)
    other = torch.empty(0, dtype=torch.int32).set_(empty.untyped_storage(), 0, (0,), (1,))
    found = saved([empty, other]).load("x.pt", {"cpu": "meta"})
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.int32]


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        [torch.zeros(0, 3), torch.zeros(0, 3).view(torch.int32)],
        (lambda empty: [empty, empty.view(torch.int32), empty.untyped_storage()])(torch.zeros(0)),
        (lambda empty: [empty.untyped_storage(), empty])(torch.zeros(0, dtype=torch.bool)),
    ],
)
def test_empty_tensors_have_the_dtypes_that_torch_gives_them(saved, value, weights_only):
    file = io.BytesIO()
    torch.save(value, file)
    expected = torch.load(io.BytesIO(file.getvalue()), weights_only=weights_only)
    found = saved(value).load("x.pt", weights_only=weights_only)
    assert [(type(one), one.dtype, one.device) for one in found] == [(type(one), one.dtype, one.device) for one in expected]


def test_a_reference_to_torchs_function_stays_one(saved):
    found = saved(functools.partial(torch._utils._rebuild_tensor_v2)).load("x.pt")
    assert found.func is torch._utils._rebuild_tensor_v2


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_reference_to_torchs_function_beside_tensors_stays_one(saved, weights_only):
    value = {"w": torch.ones(2), "f": torch._utils._rebuild_tensor_v2, "v": torch.zeros(3)}
    found = saved(value).load("x.pt", weights_only=weights_only)
    assert found["f"] is torch._utils._rebuild_tensor_v2 and torch.equal(found["w"], value["w"]) and torch.equal(found["v"], value["v"])


@pytest.mark.parametrize("last", [Own(), numpy.float64(2.5), torch._utils._rebuild_tensor_v2])
def test_tensors_that_share_memory_before_a_value_of_another_kind_still_share_it(saved, last):
    shared = torch.arange(2000.0)
    found = saved({"all": shared, "view": shared[7:], "last": last}).load("x.pt")
    found["all"][8] = -1
    assert found["view"][1] == -1 and found["view"][0] == 7 and type(found["last"]) is type(last)


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_function_that_a_program_has_put_in_torchs_place_is_called(saved, monkeypatch, weights_only):
    rebuild = torch._utils._rebuild_tensor_v2
    checkpoint = saved(torch.ones(2))
    monkeypatch.setattr(torch._utils, "_rebuild_tensor_v2", lambda *arguments: rebuild(*arguments) + 1)
    assert (checkpoint.load("x.pt", weights_only=weights_only) == 2).all()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_all_kinds_of_values_are_modest(protocol):
    values = [1, 300, 70000, -1, 1 << 70, 1 << 3000, 1.5, "x", "x" * 300, "ü", b"b", b"b" * 300, bytearray(b"a"), None, True, False, (), (1,), (1, 2)]
    values += [(1, 2, 3), (1, 2, 3, 4), {1, 2}, frozenset([1]), {"a": [1, 2]}, OrderedDict(a=1), functools.partial(print, 1), list(range(2000))]
    content = pickle.dumps([values, values, [str(i) for i in range(500)]], protocol)
    assert _nebula.pickle_is_modest(content)
    assert not _nebula.pickle_is_modest(content[:-1])


def test_a_few_bytes_that_are_not_trusted_take_no_memory(saved):
    content = b"\x80\x02Nr" + struct.pack("<I", 0x0FFFFFFF) + b"."
    checkpoint = saved(1, lambda name, old: content if name == "data.pkl" else old)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert checkpoint.load("x.pt", weights_only=True) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB


def test_no_pickle_changes_a_function_that_it_may_call():
    rebuild = unpickling._Rebuild(print)
    with pytest.raises(pickle.UnpicklingError):
        rebuild.__setstate__((None, {"_function": exec}))


SHAPES = [(), (1,), (7,), (1, 5), (5, 1), (3, 4), (2, 3, 4, 5), (40, 50), (1, 1, 3000)]


def layouts(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors below and above the size up to which a storage gets memory of its own."""
    made = [torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape) for shape in SHAPES]
    made += [tensor.t() for tensor in made if tensor.dim() == 2]
    made += [made[5][1:], made[5][:, :2], torch.ones(1, dtype=dtype).expand(4), torch.empty_strided((1, 3), (7, 1)).fill_(2).to(dtype)]
    return [*made, torch.ones(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last), torch.ones(0, 3, dtype=dtype)]


def described(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, storage.nbytes(), tensor._is_view(), tensor.is_leaf


@pytest.mark.parametrize("default", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_tensors_of_every_layout_are_those_of_torch_load(saved, torchs_reader, default, dtype):
    value, file = layouts(dtype), io.BytesIO()
    torch.save(value, file)
    checkpoint = saved(value)
    torchs_reader.clear()
    with torch.device(default):
        found = checkpoint.load("x.pt", weights_only=True)
    assert not torchs_reader
    expected = torch.load(io.BytesIO(file.getvalue()))
    assert [described(one) for one in found] == [described(one) for one in expected]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert found[0].untyped_storage().resizable()
    for one in found[: len(SHAPES)]:
        one.fill_(1)
    assert all(torch.equal(one, other) for one, other in zip(checkpoint.load("x.pt"), expected, strict=True))


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("kind", [torch.Tensor.untyped_storage, torch.Tensor.storage], ids=["untyped", "typed"])
def test_a_storage_beside_its_tensors_is_their_memory(saved, torchs_reader, weights_only, count, kind):
    whole = torch.full((count,), 3, dtype=torch.uint8)  # torch saves an untyped storage beside bytes only
    found = saved([whole, kind(whole), whole[1:], torch.ones(2)]).load("x.pt", weights_only=weights_only)
    assert type(found[1]) is torch.storage.TypedStorage  # which torch.load gives, too
    assert found[1].data_ptr() == found[0].data_ptr()
    found[0][1] = 5
    assert found[2][0] == 5 and (found[3] == 1).all()
    assert not torchs_reader or (weights_only and kind is torch.Tensor.untyped_storage)


@pytest.mark.parametrize("weights_only", [False, True])
def test_no_pickle_changes_a_storage(saved, weights_only):
    """BUILD with the attributes of the object that stands for a storage, one of which is a place in memory."""
    name = b"ctorch\nFloatStorage\n"
    storage = b"(X\x07\x00\x00\x00storage" + name + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x03tQ"
    for slots in unpickling._Stored.__slots__[1:]:
        attributes = b"(N}X" + struct.pack("<I", len(slots)) + slots.encode() + b"K\x07st"
        content = b"\x80\x02" + storage + attributes + b"b."
        checkpoint = saved(torch.ones(3), lambda name, old, content=content: content if name == "data.pkl" else old)
        with pytest.raises(pickle.UnpicklingError, match="a storage has no state"):
            checkpoint.load("x.pt", weights_only=weights_only)


@pytest.mark.nightly("test_usual_files_are_those_of_torch_load_without_its_reader")
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_load_in_what_is_compiled_works(saved, weights_only):
    checkpoint = saved(torch.nn.Parameter(torch.ones(2)))
    compiled = torch.compile(lambda x: x + checkpoint.load("x.pt", weights_only=weights_only).sum(), backend="eager")
    assert (compiled(torch.ones(1)) == 3).all()


def test_the_cycle_collector_rests_until_the_last_of_several_loads_ends_and_not_in_a_child():
    first, second = unpickling._uncollected(), unpickling._uncollected()
    assert gc.isenabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() and not unpickling._resting else 1)
    assert os.waitpid(child, 0)[1] == 0
    second.__exit__(None, None, None)
    assert gc.isenabled()


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


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_file_that_torch_cannot_load_is_named(nm, weights_only):
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save_bytes("vocabulary.txt", [b"hello " * 10])
    assert checkpoint.commit()
    for load in (checkpoint.load, lambda name, **more: checkpoint.load_into(name, {}, **more)):
        with pytest.raises(pickle.UnpicklingError, match=r"'vocabulary\.txt' is not a file that torch\.load reads; read_bytes"):
            load("vocabulary.txt", weights_only=weights_only)


def long_of(digits):
    """Returns a pickle of an integer with so many digits, in Python's format."""
    return pickle.dumps(10 ** (digits - 1), 2)


@pytest.mark.parametrize("content", [
    long_of(1_000_000), b"I1\n.", b"L1L\n.", b"F1.5\n.", b"S'a'\n.", b"Va\n.", b"\x80\x04\x8c\x01a.", b"(dp0\n.", b"(l.", b"\x80\x04]\x94.",
    b"\x80\x03C\x01a.", b"\x80\x04\x8f.", b"\x80\x05\x96" + struct.pack("<Q", 1) + b"a.", b"]2.", b"N0N.", b"(N1N.",
])  # fmt: skip
def test_weights_only_has_the_limits_of_torchs_own_loader(saved, content, tmp_path):
    checkpoint = saved(1, lambda name, old: content if name == "data.pkl" else old)
    path = tmp_path / "x.pt"
    path.write_bytes(checkpoint.read_bytes("x.pt"))
    try:
        wanted = torch.load(path, weights_only=True)
    except Exception:
        with pytest.raises(pickle.UnpicklingError):
            checkpoint.load("x.pt", weights_only=True)
    else:
        assert checkpoint.load("x.pt", weights_only=True) == wanted


def mapped_files():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "nebula-test-" in line]


@pytest.mark.parametrize("weights_only", [pytest.param(False, marks=pytest.mark.nightly("test_a_counter_that_outlives_the_rest_does_not_keep_the_file")), True])
def test_a_counter_that_outlives_the_rest_does_not_keep_the_file(saved, weights_only):
    checkpoint = saved({"big": torch.ones(1 << 20), "state": {0: {"step": torch.tensor(3.0)}}})
    gc.collect()
    before = len(mapped_files())
    found = checkpoint.load("x.pt", weights_only=weights_only)
    step = found["state"][0]["step"]
    assert found["big"].sum() == 1 << 20
    del found
    gc.collect()
    assert len(mapped_files()) <= before and step == 3


class Reduced:
    """Is pickled as a call."""

    def __init__(self, function, *arguments, state=None):
        self.reduced = (function, arguments, state) if state is not None else (function, arguments)

    def __reduce__(self):
        return self.reduced


def array_of(text, shape, content, dtype_state=(3, "<", None, None, None, -1, -1, 0)):
    dtype = Reduced(numpy.dtype, text, False, True, state=dtype_state)
    return Reduced(numpy.zeros(1).__reduce__()[0], numpy.ndarray, (0,), b"b", state=(1, shape, dtype, False, content))


HOSTILE = {
    "an array larger than its bytes": array_of("f8", (1 << 40,), b"12345678"),
    "an array of objects": array_of("O8", (1,), b"12345678"),
    "an array of objects in parts": array_of("V8", (1,), b"12345678", (3, "|", None, ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 1, 0)),
    "an array of a negative size": array_of("f8", (-1, -1), b"12345678"),
    "an array made large": Reduced(numpy.zeros(1).__reduce__()[0], numpy.ndarray, (1 << 40,), b"b"),
    "an array without content": Reduced(numpy.zeros(1).__reduce__()[0], numpy.ndarray, (0,), b"b"),
    "a number of fewer bytes": Reduced(numpy.float64(1).__reduce__()[0], numpy.dtype("f8"), b"1"),
    "a set of a range": Reduced(set, range(1 << 40)),
    "a list of a deque": Reduced(list, collections.deque([1])),
    "a state for a type": Reduced(functools.partial, state=1),
    "a factory that is a function": Reduced(collections.defaultdict, print),
}


# fault: as test_metadata_change_no_class_and_no_function_and_take_no_more_memory_than_they_have_bytes
@pytest.mark.parametrize("what", HOSTILE)
def test_values_of_an_untrusted_file_take_no_more_than_their_bytes_and_call_nothing_else(saved, what):
    checkpoint = saved({"value": HOSTILE[what], "w": torch.ones(2)})
    with pytest.raises((pickle.UnpicklingError, RuntimeError)):
        loading.load_own(checkpoint._map("x.pt", True), "x.pt", True)
    target = {"value": None, "w": torch.zeros(2)}
    with pytest.raises((pickle.UnpicklingError, RuntimeError)):
        loading.plan_part(checkpoint._map("x.pt", True), target, "x.pt", True)()
    assert target["value"] is None and not target["w"].any()


@pytest.mark.parametrize("name", ["__builtin__\nset", "collections\ndefaultdict", "numpy\ndtype", "numpy\nndarray", "_codecs\nencode"])
def test_a_pickle_changes_none_of_the_names_that_it_may_use(name):
    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            return values.find(module, name)

    before = [repr(values._Builtin), repr(values._Call), vars(values._Dtype).keys()]
    for state in (b"N}X\x03\x00\x00\x00kindK\x01s\x86", b"}X\x03\x00\x00\x00kindK\x01s"):
        with pytest.raises(pickle.UnpicklingError):
            Reader(io.BytesIO(b"\x80\x02c" + name.encode() + b"\n" + state + b"b.")).load()
    with pytest.raises(TypeError):
        Reader(io.BytesIO(b"\x80\x02}c" + name.encode() + b"\nK\x01s.")).load()
    assert before == [repr(values._Builtin), repr(values._Call), vars(values._Dtype).keys()]
