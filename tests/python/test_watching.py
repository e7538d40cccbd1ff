"""The lines about checkpoints in the program's own log after their commit."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import nebulaml
import pytest
from nebulaml import _nebula
from nebulaml._session import engine, locate, waits, watching
from waiting import until


def save(step):
    checkpoint = nebulaml.Checkpoint(f"global_step{step}")
    checkpoint.save_bytes("b", [bytes([step]) * (3 << 20)])
    checkpoint.commit()
    return checkpoint


def lines(caplog, level, wanted=1):
    """Returns the messages of that level when there are so many."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [record.getMessage() for record in caplog.records if record.levelno == level]
        if len(found) >= wanted:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{found} is all that was logged")


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger="nebulaml")
    return caplog


def test_each_version_is_one_line_when_it_is_durable_and_nothing_else_is_said(place, caplog):
    nebulaml.init(str(place.storage), 0, 2)
    for step in (1, 2, 3):
        save(step).wait("durable", 60)
    found = lines(caplog, logging.INFO, 3)
    assert [line.split(":")[1] for line in found] == [f" checkpoint 'global_step{step}' is durable" for step in (1, 2, 3)]
    assert all(re.search(r": 3\.0 MiB, written in \d+\.\d+ s", line) for line in found)
    assert len(caplog.records) == 3


def test_storage_that_fails_is_a_warning_and_what_it_loses_an_error(place, caplog, monkeypatch):
    monkeypatch.setenv("NEBULA_PERSIST_GIVE_UP", "2")
    nebulaml.init(str(place.storage), 0, 2)
    place.storage.write_text("a file")
    save(1)
    (warning,) = lines(caplog, logging.WARNING)
    assert "storage fails, the agent tries again: " in warning and str(place.storage) in warning
    (error,) = lines(caplog, logging.ERROR)
    assert "checkpoint 'global_step1' is not durable, and will not be: the agent gave up after 2 s" in error
    place.storage.unlink()
    save(2)
    ended = lines(caplog, logging.WARNING, 2)[1]
    assert "'global_step2' is durable" in ended and ended.endswith(" Storage works again.")


def test_a_new_path_is_followed_and_the_old_one_no_more(place, caplog):
    nebulaml.init(str(place.storage), 0, 2)
    save(1).wait("durable", 60)
    lines(caplog, logging.INFO)
    nebulaml.init(str(place.root / "other"))
    save(2).wait("durable", 60)
    assert "'global_step2'" in lines(caplog, logging.INFO, 2)[1]


def test_other_ranks_and_jobs_without_storage_have_no_such_thread(place, monkeypatch):
    nebulaml.init(None, 0, 2)
    save(1)
    assert engine.default.watcher is None
    nebulaml._shutdown()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    nebulaml.init(str(place.storage), 0, 2)
    save(1)
    assert engine.default.watcher is None


def test_an_agent_that_was_told_to_stop_is_not_started_again_to_be_listened_to(place, caplog):
    nebulaml.init(str(place.storage), 0, 2)
    save(1).wait("durable", 60)
    lines(caplog, logging.INFO)
    listener = engine.default.watcher
    subprocess.run([locate.agent_path(), "stop"], check=True, capture_output=True)
    listener.join(60)
    assert not listener.is_alive() and not place.agents()
    save(2).wait("durable", 60)  # the next commit has a new one
    assert "'global_step2'" in lines(caplog, logging.INFO, 2)[1]


def test_the_thread_keeps_neither_the_session_nor_the_process(place):
    output = place.run(
        """
        nm.init(sys.argv[1], 0, 2)
        with nm.Checkpoint("global_step1") as checkpoint:
            checkpoint.save("a", {"x": torch.ones(3)})
        nm._shutdown()
        say("end")
        """,
        place.storage,
    )
    assert output == "end\n"
    nebulaml.init(str(place.storage), 0, 2)  # at once: the rank is free
    save(2).wait("durable", 60)
    assert [thread.name for thread in threading.enumerate()].count("nebula-watch") == 1


