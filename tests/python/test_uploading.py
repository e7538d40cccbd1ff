"""Loads onto a fake device whose copies come late: all values are there on return, and each byte goes through pinned memory once."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict

import pytest
import torch
from fake_device import Device
from nebulaml.tensors import device, uploading

LARGE = (2 * uploading.BUFFER_BYTES + 4096) // 4


@pytest.fixture
def fake(place, nm):
    made = Device()
    device.use(made)
    nm.init(place.storage, 0, 2, on_error="raise")
    try:
        yield made
    finally:
        made.let_go()
        nm._shutdown()
        gc.collect()
        device.use(None)


def saved(nm, state):
    with nm.Checkpoint("global_step1", 1) as checkpoint:
        checkpoint.save("m.pt", state)
    return nm.get_latest_checkpoint()


def state_of(scale):
    large = torch.arange(LARGE, dtype=torch.float32).mul_(scale)
    small = OrderedDict((str(index), torch.full((index % 7,), float(index) * scale)) for index in range(100))
    return {"large": large, "view": large[5:10], "small": small, "parameter": torch.nn.Parameter(large[:9] * 2), "step": 3}


def equal(found, expected):
    assert found["large"].equal(expected["large"]) and found["view"].equal(expected["view"])
    assert list(found["small"]) == list(expected["small"]) and found["step"] == expected["step"]
    assert all(found["small"][name].equal(value) for name, value in expected["small"].items())
    assert torch.equal(found["parameter"], expected["parameter"])


def is_on(fake, tensor):
    return fake.place(tensor.untyped_storage()) is not None


def bytes_of(state):
    return sum(tensor.nbytes for tensor in (state["large"], state["parameter"], *state["small"].values()))


@pytest.mark.parametrize("weights_only", [True, pytest.param(False, marks=pytest.mark.nightly("test_a_load_returns_when_all_values_are_on_the_device"))])
@pytest.mark.parametrize("location", [*(pytest.param(one, marks=pytest.mark.nightly("test_a_load_returns_when_all_values_are_on_the_device")) for one in ("cuda", torch.device("cuda"))), "cuda:0"])
def test_a_load_returns_when_all_values_are_on_the_device(nm, fake, location, weights_only):
    state = state_of(1)
    checkpoint = saved(nm, state)
    fake.hold_up()
    threading.Timer(0.2, fake.let_go).start()
    found = checkpoint.load("m.pt", location, weights_only)
    equal(found, state)
    assert all(is_on(fake, tensor) for tensor in (found["large"], found["parameter"], *found["small"].values()) if tensor.numel())
    assert found["view"].data_ptr() == found["large"][5:].data_ptr() and isinstance(found["parameter"], torch.nn.Parameter)
    assert sum(fake.uploaded) == bytes_of(state) and fake.ended == len(fake.uploaded)


def test_load_into_fills_tensors_on_the_device_through_pinned_memory(nm, fake):
    state, target = state_of(1), state_of(0)
    checkpoint = saved(nm, state)
    for tensor in (target["large"], target["parameter"]):
        fake.put(tensor)
    version = target["large"]._version
    checkpoint.load_into("m.pt", target)
    equal(target, state)
    assert sum(fake.uploaded) >= state["large"].nbytes + state["parameter"].nbytes and target["large"]._version > version


@pytest.mark.parametrize("how", ["copy_fails", pytest.param("queue_fails", marks=pytest.mark.nightly("test_a_device_that_fails_ends_the_load_and_no_copy_runs_on"))])
def test_a_device_that_fails_ends_the_load_and_no_copy_runs_on(nm, fake, how):
    checkpoint = saved(nm, state_of(1))
    setattr(fake, how, True)
    with pytest.raises(RuntimeError, match="the fake device"):
        checkpoint.load("m.pt", "cuda")
    assert fake.ended == len(fake.uploaded) and not [each for each in threading.enumerate() if each.name == "nebula-upload"]


def test_without_a_device_named_tensors_stay_in_the_file_s_memory(nm, fake):
    state = state_of(1)
    equal(saved(nm, state).load("m.pt"), state)
    assert not fake.uploaded
