"""The pickle equals torch.save's for every object; the error for an object that cannot be pickled names its path."""

from __future__ import annotations

import collections
import copyreg
import enum
import gc
import io
import logging
import os
import pickle
import sys
import threading
import weakref
import zipfile

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nebulaml import _nebula
from nebulaml.errors import NebulaError, NebulaPicklingError
from nebulaml.tensors import device, pickling
from same import assert_same, savable

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
          torch.complex64, torch.float8_e4m3fn, *savable(torch.uint16)]  # fmt: skip


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


@settings(max_examples=300 if os.environ.get("NEBULA_TEST_NIGHTLY") else 20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STRUCTURES)
def test_pickle_and_storages_are_those_of_torch_save(obj):
    taken = pickling.capture(obj)
    archive = zipfile.ZipFile(torch_file(obj))
    assert bytes(taken.pickle) == archive.read("archive/data.pkl")
    sizes = [archive.getinfo(f"archive/data/{key}").file_size for key in range(len(taken.storages))]
    assert [entry[1] for entry in taken.storages] == sizes
    assert f"archive/data/{len(sizes)}" not in archive.namelist()


@settings(max_examples=60 if os.environ.get("NEBULA_TEST_NIGHTLY") else 20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(obj=STRUCTURES)
def test_a_load_equals_torch_save_and_torch_load(obj, nm):
    checkpoint = nm.Checkpoint("hypothesis")
    checkpoint.save("o.pt", obj)
    checkpoint.commit()
    file = torch_file(obj)
    file.seek(0)
    assert_same(torch.load(file, weights_only=False), checkpoint.load("o.pt"))


def test_a_storage_that_comes_the_slow_way_first_is_named_anew_by_the_fast_way():
    values = [torch.tensor([2j]), torch.tensor([3j])]
    obj = {"a": values[0], "all": [values[0].conj(), values[1].conj(), values[1], values[1]]}
    assert bytes(pickling.capture(obj).pickle) == zipfile.ZipFile(torch_file(obj)).read("archive/data.pkl")


def test_a_bare_storage_and_a_tensor_in_it_are_both_named_with_their_size():
    tensor = torch.tensor([1, 2, 3], dtype=torch.uint8)
    obj = [tensor.untyped_storage(), tensor]
    assert bytes(pickling.capture(obj).pickle) == zipfile.ZipFile(torch_file(obj)).read("archive/data.pkl")


def test_one_memory_under_two_dtypes_is_refused_as_torch_save_does():
    tensor = torch.randn(4)
    both = {"f": tensor, "i": tensor.view(torch.int32)}
    with pytest.raises(RuntimeError):
        torch_file(both)
    with pytest.raises(RuntimeError, match="different types"):
        pickling.capture(both)


class Holder:
    pass


# fault (Arguments of the caller): An object cannot be pickled.
# result: The error names the path inside the object.
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
    import weakref

    obj = {"a": torch.ones(10), "h": Holder()}
    watch = weakref.ref(obj["h"])
    storages = pickling.capture(obj).storages
    del obj
    gc.collect()
    assert watch() is None
    assert len(storages) == 1


def pickles(obj):
    return zipfile.ZipFile(torch_file(obj)).read("archive/data.pkl"), bytes(_nebula.plain_dump(obj)[0])


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 2000, 2001])
def test_batches_of_plain_containers_are_those_of_torch_save(count):
    pairs = [(f"k{i}", i) for i in range(count)]
    ordered = collections.OrderedDict(pairs)
    ordered._metadata = {"": {"version": 1}, "again": pairs}
    for obj in (dict(pairs), pairs, tuple(pairs), collections.OrderedDict(pairs), ordered):
        theirs, ours = pickles([obj, {"again": obj}])
        assert theirs == ours


