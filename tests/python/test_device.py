"""Device memory, on a fake device whose copies come late: the saved values are those at the time of the save, and training does not wait."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import threading
import time

import pytest
import torch
from fake_device import SGD, Device
from nebulaml import _nebula
from nebulaml._session import engine
from nebulaml.errors import NebulaError, NebulaUnavailable
from nebulaml.tensors import device
from waiting import until

LARGE = 3 * (1 << 20) // 4 + 5  # elements: more than SMALL_BYTES


@pytest.fixture
def fake(place):
    made = Device()
    device.use(made)
    try:
        yield made
    finally:
        made.let_go()
        import nebulaml

        nebulaml._shutdown()
        gc.collect()
        device.use(None)


def on(fake, *shape, value=1.0):
    return fake.put(torch.full(shape, value))


def test_without_overlap_the_file_is_whole_when_save_returns(nm, fake):
    state = {"large": on(fake, LARGE), "small": on(fake, 7), "host": torch.arange(9), "step": 3}
    state["view"] = state["large"][5:10]
    checkpoint = nm.Checkpoint("global_step1")
    fake.enqueue(lambda: state["large"].add_(1))  # queued before the save: it belongs to the values
    fake.hold_up()
    threading.Timer(0.2, fake.let_go).start()
    assert checkpoint.save("m.pt", state)
    state["large"].fill_(-1)
    state["small"].fill_(-1)
    state["host"].fill_(-1)
    assert checkpoint.commit()
    loaded = checkpoint.load("m.pt")
    assert loaded["large"].eq(2).all() and loaded["small"].eq(1).all() and loaded["step"] == 3
    assert loaded["host"].equal(torch.arange(9))
    assert loaded["view"].data_ptr() == loaded["large"][5:].data_ptr()


@pytest.mark.parametrize("is_refused", [False, pytest.param(True, marks=pytest.mark.nightly("test_a_signal_handler_that_saves_while_its_thread_waits_for_a_device_is_told_so"))], ids=["registered", "staged"])
def test_a_signal_handler_that_saves_while_its_thread_waits_for_a_device_is_told_so(nm, fake, is_refused, caplog):
    """The handler cannot wait for the save that it interrupts: the wait would never end."""
    nm.init(on_error="warn")
    state = {"large": on(fake, LARGE)}
    fake.refuses = is_refused
    first, second = nm.Checkpoint("global_step1"), nm.Checkpoint("global_step2")
    assert second.save("m.pt", {"host": torch.ones(3)})
    answers = []

    def handler(number, frame):
        fake.let_go()
        answers.extend([second.save("n.pt", state), second.commit(), nm.flush_persistence("global_step2")])
        for question in (second.wait, lambda: second.state, lambda: second.load("m.pt"), nm.list_checkpoints):
            with pytest.raises(NebulaUnavailable, match="interrupted a save"):
                question()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        fake.hold_up()
        fake.at_wait.append(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        assert first.save("m.pt", state) and first.commit()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert answers == [False, False, False] and "interrupted a save" in caplog.text
    assert first.load("m.pt")["large"].eq(1).all()
    assert nm.Checkpoint("global_step3").save("m.pt", state)  # nothing is left of it


def test_dcp_leaves_to_the_device_what_it_copies_by_itself(nm, monkeypatch):
    from nebulaml import dcp
    from nebulaml.tensors import dense

    monkeypatch.setattr(device, "covers", lambda storage: True)
    monkeypatch.setattr(dense, "refusal", lambda tensor: None)
    monkeypatch.setattr(dense, "_dense_kinds", set())
    tensor = torch.empty(3, 4, device="meta")  # it stands for a device: it has no copy on the host
    (before, part, after), size = dcp._item_parts(tensor.t(), "w")
    assert part.device.type == "meta" and part.is_contiguous() and size == len(before) + 48 + len(after)


def test_dcp_saves_device_memory_and_the_tensors_beside_it(nm, fake, place):
    import torch.distributed.checkpoint as stock
    from nebulaml import dcp

    state = {"large": on(fake, LARGE), "turned": on(fake, 3, 5).t(), "host": torch.arange(9)}
    stock.save(state, storage_writer=dcp.NebulaStorageWriter(place.storage / "tag1"), no_dist=True)
    assert sorted(size for _, size in fake.copied)[-1] == LARGE * 4
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    stock.load(found, storage_reader=dcp.NebulaStorageReader(place.storage / "tag1"), no_dist=True)
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.nightly
def test_a_session_that_goes_while_an_exception_passes_leaves_it_alone(nm, fake):
    held = [nm.Checkpoint("global_step1")]
    assert held[0].save("m.pt", {"large": on(fake, LARGE)}) and held[0].commit()
    nm._session.engine.default._clear()  # the checkpoint is the last that holds the session
    assert fake.registered
    with pytest.raises(ZeroDivisionError):
        (held.pop(), 1 / 0)
    assert not fake.registered


def test_the_file_is_the_one_that_torch_save_makes(nm, fake, tmp_path):
    state = {"a": [on(fake, 3, 4), on(fake, LARGE, value=2.0)], "b": torch.ones(2, 2)}
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", state, overlap=True)
    checkpoint.commit()
    (tmp_path / "m.pt").write_bytes(checkpoint.read_bytes("m.pt"))
    loaded = torch.load(tmp_path / "m.pt")
    assert all(ours.equal(theirs) for ours, theirs in zip(loaded["a"], state["a"], strict=True))


@pytest.mark.nightly("test_the_file_is_the_one_that_torch_save_makes")
def test_small_storages_are_copied_first_and_large_ones_in_chunks(nm, fake, monkeypatch):
    monkeypatch.setattr(device, "CHUNK_BYTES", 1 << 20)
    large, small = on(fake, LARGE), on(fake, 7)
    nm.Checkpoint("global_step1").save("m.pt", {"large": large, "small": small})
    assert fake.copied[0] == (small.data_ptr(), 28)
    assert [size for _, size in fake.copied[1:]] == [1 << 20, 1 << 20, 1 << 20, 20]


def test_with_overlap_save_and_commit_return_at_once_and_the_next_step_waits_on_the_device(nm, fake):
    parameter = torch.nn.Parameter(on(fake, LARGE))
    optimizer = SGD([parameter], fake)
    fake.hold_up()
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save("m.pt", {"p": parameter.data}, overlap=True)
    assert checkpoint.commit()
    optimizer.step()  # returns, although nothing was copied yet
    optimizer.step()
    assert checkpoint.state == "capturing"
    assert parameter.eq(1).all()
    fake.let_go()
    checkpoint.wait("committed", timeout=60)
    fake.synchronize()
    assert parameter.eq(-1).all()
    assert checkpoint.load("m.pt")["p"].eq(1).all()


@pytest.mark.nightly("test_with_overlap_save_and_commit_return_at_once_and_the_next_step_waits_on_the_device")
def test_without_the_gate_the_late_copy_would_read_the_step(nm, fake, monkeypatch):
    """Shows that the fake device notices a missing wait: this is the test above without the gate."""
    monkeypatch.setattr(device.Filler, "hold", lambda self: None)
    parameter = torch.nn.Parameter(on(fake, LARGE))
    optimizer = SGD([parameter], fake)
    fake.hold_up()
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", {"p": parameter.data}, overlap=True)
    checkpoint.commit()
    optimizer.step()
    fake.synchronize()
    fake.let_go()
    checkpoint.wait("committed", timeout=60)
    assert checkpoint.load("m.pt")["p"].eq(0).all()


class Graph:
    """Like torch.cuda.CUDAGraph: the work of a step, without the call of its optimizer."""

    def __init__(self, fake, work):
        self.fake, self.work = fake, work

    def replay(self):
        self.fake.enqueue(self.work)


@pytest.mark.nightly("test_with_overlap_save_and_commit_return_at_once_and_the_next_step_waits_on_the_device")
def test_a_captured_step_takes_no_wait_and_its_replay_waits(nm, fake):
    device._devices.steps.gate_replays(Graph)
    parameter = torch.nn.Parameter(on(fake, LARGE))
    optimizer = SGD([parameter], fake)
    fake.hold_up()
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save("m.pt", {"p": parameter.data}, overlap=True) and checkpoint.commit()
    fake.records = True
    fake.enqueue, enqueue = (lambda work: None), fake.enqueue  # captured work does not run
    optimizer.step()
    fake.enqueue, fake.records = enqueue, False
    Graph(fake, lambda: parameter.data.fill_(-1)).replay()
    time.sleep(0.05)
    assert parameter.eq(1).all() and checkpoint.state == "capturing"
    fake.let_go()
    checkpoint.wait("committed", timeout=60)
    fake.synchronize()
    assert parameter.eq(-1).all() and checkpoint.load("m.pt")["p"].eq(1).all()


class WrappedOptimizer:
    """Like DeepSpeed's optimizer: it is not a torch optimizer, but calls one for its own tensors."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


