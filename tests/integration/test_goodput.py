"""`nebula goodput`: the ledger of jobs whose times are known, and of a real one that is killed and resumed."""

import csv
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time
import uuid

import fork_server
import pytest
from waiting import until

COLUMNS = ["tag", "step", "sequence", "world", "files", "size_bytes", "result", "blocked_ms", "copy_ms", "capture_cpu_ms", "faults", "begun", "captured", "committed", "durable", "persist_seconds", "persist_mib_per_s", "error", "stopped", "stepped", "read", "read_step", "written_bytes", "read_tier"]
KINDS = ("productive", "blocked", "inflated", "lost", "restart", "paused")


class Job:
    """Writes the history of a job as its agents would, and the ledger beside it. Times in seconds."""

    def __init__(self, start=1_766_000_000.0):
        self.now, self.rows, self.truth = start, [], dict.fromkeys(KINDS, 0.0)
        self.stopped = self.stepped = self.read = 0.0
        self.read_step, self.read_tier, self.step, self.high, self.background = -1, "", 0, 0, 0.0

    def train(self, steps, step_s=2.0, kept=True):
        """Trains. kept: no failure undoes these steps. While a version is written, a step takes a fifth longer."""
        for _ in range(steps):
            extra = min(0.2 * step_s, self.background)
            self.background = max(self.background - step_s - extra, 0.0)
            self.step += 1
            kind = "productive" if kept and self.step > self.high else "lost"
            self.truth[kind] += step_s
            self.truth["inflated" if kind == "productive" else "lost"] += extra
            self.now += step_s + extra
            self.high = max(self.high, self.step) if kept else self.high

    def save(self, blocked=0.5, persist=4.0, **fields):
        begun = self.now
        self.now += blocked
        self.truth["blocked"] += blocked
        self.background = persist
        self.rows.append(
            dict.fromkeys(COLUMNS, 0)
            | {
                "tag": f"global_step{self.step}",
                "step": self.step,
                "sequence": int(begun * 1e9),
                "world": 8,
                "result": "durable",
                "blocked_ms": blocked * 1e3,
            }
            | {
                "begun": begun,
                "captured": begun + blocked,
                "committed": begun + blocked,
                "durable": begun + blocked + persist,
                "error": "",
            }
            | {"stopped": self.stopped, "stepped": self.stepped, "read": self.read, "read_step": self.read_step, "read_tier": self.read_tier}
            | fields
        )

    def fail(self, to, down=100.0, known=True, tier="", paused=False, silent=0.0):
        """Fails the job, or ends it: no history has the steps since the last save. The job continues from a step.

        silent: after the last step, so long in the middle of the next one.
        """
        self.stepped = self.now
        self.now += silent
        self.truth["lost"] += silent
        self.stopped = self.now if known else 0.0
        self.now += down
        self.truth["paused" if paused else "restart"] += down
        self.read, self.read_step, self.read_tier, self.step, self.background = self.now, to, tier, to, 0.0

    def write(self, path, columns=COLUMNS):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows)
        return path


