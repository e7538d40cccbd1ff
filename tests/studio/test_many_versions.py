"""A storage path with many versions: `nebula list` and the studio show them, in time and memory that grow with their number and no faster.

NEBULA_TEST_NIGHTLY=1 makes 100,000 versions, with the writer that agents use. The figures are in the output (pytest -s). The bucket is that of
bench-sink, a server of this machine that speaks S3 (bench/stores/sink.c).
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nebulaml.elastic.store_cells import StoreProcess
from playwright.sync_api import expect
from sinks import Sink, built, make_versions
from waiting import until

NIGHTLY = os.environ.get("NEBULA_TEST_NIGHTLY") == "1"
COUNTS = {"directory": 100_000 if NIGHTLY else 2000, "bucket": 100_000 if NIGHTLY else 600}
SHOWN = 5000
KIB_PER_VERSION = 8


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sink]:
    made = Sink(monkeypatch)
    yield made
    made.close()


def peak_of(pid: int) -> int:
    """Returns the most memory that a process has had, in KiB. Unlike ru_maxrss, it leaves out that of the process which started it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def measured(*command: str | Path) -> tuple[bytes, float, int]:
    """Runs a command whose output does not fit into its pipe, of one page. Returns the output, the CPU seconds that it took, and its memory in KiB."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    with subprocess.Popen(list(map(str, command)), stdout=theirs) as process, os.fdopen(ours, "rb", buffering=0) as output:
        os.close(theirs)
        said = output.read(1)  # it waits now, with all that it has to say
        kib = peak_of(process.pid)
        while part := output.read(1 << 20):
            said += part
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return said, usage.ru_utime + usage.ru_stime, kib


def remove_index(path: str) -> None:
    process = StoreProcess(path)
    process.ask(do="remove", keys=[one["key"] for one in process.ask(do="list", prefix=".nebula/index/")["entries"]])
    process.close()


def serving(studio: Any) -> int:
    """Returns the pid of the command that reads the storage for the studio."""
    children = [int(pid) for one in Path(f"/proc/{studio.process.pid}/task").iterdir() for pid in (one / "children").read_text().split()]
    return next(pid for pid in children if b"--serve" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.nightly("studio/test_document.py::test_many_thousand_versions_become_the_newest_five_thousand")
@pytest.mark.timeout(1800 if NIGHTLY else 300)
@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_many_versions_are_listed_and_shown(kind, place, start, page, request):
    count, shown = COUNTS[kind], min(COUNTS[kind], SHOWN)
    few, many = place.memory / "few", place.memory / "many"  # where a sync costs nothing
    server = request.getfixturevalue("bucket") if kind == "bucket" else None
    if server:
        few, many = "s3://training/few", "s3://training/many"
    make_versions(few, count // 4)
    make_versions(many, count)
    program = os.environ.get("NEBULA_AGENT_PATH", "nebula")
    _, quarter_s, _ = measured(program, "list", "--json", "--path", few)
    requests, begun = server.counts()["requests"] if server else 0, time.monotonic()
    said, whole_s, kib = measured(program, "list", "--json", "--path", many)
    list_s, requests = time.monotonic() - begun, server.counts()["requests"] - requests if server else 0
    assert [one["step"] for one in json.loads(said)["versions"]] == list(range(1, count + 1))
    assert kib < 128 << 10 or kib / count < KIB_PER_VERSION
    assert whole_s < 12 * quarter_s + 0.5, "the time grows faster than the number of versions"
    assert requests < 1.1 * count + 20, "more than a manifest for each version, and a list for many of them"
    begun = time.monotonic()
    studio = start(many)
    studio.until(lambda state: state["rows"], 600)
    first_s = time.monotonic() - begun
    state = studio.until(lambda state: state["rows"] and not state["reading"], 600)
    ready_s = time.monotonic() - begun
    assert len(state["rows"]) == shown and state["hidden"] == count - shown and state["now"]["stored"] == count
    begun = time.monotonic()
    page.goto(studio.address)
    expect(page.locator(".card").first).to_contain_text(f"global_step{count}")
    page.locator("#tab-checkpoints").click()
    expect(page.locator("tbody tr[data-key]").first).to_contain_text(f"global_step{count}")
    shown_s = time.monotonic() - begun
    peaks = [peak_of(studio.process.pid), peak_of(serving(studio))]
    assert max(peaks) < 128 << 10 or max(peaks) / count < KIB_PER_VERSION
    print(
        f"\n{count} versions in a {kind}: nebula list {list_s:.1f} s, {whole_s:.1f} s of CPU, {kib >> 10} MiB, {requests} requests; "
        f"studio: first rows after {first_s:.1f} s, all after {ready_s:.1f} s, {peaks[0] >> 10} MiB, its command {peaks[1] >> 10} MiB; page: {shown_s:.1f} s"
    )


@pytest.mark.skipif(not NIGHTLY, reason="a minute of figures, no promise: NEBULA_TEST_NIGHTLY=1")
@pytest.mark.timeout(1800)
def test_many_versions_behind_a_slow_network(bucket, start):
    count, path = COUNTS["bucket"], "s3://training/run7"
    make_versions(path, count)
    bucket.delay(20)
    begun = time.monotonic()
    measured(os.environ.get("NEBULA_AGENT_PATH", "nebula"), "list", "--json", "--path", path)
    list_s = time.monotonic() - begun
    begun = time.monotonic()
    studio = start(path)
    studio.until(lambda state: state["rows"], 600)
    first_s = time.monotonic() - begun
    studio.until(lambda state: state["rows"] and not state["reading"], 600)
    ready_s = time.monotonic() - begun
    lists, revision = bucket.counts()["lists"], studio.state()["revision"]
    begun = time.monotonic()
    assert studio.ask("POST", "/api/pin", {"tag": f"global_step{count}", "reason": "kept"})[0] == 200
    studio.until(lambda state: state["revision"] > revision, 600)
    print(
        f"\n{count} versions in a bucket that answers after 20 ms: nebula list {list_s:.0f} s; studio: first rows after {first_s:.1f} s, "
        f"all after {ready_s:.0f} s, the next look took {time.monotonic() - begun:.0f} s and {bucket.counts()['lists'] - lists} lists"
    )


@pytest.mark.nightly
def test_the_page_shows_the_newest_versions_while_a_bucket_is_read_and_reads_none_again(bucket, start, page):
    make_versions("s3://training/run7", 300)
    remove_index("s3://training/run7")  # with it, the page reads one manifest
    bucket.delay(150)
    studio = start("s3://training/run7")
    state = studio.until(lambda state: state.get("reading"))
    assert 0 < len(state["rows"]) < 300 and state["now"]["newest"]["tag"] == "global_step300" and state["reading"]["of"] == 300
    page.goto(studio.address)
    expect(page.locator(".card").first).to_contain_text("global_step300")
    bucket.delay(0)
    assert len(studio.until(lambda state: not state["reading"])["rows"]) == 300
    expect(page.locator("#live")).to_contain_text("live")
    subprocess.run([built("make_version"), "s3://training/run7", "global_step301", "--raw", "a"], check=True, timeout=60)
    assert studio.ask("POST", "/api/pin", {"tag": "global_step301", "reason": "kept"})[0] == 200  # makes it look at once
    studio.until(lambda state: any("\0global_step301\0" in row for row in state["rows"]))
    before = bucket.reads(), bucket.counts()["lists"]
    until(lambda: bucket.counts()["lists"] >= before[1] + 20, 60, "some looks")
    assert bucket.reads() - before[0] < 30


@pytest.mark.nightly("python/test_studio_collector.py::test_a_storage_that_hangs_is_said_on_the_page")
def test_the_page_says_that_it_waits_for_the_first_look(place, start, save, page):
    save(1)
    page.route("**/api/state?*", lambda route: route.fulfill(json={"epoch": "1", "revision": 0, "all": True, "rows": {}, "gone": []}))
    page.goto(start(place.storage).address)
    expect(page.locator("#live")).to_have_text("reading the storage…")
    page.unroute("**/api/state?*")
    expect(page.locator("#live")).to_contain_text("live")
    expect(page.locator(".card").first).to_contain_text("global_step1")
