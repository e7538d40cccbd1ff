"""load(lazy=True): load_state_dict() reads a file straight into the program's tensors, and every other use meets ordinary tensors."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import mmap
import os
import pickle
import shutil
import threading
from multiprocessing.reduction import ForkingPickler

import nebulaml
import pytest
import torch
from nebulaml import _nebula
from nebulaml.tensors.lazy import LazyTensor
from same import assert_same


class Net(torch.nn.Module):
    """Three chunks: a tensor over several, small ones between, a buffer, and tied weights."""

    def __init__(self, fill=None):
        super().__init__()
        self.first = torch.nn.Linear(1500, 1200)
        self.norm = torch.nn.BatchNorm1d(1200)
        self.last = torch.nn.Linear(1500, 1200, bias=False)
        self.tied = torch.nn.Linear(1500, 1200, bias=False)
        self.tied.weight = self.last.weight
        self.register_buffer("halves", torch.arange(3000).to(torch.bfloat16))
        if fill is not None:
            with torch.no_grad():
                for tensor in self.state_dict().values():
                    tensor.fill_(fill)


def stored_file(place, name="s.pt"):
    return place.storage / "global_step1" / name


def evict(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def hold(path):
    """Reads a file into the page cache. It stays there while the returned map lives, as far as this user may lock memory."""
    with open(path, "r+b") as file:
        kept = mmap.mmap(file.fileno(), 0)
    ctypes.CDLL(None).mlock(ctypes.byref(ctypes.c_char.from_buffer(kept)), ctypes.c_size_t(len(kept)))
    kept.read()
    return kept


@pytest.fixture
def saved(nm, place):
    """Returns a function that saves an object, and gives the checkpoint when only storage has it, and the page cache if not `evicts`."""

    held = []

    def run(obj, evicts=False):
        checkpoint = nm.Checkpoint("global_step1")
        checkpoint.save("s.pt", obj)
        assert checkpoint.commit()
        checkpoint.wait("durable", 60)
        place.lose_memory()  # leaves the version to storage alone
        if evicts:
            evict(stored_file(place))
        else:
            held.append(hold(stored_file(place)))
        return nm.get_checkpoint("global_step1")

    return run


@pytest.fixture
def net():
    torch.manual_seed(1)
    return Net()


def lazy_count(state):
    return sum(type(tensor) is LazyTensor for tensor in state.values())


def test_a_model_gets_its_values_and_the_state_stays_unread(saved, net):
    state = saved(net.state_dict()).load("s.pt", weights_only=True, lazy=True)
    assert lazy_count(state) == 9 and type(state["norm.num_batches_tracked"]) is torch.Tensor
    other = Net(0)
    version = {name: parameter._version for name, parameter in other.named_parameters()}
    before = _nebula.read_bytes()
    other.load_state_dict(state)
    read, size = _nebula.read_bytes() - before, sum(tensor.nbytes for tensor in state.values() if type(tensor) is LazyTensor)
    assert_same(net.state_dict(), other.state_dict())
    assert read == size
    assert lazy_count(state) == 9 and other.tied.weight is other.last.weight
    assert all(parameter._version > version[name] for name, parameter in other.named_parameters())


def test_without_lazy_nothing_changes(saved, net):
    assert not lazy_count(saved(net.state_dict()).load("s.pt"))


def test_a_file_on_the_disk_gives_the_same_values(saved, net):
    other = Net(0)
    other.load_state_dict(saved(net.state_dict(), evicts=True).load("s.pt", lazy=True))
    assert_same(net.state_dict(), other.state_dict())


def test_a_version_in_memory_is_mapped_as_usual(nm, net):
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("s.pt", net.state_dict())
    state = checkpoint.load("s.pt", lazy=True)
    assert not lazy_count(state)
    assert_same(net.state_dict(), state)


def test_each_other_use_makes_the_same_object_an_ordinary_tensor(saved):
    weights = torch.randn(3, 100_000)
    uses = {
        "add": lambda t: t + 1,
        "in place": lambda t: t.mul_(1),
        "numpy": lambda t: t.numpy(),
        "index": lambda t: t[1],
        "list": lambda t: torch.stack([t, t]),
        "address": lambda t: t.data_ptr(),
        "storage": lambda t: t.untyped_storage(),
        "data": lambda t: t.data,
        "detach": lambda t: t.detach(),
        "text": repr,
        "grad": lambda t: t.requires_grad_(),
        "to": lambda t: t.to(torch.float32),
        "dlpack": lambda t: t.__dlpack__(),
        "pickle": lambda t: pickle.dumps(t),
        "deepcopy": copy.deepcopy,
        "foreach": lambda t: torch._foreach_add_([t], 0),
        "operator": lambda t: torch.ops.aten.add.Tensor(t, 1),
    }
    checkpoint = saved({name: weights + at for at, name in enumerate(uses)})
    state = checkpoint.load("s.pt", lazy=True)
    for at, (name, use) in enumerate(uses.items()):
        tensor = state[name]
        assert type(tensor) is LazyTensor and tensor.shape == (3, 100_000) and tensor.dtype == torch.float32 and len(tensor) == 3, name
        assert not tensor.is_meta and tensor.stride() == (100_000, 1) and type(tensor) is LazyTensor, name
        use(tensor)
        assert type(tensor) is torch.Tensor and torch.equal(tensor, weights + at) and state[name] is tensor, name


def test_code_past_torchs_hooks_sees_the_values_or_an_error(saved):
    weights = torch.randn(3, 700_000)
    tensor = saved({"w": weights}).load("s.pt", lazy=True)["w"]
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(tensor + 1, weights + 1) and type(tensor) is LazyTensor
        with contextlib.suppress(RuntimeError):  # torch 2.4 returns 0
            assert tensor.data_ptr() == 0
        tensor.add_(1)
    target = torch.zeros(3, 700_000)
    assert torch.equal(target.copy_(tensor), weights + 1)
    assert torch.equal(tensor, weights + 1) and type(tensor) is torch.Tensor


def test_views_of_one_storage_stay_views_of_one(saved):
    whole = torch.arange(2_000_000.0)
    state = {"whole": whole, "view": whole[1_000_000:], "turned": whole.view(1000, 2000).t(), "same": whole}
    found = saved(state).load("s.pt", lazy=True)
    assert found["same"] is found["whole"]
    target = torch.zeros(1_000_000)
    target.copy_(found["view"])  # read straight
    assert torch.equal(target, whole[1_000_000:]) and type(found["view"]) is LazyTensor
    found["whole"][1_500_000] = -1  # reads, and changes
    target.copy_(found["view"])
    assert target[500_000] == -1 and found["view"][500_000] == -1 and found["turned"][0, 750] == -1


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(1200, 1500, dtype=torch.float64),
        torch.zeros(1500, 1200).t(),
        torch.zeros(2, 1200, 1500),
        torch.zeros(1200, 3000)[:, ::2],
        torch.zeros(1200, 1500, dtype=torch.bfloat16),
    ],
    ids=["cast", "turned", "broadcast", "strided", "narrower"],
)
def test_a_target_of_another_kind_gets_the_same_values(saved, target):
    weights = torch.randn(1200, 1500)
    state = saved({"w": weights}).load("s.pt", lazy=True)
    target.copy_(state["w"])
    assert torch.equal(target, torch.zeros_like(target).copy_(weights))


def test_torchs_own_refusals_stay(saved):
    state = saved({"w": torch.randn(2000, 1000)}).load("s.pt", lazy=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        torch.zeros(2000, 1000, requires_grad=True).copy_(state["w"])
    with pytest.raises(RuntimeError, match="must match"):
        torch.zeros(3).copy_(state["w"])


@pytest.mark.nightly("test_a_model_gets_its_values_and_the_state_stays_unread")
def test_assign_makes_parameters_of_the_meta_device_real(saved, net):
    state = saved(net.state_dict()).load("s.pt", lazy=True)
    with torch.device("meta"):
        other = Net()
    other.load_state_dict(state, assign=True)
    assert all(type(parameter) is torch.nn.Parameter for parameter in other.parameters())
    assert_same(dict(net.state_dict()), dict(other.state_dict()))


def test_an_optimizer_goes_on_exactly(saved):
    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 1500)).square().mean().backward()
            optimizer.step()

    torch.manual_seed(1)
    model = torch.nn.Linear(1500, 1200)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, optimizer, 2)
    checkpoint = saved({"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())})
    train(model, optimizer, 2)
    again = torch.nn.Linear(1500, 1200)
    resumed = torch.optim.AdamW(again.parameters(), amsgrad=True)
    state = checkpoint.load("s.pt", lazy=True)
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    train(again, resumed, 2)
    assert_same(model.state_dict(), again.state_dict())
    assert_same(optimizer.state_dict(), resumed.state_dict())


@pytest.mark.nightly("test_a_target_of_another_kind_gets_the_same_values")
def test_objects_of_the_program_and_other_places_are_loaded_as_usual(saved):
    parameter = torch.nn.Parameter(torch.randn(1000, 2000))
    state = {"w": torch.randn(1000, 2000), "storage": torch.randn(2_000).untyped_storage(), "parameter": parameter}
    checkpoint = saved(state)
    found = checkpoint.load("s.pt", lazy=True)
    assert type(found["w"]) is torch.Tensor and type(found["parameter"]) is torch.nn.Parameter
    assert torch.equal(found["w"], state["w"]) and bytes(found["storage"]) == bytes(state["storage"])


def test_a_function_for_map_location_sees_no_memory_without_values(saved):
    weights = torch.randn(1000, 2000)
    checkpoint = saved({"w": weights})
    seen = []

    def stay(storage, location):
        seen.append(storage.device.type)
        return storage

    assert type(checkpoint.load("s.pt", map_location=stay, lazy=True)["w"]) is LazyTensor and seen == ["meta"]
    cloned = checkpoint.load("s.pt", map_location=lambda storage, location: storage.clone(), lazy=True)["w"]
    assert type(cloned) is torch.Tensor and torch.equal(cloned, weights)
    assert checkpoint.load("s.pt", map_location="meta", lazy=True)["w"].is_meta


@pytest.mark.nightly("test_each_other_use_makes_the_same_object_an_ordinary_tensor")
def test_a_state_is_saved_again_and_sent_to_other_processes(saved, nm):
    weights = torch.randn(1000, 2000)
    checkpoint = saved({"w": weights})
    for save in (lambda state, file: torch.save(state, file), lambda state, file: file.write(pickle.dumps(state))):
        file = io.BytesIO()
        save(checkpoint.load("s.pt", lazy=True), file)
        file.seek(0)
        loaded = torch.load(file) if file.getvalue()[:2] == b"PK" else pickle.load(file)
        assert torch.equal(loaded["w"], weights)
    with nm.Checkpoint("global_step2") as second:
        second.save("again.pt", checkpoint.load("s.pt", lazy=True))
        second.save_bytes("bytes", [checkpoint.load("s.pt", lazy=True)["w"]])
    assert torch.equal(second.load("again.pt")["w"], weights)
    assert second.read_bytes("bytes") == weights.numpy().tobytes()
    state = checkpoint.load("s.pt", lazy=True)
    sent = ForkingPickler.dumps(state["w"])
    assert len(sent) < 10_000 and torch.equal(pickle.loads(bytes(sent)), weights)


# A version is removed from storage while a program has loaded it lazily: the open file still has its bytes.
def test_a_version_that_is_removed_meanwhile_is_still_read(saved, net, place):
    state = saved(net.state_dict()).load("s.pt", lazy=True)
    shutil.rmtree(place.storage / "global_step1")
    place.kill_agent()
    other = Net(0)
    other.load_state_dict(state)
    assert_same(net.state_dict(), other.state_dict())


# A byte of a file changes while a program has loaded it lazily: load_state_dict raises, and names the parameter and the file.
def test_a_damaged_tensor_is_named_and_no_damaged_value_is_seen(saved, net, place):
    state = saved(net.state_dict()).load("s.pt", lazy=True)
    with open(stored_file(place), "r+b") as file:
        data = file.read()
        at = data.index(net.last.weight.detach().numpy().tobytes()) + 2_000_000
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    other = Net(7)
    with pytest.raises(RuntimeError, match=r"last.weight[^$]*s\.pt"):
        other.load_state_dict(state)
    assert torch.equal(other.first.bias, net.first.bias)
    right = other.last.weight == net.last.weight
    assert bool((right | (other.last.weight == 0) | (other.last.weight == 7)).all())
    with pytest.raises(nebulaml.NebulaCorrupt, match=r"s\.pt"):
        state["last.weight"].sum()
    assert type(state["last.weight"]) is LazyTensor


# The file changes after a tensor was used: the program's values stay.
def test_values_that_were_read_stay(saved, place):
    weights = torch.randn(1000, 2000)
    state = saved({"w": weights}).load("s.pt", lazy=True)
    state["w"].add_(1)
    stored_file(place).write_bytes(bytes(stored_file(place).stat().st_size))
    assert torch.equal(torch.zeros(1000, 2000).copy_(state["w"]), weights + 1)


# The process forks while another thread reads: the child has a lock of its own.
@pytest.mark.nightly
def test_a_forked_child_reads_by_itself(saved, net):
    state = saved(net.state_dict()).load("s.pt", lazy=True)
    lock = state["first.weight"]._lazy[0].lock()
    held, go = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    pid = os.fork()
    if not pid:
        torch.set_num_threads(1)  # OpenMP's threads do not exist here
        other = Net(0)
        other.load_state_dict(state)
        same = all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))
        os._exit(0 if same and torch.equal(state["first.weight"], net.first.weight) else 1)
    go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(state["first.weight"], net.first.weight)


@pytest.mark.nightly
def test_two_threads_use_one_state(saved, net):
    checkpoint = saved(net.state_dict())
    for _ in range(5 if os.environ.get("NEBULA_TEST_NIGHTLY") else 2):
        state = checkpoint.load("s.pt", lazy=True)
        others, failures = [Net(0) for _ in range(4)], []

        def run(other, state=state, failures=failures, first=others[0]):
            try:
                if other is first:
                    for value in state.values():
                        value.sum()
                other.load_state_dict(state)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=run, args=(other,)) for other in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        for other in others:
            assert_same(net.state_dict(), other.state_dict())
