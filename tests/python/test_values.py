"""Saved objects load again: every dtype, layout and kind of object that torch.save takes."""

from __future__ import annotations

import collections
import contextlib
import importlib
import io
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch
from nebulaml.errors import NebulaConfigError
from same import assert_same

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    key=str,
)
QUANTISED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def plain(dtype: torch.dtype) -> torch.Tensor | None:
    """Returns a tensor with bits of every kind. None: this torch cannot make or save one of that dtype."""
    try:
        tensor = torch.randint(0, 255, (64,), dtype=torch.uint8).view(dtype)
        if dtype == torch.bool:
            tensor = torch.tensor([True, False] * 32)
        torch.save(tensor, io.BytesIO())
        return tensor
    except (RuntimeError, TypeError, KeyError, AttributeError, NotImplementedError):
        return None


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in QUANTISED], ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype, through):
    tensor = plain(dtype)
    if tensor is None:
        pytest.skip(f"torch.save cannot write {dtype} from bytes")
    got = through({"a": tensor})["a"]
    assert got.dtype == tensor.dtype and got.shape == tensor.shape
    assert got.untyped_storage().tolist() == tensor.untyped_storage().tolist()


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_come_back(through):
    per_tensor = torch.quantize_per_tensor(torch.randn(10), 0.1, 3, torch.qint8)
    per_channel = torch.quantize_per_channel(
        torch.randn(4, 3), torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1, 2, 3, 4]), 0, torch.quint8
    )
    assert_same([per_tensor, per_channel], through([per_tensor, per_channel]))


SHAPES = {
    "zero-size": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3.5),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "strided": lambda: torch.arange(40.0)[3:33:3],
    "expanded": lambda: torch.arange(3.0).view(3, 1).expand(3, 5),
    "channels-last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "needs-grad": lambda: torch.randn(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    **({"buffer": lambda: torch.nn.Buffer(torch.randn(3))} if hasattr(torch.nn, "Buffer") else {}),  # since torch 2.5
    "sparse-coo": lambda: torch.eye(4).to_sparse(),
    "sparse-csr": lambda: torch.eye(4).to_sparse_csr(),
    "meta": lambda: torch.empty(5, device="meta"),
    "nan": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SHAPES)
def test_every_shape_and_layout_comes_back(kind, through):
    tensor = SHAPES[kind]()
    assert_same(tensor, through(tensor))


def test_views_share_their_storage_after_loading_and_save_it_once(nm):
    base = torch.arange(1_000_000, dtype=torch.float32)
    checkpoint = nm.Checkpoint("views")
    checkpoint.save("v.pt", {"base": base, "head": base[:10], "tail": base[-5:], "again": base})
    checkpoint.commit()
    assert checkpoint.files["v.pt"] < 1.1 * base.nbytes
    got = checkpoint.load("v.pt")
    assert got["again"] is got["base"]
    got["base"][0] = -1
    assert got["head"][0] == -1
    assert got["tail"].untyped_storage().data_ptr() == got["base"].untyped_storage().data_ptr()


def test_tied_weights_stay_tied(through):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    got = through(model)
    assert got[1].weight is got[0].weight
    state = through(model.state_dict())
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


class Tagged(torch.Tensor):
    """A subclass with an attribute."""


class Thing:
    def __init__(self, tensor):
        self.tensor = tensor
        self.note = "kept"


def test_modules_subclasses_and_own_classes_come_back(through):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    tagged = torch.ones(3).as_subclass(Tagged)
    tagged.label = "weights"
    plain_with_attribute = torch.ones(2)
    plain_with_attribute.label = "plain"
    got = through([model, optimizer.state_dict(), tagged, Thing(torch.zeros(2)), plain_with_attribute])
    assert_same(model, got[0])
    assert_same(optimizer.state_dict(), got[1])
    assert type(got[2]) is Tagged and got[2].label == "weights"
    assert got[3].note == "kept" and torch.equal(got[3].tensor, torch.zeros(2))
    assert got[4].label == "plain"