def test_the_thread_has_ended_when_a_session_is_closed(place):
    with nebulaml.Session(str(place.storage)) as session:
        with session.checkpoint("global_step1", 1) as checkpoint:
            checkpoint.save("a", 1)
        checkpoint.wait("durable", 60)
        threads = [thread for thread in threading.enumerate() if thread.name == "nebula-watch"]
        assert threads
    assert not [thread for thread in threads if thread.is_alive()]


def sockets(pid):
    return [link for path in Path(f"/proc/{pid}/fd").iterdir() if (link := os.readlink(path)).startswith("socket:")]


def test_a_thread_that_was_stopped_has_ended_and_the_next_commit_starts_another(place, caplog):
    """Lightning's own tests stop each daemon thread that a test leaves, and fail if it is alive then."""
    nebulaml.init(str(place.storage), 0, 2)
    save(1).wait("durable", 60)
    (left,) = (thread for thread in threading.enumerate() if thread.name == "nebula-watch")
    assert left.daemon
    left.stop()
    assert not left.is_alive()
    save(2).wait("durable", 60)
    until(lambda: any("global_step2" in record.getMessage() for record in caplog.records))


def test_a_forked_child_holds_none_of_its_parents_connections_and_keeps_no_agent(place, monkeypatch):
    """The child is like a worker of a data loader. The watch, a copy and a wait have their own connections, on threads that do not exist in the child."""
    monkeypatch.setenv("NEBULA_CAPTURE", "cow")
    monkeypatch.setenv("NEBULA_AGENT_LINGER", "1")
    trainer = place.trainer(
        """
        import threading
        nm.init(sys.argv[1], 0, 2)
        with nm.Checkpoint("global_step1") as checkpoint:
            checkpoint.save("a", {"x": torch.ones(4 << 20)})
        checkpoint.wait("durable")
        open_ended = nm.Checkpoint("waiting", -2)
        open_ended.save("a", 1)
        threading.Thread(target=open_ended.wait, args=("committed",), daemon=True).start()
        entries = [f"/proc/self/fd/{number}" for number in range(32)]
        while sum(os.path.islink(entry) and os.readlink(entry).startswith("socket:") for entry in entries) < 4:
            time.sleep(0.01)
        pid = os.fork()
        if not pid:
            time.sleep(120)
            os._exit(0)
        say(pid)
        time.sleep(120)
        """,
        place.storage,
    )
    child = int(trainer.stdout.readline())
    try:
        assert len(sockets(trainer.pid)) >= 4
        until(lambda: not sockets(child), 60, "the child to close what it was born with")
        trainer.kill()
        until(lambda: not place.agents(), 60, "the agent's end")
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)
        trainer.kill()
        trainer.wait()


def test_a_child_forked_while_its_parent_saves_has_a_checkpoint_and_a_log_of_its_own(place):
    code = """
        import logging
        nm.init(sys.argv[1], 0, 2)
        def save(tag):
            with nm.Checkpoint(tag) as checkpoint:
                checkpoint.save("a", {"x": torch.ones(3)})
            checkpoint.wait("durable", 60)
        save("global_step1")
        begun, said, ended = os.pipe(), os.pipe(), os.pipe()
        pid = os.fork()
        if not pid:
            class Lines(logging.Handler):
                def emit(self, record):
                    say(record.getMessage())
                    os.write(said[1], b".")
            logging.getLogger("nebulaml").addHandler(Lines())
            logging.getLogger("nebulaml").setLevel("INFO")
            nm.init(sys.argv[2])
            save("global_step2")
            os.write(begun[1], b".")
            os.read(said[0], 1)
            os.read(ended[0], 1)
            time.sleep(0.5)  # a line about the parent's version would come now
            os._exit(0)
        os.read(begun[0], 1)
        save("global_step3")
        os.write(ended[1], b".")
        assert os.waitpid(pid, 0)[1] == 0
    """
    lines = place.run(code, place.storage, place.root / "child").splitlines()
    assert len(lines) == 1 and "'global_step2' is durable" in lines[0]
    assert (place.storage / "global_step3" / "a").exists() and not (place.root / "child" / "global_step3").exists()