def test_numbers_and_texts_of_any_size_are_those_of_torch_save():
    edges = [sign * (1 << bits) + more for bits in range(63) for sign in (1, -1) for more in (-1, 0, 1)]
    texts = ["", "0", "9", "10", "cpu", "storage", "é", "深", "\U0001f300", "x" * 70000]
    same = torch.zeros(3)
    obj = {"n": edges, "f": [0.0, -0.0, 1e300, float("inf"), -1.5], "t": texts, "b": (None, True, False, ())}
    obj["tensors"] = [torch.zeros(1, 2, 3, 4)[:, 1:], same, same[1:], same, torch.tensor(2.0), torch.arange(5)[::2]]
    obj["tensors"] += [torch.ones(2, requires_grad=True)] + [torch.zeros(1) for _ in range(300)]
    theirs, ours = pickles(obj)
    assert theirs == ours


def test_a_model_and_its_optimizer_are_plain_state():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    theirs, ours = pickles({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7})
    assert theirs == ours


def test_a_state_that_was_loaded_is_plain_state():
    parameter = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    file = torch_file({"optimizer": optimizer.state_dict(), "wanted": parameter.detach().requires_grad_()})
    file.seek(0)
    state = torch.load(file, weights_only=False)
    assert state["wanted"]._backward_hooks is not None
    theirs, ours = pickles(state)
    assert theirs == ours
    state["wanted"].register_hook(lambda gradient: gradient)
    assert _nebula.plain_dump(state) is None


class Outer:
    class Inner:
        pass


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntFlag):
    ONE = 1
    TWO = 2


