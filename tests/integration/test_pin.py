"""`nebula pin`: no command and no agent removes a pinned version, and each of them shows the reason."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import time

import pytest

HOSTILE = "ev/il\033[31m<b>\u202e"


@pytest.fixture
def filled(run, make, storage):
    """Makes three numbered versions, and as the newest one a version with a hostile name."""
    for step in (1, 2, 3):
        make(f"global_step{step}", f"model.pt={step}0")
    store = make(HOSTILE, "model.pt=10")
    assert run("copy", store, storage, "--all").returncode == 0
    return storage


def listed(run, path):
    return {one["tag"]: one for one in json.loads(run("list", "--path", path, "--json").stdout)["versions"]}


def test_prune_keeps_what_is_pinned_until_it_is_unpinned(run, filled):
    assert run("pin", "global_step1", "--reason", "figure 3", "--path", filled).returncode == 0
    refused = run("prune", "--tag", "global_step1", "--yes", "--path", filled)
    assert refused.returncode == 5 and "it is pinned: figure 3" in refused.stderr
    plan = json.loads(run("prune", "--keep-last", "1", "--path", filled, "--json").stdout)
    assert {one["tag"] for one in plan["kept"] if one["pinned"] is not None} == {"global_step1"}
    assert "stays: pinned" in run("prune", "--keep-last", "1", "--path", filled).stdout
    assert run("prune", "--keep-last", "1", "--yes", "--path", filled).returncode == 0
    assert set(listed(run, filled)) == {"global_step1", HOSTILE}
    assert run("unpin", "global_step1", "--path", filled).stdout.startswith("global_step1 is no longer pinned")
    assert run("unpin", "global_step1", "--path", filled).stdout.startswith("global_step1 was not pinned")
    assert run("prune", "--keep-last", "1", "--yes", "--path", filled).returncode == 0
    assert set(listed(run, filled)) == {HOSTILE}


def test_unpin_latest_means_the_checkpoint_that_pin_latest_means(run, filled):
    assert run("pin", "latest", "--path", filled).returncode == 0
    told = json.loads(run("unpin", "latest", "--path", filled, "--json").stdout)
    assert told == {"tag": HOSTILE, "was_pinned": True}
    assert json.loads(run("pin", "--path", filled, "--json").stdout)["pins"] == []
    assert run("unpin", "global_step99", "--path", filled).returncode == 0  # its files may be gone, and the pin not


def test_a_pin_with_a_hostile_tag_and_reason_is_shown_harmlessly(run, filled):
    reason = 'why\033[2J "not"\n<script>'
    assert json.loads(run("pin", "latest", "--reason", reason, "--path", filled, "--json").stdout) == {
        "tag": HOSTILE,
        "pinned": reason,
    }
    for command in (["list"], ["pin"], ["inspect", HOSTILE]):
        told = run(*command, "--path", filled).stdout
        assert "\033" not in told and "\u202e" not in told and "why?[2J" in told
    assert listed(run, filled)[HOSTILE]["pinned"] == reason and listed(run, filled)["global_step1"]["pinned"] is None
    assert json.loads(run("inspect", HOSTILE, "--path", filled, "--json").stdout)["pinned"] == reason
    pins = json.loads(run("pin", "--path", filled, "--json").stdout)["pins"]
    assert [(one["tag"], one["pinned"]) for one in pins] == [(HOSTILE, reason)] and pins[0]["pinned_at"] > 1e9


def test_only_what_is_there_is_pinned_unless_told(run, filled):
    assert run("pin", "global_step99", "--path", filled).returncode == 3
    assert "no checkpoint is pinned" in run("pin", "--path", filled).stdout
    assert run("pin", "global_step99", "--early", "--path", filled).returncode == 0
    assert "global_step99" in run("pin", "--path", filled).stdout


def test_a_pin_that_cannot_be_read_pins_all_the_same(run, make):
    make("global_step1", "m.pt=1")
    store = make("global_step2", "m.pt=1")
    pins = pathlib.Path(store) / ".nebula/pins"
    pins.mkdir(parents=True, exist_ok=True)
    (pins / "global_step1.json").write_text("{")
    assert run("prune", "--keep-last", "1", "--yes", "--path", store).returncode == 0
    assert listed(run, store)["global_step1"]["pinned"] == "(unreadable)"
    # as a manager of an earlier build wrote it
    (pins / "global_step1.json").write_text(
        '{"nebula": "pin", "version": "1.0", "tag": "global_step1", "reason": "old", "time": 5}'
    )
    assert listed(run, store)["global_step1"]["pinned"] == "old"


def test_the_metrics_of_a_version_are_shown(run, maker, tmp_path):
    said = {
        "nebula": "metadata",
        "version": "1.0",
        "metrics": {"loss": 0.25, "bad": None},
        "metadata": {"lr": "1e-3\033[31m"},
        "items": {},
        "world": 1,
    }
    (tmp_path / "said").write_text(json.dumps(said))
    subprocess.run(
        [maker, tmp_path / "store", "t", "--file", f"nebula-metadata.json={tmp_path}/said", "m.pt=3"], check=True
    )
    subprocess.run([maker, tmp_path / "store", "u", "m.pt=3"], check=True)
    told = run("list", "--metrics", "--path", "store").stdout
    assert "METRICS" in told and "loss=0.25 bad=nan" in told and "METRICS" not in run("list", "--path", "store").stdout
    versions = json.loads(run("list", "--metrics", "--json", "--path", "store").stdout)["versions"]
    assert (
        versions[0]["metrics"] == said["metrics"]
        and versions[0]["metadata"] == said["metadata"]
        and "metrics" not in versions[1]
    )
    told = run("inspect", "t", "--path", "store").stdout
    assert "  metrics     loss=0.25 bad=nan\n" in told and "  metadata    lr=1e-3?[31m\n" in told


def test_metadata_with_large_numbers_and_a_nul_hides_no_metrics(run, maker, tmp_path):
    said = {"metrics": {"loss": 0.25}, "metadata": {"seed": 2**127, "note": "a\0b", "of": [[2**64, -(2**70)]]}}
    (tmp_path / "said").write_text(json.dumps(said))
    subprocess.run([maker, tmp_path / "store", "t", "--file", f"nebula-metadata.json={tmp_path}/said", "m.pt=3"], check=True)
    assert "loss=0.25" in run("list", "--metrics", "--path", "store").stdout
    versions = json.loads(run("list", "--metrics", "--json", "--path", "store").stdout)["versions"]
    assert versions[0]["metadata"] == {"seed": float(2**127), "note": "a\0b", "of": [[float(2**64), -float(2**70)]]}
    assert 'note="a\\u0000b"' in run("inspect", "t", "--path", "store").stdout


def test_a_removal_that_fails_names_the_checkpoint(run, nebula, make, tmp_path):
    make("global_step1", "m.pt=1")
    store = make("global_step2", "m.pt=1")

    def no_room():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    line = [nebula, "prune", "--keep-last", "1", "--yes", "--path", store]
    told = subprocess.run(line, preexec_fn=no_room, capture_output=True, text=True, timeout=60)
    assert told.returncode == 4 and '"global_step1" could not be removed: ' in told.stderr
    assert set(listed(run, store)) == {"global_step1", "global_step2"}


def test_a_path_that_is_not_there_has_no_pins_to_show_or_to_remove(run, tmp_path):
    for words in (["pin"], ["unpin", "global_step1"]):
        told = run(*words, "--path", tmp_path / "mistyped")
        assert told.returncode == 3 and f"{tmp_path}/mistyped does not exist" in told.stderr
    assert not (tmp_path / "mistyped").exists()


# fault (Storage): The clock of the storage is set back by a year, and the agent of a reader has died.
# result: The lease of that agent keeps its version for 15 minutes more.
def test_a_lease_from_the_future_ends_as_others_do(run, make):
    make("global_step1", "m.pt=1")
    store = make("global_step2", "m.pt=1")
    leases = pathlib.Path(store) / ".nebula/leases/global_step1"
    leases.mkdir(parents=True)
    lease = leases / "0123456789abcdef"
    lease.write_text("{}")
    now = time.time()
    os.utime(lease, (now + 365 * 86400, now + 365 * 86400))
    told = run("prune", "--tag", "global_step1", "--yes", "--path", store)
    assert told.returncode == 5 and "a reader on another node has it" in told.stderr
    assert lease.stat().st_mtime < now + 900
    os.utime(lease, (now - 1000, now - 1000))
    assert run("prune", "--tag", "global_step1", "--yes", "--path", store).returncode == 0
    assert not lease.exists() and "global_step1" not in listed(run, store)