def of_two(monkeypatch, place, seconds="1", path=True):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NEBULA_TAKEOVER_S": seconds}.items():
        monkeypatch.setenv(name, value)
    nebulaml.init(str(place.storage) if path else None, 0, 2)
    checkpoint = nebulaml.Checkpoint("global_step1", -2)
    checkpoint.save_bytes("b", [b"x"])
    assert checkpoint.commit()
    return checkpoint


# fault (Arguments of the caller): A rank commits (-2), or saves (N files), and other ranks never do.
# result: That version is not stored. `wait` and `flush` wait and name the ranks. A `flush` of everything waits
# `NEBULA_TAKEOVER_S` after the last news of them, and then returns False or raises. Rank 0's log has a warning. The
# process that ends first logs it at its end.
def test_a_checkpoint_that_waits_for_ranks_that_never_save_is_a_warning_that_names_them(place, caplog, monkeypatch):
    of_two(monkeypatch, place)
    (warning,) = lines(caplog, logging.WARNING)
    assert "checkpoint 'global_step1' waits for rank 1 of 2: until then it is neither stored" in warning and "world=1" in warning


# fault: as test_a_checkpoint_that_waits_for_ranks_that_never_save_is_a_warning_that_names_them
@pytest.mark.parametrize("path", [True, False])
def test_a_flush_is_not_true_while_other_ranks_have_not_committed_and_names_them(place, caplog, monkeypatch, path):
    checkpoint = of_two(monkeypatch, place, path=path)
    begun = time.monotonic()
    assert nebulaml.flush_persistence() is False and time.monotonic() - begun < 20
    assert any("waits for rank 1 of 2" in line and "world=1" in line for line in lines(caplog, logging.ERROR))
    nebulaml.init(on_error="raise")
    with pytest.raises(nebulaml.NebulaTimeout, match="waits for rank 1 of 2"):
        nebulaml.flush_persistence(timeout=0.1)
    assert checkpoint.state == "capturing"


def test_a_wait_that_lasts_says_in_the_log_what_for_and_goes_on(place, caplog, monkeypatch):
    checkpoint = of_two(monkeypatch, place, "1000")
    monkeypatch.setattr(waits, "SAY_AFTER_MS", 300)
    for wait in (lambda: checkpoint.wait("committed", 1), lambda: nebulaml.flush_persistence("global_step1", timeout=1)):
        begun = time.monotonic()
        with contextlib.suppress(nebulaml.NebulaTimeout):
            assert wait() is False
        assert 0.99 <= time.monotonic() - begun < 20  # an agent's clock ends a slice a little early
        (warning,) = [record.getMessage() for record in caplog.records if "still waiting for" in record.getMessage()]
        assert "'global_step1'" in warning and "waits for rank 1 of 2" in warning
        caplog.clear()