def ledger(run, path):
    told = run("goodput", "--history", path, "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert sum(found["spent"].values()) == pytest.approx(found["wall_seconds"], abs=1e-3)
    return found


def trained(failures=True):
    """Trains with saves so far apart that most intervals have undisturbed steps. The times between the first and the last save are known."""
    job = Job()
    job.save(persist=0.0)
    job.truth = dict.fromkeys(KINDS, 0.0) | {"blocked": 0.5}
    for n in range(20):
        job.train(50)
        job.save(persist=0.0 if n < 15 else 30.0)
        if failures and n == 5:
            job.train(20, kept=False)  # lost: after the last save
            job.fail(to=job.step - 20, tier="memory")
        if failures and n == 9:
            job.train(10, kept=False)
            job.fail(to=job.step - 10 - 100, tier="peer")  # two saves back: a hundred steps are done again
    job.truth["blocked"] -= 0.5  # the last save lies after the end of the ledger
    return job


def test_a_job_without_failures_is_blocked_and_inflated_only(run, tmp_path):
    job = trained(failures=False)
    found = ledger(run, job.write(tmp_path / "history.csv"))
    for kind in KINDS:
        assert found["spent"][kind] == pytest.approx(job.truth[kind], abs=0.5), kind
    assert found["restarts"] == 0 and found["step_seconds"] == pytest.approx(2.0) and found["spent"]["inflated"] > 10
    assert found["goodput"] == pytest.approx(job.truth["productive"] / found["wall_seconds"], abs=1e-3)


def test_lost_and_restart_are_told_apart_and_repeated_steps_are_lost(run, tmp_path):
    job = trained()
    found = ledger(run, job.write(tmp_path / "history.csv"))
    for kind in KINDS:
        assert found["spent"][kind] == pytest.approx(job.truth[kind], abs=2), kind
    assert found["restarts"] == 2 and found["restarts_estimated"] == 0
    told = run("goodput", "--history", tmp_path / "history.csv").stdout
    assert found["restart_seconds"] == pytest.approx(job.truth["restart"] / 2, abs=1)
    assert "2 restarts of " in told and all(kind in told for kind in KINDS if kind != "paused") and "pause" not in told


def test_the_time_to_notice_is_that_from_the_last_step_to_the_end_of_the_processes(run, tmp_path):
    job = trained(failures=False)
    job.truth["blocked"] += 0.5
    for silent in (42.0, 12.0, 1.0):  # a hang, another one, and a crash in the middle of a step
        job.train(20, kept=False)
        job.fail(to=job.step - 20, tier="memory", silent=silent)
        job.train(50)
        job.save(persist=0.0)
    job.fail(to=job.step, tier="memory", silent=12.0)  # right after a save, which counts as a step
    job.stepped -= 60
    job.train(50)
    job.save(persist=0.0)
    job.train(20, kept=False)
    job.fail(to=job.step - 20, tier="memory")
    job.stepped = 0.0  # its trainers counted no steps
    job.train(50)
    job.save(persist=0.0)
    found = ledger(run, job.write(tmp_path / "history.csv"))
    assert found["restarts"] == 5
    assert found["notice_seconds"] == pytest.approx((40 + 10 + 0 + 9.5) / 4, abs=0.5), "less the time of a step"
    assert "5 restarts of 100 s, noticed after 15 s" in run("goodput", "--history", tmp_path / "history.csv").stdout
    for row in job.rows:
        row["stepped"] = 0
    assert ledger(run, job.write(tmp_path / "history.csv"))["notice_seconds"] is None
    assert "noticed" not in run("goodput", "--history", tmp_path / "history.csv").stdout


def test_a_night_after_a_run_that_had_ended_by_itself_is_a_pause_and_no_restart(run, tmp_path):
    job = trained(failures=False)
    job.truth["blocked"] += 0.5
    job.fail(to=job.step, down=9 * 3600.0, tier="storage", paused=True)  # right after its last save
    for _ in range(5):
        job.train(50)
        job.save(persist=0.0)
    job.train(20, kept=False)
    job.fail(to=job.step - 20, down=9 * 3600.0, tier="storage")  # a crash that nobody saw all night
    job.train(50)
    job.save()
    job.truth["blocked"] -= 0.5
    found = ledger(run, job.write(tmp_path / "history.csv"))
    for kind in KINDS:
        assert found["spent"][kind] == pytest.approx(job.truth[kind], abs=2), kind
    assert (found["restarts"], found["pauses"]) == (1, 1)
    assert found["goodput"] == pytest.approx(job.truth["productive"] / (found["wall_seconds"] - 9 * 3600), abs=1e-3)
    told = run("goodput", "--history", tmp_path / "history.csv").stdout
    assert "1 restart of 9 h 0 min, noticed at once, 1 pause" in told and "paused" in told


def test_when_the_end_is_not_known_half_an_interval_counts_as_lost(run, tmp_path):
    job = trained()
    for row in job.rows:
        row["stopped"] = 0
    found = ledger(run, job.write(tmp_path / "history.csv"))
    truth = job.truth
    assert found["restarts_estimated"] == 2
    assert found["spent"]["lost"] + found["spent"]["restart"] == pytest.approx(
        truth["lost"] + truth["restart"], abs=2
    )
    assert found["spent"]["productive"] == pytest.approx(truth["productive"], abs=2)
    assert found["spent"]["restart"] == pytest.approx(
        truth["restart"] + 40 + 20 - 2 * 50.25, abs=2
    )  # 20 and 10 steps were lost, 25 are assumed


def test_shares_of_several_nodes_are_one_save(run, tmp_path):
    job = trained()
    alone = ledger(run, job.write(tmp_path / "history.csv"))
    job.rows = [row | {"blocked_ms": row["blocked_ms"] / 2, "begun": row["begun"] + 0.1} for row in job.rows] + job.rows
    both = ledger(run, job.write(tmp_path / "both.csv"))
    assert both["saves"] == alone["saves"] and both["spent"] == pytest.approx(alone["spent"], abs=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tag\n",
        "\n\n,,,\n",
        ",".join(COLUMNS) + "\n",
        ",".join(COLUMNS) + "\nx,1\n" + "," * 60 + '\n"a""b\n' + "\0\xff\n",
        "nan,inf\n",
        "begun,step,tag\n1766000000,1\n1766000010,2\n",  # lines that end before their tag
    ],
)
def test_a_history_that_is_none_gives_an_empty_ledger(run, tmp_path, text):
    (tmp_path / "history.csv").write_text(text, encoding="latin-1")
    assert ledger(run, tmp_path / "history.csv")["saves"] == 0
    assert run("goodput", "--history", tmp_path / "history.csv").stdout.startswith("the history has 0 saves")


