"""Requests to a running job from outside: `nebula flush`, and a save at the next step."""

import json
import os
import subprocess
import time

import nebulaml
import torch
from nebulaml._session import locate, notices


def nebula(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = os.environ.get("NEBULA_AGENT_PATH") or str(locate.agent_path())
    return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_flush_makes_a_version_durable_before_its_turn(place):
    nebulaml.init(str(place.storage), 3600, 2, on_error="raise")
    made = []
    for step in (1, 2, 3):
        checkpoint = nebulaml.Checkpoint(f"global_step{step}")
        checkpoint.save("a.pt", torch.ones(10))
        assert checkpoint.commit()
        checkpoint.wait("durable" if step == 1 else "committed")  # the first is persisted at once, or else one of the others is
        made.append(checkpoint)
    assert made[2].state == "committed"
    told = nebula("flush", "--path", place.storage)
    assert told.returncode == 0 and told.stdout == "global_step3 is durable\n", told.stderr
    assert made[2].state == "durable" and (place.storage / "global_step3/a.pt").exists()
    assert made[1].state == "committed"
    told = nebula("flush", "global_step2", "--path", place.storage, "--json")
    assert told.returncode == 0 and json.loads(told.stdout) == {"tag": "global_step2", "state": "durable"}
    assert nebula("flush", "nothing", "--path", place.storage).returncode == 3
    nebulaml._shutdown()
    place.kill_agent()
    assert nebula("flush", "--path", place.storage).returncode == 4


def test_flush_gives_up_after_its_timeout(place):
    place.storage.mkdir()
    nebulaml.init(str(place.storage), 3600, 2, on_error="raise")
    for step in (1, 2):
        checkpoint = nebulaml.Checkpoint(f"global_step{step}")
        checkpoint.save("a.pt", torch.ones(10))
        checkpoint.commit()
        checkpoint.wait("durable" if step == 1 else "committed")  # the first is persisted at once, or else the second is
    (place.storage / "global_step2").write_text("in the way")
    told = nebula("flush", "--timeout", 1, "--path", place.storage)
    assert told.returncode == 6 and "global_step2" in told.stderr


def test_status_json_has_the_history_of_the_agent(nm, place):
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("a.pt", torch.ones(10))
    checkpoint.commit()
    checkpoint.wait("durable")
    row = json.loads(nebula("status", "--json", "--path", place.storage).stdout)["history"][-1]
    assert row["tag"] == "global_step1" and row["result"] == "durable" and row["durable"] >= row["begun"] > 0


def test_a_job_saves_once_when_it_is_asked_to(place):
    notices.ask_to_save(str(place.storage))  # of an earlier run: it is not this one's
    with nebulaml.Manager(place.storage, save_every_steps=10**6) as manager:
        assert not manager.should_save(1)
        time.sleep(notices.LOOK_S + 0.05)
        assert not manager.should_save(2)
        notices.ask_to_save(str(place.storage))
        time.sleep(notices.LOOK_S + 0.05)
        assert manager.should_save(3) and manager.should_save(3)
        assert manager.save(3, {"extra": 1}) is not None
        time.sleep(notices.LOOK_S + 0.05)
        assert not manager.should_save(4)


# fault (Storage): The request of an earlier run to save has a time in the future: the clock of its server was wrong.
# result: The job sees later requests.
def test_a_request_of_an_earlier_run_from_the_future_hides_none(place):
    notices.ask_to_save(str(place.storage))
    os.utime(place.storage / ".nebula/save-now", (1 << 32, 1 << 32))
    with nebulaml.Manager(place.storage, save_every_steps=10**6) as manager:
        assert not manager.should_save(1)
        notices.ask_to_save(str(place.storage))
        time.sleep(notices.LOOK_S + 0.05)
        assert manager.should_save(2)
        (place.storage / ".nebula/save-now").unlink()
        time.sleep(notices.LOOK_S + 0.05)
        assert not manager.should_save(3)
