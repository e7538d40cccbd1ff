"""Going back to an older step: the versions saved afterwards are the newest, in memory and in storage; only later steps of the old line are abandoned."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time

import pytest
from nebulaml._session import locate
from waiting import until

SAVE = """
def save(*steps):
    for step in steps:
        with nm.Checkpoint(f"global_step{step}", -2) as checkpoint:
            checkpoint.save("state.pt", {"step": step, "run": sys.argv[2]})
def save_together(*steps):
    # begins the steps in order and commits them in the opposite order, as threads may do
    begun = [nm.Checkpoint(f"global_step{step}", -2) for step in steps]
    for checkpoint in begun:
        checkpoint.save("state.pt", {"run": sys.argv[2]})
    for checkpoint in reversed(begun):
        checkpoint.commit()
def load(step):
    return nm.get_checkpoint(f"global_step{step}").load("state.pt")
def newest():
    found = nm.get_latest_checkpoint()
    return found.tag.removeprefix("global_step") if found else None
nm.init(sys.argv[1], 0, 2, on_error="raise", **eval(sys.argv[3]))
"""


class Job:
    def __init__(self, place):
        self.place, self.settings, self.runs = place, {}, 0

    def run(self, code):
        """Runs the job once more, in a process of its own."""
        self.runs += 1
        body = SAVE + code + "\nnm.flush_persistence()\n"
        return self.place.run(body, self.place.storage, self.runs, self.settings).split()

    def latest(self):
        return (self.place.storage / "latest").read_text().strip()

    def command(self, *arguments, code=0):
        done = subprocess.run(
            [os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), *arguments, "--path", str(self.place.storage)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def abandoned(self):
        listed = json.loads(self.command("list", "--json"))["versions"]
        return sorted(one["step"] for one in listed if one["abandoned"])

    def stored(self):
        return sorted(int(path.name.removeprefix("global_step")) for path in self.place.storage.glob("global_step*"))


@pytest.fixture
def job(place):
    return Job(place)


def forget_memory(place):
    place.lose_memory()


# fault (Storage): A job goes back to an older step and saves on.
# result: The new versions are the newest, for `latest`, retention and all nodes, from memory and from storage. The
# later steps of before are marked as abandoned and stay.
def test_a_save_after_going_back_is_the_newest_in_memory_and_in_storage(job, place):
    job.run("save(100, 200, 300, 350, 400)")
    job.run("load(300); save(310, 320)")
    assert job.latest() == "global_step320"
    assert job.abandoned() == [350, 400]
    assert job.run("say(newest())") == ["320"]
    place.kill_agent()  # the next one takes the memory over
    assert job.run("say(newest())") == ["320"]
    forget_memory(place)
    assert job.run("say(newest()); save(330)") == ["320"]
    assert job.latest() == "global_step330"
    assert job.stored() == [100, 200, 300, 310, 320, 330, 350, 400]  # nothing goes by itself
    assert job.abandoned() == [350, 400]
    assert job.run("say(load(400)['run'])") == ["1"]


def test_a_run_that_goes_back_in_the_same_process_begins_a_new_line(job, place):
    assert job.run("save(100, 200, 300); load(100); save(110); say(newest()); save(120); say(newest())") == ["110", "120"]
    assert job.abandoned() == [200, 300]
    forget_memory(place)
    assert job.run("say(newest())") == ["120"]


def test_a_run_that_saves_an_older_step_than_it_found_has_gone_back_though_nebula_loaded_nothing(job):
    job.run("save(100, 200)")
    job.run("save(150)")
    assert job.run("say(newest())") == ["150"]
    assert job.abandoned() == [200]


# fault (Storage): A run counts its steps anew (a warm start), or saves a smaller step than before, with `keep_last`.
# result: It begins a new line. Its versions are the newest, and stay. `keep_last` removes those that it had found
# first.
@pytest.mark.parametrize("reads", [pytest.param("", id="without a restore", marks=pytest.mark.nightly("test_a_run_that_counts_its_steps_anew_keeps_what_it_saves_and_is_resumed")), pytest.param("say(newest()); load(2000); ", id="after a restore of the newest")])
def test_a_run_that_counts_its_steps_anew_keeps_what_it_saves_and_is_resumed(job, place, reads):
    job.settings = {"keep_last": 2}
    job.run("save(1000, 2000)")
    job.run(f"{reads}save(101); nm.flush_persistence(); save(102); nm.flush_persistence(); save(103); nm.flush_persistence()")
    until(lambda: job.stored() == [102, 103])
    assert job.run("say(newest())") == ["103"]
    forget_memory(place)
    assert job.run("say(newest())") == ["103"]
    assert job.latest() == "global_step103"


# fault: as test_a_run_that_counts_its_steps_anew_keeps_what_it_saves_and_is_resumed
def test_a_smaller_step_of_the_same_run_begins_a_new_line_and_does_not_disappear(job, place):
    job.settings = {"keep_last": 2}
    job.run("save(10, 20, 30); nm.flush_persistence(); save(15); nm.flush_persistence()")
    until(lambda: job.stored() == [15, 20, 30] or job.stored() == [10, 15, 30] or job.stored() == [15, 30])
    assert job.run("say(newest())") == ["15"]
    forget_memory(place)
    assert job.run("say(newest())") == ["15"]


# fault: as test_nothing_is_abandoned_by_a_run_that
@pytest.mark.nightly("test_nothing_is_abandoned_by_a_run_that")
def test_files_that_are_added_to_an_earlier_step_abandon_nothing(job):
    job.run("save(10, 20, 30)")
    job.run("""
