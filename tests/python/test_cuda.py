"""A real CUDA GPU: the promises that test_device.py tests on a fake device, and those that need a real one."""

from __future__ import annotations

import gc
import io
import logging
import os
import random
import threading
import zipfile

import numpy
import pytest
import torch
from nebulaml.errors import NebulaError
from nebulaml.tensors import device, device_backends, pickling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LARGE = (8 << 20) + 5  # elements: more than one chunk
A_WHILE = 400_000_000  # cycles of the device: some 0.2 s
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])


def on(*shape, value=1.0, dtype=torch.float32):
    return torch.full(shape, value, device="cuda", dtype=dtype)


def loaded(checkpoint, name="m.pt"):
    checkpoint.wait("committed", timeout=60)
    return checkpoint.load(name)


def test_the_pickle_is_that_of_torch_save():
    on_gpu = torch.arange(24.0, device="cuda").view(4, 6)
    state = {
        "a": on_gpu,
        "view": on_gpu[1:],
        "turned": on_gpu.t(),
        "host": torch.ones(3),
        "again": [on_gpu, on_gpu.to(torch.int64)],
        "none": torch.empty(0, device="cuda"),
        "parameter": torch.nn.Parameter(torch.ones(3, device="cuda")),
        "half": torch.ones(3, device="cuda", dtype=torch.bfloat16),
        "complex": torch.ones(3, device="cuda", dtype=torch.complex64).conj(),
        "negative": torch.ones(3, device="cuda", dtype=torch.complex64).conj().imag,
        "last": torch.ones(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last),
        "sparse": torch.eye(4, device="cuda").to_sparse(),
        "storage": torch.ones(3, device="cuda").untyped_storage(),
    }
    file = io.BytesIO()
    torch.save(state, file)
    assert bytes(pickling.capture(state).pickle) == zipfile.ZipFile(file).read("archive/data.pkl")


@OVERLAP
def test_loaded_objects_are_those_of_torch_save_and_torch_load(nm, overlap):
    generator = torch.Generator("cuda").manual_seed(1)
    large = torch.randn(LARGE, device="cuda", generator=generator)
    state = {
        "large": large,
        "view": large[3:9],
        "turned": torch.randn(300, 200, device="cuda", generator=generator).t(),
        "half": torch.randn(1 << 20, device="cuda", generator=generator).to(torch.bfloat16),
        "eight": torch.randn(1 << 20, device="cuda", generator=generator).to(torch.float8_e4m3fn),
        "bool": torch.randn(77, device="cuda", generator=generator) > 0,
        "none": torch.empty(0, 3, device="cuda"),
        "one": torch.tensor(5, device="cuda"),
        "sparse": torch.eye(40, device="cuda").to_sparse(),
        "host": torch.randn(1 << 20),
    }
    file = io.BytesIO()
    torch.save(state, file)
    theirs = torch.load(io.BytesIO(file.getvalue()))
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save("m.pt", state, overlap=overlap) and checkpoint.commit()
    ours = loaded(checkpoint)
    for name, wanted in theirs.items():
        found = ours[name]
        assert (found.device, found.dtype, found.layout) == (wanted.device, wanted.dtype, wanted.layout), name
        if wanted.layout == torch.strided:
            assert found.stride() == wanted.stride()
            assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), name
        else:
            assert torch.equal(found.to_dense(), wanted.to_dense())
    assert ours["view"].data_ptr() == ours["large"][3:].data_ptr()
    assert checkpoint.load("m.pt", map_location="cpu")["large"].equal(large.cpu())


def test_device_work_queued_before_the_save_counts_in_its_values(nm):
    state = {"large": on(LARGE), "small": on(7)}
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    checkpoint = nm.Checkpoint("global_step1")
    with torch.cuda.stream(other):  # the current one of this thread, not the device's own
        torch.cuda._sleep(A_WHILE)
        state["large"].add_(1)
        state["small"].add_(1)
        assert checkpoint.save("m.pt", state)
        state["large"].fill_(-1)
        state["small"].fill_(-1)
    assert checkpoint.commit()
    found = loaded(checkpoint)
    assert found["large"].eq(2).all() and found["small"].eq(2).all()


