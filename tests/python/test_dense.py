"""A tensor whose values differ from the bytes in its memory is saved by its values or refused by name, in every function that takes bytes."""

from __future__ import annotations

import array
import ctypes
import re

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from nebulaml.dcp import NebulaStager, NebulaStorageReader, NebulaStorageWriter
from nebulaml.errors import NebulaConfigError, NebulaPicklingError
from nebulaml.export import naming, sources
from nebulaml.export.files import Directory
from nebulaml.integrations import redirect
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

pytestmark = pytest.mark.filterwarnings("ignore")

Z = torch.complex(torch.arange(1.0, 7), torch.arange(7.0, 13))


class Tagged(torch.Tensor):
    """A subclass that changes nothing."""


LAZY = {
    "conjugate": lambda: Z.conj(),
    "conjugate scalar": lambda: Z[2].conj(),
    "conjugate of a slice": lambda: Z[1:4].conj(),
    "conjugate of a subclass": lambda: Z.as_subclass(Tagged).conj(),
    "conjugate that needs grad": lambda: Z.clone().requires_grad_().conj(),
    "negative": lambda: torch._neg_view(torch.arange(5.0)),
    "imaginary part": lambda: Z[:1].conj().imag,
    "both": lambda: torch._neg_view(Z.conj()),
    "zeros without memory": lambda: torch._efficientzerotensor((3,)),
    "conjugate zeros without memory": lambda: torch._efficientzerotensor((3,), dtype=torch.complex64).conj(),
    "still on its way from other ranks": lambda: AsyncCollectiveTensor(torch.arange(4.0)),
}


def values_of(tensor):
    """Returns the values element by element, without assumptions about torch's storage of the tensor."""
    tensor = tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
    return torch.tensor([0.0] * len(tensor) if tensor._is_zerotensor() else tensor.detach().tolist(), dtype=tensor.dtype)


def bytes_of(tensor):
    plain = values_of(tensor)
    return ctypes.string_at(plain.data_ptr(), plain.nbytes)


# fault (Arguments of the caller): A tensor differs from its bytes: a conjugate or negative view, zeros without memory.
# result: `save_bytes`, safetensors and DCP save its values, as `save` does.
@pytest.mark.parametrize("kind", LAZY)
def test_bytes_of_a_lazy_view_are_those_of_its_values(kind, nm):
    tensor = LAZY[kind]()
    checkpoint = nm.Checkpoint("t", -2)
    assert checkpoint.save_bytes("x", [b"head", tensor, torch.ones(1), tensor]) and checkpoint.commit()
    wanted = bytes_of(tensor)
    assert checkpoint.read_bytes("x") == b"head" + wanted + bytes_of(torch.ones(1)) + wanted


@pytest.mark.parametrize("kind", LAZY)
def test_findings_about_a_plain_tensor_are_not_used_for_a_lazy_one(kind, nm):
    tensor = LAZY[kind]()
    plain = values_of(tensor)
    for first, second in ((plain, tensor), (tensor, plain)):
        checkpoint = nm.Checkpoint(None, -2)
        assert checkpoint.save_bytes("x", [first, second]) and checkpoint.commit()
        assert checkpoint.read_bytes("x") == 2 * bytes_of(tensor)


# fault: as test_bytes_of_a_lazy_view_are_those_of_its_values
@pytest.mark.parametrize("kind", LAZY)
def test_a_file_of_torch_distributed_checkpoint_has_the_values_of_a_lazy_view(kind, nm, place):
    tensor = LAZY[kind]()
    dcp.save({"t": tensor, "base": Z}, storage_writer=NebulaStorageWriter(place.storage / "d"))
    nm.flush_persistence()
    for reader in (NebulaStorageReader(place.storage / "d"), dcp.FileSystemReader(place.storage / "d")):
        found = {"t": torch.full(tensor.shape, 9, dtype=tensor.dtype), "base": torch.zeros_like(Z)}
        dcp.load(found, storage_reader=reader)
        assert torch.equal(found["t"], values_of(tensor)) and torch.equal(found["base"], Z)


def test_a_stager_keeps_a_view_and_its_conjugate_apart():
    for stager in (NebulaStager(), NebulaStorageWriter("/nowhere/d")):
        state = {"z": Z, "conjugate": Z.conj(), "negative": torch._neg_view(Z), "again": Z, "zeros": torch._efficientzerotensor((3,))}
        staged = stager.stage(state)
        for name, tensor in state.items():
            assert torch.equal(staged[name], values_of(tensor)) and not staged[name].is_conj() and not staged[name].is_neg(), name
        assert staged["again"] is staged["z"]