newest(); load(30)
checkpoint = nm.Checkpoint("global_step10")
checkpoint.save("score.pt", {"loss": 1.0})
checkpoint.commit()
""")
    assert job.run("say(newest(), load(10)['run'])") == ["30", "1"]
    assert job.abandoned() == []


def test_going_back_twice_and_to_what_was_abandoned(job, place):
    job.run("save(100, 200, 300)")
    job.run("load(100); save(110, 120)")
    job.run("load(110); save(115)")
    assert job.abandoned() == [120, 200, 300]
    assert job.run("say(newest())") == ["115"]
    job.run("load(300); save(310)")  # after all
    assert job.abandoned() == [110, 115, 120]
    forget_memory(place)
    assert job.run("say(newest())") == ["310"]


def test_retention_counts_along_the_line(job):
    job.settings = {"keep_last": 2, "keep_every": 100}
    job.run("save(100, 200, 300, 340, 350, 400)")
    job.run("load(300); save(310); nm.flush_persistence(); save(320)")
    until(lambda: job.stored() == [100, 200, 300, 310, 320])  # 400 is a multiple, too, but of an abandoned line
    assert job.latest() == "global_step320"


def test_the_abandoned_stay_until_as_many_were_saved_as_are_kept(job):
    job.settings = {"keep_last": 2}
    job.run("save(300, 400)")
    job.run("load(300); save(310)")
    time.sleep(0.5)
    assert job.stored() == [300, 310, 400]


# fault (Storage): A program reads an old step, or steps of one run become complete in another order, or files are
# added to an older step.
# result: No version is abandoned.
@pytest.mark.parametrize("how", ["compares", *(pytest.param(how, marks=pytest.mark.nightly("test_nothing_is_abandoned_by_a_run_that")) for how in ("commits in another order", "is another job", "writes a torn step again", "saves other tags"))])
def test_nothing_is_abandoned_by_a_run_that(job, how):
    job.run("save(100, 200, 300)")
    newest = "300"
    if how == "compares":
        job.run("say(newest()); load(300); save(310); load(100); save(320)")
        newest = "320"
    elif how == "commits in another order":
        job.run("load(300); save_together(310, 320, 330)")
        newest = "330"
    elif how == "is another job":
        job.settings = {"job": "evaluation"}
        job.run("nm.get_latest_checkpoint(sys.argv[1]); save(10)")
        job.settings = {}
    elif how == "writes a torn step again":
        job.run("""
checkpoint = nm.Checkpoint("global_step310", 2)
checkpoint.save("state.pt", {})
""")
        job.run("load(300); save(310)")
        newest = "310"
    else:
        job.run("""
load(300)
with nm.Checkpoint("best", -2) as checkpoint:
    checkpoint.save("state.pt", {})
