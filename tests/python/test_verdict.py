"""The agent's verdict on a job: a story for each trouble, from fine to at risk or broken, and back."""

from __future__ import annotations

import json
import re
import subprocess

import nebulaml
import pytest
from nebulaml._session import locate
from waiting import until

MIB = 1 << 20


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """The agent's patience is a second."""
    monkeypatch.setenv("NEBULA_TAKEOVER_S", "1")


def asked(place, *words):
    line = [locate.agent_path(), *words, "--path", str(place.storage)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60).stdout


def verdict(place):
    (found,) = [job["verdict"] for job in json.loads(asked(place, "status", "--json"))["jobs"] if job["path"]]
    return found


def becomes(place, state, reason=""):
    """Waits for the verdict, and returns it. Then all commands show it, in their first lines."""
    last = []
    until(lambda: last.append(verdict(place)) or (re.fullmatch(state, last[-1]["state"]) and re.search(reason, last[-1].get("reason", ""))), 60, f"{state}, {reason}")
    return last[-1]


def told_first(place, state, reason):
    """The first line on the job, in each command."""
    for command in ("status", "list"):
        lines = [line for line in asked(place, command).splitlines() if not line.startswith("agent ")]
        assert re.match(f"job      {state}( for [^:]+)?: {reason}", lines[0]), lines
        assert lines[1].startswith("         do: "), lines
    number = {"at risk": 1, "broken": 2}[state]
    assert f'nebula_job_verdict{{job="",path="{place.storage}"}} {number}\n' in asked(place, "metrics")
    (listed,) = json.loads(asked(place, "list", "--json"))["verdicts"]
    assert listed["state"] == state and listed["cure"]


def log(place):
    return next(place.runtime.rglob("agent.log")).read_text()


def save(step, size=1000):
    checkpoint = nebulaml.Checkpoint(f"global_step{step}")
    checkpoint.save_bytes("b", [bytes(size)])
    assert checkpoint.commit()
    return checkpoint


RANK = """
os.environ.update(RANK=sys.argv[2], WORLD_SIZE="2", LOCAL_RANK=sys.argv[2], LOCAL_WORLD_SIZE="2", NEBULA_RUN="one")
nm.init(sys.argv[1], 0)
for word in iter(sys.stdin.readline, ""):
    checkpoint = nm.Checkpoint(f"global_step{word.split()[0]}", -2)
    checkpoint.save_bytes(sys.argv[2] + ".bin", [b"x"])
    if "half" not in word:
        checkpoint.commit()
    say("saved")
"""