def test_nothing_is_made_on_the_device_that_the_program_has_chosen_as_its_default(nm, place):
    with torch.device("meta"):
        staged = NebulaStager().stage({"w": Z[:3], "none": Z[:0]})
        dcp.save({"w": Z[:5]}, storage_writer=NebulaStorageWriter(place.storage / "d"))
    assert torch.equal(staged["w"], Z[:3]) and staged["none"].device.type == "cpu"
    found = {"w": torch.zeros(5, dtype=Z.dtype)}
    dcp.load(found, storage_reader=NebulaStorageReader(place.storage / "d"))
    assert torch.equal(found["w"], Z[:5])


def test_a_safetensors_file_has_the_values_of_a_lazy_view():
    safetensors = pytest.importorskip("safetensors.torch")
    state = {name: make() for name, make in LAZY.items() if name not in ("imaginary part", "still on its way from other ranks")}
    parts = redirect.safetensors_parts(state)
    found = safetensors.load(b"".join(part if isinstance(part, bytes) else bytes_of(part) for part in parts))
    assert not any(isinstance(part, torch.Tensor) and (part.is_conj() or part.is_neg()) for part in parts)
    for name, tensor in state.items():
        assert torch.equal(found[name], values_of(tensor)), name


def test_other_views_of_a_tensor_are_not_exported_as_the_tensor_itself(tmp_path):
    w = torch.arange(6.0).reshape(2, 3)
    state = {"w": w, "turned": w.t(), "tied": w, "head": w[0], "z": Z, "conjugate": Z.conj()}
    torch.save(state, tmp_path / "state.pt")
    found = sources.read(Directory(tmp_path / "state.pt"), "state.pt", None).tensors
    assert naming.same_memory(found) == {"w": "tied"}
    for name, tensor in found.items():
        assert torch.equal(tensor.read(0, tensor.count).reshape(tensor.shape), values_of(state[name])), name


