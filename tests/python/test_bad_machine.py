"""A machine that refuses memory, other users on it, and deaths at chosen moments."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import nebulaml
import pytest
import torch
from nebulaml._session import locate
from nebulaml.errors import NebulaError
from processes import stop
from waiting import until

MIB = 1 << 20
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and changing users need root")


def save(step, mib=1):
    checkpoint = nebulaml.Checkpoint(f"global_step{step}")
    checkpoint.save("m.pt", torch.full((mib * MIB // 4,), float(step)))
    assert checkpoint.commit()
    return checkpoint


@pytest.fixture
def small_memory(place):
    """Makes a memory directory on a file system of 4 MiB, as in a container with the default /dev/shm."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "nebula-test", str(place.memory)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield place.memory
    nebulaml._shutdown()
    if place.agents():
        place.kill_agent()
    subprocess.run(["umount", "-l", place.memory], check=True)


# fault (Memory): The memory directory is too small.
# result: Images are memfds, which survive the trainers but not the agent.
def test_a_memory_directory_that_is_too_small_is_made_up_for_by_memfds(small_memory, place):
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    for step in (1, 2):
        save(step, 8)
    assert (nebulaml.get_latest_checkpoint().load("m.pt") == 2).all()
    nebulaml.flush_persistence()
    assert (torch.load(place.storage / "global_step2" / "m.pt") == 2).all()


@pytest.mark.nightly("test_a_memory_directory_that_is_too_small_is_made_up_for_by_memfds")
@needs_root
def test_a_memory_directory_that_another_program_has_filled_is_made_up_for_by_memfds(place):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "nebula-test", place.memory], check=True)
    try:
        nebulaml.init(str(place.storage), 0, 2, on_error="raise")
        save(1)
        with open(place.memory / "filled", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 48 << 20)
        with nebulaml.Checkpoint("global_step2") as checkpoint:
            checkpoint.save("large.pt", torch.full((8 << 20,), 2.0))  # 32 MiB
        checkpoint.wait("durable", 60)
        assert (nebulaml.get_latest_checkpoint().load("large.pt") == 2).all()
    finally:
        nebulaml._shutdown()
        place.kill_agent()
        subprocess.run(["umount", "-l", place.memory], check=True)


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_memory_directory_that_others_may_read_is_used_and_one_that_they_may_write_to_is_not(place, mode):
    place.memory.chmod(mode)
    doctor = subprocess.run([locate.agent_path() or "nebula", "doctor", "--json"], capture_output=True, text=True)
    tier = next(check for check in json.loads(doctor.stdout)["checks"] if check["check"] == "memory tier")
    assert ("memfds" in tier["found"]) == (mode == 0o777)
    nebulaml.init(str(place.storage), 3600, 2, on_error="raise")
    save(1).wait("durable", 60)
    save(2)
    place.kill_agent()
    assert nebulaml.get_latest_checkpoint().tag == ("global_step2" if mode == 0o755 else "global_step1")
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in place.memory.iterdir())


@needs_root
@pytest.mark.parametrize("is_there", [True, False])
def test_doctor_says_that_a_read_only_memory_directory_is_not_used(is_there, place, monkeypatch):
    disk = place.root / "shm"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "nebula-test", disk], check=True)
    try:
        if is_there:
            (disk / "memory").mkdir(mode=0o700)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        monkeypatch.setenv("NEBULA_MEMORY_DIR", str(disk / "memory"))
        doctor = subprocess.run([locate.agent_path() or "nebula", "doctor", "--json"], capture_output=True, text=True)
        tier = next(check for check in json.loads(doctor.stdout)["checks"] if check["check"] == "memory tier")
        assert "memfds" in tier["found"] and "survive even" not in tier["found"] and "Read-only" in tier["found"]
        nebulaml.init(str(place.storage), 0, 2, on_error="raise")
        save(1).wait("durable", 60)
        assert "keeps images in memfds" in (place.runtime / "agent.log").read_text()  # as it said
    finally:
        nebulaml._shutdown()
        for pid in place.agents():
            os.kill(pid, signal.SIGKILL)
        subprocess.run(["umount", "-l", disk], check=True)


