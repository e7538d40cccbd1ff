"""load_into changes tensors in place, or refuses and changes nothing."""

from __future__ import annotations

import json
import os

import nebulaml
import pytest
import torch
from nebulaml import _nebula
from nebulaml._session import engine
from same import assert_same
from test_weights_shards import IMPORTED
from waiting import until


@pytest.fixture
def saved(nm):
    torch.manual_seed(1)
    state = {"w": torch.randn(4, 3), "blocks": [{"b": torch.arange(5)}, (torch.ones(2), "fixed")], "step": 7}
    checkpoint = nm.Checkpoint("into")
    checkpoint.save("s.pt", state)
    checkpoint.commit()
    return checkpoint, state


def empty():
    blocks = [{"b": torch.zeros(5, dtype=torch.long)}, (torch.zeros(2), "fixed")]
    return {"w": torch.zeros(4, 3), "blocks": blocks, "step": 0}


def test_values_go_into_the_tensors_that_are_there(saved):
    checkpoint, state = saved
    target = empty()
    weights, inner = target["w"], target["blocks"][1][0]
    assert checkpoint.load_into("s.pt", target) is target
    assert target["w"] is weights and target["blocks"][1][0] is inner
    assert_same(state, target)


def resized() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(5), lambda: torch.zeros(2, 2), lambda: torch.zeros(4, dtype=torch.float64), lambda: torch.zeros(1).expand(4), resized,
        of_inference, lambda: torch.zeros(4, device="meta"), lambda: torch.zeros(4).to_sparse(), lambda: torch.nn.UninitializedParameter(),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_after_two_that_do_is_refused_as_a_first_one(nm, make):
    """Plain tensors are compared in full once for each kind."""
    checkpoint = nm.Checkpoint("kinds")
    checkpoint.save("s.pt", [torch.ones(4), torch.ones(4), torch.ones(4)])
    checkpoint.commit()
    target = [torch.zeros(4), torch.zeros(4), make()]
    with pytest.raises(nebulaml.NebulaConfigError, match=r"\[2\]"):
        checkpoint.load_into("s.pt", target)
    assert not any(tensor.any() for tensor in target[:2])


def test_views_and_parameters_after_plain_tensors_get_the_values(nm):
    checkpoint, whole = nm.Checkpoint("kinds"), torch.zeros(16)
    checkpoint.save("s.pt", [torch.full((4,), float(value)) for value in range(1, 6)])
    checkpoint.commit()
    target = [torch.zeros(4), torch.zeros(4), whole[2:6], whole[8::2], torch.nn.Parameter(torch.zeros(4))]
    checkpoint.load_into("s.pt", target)
    assert [tensor.tolist() for tensor in target] == [[float(value)] * 4 for value in range(1, 6)]
    assert whole[[0, 1, 6, 7, 9, 11, 13, 15]].tolist() == [0.0] * 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("w"), r"\['w'\] is in the checkpoint only"),
        (lambda t: t.update(new=torch.ones(1)), r"\['new'\] is missing in the checkpoint"),
        (lambda t: t.update(w=torch.zeros(3, 4)), r"shape \(3, 4\) expected, the checkpoint has \(4, 3\)"),
        (lambda t: t.update(w=torch.zeros(4, 3, dtype=torch.float64)), r"torch.float64 expected"),
        (lambda t: t["blocks"].append(1), r"3 elements expected, the checkpoint has 2"),
        (lambda t: t.update(blocks={}), r"dict expected, the checkpoint has list"),
        (lambda t: t.update(w=torch.zeros(4, 3, device="meta")), r"\['w'\]: a tensor on the meta device holds no values"),
        (lambda t: t.update(w=torch.zeros(4, 1).expand(4, 3)), r"\['w'\]: several elements of an expanded tensor are one"),
    ],
)
def test_a_mismatch_is_named_and_changes_nothing(saved, change, words):
    checkpoint, _ = saved
    target = empty()
    change(target)
    with pytest.raises(ValueError, match=words):
        checkpoint.load_into("s.pt", target)
    assert target["blocks"] == {} or not target["blocks"][0]["b"].any()
    assert target["step"] == 0