def test_plain_values_numpy_and_random_states_come_back(through):
    things = {
        "none": None, "text": "öß\0", "int": 1 << 80, "float": 0.1, "bytes": b"\0\xff", "bool": True,
        "set": {1, 2}, "ordered": collections.OrderedDict(a=1), "counter": collections.Counter("abca"),
        "size": torch.Size([1, 2]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
        "nested": [1, (2, [3, {"x": (4,)}])], "complex": 1 + 2j,
        "array": np.arange(10.0).reshape(2, 5), "scalar": np.float32(2.5),
        "numpy-state": np.random.get_state(), "python-state": random.getstate(), "torch-state": torch.get_rng_state(),
    }  # fmt: skip
    assert_same(things, through(things))
    for value in ("just text", 7, None, [], {}, torch.get_rng_state()):
        assert_same(value, through(value))


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.Philox, np.random.PCG64, np.random.SFC64])
def test_the_state_of_the_generators_can_be_sent_to_another_process(nm, generator):
    before = np.random.get_bit_generator() if hasattr(np.random, "get_bit_generator") else None
    if before is None:
        pytest.skip("this numpy has one generator")
    np.random.set_bit_generator(generator(7))
    try:
        np.random.normal(size=3)
        sent = pickle.loads(pickle.dumps(nm.rng_state()))
        expected = np.random.random(4).tolist(), torch.rand(2).tolist(), random.random()
        nm.set_rng_state(sent)
        assert (np.random.random(4).tolist(), torch.rand(2).tolist(), random.random()) == expected
    finally:
        np.random.set_bit_generator(before)


def test_generators_that_a_state_does_not_mention_stay_as_they_are(nm):
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    torch.rand(1)
    nm.set_rng_state({"torch": torch_state})
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state


def test_references_to_one_object_stay_one_object(through):
    shared = [1, 2]
    loop = {"a": shared, "b": shared}
    loop["self"] = loop
    got = through(loop)
    assert got["a"] is got["b"] and got["self"] is got


def test_storages_by_themselves_come_back(through):
    tensor = torch.arange(5)
    got = through({"storage": tensor.untyped_storage()})
    assert list(got["storage"]) == tensor.untyped_storage().tolist()


def test_values_are_those_of_the_moment_of_saving(nm):
    tensors = {f"t{i}": torch.full((n,), float(i)) for i, n in enumerate([1, 1000, 300_000, 5_000_000])}
    settings = {"rates": [0.1, 0.2]}
    array = np.ones(1000)
    checkpoint = nm.Checkpoint("moment")
    checkpoint.save("m.pt", {"tensors": tensors, "settings": settings, "array": array})
    for tensor in tensors.values():
        tensor.fill_(-7)
    settings["rates"].append(0.3)
    array[:] = -7
    checkpoint.commit()
    del tensors
    got = checkpoint.load("m.pt")
    for i in range(4):
        assert (got["tensors"][f"t{i}"] == i).all()
    assert got["settings"] == {"rates": [0.1, 0.2]} and (got["array"] == 1).all()


def test_loaded_tensors_are_writable_and_independent(nm):
    checkpoint = nm.Checkpoint("own")
    checkpoint.save("o.pt", {"w": torch.ones(100_000)})
    checkpoint.commit()
    first, second = checkpoint.load("o.pt"), checkpoint.load("o.pt")
    first["w"].fill_(5)
    assert (second["w"] == 1).all() and (checkpoint.load("o.pt")["w"] == 1).all()
    for step in range(6):  # the memory of the first is long given to others
        later = nm.Checkpoint(f"later{step}")
        later.save("o.pt", {"w": torch.full((100_000,), float(step))})
        later.commit()
    assert (second["w"] == 1).all() and (first["w"] == 5).all()


def test_many_small_tensors_come_back(through):
    tensors = {f"layer{i}": {"w": torch.full((7,), float(i)), "step": torch.tensor(i)} for i in range(1500)}
    assert_same(tensors, through(tensors))


REFUSED = "weights_only|not an allowed global"  # torch 2.4 says the latter