def test_without_overlap_anything_may_be_changed_on_any_stream_when_save_returns(nm):
    state = {"large": on(LARGE), "small": on(7), "host": torch.ones(LARGE)}
    pinned = torch.full((LARGE,), -1.0).pin_memory()
    for step in range(4):
        state["large"].fill_(step)
        state["host"].fill_(step)
        checkpoint = nm.Checkpoint(f"global_step{step}")
        assert checkpoint.save("m.pt", state)
        with torch.cuda.stream(torch.cuda.Stream()):
            state["large"].copy_(pinned, non_blocking=True)
            state["small"].fill_(step + 1)
        state["host"].fill_(-1)
        torch.cuda.synchronize()
        assert checkpoint.commit()
        found = loaded(checkpoint)
        assert found["large"].eq(step).all() and found["host"].eq(step).all() and found["small"].eq(step or 1).all()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "capturable": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1, device="cuda"), capturable=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@OVERLAP
def test_a_step_right_after_the_save_is_not_in_it(nm, name, overlap):
    parameters = [torch.nn.Parameter(torch.randn(size, device="cuda")) for size in (3, 1 << 10, LARGE)]
    optimizer = OPTIMIZERS[name](parameters)

    def gradients():
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)

    gradients()
    optimizer.step()
    for step in range(4):
        gradients()
        state = {"parameters": [parameter.data for parameter in parameters], "optimizer": optimizer.state_dict()}
        file = io.BytesIO()
        torch.save(state, file)
        checkpoint = nm.Checkpoint(f"global_step{step}")
        torch.cuda._sleep(A_WHILE // 4)
        assert checkpoint.save("m.pt", state, overlap=overlap)
        optimizer.step()
        optimizer.step()
        assert checkpoint.commit()
        found, wanted = loaded(checkpoint), torch.load(io.BytesIO(file.getvalue()))
        assert all(map(torch.equal, found["parameters"], wanted["parameters"]))
        assert found["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"]
        for index, values in wanted["optimizer"]["state"].items():
            assert all(torch.equal(found["optimizer"]["state"][index][key], value) for key, value in values.items())


def test_a_step_of_mixed_precision_on_a_stream_of_the_program_waits_too(nm):
    parameter = torch.nn.Parameter(torch.randn(LARGE, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    side = torch.cuda.Stream()
    for step in range(3):
        before = parameter.detach().clone()
        checkpoint = nm.Checkpoint(f"global_step{step}")
        assert checkpoint.save("m.pt", {"p": parameter.data, "scaler": scaler.state_dict()}, overlap=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            scaler.scale(parameter.mul(2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.cuda.current_stream().wait_stream(side)
        assert checkpoint.commit()
        assert loaded(checkpoint)["p"].equal(before) and not parameter.equal(before)


def test_with_overlap_save_and_step_return_while_the_device_is_still_busy(nm):
    """The device sleeps first, so nothing can be copied when these calls return."""
    parameter = torch.nn.Parameter(on(LARGE))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    nm.Checkpoint("global_step0").save(
        "m.pt", {"p": parameter.data}, overlap=True
    )  # registers an image, which waits for the device
    warm = nm.Checkpoint("global_step1")
    warm.save("m.pt", {"p": parameter.data}, overlap=True)
    warm.commit()
    optimizer.step()
    loaded(warm)
    reached = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * A_WHILE)
    reached.record()
    checkpoint = nm.Checkpoint("global_step2")
    assert checkpoint.save("m.pt", {"p": parameter.data}, overlap=True)
    optimizer.step()
    assert checkpoint.commit()
    assert checkpoint.state == "capturing" and not reached.query()
    assert loaded(checkpoint)["p"].eq(0).all()
    assert parameter.eq(-1).all()


def test_without_the_gate_the_late_copy_would_read_the_step(nm, monkeypatch):
    """Shows that the tests above would notice a missing wait."""
    monkeypatch.setattr(device.Filler, "hold", lambda self: None)
    parameter = torch.nn.Parameter(on(64 * LARGE // 8))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.step()  # the work that the first call waits for is done
    found = []
    for step in range(4):
        parameter.data.fill_(1)
        checkpoint = nm.Checkpoint(f"global_step{step}")
        checkpoint.save("m.pt", {"p": parameter.data}, overlap=True)
        optimizer.step()
        checkpoint.commit()
        found.append(bool(loaded(checkpoint)["p"].eq(1).all()))
    assert not all(found)


def test_with_overlap_what_a_forward_pass_changes_is_exact_when_small(nm):
    norm = torch.nn.BatchNorm1d(64).cuda()
    large = on(LARGE)
    for step in range(4):
        before = {name: value.clone() for name, value in norm.state_dict().items()}
        checkpoint = nm.Checkpoint(f"global_step{step}")
        assert checkpoint.save("m.pt", {"large": large, "norm": norm.state_dict()}, overlap=True)
        norm(torch.randn(32, 64, device="cuda"))
        assert checkpoint.commit()
        found = loaded(checkpoint)["norm"]
        assert all(found[name].equal(value) for name, value in before.items())
        assert not norm.running_mean.equal(before["running_mean"])


def test_the_small_storages_of_a_file_wait_for_no_large_ones_of_the_file_before(nm, monkeypatch):
    copies, copy = [], device_backends.Cuda.copy

    def late(self, stream, pieces):
        is_large = any(size > device.SMALL_BYTES for _, _, size in device_backends.PIECE.iter_unpack(pieces))
        if is_large:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(5 * A_WHILE)
        copy(self, stream, pieces)
        if is_large:
            copies.append(torch.cuda.Event())
            copies[-1].record(stream)

    for step in range(2):  # with the second nothing is registered any more, which waits for the device
        tensors = [[on(LARGE, value=float(number)), on(7)] for number in range(3)]
        checkpoint = nm.Checkpoint(f"global_step{step}")
        if step:
            monkeypatch.setattr(device_backends.Cuda, "copy", late)
        for number in range(3):
            assert checkpoint.save(f"{number}.pt", tensors[number], overlap=True)
        torch.cuda.current_stream().synchronize()
        assert not any(event.query() for event in copies)
        assert checkpoint.commit()
        assert all(loaded(checkpoint, f"{number}.pt")[0].eq(number).all() for number in range(3))
    assert len(copies) == 3


@pytest.mark.parametrize("how", ["freed", "resized", "replaced"])
def test_memory_that_is_given_back_under_an_overlapped_copy_is_not_used_for_anything_else(nm, how):
    for step in range(6):
        tensors = [on(LARGE, value=float(step)) for _ in range(8)]
        torch.cuda._sleep(A_WHILE // 4)
        checkpoint = nm.Checkpoint(f"global_step{step}")
        assert checkpoint.save("m.pt", tensors, overlap=True)
        for tensor in tensors:
            if how == "resized":  # as sharded training frees gathered parameters
                tensor.untyped_storage().resize_(0)
            elif how == "replaced":
                tensor.set_(torch.zeros(3, device="cuda"))
        tensors.clear()
        scratch = [on(LARGE, value=-1.0) for _ in range(8)]
        with torch.cuda.stream(torch.cuda.Stream()):
            scratch += [on(LARGE, value=-1.0) for _ in range(8)]
        assert checkpoint.commit()
        assert all(tensor.eq(step).all() for tensor in loaded(checkpoint)), how
        del scratch


def test_images_are_registered_once_and_none_is_left_when_the_session_goes(nm, monkeypatch):
    calls = []
    register, unregister = device_backends.Cuda.register, device_backends.Cuda.unregister

    def registering(self, place, address, size):
        calls.append(("register", register(self, place, address, size)))
        return calls[-1][1]

    def unregistering(self, place, address):
        unregister(self, place, address)
        calls.append(("unregister", True))

    monkeypatch.setattr(device_backends.Cuda, "register", registering)
    monkeypatch.setattr(device_backends.Cuda, "unregister", unregistering)
    tensor = on(LARGE)
    for step in range(8):
        checkpoint = nm.Checkpoint(f"global_step{step}")
        assert checkpoint.save("m.pt", {"t": tensor}, overlap=step % 2 == 1) and checkpoint.commit()
        checkpoint.wait("durable", timeout=60)
    count = calls.count(("register", True))
    assert 0 < count < 8 and ("register", False) not in calls
    del checkpoint
    nm._shutdown()
    gc.collect()
    assert calls.count(("unregister", True)) == count and not device._devices.images
    torch.cuda.synchronize()
    assert on(3).sum() == 3


def test_a_little_memory_is_enough_if_registering_is_refused(nm, monkeypatch, caplog):
    monkeypatch.setattr(device_backends.Cuda, "register", lambda self, place, address, size: False)
    device.use(None)
    state = {"t": torch.randn(3 * LARGE, device="cuda"), "few": on(3)}
    with caplog.at_level(logging.WARNING, "nebulaml"):
        for step in range(3):
            before = state["t"].clone()
            checkpoint = nm.Checkpoint(f"global_step{step}")
            assert checkpoint.save("m.pt", state, overlap=True)
            state["t"].add_(1)
            assert checkpoint.commit()
            assert loaded(checkpoint)["t"].equal(before)
    assert sum("cannot be registered" in record.message for record in caplog.records) == 1
    nm._shutdown()
    device.use(None)


def test_a_driver_without_a_call_for_many_copies_takes_them_one_by_one(nm, monkeypatch):
    monkeypatch.setattr(
        device_backends.Cuda,
        "copy",
        lambda self, stream, pieces: device_backends._nebula.copy_from_device(stream.cuda_stream, pieces, False),
    )
    state = [torch.randn(size, device="cuda") for size in (*range(1, 2000), LARGE)]
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save("m.pt", state, overlap=True) and checkpoint.commit()
    assert all(map(torch.equal, loaded(checkpoint), state))


def test_a_load_onto_a_device_takes_a_driver_without_a_call_for_many_copies(nm, monkeypatch):
    monkeypatch.setattr(
        device_backends.Cuda,
        "upload",
        lambda self, stream, pieces, buffer: device_backends._nebula.copy_to_device(stream.cuda_stream, pieces, buffer[0], False),
    )
    state = [torch.randn(size) for size in (*range(1, 2000), LARGE)]
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save("m.pt", state) and checkpoint.commit()
    assert all(found.is_cuda and torch.equal(found.cpu(), each) for found, each in zip(checkpoint.load("m.pt", "cuda"), state, strict=True))


def test_the_driver_says_why_it_refuses_a_copy():
    stream = torch.cuda.Stream()
    target = torch.empty(64, dtype=torch.uint8).pin_memory()
    with pytest.raises(RuntimeError, match=r"the driver of the GPU refuses to copy: .*invalid.* \(error 1\)"):
        device_backends._nebula.copy_from_device(stream.cuda_stream, device_backends.PIECE.pack(target.data_ptr(), 0, 64), False)
    assert on(3).sum() == 3
    device_backends._nebula.copy_from_device(stream.cuda_stream, b"")


def test_memory_that_cannot_be_registered_is_refused_and_leaves_no_error_behind():
    backend = device_backends.Cuda()
    place = torch.empty(1, device="cuda").device
    assert not backend.register(place, 1 << 12, 1 << 12)  # nothing is mapped there
    backend.unregister(place, 1 << 12)
    assert on(3).sum() == 3
    torch.cuda.synchronize()


def test_many_threads_and_streams_save_side_by_side(nm):
    wrong = []

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor, small = on(LARGE), on(5)
            for step in range(3):
                tensor.fill_(number + step)
                small.fill_(number + step)
                checkpoint = nm.Checkpoint(f"global_step{step}-{number}")
                if not (checkpoint.save("m.pt", [tensor, small]) and checkpoint.commit()):
                    wrong.append(checkpoint.error)
                tensor.fill_(-1)
                small.fill_(-1)
                if not all(part.eq(number + step).all() for part in loaded(checkpoint)):
                    wrong.append((number, step))

    threads = [threading.Thread(target=work, args=[10 * (number + 1)]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_pinned_host_memory_that_the_device_writes_to_has_the_values_of_the_save(nm):
    host = torch.full((LARGE,), 3.0).pin_memory()
    other = on(LARGE, value=9.0)
    torch.cuda.synchronize()
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save("m.pt", {"host": host, "other": other}, overlap=True)
    host.copy_(other, non_blocking=True)
    torch.cuda.synchronize()
    assert checkpoint.commit() and host.eq(9).all()
    found = loaded(checkpoint)
    assert found["host"].eq(3).all() and found["other"].eq(9).all()


def test_data_loaders_start_under_an_overlapped_copy(nm):
    parameter = torch.nn.Parameter(on(LARGE))
    torch.cuda._sleep(A_WHILE)
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save("m.pt", {"p": parameter.data}, overlap=True)
    loader = torch.utils.data.DataLoader(torch.arange(64), batch_size=8, num_workers=2, pin_memory=True)
    assert sum(int(batch.sum()) for batch in loader) == 2016
    assert checkpoint.commit() and loaded(checkpoint)["p"].eq(1).all()


def test_an_agent_that_dies_under_an_overlapped_copy_is_replaced_and_gets_the_file(nm, place):
    tensor = on(LARGE)
    torch.cuda._sleep(A_WHILE)
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("m.pt", {"t": tensor}, overlap=True)
    checkpoint.commit()
    place.kill_agent()
    nm.flush_persistence()
    assert torch.load(place.storage / "global_step1" / "m.pt")["t"].eq(1).all()


CODE = """
    nm.init(sys.argv[1], 0, 2)
    first = nm.Checkpoint("global_step1")
    tensor = torch.full((8 << 20,), 7.0, device="cuda")
    assert first.save("m.pt", {"t": tensor}) and first.commit()
    first.wait("durable")
    torch.cuda._sleep(2_000_000_000)
    second = nm.Checkpoint("global_step2")
    assert second.save("m.pt", {"t": tensor}, overlap=True) and second.commit()
"""


@pytest.mark.parametrize(
    ("end", "returncode", "newest"),
    [
        ("", 0, "global_step2"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "global_step1"),
        ("raise SystemExit(3)", 3, "global_step2"),
    ],
    ids=["returns", "killed", "exits"],
)
def test_the_end_of_a_program_under_an_overlapped_copy(place, end, returncode, newest):
    place.run(CODE + f"    {end}\n", place.storage, returncode=returncode)
    import nebulaml

    nebulaml.init(str(place.storage))
    if returncode >= 0:
        nebulaml.flush_persistence()
    found = nebulaml.get_latest_checkpoint()
    assert found.tag == newest and found.load("m.pt")["t"].eq(7).all()


BROKEN = """
    import logging
    logging.basicConfig()
    nm.init(sys.argv[1], 0, 2, on_error="warn")
    tensor = torch.full((8 << 20,), 7.0, device="cuda")
    first = nm.Checkpoint("global_step1")
    assert first.save("m.pt", {"t": tensor}) and first.commit()
    first.wait("durable")
    torch.cuda._sleep(500_000_000)
    torch.arange(4, device="cuda")[torch.tensor([10**6], device="cuda")]  # the device fails, and for good
    second = nm.Checkpoint("global_step2")
    say(second.save("m.pt", {"t": tensor}, overlap=sys.argv[2] == "True"))
    say(second.commit())
    try:
        second.wait("committed", timeout=60)
        say("committed")
    except nm.NebulaError as failure:
        say("lost", failure)
    say(first.load("m.pt", map_location="cpu")["t"].eq(7).all().item())
"""


@OVERLAP
def test_a_device_that_fails_for_good_fails_the_version_and_the_one_before_it_loads(place, overlap):
    output = place.run(BROKEN, place.storage, overlap)
    assert "committed" not in output and "lost" in output and "assert" in output and output.endswith("True\n"), output


def test_random_state_comes_back(nm):
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save("rng.pt", nm.rng_state()) and checkpoint.commit()
    wanted = torch.rand(5, device="cuda"), torch.rand(5), random.random(), numpy.random.rand()
    checkpoint.wait("committed", timeout=60)
    for location in (None, "cuda"):  # as a program loads that has all of its state on the device
        torch.cuda.manual_seed(7)
        nm.set_rng_state(checkpoint.load("rng.pt", map_location=location))
        found = torch.rand(5, device="cuda"), torch.rand(5), random.random(), numpy.random.rand()
        assert found[0].equal(wanted[0]) and found[1].equal(wanted[1]) and found[2:] == wanted[2:]


def test_a_state_on_the_device_is_loaded_in_place(nm):
    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.BatchNorm1d(700)).cuda()
        return model, torch.optim.AdamW(model.parameters())

    def step(model, optimizer):
        model(torch.randn(16, 700, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    step(model, optimizer)
    checkpoint = nm.Checkpoint("global_step1")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert checkpoint.save("m.pt", state, overlap=True) and checkpoint.commit()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [value.clone() for value in optimizer.state[model[0].weight].values()]
    step(model, optimizer)
    checkpoint.wait("committed", timeout=60)
    checkpoint.load_into("m.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert all(value.equal(wanted[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, optimizer.state[model[0].weight].values(), moments))


def test_parts_on_a_device_are_copied_as_bytes(nm):
    tensor = torch.arange(100, dtype=torch.int32, device="cuda")
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save_bytes("raw", [b"head", tensor[10:20], bytearray(b"tail")], overlap=True)
    assert checkpoint.commit()
    checkpoint.wait("committed", timeout=60)
    assert checkpoint.read_bytes("raw") == b"head" + tensor[10:20].cpu().numpy().tobytes() + b"tail"


def test_dcp_saves_and_loads_device_memory(nm, place):
    import torch.distributed.checkpoint as stock
    from nebulaml import dcp

    state = {"large": on(LARGE, value=3.0), "turned": torch.randn(3, 5, device="cuda").t(), "host": torch.arange(9)}
    stock.save(state, storage_writer=dcp.NebulaStorageWriter(place.storage / "tag1"), no_dist=True)
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    stock.load(state, storage_reader=dcp.NebulaStorageReader(place.storage / "tag1"), no_dist=True)
    assert all(torch.equal(state[name], wanted[name]) for name in state)


def test_the_stager_copies_a_distributed_tensor_to_the_host(monkeypatch, tmp_path):
    import torch.distributed as dist
    from nebulaml import dcp
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        value = DTensor.from_local(on(LARGE, value=2.0), init_device_mesh("cuda", (1,)), [Shard(0)])
        staged = dcp.NebulaStager().stage({"w": value})["w"]
        value.to_local().zero_()
        assert staged.to_local().device.type == "cpu" and staged.to_local().eq(2).all()
        assert staged.placements == value.placements and staged.shape == value.shape
    finally:
        dist.destroy_process_group()


@OVERLAP
def test_a_save_while_a_graph_is_captured_fails_and_the_next_one_does_not(nm, overlap):
    nm.init(on_error="warn")
    tensor = on(LARGE)
    graph = torch.cuda.CUDAGraph()
    checkpoint = nm.Checkpoint("global_step1")
    saved = None
    try:
        with torch.cuda.graph(graph):
            tensor.add_(1)
            saved = checkpoint.save("m.pt", {"t": tensor}, overlap=overlap)
    except (RuntimeError, NebulaError):
        pass
    torch.cuda.synchronize()
    assert not saved and not checkpoint.commit()
    tensor.fill_(5)
    with nm.Checkpoint("global_step2") as later:
        assert later.save("m.pt", {"t": tensor}, overlap=overlap)
    assert loaded(later)["t"].eq(5).all()


def test_a_replayed_graph_between_saves_is_saved_as_it_is(nm):
    tensor = on(LARGE, value=0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    for step in range(1, 4):
        graph.replay()
        checkpoint = nm.Checkpoint(f"global_step{step}")
        assert checkpoint.save("m.pt", {"t": tensor})
        graph.replay()
        graph.replay()
        assert checkpoint.commit()
        assert loaded(checkpoint)["t"].eq(3 * step - 2).all()


def test_a_device_that_is_full_can_still_be_saved(nm):
    tensor = on(LARGE, value=3.0)
    before = nm.Checkpoint("global_step0")  # the driver has allocated its own memory
    assert before.save("m.pt", {"t": tensor}, overlap=True) and before.commit()
    before.wait("durable", timeout=60)
    free, _ = torch.cuda.mem_get_info()
    tensor.fill_(4)
    filled = []
    try:
        size = free // 8
        while size >= 1 << 20:
            try:
                filled.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.cuda.OutOfMemoryError:
                size //= 2
        checkpoint = nm.Checkpoint("global_step1")
        assert checkpoint.save("m.pt", {"t": tensor}, overlap=True) and checkpoint.commit()
        checkpoint.wait("committed", timeout=60)
    finally:
        filled.clear()
        torch.cuda.empty_cache()
    assert checkpoint.load("m.pt", map_location="cpu")["t"].eq(4).all()


def test_a_compiled_step_waits_too(nm):
    parameter = torch.nn.Parameter(on(LARGE))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    step = torch.compile(optimizer.step, backend="eager")
    for index in range(3):  # compiled before a first save asks for the hook, and after
        before = parameter.detach().clone()
        if index:
            torch.cuda._sleep(A_WHILE)
            checkpoint = nm.Checkpoint(f"global_step{index}")
            assert checkpoint.save("m.pt", {"p": parameter.data}, overlap=True) and checkpoint.commit()
        step()
        if index:
            assert loaded(checkpoint)["p"].equal(before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@OVERLAP
def test_two_devices_are_saved_side_by_side(nm, overlap):
    tensors = [torch.full((LARGE,), 1.0 + index, device=f"cuda:{index}") for index in range(2)]
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save("m.pt", tensors, overlap=overlap) and checkpoint.commit()
    assert all(tensor.eq(1.0 + index).all() for index, tensor in enumerate(loaded(checkpoint)))


def test_a_process_that_only_loads_to_the_host_starts_no_device(nm, place):
    checkpoint = nm.Checkpoint("global_step1")
    assert checkpoint.save("m.pt", {"t": on(3)}) and checkpoint.commit()
    checkpoint.wait("durable", timeout=60)
    del checkpoint
    nm._shutdown()
    gc.collect()
    code = """
    nm.init(sys.argv[1])
    assert nm.get_latest_checkpoint().load("m.pt", map_location="cpu")["t"].sum() == 3
    say(torch.cuda.is_initialized())
    """
    assert place.run(code, place.storage) == "False\n"
    assert os.path.exists(place.storage / "global_step1" / "m.pt")