# fault (Memory): A file is larger than the memory budget.
# result: The save is refused, with both numbers and the setting to raise. Other saves go on.
def test_a_file_that_no_budget_can_hold_is_refused_with_both_numbers(place, monkeypatch):
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "8M")
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    save(1, 2).wait("durable", 60)
    with pytest.raises(NebulaError, match=r"32 MiB|34 MiB") as caught:
        save(2, 32)
    assert "NEBULA_MEMORY_BUFFER_SIZE" in str(caught.value)
    save(3, 2).wait("durable", 60)
    assert nebulaml.get_latest_checkpoint().tag == "global_step3"


def wait_for_image(place, size):
    """Waits until an image of at least that size is lent: its trainer is copying."""
    until(lambda: any(image.st_size >= size for image in place.images()))


BIG_SAVE = """
    nm.init(sys.argv[1], 0, 2, on_error="raise")
    os.environ.pop("NEBULA_STORE_MBPS", None)  # only for the first agent
    first = nm.Checkpoint("global_step1")
    first.save("m.pt", torch.full((1000,), 1.0))
    first.commit()
    first.wait("durable", 60)
    big = torch.full((64 << 20,), 2.0)
    say("ready")
    second = nm.Checkpoint("global_step2")
    second.save("m.pt", big)
    say("saved")
    second.commit()
    second.wait("committed", 60)
    say("committed")
    second.wait("durable", 120)
    say("durable")
"""
BIG = 256 * MIB


# fault (Deaths): The agent is killed while a trainer copies.
# result: The trainer starts a new agent and saves again. Nothing is lost.
@pytest.mark.nightly("python/test_cow.py::test_an_agent_killed_during_a_copy_loses_nothing", "python/test_kills.py::test_an_agent_killed_at_any_moment_does_not_stop_the_trainer")
def test_an_agent_killed_while_a_trainer_copies_costs_nothing(place):
    process = place.trainer(BIG_SAVE, place.storage)
    assert process.stdout.readline() == "ready\n"
    wait_for_image(place, BIG)
    place.kill_agent()
    assert [line.strip() for line in process.stdout] == ["saved", "committed", "durable"]
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    nebulaml.init(str(place.storage), 0)
    assert (nebulaml.get_latest_checkpoint().load("m.pt") == 2).all()


# fault (Deaths): The agent is killed while it persists.
# result: Storage has no torn version. The next agent finds the images and finishes.
@pytest.mark.nightly("python/test_kills.py::test_an_agent_killed_at_any_moment_does_not_stop_the_trainer")
def test_an_agent_killed_while_it_persists_leaves_no_torn_version_and_the_next_one_finishes(place, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "20")  # 13 seconds in which to kill it
    process = place.trainer(BIG_SAVE, place.storage)
    folder = place.storage / "global_step2" / ".nebula"
    until(lambda: any(folder.glob("tmp-*")))
    for pid in place.agents():  # no successor while we look
        stop(pid)
    assert not (folder / "manifest-1.json").exists()
    place.kill_agent()
    assert [line.strip() for line in process.stdout][-1] == "durable"
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert (torch.load(place.storage / "global_step2" / "m.pt", mmap=True) == 2).all()


# The last page of the tensor cannot be read, and a handler that returns has the thread read it again: the copy does not end.
ENDLESS_COPY = """
    import ctypes, mmap
    def endless(size):
        memory = mmap.mmap(-1, size)
        libc, address = ctypes.CDLL(None), ctypes.addressof(ctypes.c_char.from_buffer(memory))
        signal.signal(signal.SIGSEGV, lambda *_: None)
        assert libc.mprotect(ctypes.c_void_p(address + size - mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
        return torch.frombuffer(memory, dtype=torch.float32)
"""


# fault (Deaths): The trainer is killed while it copies.
# result: That version fails. The one before can be loaded.
def test_a_trainer_killed_while_it_copies_leaves_the_version_before(place, monkeypatch):
    monkeypatch.setenv("NEBULA_CAPTURE", "copy")  # save() returns when all is copied
    process = place.trainer(ENDLESS_COPY + BIG_SAVE.replace("torch.full((64 << 20,), 2.0)", "endless(256 << 20)"), place.storage)
    assert process.stdout.readline() == "ready\n"
    wait_for_image(place, BIG)
    process.kill()
    assert process.stdout.read() == ""
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGKILL, "it ended by itself"
    nebulaml.init(str(place.storage), 0)
    found = nebulaml.get_latest_checkpoint()
    assert found.tag == "global_step1" and (found.load("m.pt") == 1).all()
    assert nebulaml.get_checkpoint("global_step2") is None