def test_a_module_is_loaded_in_place(nm):
    source, target = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    checkpoint = nm.Checkpoint("module")
    checkpoint.save("m.pt", source.state_dict())
    checkpoint.commit()
    weight = target.weight
    checkpoint.load_into("m.pt", target)
    assert target.weight is weight and torch.equal(weight, source.weight)


class Scaled(torch.nn.Linear):
    """A module with a number that is not a buffer, as layers for 8-bit floats have."""

    def __init__(self, as_tensor):
        super().__init__(3, 3)
        self.scale, self.as_tensor = 1.0, as_tensor

    def get_extra_state(self):
        return torch.tensor([self.scale] * int(self.scale)) if self.as_tensor else self.scale

    def set_extra_state(self, state):
        self.scale = float(state[0] if self.as_tensor else state)


class Copied(torch.nn.Linear):
    """A module whose state_dict() holds copies."""

    def __init__(self, size=3):
        super().__init__(size, 3)
        self._register_state_dict_hook(lambda module, state, *rest: state.update({k: v.clone() for k, v in state.items()}))


@pytest.mark.parametrize("make", [lambda: Scaled(False), lambda: Scaled(True), Copied])
def test_a_module_gets_what_its_state_dict_does_not_share_with_it(nm, make):
    source, target = make(), make()
    source.scale = 7.0
    checkpoint = nm.Checkpoint("module")
    checkpoint.save("m.pt", {f"0.{key}": value for key, value in source.state_dict().items()})
    checkpoint.commit()
    weight = target.weight
    checkpoint.load_into("m.pt", torch.nn.Sequential(target))
    assert target.weight is weight and torch.equal(weight, source.weight)
    assert getattr(target, "scale", 7.0) == 7.0


def with_buffer(buffer):
    module = torch.nn.Linear(2, 2)
    module.register_buffer("buffer", buffer)
    return module


@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr"])
def test_a_module_gets_its_sparse_buffers_and_what_they_cannot_take_is_refused_before_anything_changes(nm, layout):
    sparse = getattr(torch.eye(3) * 5, layout)()
    source, target = with_buffer(sparse), with_buffer(getattr(torch.eye(3), layout)())
    with nm.Checkpoint("sparse") as checkpoint:
        checkpoint.save("m.pt", source.state_dict())
    checkpoint.load_into("m.pt", target)
    assert torch.equal(target.buffer.to_dense(), sparse.to_dense()) and torch.equal(target.weight, source.weight)
    for other in (torch.zeros(3, 3), getattr(torch.ones(3, 3), layout)()):
        target = with_buffer(other)
        before = target.weight.clone()
        if layout == "to_sparse_coo" and other.layout == sparse.layout:  # it holds as many elements as it is given
            checkpoint.load_into("m.pt", target)
            assert torch.equal(target.buffer.to_dense(), sparse.to_dense())
            continue
        with pytest.raises(ValueError, match=rf"\['buffer'\]: .*{'9 elements' if other.layout == sparse.layout else 'torch.strided'}"):
            checkpoint.load_into("m.pt", target)
        assert torch.equal(target.weight, before)


class Unreadable(torch.nn.Parameter):
    def untyped_storage(self):
        raise RuntimeError("a real failure")


def test_a_failure_to_look_at_a_parameters_memory_is_seen(saved):
    module = torch.nn.Linear(3, 3)
    module.weight = Unreadable(torch.ones(3, 3))
    with pytest.raises(RuntimeError, match="a real failure"):
        saved[0].load_into("s.pt", module)