class Pair(torch.Tensor):
    """A subclass without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def emptied(count):
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut():
    tensor = torch.arange(8.0)[3:]
    tensor.untyped_storage().resize_(16)
    return tensor


def fake():
    with FakeTensorMode():
        return torch.ones(4)


REFUSED = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "tensor of layout torch.sparse_coo"),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), "tensor of layout torch.sparse_csr"),
    "opaque": (lambda: torch.ones(3).to_mkldnn(), "tensor of layout torch._mkldnn"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested tensor"),
    "masked": (lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])), "MaskedTensor"),
    "wrapper": (lambda: Pair(torch.ones(2)), "Pair"),
    "meta": (lambda: torch.ones(3, device="meta"), "tensor on the meta device"),
    "fake": (fake, "FakeTensor"),
    "not initialized": (torch.nn.UninitializedParameter, "parameter that is not initialized"),
    "resized": (lambda: emptied(8), "tensor whose storage was resized"),
    "cut": (cut, "tensor whose storage was resized"),
}


# fault (Arguments of the caller): A tensor is more than its bytes, or has none: sparse, quantized, nested, a subclass,
# fake, meta, inside `torch.func`, with a storage that was resized.
# result: It is refused by name, and the error says what to save instead. `save` takes those that have values.
@pytest.mark.parametrize("kind", REFUSED)
def test_bytes_of_what_is_more_or_less_than_its_bytes_are_refused_by_name(kind, nm):
    make, what = REFUSED[kind]
    checkpoint = nm.Checkpoint("t", -2)
    with pytest.raises(NebulaConfigError, match=re.escape(f"part 1 of 'x' is a {what}: ")):
        checkpoint.save_bytes("x", [torch.ones(2), make()])
    assert not checkpoint.commit()
    with pytest.raises(ValueError, match=re.escape(f"tensor 't' is a {what}: ")):
        redirect.safetensors_parts({"t": make()})
    with pytest.raises(NebulaConfigError, match=re.escape(f"t.0: there is no place in a file of torch.distributed.checkpoint for a {what}: ")):
        NebulaStager().stage({"t": [make()]})


@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
def test_a_tensor_inside_a_transform_is_refused_by_name(transform, nm):
    outside = torch.ones(1)

    def inside(tensor):
        checkpoint = nm.Checkpoint("t", -2)
        with pytest.raises(NebulaConfigError, match=r"part 0 of 'x' is a tensor inside a transform of torch.func"):
            checkpoint.save_bytes("x", [tensor])
        with pytest.raises(NebulaPicklingError, match=r"x\['w'\]\[1\]: a tensor inside a transform of torch.func cannot be saved"):
            checkpoint.save("x", {"w": [outside, tensor]})
        return tensor.sum()

    getattr(torch.func, transform)(inside)(torch.ones(2, 2) if transform == "vmap" else torch.ones(2))


# fault: as test_bytes_of_what_is_more_or_less_than_its_bytes_are_refused_by_name
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("kind", ["resized", "cut", "fake", "zeros"])
def test_a_pickle_of_a_tensor_without_values_is_refused_by_name_and_not_only_when_it_is_loaded(kind, plain, nm):
    tensor = torch._efficientzerotensor((3,)) if kind == "zeros" else REFUSED[kind][0]()
    checkpoint = nm.Checkpoint("t", -2)
    with pytest.raises(NebulaPicklingError, match=r"x\['w'\]\[1\]: a .*(resized|FakeTensor|zero tensor).* cannot be saved: "):
        checkpoint.save("x", {"w": [torch.ones(2), tensor], "more": [] if plain else {1}})


@pytest.mark.parametrize("plain", [True, False])
def test_views_to_the_very_end_of_their_storage_are_saved(plain, nm):
    base = torch.arange(6.0)
    state = {"tail": base[4:], "turned": base.view(2, 3).t(), "last": base[5], "none": base[6:], "wide": base[5:].expand(3), "more": [] if plain else {1}}
    checkpoint = nm.Checkpoint("t", -2)
    assert checkpoint.save("x", state) and checkpoint.commit()
    for name, tensor in checkpoint.load("x").items():
        assert name == "more" or torch.equal(tensor, state[name]), name


TARGETS = {
    "zeros": (lambda: torch._efficientzerotensor((3,)), "a zero tensor of torch's own, without memory expected"),
    "resized": (lambda: emptied(3), "a tensor whose storage was resized expected"),
    "inference": (lambda: torch.inference_mode()(torch.zeros)(3), "inference_mode"),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_load_into_what_cannot_take_values_is_refused_before_anything_is_changed(kind, nm):
    make, says = TARGETS[kind]
    checkpoint = nm.Checkpoint("t", -2)
    assert checkpoint.save("x", {"a": torch.ones(2), "b": torch.ones(3)}) and checkpoint.commit()
    target = {"a": torch.zeros(2), "b": make()}
    with pytest.raises(NebulaConfigError, match=re.escape("['b']: ") + ".*" + re.escape(says)):
        checkpoint.load_into("x", target)
    assert torch.equal(target["a"], torch.zeros(2))


def test_load_into_lazy_views_changes_their_values_and_those_of_the_tensor_below(nm):
    checkpoint = nm.Checkpoint("t", -2)
    assert checkpoint.save("x", {"c": Z, "n": torch.arange(4.0)}) and checkpoint.commit()
    base, below = torch.zeros_like(Z), torch.zeros(4)
    checkpoint.load_into("x", {"c": base.conj(), "n": torch._neg_view(below)})
    assert torch.equal(base.conj(), Z) and base[0].item() == 1 - 7j
    assert torch.equal(below, -torch.arange(4.0))


@pytest.mark.parametrize(("parts", "words"), [
    ([b"a", {}], r"part 1 of 'x' is a builtins\.dict, which has no bytes"), (["text"], r"part 0 of 'x' is a builtins\.str"), ([3], "part 0"),
    ("text", r"encode\(\) the text"), (None, "'x' is to hold bytes, not a builtins.NoneType"), (3, "is to hold bytes"),
    ([numpy.array([{}, "b"], dtype=object)], "of Python objects: save it with"), (numpy.array([None]), "of Python objects"),
    ([numpy.zeros(2, dtype=[("a", "i4"), ("b", "O")])], "of Python objects"), ([numpy.arange(6).reshape(2, 3).T], "not contiguous"),
], ids=lambda value: f"{value!r:.40}")  # fmt: skip
def test_what_has_no_bytes_of_its_own_is_refused_and_named(nm, parts, words):
    checkpoint = nm.Checkpoint("refused")
    with pytest.raises(nm.NebulaConfigError, match=words):
        checkpoint.save_bytes("x", parts)


@pytest.mark.parametrize("alone", [
    torch.arange(6).view(2, 3), torch.tensor(7), numpy.arange(6.0).reshape(2, 3), numpy.float32(2), array.array("i", [1, 2]), memoryview(b"abc"), b"",
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_one_tensor_or_buffer_alone_is_saved_as_one_part(nm, alone):
    checkpoint = nm.Checkpoint("alone")
    assert checkpoint.save_bytes("x", alone) and checkpoint.commit()
    assert checkpoint.read_bytes("x") == (alone.numpy() if isinstance(alone, torch.Tensor) else memoryview(alone)).tobytes()