# fault (Deaths): The trainer is killed while the agent persists.
# result: The agent finishes.
@pytest.mark.nightly("python/test_kills.py::test_the_agent_makes_the_newest_durable_after_the_trainer_was_killed")
def test_a_trainer_killed_while_the_agent_persists_has_its_version_made_durable(place, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "40")  # six seconds in which to kill it
    process = place.trainer(BIG_SAVE, place.storage)
    folder = place.storage / "global_step2" / ".nebula"
    assert [process.stdout.readline() for _ in range(3)] == ["ready\n", "saved\n", "committed\n"]
    until(lambda: any(folder.glob("tmp-*")))
    process.kill()
    process.stdout.close()
    process.wait(timeout=60)
    until((folder / "manifest-1.json").exists, 120)
    assert (torch.load(place.storage / "global_step2" / "m.pt", mmap=True) == 2).all()


# fault: as test_everything_killed_at_once_resumes_from_the_memory_tier
def test_all_killed_while_persisting_and_memory_lost_leaves_the_durable_version(place, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "20")  # 13 seconds in which to kill them
    process = place.trainer(BIG_SAVE, place.storage)
    folder = place.storage / "global_step2" / ".nebula"
    until(lambda: any(folder.glob("tmp-*")))
    place.kill_all(process)
    monkeypatch.delenv("NEBULA_STORE_MBPS")
    shutil.rmtree(place.memory)
    assert not (folder / "manifest-1.json").exists()
    nebulaml.init(str(place.storage), 0)
    found = nebulaml.get_latest_checkpoint()
    assert found.tag == "global_step1" and (found.load("m.pt") == 1).all()


# fault (Arguments of the caller): `init` is called twice.
# result: Equal settings keep the session and the open checkpoint. New ones apply from then on.
def test_init_twice_with_equal_settings_keeps_the_session_and_its_open_checkpoint(place):
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    session = nebulaml._session.engine.session()
    checkpoint = nebulaml.Checkpoint("open", -2)
    checkpoint.save("a.pt", 1)
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    assert nebulaml._session.engine.session() is session and len(place.agents()) == 1
    checkpoint.save("b.pt", 2)
    assert checkpoint.commit() and sorted(checkpoint.files) == ["a.pt", "b.pt"]


def test_files_of_the_agent_are_only_for_its_user(place):
    nebulaml.init(str(place.storage), 0, 2)
    save(1)
    for path in (place.runtime, place.memory, *place.memory.glob("*.img"), *place.memory.glob("*.version")):
        mode = path.stat().st_mode
        assert not stat.S_IMODE(mode) & 0o077, path
    assert place.runtime.stat().st_uid == os.geteuid()


def as_nobody(code, *arguments):
    """Runs code as another user, without torch: that user may not be able to read this one's packages."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    return subprocess.run(
        [python, "-I", "-c", code, *map(str, arguments)],
        user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, timeout=60, cwd="/", check=False,
    )  # fmt: skip


# fault (The machine and other users): Another user connects to the socket.
# result: The mode refuses them. If the mode was loosened, the agent refuses them itself.
@needs_root
def test_the_socket_admits_its_own_user_only(place):
    nebulaml.init(str(place.storage), 0, 2)
    save(1).wait("durable", 60)
    path = place.runtime / "agent.sock"
    knock = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.settimeout(10)
try:
    s.connect(sys.argv[1])
    s.sendall(b"NEB1" + bytes(60))
    print("answered" if s.recv(1) else "closed")
except ConnectionError:
    print("closed")
except PermissionError:
    print("forbidden")
"""
    place.root.chmod(0o755)
    assert as_nobody(knock, path).stdout.strip() == "forbidden"
    # The test opens the directories to all users: the agent itself still checks the user of a client.
    place.runtime.chmod(0o755)
    path.chmod(0o777)
    assert as_nobody(knock, path).stdout.strip() == "closed"
    assert f"user {NOBODY}" in (place.runtime / "agent.log").read_text()
    place.runtime.chmod(0o700)
    assert (nebulaml.get_latest_checkpoint().load("m.pt") == 1).all()