def test_a_module_whose_state_dict_holds_copies_is_left_as_it_is_when_something_does_not_fit(nm):
    target = torch.nn.Sequential(Copied(4), Copied())
    checkpoint = nm.Checkpoint("module")
    checkpoint.save("m.pt", torch.nn.Sequential(Copied(), Copied()).state_dict())
    checkpoint.commit()
    before = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(ValueError, match=r"\['0.weight'\]: shape \(3, 4\) expected"):
        checkpoint.load_into("m.pt", target)
    assert_same(before, dict(target.state_dict()))


SHARDED = """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    nm.init(sys.argv[1], 0, on_error="raise")

    def model(seed):
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        return fully_shard(layers, mesh=mesh)

    def values(state):
        return {key: value.full_tensor().tolist() for key, value in state.items()}

    saved = model(1)
    whole = torch.arange(14.).view(7, 2)
    with nm.Checkpoint("sharded", -2) as checkpoint:
        checkpoint.save(f"model-{rank}.pt", saved.state_dict())
        checkpoint.save(f"both-{rank}.pt", {"w": distribute_tensor(whole, mesh, [Replicate()]), "o": distribute_tensor(whole, mesh, [Shard(0)])})
        checkpoint.save(f"whole-{rank}.pt", {"w": whole})
    checkpoint.wait("committed", 60)

    def refused(name, target):
        before = {key: value.clone() for key, value in target.items()}
        try:
            checkpoint.load_into(name, target)
        except ValueError as failure:
            assert all((target[key] == before[key]).all() for key in target)
            return str(failure)

    for into in (model(2), model(3).state_dict()):
        local = {key: value.to_local() for key, value in (into if isinstance(into, dict) else dict(into.named_parameters())).items()}
        assert checkpoint.load_into(f"model-{rank}.pt", into) is into
        state = into if isinstance(into, dict) else into.state_dict()
        assert values(state) == values(saved.state_dict())
        assert all(torch.equal(local[key], saved.state_dict()[key].to_local()) for key in local)  # in place
    assert "the file that this rank saved" in refused(f"model-{1 - rank}.pt", model(4).state_dict())
    replicated = {"w": distribute_tensor(whole * 0, mesh, [Replicate()]), "o": distribute_tensor(whole * 0, mesh, [Shard(0)])}
    assert "['o']: a shard" in refused(f"both-{1 - rank}.pt", replicated)
    checkpoint.load_into(f"both-{rank}.pt", replicated)
    assert replicated["w"].full_tensor().equal(whole) and replicated["o"].full_tensor().equal(whole)
    turned = {"w": distribute_tensor(whole * 0, mesh, [Shard(1)]), "o": distribute_tensor(whole * 0, mesh, [Replicate()])}
    assert all(f"['{key}']: a shard" in refused(f"both-{rank}.pt", turned) for key in turned)
    assert "a DTensor expected, the checkpoint has a whole" in refused(f"whole-{rank}.pt", {"w": replicated["w"]})
    assert "a whole tensor expected, the checkpoint has a DTensor" in refused(f"both-{rank}.pt", {"w": whole * 0, "o": whole * 0})
    dist.barrier()
    say("all")
    os._exit(0)
"""


@pytest.mark.nightly("frameworks/test_dcp.py::test_fsdp2_resumes_bit_for_bit_after_sigkill_and_stock_load_reads_it")
def test_dtensors_get_this_ranks_shard_in_place_and_no_other_ranks(place, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(place.port))
    ranks = []
    for name, value in {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        ranks.append(place.trainer(SHARDED, place.storage, modules=IMPORTED))
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["all\n"] * 2


def test_a_lazy_module_becomes_what_was_saved(nm):
    saved = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    checkpoint = nm.Checkpoint("lazy")
    checkpoint.save("m.pt", saved.state_dict())
    checkpoint.save("unknown.pt", torch.nn.LazyLinear(3).state_dict())
    checkpoint.commit()
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    checkpoint.load_into("m.pt", lazy)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in lazy.state_dict().items())
    assert lazy(torch.ones(2, 5)).shape == (2, 3)
    with pytest.raises(nebulaml.NebulaConfigError, match=r"\['0.weight'\]: a parameter that is not initialized holds no values: give the module"):
        checkpoint.load_into("m.pt", dict(torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.BatchNorm1d(3)).state_dict()))
    for target in (torch.nn.Linear(5, 3), torch.nn.LazyLinear(3)):
        with pytest.raises(nebulaml.NebulaConfigError, match="the checkpoint has a parameter that was not initialized"):
            checkpoint.load_into("unknown.pt", target)


