"""Copy-on-write captures: the file has the values at the time of save(), also if the program changes the memory after it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import nebulaml
import numpy
import pytest
import torch

MIB = 1 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
COUNT = (16 if os.environ.get("NEBULA_TEST_NIGHTLY") else 4) * MIB  # floats: 16 MiB, some 8 blocks


def possible() -> bool:
    """Returns whether this machine allows write protection of pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(323, os.O_CLOEXEC) if os.uname().machine == "x86_64" else -1
    if fd >= 0:
        os.close(fd)
    return fd >= 0 or os.access("/dev/userfaultfd", os.R_OK | os.W_OK)


pytestmark = pytest.mark.skipif(not possible(), reason="no userfaultfd here")


@pytest.fixture(autouse=True)
def cow(monkeypatch):
    monkeypatch.setenv("NEBULA_CAPTURE", "cow")


def big(value: float = 1.0, count: int = COUNT) -> torch.Tensor:
    return torch.full((count,), float(value))


def saved(tag: str, obj: object) -> nebulaml.Checkpoint:
    checkpoint = nebulaml.Checkpoint(tag)
    assert checkpoint.save("m.pt", obj)
    return checkpoint


def row(tag: str) -> dict:
    return next(row for row in nebulaml.stats() if row["tag"] == tag)


def loaded(checkpoint: nebulaml.Checkpoint):
    assert checkpoint.commit()
    checkpoint.wait("committed", 60)
    found = nebulaml.get_latest_checkpoint()
    assert found.tag == checkpoint.tag
    return found.load("m.pt")


