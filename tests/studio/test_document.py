"""The studio's document for a page: it has only the changes, the newest version, and no more rows than a page can hold."""

from __future__ import annotations

import os

from nebulaml.studio import snapshot

NIGHTLY = os.environ.get("NEBULA_TEST_NIGHTLY")  # before a test removes the variables


def row(step, **changes):
    return {
        "tag": f"global_step{step}", "job": "", "step": step, "sequence": 1, "state": "durable", "size": 10, "file_count": 1,
        "committed_at": 1e9 + step, "where": ["storage"], "abandoned": False, "reason": "", "pinned": None, **changes,
    }  # fmt: skip


def document(*rows, history=()):
    status = {"running": False, "storage": {"path": "/scratch", "versions": list(rows)}}
    return snapshot.build(status, list(history), [], None, snapshot.Watch(), 2e9)


def test_the_newest_version_is_one_that_the_job_would_load():
    told = document(row(1), row(2), row(3, abandoned=True), row(4, where=["memory"], state="committed"), row(5, state="failed", where=[]))
    assert told["now"]["newest"]["tag"] == "global_step4" and told["now"]["after_node"]["tag"] == "global_step2"
    assert told["now"]["failed"] == 1
    assert document(row(5, state="failed", where=[]))["now"]["newest"] is None


def test_many_thousand_versions_become_the_newest_five_thousand():
    count = 100_000 if NIGHTLY else 20_000
    told = document(*map(row, range(count)))
    assert len(told["rows"]) == 5000 and told["hidden"] == count - 5000
    assert min(one["step"] for one in told["rows"].values()) == count - 5000


def test_a_line_of_history_belongs_to_the_version_of_its_tag_also_with_control_characters():
    line = {
        "tag": "a b", "step": -1, "sequence": 1, "world": 1, "size_bytes": 10.0, "result": "durable", "blocked_ms": 1.5, "copy_ms": 1.0,
        "begun": 1.0, "captured": 2.0, "committed": 3.0, "durable": 4.0, "persist_seconds": 1.0, "persist_mib_per_s": 1.0, "error": "",
    }  # fmt: skip
    told = document(row(1, tag="a\nb"), history=[line])
    assert [one["blocked_ms"] for one in told["rows"].values()] == [1.5]
    told = document(row(1, tag="a\u202eb"), history=[line])
    assert [one["blocked_ms"] for one in told["rows"].values()] == [1.5]


def line(step, **changes):
    return {
        "tag": f"global_step{step}", "step": step, "sequence": 1, "world": 1, "size_bytes": 10.0, "result": "durable", "blocked_ms": 1.5,
        "begun": 1e9 + step, "captured": 0.0, "committed": 1e9 + step, "durable": 1e9 + step, "persist_seconds": 1.0, "persist_mib_per_s": 1.0,
        "error": "", **changes,
    }  # fmt: skip


def test_the_advice_on_intervals_takes_the_failures_that_the_job_has_had():
    history = [line(n, captured=1e9 + n, begun=1e9 + n) for n in range(5)]
    ledger = {"goodput": 0.9, "wall_seconds": 7200.0, "step_seconds": 1.0, "saves": 5, "restart_seconds": 9.0, "notice_seconds": 1.0, "restarts": 4}
    ledger["spent"] = {"paused": 0.0, "blocked": 0.1}
    rows = [row(n) for n in range(5)]
    status = {"running": False, "storage": {"path": "/scratch", "versions": rows}}

    def advice(told):
        return snapshot.build(status, history, [], told, snapshot.Watch(), 2e9)["config"]["advice"][0]

    assert advice(ledger).startswith("With a failure every 30 min, as so far, these saves")
    assert advice(ledger | {"restarts": 2}).startswith("With a failure every 12.0 h, these saves")
    assert advice(None).startswith("With a failure every 12.0 h, these saves")


def test_an_event_that_the_agent_and_the_file_tell_is_one():
    """The file has six decimals of each time, the agent's answer has more."""
    at = 1e9 + 1 / 3
    status = {"running": True, "history": [line(3, stopped=at, read=at + 5, read_step=2, read_tier="memory")]}
    history = [line(2), line(3, stopped=round(at, 6), read=round(at + 5, 6), read_step=2, read_tier="memory")]
    told = snapshot.build(status, history, [], None, snapshot.Watch(), 2e9)
    assert [one["kind"] for one in told["events"]] == ["end", "restore"]


def test_a_step_that_is_saved_again_counts_the_steps_back_if_there_are_any():
    told = document(history=[line(3), line(3, sequence=2, begun=1e9 + 4, committed=1e9 + 4), line(2, sequence=2, begun=1e9 + 5, committed=1e9 + 5)])
    assert [one["text"] for one in told["events"]] == ["the job saves step 3 again", "the job saves step 2 again, 1 step back"]


def test_a_save_whose_commit_came_after_the_next_one_had_begun_is_no_return():
    late = row(10, committed_at=1e9 + 25)  # its begin is in no history yet
    told = document(late, row(20), history=[line(20), line(30, begun=1e9 + 24, committed=1e9 + 31)])
    assert told["events"] == []
    told = document(row(1190, committed_at=1e9 + 7), row(1200, committed_at=1e9 + 6), history=[line(1190, begun=1e9 + 1), line(1200, begun=1e9 + 2)])
    assert told["events"] == []


