"""nm.MetricsLog: each step comes once, even if it was computed twice, and the process may be killed at any point."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import nebulaml as nm
import numpy
import pytest
import torch


def losses(log):
    return {row["step"]: row["loss"] for row in log.read()}


def test_a_step_stands_once_with_the_values_of_the_last_time(tmp_path):
    log = nm.MetricsLog(tmp_path / "new" / "metrics.jsonl")
    assert log.read() == []
    for step in range(1, 8):
        log.log(step, loss=step / 2)
    log.log(7, lr=torch.tensor(0.25), note="joins", count=numpy.int64(3), half=numpy.float32(0.5))
    assert log.read()[-1] == {"step": 7, "loss": 3.5, "lr": 0.25, "note": "joins", "count": 3, "half": 0.5}
    again = nm.MetricsLog(tmp_path / "new" / "metrics.jsonl")
    again.log(6, loss=9.0)
    assert losses(log) == {1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 2.5, 6: 9.0, 7: 3.5}


def test_a_url_is_refused_also_as_a_path_object_and_makes_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("s3://bucket/run7", Path("s3://bucket/run7") / "metrics.jsonl", b"az://account/container/run7?sig=SECRET", Path("az:/a/c?sig=SECRET")):
        with pytest.raises(nm.NebulaConfigError, match="give a path of this machine") as caught:
            nm.MetricsLog(path)
        assert "SECRET" not in str(caught.value)
    nm.MetricsLog("s3/metrics.jsonl").log(1, loss=1.0)
    assert os.listdir() == ["s3"]


def test_a_rewind_leaves_out_what_came_after_its_step_as_often_as_one_likes(tmp_path):
    log = nm.MetricsLog(tmp_path)
    assert log.path == str(tmp_path / "metrics.jsonl")
    for begin, end in [(0, 7), (4, 9), (2, 3), (3, 12), (0, 2)]:
        log = nm.MetricsLog(tmp_path)
        log.rewind(begin)
        for step in range(begin + 1, end + 1):
            log.log(step, loss=float(step + 100 * end))
    assert losses(log) == {1: 201.0, 2: 202.0}


def test_a_process_that_should_have_ended_adds_nothing_after_a_rewind(tmp_path):
    old, new = nm.MetricsLog(tmp_path), nm.MetricsLog(tmp_path)
    old.log(1, loss=1.0)
    old.log(2, loss=2.0)
    new.rewind(1)
    old.log(2, loss=-1.0)
    old.log(3, loss=-1.0)
    old.rewind(0)
    new.log(2, loss=2.5)
    assert losses(new) == {1: 1.0, 2: 2.5}


def test_a_file_that_was_cut_at_any_byte_is_read_and_goes_on(tmp_path):
    log = nm.MetricsLog(tmp_path / "whole")
    log.log(1, loss=1.0, note="ä\n}")
    log.rewind(1)
    log.log(2, loss=2.0)
    content = (tmp_path / "whole").read_bytes()
    ends = [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]
    for size in range(len(content) + 1):
        cut = tmp_path / "cut"
        cut.write_bytes(content[:size])
        lines = sum(size >= end - 1 for end in ends)  # a line is whole without its end, too
        wanted = {**({1: 1.0} if lines >= 1 else {}), **({2: 2.0} if lines >= 3 else {})}
        torn = nm.MetricsLog(cut)
        assert losses(torn) == wanted, size
        torn.log(5, loss=5.0)
        torn.close()
        torn.log(6, loss=6.0)
        assert losses(torn) == {**wanted, 5: 5.0, 6: 6.0}, size


def test_sigkill_loses_no_step_that_log_returned_from(tmp_path):
    code = """
import sys, nebulaml as nm
log = nm.MetricsLog(sys.argv[1])
for step in range(1, 100000):
    log.log(step, loss=step * 0.5)
    print(step, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    said = [int(process.stdout.readline()) for _ in range(300)][-1]
    os.kill(process.pid, signal.SIGKILL)
    said = max([said, *(int(line) for line in process.communicate()[0].splitlines(keepends=True) if line.endswith("\n"))])
    found = losses(nm.MetricsLog(tmp_path))
    assert list(found) == list(range(1, len(found) + 1)) and said <= len(found) <= said + 1


def test_foreign_lines_are_left_out(tmp_path):
    log = nm.MetricsLog(tmp_path / "metrics")
    log.log(1, loss=1.0)
    with open(log.path, "ab") as file:
        file.write(b'\0\xff\n[]\n{"step": "x", "by": "a"}\n{"by": 3}\n' + b"[" * 100000 + b'\n{"step": 9}\nnull\n')
    log.log(2, loss=float("nan"))
    assert [row["step"] for row in log.read()] == [1, 2] and losses(log)[2] != losses(log)[2]


# fault (Storage): A FIFO that no process reads is in the place of the metrics log.
# result: Training goes on without the log, and one line says so.
def test_a_fifo_holds_no_training(tmp_path, caplog):
    os.mkfifo(tmp_path / "metrics.jsonl")
    signal.alarm(60)
    log = nm.MetricsLog(tmp_path)
    for step in range(20):
        log.log(step, text="x" * 10_000)
    assert caplog.text.count("Training goes on without it") == 1
    signal.alarm(0)


def test_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    log = nm.MetricsLog(tmp_path / "metrics")
    log.log(1, loss=1.0)
    log.rewind(0)
    assert not (tmp_path / "metrics").exists()


def test_a_full_disk_is_one_line_of_the_log(caplog):
    log = nm.MetricsLog("/dev/full")
    with caplog.at_level(logging.WARNING, "nebulaml"):
        log.log(1, loss=1.0)
        log.log(2, loss=1.0)
    assert [record.getMessage() for record in caplog.records if "No space left" in record.getMessage()] == [
        "nebula: the metrics log /dev/full cannot be written: No space left on device. Training goes on without it."
    ]


@pytest.mark.parametrize("wrong", [{"step": 1.5}, {"step": True}, {"step": 1, "x": object()}, {"step": 1, "x": torch.ones(2)}])
def test_values_that_json_cannot_hold_are_refused(tmp_path, wrong):
    log = nm.MetricsLog(tmp_path / "metrics")
    with pytest.raises(nm.NebulaConfigError):
        log.log(**wrong)
    with pytest.raises(nm.NebulaConfigError):
        nm.MetricsLog("")


def test_other_programs_read_it_line_by_line(tmp_path):
    log = nm.MetricsLog(tmp_path / "metrics")
    log.log(3, loss=0.5)
    (line,) = (tmp_path / "metrics").read_text().splitlines()
    assert json.loads(line)["values"] == {"loss": 0.5} and json.loads(line)["step"] == 3
