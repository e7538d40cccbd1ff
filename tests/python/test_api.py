"""init(), tags, names, finding and listing: the calls that existing scripts make."""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import logging
import os
import pathlib
import pydoc
import signal
import sys
import threading
import zipfile

import nebulaml
import pytest
import torch
from nebulaml import _nebula
from nebulaml._session import config, engine, notices, ranks
from nebulaml.errors import NebulaConfigError, NebulaError, NebulaNotFound, NebulaTimeout, NebulaUnavailable
from nebulaml.integrations import stand_in
from nebulaml.tensors import pickling
from waiting import until


def save(tag, value=1.0, name="m.pt", count=None):
    checkpoint = nebulaml.Checkpoint(tag) if count is None else nebulaml.Checkpoint(tag, count)
    assert checkpoint.save(name, {"w": torch.full((10,), float(value))})
    assert checkpoint.commit()
    return checkpoint


# -- init


def test_arguments_fill_from_the_environment_and_keep_what_is_not_given(place, monkeypatch):
    monkeypatch.setenv("NEBULA_PERSISTENT_STORAGE_PATH", str(place.storage))
    monkeypatch.setenv("NEBULA_PERSISTENT_TIME_INTERVAL", "7")
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "512M")
    monkeypatch.setenv("NEBULA_JOB", "evals")
    first = engine.settings()  # the program has not called init()
    assert (first.persist_path, first.persist_interval_s, first.memory_bytes, first.job) == (str(place.storage), 7, 512 << 20, "evals")
    nebulaml.init(None, 0)
    nebulaml.init(num_of_version_in_retention=3)
    assert (engine.settings().persist_interval_s, engine.settings().retention_count) == (0, 3)


def test_keep_every_is_refused_where_it_would_keep_nothing_from_going(place):
    nebulaml.init(keep_last=2, keep_every=4)
    with pytest.raises(NebulaConfigError, match=r"keep_every=4 .* no effect without.*keep_last=1"):
        nebulaml.init(keep_last=0)
    assert (engine.settings().keep_last, engine.settings().keep_every) == (2, 4)
    nebulaml.init(keep_last=0, keep_every=0)
    nebulaml._shutdown()
    with pytest.raises(NebulaConfigError, match="keep_last=1"):
        nebulaml.init(keep_every=4)
    assert not nebulaml.is_initialized()


def test_asking_for_the_path_settles_nothing(place, monkeypatch):
    assert nebulaml.persist_path() is None and not nebulaml.is_initialized()
    monkeypatch.setenv("NEBULA_PERSISTENT_STORAGE_PATH", str(place.storage))
    assert nebulaml.persist_path() == str(place.storage) and not nebulaml.is_initialized()


def test_a_one_tuple_path_is_unwrapped_with_a_warning_and_made_absolute(place, monkeypatch, caplog):
    monkeypatch.chdir(place.root)
    nebulaml.init(("here",))
    assert engine.settings().persist_path == str(place.root / "here")
    assert "comma" in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [
        {"persistent_storage_path": 5},
        {"persistent_time_interval": "soon"},
        {"persistent_time_interval": -1},
        {"persistent_time_interval": "4G"},
        {"persistent_time_interval": float("nan")},
        {"num_of_version_in_retention": 0},
        {"num_of_version_in_retention": 1.5},
        {"num_of_version_in_retention": "9" * 400},
        {"persistent_time_interval": float("inf")},
        {"persistent_time_interval": 2_000_000_000},
        {"on_full": "explode"},
        {"on_error": "ignore"},
        {"keep_last": True},
        {"job": 3},
        {"keep_every": 1 << 40},
        {"persistent_time_interval": "9" * 400},
    ],
)
def test_invalid_settings_are_refused(arguments):
    with pytest.raises(NebulaConfigError, match=str(next(iter(arguments.values())))):
        nebulaml.init(**arguments)


@pytest.mark.parametrize("name", ["persistent_time_interval", "num_of_version_in_retention", "keep_last"])
@pytest.mark.parametrize("digits", [400, 5000])  # Python writes out no int of 5000
def test_a_number_that_no_float_can_be_is_refused(name, digits):
    with pytest.raises(NebulaConfigError, match=f"{name} has more than 308 digits"):
        nebulaml.init(**{name: 10**digits})


def test_numbers_of_numpy_are_numbers(place):
    numpy = pytest.importorskip("numpy")
    nebulaml.init(str(place.storage), numpy.float32(0.5), numpy.int64(3), replicas=numpy.uint8(0), keep_last=numpy.int32(4))
    settings = engine.settings()
    assert (settings.persist_interval_s, settings.retention_count, settings.keep_last) == (0.5, 3, 4)
    save("global_step1", count=numpy.int64(1)).wait("durable", numpy.float32(30))
    for wrong in (numpy.float64("nan"), numpy.float32("inf"), numpy.int64(-1), numpy.bool_(True)):
        with pytest.raises(NebulaConfigError):
            nebulaml.init(persistent_time_interval=wrong)