def test_map_location_and_weights_only_are_torch_loads(nm, monkeypatch):
    checkpoint = nm.Checkpoint("options")
    checkpoint.save("t.pt", {"w": torch.ones(2)})
    checkpoint.save("n.pt", {"w": np.ones(2)})
    checkpoint.commit()
    assert checkpoint.load("t.pt", map_location="meta")["w"].device.type == "meta"
    assert (checkpoint.load("t.pt", map_location=lambda storage, location: storage)["w"] == 1).all()
    assert (checkpoint.load("t.pt", weights_only=True)["w"] == 1).all()
    with pytest.raises(Exception, match=REFUSED):
        checkpoint.load("n.pt", weights_only=True)
    monkeypatch.setenv("NEBULA_WEIGHTS_ONLY", "1")
    with pytest.raises(Exception, match=REFUSED):
        checkpoint.load("n.pt")
    monkeypatch.setenv("NEBULA_WEIGHTS_ONLY", "true")
    with pytest.raises(NebulaConfigError, match="'true' is neither 0 nor 1"):
        checkpoint.load("n.pt")
    monkeypatch.setenv("NEBULA_WEIGHTS_ONLY", "0")
    assert (checkpoint.load("n.pt")["w"] == 1).all()
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "True")
    with pytest.raises(Exception, match=REFUSED):
        checkpoint.load("n.pt", weights_only=False)


def test_an_archive_of_torchscript_is_loaded_as_torch_load_does(nm):
    script = torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(3))
    file = io.BytesIO()
    torch.jit.save(script, file)
    checkpoint = nm.Checkpoint("script")
    checkpoint.save_bytes("s.pt", file.getvalue())
    checkpoint.commit()
    assert torch.equal(checkpoint.load("s.pt", map_location="cpu")(torch.ones(3)), script(torch.ones(3)))
    target = torch.nn.Linear(3, 2)
    checkpoint.load_into("s.pt", target)
    assert torch.equal(target(torch.ones(3)), script(torch.ones(3)))
    with pytest.raises(pickle.UnpicklingError, match=r"^the file is a TorchScript archive, which holds code: load it with weights_only=False"):
        checkpoint.load("s.pt", weights_only=True)


def test_an_empty_file_is_no_torch_file_on_any_way(nm):
    checkpoint = nm.Checkpoint("empty")
    checkpoint.save_bytes("e", b"")
    checkpoint.commit()
    for load in (checkpoint.load, lambda name: checkpoint.load_into(name, {}), lambda name: checkpoint.load(name, weights_only=True)):
        with pytest.raises(pickle.UnpicklingError, match=r"'e' is not a file that torch.load reads; read_bytes\(\) gives its bytes"):
            load("e")


def _with_attributes(module: str, name: str) -> bytes:
    """Returns a pickle that gets a global and sets an attribute of it: BUILD with a state for slots."""
    return f"c{module}\n{name}\n(N(dS'nebula_was_here'\nI1\nstb.".encode()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch", "UntypedStorage"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("os", "getpid"),
    ],
)
def test_weights_only_lets_a_file_change_nothing_of_the_program(nm, module, name):
    file = io.BytesIO()
    torch.save({"w": torch.ones(3)}, file)
    source, made = zipfile.ZipFile(file), io.BytesIO()
    with zipfile.ZipFile(made, "w") as target:
        for entry in source.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            target.writestr(entry.filename, _with_attributes(module, name) if is_pickle else source.read(entry))
    checkpoint = nm.Checkpoint("attributes")
    checkpoint.save_bytes("x.pt", [made.getvalue()])
    checkpoint.commit()
    with contextlib.suppress(Exception):
        checkpoint.load("x.pt", weights_only=True)
    with contextlib.suppress(Exception):
        checkpoint.load_into("x.pt", {"w": torch.zeros(3)}, weights_only=True)
    assert not hasattr(getattr(importlib.import_module(module), name), "nebula_was_here")


def test_an_invalid_switch_is_refused_for_every_file(nm, monkeypatch):
    checkpoint = nm.Checkpoint("switch")
    checkpoint.save("t.pt", {"w": torch.ones(3)})
    checkpoint.commit()
    monkeypatch.setenv("NEBULA_WEIGHTS_ONLY", "true")
    for load in (checkpoint.load, lambda name: checkpoint.load_into(name, {"w": torch.zeros(3)})):
        with pytest.raises(NebulaConfigError, match="neither 0 nor 1"):
            load("t.pt")