# fault (Reports): A rank ends, hangs or never comes; storage fills, is unmounted, is slow or damaged; memory is full;
# copies on other nodes are missing.
# result: The job is at risk or broken. The reason and the cure are in the first lines of `nebula status` and `nebula
# list`, and in the banner of the studio's page, with the newest checkpoint that can be loaded.
def test_a_rank_that_dies_in_the_middle_of_a_save_breaks_the_job_until_a_version_is_complete_again(place):
    def tell(rank, word):
        rank.stdin.write(word + "\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "saved\n"

    ranks = [place.trainer(RANK, place.storage, number, stdin=True) for number in (0, 1)]
    for rank in ranks:
        tell(rank, "1")
    becomes(place, "fine")
    assert re.search(r"^job      fine, ", asked(place, "status"), re.M) and asked(place, "list").startswith("job      fine\n")
    tell(ranks[1], "2 half")
    ranks[1].kill()
    ranks[1].wait()
    becomes(place, "broken", r"global_step2 failed: rank 1 \(process \d+\) ended before .1.bin. was whole")
    for step in range(3, 23):
        tell(ranks[0], str(step))
    broken = becomes(place, "broken", r"global_step22 failed: rank 1 .*; 21 checkpoints in a row have failed")
    told_first(place, "broken", r"global_step22 failed: rank 1 \(process \d+\)")
    for command in ("status", "list"):  # on the first screen, although 21 newer ones failed
        assert any(line.startswith("newest   global_step1, durable") for line in asked(place, command).splitlines()[:8])
    assert verdict(place)["since"] == broken["since"]  # the trouble is one
    again = place.trainer(RANK, place.storage, 1, stdin=True)
    for rank in (again, ranks[0]):
        tell(rank, "23")
    becomes(place, "fine")
    said = [line for line in log(place).splitlines() if " is broken: " in line]
    assert len(said) == 1 and "global_step2 failed: rank 1" in said[0]
    assert "is fine again after" in log(place)
    for rank in (ranks[0], again):
        rank.stdin.close()
        rank.wait()


@pytest.mark.nightly("test_a_rank_that_dies_in_the_middle_of_a_save_breaks_the_job_until_a_version_is_complete_again")
def test_ranks_that_never_come_are_a_risk_and_break_the_job_when_the_others_go_on(place, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    nebulaml.init(str(place.storage), 0, 2)
    for step, state, reason in ((1, "at risk", "global_step1 waits for rank 1 of 2$"), (2, "broken", "global_step2 waits for rank 1 of 2; 1 older one does too")):
        checkpoint = nebulaml.Checkpoint(f"global_step{step}", -2)
        checkpoint.save_bytes("b", [b"x"])
        assert checkpoint.commit()
        becomes(place, state, reason)
        told_first(place, state, f"global_step{step} waits for rank 1 of 2")


# fault: as test_a_rank_that_dies_in_the_middle_of_a_save_breaks_the_job_until_a_version_is_complete_again
def test_storage_that_fails_is_a_risk_then_breaks_the_job_and_ends_when_it_works(place):
    nebulaml.init(str(place.storage), 0, 2)
    save(1).wait("durable")
    becomes(place, "fine")
    aside = place.storage.rename(place.root / "aside")
    place.storage.write_text("a file in the place of the directory")
    waits = save(2)
    at_risk = becomes(place, "at risk|broken", 'storage fails, and 1 checkpoint after the durable "global_step1" is only in memory: .*Not a directory')
    broken = becomes(place, "broken", "storage fails")
    assert broken["since"] == pytest.approx(at_risk["since"], abs=1) and "move away" in broken["cure"]
    told_first(place, "broken", "storage fails, and ")
    place.storage.unlink()
    aside.rename(place.storage)
    waits.wait("durable", 60)
    becomes(place, "fine")
    assert "nebula_job_verdict" in asked(place, "metrics") and " is fine again after" in log(place)
    assert len(re.findall(r" is broken: ", log(place))) == 1


def let_go(place, monkeypatch, waits):
    """Ends the agent of the slow storage. The next one writes what memory has."""
    monkeypatch.delenv("NEBULA_STORE_MBPS")
    place.kill_agent()
    waits.wait("durable", 60)


@pytest.mark.nightly("test_storage_that_fails_is_a_risk_then_breaks_the_job_and_ends_when_it_works")
def test_storage_that_is_slow_is_a_risk_while_it_writes(place, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "1")  # minutes for the version: for longer than the commands take
    nebulaml.init(str(place.storage), 0, 2)
    waits = save(1, 256 * MIB)
    becomes(place, "at risk", "storage is slow: global_step1 waits to become durable, and 1 checkpoint is only in memory: none is durable")
    told_first(place, "at risk", "storage is slow")
    let_go(place, monkeypatch, waits)
    becomes(place, "fine")


@pytest.mark.nightly("test_storage_that_fails_is_a_risk_then_breaks_the_job_and_ends_when_it_works")
def test_memory_that_has_no_room_for_the_next_version_is_a_risk(place, monkeypatch):
    monkeypatch.setenv("NEBULA_STORE_MBPS", "1")
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", str(300 * MIB))
    nebulaml.init(str(place.storage), 0, 1)
    waits = save(1, 256 * MIB)
    becomes(place, "at risk", r"memory is full: the next save waits until a version has become durable \(\d+ of \d+ MiB are in use\)")
    let_go(place, monkeypatch, waits)
    becomes(place, "fine")


@pytest.mark.nightly("test_storage_that_fails_is_a_risk_then_breaks_the_job_and_ends_when_it_works")
def test_a_version_without_the_copies_that_were_asked_for_is_a_risk(place):
    nebulaml.init(str(place.storage), 0, 2, replicas=1)
    save(1).wait("durable")
    becomes(place, "at risk", "global_step1 has 0 of 1 copies in other nodes' memory")


def test_a_damaged_version_in_storage_breaks_the_job(place):
    nebulaml.init(str(place.storage), 0, 2)
    save(1).wait("durable")
    nebulaml._shutdown()
    subprocess.run([locate.agent_path(), "stop", "--now", "--yes"], check=True, capture_output=True)
    manifest = place.storage / "global_step1" / ".nebula" / "manifest-1.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"global", b"gl0bal"))
    nebulaml.init(str(place.storage), 0, 2)
    save(2).wait("durable")
    becomes(place, "broken", "storage has a damaged checkpoint: .*global_step1")
    told_first(place, "broken", "storage has a damaged checkpoint")


STEPS = """
nm.init(sys.argv[1], 0)
step = 0
for word in iter(sys.stdin.readline, ""):
    if word == "save\\n":
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save_bytes("b", [b"x"])
        checkpoint.wait("durable")
    for step in range(step + 1, int(word) + 1) if word != "save\\n" else ():
        nm.progress(step)
    say(step)
"""


# fault (Reports): The program trains, and saves no more.
# result: The job is at risk, as soon as it has made more than three times the most steps between two versions.
def test_a_job_that_goes_on_and_saves_no_more_is_at_risk(place):
    def tell(word):
        trainer.stdin.write(f"{word}\n")
        trainer.stdin.flush()
        trainer.stdout.readline()

    def goes_to(step):
        tell(step)
        until(lambda: [job["steps"]["step"] for job in json.loads(asked(place, "status", "--json"))["jobs"] if job.get("steps")] == [step], 60, "the agent's look")

    trainer = place.trainer(STEPS, place.storage, stdin=True)
    for step in (10, 20, 30):
        goes_to(step)
        tell("save")
        becomes(place, "fine")
    goes_to(130)
    becomes(place, "at risk", "no checkpoint is complete since global_step30: that is 100 steps, and never were more than 10 between two$")
    told_first(place, "at risk", "no checkpoint is complete since global_step30")
    tell("save")
    becomes(place, "fine")
    trainer.kill()
    trainer.wait()


def test_the_job_of_the_path_comes_first_then_the_worst_and_a_storage_that_is_gone_is_told_in_the_table(place):
    jobs = [nebulaml.Session(str(place.storage / name), persistent_time_interval=0) for name in ("a", "b")]
    for job in jobs:
        with job.checkpoint("global_step1") as checkpoint:
            checkpoint.save_bytes("b", [b"x"])
        checkpoint.wait("durable", 60)
    aside = (place.storage / "b").rename(place.root / "aside")
    (place.storage / "b").write_text("a file in the place of the directory")
    with jobs[1].checkpoint("global_step2") as checkpoint:
        checkpoint.save_bytes("b", [b"x"])
    place.storage = place.storage / "a"
    until(lambda: "storage fails" in asked(place, "status"), 60, "the verdict")
    lines = [line for line in asked(place, "status").splitlines() if line.startswith("job ")]
    assert [re.split("[ :,]+", line)[1] for line in lines] == ["fine", lines[1].split()[1]] and "storage fails" in lines[1]
    place.storage = place.storage.parent
    (bad, good) = json.loads(asked(place, "list", "--jobs", "--json"))["jobs"]
    assert (bad["name"], good["name"], good["reason"]) == ("b", "a", "") and "Not a directory" in bad["reason"]
    (place.storage / "b").unlink()
    aside.rename(place.storage / "b")
    for job in jobs:
        job.close()
