"""A cloud's announcement of an eviction is a notice: the job saves and ends. The tests use small metadata servers with the answers of the clouds."""

import logging
import subprocess
import sys
import time

import nebulaml as nm
import pytest
import torch
from metadata_server import azure, serving, soon
from nebulaml._session import ranks
from waiting import until


@pytest.fixture
def cloud(monkeypatch):
    with serving() as server:
        monkeypatch.setenv("NEBULA_METADATA_URL", server.url)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy has another machine's metadata
        yield server


def aws(cloud):
    cloud.action = {"action": "terminate", "time": soon(100).strftime("%Y-%m-%dT%H:%M:%SZ")}


def gce(cloud):
    cloud.preempted = True


@pytest.mark.parametrize(("name", "evict", "most"), [("azure", azure, 45), ("aws", aws, 100), ("gce", gce, 30)])
def test_an_eviction_asks_for_one_save_and_what_was_reached_is_logged(place, cloud, caplog, name, evict, most):
    with nm.Manager(place.storage, save_every_steps=1000, evictions=name) as manager:
        assert not manager.should_save(1)
        until(lambda: cloud.asked >= 2)
        assert not manager.should_save(2) and not manager.stop_requested
        begun = time.monotonic()
        evict(cloud)
        until(lambda: manager.stop_requested)
        left_s = manager._notices.left_s()
        assert most - 2 - (time.monotonic() - begun) < left_s <= most  # whole seconds
        assert manager.should_save(3)
        manager.save(3, {"model": {"w": torch.ones(1000)}})
        assert not manager.should_save(4)
        with caplog.at_level(logging.WARNING, "nebulaml"):
            assert manager.leave() == "durable"
    assert (place.storage / "global_step3" / ".nebula" / "manifest-1.json").exists()
    assert any("global_step3 is durable after" in record.getMessage() for record in caplog.records)
    asked = cloud.asked
    time.sleep(1.5)
    assert cloud.asked <= asked + 1  # after the notice no thread asks again


def test_events_of_other_machines_and_those_that_end_nothing_are_no_notice(place, cloud):
    azure(cloud, resources=["vm_2", "vm_33"])
    with nm.Manager(place.storage, save_every_steps=1000, evictions="azure") as manager:
        manager.should_save(1)
        until(lambda: cloud.asked >= 4)
        azure(cloud, kind="Freeze")
        asked = cloud.asked
        until(lambda: cloud.asked >= asked + 2)
        assert not manager.should_save(2) and not manager.stop_requested


def test_a_service_that_fails_is_warned_of_and_asked_again(place, cloud, caplog):
    cloud.broken = True
    with nm.Manager(place.storage, save_every_steps=1000, evictions="aws") as manager:
        manager.should_save(1)
        until(lambda: "Nebula notices no eviction" in caplog.text, 120)
        assert cloud.asked >= 30 and "aws does not answer" in caplog.text and "503" in caplog.text
        cloud.broken = False
        aws(cloud)
        until(lambda: manager.stop_requested)
        assert manager.should_save(2)


def test_the_cloud_is_asked_on_though_the_agent_was_killed_and_nothing_is_saved(place, cloud):
    with nm.Manager(place.storage, save_every_steps=1000, evictions="gce") as manager:
        manager.should_save(1)
        until(lambda: cloud.asked >= 1)
        place.kill_agent()
        gce(cloud)
        until(lambda: manager.stop_requested)
        assert manager.should_save(2)


def test_only_the_torchrun_that_started_a_worker_counts_as_its_launcher(tmp_path, monkeypatch):
    """torchrun gives its variables to its workers and has none of them itself; a shell may stand between."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert ranks.launcher() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert ranks.launcher() is None  # pytest's parent is no launcher
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    worker = "from nebulaml._session import ranks; print(ranks.launcher())"
    start = f"import os, subprocess; subprocess.run(['sh', '-c', '{sys.executable} -c \"$0\"; true', {worker!r}], env=os.environ | {{'TORCHELASTIC_RUN_ID': 'job'}})"
    for name, counts in (("torchrun", True), ("other", False)):
        (tmp_path / name).write_text(start)
        process = subprocess.Popen([sys.executable, tmp_path / name], stdout=subprocess.PIPE, text=True)
        told = process.communicate(timeout=60)[0].strip()
        assert told == (str(process.pid) if counts else "None"), name


def test_the_end_of_a_process_waits_no_longer_than_its_time_allows(place, caplog):
    with nm.Manager(place.storage, save_every_steps=1000, evictions=None) as manager:
        assert manager.leave() is None
        manager.save(1, {"model": {"w": torch.ones(1000)}}, force=True)
        begun = time.monotonic()
        assert manager.leave(timeout=0) in ("capturing", "captured", "committed", "durable")
        assert time.monotonic() - begun < 5


def test_other_clouds_are_refused(place):
    with pytest.raises(nm.NebulaConfigError, match="'azure', 'aws', 'gce'"):
        nm.Manager(place.storage, evictions="moon")
