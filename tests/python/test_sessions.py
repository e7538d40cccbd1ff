"""Several sessions in one process: each has a path, a job, settings, checkpoints and errors of its own."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import threading
import time

import nebulaml as nm
import pytest
import torch
from nebulaml._session import engine
from waiting import until


def save(session, step, value):
    with session.checkpoint(f"global_step{step}") as checkpoint:
        assert checkpoint.save("model.pt", {"w": torch.full((4,), float(value))})
    return checkpoint


def value_of(checkpoint):
    return checkpoint.load("model.pt")["w"][0].item()


def test_two_paths_are_written_at_once_and_each_has_its_own(place):
    first, second = nm.Session(place.root / "one", persistent_time_interval=0), nm.Session(place.root / "two", persistent_time_interval=0)
    for step in (1, 2):
        save(first, step, step)
    save(second, 7, 70)
    assert first.flush_persistence() and second.flush_persistence()
    assert value_of(first.get_latest_checkpoint()) == 2 and value_of(second.get_latest_checkpoint()) == 70
    assert sorted(first.list_checkpoints()) == ["global_step1", "global_step2"] and list(second.list_checkpoints()) == ["global_step7"]
    assert (place.root / "two" / "global_step7" / "model.pt").exists()
    assert not nm.is_initialized()  # the functions of the package have a session of their own


def test_two_jobs_share_a_path_and_settings_hold_for_one_alone(place):
    first = nm.Session(place.storage, job="train", persistent_time_interval=0, on_error="raise")
    second = nm.Session(place.storage, job="eval", persistent_time_interval=500)
    save(first, 1, 1)
    second.configure(job="other")
    assert first.flush_persistence() and first._engine.settings().job == "train"
    assert (first._engine.settings().on_error, second._engine.settings().on_error) == ("raise", "warn")


def test_an_evaluator_reads_a_path_while_the_trainer_writes_another(place):
    nm.init(place.storage, 0)
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", {"w": torch.ones(4)})
    assert nm.flush_persistence()
    with nm.Session(place.root / "evals", persistent_time_interval=0) as evals:
        assert value_of(evals.get_latest_checkpoint(place.storage)) == 1
        save(evals, 1, 9)
        with nm.Checkpoint("global_step2") as checkpoint:
            checkpoint.save("model.pt", {"w": torch.ones(4) * 2})
    assert value_of(nm.get_latest_checkpoint()) == 2


def test_a_block_of_one_session_holds_up_no_commit_of_that_tag_in_another(place):
    first, second = nm.Session(place.root / "one", persistent_time_interval=0), nm.Session(place.root / "two", persistent_time_interval=0)
    with first.checkpoint("global_step1") as checkpoint:
        checkpoint.save("a", 1)
        other = second.checkpoint("global_step1")
        other.save("a", 2)
        assert other.commit()
        assert second.flush_persistence("global_step1")
    assert second.get_checkpoint("global_step1").load("a") == 2


def test_a_failure_of_one_session_does_not_hold_up_another(place):
    broken = nm.Session(place.root / "file", persistent_time_interval=0)
    place.root.joinpath("file").write_text("not a directory")
    good = nm.Session(place.storage, persistent_time_interval=0)
    broken_checkpoint = broken.checkpoint("global_step1")
    broken_checkpoint.save("a", 1)
    broken_checkpoint.commit()
    save(good, 1, 5).wait("durable", 60)
    assert value_of(good.get_latest_checkpoint()) == 5


def test_settings_can_be_taken_back(place, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    nm.init(place.storage, 0, keep_last=2, world=1, job="one")
    assert nm._session.engine.place().world == 1
    nm.init("", world=0, keep_last=0, job="")
    assert nm.persist_path() is None and nm._session.engine.place().world == 2
    assert (nm._session.engine.settings().keep_last, nm._session.engine.settings().job) == (0, "")
    with pytest.raises(nm.NebulaConfigError, match="world=2"):
        nm.init(world=2)


def test_memory_only_overrules_the_environment(place, monkeypatch):
    monkeypatch.setenv("NEBULA_PERSISTENT_STORAGE_PATH", str(place.storage))
    with nm.Session("") as session:
        save(session, 1, 1)
        assert session.persist_path is None
    assert not place.storage.exists()


def test_a_closed_session_says_so(place):
    with nm.Session(place.storage) as session:
        checkpoint = save(session, 1, 1)
    assert repr(session) == "<nebulaml.Session, closed>"
    with pytest.raises(nm.NebulaUnavailable, match="was closed"):
        session.checkpoint("global_step2")
    with pytest.raises(nm.NebulaUnavailable, match="was closed"):
        session.configure(place.root / "other")
    with pytest.raises(nm.NebulaUnavailable, match="was closed"):
        session.flush_persistence()
    assert repr(session) == "<nebulaml.Session, closed>" and session.persist_path is None
    del checkpoint
    nm.init(place.storage)
    assert value_of(nm.get_latest_checkpoint()) == 1  # its commit holds


def test_a_forked_child_goes_on_in_each_session_by_itself(place):
    output = place.run(
        """
        one, two = nm.Session(sys.argv[1], persistent_time_interval=0), nm.Session(sys.argv[2], persistent_time_interval=0)
        def save(session, step):
            with session.checkpoint(f"global_step{step}") as checkpoint:
                checkpoint.save("a", step)
        save(one, 1), save(two, 2)
        if not (child := os.fork()):
            save(one, 3), save(two, 4)
            os._exit(0 if one.flush_persistence() and two.flush_persistence() else 1)
        assert os.waitpid(child, 0)[1] == 0
        say(one.get_latest_checkpoint().tag, two.get_latest_checkpoint().tag)
        """,
        place.root / "one",
        place.root / "two",
    )
    assert output.split() == ["global_step3", "global_step4"]


def test_commits_of_every_session_survive_the_end_of_the_process(place):
    place.run(
        """
        for name in sys.argv[1:]:
            session = nm.Session(name, persistent_time_interval=0)
            checkpoint = session.checkpoint("global_step1")
            checkpoint.save("a", torch.ones(1 << 22))
            checkpoint.commit()
        """,
        place.root / "one",
        place.root / "two",
    )
    for name in ("one", "two"):
        with nm.Session(place.root / name) as session:
            assert session.get_latest_checkpoint().load("a").sum() == 1 << 22


def test_threads_save_to_sessions_of_their_own(place):
    sessions = [nm.Session(place.root / str(number), persistent_time_interval=0) for number in range(4)]

    def train(number):
        for step in range(1, 6):
            save(sessions[number], step, number * 100 + step)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [value_of(session.get_latest_checkpoint()) for session in sessions] == [5, 105, 205, 305]


def test_an_unreferenced_session_leaves_no_engine_behind(place):
    gc.collect()
    before = len(engine._engines)
    session = nm.Session(place.storage)
    save(session, 1, 1)
    assert len(engine._engines) == before + 1
    del session
    assert len(engine._engines) == before


def lose(place, session):
    """Makes a version that is committed and cannot become durable."""
    place.storage.write_text("not a directory")
    checkpoint = session.checkpoint("global_step1")
    checkpoint.save("a", 1)
    assert checkpoint.commit()
    until(lambda: session._engine._late, 60, "the agent to give the version up")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv("NEBULA_PERSIST_GIVE_UP", "100ms")


def test_a_failure_after_a_save_has_returned_is_raised_by_the_next_call(place, impatient):
    session = nm.Session(place.storage, persistent_time_interval=0, on_error="raise")
    lose(place, session)
    with pytest.raises(nm.NebulaError, match="'global_step1' is not durable, and will not be"):
        session.checkpoint("global_step2")
    session.checkpoint("global_step2")  # once


def test_a_failure_after_a_save_has_returned_is_not_raised_with_warn(place, impatient):
    session = nm.Session(place.storage, persistent_time_interval=0)
    lose(place, session)
    session.checkpoint("global_step2")


def test_a_copy_that_fails_behind_a_save_is_raised_by_the_next_call(place):
    session = nm.Session(place.storage, on_error="raise")
    checkpoint = session.checkpoint("global_step1")
    checkpoint.save("a", 1)
    checkpoint._lost("a", checkpoint._newest["a"], nm.NebulaError("memory went"))
    with pytest.raises(nm.NebulaError, match="memory went"):
        session.flush_persistence(timeout=1)
    with pytest.raises(nm.NebulaError, match="memory went"):  # and a commit must not call it whole
        checkpoint.commit()


@pytest.mark.nightly
def test_a_checkpoint_that_was_given_up_while_it_was_copied_leaves_no_failure_for_the_next_call(place, caplog):
    """The agent takes the image back, so the copies fail. The program knows why: its own exception has ended the block."""
    state = {"w": torch.ones(20 << 20)}
    with nm.Session(place.storage, on_error="raise") as session:
        for step in range(4):
            with contextlib.suppress(ValueError), session.checkpoint(f"global_step{step}") as checkpoint:
                checkpoint.save("a", state)
                raise ValueError("not this one")
            assert (checkpoint.state, checkpoint.error) == ("failed", "ValueError: not this one")
            time.sleep(0.3)
        with session.checkpoint("global_step9") as checkpoint:
            checkpoint.save("a", state)
        assert checkpoint.load("a")["w"].sum() == 20 << 20
    assert "is lost" not in caplog.text


def test_metrics_and_metadata_are_committed_with_a_version(place):
    nm.init(place.storage, 0)
    with nm.Checkpoint("global_step1", metrics={"loss": torch.tensor(0.5), "bad": float("nan")}, metadata={"data": {"epoch": 3}}) as checkpoint:
        checkpoint.save("a", 1)
    counted = nm.Checkpoint("global_step2", 1, metrics={"loss": 2})
    counted.save("a", 2)
    assert counted.commit()
    assert nm.flush_persistence()
    nm._shutdown()
    place.kill_agent()
    nm.init(place.storage)
    found = nm.get_checkpoint("global_step1")
    assert found.metrics["loss"] == 0.5 and math.isnan(found.metrics["bad"]) and found.metadata == {"data": {"epoch": 3}}
    assert nm.get_latest_checkpoint().metrics == {"loss": 2.0}
    with nm.Checkpoint("global_step3") as bare:
        bare.save("a", 1)
    assert bare.metrics == {} and list(bare.files) == ["a"]


def test_metadata_that_the_program_reads_are_a_copy(place):
    nm.init(place.storage, 0)
    given = {"of": [1]}
    with nm.Checkpoint("global_step1", metadata=given) as checkpoint:
        given["of"].append(2)
        checkpoint.metadata["of"].append(3)
        checkpoint.metadata["new"] = 4
        checkpoint.save("a", 1)
    assert nm.get_checkpoint("global_step1").metadata == checkpoint.metadata == {"of": [1]}


def test_a_session_makes_checkpoints_with_all_arguments_of_checkpoint(place):
    with nm.Session(place.storage, persistent_time_interval=0) as session:
        with session.checkpoint("global_step1", -2, metrics={"loss": 1}, metadata={"data": "v3"}) as checkpoint:
            checkpoint.save("a", 1)
        found = session.get_checkpoint("global_step1")
        assert found.metrics == {"loss": 1.0} and found.metadata == {"data": "v3"}
    wanted, given = (inspect.signature(call).parameters for call in (nm.Checkpoint, nm.Session.checkpoint))
    assert wanted.keys() - given.keys() == {"session"}


def nested(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize("said", [
    {"metrics": {"loss": "low"}}, {"metrics": {1: 2.0}}, {"metrics": {"loss": 10**400}}, {"metrics": {"loss": torch.ones((), device="meta")}},
    {"metrics": {"loss": torch.ones(2)}}, {"metrics": {"loss": 1j}}, {"metrics": [0.5]}, {"metrics": 0.5}, {"metrics": {"\ud800": 1}}, {"metrics": {"a\0": 1}},
    {"metadata": {"f": object()}}, {"metadata": {"f": float("inf")}}, {"metadata": ["f"]}, {"metadata": "f"}, {"metadata": {"f": "\ud800"}},
    {"metadata": {"f": [{"\udfff": 1}]}}, {"metadata": {"f": {"a\0": 1}}}, {"metadata": {"f": nested(900)}}, {"metadata": {"f": nested(100_000)}},
], ids=lambda said: next(iter(said)))  # fmt: skip
def test_values_that_json_cannot_hold_are_refused_before_the_save_begins(place, said):
    nm.init(place.storage, 0)
    with pytest.raises(nm.NebulaConfigError):
        nm.Checkpoint("global_step1", **said)
    assert nm.list_checkpoints() == {}


SECOND = """
with nm.Manager(sys.argv[1]) as other:
    say(other.all_steps())
"""


# fault (Deaths): A session or Manager is closed, and its process lives on with checkpoints and loaded tensors of it.
# result: Another process can be that rank. The tensors keep their values, and a call on a checkpoint connects again.
@pytest.mark.parametrize("kind", ["manager", "session", "default"])
def test_a_closed_session_leaves_its_rank_to_another_process_while_its_checkpoints_and_tensors_live(place, kind):
    if kind == "manager":
        session = manager = nm.Manager(place.storage)
        kept = manager.save(1, {"model": {"w": torch.full((100_000,), 3.0)}})
        manager.wait()
    else:
        session = nm.Session(place.storage) if kind == "session" else nm._session.session.default
        session.configure(place.storage)
        kept = session.checkpoint("global_step1")
        kept.save("model.pt", {"w": torch.full((100_000,), 3.0)})
        kept.commit()
        assert session.flush_persistence()
    loaded = kept.load("model.pt")["w"]
    nm._shutdown() if kind == "default" else session.close()
    assert place.run(SECOND, place.storage).strip() == "[1]"
    assert (loaded == 3).all() and value_of(kept) == 3