@pytest.fixture
def cold(nm, place):
    """Saves an object so that only storage has it. Returns the checkpoint that a new agent finds."""

    def only_stored(obj):
        checkpoint = nm.Checkpoint("cold")
        checkpoint.save("s.pt", obj)
        checkpoint.commit()
        checkpoint.wait("durable", timeout=60)
        nm._shutdown()
        place.kill_agent()
        for file in place.memory.rglob("*"):
            if file.is_file():
                file.unlink()
        nm.init(str(place.storage), 0, 2, on_error="raise")
        return nm.get_checkpoint("cold")

    return only_stored


def memory_used():
    """Returns the bytes of the node's memory tier."""
    status = json.loads(engine.session().report(_nebula.REPORT_STATUS, None))
    return status["agent"]["memory_used"]


@pytest.mark.nightly
def test_a_file_that_only_storage_has_is_read_by_the_program_and_kept_at_the_second_request(cold):
    state = {"w": torch.randn(700_001), "s": 3}
    checkpoint = cold(state)
    until(lambda: memory_used() > 2 * 700_001 * 4)  # two images, made ahead for the next saves
    made = memory_used()
    loaded = checkpoint.load("s.pt")
    assert_same(state, loaded)
    assert memory_used() == made
    loaded["w"].zero_()
    assert_same(state, checkpoint.load("s.pt"))
    assert memory_used() > made + 700_001 * 4


def test_changes_to_a_lazy_map_stay_when_the_rest_comes_from_the_agent(cold, place):
    checkpoint = cold({"w": torch.ones(3 << 20)})
    mapped = checkpoint._map("s.pt", lazily=True)
    view = memoryview(mapped)
    mapped.fetch(0, 4096)
    view[1000:1004] = b"mine"
    lent = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}").endswith("cold/s.pt")]
    assert len(lent) == 1
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), int(lent[0]))  # reads fail here from now on, and not there
    mapped.fetch(0, len(view))
    assert bytes(view[1000:1004]) == b"mine"
    stored = (place.storage / "cold" / "s.pt").read_bytes()
    assert view[:1000] == stored[:1000] and view[1004:] == stored[1004:]


def test_bytes_from_storage_go_straight_into_all_kinds_of_tensors(cold):
    torch.manual_seed(2)
    big = torch.randn(3_000_000)  # spans chunks
    state = {
        "big": big,
        "view": big[5:100],
        "tied": big,
        "turned": torch.randn(30, 20).t(),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(1000).half(),
        "f8": torch.randn(64).to(torch.float8_e4m3fn),
        "conj": torch.randn(5, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(17)),
        "list": [torch.arange(9), "text"],
    }
    target = {
        **{name: torch.zeros_like(value) for name, value in state.items() if name != "list"},
        "turned": torch.zeros(20, 30),
        "list": [torch.zeros(9, dtype=torch.long), "other"],
    }
    version = target["big"]._version
    cold(state).load_into("s.pt", target)
    for name in state:
        if name != "list":
            assert torch.equal(state[name].float() if name == "f8" else state[name], target[name].float() if name == "f8" else target[name]), name
    assert target["list"][1] == "text" and torch.equal(target["list"][0], torch.arange(9))
    assert target["big"]._version > version  # autograd notices