def test_hostile_tags_and_an_old_header_are_read(run, tmp_path):
    job = trained()
    found = ledger(run, job.write(tmp_path / "new.csv"))
    for row in job.rows:
        row["tag"] = '=cmd|"x",\033[31m' + row["tag"]
    job.write(tmp_path / "hostile.csv")
    assert ledger(run, tmp_path / "hostile.csv") == found
    for missing in (6, 2, 1):
        header = ",".join(COLUMNS[:-missing])
        mixed = (tmp_path / "hostile.csv").read_text().replace(",".join(COLUMNS), header, 1)
        (tmp_path / "mixed.csv").write_text(mixed)  # an old file that a new agent went on with
        assert ledger(run, tmp_path / "mixed.csv") == found
    job.write(tmp_path / "old.csv", COLUMNS[:-1])
    tiers = found["restarts_by_tier"]
    assert tiers == {"unknown": 0, "memory": 1, "peer": 1, "storage": 0}
    assert ledger(run, tmp_path / "old.csv") == found | {"restarts_by_tier": dict.fromkeys(tiers, 0) | {"unknown": 2}}
    job = trained(failures=False)
    found = ledger(run, job.write(tmp_path / "new.csv"))
    assert ledger(run, job.write(tmp_path / "old.csv", COLUMNS[:-6])) == found


def test_a_line_that_was_cut_changes_no_other(run, tmp_path):
    whole = trained().write(tmp_path / "history.csv").read_text().splitlines(keepends=True)
    found, file = ledger(run, tmp_path / "history.csv"), tmp_path / "cut.csv"
    stride = 1 if os.environ.get("NEBULA_TEST_NIGHTLY") else 11
    for length in range(1, len(whole[-1]) - 1, stride):  # the newest line is being written
        file.write_text("".join(whole) + whole[-1][:length])
        assert ledger(run, file) == found, whole[-1][:length]
    before, cut, after = "".join(whole[:10]), whole[10], "".join(whole[11:])
    file.write_text(before + after)
    without = ledger(run, file)
    for length in range(1, cut.rindex(","), stride):  # behind the last comma is the tier of a restart alone
        file.write_text(before + cut[:length] + "\n" + after)
        assert ledger(run, file) == without, cut[:length]
        file.write_text(before + cut[:length] + after)  # an older agent has put the next line behind the rest of this one
        assert ledger(run, file)["wall_seconds"] == found["wall_seconds"], cut[:length]


def test_zeros_after_a_loss_of_power_hide_no_line_behind_them(run, tmp_path):
    whole = trained().write(tmp_path / "history.csv").read_text().splitlines(keepends=True)
    file = tmp_path / "zeros.csv"
    file.write_text("".join(whole[:10] + whole[11:]))
    without = ledger(run, file)
    for zeros in ("\0" * len(whole[10]), whole[10][:20] + "\0" * 5000, "\0" * 7 + "\n"):  # in place of one line
        file.write_text("".join(whole[:10]) + zeros + "".join(whole[11:]))
        assert ledger(run, file) == without, zeros


