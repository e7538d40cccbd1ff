"""nm.Manager: when it saves, what it keeps, what it restores, and how it reports failures."""

from __future__ import annotations

import asyncio
import collections
import datetime
import gc
import os
import pathlib
import random
import shutil
import signal
import textwrap
import threading
import time
import types
from pathlib import Path

import nebulaml as nm
import numpy
import pytest
import torch
from nebulaml._session import engine
from nebulaml.manager import policy
from waiting import until


def made(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, steps=1):
    for _ in range(steps):
        loss = model(torch.arange(24.0).view(6, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return loss.item()


def items(model, optimizer, scheduler):
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.fixture
def manager(place):
    with nm.Manager(place.storage) as found:
        yield found


def save(manager, *steps, **metrics):
    for step in steps:
        assert manager.save(step, {"model": {"w": torch.full((8,), float(step))}}, metrics={name: value(step) for name, value in metrics.items()})


def test_a_run_goes_on_bit_for_bit_in_another_process(place):
    parts = made()
    with nm.Manager(place.storage) as manager:
        train(*parts, 3)
        assert manager.save(3, {**items(*parts), "extra": {"epoch": 1}}, metrics={"loss": 0.5}, metadata={"note": "first"})
        wanted = train(*parts, 2)
    others = made(1)
    with nm.Manager(place.storage) as manager:
        found = manager.restore(items(*others))
        assert (found.step, found.metrics, found.metadata, found.extra) == (3, {"loss": 0.5}, {"note": "first"}, {"epoch": 1})
        assert train(*others, 2) == wanted


def test_nothing_there_is_none_and_a_missing_step_is_named(manager):
    assert manager.restore({"model": made()[0]}) is None and manager.latest_step() is None and manager.all_steps() == []
    save(manager, 5)
    with pytest.raises(nm.NebulaNotFound, match=r"no checkpoint of step 7 in .*; it has the steps: 5"):
        manager.restore({"model": {"w": torch.zeros(8)}}, step=7)


def test_it_saves_every_so_many_steps_and_when_forced(place):
    with nm.Manager(place.storage, save_every_steps=3) as manager:
        saved = [step for step in range(1, 10) if manager.should_save(step) and manager.save(step, {"model": {"w": torch.zeros(2)}})]
        assert saved == [3, 6, 9]
        assert manager.save(10, {"model": {"w": torch.zeros(2)}}) is None
        assert manager.save(10, {"model": {"w": torch.zeros(2)}}, force=True).step == 10
        assert not manager.should_save(9)  # it is there


def test_free_saves_come_when_the_last_one_is_durable_and_cheap_enough(place, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(policy, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    state = {"model": {"w": torch.zeros(2)}}
    with nm.Manager(place.storage, save_every="free", save_every_steps=3, save_every_s="1h", persistent_time_interval="1h") as manager:
        assert manager.should_save(1)
        manager.save(1, state).wait("durable", 60)
        manager._due._cost_s = 0.5
        now[0] += 49
        assert not manager.should_save(10)  # it would take more than 1 % of the time
        now[0] += 2
        assert not manager.should_save(3) and manager.should_save(4)  # three steps are the least distance
        saved = manager.save(4, state)
        now[0] += 1000
        saved.wait("committed", 60)
        assert not manager.should_save(20)  # the interval has not passed: it is not durable
        saved.wait("durable", 60)
        assert manager.should_save(21)
        manager.save(21, state).wait("committed", 60)
        now[0] += 3700
        assert manager.should_save(22)


def test_a_change_of_the_interval_of_free_saves_is_an_event_and_so_it_is_after_a_restart(place, monkeypatch, caplog):
    caplog.set_level("INFO", "nebulaml")
    now, said, state = [100.0], [], {"model": {"w": torch.zeros(2)}}
    monkeypatch.setattr(policy, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    for run, first in ((1, 1), (2, 101)):
        with nm.Manager(place.storage, save_every="free") as manager:
            manager.on_event(lambda event: said.append((event.step, event.text.partition(":")[0])) if event.kind == "interval" else None)
            for step, passed in enumerate((10, 20, 40, 50, 61, 30, 20, 20), first):  # seconds before each save
                now[0] += passed
                manager.save(step, state, force=True)
        assert said == [
            (first + 1, "saves come every 20 s now"), (first + 4, "saves come every 61 s now, and before every 20 s"),
            (first + 6, "saves come every 20 s now, and before every 61 s"),
        ]  # fmt: skip
        assert all(f"nebula: {text}" in caplog.text for _, text in said), run
        said.clear()
    with nm.Manager(place.storage, save_every_steps=1) as manager:
        manager.on_event(lambda event: said.append(event) if event.kind == "interval" else None)
        for step, passed in ((201, 1), (202, 2), (203, 100)):
            now[0] += passed
            manager.save(step, state)
    assert said == []


def test_it_saves_when_seconds_have_passed(place, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(policy, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    with nm.Manager(place.storage, save_every_s="300ms", save_every_steps=1000) as manager:
        now[0] += 0.2
        assert not manager.should_save(1)
        now[0] += 0.2
        assert manager.should_save(2) and manager.should_save(2)
        manager.save(2, {"model": {"w": torch.zeros(2)}})
        now[0] += 0.2
        assert not manager.should_save(3) and manager.should_save(1000)


def test_sigterm_asks_for_one_save_and_a_second_one_ends_the_process(place):
    output = place.run(
        """
        from nebulaml._session import notices
        notices.SAME_S = 0
        with nm.Manager(sys.argv[1], save_every_steps=1000) as manager:
            for step in range(1, 6):
                if step == 3:
                    signal.raise_signal(signal.SIGTERM)
                if manager.should_save(step):
                    manager.save(step, {"model": {"w": torch.ones(3)}})
                    say("saved", step)
                if manager.stop_requested:
                    break
            say("stopped", step, manager.should_save(4))
            signal.raise_signal(signal.SIGTERM)
        say("not here")
        """,
        place.storage,
        returncode=-signal.SIGTERM,
    )
    assert output.splitlines() == ["saved 3", "stopped 3 False"]
    with nm.Manager(place.storage) as manager:
        assert manager.latest_step() == 3


# fault (Deaths): A service manager sends SIGTERM to all processes of a job, and torchrun passes its own on: a trainer gets two within moments.
# result: They are one notice.
def test_sigterms_within_moments_are_one_notice(place):
    output = place.run(
        """
        from nebulaml._session import notices
        notices.SAME_S = 60  # a busy machine
        with nm.Manager(sys.argv[1], save_every_steps=1000) as manager:
            assert not manager.should_save(1)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            if manager.should_save(2):
                manager.save(2, {"model": {"w": torch.ones(3)}})
                say("saved", manager.stop_requested)
        """,
        place.storage,
    )
    assert output.splitlines() == ["saved True"]


def test_the_handler_of_the_program_is_called_and_comes_back(place):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        with nm.Manager(place.storage, save_every_steps=1000) as manager:
            assert not manager.should_save(1)
            signal.raise_signal(signal.SIGTERM)
            assert came == [1] and manager.should_save(2) and manager.stop_requested
        signal.raise_signal(signal.SIGTERM)
        assert came == [1, 1]
    finally:
        signal.signal(signal.SIGTERM, before)


def kept(manager, steps):
    """Waits until these steps are all that storage has. The agent removes in the background."""
    until(lambda: manager.all_steps() == steps, 60, f"{steps} stay, not {manager.all_steps()}")


@pytest.mark.parametrize(("rules", "stay"), [
    ({"keep_last": 2}, [7, 8]),
    ({"keep_within": "1h"}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ({"keep_last": 2, "keep_every": 4}, [4, 7, 8]),
    ({"keep_every": 3}, [3, 6, 8]),
    ({"keep_best": nm.Best("loss", count=2)}, [3, 4, 8]),
    ({"keep_best": nm.Best("loss", "max", 1), "keep_last": 1}, [8]),
])  # fmt: skip
def test_the_rules_name_what_stays(place, rules, stay):
    """All of them are in unit/store/order_test.c: here, that each one reaches the agent."""
    with nm.Manager(place.storage, **rules) as manager:
        save(manager, *range(1, 9), loss=lambda step: abs(step - 3.4))
        manager.wait()
        kept(manager, stay)


@pytest.mark.parametrize("rules", [{}, {"keep_best": nm.Best("other")}])
def test_without_a_rule_that_can_judge_all_stay(place, rules):
    with nm.Manager(place.storage, **rules) as manager:
        for steps in ([1, 2, 3], [4]):  # the rules are applied between two versions, so those for 3 before 4 is durable
            save(manager, *steps, loss=float)
            manager.wait()
        assert manager.all_steps() == [1, 2, 3, 4]


# fault (Storage): A rule of the user no longer keeps a durable version.
# result: Only then the agent removes it. An event and the log name the rule. Pinned versions, the newest, the latest
# commit and those that are in use stay.
def test_an_event_names_the_rule_that_removed_a_version(place, caplog):
    caplog.set_level("INFO", "nebulaml")
    removed = []
    rules = {"keep_last": 1, "keep_every": 2, "keep_hourly": 1, "keep_daily": 1, "keep_weekly": 1}  # the newest of each is the newest of all
    text = ", ".join(f"{name}={count}" for name, count in rules.items())
    with nm.Manager(place.storage, **rules) as manager:
        manager.on_event(lambda event: removed.append((event.step, event.text)) if event.kind == "removed" else None)
        save(manager, 1, 2, 3, 4)
        manager.wait()
        until(lambda: len(removed) == 2, 60, "two events")
        manager.delete(2)
        until(lambda: len(removed) == 3, 60, "an event of the third")
    assert removed == [(1, text), (3, text), (2, "a request of the program")]
    assert f"global_step3 was removed from storage, because {text} does not name it" in caplog.text


# fault (Storage): A program restores the newest version, or nothing, and then counts its steps from a smaller number.
# result: Retention counts what it saves after the restore as newer. Rules remove older versions first, and the log
# names the rule.
@pytest.mark.parametrize("found", [2000, None])
def test_what_was_saved_after_a_restore_outlives_what_it_found_though_its_steps_are_smaller(place, caplog, found):
    """A warm start that counts from 101, and one that does not restore."""
    with nm.Manager(place.storage) as manager:
        save(manager, 1000, 2000)
        manager.wait()
    caplog.set_level("INFO", "nebulaml")
    with nm.Manager(place.storage, keep_last=2) as manager:
        assert found is None or manager.restore({}).step == found
        for step in (101, 102, 103):
            save(manager, step)
            manager.wait()
        until(lambda: 101 not in manager.all_steps(), 60, "101 goes")
        assert {102, 103} <= set(manager.all_steps())
        assert manager.checkpoint(103).load("model.pt")["w"][0] == 103
        until(lambda: "global_step101 was removed from storage, because keep_last=2 does not name it" in caplog.text, 60, "the log names the rule")


# fault (Storage): The rules of a Manager name a metric that no version has, or two Managers of a path have other
# rules.
# result: Nothing is removed until a version has the metric, and the log warns. A version stays if one Manager's rules
# name it.
def test_a_metric_that_no_version_has_removes_nothing_and_the_log_names_it(place, caplog):
    with nm.Manager(place.storage, keep_last=1, keep_best=nm.Best("los")) as manager:
        save(manager, 1, 2, 3, loss=float)
        manager.wait()
        save(manager, 4, loss=float)
        manager.wait()
        assert manager.all_steps() == [1, 2, 3, 4]
    assert caplog.text.count("step 1 has no value of the metric 'los' of keep_best, but of: loss") == 1 and caplog.text.count("of keep_best") == 1


def test_rules_of_a_manager_remove_no_version_of_another_job(place):
    with nm.Manager(place.storage, keep_last=1, job="a") as one, nm.Manager(place.storage, keep_last=2, job="b") as two:
        save(one, 1, 2, 3)
        save(two, 11, 12, 13)
        one.wait()
        two.wait()
        kept(one, [3])
        kept(two, [12, 13])


# fault: as test_a_metric_that_no_version_has_removes_nothing_and_the_log_names_it
def test_two_managers_of_one_path_keep_what_either_of_them_names(place):
    with nm.Manager(place.storage, keep_last=3) as last, nm.Manager(place.storage, keep_best=nm.Best("loss")) as best:
        save(last, 1, 2, 3, 4, 5, 6, loss=lambda step: abs(step - 2))
        last.wait()
        best.wait()
        kept(last, [2, 4, 5, 6])
        assert best.all_steps() == [2, 4, 5, 6]


def test_after_the_agent_was_killed_no_manager_removes_what_another_one_keeps(place):
    with nm.Manager(place.storage, keep_last=2) as last, nm.Manager(place.storage, keep_best=nm.Best("loss")) as best:
        save(last, 1, 2, 3, 4, loss=float)
        last.wait()
        kept(last, [1, 3, 4])
        place.kill_agent()
        for step in (5, 6):  # the rules are applied between the two, and `best` has not met the new agent
            save(last, step, loss=float)
            last.wait()
        assert last.all_steps() == [1, 3, 4, 5, 6]
        assert best.best_step() == 1  # now it has
        save(last, 7, loss=float)
        last.wait()
        kept(last, [1, 6, 7])


def test_a_metric_that_is_no_number_is_never_the_best():
    assert nm.Best("loss").order({4: {"loss": 3}, 3: {}, 2: {"loss": 3}, 1: {"loss": float("nan")}}) == [4, 2]


def test_an_infinite_metric_has_its_place_in_the_order_now_and_after_a_restart(place):
    loss = {1: 1.0, 2: float("inf"), 3: float("nan"), 4: 0.5, 5: float("-inf"), 6: 2.0}
    with nm.Manager(place.storage, keep_best=nm.Best("loss", "max", 2)) as manager:
        save(manager, *loss, loss=loss.get)
        assert manager.best_step() == 2 and manager.best_step("loss", "min") == 5
        manager.wait()
        kept(manager, [2, 6])
    with nm.Manager(place.storage, keep_best=nm.Best("loss", "max", 2)) as manager:
        assert manager.best_step() == 2 and manager.all_steps() == [2, 6] and manager.checkpoint(2).metrics == {"loss": float("inf")}


# fault: as test_ranks_on_two_nodes_load_the_oldest_of_many_versions_by_its_tag
@pytest.mark.nightly("python/test_manager_many.py::test_a_manager_is_right_with_any_number_of_versions")
def test_all_versions_count_however_many_there_are(place, monkeypatch):
    """More than any list of a rank used to have."""
    with nm.Manager(place.storage) as manager:
        save(manager, *range(1, 71), loss=lambda step: 0 if step == 3 else step)
        manager.wait()
        manager.pin(2, "why not")
        assert manager.all_steps() == list(range(1, 71)) and manager.best_step("loss") == 3
        assert [(row.step, row.pinned) for row in manager.checkpoints()][-3:] == [(3, None), (2, "why not"), (1, None)]
    with nm.Manager(place.storage, keep_last=60, keep_best=nm.Best("loss")) as manager:
        assert manager.restore({}, step=1).step == 1 and manager.restore({}).step == 70
        save(manager, 71, loss=float)
        manager.wait()
        kept(manager, [2, 3, *range(12, 72)])


# fault: as test_an_event_names_the_rule_that_removed_a_version
def test_storage_keeps_the_newest_the_best_and_the_pinned(place):
    loss = {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.6, 5: 0.7, 6: 0.8}
    with nm.Manager(place.storage, keep_last=2, keep_best=nm.Best("loss")) as manager:
        for step in loss:
            save(manager, step, loss=loss.get)
            manager.wait()
            if step == 1:
                manager.pin(1, "the one to compare with")
        manager.wait()
        kept(manager, [1, 2, 5, 6])
        assert manager.best_step() == 2 and manager.best_step("loss", "max") == 1
        rows = manager.checkpoints()
        assert [row.step for row in rows] == [6, 5, 2, 1] and rows[-1].pinned == "the one to compare with"
        assert rows[2].metrics == {"loss": 0.1} and rows[0].state == "durable" and rows[0].size > 0
        assert "the one to compare with" in repr(rows) and "<td>0.1" in rows._repr_html_().replace("loss=", "")
        manager.unpin(1)
        save(manager, 7, loss=lambda step: 1.0)
        manager.wait()
        kept(manager, [2, 6, 7])
    left = ["global_step2", "global_step6", "global_step7"]
    until(lambda: sorted(path.name for path in place.storage.glob("global_step*")) == left, 60, "their directories go last")


def test_a_pin_takes_any_reason_and_none(manager):
    save(manager, 1, 2)
    manager.wait()
    for reason in ("why", "", "--early", "-x", "a\nb", "=", "\u202e" * 300):
        manager.pin(1, reason)
        assert manager.checkpoints()[-1].pinned == reason
    manager.pin(2)
    assert [row.pinned for row in manager.checkpoints()] == ["", reason] and repr(manager.checkpoints()).splitlines()[1].endswith("  yes")
    for wrong in (3, None, "a\0", "\ud800"):
        with pytest.raises(nm.NebulaConfigError, match="the reason of a pin"):
            manager.pin(2, wrong)


def test_the_agent_removes_nothing_that_is_pinned(place):
    """Only keep_last removes versions here; there is no manager."""
    nm.init(str(place.storage), 0, 2, keep_last=1, on_error="raise")
    session = engine.session()

    def save_one(step):
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("model.pt", {"w": torch.full((8,), float(step))})
        checkpoint.wait("durable", 60)

    def stay():
        return sorted(path.name for path in place.storage.glob("global_step*"))

    save_one(1)
    session.pin("global_step1", "good")
    for step in (2, 3):
        save_one(step)
    until(lambda: stay() == ["global_step1", "global_step3"], 60, "global_step2 is removed")
    session.unpin("global_step1")
    save_one(4)
    until(lambda: stay() == ["global_step4"], 60, "both are removed")


def test_without_wait_old_versions_go_in_the_background(place):
    with nm.Manager(place.storage, keep_last=1) as manager:
        for step in (1, 2, 3):
            save(manager, step)
            manager.wait(step)
        until(lambda: [path.name for path in place.storage.glob("global_step*")] == ["global_step3"], 60, "two removals")


def test_a_step_that_is_saved_again_while_old_versions_go_stays(place):
    """More old versions than the agent removes before it looks for a version to write."""
    with nm.Manager(place.storage) as manager:
        save(manager, *range(1, 40))
        manager.wait()
    with nm.Manager(place.storage, keep_last=1) as manager:
        manager.save(2, {"model": {"w": torch.full((8,), 21.0)}})
        manager.save(2, {"model": {"w": torch.full((8,), 22.0)}}, force=True)
        manager.wait()
        kept(manager, [2, 39])  # the latest commit, and the newest
        assert manager.checkpoint(2).load("model.pt")["w"][0] == 22


def test_steps_that_left_memory_are_not_listed(place):
    with nm.Manager(None) as manager:
        save(manager, 1, 2, 3, 4, 5, 6, 7)
        assert manager.all_steps() == [6, 7] and manager.latest_step() == 7 and len(manager._own) <= 5
        with pytest.raises(nm.NebulaNotFound, match=r"it has the steps: 6, 7$"):
            manager.restore({"model": {"w": torch.zeros(8)}}, step=1)
        with pytest.raises(nm.NebulaConfigError, match="step 6 is in memory only"):
            manager.delete(6)
        with pytest.raises(nm.NebulaConfigError, match="takes a function of one event, not 3"):
            manager.on_event(3)


@pytest.mark.nightly("test_without_wait_old_versions_go_in_the_background")
def test_threads_may_save_while_others_look_and_old_versions_are_removed(place):
    failures = []

    def guarded(work):
        try:
            work()
        except Exception as failure:
            failures.append(failure)

    with nm.Manager(place.storage, keep_last=2) as manager:
        busy = [threading.Thread(target=guarded, args=(lambda first=first: save(manager, *range(first, 40, 4)),)) for first in range(4)]
        for thread in busy:
            thread.start()
        while any(thread.is_alive() for thread in busy):
            guarded(lambda: (manager.all_steps(), manager.latest_step(), manager.leave(0)))
        for thread in busy:
            thread.join()
        assert not failures
        manager.wait()
        assert manager.latest_step() is not None


def test_steps_after_the_one_that_was_restored_are_saved_again(place):
    with nm.Manager(place.storage, save_every_steps=2) as manager:
        target = {"w": torch.zeros(8)}

        def train_to(last, value):
            saved = []
            for step in range(manager.latest_step() or 0, last + 1):
                if manager.should_save(step) and manager.save(step, {"model": {"w": torch.full((8,), value)}}):
                    saved.append(step)
            return saved

        assert train_to(8, 1.0) == [0, 2, 4, 6, 8]
        assert not manager.should_save(8) and manager.save(8, {"model": target}) is None  # it is there
        assert manager.restore({"model": target}, step=4).step == 4
        assert not manager.should_save(4)
        assert [step for step in range(5, 9) if manager.save(step, {"model": {"w": torch.full((8,), 2.0)}})] == [6, 8]
        manager.wait()
        assert manager.restore({"model": target}).step == 8 and target["w"][0] == 2
        assert not manager.should_save(8)


def test_a_version_whose_metadata_cannot_be_read_hides_no_other(place, caplog):
    with nm.Manager(place.storage, keep_last=2, keep_best=nm.Best("loss")) as manager:
        save(manager, 1, 2, loss=lambda step: step)
        with manager._session.checkpoint("global_step3") as checkpoint:
            checkpoint.save_bytes("nebula-metadata.json", b"[1]")
        save(manager, 4, 5, loss=lambda step: step)
        manager.wait()
        kept(manager, [1, 4, 5])
        assert manager.best_step() == 1
        assert [row.step for row in manager.checkpoints()] == [5, 4, 1]
    assert caplog.text.count("global_step3 has no metrics and no metadata that can be read") <= 1


def test_a_version_that_another_program_has_removed_is_not_there_although_memory_has_it(place, manager):
    save(manager, 1, 2)
    manager.wait()
    assert manager.checkpoint(1).load("model.pt")["w"][0] == 1
    shutil.rmtree(place.storage / "global_step1")
    assert manager.all_steps() == [2] and manager.latest_step() == 2 and [row.step for row in manager.checkpoints()] == [2]
    with pytest.raises(nm.NebulaNotFound, match=r"it has the steps: 2$"):
        manager.checkpoint(1)


def test_delete_refuses_the_newest_and_the_pinned(manager):
    save(manager, 1, 2, 3)
    manager.pin(1, "why not")
    with pytest.raises(nm.NebulaConfigError, match="is pinned"):
        manager.delete(1)
    manager.wait()
    with pytest.raises(nm.NebulaConfigError, match="newest"):
        manager.delete(3)
    manager.delete(2)
    assert manager.all_steps() == [1, 3]
    with pytest.raises(nm.NebulaNotFound):
        manager.delete(2)


def test_some_items_some_keys_and_what_does_not_fit(manager, caplog):
    model, optimizer, scheduler = made()
    train(model, optimizer, scheduler)
    manager.save(1, {"model": model, "optimizer": optimizer})
    other, other_optimizer, _ = made(1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    manager.restore({"model": other, "optimizer": other_optimizer}, keys=["model.0.*"])
    now, wanted = other.state_dict(), model.state_dict()
    assert torch.equal(now["0.weight"], wanted["0.weight"]) and torch.equal(now["2.weight"], before["2.weight"])
    assert not other_optimizer.state
    larger = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    with pytest.raises(nm.NebulaConfigError, match=r"2\.weight.*shape \(3, 8\) expected"):
        manager.restore({"model": larger})
    manager.restore({"model": larger, "missing": {"a": 1}}, strict=False)
    assert torch.equal(larger[0].weight, model[0].weight)
    assert "item 'missing' is not in the checkpoint" in caplog.text and "shape (3, 8) expected" in caplog.text
    with pytest.raises(nm.NebulaNotFound, match="has no item 'missing'; it has: model, optimizer"):
        manager.restore({"missing": {"a": 1}})
    with pytest.raises(nm.NebulaConfigError, match="begins with the name of none of the items"):
        manager.restore({"model": other}, keys=["encoder.*"])


def test_an_optimizer_that_has_its_tensors_gets_values_into_them(manager):
    parts = made()
    train(*parts, 2)
    manager.save(1, {"optimizer": parts[1]})
    others = made(1)
    train(*others)
    first = next(iter(others[1].state.values()))["exp_avg"]
    manager.restore({"optimizer": others[1]})
    assert next(iter(others[1].state.values()))["exp_avg"] is first
    assert torch.equal(first, next(iter(parts[1].state.values()))["exp_avg"])
    assert others[1].param_groups[0]["lr"] == parts[1].param_groups[0]["lr"]


def named(order, seed=0, optimizer=torch.optim.AdamW):
    """Three parameters of one shape, and an optimizer that has them in this order."""
    torch.manual_seed(seed)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(3))
    parameters = list(layers.named_parameters())
    return layers, optimizer([parameters[index] for index in order], lr=0.01)


def step_of(layers, optimizer):
    sum((layer(torch.ones(1, 4)) * index).sum() for index, layer in enumerate(layers, 1)).backward()
    optimizer.step()


def has_states_of(layers, optimizer, others, other_optimizer):
    pairs = zip(layers.parameters(), others.parameters(), strict=True)
    return all(torch.equal(optimizer.state[a]["exp_avg"], other_optimizer.state[b]["exp_avg"]) for a, b in pairs)


def has_names():
    try:
        return "param_names" in named((0, 1, 2))[1].param_groups[0]
    except TypeError:
        return False


needs_names = pytest.mark.skipif(not has_names(), reason="this torch gives optimizers no names")


# fault (Storage): An optimizer has its named parameters in another order than the saved one, or others.
# result: Each parameter gets the state of its name. If the names differ, nothing is restored and the error names them.
@needs_names
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("how", ["manager", "load_into"])
def test_parameters_with_names_get_their_own_state_in_whatever_order_they_are(manager, steps_before, how):
    layers, optimizer = named((0, 1, 2))
    for _ in range(3):
        step_of(layers, optimizer)
    manager.save(1, {"optimizer": optimizer})
    others, other = named((2, 0, 1), 1)
    for _ in range(steps_before if how == "manager" else 1):
        step_of(others, other)
    if how == "manager":
        manager.restore({"optimizer": other})
    else:
        manager.checkpoint(1).load_into("optimizer.pt", other.state_dict())
    assert has_states_of(layers, optimizer, others, other)
    assert other.param_groups[0]["param_names"] == ["2.weight", "0.weight", "1.weight"] and other.state_dict()["param_groups"][0]["params"] == [0, 1, 2]


# fault: as test_parameters_with_names_get_their_own_state_in_whatever_order_they_are
@needs_names
def test_parameters_of_other_names_are_refused_and_named(manager, caplog):
    layers, optimizer = named((0, 1, 2))
    step_of(layers, optimizer)
    manager.save(1, {"optimizer": optimizer})
    others, _ = named((0, 1, 2), 1)
    renamed = torch.optim.AdamW([("other.weight" if name == "1.weight" else name, value) for name, value in others.named_parameters()])
    for _ in range(2):
        with pytest.raises(nm.NebulaConfigError, match=r"only here: other\.weight; only there: 1\.weight"):
            manager.restore({"optimizer": renamed})
        step_of(others, renamed)
    before = renamed.state[others[0].weight]["exp_avg"].clone()
    manager.restore({"optimizer": renamed}, strict=False)
    assert "only there: 1.weight" in caplog.text and torch.equal(renamed.state[others[0].weight]["exp_avg"], before)
    wrapped = torch.optim.AdamW([(f"module._orig_mod.{name}", value) for name, value in others.named_parameters()])
    manager.restore({"optimizer": wrapped})
    assert has_states_of(layers, optimizer, others, wrapped)


def compiled(model, *parts):
    for part in parts:
        model[part] = torch.compile(model[part])
    return model


@pytest.mark.nightly
@pytest.mark.parametrize(("saved", "restored"), [((), (0, 2)), ((0, 2), ()), ((0,), (2,)), ((0, 2), (0, 2))])
def test_parts_that_were_compiled_change_no_key(manager, saved, restored):
    model, other = compiled(made()[0], *saved), compiled(made(1)[0], *restored)
    plain = list(made()[0].state_dict())
    manager.save(1, {"model": model})
    found = manager.checkpoint(1).load("model.pt")
    assert list(found) == plain and "_orig_mod" not in "".join(found._metadata)
    manager.restore({"model": other})
    assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    with torch.no_grad():
        other[0].weight.zero_()
        other[2].weight.zero_()
    manager.restore({"model": other}, keys=["model.2.weight"])
    assert torch.equal(other[2].weight, model[2].weight) and not other[0].weight.any()
    with torch.no_grad():
        other[2].weight.zero_()
    with manager._session.checkpoint("raw") as checkpoint:
        checkpoint.save("model.pt", model.state_dict())  # with the keys of the wrappers
    checkpoint.load_into("model.pt", other)
    assert torch.equal(other[2].weight, model[2].weight) and torch.equal(other[0].weight, model[0].weight)


def test_a_pattern_that_matches_no_key_is_no_success(manager, caplog):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    manager.save(1, {"model": model})
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(nm.NebulaConfigError, match=r"^global_step1: keys='model\.1\.wieght' matches no key"):
        manager.restore({"model": other}, keys=["model.0.*", "model.1.wieght"])
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    manager.restore({"model": other}, keys=["model.0.*", "model.1.wieght"], strict=False)
    assert torch.equal(other[0].weight, model[0].weight) and "keys='model.1.wieght' matches no key" in caplog.text
    manager.restore({"model": other}, keys=["*.1.weight", "model.1.b*"])
    assert torch.equal(other[1].weight, model[1].weight) and torch.equal(other[1].bias, model[1].bias)


@pytest.mark.parametrize("has_stepped", [False, True])
def test_the_state_of_an_optimizer_of_other_shapes_is_refused_with_key_and_both_shapes(manager, caplog, has_stepped):
    parts = made()
    train(*parts)
    manager.save(1, {"optimizer": parts[1]})
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    others = (model, torch.optim.AdamW(model.parameters()), parts[2])
    if has_stepped:
        train(*others)
    before = dict(others[1].state)
    said = r"optimizer\.pt\['state'\]\[0\]\['exp_avg'\]: shape \(6, 4\) expected, the checkpoint has \(8, 4\)"
    with pytest.raises(nm.NebulaConfigError, match=said):
        manager.restore({"optimizer": others[1]})
    manager.restore({"optimizer": others[1]}, strict=False)
    assert "shape (6, 4) expected, the checkpoint has (8, 4)" in caplog.text
    assert dict(others[1].state) == before
    train(*others)


def test_if_one_item_does_not_fit_no_item_changes(manager):
    parts = made()
    train(*parts, 2)
    manager.save(1, {**items(*parts), "state": {"w": torch.ones(3)}})
    for has_stepped in (False, True):
        others = made(1)
        if has_stepped:
            train(*others)
        longer = torch.optim.AdamW([*others[0].parameters(), torch.nn.Parameter(torch.ones(2))])
        before = {name: value.clone() for name, value in others[0].state_dict().items()}
        for wrong, said in (
            ({"optimizer": longer}, r"groups of \[7\] parameters expected, the checkpoint has groups of \[6\]"),
            ({"state": {"w": torch.ones(4)}}, r"shape \(4,\) expected, the checkpoint has \(3,\)"),
            ({"state": {"v": torch.ones(3)}}, "is missing in the checkpoint"), ({"state": 3}, "nothing can be restored into a int"),
            ({"other": {}}, "has no item 'other'"),
        ):  # fmt: skip
            with pytest.raises(nm.NebulaError, match=said):
                manager.restore({"model": others[0], "scheduler": others[2], **wrong})
            assert all(torch.equal(before[name], value) for name, value in others[0].state_dict().items())
            assert others[2].last_epoch == int(has_stepped)


def mapped_files():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "nebula-test-" in line]


@pytest.mark.nightly
def test_a_resume_keeps_no_file(manager):
    parts = made()
    big = torch.nn.Linear(600, 600)
    train(*parts)
    manager.save(1, {"big": big, "optimizer": parts[1], "extra": {"t": torch.ones(1 << 20)}})
    manager.wait()
    gc.collect()
    before = len(mapped_files())
    others, target = made(1), torch.nn.Linear(600, 600)
    found = manager.restore({"big": target, "optimizer": others[1]})
    gc.collect()
    assert len(mapped_files()) <= before
    assert found.extra["t"].sum() == 1 << 20 and torch.equal(target.weight, big.weight)


def forget_memory(place):
    """Leaves the versions in storage only."""
    nm._shutdown()
    place.lose_memory()


@pytest.mark.parametrize("odd", [pytest.param(0, id="plain", marks=pytest.mark.nightly("test_extra_comes_back_as_it_was_in_memory_of_its_own")), pytest.param(Path("/x"), id="with an odd object")])
@pytest.mark.parametrize("way", ["from storage", pytest.param("from memory", marks=pytest.mark.nightly("test_extra_comes_back_as_it_was_in_memory_of_its_own"))])
def test_extra_comes_back_as_it_was_in_memory_of_its_own(place, odd, way):
    """References to one object, memory that tensors share, cycles, parameters: all as torch.load restores them."""
    weight, alike = torch.arange(20_000.0), [1]
    extra = {"w": weight, "view": weight[:10_000], "l": alike, "m": alike, "odd": odd}
    extra |= {"p": torch.nn.Parameter(torch.ones(2000)), "g": torch.ones(2, requires_grad=True), "t": torch.ones(300, 400).t(), "me": extra}
    with nm.Manager(place.storage, weights_only=False) as manager:
        manager.save(1, {"extra": extra})
        manager.wait()
    gc.collect()
    if way == "from storage":
        forget_memory(place)
    before = mapped_files()
    with nm.Manager(place.storage, weights_only=False) as manager:
        found = manager.restore({}).extra
        gc.collect()
        assert set(mapped_files()) <= set(before)
    found["w"][0] = 9
    assert found["view"][0] == 9 and torch.equal(found["view"][1:], weight[1:10_000])
    assert found["me"] is found and found["l"] is found["m"] and found["odd"] == odd
    assert type(found["p"]) is torch.nn.Parameter and found["g"].requires_grad and torch.equal(found["t"], torch.ones(400, 300))


def test_wrappers_of_torch_leave_no_mark_in_the_names(manager):
    model = torch.nn.Linear(3, 3)
    manager.save(1, {"model": torch.compile(model)})
    other = torch.nn.Linear(3, 3)
    manager.restore({"model": other})
    assert torch.equal(other.weight, model.weight)


class Odd:
    pass


# fault (Arguments of the caller): An item of a Manager needs a class that its `restore` would refuse.
# result: `save` raises and names the class. `restore` gives back every item that `save` takes.
def test_loads_are_safe_and_say_what_a_file_needs(place, manager):
    target = {"w": torch.zeros(8)}
    with pytest.raises(nm.NebulaConfigError, match=rf"^item 'extra' needs {Odd.__module__}\.Odd, which restore\(\) .*add_safe_globals.*weights_only=False"):
        manager.save(1, {"model": {"w": torch.ones(8)}, "extra": Odd()})
    assert manager.all_steps() == []
    with nm.Manager(place.storage, weights_only=False) as trusting:
        trusting.save(1, {"model": {"w": torch.ones(8)}, "extra": Odd()})
    with pytest.raises(nm.NebulaConfigError, match=rf"^global_step1, extra\.pt: .*It needs {Odd.__module__}\.Odd: .*add_safe_globals.*weights_only=False"):
        manager.restore({"model": target})
    assert target["w"].sum() == 0
    with nm.Manager(place.storage, weights_only=False) as trusting:
        assert isinstance(trusting.restore({"model": target}).extra, Odd)
    torch.serialization.add_safe_globals([Odd])  # torch 2.4 has no safe_globals()
    try:
        assert isinstance(manager.restore({"model": target}).extra, Odd)
        manager.save(2, {"extra": Odd()})
    finally:
        torch.serialization.clear_safe_globals()


def same(first, second):
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple, collections.deque)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, numpy.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and first.flags.f_contiguous == second.flags.f_contiguous and bool(
            (first == second).all()
        )
    return bool(torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second)


EXTRAS = {
    "scalars of numpy": {"loss": numpy.float64(0.5), "step": numpy.int32(7), "good": numpy.bool_(True), "half": numpy.float16(0.1), "text": numpy.str_("ab")},
    "arrays of numpy": [
        numpy.arange(6).astype(kind).reshape(2, 3) for kind in ("f4", "f8", "i1", "u2", "i8", "c16", ">i4", "?")
    ] + [numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)), numpy.zeros((0, 3)), numpy.array(5), numpy.array(["ab", "c"])],
    "an array in a tuple, with a tensor": ({"a": (numpy.arange(3), torch.ones(2))}, torch.zeros(3)),
    "a dtype": numpy.dtype("f4"),
    "a defaultdict": collections.defaultdict(list, a=[1, numpy.arange(2)]),
    "a defaultdict of counts": collections.defaultdict(int, a=1),
    "a Counter": collections.Counter("abca"),
    "a deque": collections.deque([1, numpy.float32(2)], 5),
    "sets": [{1, 2}, frozenset("ab"), set()],
    "paths": [pathlib.Path("/x/y"), pathlib.PurePosixPath("z")],
    "times": [
        datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc), datetime.date(2026, 1, 2), datetime.timedelta(seconds=3.5), datetime.time(3, 4),
    ],
    "bytes": [b"", b"abc", bytearray(b"q"), bytearray()],
    "numbers": [1j, 2**100, range(3, 9), slice(1, 2)],
    "types": [int, list],
    "a device": [torch.device("cpu"), torch.float32, torch.Size([3])],
    "states of generators": [nm.rng_state(), random.getstate(), numpy.random.default_rng(1).bit_generator.state, numpy.random.get_state()],
    "nothing": None,
}  # fmt: skip


# fault: as test_loads_are_safe_and_say_what_a_file_needs
@pytest.mark.parametrize("what", EXTRAS)
def test_what_a_program_keeps_beside_its_tensors_is_restored_as_it_was(manager, what):
    value, model = EXTRAS[what], torch.nn.Linear(2, 2)
    manager.save(1, {"model": model, "extra": value, "own": {"value": value, "w": torch.ones(2)}})
    found = manager.restore({"model": torch.nn.Linear(2, 2)})
    assert same(found.extra, value)
    target = {"value": None, "w": torch.zeros(2)}
    if not isinstance(value, (dict, list, tuple)):
        manager.restore({"own": target})
        assert same(target["value"], value) and target["w"].all()


@pytest.mark.parametrize("made", [
    lambda scheduler, optimizer: scheduler.OneCycleLR(optimizer, 0.1, 100), lambda scheduler, optimizer: scheduler.MultiStepLR(optimizer, [1, 1, 5]),
    lambda scheduler, optimizer: scheduler.CosineAnnealingWarmRestarts(optimizer, 5), lambda scheduler, optimizer: scheduler.ReduceLROnPlateau(optimizer),
    lambda scheduler, optimizer: scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch), lambda scheduler, optimizer: scheduler.SequentialLR(
        optimizer, [scheduler.ConstantLR(optimizer), scheduler.ExponentialLR(optimizer, 0.9)], [2]),
    lambda scheduler, optimizer: scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
])  # fmt: skip
def test_every_scheduler_that_is_saved_is_restored(manager, made):
    def fresh():
        return made(torch.optim.lr_scheduler, torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1))

    saved, other = fresh(), fresh()
    for _ in range(3):
        saved.optimizer.step() if hasattr(saved, "optimizer") else None
        saved.step(*([1.0] if isinstance(saved, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    manager.save(1, {"scheduler": saved})
    manager.restore({"scheduler": other})
    assert repr(other.state_dict()) == repr(saved.state_dict())


def test_a_failure_that_comes_later_is_raised_by_the_next_call_or_listed(place, monkeypatch):
    monkeypatch.setenv("NEBULA_PERSIST_GIVE_UP", "100ms")
    events = []
    for on_error, job in (("raise", "a"), ("warn", "b")):
        place.storage.unlink(missing_ok=True)
        with nm.Manager(place.storage, on_error=on_error, job=job) as manager:
            place.storage.write_text("not a directory")
            manager.on_event(events.append)
            save(manager, 1)
            until(lambda manager=manager: manager._engine._late, 60, "the agent to give up")
            if on_error == "raise":
                with pytest.raises(nm.NebulaError, match="'global_step1' is not durable"):
                    manager.save(2, {"model": {"w": torch.zeros(2)}})
                assert manager.errors == []
            else:
                assert manager.save(2, {"model": {"w": torch.zeros(2)}})
                assert "'global_step1' is not durable" in str(manager.errors[0])
    assert [event for event in events if event.kind == "lost" and event.step == 1]


def test_a_save_that_fails_is_raised_or_none(place, monkeypatch):
    def fail(*_):
        raise nm.NebulaUnavailable("no agent")

    monkeypatch.setattr(nm.Checkpoint, "_save", fail)
    with nm.Manager(place.storage, job="a") as manager, pytest.raises(nm.NebulaUnavailable):
        manager.save(1, {"model": {"w": torch.zeros(2)}})
    with nm.Manager(place.storage, on_error="warn", job="b") as manager:
        assert manager.save(1, {"model": {"w": torch.zeros(2)}}) is None
        assert "no agent" in str(manager.errors[0]) and manager.all_steps() == []


def test_waiting_on_an_event_loop_lets_it_go_on(manager):
    async def main():
        save(manager, 1)
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        await manager.wait_async(1, timeout=60)
        ticking.cancel()
        return ticks

    assert asyncio.run(main()) > 1 and manager.checkpoint(1).state == "durable"


def test_a_wait_on_an_event_loop_can_be_cancelled_and_raises_what_wait_raises(place):
    with nm.Manager(place.storage, on_error="warn") as manager:
        place.storage.write_text("not a directory")

        async def main():
            with pytest.raises(nm.NebulaStorageError):
                await manager.wait_async(7)
            with pytest.raises(nm.NebulaTimeout):
                await manager.wait_async(1, timeout=0.1)
            waiting = asyncio.create_task(manager.wait_async(1))
            await asyncio.sleep(0.2)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            return time.monotonic()

        save(manager, 1)
        ended = asyncio.run(main())  # to_thread() would hold up its end until the agent gives up
        assert time.monotonic() - ended < 5
        place.storage.unlink()
        manager.wait(1, timeout=60)


def test_two_managers_and_the_functions_of_the_package_live_side_by_side(place):
    nm.init(place.root / "third", 0)
    with nm.Manager(place.root / "one") as one, nm.Manager(place.root / "two") as two:
        save(one, 1)
        save(two, 2, 3)
        with nm.Checkpoint("global_step9") as checkpoint:
            checkpoint.save("a", 1)
        assert (one.all_steps(), two.all_steps()) == ([1], [2, 3])
        assert two.save(4, {"model": {"w": torch.zeros(1)}}).wait("durable", 60) is None
    assert nm.get_latest_checkpoint().tag == "global_step9"


def test_invalid_arguments_are_refused_at_once(place):
    for wrong in ({"keep_last": 0}, {"keep_every": -1}, {"keep_best": "loss"}, {"save_every_steps": 0}, {"save_every_s": "soon"}, {"save_every": "often"}):
        with pytest.raises(nm.NebulaConfigError):
            nm.Manager(place.storage, **wrong)
    with pytest.raises(nm.NebulaConfigError):
        nm.Best("loss", mode="lowest")
    with nm.Manager(place.storage) as manager:
        for items_ in ({}, {"a.b": 1}, {"": 1}, [1]):
            with pytest.raises(nm.NebulaConfigError):
                manager.save(1, items_)
        for step in (-1, True, 1.5, "1"):
            with pytest.raises(nm.NebulaConfigError):
                manager.save(step, {"model": {}})
        assert manager.all_steps() == []


def test_whole_numbers_of_numpy_and_torch_are_steps_and_counts(place):
    numpy = pytest.importorskip("numpy")
    with nm.Manager(place.storage, save_every_steps=numpy.int64(2), keep_last=numpy.int32(2), keep_best=nm.Best("loss", count=numpy.int64(1))) as manager:
        answers = [manager.should_save(numpy.int64(step)) for step in (1, 2)]
        assert answers == [False, True] and all(type(answer) is bool for answer in answers)
        assert manager.save(numpy.int64(2), {"model": {"w": torch.ones(1)}}).tag == "global_step2"
        assert manager.save(torch.tensor(4), {"model": {"w": torch.ones(1)}}).step == 4
        assert not manager.should_save(4)
        manager.wait(numpy.int64(4))
        assert manager.restore({}, step=torch.tensor(2)).step == 2 and manager.checkpoint(numpy.int8(4)).step == 4
        manager.pin(numpy.int64(2), "why")
        assert manager.checkpoints()[1].pinned == "why"
        manager.unpin(torch.tensor(2))
        manager.delete(numpy.int64(2))
        assert manager.all_steps() == [4]


def test_what_is_no_argument_is_refused_with_words_about_the_argument(place):
    with pytest.raises(TypeError, match=r"^Manager\(\) has no argument 'replica'; it has replicas, replicated$"):
        nm.Manager(place.storage, replica=1)
    with pytest.raises(TypeError, match=r"^Manager\(\) has no argument 'save_every_step'; it has save_every_steps, save_every_s, save_every$"):
        nm.Manager(place.storage, save_every_step=5)
    with pytest.raises(TypeError, match=r"has no argument 'xyz'; it has path, save_every_steps, .*keep_best.* replicas"):
        nm.Manager(place.storage, xyz=5)
    with pytest.raises(TypeError, match=r"^init\(\) has no argument 'keep_lasts'; it has keep_last, keep_best, keep_items$"):
        nm.Session(place.storage, keep_lasts=5)
    with pytest.raises(nm.NebulaConfigError, match="replicated=3: give the names of items"):
        nm.Manager(place.storage, replicated=3)
    with pytest.raises(nm.NebulaConfigError, match="a metric is named by text"):
        nm.Best(3)
    with nm.Manager(place.storage) as manager:
        with pytest.raises(nm.NebulaConfigError, match="targets are a dict"):
            manager.restore(made()[0])
        with pytest.raises(nm.NebulaConfigError, match=r"items are a dict, as .*, not an empty dict"):
            manager.save(1, {})
        with pytest.raises(nm.NebulaConfigError, match=r"keys are patterns.*not 3 \(int\)"):
            manager.restore({"model": {}}, keys=[3])
        with pytest.raises(nm.NebulaConfigError, match=r"a whole number of 0 or more, not tensor\(1.5"):
            manager.save(torch.tensor(1.5), {"model": {}})


def test_a_closed_manager_tells_its_errors_and_does_not_pretend_to_wait(place, monkeypatch):
    monkeypatch.setenv("NEBULA_PERSIST_GIVE_UP", "100ms")
    with nm.Manager(place.storage, on_error="warn") as manager:
        place.storage.write_text("not a directory")
        save(manager, 1)
        until(lambda: manager._engine._late, 60, "the agent to give up")
    assert ["gave up" in str(failure) for failure in manager.errors] == [True]
    assert repr(manager) == "<nebulaml.Manager, closed>"
    for call in (manager.wait, lambda: manager.wait(1), lambda: asyncio.run(manager.wait_async())):
        with pytest.raises(nm.NebulaUnavailable, match="was closed"):
            call()


RANK = """
    import datetime, torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, 2.0)
    with nm.Manager(sys.argv[1], save_every_s="200ms", replicated=["model"], keep_last=1) as manager:
        saved = []
        for step in range(1, 30):
            if rank == 1 and step == 20:
                signal.raise_signal(signal.SIGTERM)
            if manager.should_save(step):
                manager.save(step, {"model": model, "own": {"rank": torch.tensor(rank), "step": step}})
                saved.append(step)
            if manager.stop_requested:
                break
            time.sleep(0.02)
            dist.barrier()
        manager.wait()
        own = {"rank": torch.tensor(-1), "step": 0}
        found = manager.restore({"model": model, "own": own})
        say(rank, saved, found.step == saved[-1] == own["step"], int(own["rank"]), sorted(manager.checkpoint(found.step).files))
"""


def test_ranks_save_the_same_steps_by_rank_0s_clock_and_after_a_notice_to_any_of_them(place, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(place.port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ranks = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        ranks.append(place.trainer(RANK, place.storage))
    outputs = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs
    files = "['model.pt', 'nebula-metadata.json', 'own.00000.pt', 'own.00001.pt']"
    steps = outputs[0].partition("]")[0].partition("[")[2]
    assert outputs == [f"{rank} [{steps}] True {rank} {files}" for rank in (0, 1)]
    assert len(steps.split(",")) >= 2 and int(steps.split(",")[-1]) in (20, 21)


def run_ranks(place, monkeypatch, code, world=2):
    """Runs a program on each rank of one node, and returns what each has said."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.port, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}.items():
        monkeypatch.setenv(name, str(value))
    started = []
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        started.append(place.trainer(GROUP + textwrap.dedent(code), place.storage))
    outputs = [rank.communicate(timeout=120)[0].splitlines() for rank in started]
    assert all(rank.returncode == 0 for rank in started), outputs
    return outputs


GROUP = """
import datetime, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank = dist.get_rank()
def tried(call):
    try:
        return call()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
"""


def test_after_a_restore_of_an_earlier_step_no_rank_takes_the_answer_that_a_step_had_before(place, monkeypatch):
    outputs = run_ranks(
        place, monkeypatch, """
        with nm.Manager(sys.argv[1], save_every_s=3600) as manager:
            manager._due.is_due_by_time = lambda step, is_durable: is_due
            is_due = True
            manager.save(1, {"own": {"step": 1}}, force=True)
            answers = [manager.should_save(2)]
            manager.wait(1)
            manager.restore({"own": {"step": 0}}, 1)
            is_due = False
            dist.barrier()
            if rank == 0:
                time.sleep(1)  # rank 1 asks first
            say(*answers, manager.should_save(2), manager.should_save(3))
        """
    )  # fmt: skip
    assert outputs == [["True False False"]] * 2


@pytest.mark.parametrize(
    "how",
    [
        "\"metrics\": {\"loss\": \"x\"}",
        *(
            pytest.param(how, marks=pytest.mark.nightly("test_a_rank_whose_arguments_are_refused_is_news_for_every_rank_too"))
            for how in ("\"metadata\": {\"x\": b\"y\"}", "\"items\": {\"a.b\": 1}", "\"items\": {}")
        ),
    ],
)
def test_a_rank_whose_arguments_are_refused_is_news_for_every_rank_too(place, monkeypatch, how):
    outputs = run_ranks(
        place, monkeypatch, f"""
        with nm.Manager(sys.argv[1], save_every_steps=1) as manager:
            say(tried(lambda: manager.save(1, **{{"items": {{"own": 1}}, **({{{how}}} if rank else {{}})}}) is not None))
            dist.barrier()
            say(manager.latest_step(), manager.all_steps())
        """,
    )  # fmt: skip
    assert outputs[0] == ["True", "None []"] and outputs[1][0].startswith("NebulaConfigError") and outputs[1][1] == "None []"


# fault (Storage): A Manager's save fails on one rank, and the others wait for that rank.
# result: All ranks give the version up. Waits end and name the rank, and `latest_step()` is the version before.
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_whose_save_fails_is_news_for_every_rank(place, monkeypatch, first):
    """Whichever rank comes first: the one that fails, or the one that would wait for it."""
    outputs = run_ranks(
        place, monkeypatch, f"""
        class Broken:
            def state_dict(self):
                raise RuntimeError("mine")
        with nm.Manager(sys.argv[1], save_every_steps=1, replicated=["model"]) as manager:
            model = torch.nn.Linear(2, 2)
            manager.save(1, {{"model": model, "own": rank}})
            manager.wait()
            dist.barrier()
            for turn in (0, 1):
                if (turn == 0) == (rank == {first}):
                    say(tried(lambda: manager.save(2, {{"model": model, "own": Broken() if rank == 1 else rank}}, force=True) is not None))
                dist.barrier()
            say(manager.latest_step(), manager.all_steps())
            if rank == 0:
                say(tried(lambda: manager.wait(2)))
                manager.wait()
            dist.barrier()
            manager.save(2, {{"model": model, "own": rank}}, force=True)
            manager.wait(2)
            say(manager.latest_step(), manager.all_steps())
        """,
    )  # fmt: skip
    assert outputs[1] == ["RuntimeError: mine", "1 [1]", "2 [1, 2]"]
    assert outputs[0][:2] == ["True", "1 [1]"] and outputs[0][3:] == ["2 [1, 2]"]
    assert "rank 1 has failed to save it: RuntimeError('mine')" in outputs[0][2] or "a save failed: RuntimeError('mine')" in outputs[0][2]


# fault: as test_a_rank_whose_save_fails_is_news_for_every_rank
def test_a_wait_ends_when_another_rank_fails_to_save(place, monkeypatch):
    outputs = run_ranks(
        place, monkeypatch, """
        class Broken:
            def state_dict(self):
                raise RuntimeError("mine")
        with nm.Manager(sys.argv[1], save_every_steps=1) as manager:
            if rank == 0:
                manager.save(1, {"own": 1})
                dist.barrier()
                say(tried(lambda: manager.wait(1)))
            else:
                dist.barrier()
                say(tried(lambda: manager.save(1, {"own": Broken()})))
        """,
    )  # fmt: skip
    assert "RuntimeError('mine')" in outputs[0][0] and outputs[1] == ["RuntimeError: mine"]


def test_an_item_of_another_rank_than_rank_0_is_restored_there(place, monkeypatch):
    outputs = run_ranks(
        place, monkeypatch, """
        with nm.Manager(sys.argv[1], save_every_steps=1) as manager:
            manager.save(1, {"both": {"x": rank}, **({"mine": {"x": 7}} if rank else {})})
            manager.wait()
            target = {"x": 0}
            say(tried(lambda: manager.restore({"mine": target}).step), target["x"])
            say(manager.restore({"mine": target}, strict=False).step)
        """,
    )  # fmt: skip
    assert outputs[1] == ["1 7", "1"]
    assert "has no item 'mine' of rank 0: rank 1 saved it" in outputs[0][0] and outputs[0][1] == "1"


def test_a_thread_may_own_the_manager(place):
    found = []

    def work():
        with nm.Manager(place.storage, save_every_steps=1) as manager:
            if manager.should_save(1):
                save(manager, 1)
            found.append(manager.all_steps())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[1]]
    assert os.path.exists(place.runtime)