def overwrite_by_threads(t: torch.Tensor) -> None:
    view = t.numpy()
    parts = numpy.array_split(view, 8)

    def work(part, backwards):
        step = 1 << 18
        starts = range(0, len(part), step)
        for start in reversed(starts) if backwards else starts:
            part[start : start + step] = -5

    threads = [threading.Thread(target=work, args=(part, i % 2)) for i, part in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def overwrite_by_read(t: torch.Tensor) -> None:
    with open("/dev/zero", "rb", buffering=0) as zeros:
        left = memoryview(t.numpy()).cast("B")
        while left:
            left = left[zeros.readinto(left) :]


def overwrite_by_step(t: torch.Tensor) -> None:
    t.requires_grad_(True)
    t.grad = torch.ones_like(t)
    torch.optim.SGD([t], lr=1.0).step()
    t.requires_grad_(False)


def overwrite_at_random(t: torch.Tensor) -> None:
    view = t.numpy()
    for index in numpy.random.default_rng(0).permutation(len(view) // 1024)[:4000]:
        view[index * 1024] = 9
    t.fill_(8)


MUTATIONS = {
    "fill": lambda t: t.fill_(7),
    "backwards": lambda t: [part.fill_(3) for part in reversed(t.chunk(64))],
    "threads": overwrite_by_threads,
    "numpy": lambda t: numpy.copyto(t.numpy(), 4),
    "data": lambda t: t.data.mul_(2),
    "read": overwrite_by_read,
    "optimizer": overwrite_by_step,
    "random": overwrite_at_random,
}


@pytest.mark.parametrize("mutation", ["threads", "optimizer", "random", *(pytest.param(one, marks=pytest.mark.nightly("test_values_are_those_of_the_save")) for one in MUTATIONS if one not in ("threads", "optimizer", "random"))])
def test_values_are_those_of_the_save(nm, mutation):
    t = torch.arange(COUNT, dtype=torch.float32)
    expected = t.clone()
    checkpoint = saved("a", {"t": t, "small": torch.ones(3)})
    MUTATIONS[mutation](t)
    got = loaded(checkpoint)
    assert torch.equal(got["t"], expected) and torch.equal(got["small"], torch.ones(3))
    assert not torch.equal(t, expected)


def test_the_capture_was_copy_on_write_and_is_measured(nm):
    t = big(count=32 * MIB)
    for step in range(3):  # the first ones also wait for new images
        checkpoint = saved(f"global_step{step}", t)
        t.fill_(step)
        assert checkpoint.commit()
        checkpoint.wait("committed", 60)
    cost = row("global_step2")
    assert cost["faults"] > 0
    assert 0 < cost["blocked_ms"] < cost["copy_ms"] and cost["capture_cpu_ms"] > 0


def test_copy_takes_no_faults(nm, monkeypatch):
    monkeypatch.setenv("NEBULA_CAPTURE", "copy")
    nebulaml._shutdown()
    nebulaml.init(None, 0, 2, on_error="raise")
    t = big()
    checkpoint = saved("copied", t)
    t.fill_(2)
    assert (loaded(checkpoint) == 1).all()
    cost = row("copied")
    assert cost["faults"] == 0 and cost["blocked_ms"] == cost["copy_ms"]


def test_an_unknown_capture_is_refused(place, monkeypatch):
    monkeypatch.setenv("NEBULA_CAPTURE", "sometimes")
    with pytest.raises(nebulaml.NebulaConfigError, match="auto, copy or cow"):
        nebulaml.init(str(place.storage), on_error="raise")


def test_the_program_may_let_go_of_what_it_saved(nm):
    t = big(5)
    checkpoint = saved("dropped", {"t": t})
    del t
    gc.collect()
    assert (loaded(checkpoint)["t"] == 5).all()


def test_storages_are_held_until_they_are_copied_and_no_longer(nm):
    class Note:
        pass

    t = big(5)
    t.untyped_storage().note = note = Note()
    watch = weakref.ref(note)
    checkpoint = saved("held", [t])
    del t, note
    nebulaml._session.engine.session().settle(60_000)
    gc.collect()
    assert watch() is None
    assert (loaded(checkpoint)[0] == 5).all()


def test_set_and_new_data_leave_the_saved_storage_alone(nm):
    first, second = big(1), big(2)
    checkpoint = saved("set", [first, second])
    first.set_(torch.zeros(4))
    second.data = torch.zeros(4)
    got = loaded(checkpoint)
    assert (got[0] == 1).all() and (got[1] == 2).all()


def test_tensors_that_share_a_storage_still_do(nm):
    whole = big(1)
    checkpoint = saved("shared", {"whole": whole, "half": whole[: COUNT // 2]})
    whole.zero_()
    got = loaded(checkpoint)
    assert (got["whole"] == 1).all() and got["half"].data_ptr() == got["whole"].data_ptr()


@pytest.mark.parametrize("size", [0, *(pytest.param(size, marks=pytest.mark.nightly("test_a_storage_that_is_resized_fails_its_version_or_is_exact")) for size in (1024, 2 * COUNT * 4))])
def test_a_storage_that_is_resized_fails_its_version_or_is_exact(nm, caplog, size):
    first = saved("global_step1", {"n": 1})
    assert first.commit()
    t = big(3, 4 * COUNT)
    checkpoint = saved("global_step2", t)
    t.untyped_storage().resize_(size)
    with contextlib.suppress(nebulaml.NebulaError):
        checkpoint.commit()
    nebulaml._session.engine.session().settle(60_000)
    found = nebulaml.get_latest_checkpoint()
    if checkpoint.state == "failed":
        assert found.tag == "global_step1" and found.load("m.pt") == {"n": 1}
        assert "memory at 0x" in checkpoint.error and "being saved" in checkpoint.error
        assert any("is lost" in record.message for record in caplog.records if record.levelno == logging.ERROR)
    else:
        assert found.tag == "global_step2" and (found.load("m.pt") == 3).all()
    t = big(4)
    with contextlib.suppress(nebulaml.NebulaError):  # memory that was ready too late for the earlier calls
        saved("global_step3", t)
    assert (loaded(saved("global_step4", t)) == 4).all()


def test_pages_given_back_fail_the_version_and_nothing_else(nm):
    libc = ctypes.CDLL(None, use_errno=True)
    t = big(3, 8 * COUNT)
    checkpoint = saved("global_step1", t)
    start = (t.data_ptr() + 4 * COUNT + 4095) & ~4095
    assert libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(28 * COUNT & ~4095), 4) == 0  # MADV_DONTNEED
    nebulaml._session.engine.session().settle(60_000)
    assert checkpoint.state == "failed" and "given back" in checkpoint.error
    with pytest.raises(nebulaml.NebulaError, match="given back"):
        checkpoint.commit()
    with pytest.raises(nebulaml.NebulaError, match="given back"):
        checkpoint.wait("committed", 60)
    assert nebulaml.get_latest_checkpoint() is None
    assert (loaded(saved("global_step2", big(4))) == 4).all()


@pytest.mark.nightly("test_a_name_saved_again_while_it_copies_has_the_later_values")
def test_a_second_save_while_the_first_copies_gets_its_own_values(nm, place):
    t = big(0, 4 * COUNT)
    checkpoints = []
    for step in range(4):
        t.fill_(step)
        checkpoints.append(saved(f"global_step{step}", t))
        assert checkpoints[-1].commit()
    t.fill_(-1)
    for step, checkpoint in enumerate(checkpoints):
        checkpoint.wait("durable", 60)
        assert (torch.load(place.storage / f"global_step{step}" / "m.pt") == step).all()


def test_a_name_saved_again_while_it_copies_has_the_later_values(nm):
    t = big(1, 4 * COUNT)
    checkpoint = saved("again", t)
    checkpoint.save("m.pt", torch.ones(3))
    assert torch.equal(loaded(checkpoint), torch.ones(3))


@pytest.mark.nightly("test_a_name_saved_again_while_it_copies_has_the_later_values")
def test_a_name_saved_again_before_its_first_copy_ended_is_not_called_lost(nm, caplog):
    large, first, second = big(count=8 * COUNT), big(2, MIB), big(3, MIB)
    checkpoint = saved("again", large)  # later messages reach the agent after this one
    assert checkpoint.save("n.pt", first) and checkpoint.save("n.pt", second)
    assert sorted(checkpoint.files) == ["m.pt", "n.pt"]  # which waits for the copies
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert torch.equal(loaded(checkpoint), large) and torch.equal(checkpoint.load("n.pt"), second)


@pytest.mark.nightly("test_a_retry_that_is_interrupted_leaves_the_file_lost")
def test_a_save_that_fails_after_a_later_one_has_replaced_it_is_no_loss(nm):
    large, first, second = big(count=8 * COUNT), big(2, 4 * MIB), big(3, 4 * MIB)
    checkpoint = saved("again", large)  # later messages reach the agent after this one
    assert checkpoint.save("n.pt", first)
    start, size = (first.data_ptr() + 4095) & ~4095, (first.nbytes - 8192) & ~4095
    assert ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 4) == 0  # MADV_DONTNEED
    assert checkpoint.save("n.pt", second)
    nebulaml._session.engine.session().settle(60_000)
    assert checkpoint.commit()
    assert torch.equal(checkpoint.load("n.pt"), second)


def test_a_retry_that_is_interrupted_leaves_the_file_lost(nm, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    checkpoint = nebulaml.Checkpoint("interrupted")
    assert checkpoint.save("m.pt", torch.ones(2))
    checkpoint._lost_files.add("m.pt")  # as by a save that failed
    monkeypatch.setattr(checkpoint, "_save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save("m.pt", torch.ones(2))
    assert not checkpoint.commit()


def test_a_first_save_that_is_interrupted_is_not_left_out_of_a_whole_checkpoint(nm, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    checkpoint = nebulaml.Checkpoint("interrupted")
    assert checkpoint.save("m.pt", torch.ones(2))
    monkeypatch.setattr(checkpoint, "_save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save("n.pt", torch.ones(2))
    assert not checkpoint.commit()


def test_commit_comes_before_captured(nm):
    t = big(1, 8 * COUNT)
    checkpoint = saved("early", t)
    assert checkpoint.commit()
    t.fill_(2)
    checkpoint.wait("durable", 60)
    assert (nebulaml.get_latest_checkpoint().load("m.pt") == 1).all()


@pytest.mark.nightly("test_a_forked_child_can_write_and_end")
def test_workers_of_a_data_loader_start_during_a_capture(nm):
    t = big(6, 4 * COUNT)
    data = torch.utils.data.TensorDataset(t[:4096].clone())
    checkpoint = saved("forked", t)
    loader = torch.utils.data.DataLoader(data, batch_size=64, num_workers=2)
    seen = sum(len(batch[0]) for batch in loader)
    t.zero_()
    assert seen == 4096
    assert (loaded(checkpoint) == 6).all()


def test_a_forked_child_can_write_and_end(nm):
    t = big(6, 4 * COUNT)
    checkpoint = saved("forked", t)
    pid = os.fork()
    if pid == 0:
        view = t.numpy()  # OpenMP, which torch uses, does not survive a fork
        view[:] = 1
        os._exit(0 if bool((view == 1).all()) else 1)
    t.zero_()
    assert os.waitpid(pid, 0)[1] == 0
    assert (loaded(checkpoint) == 6).all()


def test_bytes_are_captured_the_same_way(nm):
    t = big(6)
    checkpoint = nebulaml.Checkpoint("bytes")
    checkpoint.save_bytes("raw", [b"head", t, t[:10]])
    t.zero_()
    assert checkpoint.commit()
    with nebulaml.get_latest_checkpoint().view("raw") as data:
        assert bytes(data[:4]) == b"head" and len(data) == 4 + 4 * COUNT + 40
        assert (torch.frombuffer(bytearray(data[4:]), dtype=torch.float32) == 6).all()


PROT_BOTH, PRIVATE_ANONYMOUS = 3, 0x22
MOVE_TO = 3  # MREMAP_MAYMOVE | MREMAP_FIXED


def mapped(libc: ctypes.CDLL, size: int) -> int:
    libc.mmap.restype = ctypes.c_void_p
    return libc.mmap(None, ctypes.c_size_t(size), PROT_BOTH, PRIVATE_ANONYMOUS, -1, ctypes.c_long(0))


def at(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.float32)


@pytest.mark.nightly("test_a_storage_that_is_resized_fails_its_version_or_is_exact")
def test_memory_that_is_moved_fails_its_version_or_is_exact(nm):
    libc, size = ctypes.CDLL(None, use_errno=True), 16 * COUNT
    old, new = mapped(libc, size), mapped(libc, size)
    t = at(old, size)
    t.fill_(3)
    checkpoint = saved("global_step1", t)
    libc.mremap.restype = ctypes.c_void_p
    arguments = ctypes.c_void_p(old), ctypes.c_size_t(size), ctypes.c_size_t(size), MOVE_TO, ctypes.c_void_p(new)
    assert libc.mremap(*arguments) == new
    moved = at(new, size)
    assert (moved == 3).all()
    moved.fill_(4)  # its pages are still protected: no write may wait for ever
    nebulaml._session.engine.session().settle(60_000)
    if checkpoint.state == "failed":
        assert "moved" in checkpoint.error
        assert nebulaml.get_latest_checkpoint() is None
    else:
        assert (loaded(checkpoint) == 3).all()
    with contextlib.suppress(nebulaml.NebulaError):  # memory that was ready too late for the earlier calls
        saved("global_step2", moved)
    assert (loaded(saved("global_step3", moved)) == 4).all()
    del t, moved
    libc.munmap(ctypes.c_void_p(new), ctypes.c_size_t(size))


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_memory_of_a_file_is_copied_at_once(nm, tmp_path, mode):
    (tmp_path / "values").write_bytes(numpy.full(COUNT, 6, numpy.float32).tobytes())
    t = torch.from_numpy(numpy.memmap(tmp_path / "values", numpy.float32, mode))
    checkpoint = saved("of a file", t)
    t.zero_()
    assert (loaded(checkpoint) == 6).all()
    assert row("of a file")["faults"] == 0


@pytest.mark.parametrize("is_written", [True, pytest.param(False, marks=pytest.mark.nightly("test_loaded_memory_is_protected_once_all_of_it_was_written_to"))])
def test_loaded_memory_is_protected_once_all_of_it_was_written_to(nm, is_written):
    tensor = loaded(saved("global_step0", {"m": big(0.0)}))["m"]
    if is_written:
        tensor.fill_(1)
    faults = 0
    for step in range(1, 400 if is_written else 20):
        time.sleep(0.05)  # room for it is made in the background
        checkpoint = saved(f"global_step{step}", {"m": tensor})
        if is_written:
            tensor.fill_(step + 1)
        assert checkpoint.commit()
        checkpoint.wait("committed", 60)
        faults = row(checkpoint.tag)["faults"]
        if faults:
            break
    assert bool(faults) == is_written
    assert bool((nm.get_latest_checkpoint().load("m.pt")["m"] == (step if is_written else 0)).all())
    assert bool((tensor == (step + 1 if is_written else 0)).all())


@pytest.mark.nightly("test_shared_memory_is_copied_at_once")
def test_memory_that_torch_calls_pinned_is_copied_at_once(nm, monkeypatch):
    # The answers of torch with a device; all other code is the real one.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.UntypedStorage, "is_pinned", lambda self, device="cuda": self.nbytes() == 4 * COUNT)
    pinned, other = big(6), big(6, 32 * MIB)
    checkpoint = saved("pinned", pinned)
    pinned.zero_()
    both = saved("both", [pinned, other])
    pinned.fill_(1)
    other.zero_()
    assert (loaded(checkpoint) == 6).all() and row("pinned")["faults"] == 0
    got = loaded(both)
    assert (got[0] == 0).all() and (got[1] == 6).all() and row("both")["faults"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("how", ["pinned", "registered"])
def test_memory_that_a_device_writes_to_has_the_values_of_the_save(nm, how):
    t = big(6).pin_memory() if how == "pinned" else big(6)
    if how == "registered":
        assert int(torch.cuda.cudart().cudaHostRegister(t.data_ptr(), t.nbytes, 0)) == 0
    other = torch.full((COUNT,), 9.0, device="cuda")
    torch.cuda.synchronize()
    checkpoint = saved("device", t)
    t.copy_(other, non_blocking=True)
    torch.cuda.synchronize()
    assert (t == 9).all()
    assert (loaded(checkpoint) == 6).all() and row("device")["faults"] == 0
    if how == "registered":
        assert int(torch.cuda.cudart().cudaHostUnregister(t.data_ptr())) == 0


def test_shared_memory_is_copied_at_once(nm):
    t = big(6).share_memory_()
    checkpoint = saved("shared memory", t)
    t.zero_()
    assert (loaded(checkpoint) == 6).all()
    assert row("shared memory")["faults"] == 0


@pytest.mark.parametrize("memory", ["named", pytest.param("memfd", marks=pytest.mark.nightly("test_an_agent_killed_during_a_copy_loses_nothing"))])
def test_an_agent_killed_during_a_copy_loses_nothing(nm, place, monkeypatch, memory):
    if memory == "memfd":  # its images end with it: the file is copied from the trainer's mapping
        nebulaml._shutdown()
        place.kill_agent()
        monkeypatch.setenv("NEBULA_MEMORY_DIR", "/proc/nowhere")
        nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    t = big(6, 8 * COUNT)
    [agent] = place.agents()
    checkpoint = saved("killed", t)
    os.kill(agent, signal.SIGKILL)
    t.zero_()
    nebulaml._session.engine.session().settle(60_000)
    assert (loaded(checkpoint) == 6).all()


TRAIN = """
    nm.init(sys.argv[1], 0, 2, on_error="raise")
    w = torch.zeros(24 << 20)
    for step in range(1, 4):
        w.fill_(step)
        c = nm.Checkpoint(f"global_step{step}")
        c.save("m.pt", {"step": step, "w": w})
        c.commit()
        if step == 1:
            c.wait("durable")
        say("committed", step)
"""


@pytest.mark.nightly("python/test_ahead.py::test_kills_while_a_large_file_is_copied_and_written")
def test_a_trainer_killed_during_a_copy_leaves_a_whole_version(place):
    process = place.trainer(TRAIN + "    time.sleep(60)", place.storage)
    for line in process.stdout:
        if "committed 2" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()
    nebulaml.init(str(place.storage), 0, 2)
    got = nebulaml.get_latest_checkpoint().load("m.pt")
    assert got["step"] in (1, 2, 3) and (got["w"] == got["step"]).all()


@pytest.mark.parametrize("ending", ["pass", *(pytest.param(end, marks=pytest.mark.nightly("test_the_interpreter_waits_for_running_copies")) for end in ("sys.exit(0)", "raise SystemExit", "del w, c; nm._shutdown()"))])
def test_the_interpreter_waits_for_running_copies(place, ending):
    place.run(TRAIN + "    " + ending, place.storage)
    nebulaml.init(str(place.storage), 0, 2)
    got = nebulaml.get_latest_checkpoint().load("m.pt")
    assert got["step"] == 3 and (got["w"] == 3).all()


HUGE = """
import os, re, subprocess, sys
before = dict(os.environ)
import nebulaml, torch
assert dict(os.environ) == before and ("THP_MEM_ALLOC_ENABLE" in before or b"THP_MEM" not in subprocess.check_output(["/usr/bin/env"]))  # no child inherits the setting
weights = [torch.ones(4 << 20) for _ in range(4)]
huge = sum(int(kib) for kib in re.findall(r"AnonHugePages: +([0-9]+)", open("/proc/self/smaps_rollup").read()))
nebulaml.init(sys.argv[1], 1000)
for tag in ("step1", "step2"):
    checkpoint = nebulaml.Checkpoint(tag)
    assert checkpoint.save("m.pt", weights) and checkpoint.commit()
    for weight in weights:
        weight.add_(1)
assert torch.equal(nebulaml.get_checkpoint("step2").load("m.pt")[3], torch.full((4 << 20,), 2.0))
print(huge >> 10, nebulaml.stats()[1]["faults"])
"""


def huge_mib_and_faults(place, **variables: str) -> list[int]:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environment["NEBULA_CAPTURE"] = "auto"
    done = subprocess.run(
        [sys.executable, "-c", HUGE, str(place.storage)],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.nightly("test_the_capture_was_copy_on_write_and_is_measured")
@pytest.mark.skipif("[madvise]" not in HUGE_PAGES, reason="the machine decides about huge pages by itself")
def test_tensors_made_after_the_import_lie_in_huge_pages_and_are_protected(place):
    huge, faults = huge_mib_and_faults(place)
    assert huge >= 48 and faults > 0


@pytest.mark.nightly
@pytest.mark.skipif("[madvise]" not in HUGE_PAGES, reason="the machine decides about huge pages by itself")
def test_the_user_s_setting_of_torchs_switch_for_huge_pages_is_kept(place):
    assert huge_mib_and_faults(place, THP_MEM_ALLOC_ENABLE="0")[0] < 16
    assert huge_mib_and_faults(place, NEBULA_CAPTURE="copy")[0] < 16


@pytest.mark.parametrize("change", [{"persistent_storage_path": "new"}, {"job": "new"}])
def test_a_commit_while_the_copy_runs_outlives_an_init_with_another_path_or_job(place, monkeypatch, change):
    monkeypatch.chdir(place.root)
    nebulaml.init("old", 0, on_error="raise")
    checkpoint = saved("t", big(7.0))
    assert checkpoint.commit()
    nebulaml.init(**change)
    checkpoint.wait("durable", 60)
    assert torch.load(place.root / "old" / "t" / "m.pt").eq(7).all()
