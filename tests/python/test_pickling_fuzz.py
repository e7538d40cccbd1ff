"""Fuzz of TorchPickler: torch.load returns the same objects for its pickle and for that of torch.save.

The examples are built as graphs: parts made earlier are used again, so that the same object, the same storage or a
view of it occurs in several places, and containers may hold themselves.
"""

from __future__ import annotations

import collections
import ctypes
import io
import os
import zipfile
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nebulaml.tensors import pickling
from same import assert_same, savable

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64,
          torch.uint8, *savable(torch.uint16), torch.bool, torch.complex64, torch.float8_e4m3fn]  # fmt: skip
GROWN = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]  # may need a gradient

NUMPY = ["<f4", "<f8", "<i2", "<u8", "?", "<c8", "<M8[s]", "S3", "<U2"]

Point = collections.namedtuple("Point", "x y")


class Slotted:
    """An object with state outside a __dict__."""

    __slots__ = ("one", "two")

    def __init__(self, one: Any, two: Any) -> None:
        self.one, self.two = one, two


class Holder:
    """An ordinary object."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Net(torch.nn.Module):
    """Parameters, a buffer, a tied weight and a child."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, 2)
        self.tied = torch.nn.Linear(width, 2, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("mean", torch.arange(float(width)))


def new_tensor(draw: Any) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.arange(draw(st.sampled_from([0, 1, 2, 7, 24]))).to(dtype)
    if dtype in GROWN:
        if draw(st.booleans()):
            return torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
        return tensor.requires_grad_(draw(st.booleans()))
    return tensor


def view_of(draw: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Returns another tensor on the same storage."""
    flat = tensor.detach()
    kind = draw(st.sampled_from(["alias", "slice", "shape", "transpose", "expand", "conj", "typed", "parameter"]))
    if kind == "slice" and flat.dim() == 1 and flat.numel() > 1:
        return flat[draw(st.integers(0, flat.numel() - 1)) :: draw(st.integers(1, 3))]
    if kind == "shape" and flat.is_contiguous() and flat.numel() % 2 == 0:
        return flat.view(2, -1) if flat.numel() else flat.view(0, 3)
    if kind == "transpose" and flat.dim() == 2:
        return flat.t()
    if kind == "expand":
        return flat.unsqueeze(0).expand(3, *flat.shape)
    if kind == "conj" and flat.is_complex():
        return flat.conj()
    if kind == "parameter" and flat.dtype in GROWN:
        return torch.nn.Parameter(flat)
    return flat


def new_part(draw: Any, parts: list[Any]) -> Any:
    def some() -> Any:
        return draw(st.sampled_from(parts)) if parts else None

    kind = draw(st.sampled_from(["plain", "tensor", "view", "view", "list", "dict", "ordered", "tuple", "named", "set",
                                 "default", "slotted", "holder", "module", "numpy", "numpy-view", "storage", "cycle",
                                 "dict-cycle"]))  # fmt: skip
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    keys = st.one_of(st.text(max_size=4), st.integers(-300, 300), st.booleans(), st.tuples(st.integers(0, 3)))
    if kind == "tensor" or (kind in ("view", "storage") and not tensors):
        return new_tensor(draw)
    if kind == "view":
        return view_of(draw, draw(st.sampled_from(tensors)))
    if kind == "storage":
        # A bare storage counts as bytes: together with a tensor of another dtype torch.save refuses it, unless it is empty.
        plain = [one for one in tensors if one.dtype == torch.uint8 or not one.untyped_storage().nbytes()]
        return draw(st.sampled_from(plain)).untyped_storage() if plain else None
    if kind in ("list", "cycle"):
        made: list[Any] = [some() for _ in range(draw(st.integers(0, 4)))]
        if kind == "cycle":
            made.insert(draw(st.integers(0, len(made))), draw(st.sampled_from([made, (made,), {"self": made}])))
        return made
    if kind in ("dict", "dict-cycle", "ordered"):
        table: Any = collections.OrderedDict() if kind == "ordered" else {}
        for key in draw(st.lists(keys, max_size=4)):
            table[key] = some()
        if kind == "dict-cycle":
            table["itself"] = [table]
        return table
    if kind == "default":
        return collections.defaultdict(list, {"a": [some()]})
    if kind == "tuple":
        return tuple(some() for _ in range(draw(st.integers(0, 5))))
    if kind == "named":
        return Point(some(), some())
    if kind == "set":
        return draw(st.one_of(st.sets(st.integers(), max_size=3), st.frozensets(st.text(max_size=3), max_size=3)))
    if kind == "slotted":
        return Slotted(some(), some())
    if kind == "holder":
        return Holder(some())
    if kind == "module":
        net = Net(draw(st.integers(1, 3)))
        return draw(st.sampled_from([net, net.state_dict()]))
    if kind == "numpy":
        return np.arange(draw(st.integers(0, 9))).astype("<i8").astype(draw(st.sampled_from(NUMPY)))
    if kind == "numpy-view":
        return draw(st.sampled_from([np.arange(12.0).reshape(3, 4).T, np.arange(9)[1::2], np.float32(1.5)]))
    return draw(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(max_size=9),
                          st.binary(max_size=9), st.sampled_from(DTYPES), st.just(torch.Size([2, 3])),
                          st.just(torch.device("cpu")), st.sampled_from([2**31, -(2**31), 2**63, -(2**90)])))  # fmt: skip


@st.composite
def graphs(draw: Any) -> Any:
    parts: list[Any] = []
    for _ in range(draw(st.integers(1, 12))):
        parts.append(new_part(draw, parts))
    return parts if draw(st.booleans()) else {"state": parts[-1], "all": parts}


def saved(obj: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(obj, file)
    return file


def rebuilt(taken: pickling.Capture, like: io.BytesIO) -> io.BytesIO:
    """Returns a torch file with our pickle and the bytes at our addresses. The rest is as torch wrote it."""
    assert not taken.whole, "the pickle is torch's own, nothing was tested"
    file = io.BytesIO()
    with zipfile.ZipFile(like) as archive, zipfile.ZipFile(file, "w") as made:
        names = archive.namelist()
        for name in names:
            if name.startswith("archive/data/"):
                continue
            made.writestr(name, bytes(taken.pickle) if name == "archive/data.pkl" else archive.read(name))
        for key, (address, size, *_) in enumerate(taken.storages):
            made.writestr(f"archive/data/{key}", ctypes.string_at(address, size))
    file.seek(0)
    return file


def untyped(storage: Any) -> torch.UntypedStorage:
    return storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage


class Shape:
    """Records which paths lead to the same object or storage: objects are numbered in the order of their first occurrence."""

    def __init__(self, obj: Any) -> None:
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []
        self.storages: dict[int, int] = {}
        self.found: list[Any] = []
        self.walk(obj)

    def walk(self, obj: Any) -> None:
        if isinstance(obj, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, torch.device)):
            return  # whether these are one object says nothing
        known = id(obj) in self.seen
        number = self.seen.setdefault(id(obj), len(self.seen))
        self.kept.append(obj)
        self.found.append((type(obj).__name__, number))
        if known:
            return
        if isinstance(obj, torch.Tensor):
            storage = obj.untyped_storage()
            self.kept.append(storage)
            self.found.append(("on", self.storages.setdefault(storage._cdata, len(self.storages)), obj.storage_offset()))
        elif isinstance(obj, (torch.UntypedStorage, torch.storage.TypedStorage)):
            self.found.append(("on", self.storages.setdefault(untyped(obj)._cdata, len(self.storages))))
        for part in inside(obj):
            self.walk(part)


def inside(obj: Any) -> list[Any]:
    if isinstance(obj, dict):
        return list(obj.values())
    if isinstance(obj, (list, tuple)):
        return list(obj)
    if isinstance(obj, Slotted):
        return [obj.one, obj.two]
    if isinstance(obj, Holder):
        return [obj.value]
    if isinstance(obj, torch.nn.Module):
        return [obj.first.weight, obj.tied.weight, obj.first.bias, obj.mean]
    return []


def leaves(obj: Any) -> list[Any]:
    """Returns all objects that are not containers, each once, in order. It also ends on cycles."""
    found, todo, seen = [], [obj], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        parts = inside(one)
        if isinstance(one, dict):
            found.append(tuple(one))
        if not parts and not isinstance(one, (list, dict, tuple)):
            found.append(one)
        todo.extend(reversed(parts))
    return found


def assert_equal_leaves(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        if isinstance(one, (torch.UntypedStorage, torch.storage.TypedStorage)):
            assert type(one) is type(other) and untyped(one).tolist() == untyped(other).tolist()
        elif isinstance(one, (complex, float)):
            assert type(one) is type(other) and repr(one) == repr(other)
        elif isinstance(one, tuple):
            assert repr(one) == repr(other)
        elif isinstance(one, np.generic):
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
        else:
            assert_same(one, other)


@settings(max_examples=500 if os.environ.get("NEBULA_TEST_NIGHTLY") else 40, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs())
def test_any_graph_loads_as_from_torch_save(obj):
    taken = pickling.capture(obj)
    file = saved(obj)
    mine = torch.load(rebuilt(taken, file), weights_only=False)
    file.seek(0)
    theirs = torch.load(file, weights_only=False)
    assert Shape(mine).found == Shape(theirs).found
    assert_equal_leaves(leaves(mine), leaves(theirs))


@settings(max_examples=150 if os.environ.get("NEBULA_TEST_NIGHTLY") else 60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs())
def test_the_pickle_of_any_graph_is_that_of_torch_save(obj):
    taken = pickling.capture(obj)
    archive = zipfile.ZipFile(saved(obj))
    assert bytes(taken.pickle) == archive.read("archive/data.pkl")
    for key, (address, size, *_) in enumerate(taken.storages):
        assert ctypes.string_at(address, size) == archive.read(f"archive/data/{key}")
    assert f"archive/data/{len(taken.storages)}" not in archive.namelist()


def test_the_comparison_notices_lost_sharing():
    tensor = torch.arange(4.0)
    assert Shape([tensor, tensor]).found != Shape([tensor, tensor.clone()]).found
    assert Shape([tensor, tensor[1:]]).found != Shape([tensor, tensor[1:].clone()]).found
    assert Shape([tensor, tensor[1:]]).found != Shape([tensor, tensor[2:]]).found