# fault (The machine and other users): The runtime directory belongs to another user.
# result: The agent refuses it.
@needs_root
def test_a_runtime_directory_of_another_user_is_refused(place):
    place.runtime.mkdir(mode=0o700)
    os.chown(place.runtime, NOBODY, NOBODY)
    with pytest.raises(NebulaError, match=r"run"):
        nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    assert not place.agents() and os.listdir(place.runtime) == []


OLD_AGENT = """
import socket, struct, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
text = b"an agent of another version of Nebula is running: end it with `nebula stop`"
while True:  # what every version answers to a greeting that is not its own: unavailable, EPROTO, and the connection ends
    client = listener.accept()[0]
    client.recv(1 << 16)
    client.sendall(struct.pack("=IHHIiii", 0x3142454E, 1, 0, len(text), 40, 71, 0) + text)
    client.close()
"""


# fault (The machine and other users): An agent of another version of Nebula is still running.
# result: Saves fail with advice, and training goes on. `nebula stop` ends that agent by a signal, after it has
# persisted. The next save starts one of this version.
def test_an_agent_of_another_version_stops_no_training_and_nebula_stop_ends_it(place):
    place.runtime.mkdir(mode=0o700)
    path = str(place.runtime / "agent.sock")
    with subprocess.Popen([sys.executable, "-c", OLD_AGENT, path], stdout=subprocess.PIPE, text=True) as old:
        try:
            assert old.stdout.readline() == "ready\n"
            nebulaml.init(str(place.storage), 0, 2)
            with nebulaml.Checkpoint("global_step1") as checkpoint:
                assert not checkpoint.save("m.pt", 1)
            assert checkpoint.state == "failed" and "`nebula stop`" in checkpoint.error and checkpoint.all_files() == checkpoint.files == {}
            with pytest.raises(NebulaError, match="`nebula stop`"):
                nebulaml.get_latest_checkpoint()
            program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
            stopped = subprocess.run([program, "stop"], timeout=60, capture_output=True, text=True)
            assert stopped.returncode == 0 and "another version" in stopped.stdout and old.wait(60) == -signal.SIGTERM
        finally:
            old.kill()
    until(lambda: nebulaml.Checkpoint("global_step2").save("m.pt", 2))  # after a pause it tries again by itself


# fault (The machine and other users): No agent can be started any more, or it is of another version, and the program
# reads `.state`, `.error` and `.files`.
# result: Nothing is raised, except with `on_error="raise"`. The state is `failed`, or `durable` if the object had seen
# that, and `.error` says why. Calls that load raise.
def test_with_no_agent_to_be_had_looking_at_a_checkpoint_raises_nothing_and_says_why(place, monkeypatch, caplog):
    program = place.root / "nebula-copy"
    shutil.copy(os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), program)
    monkeypatch.setenv("NEBULA_AGENT_PATH", str(program))
    nebulaml.init(str(place.storage), 3600, 2)
    stored = save(1)
    stored.wait("durable", 60)  # or else the second may be the one that is persisted at once
    kept = save(2)
    program.unlink()  # as an upgrade does it, or a clean-up of /tmp
    place.kill_agent()
    with nebulaml.Checkpoint("global_step3") as checkpoint:
        assert checkpoint.save("m.pt", torch.ones(4)) is False
    found = [checkpoint, kept, stored, nebulaml.Checkpoint()]
    assert [one.state for one in found] == ["failed", "failed", "durable", "failed"]  # stored versions stay in storage
    for one in found:
        assert "nebula-copy" in one.error and one.files == one.all_files() == {}
        assert one.publish("m.pt", place.root / "published.pt") is False and one.commit() is False
    assert [one.step for one in found] == [3, 2, 1, 1]
    told = [record.message for record in caplog.records if "the state of checkpoint" in record.message]
    assert len(told) == 3  # once for each that was begun
    for load in (lambda: kept.load("m.pt"), nebulaml.get_latest_checkpoint, lambda: nebulaml.get_latest_checkpoint_path("m.pt")):
        with pytest.raises(NebulaError, match="nebula-copy"):
            load()
    nebulaml.init(on_error="raise")
    for look in (lambda: kept.state, lambda: kept.error, lambda: kept.files, kept.all_files):
        with pytest.raises(NebulaError, match="nebula-copy"):
            look()