@pytest.mark.nightly("test_with_overlap_save_and_commit_return_at_once_and_the_next_step_waits_on_the_device")
def test_an_optimizer_within_a_library_waits_too(nm, fake):
    parameter = torch.nn.Parameter(on(fake, LARGE))
    optimizer = WrappedOptimizer(SGD([parameter], fake))
    fake.hold_up()
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", {"p": parameter.data}, overlap=True)
    optimizer.step()
    fake.let_go()
    checkpoint.commit()
    checkpoint.wait("committed", timeout=60)
    assert checkpoint.load("m.pt")["p"].eq(1).all()


def test_with_overlap_what_a_forward_pass_changes_is_exact_when_small(nm, fake):
    mean, count = on(fake, 64), fake.put(torch.tensor(5))
    large = on(fake, LARGE)
    fake.hold_up()
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", {"large": large, "mean": mean, "count": count}, overlap=True)
    fake.enqueue(lambda: (mean.add_(1), count.add_(1)))  # the next forward pass, before any step
    checkpoint.commit()
    fake.let_go()
    checkpoint.wait("captured", timeout=60)
    large.zero_()  # from here on anything may change
    loaded = checkpoint.load("m.pt")
    assert loaded["mean"].eq(1).all() and loaded["count"] == 5 and loaded["large"].eq(1).all()