# fault: as test_a_checkpoint_that_waits_for_ranks_that_never_save_is_a_warning_that_names_them
def test_a_process_that_ends_before_the_others_have_committed_says_so(place, monkeypatch):
    code = """
        import logging
        class Lines(logging.Handler):
            def emit(self, record):
                say(record.getMessage())
        logging.getLogger("nebulaml").addHandler(Lines())
        nm.init(sys.argv[1], 0, 2)
        with nm.Checkpoint("global_step1", -2) as checkpoint:
            checkpoint.save("a", {"x": torch.ones(3)})
        if os.environ["WORLD_SIZE"] == "1":
            say("alone")
    """
    for world, said in (("2", "its last checkpoint is not complete: .*waits for rank 1 of 2"), ("1", "^alone$")):
        for name, value in {"RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}.items():
            monkeypatch.setenv(name, value)
        (line,) = place.run(code, place.storage).splitlines()
        assert re.search(said, line), line


RANK = """
rank, last = int(sys.argv[2]), int(sys.argv[3])
os.environ.update(RANK=sys.argv[2], WORLD_SIZE="2", LOCAL_RANK=sys.argv[2], LOCAL_WORLD_SIZE="2", NEBULA_RUN="one")
import logging
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
nm.init(sys.argv[1], 0)
for step in range(1, last + 1):
    with nm.Checkpoint(f"global_step{step}", -2) as checkpoint:
        checkpoint.save(f"{rank}.pt", torch.ones(3))
    say("saved", step)
    if step <= 2:
        checkpoint.wait("durable")
say("end")
sys.stdin.readline()
"""


# fault (The machine and other users): One rank dies, and the others save on (`-2`).
# result: Their calls succeed, and no version becomes complete. The log of rank 0 names the dead rank: at the first
# lost version, the second, the fourth, and so on. `nebula status` and `list` say why, and name the newest version that
# can be loaded.
def test_a_rank_that_is_gone_is_named_by_the_log_and_by_status_and_list_with_the_newest_that_can_be_loaded(place):
    """Its version is lost for the others, whose own calls succeed. The log does not get a line for each save."""
    stays = place.trainer(RANK, place.storage, 0, 12, stdin=True)
    goes = place.trainer(RANK, place.storage, 1, 2, stdin=True)
    assert [goes.stdout.readline() for _ in range(3)] == ["saved 1\n", "saved 2\n", "end\n"]
    goes.kill()
    goes.wait()
    said = []

    def lost():
        return [line for line in said if "is not durable" in line]

    until(lambda: said.append(stays.stdout.readline()) or (len(lost()) == 4 and "end\n" in said))
    assert not [line for line in lost() if "rank 1 (process" not in line]
    assert "so for 8 checkpoints" in lost()[-1]

    def asked(*words):
        return subprocess.run([locate.agent_path(), *words, "--path", place.storage], capture_output=True, text=True, check=True).stdout

    for command in ("status", "list"):
        text = asked(command)
        assert re.search(r"^newest   global_step2, durable, in (memory\+)?storage$", text, re.MULTILINE), text
        assert re.search(r"10 newer cannot be loaded: global_step12 failed: rank 1 \(process \d+\) ended before it began", text), text
        assert re.search(r"^global_step12 .* failed .* rank 1 \(process \d+\) ended before it began", text, re.M), text
    assert json.loads(asked("list", "--json"))["newest"] == "global_step2"
    stays.communicate("\n", timeout=60)


# fault: as a_trouble_has_one_line_again_ever_more_slowly_and_one_when_it_ends
def test_a_trouble_is_a_line_ever_more_rarely_and_one_more_when_it_ends(caplog):
    caplog.set_level(logging.INFO, "nebulaml")
    watcher = object.__new__(watching.Watcher)
    watcher.storage_error, watcher.failures, watcher.incomplete = "", 0, 0

    def told(kind, times, text="", numbered=False):
        caplog.clear()
        for number in range(times):
            watcher.say(kind, f"global_step{number}", 1000, 0.0, f"{text} {number}" if numbered else text)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    assert len(told(_nebula.EVENT_STORAGE, 1000, "No space left on device")) == 1
    assert len(told(_nebula.EVENT_STORAGE, 1000, "No space left on device: bytes free:", numbered=True)) == 9, "1, 2, 4, ... 512 with the one before"
    ((level, text),) = told(_nebula.EVENT_DURABLE, 1)
    assert level == "WARNING" and "Storage works again" in text
    assert len(told(_nebula.EVENT_LOST, 1000, "rank 1 ended")) == 10
    ((level, text),) = told(_nebula.EVENT_DURABLE, 1)
    assert level == "WARNING" and "the first after 1000 that are not" in text
    ((level, text),) = told(_nebula.EVENT_DURABLE, 1)
    assert level == "INFO"