def leaves():
    """Returns objects that each occur twice, and some that share parts."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.note = "kept"
    return {
        "sizes": [torch.Size([1, 2]), torch.Size([]), torch.ones(2, 3).shape],
        "bytes": [b"", b"x", bytes(range(256)), b"x" * 70_000, "latin1"],
        "dtypes": [torch.float32, torch.int8, torch.float8_e4m3fn, torch.float32],
        "devices": [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
        "parameters": [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(3), requires_grad=False), weight, weight],
        "enums": [Colour.RED, Colour.BLUE, Colour.RED, Level.ONE, Level.ONE | Level.TWO],
        "complex": [1j, 2 + 1j],
        "numpy": [numpy.arange(5), numpy.float32(2), numpy.ones((2, 3)).T, numpy.dtype("<u4"), *numpy.random.RandomState(1).get_state()],
        "named": [float, collections.OrderedDict, torch.nn.Linear, os.path.join, len, Colour],
    }  # fmt: skip


@pytest.mark.parametrize("kind", leaves())
def test_a_leaf_of_another_kind_is_plain_and_its_bytes_are_those_of_torch_save(kind):
    state = {"first": torch.ones(3), "odd": leaves()[kind], "again": list(leaves()[kind]), "last": [torch.ones(2)]}
    state["same"] = state["odd"]
    theirs, ours = pickles(state)
    assert theirs == ours
    for leaf in leaves()[kind]:
        theirs, ours = pickles({"one": leaf})
        assert theirs == ours


@pytest.mark.parametrize("dtype", sorted(torch.storage._new_dtypes(), key=str), ids=str)
def test_a_tensor_whose_dtype_has_no_typed_storage_is_plain_as_well(dtype):
    odd = torch.arange(64, dtype=torch.uint8).view(dtype)
    state = {"first": torch.ones(3), "odd": odd, "view": odd[2:], "empty": odd[:0], "other": odd.clone(), "last": [torch.ones(2), dtype]}
    theirs, ours = pickles(state)
    assert theirs == ours
    for one in (odd, [odd, torch.ones(2)], torch.nn.Parameter(odd, requires_grad=False)):
        theirs, ours = pickles(one)
        assert theirs == ours


def test_a_leaf_that_registers_its_own_way_with_copyreg_is_written_that_way(monkeypatch):
    monkeypatch.setitem(copyreg.dispatch_table, Colour, lambda colour: (getattr, (Colour, "RED")))
    theirs, ours = pickles([Colour.BLUE])
    assert theirs == ours


def test_an_enum_whose_pickling_fails_is_left_to_the_pickler_which_says_so():
    class Local(enum.Enum):
        ONE = 1

    assert _nebula.plain_dump([Local.ONE]) is None
    with pytest.raises(NebulaPicklingError, match="Local"):
        pickling.capture({"a": [Local.ONE]})


def test_a_part_that_makes_a_large_state_slow_to_pickle_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr(pickling, "_slow_said", False)
    caplog.set_level(logging.INFO, "nebulaml")
    pickling.capture({"few": torch.ones(1), "odd": {1}})
    assert not caplog.messages
    state = {"model": [torch.ones(1) for _ in range(pickling.MANY)], "other": {"seen": [1, {2}]}}
    for _ in range(2):
        pickling.capture(state)
    assert len(caplog.messages) == 1 and "state['other']['seen'][1] is a set" in caplog.messages[0]


def not_plain():
    hooked = torch.ones(2, requires_grad=True)
    hooked.register_hook(lambda gradient: gradient)
    marked = torch.ones(2)
    marked.note = "kept"
    loop = ([],)
    loop[0].append(loop)
    both = torch.randn(4)
    eight = torch.ones(2).to(torch.float8_e4m3fn)
    return {
        "hooks": hooked, "attributes": marked, "a tuple in itself": loop, "two dtypes": [both, both.view(torch.int32)],
        "a large number": 1 << 64, "a surrogate": "\ud800", "a set": {1}, "a lambda": lambda: 1, "a class in a class": Outer.Inner,
        "sparse": torch.eye(2).to_sparse(), "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "negative": torch.ones(2, dtype=torch.complex64).conj().imag, "meta": torch.ones(2, device="meta"),
        "quantised": torch.quantize_per_tensor(both, 0.1, 0, torch.qint8),
        "a subclass": collections.defaultdict(int), "untyped, two dtypes": [eight, eight.view(torch.float8_e5m2)],
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", not_plain())
def test_objects_that_are_not_plain_are_left_to_the_pickler(what):
    assert _nebula.plain_dump({"first": torch.ones(3), "second": [not_plain()[what]]}) is None
    assert _nebula.plain_dump({**{str(i): torch.ones(i) for i in range(20)}, "looked at ahead": not_plain()[what]}) is None


@pytest.mark.filterwarnings("ignore")
def test_findings_about_one_kind_of_tensor_are_not_used_for_another():
    z = torch.ones(2, dtype=torch.complex64)
    wanted = torch.ones(2, requires_grad=True)
    for ordinary, unusual in (
        (z, z.conj()),
        (z.real, z.conj().imag),
        (torch.ones(2), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        (torch.ones(2), torch.ones(2).to_mkldnn()),
        (torch.ones(2, 2), torch.eye(2).to_sparse_csr()),
        (wanted.detach(), not_plain()["hooks"]),
    ):
        assert _nebula.plain_dump([ordinary, ordinary.clone()]) is not None
        assert _nebula.plain_dump([ordinary, unusual]) is None
        assert _nebula.plain_dump([unusual, ordinary]) is None
    with torch.inference_mode():
        inferred = torch.ones(3) + 1
    views = [wanted.detach(), wanted, wanted.data, wanted[:1].detach(), wanted * 2, inferred, torch.ones(2)[1:], torch.ones(0)[:0]]
    theirs, ours = pickles([view if view.is_leaf else view.detach() for view in views])
    assert theirs == ours


@pytest.mark.skipif(not hasattr(torch._C.DispatchKeySet, "raw_repr"), reason="torch 2.4 does not tell a tensor's dispatch keys")
def test_tensors_of_a_known_kind_are_asked_for_their_storage_alone():
    asked = []

    class Listener(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            asked.append(function.__name__)
            return function(*args, **(kwargs or {}))

    state = {f"k{i}": torch.ones(i + 1) for i in range(5)}
    _nebula.plain_dump(state)
    with Listener():
        _nebula.plain_dump(state)
    assert asked == ["untyped_storage"] * 5


def test_a_preview_changes_nothing():
    state = collections.OrderedDict((f"layer{i}", torch.full((i,), i) if i % 3 else {"step": i}) for i in range(40))
    for name in ("layer7", "layer39", "layer20"):
        state.move_to_end(name, last=False)
    theirs, ours = pickles([state, dict(state), {}])
    assert theirs == ours


def test_the_plain_way_frees_everything_it_held():
    key, tensor = "key of a tensor"[:-1], torch.ones(3)
    values = [tensor, collections.OrderedDict({key: [tensor]}), {1: (key, 2.5)}]
    counts = [sys.getrefcount(value) for value in (key, tensor, values, *values)]
    for obj in (values, [*values, {1}]):  # begins as plain state, and is not plain at its end
        for _ in range(3):
            _nebula.plain_dump(obj)
    del obj
    assert counts == [sys.getrefcount(value) for value in (key, tensor, values, *values)]


def test_the_plain_way_makes_no_work_for_the_cycle_collector():
    state = {f"k{i}": torch.zeros(1) for i in range(2000)}
    _nebula.plain_dump(state)  # torch makes an object for each storage, once
    gc.collect()
    gc.disable()
    try:
        taken = _nebula.plain_dump(state)
        assert gc.get_count()[0] < 100
    finally:
        gc.enable()
    assert len(taken[1]) == 2000


def test_ranges_tell_what_was_put_into_them_and_hold_their_owners():
    owner, ranges = [], _nebula.Ranges()
    before = sys.getrefcount(owner)
    for i in range(300):
        ranges.append(4096 * i, i, owner)
    assert len(ranges) == 300 and ranges[0] == (None, 0, owner) and ranges[299] == (4096 * 299, 299, owner)
    assert [size for _, size, _ in ranges] == list(range(300))
    ranges.put_on(1, 299, 4096)
    assert ranges[299] == (None, 299, owner) and ranges[298][0] is not None
    assert sys.getrefcount(owner) == before + 300
    for number, index in ((0, 300), (0, -1), (-1, 0)):
        with pytest.raises(IndexError):
            ranges.put_on(number, index, 0)
    with pytest.raises(IndexError):
        ranges[300]
    with pytest.raises(TypeError):
        ranges.append("here", 1, owner)
    del ranges
    assert sys.getrefcount(owner) == before


def test_ranges_on_devices_are_told_apart_and_given_in_pieces():
    sizes, ranges = [10, 2500, 0, 1000, 1001], _nebula.Ranges()
    for index, size in enumerate(sizes):
        ranges.append(1 << 20, size, index)
    assert ranges.devices() == []
    for number, index in ((3, 0), (1, 1), (5, 2), (3, 3)):
        ranges.put_on(number, index, index * 10_000)
    assert ranges.devices() == [3, 1]  # the fifth has no bytes
    assert ranges.owners(-1, 0) == [(4, 4)] and ranges.owners(3, 11) == [(3, 3)] and ranges.owners(1, 2501) == []
    offsets = [64 * 100 * index for index in range(5)]

    def pieces(*wanted):
        return list(device.PIECE.iter_unpack(ranges.pieces(*wanted)))

    assert pieces(3, 1 << 30, offsets, 1, 999, 1000) == [(1 << 30, 0, 10)]
    assert pieces(3, 1 << 30, offsets, 11, 1 << 40, 1000) == [((1 << 30) + offsets[3], 30_000, 1000)]
    assert pieces(1, 0, offsets, 1, 1 << 40, 1000) == [(6400 + at, 10_000 + at, size) for at, size in ((0, 1000), (1000, 1000), (2000, 500))]
    assert pieces(0, 0, offsets, 1, 1 << 40, 1000) == []
    for wrong in ((3, 0, offsets[1:], 1, 5, 5), (3, 0, offsets, 0, 5, 5), (3, 0, offsets, 1, 5, 0)):
        with pytest.raises(ValueError, match="is needed"):
            ranges.pieces(*wrong)


def test_a_container_that_another_thread_changes_never_gives_a_broken_pickle():
    state = {f"k{i}": torch.full((2,), float(i)) for i in range(200)}
    done = threading.Event()

    def change():
        while not done.is_set():
            for i in range(200, 260):
                state[f"k{i}"] = torch.full((2,), float(i))
            for i in range(200, 260):
                del state[f"k{i}"]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            plain = _nebula.plain_dump(state)
            if plain is None:
                continue
            loaded = pickle_of_keys(bytes(plain[0]))
            assert all(loaded[f"k{i}"] == loaded["k0"] + i for i in range(200))
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


def pickle_of_keys(data):
    """Returns the pickle of the dict, with the number of its storage in the place of each tensor."""

    class Reader(pickle.Unpickler):
        def persistent_load(self, pid):
            return int(pid[2])

        def find_class(self, module, name):
            return (lambda storage, *rest: storage) if name == "_rebuild_tensor_v2" else super().find_class(module, name)

    return Reader(io.BytesIO(data)).load()


def test_a_pickler_shows_the_cycle_collector_each_reference_once() -> None:
    """One reference to the type that is shown twice makes the collector of a debug build of Python abort."""
    pickler = _nebula.TorchPickler(io.BytesIO(), lambda storage: None)
    assert gc.get_referents(pickler).count(_nebula.TorchPickler) == 1


def endless(way):
    """An object whose attribute access recurses without end, in one way or another."""

    def forever(self, *arguments):
        return forever(self, *arguments)

    names = {
        "__getattribute__": {"__getattribute__": lambda self, name: getattr(self, name)},
        "__class__": {"__class__": property(lambda self: self.__class__)},
        "__reduce_ex__": {"__reduce_ex__": forever},
        "__reduce__": {"__reduce__": forever},
        "__getstate__": {"__getstate__": lambda self: {"next": made()}},
        "__reduce_ex__, anew": {"__reduce_ex__": lambda self, protocol: (type(self), (made(),))},
        "a property": {"__getstate__": lambda self: self.deep, "deep": property(lambda self: self.deep)},
        "__getattr__": {"__getstate__": lambda self: self.deep, "__getattr__": lambda self, name: getattr(self, name)},
    }

    def made():
        return globals()["Endless"]()

    globals()["Endless"] = type("Endless", (), names[way] | {"__module__": __name__})  # found by its name, as pickle wants it
    return made()


# fault (Arguments of the caller): An object's attribute access or state recurses without end.
# result: `RecursionError`, as from `torch.save`. CPython's own pickler saves objects that are nested deeper than 200
# levels. The error for a part that cannot be pickled runs none of that part's `__repr__`, `items`, `__dict__`.
@pytest.mark.parametrize("way", ["__getattribute__", "__class__", "__reduce_ex__", "__reduce__", "__getstate__", "__reduce_ex__, anew", "a property", "__getattr__"])
@pytest.mark.parametrize("where", ["alone", "beside tensors"])
def test_an_object_that_recurses_without_end_is_an_error_as_in_torch_save(way, where):
    obj = endless(way) if where == "alone" else {"weights": torch.ones(3), "more": [endless(way)]}
    with pytest.raises(RecursionError):
        torch.save(obj, io.BytesIO())
    with pytest.raises(RecursionError):
        pickling.capture(obj, "model.pt")


# Each cannot be pickled; what its error would say of it recurses.
TELLS_NOTHING = {
    "__repr__ of a key": lambda refused: {type("K", (), {"__repr__": lambda self: repr(self), "__reduce_ex__": refused})(): 1},
    "__repr__ in a set": lambda refused: {type("K", (), {"__repr__": lambda self: repr(self), "__reduce_ex__": refused})()},
    "__dict__": lambda refused: type("K", (), {"__dict__": property(lambda self: self.__dict__), "__reduce_ex__": refused})(),
    "items": lambda refused: type("K", (dict,), {"items": lambda self: self.items(), "__reduce_ex__": refused})(a=1),
    "__iter__": lambda refused: type("K", (list,), {"__iter__": lambda self: iter(self), "__reduce_ex__": refused})([1]),
    "its class's __module__": lambda refused: type(
        "M", (type,), {"__module__": property(lambda kind: kind.__module__)})("K", (), {"__reduce_ex__": refused})(),
}  # fmt: skip


# fault: as test_an_object_that_recurses_without_end_is_an_error_as_in_torch_save
@pytest.mark.parametrize("what", list(TELLS_NOTHING))
def test_an_error_that_names_a_part_runs_nothing_of_it_that_could_recurse(what):
    def refused(self, protocol):
        raise TypeError("no")

    with pytest.raises(NebulaPicklingError, match="no"):
        pickling.capture({"a": [TELLS_NOTHING[what](refused)], "b": torch.ones(2)}, "model.pt")


def test_parts_that_are_made_anew_each_time_are_named_within_bounds():
    class Anew:
        def __getstate__(self):
            return {"bad": lambda: 0, "next": Anew()}

    with pytest.raises(NebulaPicklingError, match="bad"):
        pickling.capture(Anew(), "model.pt")


def nested(kind, depth):
    found = torch.ones(2)
    for _ in range(depth):
        found = {"a": found} if kind is dict else collections.OrderedDict(a=found) if kind is collections.OrderedDict else kind([found])
    return found


# fault: as test_an_object_that_recurses_without_end_is_an_error_as_in_torch_save
@pytest.mark.parametrize("kind", [dict, list, tuple, collections.OrderedDict])
def test_deeply_nested_objects_are_left_to_cpython_s_pickler_which_takes_less_stack(kind):
    """A program raises the limit of recursion for CPython's pickler. Nebula's C code needs more stack for each level, and could crash."""
    assert _nebula.plain_dump(nested(kind, 200)) is not None and _nebula.plain_dump(nested(kind, 201)) is None
    for depth in (200, 201, 240):
        obj = nested(kind, depth)
        assert bytes(pickling.capture(obj).pickle) == zipfile.ZipFile(torch_file(obj)).read("archive/data.pkl")
    with pytest.raises(RecursionError):
        pickling.capture(nested(kind, 100_000), "model.pt")


class Carrier:
    def __init__(self):
        self.t = torch.ones(1 << 10)


@pytest.mark.parametrize("make", [Carrier, lambda: torch.nn.Linear(3, 3), lambda: {"x": torch.ones(3, 3).to_sparse(), "h": Carrier()}])
def test_a_save_leaves_nothing_to_the_cycle_collector(make):
    gc.collect()
    gc.disable()
    try:
        value = make()
        kept = weakref.ref(value["h"] if isinstance(value, dict) else value)
        pickling.capture(value)
        del value
        assert kept() is None
    finally:
        gc.enable()


def content_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))


@pytest.mark.parametrize("how", ["a reduction of tensors", "a reduction of parameters", "tensors in copyreg", "ordered dicts in copyreg"])
def test_rules_of_the_program_for_what_is_pickled_here_are_applied_as_by_torch(nm, monkeypatch, how):
    state = collections.OrderedDict(t=torch.ones(2), p=torch.nn.Parameter(torch.zeros(2)))
    if how == "a reduction of tensors":
        monkeypatch.setattr(torch.Tensor, "__reduce_ex__", lambda self, protocol: (list, (self.tolist(),)))
    elif how == "a reduction of parameters":
        monkeypatch.setattr(torch.nn.Parameter, "__reduce_ex__", lambda self, protocol: (list, (self.tolist(),)))
    elif how == "tensors in copyreg":
        monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, lambda tensor: (list, (tensor.tolist(),)))
    else:
        monkeypatch.setitem(copyreg.dispatch_table, collections.OrderedDict, lambda found: (dict, (list(found.items()),)))
    file = io.BytesIO()
    torch.save(state, file)
    with nm.Checkpoint("x") as checkpoint:
        checkpoint.save("x.pt", state)
    assert content_of(checkpoint.read_bytes("x.pt")) == content_of(file.getvalue())
    with nm.Checkpoint("y") as checkpoint, pytest.raises(NebulaPicklingError, match=r"x\.pt\['f'\]"):
        checkpoint.save("x.pt", {"f": lambda: 1})