# fault (The machine and other users): The memory directory belongs to another user, or files of another user are in
# ours.
# result: The agent neither uses nor touches them.
@needs_root
def test_a_memory_directory_of_another_user_is_never_touched(place):
    left = place.memory / f"{1:016x}.img"
    left.write_bytes(bytes(2 * MIB))
    for path in (place.memory, left):
        os.chown(path, NOBODY, NOBODY)
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    save(1).wait("durable", 60)
    assert (nebulaml.get_latest_checkpoint().load("m.pt") == 1).all()
    assert os.listdir(place.memory) == [left.name] and left.read_bytes() == bytes(2 * MIB)


# fault: as test_a_memory_directory_of_another_user_is_never_touched
@needs_root
def test_files_of_another_user_in_the_memory_directory_are_left_alone(place):
    foreign = [place.memory / f"{2:016x}.img", place.memory / f"{2:016x}.version", place.memory / "something"]
    for path in foreign:
        path.write_bytes(b"{}" if path.suffix == ".version" else bytes(2 * MIB))
        os.chown(path, NOBODY, NOBODY)
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    save(1).wait("durable", 60)
    assert all(path.exists() and path.stat().st_uid == NOBODY for path in foreign)


# fault (The machine and other users): Another user's files are in storage.
# result: Nebula never touches them, nor debris of their writes.
@needs_root
def test_files_of_another_user_in_storage_are_never_touched(place, monkeypatch):
    monkeypatch.setenv("NEBULA_SWEEP_AGE", "0")
    nebulaml.init(str(place.storage), 0, 2, keep_last=1)
    save(1).wait("durable", 60)
    foreign = [place.storage / "theirs", place.storage / "global_step1" / "theirs.pt",
               place.storage / "global_step1" / ".nebula" / "tmp-77-1"]  # fmt: skip
    for path in foreign:
        path.write_bytes(b"theirs")
        os.chown(path, NOBODY, NOBODY)
    for step in (2, 3):
        save(step).wait("durable", 60)
    until(lambda: not (place.storage / "global_step1" / "m.pt").exists())
    assert all(path.read_bytes() == b"theirs" for path in foreign)


def test_a_dead_socket_of_an_agent_long_gone_is_replaced(place):
    place.runtime.mkdir(mode=0o700)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(place.runtime / "agent.sock"))
    dead.close()
    nebulaml.init(str(place.storage), 0, 2, on_error="raise")
    save(1).wait("durable", 60)
    assert Path(place.runtime / "agent.sock").is_socket()


def test_times_of_the_agent_have_units_and_nonsense_is_said(place, monkeypatch):
    monkeypatch.setenv("NEBULA_AGENT_LINGER", "200ms")
    monkeypatch.setenv("NEBULA_SWEEP_AGE", "soon")
    nebulaml.init(str(place.storage), 0)
    nebulaml._shutdown()
    until(lambda: not place.agents())
    assert 'NEBULA_SWEEP_AGE is "soon", not a time' in (place.runtime / "agent.log").read_text()


# fault (The machine and other users): The trainer has closed its standard input, output and error output, and prints
# nevertheless.
# result: The prints fail as without Nebula. They reach no socket and no image of Nebula, whose descriptors are all
# above 2.
def test_a_trainer_without_standard_output_prints_into_no_socket_and_no_image(place):
    place.run(
        """
        import threading
        for number in (0, 1, 2):
            os.close(number)
        def noise():
            while not over:
                for number in (0, 1, 2):
                    try: os.write(number, b"printed to a closed output" * 1000)
                    except OSError: pass
        over = False
        printer = threading.Thread(target=noise)
        printer.start()
        nm.init(sys.argv[1], 0, on_error="raise")
        for step in (1, 2, 3):
            with nm.Checkpoint(f"global_step{step}") as checkpoint:
                checkpoint.save("w.pt", torch.full((1 << 20,), float(step)))
            checkpoint.wait("durable", 60)
            assert (nm.get_checkpoint(f"global_step{step}").load("w.pt") == step).all()
        over = True
        printer.join()
        """,
        place.storage,
    )