save(310)
""")
        newest = "310"
    assert job.run("say(newest())") == [newest]
    assert job.abandoned() == []


def test_an_evaluator_that_reads_an_old_step_changes_nothing_for_the_job_that_trains(job, place):
    trainer = place.trainer(
        SAVE + "save(100, 200); nm.flush_persistence(); say('ready'); sys.stdin.readline(); save_together(290, 300); nm.flush_persistence(); say('done')",
        place.storage, 1, {}, stdin=True,
    )
    assert trainer.stdout.readline() == "ready\n"
    place.run("nm.init(None)\nsay(nm.get_checkpoint('global_step100', sys.argv[1]).load('state.pt')['step'])", place.storage)
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    assert trainer.stdout.readline() == "done\n"
    assert trainer.wait() == 0
    assert job.run("say(newest())") == ["300"]
    assert job.abandoned() == []


def test_prune_takes_abandoned_steps_by_rule_and_by_name(job, place):
    job.run("save(100, 200, 300, 400)")
    job.run("load(100); save(110)")
    assert "would go, abandoned" in job.command("prune", "--abandoned")
    assert job.stored() == [100, 110, 200, 300, 400]
    job.command("prune", "--tag", "global_step400", "--yes")
    assert job.stored() == [100, 110, 200, 300]
    job.command("prune", "--tag", "global_step110", "--yes", code=5)
    job.command("prune", "--abandoned", "--yes")
    assert job.stored() == [100, 110]
    assert job.run("say(newest())") == ["110"]


def test_the_list_and_the_status_say_what_is_abandoned(job):
    job.run("save(100, 200)")
    job.run("load(100); save(110); say(sorted(tag for tag, one in nm.list_checkpoints().items() if one['abandoned']))")
    for command in "list", "status":
        lines = [line for line in job.command(command).splitlines() if "abandoned" in line]
        assert len(lines) == 1 and lines[0].startswith("global_step200"), lines


def test_a_damaged_head_leads_to_what_it_came_from_and_not_to_what_was_abandoned(job, place):
    job.run("save(100, 200, 300)")
    job.run("load(100); save(110, 120)")
    forget_memory(place)
    for step in 110, 120:
        (place.storage / f"global_step{step}" / "state.pt").unlink()
    assert job.run("say(newest())") == ["100"]


def test_a_job_that_goes_back_on_a_node_whose_agent_does_not_know_of_the_later_steps(job, place, monkeypatch):
    job.run("save(100, 200)")
    monkeypatch.setenv("NEBULA_RUNTIME_DIR", str(place.runtime) + "-b")
    monkeypatch.setenv("NEBULA_MEMORY_DIR", str(place.memory) + "-b")
    first = place.runtime
    place.runtime = first.parent / (first.name + "-b")
    try:
        job.run("load(200); save(300, 400)")
    finally:
        place.kill_agent()
        shutil.rmtree(str(place.memory) + "-b", ignore_errors=True)
        place.runtime = first
    monkeypatch.setenv("NEBULA_RUNTIME_DIR", str(first))
    monkeypatch.setenv("NEBULA_MEMORY_DIR", str(place.memory))
    job.run("load(200); save(210)")
    assert job.abandoned() == [300, 400]
    assert job.latest() == "global_step210"
    assert job.run("say(newest())") == ["210"]


# fault (Storage): A version's directory is moved away or removed by hand while the agent runs.
# result: No search finds it any more, also not in memory: neither in the next run, nor in the next session of the same
# process. `latest` names another version, and the state of an object that a program still has is `failed`.
@pytest.mark.nightly
def test_a_folder_that_was_moved_away_is_believed_by_the_agent_that_runs_on(job, place):
    job.run("save(100, 200)")
    (place.storage / "global_step200").rename(place.root / "diverged")
    assert place.agents()  # with the version in its memory
    assert job.run("say(newest()); save(110)") == ["100"]
    assert job.latest() == "global_step110"
    (place.storage / "global_step110").rename(place.root / "diverged too")
    state, newest = job.run("found = nm.get_checkpoint('global_step110'); say(found.state if found else 'none', newest())")
    assert state in ("failed", "none") and newest == "100"  # none: memory has given it back
    assert job.latest() == "global_step100"