@pytest.mark.nightly("test_with_overlap_what_a_forward_pass_changes_is_exact_when_small")
def test_the_small_storages_of_a_file_wait_for_no_large_ones_of_the_file_before(nm, fake):
    """Otherwise only the last file of a checkpoint would overlap with training."""
    fake.hold_up(least=device.SMALL_BYTES)
    checkpoint = nm.Checkpoint("global_step1")
    for number in range(3):
        assert checkpoint.save(f"{number}.pt", [on(fake, LARGE, value=float(number)), on(fake, 7)], overlap=True)
    reached = fake.current.event()
    assert reached.done.wait(60), "the program waits for a large copy"
    assert fake.ended == 3
    fake.let_go()
    assert checkpoint.commit()
    checkpoint.wait("committed", timeout=60)
    assert all(checkpoint.load(f"{number}.pt")[0].eq(number).all() for number in range(3))


@pytest.mark.nightly("test_with_overlap_what_a_forward_pass_changes_is_exact_when_small")
def test_host_memory_is_fixed_on_return_with_overlap(nm, fake):
    state = {"large": on(fake, LARGE), "host": torch.ones(LARGE), "few": torch.ones(3)}
    fake.hold_up()
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", state, overlap=True)
    state["host"].fill_(-1)
    state["few"].fill_(-1)
    fake.let_go()
    checkpoint.commit()
    checkpoint.wait("committed", timeout=60)
    loaded = checkpoint.load("m.pt")
    assert loaded["host"].eq(1).all() and loaded["few"].eq(1).all()


@pytest.mark.nightly("test_the_end_of_the_program_waits_for_an_overlapped_copy")
def test_flush_waits_for_an_overlapped_copy(nm, fake, place):
    tensor = on(fake, LARGE)
    fake.hold_up()
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", {"t": tensor}, overlap=True)
    checkpoint.commit()
    threading.Timer(0.2, fake.let_go).start()
    nm.flush_persistence()
    assert torch.load(place.storage / "global_step1" / "m.pt")["t"].equal(tensor)


def test_each_image_is_registered_once_and_given_back_before_its_mapping_goes(nm, fake):
    tensor = on(fake, LARGE)
    for step in range(8):
        checkpoint = nm.Checkpoint(f"global_step{step}")
        checkpoint.save("m.pt", {"t": tensor}, overlap=step % 2 == 1)
        checkpoint.commit()
        checkpoint.wait("durable", timeout=60)
    assert 0 < len(fake.registrations) < 8
    assert len(set(fake.registrations)) == len(fake.registrations)
    assert fake.registered
    del checkpoint
    nm._shutdown()
    gc.collect()
    assert not fake.registered


def registered(fake, count):
    until(lambda: len(fake.registered) == count, 60)
    return set(fake.registered)


@pytest.mark.nightly("test_each_image_is_registered_once_and_given_back_before_its_mapping_goes")
def test_images_of_a_foretold_file_are_registered_before_its_first_save(nm, fake):
    state = {"t": on(fake, LARGE)}
    nm.prepare(state)
    ready = registered(fake, 2)
    for step in range(2):
        fake.enqueue(lambda: state["t"].add_(1))
        checkpoint = nm.Checkpoint(f"global_step{step}")
        assert checkpoint.save("m.pt", state) and checkpoint.commit()
        assert set(fake.registrations) == ready, "a save registered an image"
        assert checkpoint.load("m.pt")["t"].eq(step + 2).all()
    del checkpoint
    nm._shutdown()
    gc.collect()
    assert not fake.registered