REFUSED = {
    "a scheme that no driver has": {"persistent_storage_path": "ftp://host/run"},
    "a URL that pathlib has shortened": {"persistent_storage_path": pathlib.PurePosixPath("s3://bucket/run")},
    "a path that is too long": {"persistent_storage_path": "/tmp/" + "a/" * 3000},
    "a job whose name is too long": {"job": "x" * 5000},
    "too many replicas": {"replicas": 9},
    "an interval of years": {"persistent_time_interval": 2_000_000_000},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_an_init_that_is_refused_changes_nothing(place, change):
    with pytest.raises(NebulaConfigError):
        nebulaml.init(**change)
    assert not nebulaml.is_initialized()
    nebulaml.init(str(place.storage), 0, on_error="raise")
    before = engine.settings()
    begun = nebulaml.Checkpoint("global_step1")
    begun.save("a.pt", 1)
    with pytest.raises(NebulaConfigError):
        nebulaml.init(num_of_version_in_retention=5, **change)
    assert engine.settings() == before
    begun.save("b.pt", 2)
    begun.commit()
    begun.wait("durable", 60)
    assert nebulaml.get_latest_checkpoint().load("b.pt") == 2
    nebulaml.init(keep_last=3)


@pytest.mark.parametrize("text", ["a\0b", "\udcff", "", "x" * 300, 5])
def test_invalid_tags_and_names_are_refused_by_their_kind(nm, text):
    for call in (nm.Checkpoint, nm.get_checkpoint, nm.flush_persistence, lambda name: nm.Checkpoint("global_step1").save(name, 1)):
        with pytest.raises(NebulaConfigError):
            call(text)


@pytest.mark.parametrize("text", ["/a\0b", "/\udcff"])
def test_a_setting_that_is_not_text_is_refused_when_it_is_given(nm, text):
    for call in (nm.init, lambda text: nm.init(job=text), nm.get_latest_checkpoint, nm.list_checkpoints):
        with pytest.raises(NebulaConfigError, match="must be valid UTF-8 without NUL"):
            call(text)
    assert nm.Checkpoint("global_step1").save("a.pt", 1)


def test_a_state_or_a_files_name_that_is_no_text_is_refused_as_such(nm):
    checkpoint = save("global_step1")
    for state in (None, 5, "a\0b", "\udcff", "stored", "failed"):
        with pytest.raises(NebulaConfigError, match=r"a state is a string|a state must be|no state to wait for is called '(stored|failed)'"):
            checkpoint.wait(state)
    with pytest.raises(NebulaConfigError, match="a file name is a string, not 5"):
        nm.get_latest_checkpoint_path(5)


def test_a_timeout_is_seconds_however_many(nm):
    checkpoint = save("global_step1")
    checkpoint.wait("durable", float("inf"))
    assert nm.flush_persistence(timeout=1e300)
    for timeout in (float("nan"), "soon", True):
        with pytest.raises(NebulaConfigError, match="a timeout is"):
            checkpoint.wait("durable", timeout)
        with pytest.raises(NebulaConfigError, match="a timeout is"):
            nm.flush_persistence(timeout=timeout)


def test_a_working_directory_that_is_gone_costs_no_training_and_no_history(place, monkeypatch, caplog):
    gone = place.root / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.delenv("NEBULA_OUTPUT_DIR")
    monkeypatch.setenv("AZUREML_RUN_ID", "run7")
    nebulaml.init(str(place.storage), 0)
    assert "checkpointHistories.csv is written beside the storage" in caplog.text
    save("global_step1").wait("durable", 60)
    until(lambda: (place.storage / ".nebula" / "checkpointHistories.csv").exists())
    with pytest.raises(NebulaConfigError, match="'here' is relative, and the working directory is gone"):
        nebulaml.init("here")


# fault: as test_init_twice_with_equal_settings_keeps_the_session_and_its_open_checkpoint
def test_a_second_init_moves_what_follows_to_the_new_path(place):
    nebulaml.init(str(place.root / "a"), 0, 2, on_error="raise")
    save("t1").wait("durable", 60)
    nebulaml.init(str(place.root / "b"), 0, 2)
    save("t2").wait("durable", 60)
    assert (place.root / "a" / "t1" / "m.pt").exists() and (place.root / "b" / "t2" / "m.pt").exists()
    assert not (place.root / "a" / "t2").exists()


def test_after_an_init_with_another_path_every_answer_is_of_the_new_one(place):
    old, new = str(place.root / "a"), str(place.root / "b")
    nebulaml.init(old, 1000, 2, on_error="raise")
    first = save("t1", 1)
    nebulaml.init(new)
    assert nebulaml.get_latest_checkpoint() is None and nebulaml.get_checkpoint("t1") is None
    assert nebulaml.list_checkpoints() == {} and nebulaml.get_latest_checkpoint_path("m.pt") is None
    with pytest.raises(NebulaNotFound):
        nebulaml.flush_persistence("t1")
    second = save("t2", 2)
    assert nebulaml.flush_persistence() and second.state == "durable"
    assert nebulaml.get_latest_checkpoint_path("m.pt") == f"{new}/t2/m.pt"
    assert first.load("m.pt")["w"].eq(1).all() and nebulaml.get_latest_checkpoint(old).tag == "t1"
    first.wait("durable", 60)
    assert (place.root / "a" / "t1" / "m.pt").exists() and not (place.root / "b" / "t1").exists()


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("change", [{"persistent_storage_path": "b"}, {"job": "other"}])
def test_a_checkpoint_that_was_begun_elsewhere_takes_no_more_files(place, monkeypatch, change, on_error):
    monkeypatch.chdir(place.root)
    nebulaml.init("a", 0, 2, on_error=on_error)
    begun = nebulaml.Checkpoint("half", -2)
    begun.save("a.pt", 1)
    nebulaml.init(**change)
    for attempt in (begun.commit, lambda: begun.save("b.pt", 2)):
        if on_error == "raise":
            with pytest.raises(NebulaError, match=f"'half' was begun in {place.root}/a, and init.. has named .*: begin it again"):
                attempt()
        else:
            assert attempt() is False
    assert begun.commit() is False
    for path in ("a", "b"):
        assert nebulaml.get_checkpoint("half", path) is None
    with nebulaml.Checkpoint("half", -2) as again:
        again.save("b.pt", 3)
    assert nebulaml.get_checkpoint("half").load("b.pt") == 3


def test_a_save_that_fails_in_a_checkpoint_that_is_complete_already_stops_nothing(nm, monkeypatch, caplog):
    nm.init(on_error="warn")
    checkpoint = nm.Checkpoint("counted", 1)
    assert checkpoint.save("a.pt", 1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.default, "session", lambda: (_ for _ in ()).throw(NebulaUnavailable("no agent")))
        patch.setattr(checkpoint, "_handle", None)
        assert checkpoint.save("b.pt", 2) is False
    assert checkpoint.commit() is False and "is complete and cannot be marked as failed" in caplog.text
    assert list(nm.get_checkpoint("counted").files) == ["a.pt"]


def test_numbers_of_every_kind():
    from nebulaml._session.config import parse_number, parse_seconds

    assert parse_seconds("x", "10m") == 600 and parse_seconds("x", " 250 ms ") == 0.25 and parse_seconds("x", 3) == 3
    assert parse_seconds("x", "2.5") == 2.5 and parse_seconds("x", "1H") == 3600 and parse_seconds("x", "2d") == 172800
    assert parse_number("x", "4G") == 4 << 30 and parse_number("x", "1.5k") == 1536
    assert parse_number("x", " 10 MiB ") == 10 << 20 and parse_number("x", 3) == 3


def test_ranks_come_from_whichever_launcher_there_is(monkeypatch):
    assert ranks.current() == (0, 1, 0, 1)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert ranks.current()[:3] == (3, 8, 1)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks.current() == (5, 6, 2, 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert ranks.current() == (5, 6, 2, 6)
    monkeypatch.setattr(ranks, "_nodes", 1)
    ranks.take_nodes(2)
    assert ranks.current() == (5, 6, 2, 3)


def test_a_changed_rank_is_noticed_in_every_kind_of_environment_mapping(monkeypatch):
    held = ranks.mark()
    assert ranks.mark() == held
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "NEBULA_NODE_ID", "SLURM_NNODES"):
        monkeypatch.setenv(name, "1")
        assert ranks.mark() != held
        held = ranks.mark()
    monkeypatch.setattr(os, "environ", dict(os.environ))  # as some programs do
    held = ranks.mark()
    os.environ["WORLD_SIZE"] = "2"
    assert ranks.mark() != held and ranks.current()[:2] == (1, 2)


# -- tags and names


# fault (Arguments of the caller): A tag or name is empty, too long, or not UTF-8.
# result: `NebulaConfigError` at once.
def test_tags_and_names_that_no_storage_can_hold_are_refused_at_once(nm):
    for tag in ("", "x" * 300, 5, b"x"):
        with pytest.raises(NebulaConfigError):
            nm.Checkpoint(tag)
    checkpoint = nm.Checkpoint("fine")
    for name in ("", "y" * 300, None):
        with pytest.raises(NebulaConfigError):
            checkpoint.save(name, 1)
    for count in (0, -1, -3, 1.5, True):
        with pytest.raises(NebulaConfigError):
            nm.Checkpoint("fine", count)


# fault (Arguments of the caller): A tag or name has slashes, newlines, Unicode, `.` or `..` (`%2E` and `%2E.` in
# storage).
# result: It is kept, and stays inside the storage path.
@pytest.mark.parametrize("text", ["a/b", "..", ".", "line\nbreak", "Grüße ✓", "latest", ".hidden", "100%", "sp ace"])
def test_odd_tags_and_names_are_kept_and_stay_inside_the_storage_path(text, nm, place):
    checkpoint = save(text, name=text)
    checkpoint.wait("durable", 60)
    found = nm.get_checkpoint(text)
    assert found.tag == text and list(found.files) == [text]
    assert (found.load(text)["w"] == 1).all()
    path = nm.get_latest_checkpoint_path(text)
    assert os.path.realpath(path).startswith(str(place.storage) + os.sep)
    assert (torch.load(path)["w"] == 1).all()
    assert sorted(entry.name for entry in place.root.iterdir() if entry.name not in ("run", "output")) == ["storage"]


def test_without_a_tag_the_count_goes_on(nm):
    assert save(None).tag == "checkpoint-1"
    assert save(None).tag == "checkpoint-2"


def test_without_a_tag_a_new_process_counts_on(nm, place):
    save(None)
    save(None)
    nm.flush_persistence()
    code = "nm.init(sys.argv[1], 0)\nsay(nm.Checkpoint().tag)"
    nm._shutdown()
    assert place.run(code, place.storage).strip() == "checkpoint-3"


# fault: as test_ranks_count_checkpoints_without_a_name_from_one_number
def test_ranks_of_a_process_group_count_checkpoints_without_a_name_from_the_number_of_the_first(nm, place, monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(ranks, "store", lambda: store)
    for name, value in ("RANK", 1), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1):
        monkeypatch.setenv(name, str(value))
    with nm.Session(place.storage, on_error="raise") as session:
        store.set(f"nebula/own-tags/{session._engine.agreement.number}/1", "41")  # the first rank, which knows a version that this node lacks
        assert [session.checkpoint().tag for _ in range(2)] == ["checkpoint-42", "checkpoint-43"]


def test_a_signal_handler_may_start_a_checkpoint_while_another_is_being_named(nm, monkeypatch):
    known, tags = engine.default.versions, []

    def interrupted(path):
        if not tags:
            tags.append("the handler runs once")
            signal.raise_signal(signal.SIGUSR1)
        return known(path)

    def handler(number, frame):
        assert engine.default.own_tags._lock.acquire(timeout=60), "the handler waits for the thread that it interrupted"
        engine.default.own_tags._lock.release()
        tags.append(nm.Checkpoint().tag)

    monkeypatch.setattr(engine.default, "versions", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        tags.append(nm.Checkpoint().tag)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert tags[1:] == ["checkpoint-1", "checkpoint-2"]


def test_a_child_forked_while_a_thread_opens_the_session_has_one_of_its_own(nm):
    held, done = threading.Event(), threading.Event()

    def open_slowly():
        with engine.default._lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=open_slowly)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if engine.default._lock.acquire(timeout=60) and nm.get_latest_checkpoint() is None else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_at_the_end_of_the_interpreter_where_no_thread_begins_waiting_works(nm, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    checkpoint = save("global_step1")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        checkpoint.wait("durable", 60)
        assert nm.flush_persistence(timeout=60)


def test_an_exception_whose_text_is_not_utf8_is_the_one_that_is_raised(nm):
    with pytest.raises(ValueError, match="\udcff"), nm.Checkpoint("global_step1") as checkpoint:
        raise ValueError("no such file: \udcff")
    assert checkpoint.state == "failed" and "no such file" in checkpoint.error


def test_steps_are_read_from_tags(nm):
    assert nm.Checkpoint("global_step12").step == 12
    assert nm.Checkpoint("best").step is None


# -- saving and finding


# fault (Arguments of the caller): A tag and name are saved again.
# result: The file is replaced as a whole. Files that were not rewritten carry over.
def test_saving_a_name_again_replaces_it(nm):
    checkpoint = nm.Checkpoint("again")
    checkpoint.save("m.pt", 1)
    checkpoint.save("m.pt", 2)
    assert checkpoint.commit() and checkpoint.load("m.pt") == 2


def test_ranges_that_are_saved_change_no_more(nm):
    ranges = pickling.ranges([b"x" * 100, torch.full((5,), 7, dtype=torch.uint8)], "raw")
    handle = engine.session().begin("ranges", _nebula.FILES_OPEN)
    handle.save_ranges("raw", ranges)
    for change in (lambda: ranges.append(0, 0, None), lambda: ranges.put_on(0, 0, 1)):
        with pytest.raises(RuntimeError, match="change no more"):
            change()
    handle.commit()
    assert len(ranges) == 2 and ranges[0][0] is not None
    assert nebulaml.get_checkpoint(tag="ranges").read_bytes("raw") == b"x" * 100 + b"\x07" * 5


def test_a_second_object_for_a_tag_adds_files(nm):
    nm.Checkpoint("both").save("a.pt", "a")
    second = nm.Checkpoint("both")
    second.save("b.pt", "b")
    second.commit()
    found = nm.get_checkpoint("both")
    assert sorted(found.files) == ["a.pt", "b.pt"] and found.load("a.pt") == "a"


# fault: as test_saving_a_name_again_replaces_it
def test_a_tag_written_again_keeps_the_files_it_did_not_rewrite(nm):
    first = nm.Checkpoint("twice")
    first.save("a.pt", "old a")
    first.save("b.pt", "old b")
    first.commit()
    first.wait("durable", 60)
    second = nm.Checkpoint("twice")
    second.save("a.pt", "new a")
    second.commit()
    found = nm.get_checkpoint("twice")
    assert (found.load("a.pt"), found.load("b.pt")) == ("new a", "old b")
    second.wait("durable", 60)
    found = nm.get_checkpoint("twice")
    assert (found.load("a.pt"), found.load("b.pt")) == ("new a", "old b")


def test_of_steps_that_are_saved_at_the_same_time_the_highest_is_the_newest_whichever_is_complete_last(nm):
    steps = {step: nm.Checkpoint(f"global_step{step}", -2) for step in (9, 10)}
    for step in (9, 10):
        steps[step].save("m.pt", step)
    for step in (10, 9):
        steps[step].commit()
    assert nm.get_latest_checkpoint().tag == "global_step10"


def test_other_tags_are_ordered_by_their_commits_and_not_by_their_numbers(nm, place):
    save("v10", 10).wait("durable", 60)
    save("v9", 9)
    assert nm.get_latest_checkpoint().tag == "v9"
    save("global_step500", 500)
    save("loss0.30", 30).wait("durable", 60)
    assert nm.get_latest_checkpoint().tag == "loss0.30"
    place.lose_memory()
    assert nm.get_latest_checkpoint().tag == "loss0.30"  # of what storage holds


def test_a_handle_of_a_writing_that_was_lost_does_not_take_an_earlier_one_for_its_own(place):
    nebulaml.init(str(place.storage), 3600, on_error="raise")
    save("last", 1).wait("durable", 60)
    lost = save("last", 2)
    lost.wait("committed", 60)
    place.lose_memory()
    with pytest.raises(NebulaError, match="neither memory nor storage has it any more"):
        lost.wait("durable", 60)
    assert nebulaml.get_checkpoint("last").load("m.pt")["w"][0] == 1


# fault (Arguments of the caller): A tag does not exist.
# result: The search returns `None`.
def test_nothing_there_gives_none(nm, place):
    assert nm.get_latest_checkpoint() is None
    assert nm.get_checkpoint("absent") is None
    assert nm.get_latest_checkpoint(str(place.root / "elsewhere")) is None
    assert nm.get_latest_checkpoint_path("m.pt", str(place.storage)) is None
    assert nm.list_checkpoints() == {}


def test_the_directory_of_one_checkpoint_is_no_path_without_any(nm, place):
    save("global_step1").wait("durable", 60)
    with pytest.raises(NebulaConfigError, match=f"is a checkpoint, .*: give {place.storage}$"):
        nm.get_latest_checkpoint(str(place.storage / "global_step1"))


def test_an_uncommitted_checkpoint_is_not_found(nm):
    nm.Checkpoint("open", -2).save("m.pt", 1)
    assert nm.get_latest_checkpoint() is None


def test_n_files_make_a_checkpoint_complete(nm):
    checkpoint = nm.Checkpoint("counted", 2)
    checkpoint.save("a.pt", 1)
    assert nm.get_latest_checkpoint() is None
    checkpoint.save("b.pt", 2)
    checkpoint.wait("committed", 60)
    assert nm.get_latest_checkpoint().tag == "counted"


# fault (Arguments of the caller): A name does not exist.
# result: `NebulaNotFound` lists the names that exist.
def test_a_missing_name_lists_the_names_there_are(nm):
    checkpoint = save("names")
    with pytest.raises(NebulaNotFound, match=r"'names'.*'other\.pt'.*m\.pt"):
        checkpoint.load("other.pt")
    with pytest.raises(KeyError):
        checkpoint.load("other.pt")


# fault (Arguments of the caller): Nothing is saved to a checkpoint, and it is committed.
# result: `commit` returns False, or raises. The checkpoint is `failed` and says why.
@pytest.mark.parametrize("count", [-2, None])
def test_a_checkpoint_without_any_file_is_no_success(place, caplog, count):
    nebulaml.init(place.storage, 0)
    checkpoint = nebulaml.Checkpoint("empty", count)
    assert not checkpoint.commit() and checkpoint.state == "failed" and checkpoint.error == 'nothing was saved to checkpoint "empty"'
    assert 'nothing was saved to checkpoint "empty"' in caplog.text
    nebulaml.init(on_error="raise")
    with pytest.raises(nebulaml.NebulaError, match="nothing was saved"):
        nebulaml.Checkpoint("none", count).commit()


def test_the_bytes_of_a_file_in_memory_alone_have_the_sums_of_a_zip_file(place):
    nebulaml.init("", 0)
    checkpoint = nebulaml.Checkpoint("x", 1)
    checkpoint.save("f.pt", {"a": torch.arange(300_000.0), "b": torch.ones(5)})
    assert checkpoint.commit()
    content = checkpoint.read_bytes("f.pt")
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        assert file.testzip() is None and all(one.CRC for one in file.infolist() if one.file_size)
    assert torch.equal(torch.load(io.BytesIO(content))["a"], torch.arange(300_000.0)) and checkpoint.read_bytes("f.pt") == content


def test_another_path_is_another_job(nm, place):
    save("global_step4", 4).wait("durable", 60)
    nm.init(str(place.root / "second"), 0)
    assert nm.get_checkpoint("global_step4") is None
    found = nm.get_checkpoint("global_step4", str(place.storage))
    assert (found.load("m.pt")["w"] == 4).all()


def test_the_path_of_the_newest_is_a_plain_torch_file(nm, place):
    nm.init(persistent_time_interval=1000)
    save("global_step1", 1)
    save("global_step2", 2)
    path = nm.get_latest_checkpoint_path("m.pt", str(place.storage))
    assert path == str(place.storage / "global_step2" / "m.pt")
    assert (torch.load(path, mmap=True)["w"] == 2).all()


def test_a_process_that_names_no_path_gets_files_of_another_path_and_waits_for_them(nm, place):
    nm.init(persistent_time_interval=1000)
    save("global_step1", 1).wait("durable", 60)
    save("global_step2", 2)
    code = """
        print(nm.get_latest_checkpoint_path("m.pt", sys.argv[1]))
        nm.get_checkpoint("global_step2", sys.argv[1]).wait("durable", 60)
    """
    assert place.run(code, place.storage).strip() == str(place.storage / "global_step2" / "m.pt")


def test_a_checkpoint_without_a_storage_path_stays_in_memory_after_a_later_init_with_a_path(place):
    begun = save("global_step1")
    for held in (begun, nebulaml.get_latest_checkpoint()):
        with pytest.raises(NebulaConfigError, match="will never be durable"):
            held.wait("durable", 60)
    nebulaml.init(str(place.storage), 0)
    with pytest.raises(NebulaConfigError, match="will never be durable"):
        begun.wait("durable", 60)


def test_the_list_can_be_written_as_json(nm):
    save("global_step1").wait("durable", 60)
    save("global_step2").wait("durable", 60)
    listed = nm.list_checkpoints()
    assert json.loads(json.dumps(listed)) == listed and sorted(listed) == ["global_step1", "global_step2"]
    assert listed["global_step1"]["state"] == "durable"


def test_states_and_waits_and_statistics(nm):
    checkpoint = save("global_step3")
    assert checkpoint.state in ("committed", "durable")
    checkpoint.wait("durable", timeout=60)
    assert checkpoint.state == "durable" and checkpoint.error is None
    until(nm.stats)
    assert nm.stats()[-1]["tag"] == "global_step3"
    with pytest.raises(NebulaConfigError, match="no state to wait for is called 'finished'"):
        checkpoint.wait("finished")


def test_a_wait_that_is_too_short_says_so_and_what_for(nm, monkeypatch):
    checkpoint = nm.Checkpoint("open", -2)
    checkpoint.save("m.pt", 1)
    with pytest.raises(NebulaTimeout, match=r'"open" is .*; it waits for a commit'):
        checkpoint.wait("committed", timeout=0.2)
    with pytest.raises(TimeoutError):
        checkpoint.wait("committed", timeout=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    checkpoint = nm.Checkpoint("of three", -2)
    checkpoint.save("m.pt", 1)
    checkpoint.commit()
    with pytest.raises(NebulaTimeout, match=r'"of three" is .*; it waits for ranks 1, 2 of 3'):
        checkpoint.wait("durable", timeout=0.2)


def test_flush_returns_when_everything_is_durable(nm):
    nm.init(persistent_time_interval=1000)
    tags = [save(f"global_step{step}").tag for step in range(2)]
    assert nm.flush_persistence(tags[0]) and nm.get_checkpoint(tags[0]).state == "durable"
    assert nm.flush_persistence() and nm.get_checkpoint(tags[1]).state == "durable"


def test_without_a_path_memory_is_all_there_is(place):
    nebulaml.init(on_error="raise")
    checkpoint = save("m1")
    assert nebulaml.flush_persistence() is True
    with pytest.raises(NebulaConfigError, match="persistent_storage_path"):
        checkpoint.wait("durable", 1)
    assert (nebulaml.get_latest_checkpoint().load("m.pt")["w"] == 1).all()


def test_without_a_path_a_flush_waits_for_the_copies(place):
    code = """
    nm.init(on_error="raise")
    assert nm.flush_persistence() and nm.flush_persistence("m1")
    checkpoint = nm.Checkpoint("m1")
    checkpoint.save("m.pt", {"w": torch.ones(30_000_000)})
    checkpoint.commit()
    assert nm.flush_persistence()
    say(checkpoint.state)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert place.run(code, returncode=-signal.SIGKILL).split() == ["committed"]
    nebulaml.init(on_error="raise")
    assert (nebulaml.get_checkpoint("m1").load("m.pt")["w"] == 1).all()


def test_the_context_manager_commits_or_gives_up(nm):
    with nm.Checkpoint("good") as checkpoint:
        checkpoint.save("m.pt", 1)
    assert nm.get_checkpoint("good").load("m.pt") == 1
    checkpoint = nm.Checkpoint("bad")

    def training():
        with checkpoint:
            checkpoint.save("m.pt", 1)
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        training()
    assert nm.get_checkpoint("bad") is None
    assert checkpoint.state == "failed" and "on purpose" in checkpoint.error


def test_a_commit_by_any_object_of_a_tag_closes_it_with_the_files_of_all(nm):
    first, second = nm.Checkpoint("shared", -2), nm.Checkpoint("shared", -2)
    first.save("a.pt", "a")
    second.save("b.pt", "b")
    assert second.commit() and first.commit()
    first.save("c.pt", "c")  # the tag is written again, and files that are not written again stay
    assert sorted(nm.get_checkpoint("shared").files) == ["a.pt", "b.pt"]
    assert first.commit()
    assert sorted(nm.get_checkpoint("shared").files) == ["a.pt", "b.pt", "c.pt"]


@pytest.mark.parametrize("count", [None, -2])
def test_inside_a_with_block_no_other_object_closes_the_tag(nm, count):
    with nm.Checkpoint("best", count) as checkpoint:
        checkpoint.save("model.pt", "old")
        checkpoint.save("optim.pt", "old")
    before = nm.get_checkpoint("best")
    with nm.Checkpoint("best", count) as outer:
        outer.save("model.pt", "new")
        with nm.Checkpoint("best", count) as inner:
            inner.save("rng.pt", "new")
        assert nm.Checkpoint("best", count).commit()
        assert sorted(nm.get_checkpoint("best").files) == ["model.pt", "optim.pt"]
        assert before.load("model.pt") == nm.get_checkpoint("best").load("model.pt") == "old"
        outer.save("optim.pt", "new")
    found = nm.get_checkpoint("best")
    assert [found.load(name) for name in ("model.pt", "optim.pt", "rng.pt")] == ["new"] * 3


def test_a_with_block_that_fails_gives_up_what_another_object_has_committed_inside_it(nm):
    inner = nm.Checkpoint("given up")

    def training():
        with nm.Checkpoint("given up"):
            inner.save("m.pt", 1)
            assert inner.commit()
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        training()
    assert nm.get_checkpoint("given up") is None and "on purpose" in inner.error
    with nm.Checkpoint("given up") as again:
        again.save("m.pt", 2)
    assert nm.get_checkpoint("given up").load("m.pt") == 2


def test_an_object_goes_into_a_second_block_and_is_open_ended_after_it(nm):
    with nm.Checkpoint("again") as checkpoint:
        checkpoint.save("a.pt", 1)
    with checkpoint:
        checkpoint.save("a.pt", 2)
        assert nm.flush_persistence()
        with pytest.raises(nm.NebulaConfigError, match="flush it after that"):
            nm.flush_persistence("again")
        assert nm.get_checkpoint("again").load("a.pt") == 1
    assert nm.get_checkpoint("again").load("a.pt") == 2
    checkpoint.save("b.pt", 3)
    assert nm.flush_persistence()
    assert sorted(nm.get_checkpoint("again").files) == ["a.pt", "b.pt"]


def test_a_commit_inside_a_with_block_by_its_own_object_closes_what_there_is(nm):
    with nm.Checkpoint("twice") as checkpoint:
        checkpoint.save("a.pt", 1)
        assert checkpoint.commit() and sorted(nm.get_checkpoint("twice").files) == ["a.pt"]
        checkpoint.save("b.pt", 2)
        assert sorted(nm.get_checkpoint("twice").files) == ["a.pt"]
    assert sorted(nm.get_checkpoint("twice").files) == ["a.pt", "b.pt"]


def test_with_blocks_of_two_tags_may_lie_in_each_other(nm):
    with nm.Checkpoint("outer") as outer:
        outer.save("a.pt", 1)
        with nm.Checkpoint("inner") as inner:
            inner.save("a.pt", 2)
            outer.save("b.pt", 3)
            assert nm.get_checkpoint("outer") is None
        assert nm.get_checkpoint("inner").load("a.pt") == 2
        assert nm.get_checkpoint("outer") is None
    assert sorted(nm.get_checkpoint("outer").files) == ["a.pt", "b.pt"]


def test_a_child_forked_inside_a_with_block_commits_that_tag_itself(place):
    code = """
        nm.init(sys.argv[1], 0)
        with nm.Checkpoint("t"):
            pid = os.fork()
            if pid == 0:
                nm.init(sys.argv[2])
                checkpoint = nm.Checkpoint("t")
                checkpoint.save("m.pt", 1)
                checkpoint.commit()
                checkpoint.wait("durable", 60)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    """
    place.run(code, place.storage, place.root / "child")
    assert (place.root / "child" / "t" / "m.pt").exists()


# -- the package


def test_the_package_can_be_looked_through_where_no_lightning_is(monkeypatch):
    for package in ("lightning", "pytorch_lightning", "lightning.pytorch", "lightning.fabric"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(vars(nebulaml), "NebulaCallback", raising=False)
    assert "get_latest_checkpoint" in pydoc.plain(pydoc.render_doc(nebulaml))
    assert {"attach", "Checkpoint"} <= {name for name, _ in inspect.getmembers(nebulaml)}
    with pytest.raises(NebulaConfigError, match="pip install lightning"):
        nebulaml.NebulaCallback  # noqa: B018


def test_the_package_lists_what_lightning_makes_possible_without_loading_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert {"NebulaCallback", "NebulaCheckpointIO", "NebulaDeepspeedStrategy"} <= set(dir(nebulaml))


# -- no agent


@pytest.fixture
def no_agent(monkeypatch, place):
    monkeypatch.setenv("NEBULA_AGENT_PATH", str(place.root / "no-such-program"))


def test_without_an_agent_training_goes_on_and_one_line_says_so(no_agent, place, caplog):
    with caplog.at_level(logging.ERROR):
        nebulaml.init(str(place.storage))
        assert len(caplog.records) == 1
        checkpoint = nebulaml.Checkpoint("t1")
        assert checkpoint.save("m.pt", torch.ones(2)) is False
        assert checkpoint.commit() is False
    assert "Training goes on" in caplog.text
    with pytest.raises(NebulaConfigError):
        nebulaml.Checkpoint("")
    with pytest.raises(TypeError):
        checkpoint.save("m.pt", lambda: 0)


def test_without_an_agent_resuming_fails_loudly(no_agent, place):
    nebulaml.init(str(place.storage))
    with pytest.raises(NebulaUnavailable):
        nebulaml.get_latest_checkpoint()


def test_without_an_agent_raise_raises(no_agent, place):
    with pytest.raises(NebulaUnavailable):
        nebulaml.init(str(place.storage), on_error="raise")


@pytest.mark.parametrize(
    ("path", "file", "shown"),
    [
        ("/a/run?7", "/a/run?7/t/m.pt", "/a/run?7"),
        ("file:///a/run?7", "file:///a/run?7/t/m.pt", "file:///a/run?7"),
        ("s3://bucket/run/", "s3://bucket/run/t/m.pt", "s3://bucket/run/"),
        ("az://account/container/run?sig=secret", "az://account/container/run/t/m.pt?sig=secret", "az://account/container/run"),
    ],
)
def test_the_signature_of_a_url_stays_behind_the_path_of_a_file_and_is_shown_to_nobody(path, file, shown):
    assert config.below(path, "t", "m.pt") == file
    assert config.shown(path) == shown
    assert shown in stand_in.text_for("t", "m.pt", path) and "secret" not in stand_in.text_for("t", "m.pt", path)
    with pytest.raises(nebulaml.NebulaConfigError) as refused:
        notices.ask_to_save("az://account/container/run?sig=secret")
    assert "secret" not in str(refused.value)