def test_tags_without_steps_have_a_ledger_of_their_times(run, tmp_path):
    job = trained(failures=False)
    for row in job.rows:
        row["tag"], row["step"] = "named" + row["tag"], -1
    found = ledger(run, job.write(tmp_path / "history.csv"))
    assert (found["first_step"], found["last_step"], found["step_seconds"]) == (-1, -1, 0)
    assert "tags without steps; 21 saves" in run("goodput", "--history", tmp_path / "history.csv").stdout
    job.rows[3]["step"], job.rows[7]["step"] = 30, 70
    found = ledger(run, job.write(tmp_path / "history.csv"))
    assert (found["first_step"], found["last_step"]) == (30, 70)


def test_no_history_is_one_sentence(run, make):
    store = make("t", "m.pt=3")
    failed = run("goodput", "--path", store)
    assert failed.returncode == 3 and "--history" in failed.stderr and failed.stderr.count("\n") == 1


STEP_S, LOST_S, DOWN_S = 0.05, 0.6, 1.5
CLOCKS_S = 0.1  # the test's clock is another one than that of the history, which has hundredths
JOB = f"""
STEP_S, LOST_S = {STEP_S}, {LOST_S}
""" + """
import os, sys, time, torch
import nebulaml as nm
nm.init(sys.argv[1], 0, 100, on_error="raise")
latest = nm.get_latest_checkpoint()
step = latest.load("m.pt")["step"] if latest else 0
for step in range(step + 1, int(sys.argv[2]) + 1):
    time.sleep(STEP_S)
    nm.progress(step)
    if step % 5 == 0:
        with nm.Checkpoint(f"global_step{step}") as checkpoint:
            checkpoint.save("m.pt", {"w": torch.zeros(1000), "step": step})
        checkpoint.wait("durable", 60)
if len(sys.argv) > 3:
    time.sleep(LOST_S)
    os.kill(os.getpid(), 9)
"""


def test_a_real_job_that_is_killed_has_a_ledger(run, nebula, tmp_path):
    """Each kind has at least the time for which the job slept. All kinds together have no more than the time of the test."""
    pytest.importorskip("nebulaml")
    name = uuid.uuid4().hex[:8]
    runtime, memory = pathlib.Path(f"/tmp/nb-{name}"), pathlib.Path(f"/dev/shm/nb-{name}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEBULA_")} | {
        "NEBULA_RUNTIME_DIR": str(runtime),
        "NEBULA_MEMORY_DIR": str(memory),
        "NEBULA_OUTPUT_DIR": str(tmp_path / "output"),
        "NEBULA_AGENT_PATH": str(nebula),
    }
    try:
        begun = time.monotonic()

        def train(*words):
            with fork_server.start(JOB, tmp_path / "store", *words, stdout=None, env=environment) as job:
                return job.wait(120)

        assert train("30", "kill") == -signal.SIGKILL
        asked = {"env": environment, "timeout": 60, "check": True, "capture_output": True}
        until(lambda: not json.loads(subprocess.run([nebula, "status", "--json"], **asked).stdout)["sessions"], 60, "the agent to notice the end of the trainer")
        time.sleep(DOWN_S)
        assert train("60") == 0
        subprocess.run([nebula, "stop"], **asked)
        took = time.monotonic() - begun  # the agent has written all lines
        found = ledger(run, tmp_path / "output/checkpointHistories.csv")
    finally:
        subprocess.run([nebula, "stop", "--now", "--yes"], env=environment, capture_output=True, timeout=60)
        for path in (runtime, memory):
            shutil.rmtree(path, ignore_errors=True)
    assert (
        found["restarts"] == 1
        and found["restarts_estimated"] == 0
        and found["first_step"] == 5
        and found["last_step"] == 60
    )
    seconds = found["spent"]
    assert seconds["lost"] >= LOST_S - CLOCKS_S
    assert LOST_S - STEP_S - CLOCKS_S <= found["notice_seconds"] <= seconds["lost"]
    assert seconds["restart"] >= DOWN_S - CLOCKS_S
    assert seconds["productive"] + seconds["inflated"] >= 55 * STEP_S - CLOCKS_S
    assert found["wall_seconds"] <= took + CLOCKS_S
