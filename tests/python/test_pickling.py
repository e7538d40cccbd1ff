"""The pickle is torch.save's, whatever the object; what cannot be pickled is named."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nebulaml import pickling
from nebulaml.errors import NebulaError, NebulaPicklingError
from same import assert_same

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
          torch.complex64, torch.float8_e4m3fn, torch.uint16]  # fmt: skip


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    base = torch.arange(draw(st.integers(0, 24))).to(dtype)
    kind = draw(st.sampled_from(["whole", "slice", "shape", "parameter", "grad"]))
    if kind == "slice" and len(base) > 2:
        return base[draw(st.integers(0, len(base) - 1)) :: draw(st.integers(1, 3))]
    if kind == "shape" and len(base) == 24:
        return base.view(draw(st.sampled_from([(4, 6), (2, 3, 4), (24, 1)]))).transpose(0, 1)
    if dtype.is_floating_point and kind == "parameter":
        return torch.nn.Parameter(base, requires_grad=draw(st.booleans()))
    if dtype.is_floating_point and kind == "grad" and dtype != torch.float8_e4m3fn:
        return base.requires_grad_()
    return base


def with_a_view(value):
    return [value, value[1:]] if isinstance(value, torch.Tensor) and value.dim() == 1 else [value]


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=8))
LEAVES = st.one_of(PLAIN, tensors())
KEYS = st.one_of(st.text(max_size=6), st.integers(-3, 3))
STRUCTURES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.tuples(inner, inner),
        inner.map(lambda value: [value, {"again": value}]),  # shared
        inner.map(with_a_view),
    ),
    max_leaves=12,
)


def torch_file(obj):
    file = io.BytesIO()
    torch.save(obj, file)
    return file


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STRUCTURES)
def test_pickle_and_storages_are_those_of_torch_save(obj):
    taken = pickling.capture(obj)
    archive = zipfile.ZipFile(torch_file(obj))
    assert bytes(taken.pickle) == archive.read("archive/data.pkl")
    sizes = [archive.getinfo(f"archive/data/{key}").file_size for key in range(len(taken.storages))]
    assert [entry[1] for entry in taken.storages] == sizes
    assert f"archive/data/{len(sizes)}" not in archive.namelist()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(obj=STRUCTURES)
def test_what_is_loaded_equals_torch_save_and_torch_load(obj, nm):
    checkpoint = nm.Checkpoint("hypothesis")
    checkpoint.save("o.pt", obj)
    checkpoint.commit()
    file = torch_file(obj)
    file.seek(0)
    assert_same(torch.load(file, weights_only=False), checkpoint.load("o.pt"))


def test_one_memory_under_two_dtypes_is_refused_as_torch_save_does():
    tensor = torch.randn(4)
    both = {"f": tensor, "i": tensor.view(torch.int32)}
    with pytest.raises(RuntimeError):
        torch_file(both)
    with pytest.raises(RuntimeError, match="different types"):
        pickling.capture(both)


class Holder:
    pass


def test_an_unpicklable_part_is_named_by_its_path():
    holder = Holder()
    holder.callback = lambda: 0
    with pytest.raises(NebulaPicklingError, match=r"model\.pt\['a'\]\[3\]\.callback: .*function") as raised:
        pickling.capture({"x": torch.ones(2), "a": [1, 2, 3, holder]}, "model.pt")
    assert isinstance(raised.value, TypeError) and isinstance(raised.value, NebulaError)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].hook = (x for x in [1])
    with pytest.raises(NebulaPicklingError, match=r"generator"):
        pickling.capture(model, "m")


def test_hooks_warn_as_in_torch_save_and_are_left_out():
    tensor = torch.randn(3, requires_grad=True)
    tensor.register_hook(lambda gradient: gradient)
    with pytest.warns(UserWarning, match="hook"):
        taken = pickling.capture(tensor)
    assert len(taken.storages) == 1


def test_the_pickler_frees_everything_it_held():
    import gc
    import weakref

    obj = {"a": torch.ones(10), "h": Holder()}
    watch = weakref.ref(obj["h"])
    storages = pickling.capture(obj).storages
    del obj
    gc.collect()
    assert watch() is None
    assert len(storages) == 1