def test_images_for_host_memory_are_not_registered(nm, fake):
    nm.prepare({"t": torch.ones(LARGE)})
    until(lambda: json.loads(engine.session().report(_nebula.REPORT_STATUS, None))["agent"]["memory_used"] >= 2 * 4 * LARGE, 60)
    time.sleep(0.3)
    assert not fake.registrations


@pytest.mark.nightly("test_each_image_is_registered_once_and_given_back_before_its_mapping_goes")
def test_a_save_waits_for_the_registration_of_its_image(nm, fake, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    register = fake.register

    def slowly(*image):
        begun.set()
        assert may_end.wait(30)
        return register(*image)

    monkeypatch.setattr(fake, "register", slowly)
    state = {"t": on(fake, LARGE)}
    nm.prepare(state)
    assert begun.wait(30)
    threading.Timer(0.2, may_end.set).start()
    for step in range(2):
        checkpoint = nm.Checkpoint(f"global_step{step}")
        assert checkpoint.save("m.pt", state) and checkpoint.commit() and checkpoint.load("m.pt")["t"].eq(1).all()
    assert may_end.is_set() and len(set(fake.registrations)) == len(fake.registrations)


@pytest.mark.nightly
def test_a_little_memory_is_enough_if_registering_is_refused_and_the_log_says_so_once(nm, fake, monkeypatch, caplog):
    monkeypatch.setattr(device, "CHUNK_BYTES", 1 << 18)
    fake.refuses = True
    tensor = fake.put(torch.arange(LARGE, dtype=torch.float32))
    with caplog.at_level(logging.WARNING, "nebulaml"):
        for step in range(3):
            checkpoint = nm.Checkpoint(f"global_step{step}")
            assert checkpoint.save("m.pt", {"t": tensor, "few": on(fake, 3)}, overlap=True)
            tensor.add_(1)  # nothing is left to be waited for
            assert checkpoint.commit()
            checkpoint.wait("committed", timeout=60)
            assert checkpoint.load("m.pt")["t"].equal(tensor - 1)
    assert sum("cannot be registered" in record.message for record in caplog.records) == 1
    assert sum(fake.registered.values()) == device.STAGING_COUNT << 18
    assert len(fake.registrations) <= 3, "an image was tried more than once"


def test_a_failed_copy_fails_an_overlapped_version_and_nothing_else(nm, fake, caplog):
    parameter = torch.nn.Parameter(on(fake, LARGE))
    optimizer = SGD([parameter], fake)
    nm.init(on_error="warn")
    fake.hold_up()
    fake.copy_fails = True
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save("m.pt", {"p": parameter.data}, overlap=True)
    checkpoint.commit()
    optimizer.step()
    fake.let_go()
    with pytest.raises(NebulaError, match="the fake device failed"):
        checkpoint.wait("committed", timeout=60)
    assert checkpoint.state == "failed" and "the fake device failed" in checkpoint.error
    assert "is lost" in caplog.text
    fake.synchronize()
    assert parameter.eq(0).all()  # training went on

    fake.copy_fails, fake.side.failure = False, None
    with nm.Checkpoint("global_step2") as later:
        later.save("m.pt", {"p": parameter.data}, overlap=True)
    later.wait("committed", timeout=60)
    assert nm.get_latest_checkpoint().tag == "global_step2"
    assert later.load("m.pt")["p"].eq(0).all()


@pytest.mark.parametrize(("how", "overlap"), [("copy_fails", False), pytest.param("queue_fails", False, marks=pytest.mark.nightly("test_a_save_that_a_device_refuses_fails_and_the_next_one_does_not")), ("queue_fails", True)])
def test_a_save_that_a_device_refuses_fails_and_the_next_one_does_not(nm, fake, how, overlap):
    nm.init(on_error="warn")
    state = {"a": on(fake, LARGE), "b": on(fake, LARGE, value=2.0)}
    setattr(fake, how, True)
    fake.hold_up()
    threading.Timer(0.2, fake.let_go).start()
    checkpoint = nm.Checkpoint("global_step1")
    assert not checkpoint.save("m.pt", state, overlap=overlap)
    assert fake.ended == len(fake.copied) > 0  # the image went back to the agent: nothing may write there
    assert "fake device" in checkpoint.error
    assert not checkpoint.commit()
    setattr(fake, how, False)
    fake.side.failure = None
    with nm.Checkpoint("global_step2") as later:
        assert later.save("m.pt", state, overlap=overlap)
    assert later.load("m.pt")["b"].eq(2).all()
    assert not device._devices.steps.pending


def test_a_step_that_cannot_wait_fails_the_version_and_not_the_step(nm, fake):
    def hold(place, event):
        raise RuntimeError("no more events")

    parameter = torch.nn.Parameter(on(fake, LARGE))
    optimizer = SGD([parameter], fake)
    fake.hold_up()
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", {"p": parameter.data}, overlap=True)
    checkpoint.commit()
    fake.hold = hold
    optimizer.step()
    fake.let_go()
    with pytest.raises(NebulaError, match="no more events"):
        checkpoint.wait("committed", timeout=60)


@pytest.mark.nightly
def test_an_interrupt_within_a_save_is_an_interrupt(nm, fake):
    def copy(*arguments):
        raise KeyboardInterrupt

    fake.copy = copy
    checkpoint = nm.Checkpoint("global_step1")
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save("m.pt", {"t": on(fake, LARGE)}, overlap=True)


def test_an_agent_that_dies_under_an_overlapped_copy_is_replaced_and_gets_the_file(nm, fake, place):
    tensor = on(fake, LARGE)
    fake.hold_up()
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", {"t": tensor}, overlap=True)
    checkpoint.commit()
    place.kill_agent()
    fake.let_go()
    nm.flush_persistence()
    assert torch.load(place.storage / "global_step1" / "m.pt")["t"].eq(1).all()


def test_parts_on_a_device_are_copied_as_bytes(nm, fake):
    tensor = fake.put(torch.arange(100, dtype=torch.int32))
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save_bytes("raw", [b"head", tensor[10:20], bytearray(b"tail")])
    checkpoint.commit()
    assert checkpoint.read_bytes("raw") == b"head" + tensor[10:20].numpy().tobytes() + b"tail"


CODE = """
    sys.path.insert(0, sys.argv[2])
    import threading
    from fake_device import Device
    from nebulaml.tensors import device
    fake = Device()
    device.use(fake)
    nm.init(sys.argv[1], 0, 2)
    tensor = fake.put(torch.full((1 << 20,), 7.0))
    fake.hold_up()
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", {"t": tensor}, overlap=True)
    checkpoint.commit()
"""


def test_the_end_of_the_program_waits_for_an_overlapped_copy(place, request):
    place.run(CODE + "    threading.Timer(0.3, fake.let_go).start()\n", place.storage, request.path.parent)
    import nebulaml

    nebulaml.init(str(place.storage))
    nebulaml.flush_persistence()
    assert torch.load(place.storage / "global_step1" / "m.pt")["t"].eq(7).all()


def test_a_program_that_is_killed_under_an_overlapped_copy_leaves_no_version(place, request):
    place.run(CODE + "    os.kill(os.getpid(), signal.SIGKILL)\n", place.storage, request.path.parent, returncode=-9)
    import nebulaml

    nebulaml.init(str(place.storage))
    assert nebulaml.get_latest_checkpoint() is None


@pytest.mark.nightly
def test_a_forked_worker_neither_waits_nor_gives_back_what_is_the_parents(nm, fake):
    import os

    parameter = torch.nn.Parameter(on(fake, LARGE))
    optimizer = SGD([parameter], fake)
    fake.hold_up()
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", {"p": parameter.data}, overlap=True)
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(0 if fake.registered and not device._devices.steps.pending else 1)
    assert os.waitpid(child, 0)[1] == 0
    fake.let_go()
    checkpoint.commit()
    assert checkpoint.load("m.pt")["p"].eq(1).all()


@pytest.mark.nightly("test_with_overlap_save_and_commit_return_at_once_and_the_next_step_waits_on_the_device")
def test_a_compiled_step_waits_too(nm, fake):
    """The step is compiled before the first save registers for steps, or after it."""
    state = on(fake, LARGE)
    other = torch.nn.Parameter(torch.ones(5))
    other.grad = torch.ones(5)
    optimizer = torch.optim.SGD([other], lr=1.0)
    step = torch.compile(optimizer.step, backend="eager")
    step()
    for index in range(2):
        fake.hold_up()
        checkpoint = nm.Checkpoint(f"global_step{index}")
        assert checkpoint.save("m.pt", {"t": state}, overlap=True)
        step()
        fake.enqueue(lambda: state.add_(1))
        fake.let_go()
        assert checkpoint.commit()
        checkpoint.wait("committed", timeout=60)
        fake.synchronize()
        assert checkpoint.load("m.pt")["t"].eq(1 + index).all()