def test_a_writing_does_not_have_the_state_and_the_error_of_a_failed_one_of_its_tag():
    open_ = {"sequence": 0, "committed": 0.0, "durable": 0.0}
    history = [line(2, **open_, result="failed", error="rank 1 ended"), line(2, **open_, result="capturing", begun=1e9 + 9)]
    (found,) = document(history=history)["rows"].values()
    assert (found["state"], found["error"], found["begun"]) == ("capturing", "", 1e9 + 9)
    waits = row(2, sequence=0, state="capturing", where=["memory"], committed_at=0.0)
    (found,) = document(waits, history=history)["rows"].values()
    assert (found["state"], found["error"], found["begun"]) == ("capturing", "", 1e9 + 9)


def test_a_save_that_waits_for_ranks_is_a_problem_only_when_they_are_late():
    waits = row(2, state="capturing", where=["memory"], committed_at=0.0, reason="waits for rank 1 of 2")
    for age, count in ((5.0, None), (60.0, 1)):
        begun = line(2, result="capturing", begun=2e9 - age, committed=0.0, durable=0.0)
        told = document(row(1), waits, history=[begun])["now"]
        assert told["newest"]["tag"] == "global_step1" and (told["stuck"] and told["stuck"]["count"]) == count
    failed = row(3, state="failed", where=[], reason="rank 1 (process 7) ended")
    assert document(row(1), failed)["now"]["stuck"] == {"count": 1, "tag": "global_step3", "state": "failed", "error": "rank 1 (process 7) ended"}
    assert document(failed, row(4))["now"]["stuck"] is None


def test_the_configuration_is_the_agents_and_not_the_studios(monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "7")
    agent = {"pid": os.getpid(), "memory_budget": 1, "memory_directory": "/dev/shm/x"}
    monkeypatch.setattr(snapshot, "_environment", lambda pid: {"NEBULA_AGENT_LINGER": "60"})
    job = {"job": "", "path": "/scratch", "verdict": None, "trainer_count": 0}
    status = {"running": True, "agent": agent, "jobs": [job], "storage": {"path": "/scratch", "versions": []}}
    values = {one["name"]: one for one in snapshot.build(status, [], [], None, snapshot.Watch(), 2e9)["config"]["values"]}
    assert values["NEBULA_AGENT_LINGER"]["value"] == "60" and "environment of the agent" in values["NEBULA_AGENT_LINGER"]["origin"]
    assert values["NEBULA_STORE_MBPS"]["origin"] == "default of the agent"
    monkeypatch.undo()
    assert snapshot._environment(os.getpid()) and snapshot._environment(2**22 + 1) is None
    job["path"] = "/other"  # the agent of the machine on which the studio runs has nothing to do with the job
    assert not [one for one in snapshot.build(status, [], [], None, snapshot.Watch(), 2e9)["config"]["values"] if one["name"].startswith("NEBULA_")]


def test_the_configuration_shows_what_the_job_gave_to_init_also_later_on_another_machine(place, start, monkeypatch):
    place.run(
        """
        nm.init(sys.argv[1], 0, 3, keep_last=2, keep_daily=7, keep_best=nm.Best("loss", count=2), on_full="skip", on_error="raise")
        with nm.Checkpoint("global_step1") as checkpoint:
            checkpoint.save("model.pt", torch.ones(3))
        checkpoint.wait("durable")
        """,
        place.storage,
    )
    for machine in ("this", "another"):
        if machine == "another":
            monkeypatch.setenv("NEBULA_RUNTIME_DIR", str(place.root / "other"))
            monkeypatch.setenv("NEBULA_STORE_MBPS", "7")
        state = start(place.storage).until(lambda state: state.get("config") and state["config"]["values"])
        values = {one["name"]: one["value"] for one in state["config"]["values"]}
        assert values["persistent_time_interval"] == "0 s" and values["num_of_version_in_retention"] == "3" and values["on_full"] == "skip"
        assert values["stays in storage"] == "keep_last=2, keep_daily=7, keep_best=Best('loss', 'min', 2)"
        assert ("memory of the agent" in values) == (machine == "this") and values.get("NEBULA_STORE_MBPS") != "7"


def test_a_page_gets_what_has_changed_since_it_asked(place, start, save):
    save(1, 2)
    studio = start(place.storage)
    first = studio.until(lambda state: len(state["rows"]) == 2 and not state["now"]["trains"])
    save(3)
    studio.until(lambda state: len(state["rows"]) == 3 and not state["now"]["trains"])
    since = f"/api/state?epoch={first['epoch']}&since={first['revision']}"
    told = studio.ask("GET", since)[2]
    tags = {one["tag"] for one in told["rows"].values()}
    assert "global_step3" in tags and "global_step1" not in tags and not told["all"]
    assert studio.work("prune", {"versions": [{"tag": "global_step1", "entry": 1}]})["results"][0]["removed"]
    studio.until(lambda state: [one["tag"] for one in state["rows"].values() if not one["where"]] == ["global_step1"])
    other = studio.ask("GET", f"/api/state?epoch=another&since={told['revision']}")[2]
    assert other["all"] and len(other["rows"]) == 3, "a page of an earlier studio has to begin anew"


def test_the_verdict_is_the_worst_of_the_jobs_of_the_path():
    def job(name, state, path="/scratch"):
        return {
            "job": name, "path": path, "verdict": {"state": state, "since": 1e9, "reason": "r", "cure": "c"}, "storage_error": "",
            "trainer_count": 0,
        }  # fmt: skip

    def verdict(*jobs):
        status = {"running": True, "path": "/scratch", "jobs": list(jobs), "storage": {"path": "/scratch", "versions": []}}
        return snapshot.build(status, [], [], None, snapshot.Watch(), 2e9)["verdict"]

    assert verdict(job("a", "fine"), job("b", "at risk"), job("c", "broken", "/other"))["job"] == "b"
    assert verdict(job("a", "broken"), job("b", "at risk"))["state"] == "broken" and verdict() is None