def test_tensors_inside_a_value_that_is_replaced_have_their_values(cold):
    tied = torch.arange(3_000_000.0)
    target = {"later": None, "again": 0}
    cold({"later": {"w": tied, "l": [torch.ones(5)]}, "again": [tied[5:]]}).load_into("s.pt", target)
    assert torch.equal(target["later"]["w"], tied) and torch.equal(target["later"]["l"][0], torch.ones(5))
    assert torch.equal(target["again"][0], tied[5:])
    target["later"]["w"][6] = -1
    assert target["again"][0][1] == -1


def test_objects_that_look_at_values_while_they_are_built_get_them(cold):
    sparse = torch.sparse_coo_tensor([[0, 2], [1, 0]], [3.0, 4.0], (3, 2))
    target = {"sparse": torch.sparse_coo_tensor([[0, 2], [1, 0]], [0.0, 0.0], (3, 2)), "w": torch.zeros(3)}
    cold({"sparse": sparse, "w": torch.ones(3)}).load_into("s.pt", target)
    assert torch.equal(target["sparse"].to_dense(), sparse.to_dense()) and target["w"].all()


@pytest.mark.parametrize("way", ["load_into", pytest.param("load", marks=pytest.mark.nightly("test_a_flipped_byte_in_storage_is_found_on_either_way"))])
def test_a_flipped_byte_in_storage_is_found_on_either_way(cold, place, way):
    checkpoint = cold({"w": torch.zeros(3_000_000)})
    file = place.storage / "cold" / "s.pt"
    with open(file, "r+b") as stream:
        stream.seek(9_000_000)
        stream.write(b"\1")
    more = [] if way == "load" else [{"w": torch.ones(3_000_000)}]
    with pytest.raises(RuntimeError, match=r"s\.pt: damaged between byte 8388608 and") as caught:
        getattr(checkpoint, way)("s.pt", *more)
    assert type(caught.value).__name__ == "NebulaCorrupt"
    assert all(set(target["w"].unique().tolist()) <= {0.0, 1.0} for target in more)  # nothing of the damaged chunk


def test_loading_into_tensors_takes_no_second_copy_of_them(cold, place):
    cold({"w": torch.arange(32 << 20, dtype=torch.float32)})
    nebulaml._shutdown()
    output = place.run("""
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        target = {"w": torch.ones(32 << 20)}
        open("/proc/self/clear_refs", "w").write("5")  # the peak starts again here
        def peak(name): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
        before = peak("VmHWM")
        nm.get_checkpoint("cold").load_into("s.pt", target)
        say(peak("VmHWM") - before, torch.equal(target["w"], torch.arange(32 << 20, dtype=torch.float32)))
    """, place.storage)
    kib, same = output.split()[-2:]
    assert same == "True"
    assert int(kib) < 64 << 10, "128 MiB were loaded"


def test_a_container_that_contains_itself_is_filled(nm):
    def made(value):
        state = {"w": torch.full((3,), value), "list": [torch.full((2,), value)]}
        state["me"], state["list"] = state, [*state["list"], state]
        return state

    target = made(0.0)
    with nm.Checkpoint("cyclic") as checkpoint:
        checkpoint.save("x.pt", made(5.0))
    assert checkpoint.load_into("x.pt", target) is target
    assert target["me"] is target and (target["w"] == 5).all() and (target["list"][0] == 5).all() and target["list"][1] is target


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_are_named_and_nothing_changes(nm):
    def made(value):
        return {"w": torch.full((2,), value), "n": torch.nested.nested_tensor([torch.full((2,), value), torch.full((3,), value)])}

    target = made(0.0)
    with nm.Checkpoint("nested") as checkpoint:
        checkpoint.save("x.pt", made(5.0))
    with pytest.raises(nebulaml.NebulaConfigError, match=r"x\.pt\['n'\]: a nested tensor takes no values in place: load\(\) gives it"):
        checkpoint.load_into("x.pt", target)
    assert not target["w"].any() and (checkpoint.load("x.pt")["n"].unbind()[1] == 5).all()
