"""A storage path with many versions: `nebula list` and the studio show them, in time and memory that grow with their number and no faster.

NEBULA_TEST_NIGHTLY=1 makes 100,000 versions, with the writer that agents use. The figures are in the output (pytest -s).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

NIGHTLY = os.environ.get("NEBULA_TEST_NIGHTLY") == "1"
COUNT = 100_000 if NIGHTLY else 2000
SHOWN = min(COUNT, 5000)
ROOT = Path(__file__).resolve().parents[2]
KIB_PER_VERSION = 8


def make_versions(path: Path, count: int) -> None:
    built = sorted(ROOT.glob("build*/tests/unit/cli/make_version"), key=lambda one: one.stat().st_mtime)
    if not built:
        pytest.skip("make_version is not built: meson setup build -Dtests=true && ninja -C build")
    subprocess.run([built[-1], path, "global_step", "--count", str(count), "--raw", "a"], check=True, timeout=1200)


def peak_of(pid: int) -> int:
    """Returns the most memory that a process has had, in KiB. Unlike ru_maxrss, it leaves out that of the process which started it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def measured(*command: str | Path) -> tuple[bytes, float, int]:
    """Runs a command whose output does not fit into a pipe. Returns the output, the CPU seconds that it took, and its memory in KiB."""
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE) as process:
        said = process.stdout.read(1)  # it waits now, with all that it has to say
        kib = peak_of(process.pid)
        said += process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return said, usage.ru_utime + usage.ru_stime, kib


@pytest.mark.timeout(1800 if NIGHTLY else 300)
def test_many_versions_are_listed_and_shown(place, start, page):
    few, many = place.memory / "few", place.memory / "many"  # where a sync costs nothing
    make_versions(few, COUNT // 4)
    make_versions(many, COUNT)
    program = os.environ.get("NEBULA_AGENT_PATH", "nebula")
    _, quarter_s, _ = measured(program, "list", "--json", "--path", few)
    said, whole_s, kib = measured(program, "list", "--json", "--path", many)
    assert [one["step"] for one in json.loads(said)["versions"]] == list(range(1, COUNT + 1))
    assert kib < 128 << 10 or kib / COUNT < KIB_PER_VERSION
    assert whole_s < 12 * quarter_s + 0.5, "the time grows faster than the number of versions"
    begun = time.monotonic()
    studio = start(many)
    state = studio.until(lambda state: state["rows"], 600)
    ready_s = time.monotonic() - begun
    assert len(state["rows"]) == SHOWN and state["hidden"] == COUNT - SHOWN and state["now"]["stored"] == COUNT
    begun = time.monotonic()
    page.goto(studio.address)
    expect(page.locator(".card").first).to_contain_text(f"global_step{COUNT}")
    page.locator("#tab-checkpoints").click()
    expect(page.locator("tbody tr[data-key]").first).to_contain_text(f"global_step{COUNT}")
    shown_s = time.monotonic() - begun
    peak = peak_of(studio.process.pid)
    assert peak < 128 << 10 or peak / COUNT < KIB_PER_VERSION
    print(f"\n{COUNT} versions: nebula list {whole_s:.1f} s of CPU, {kib >> 10} MiB; studio: first rows after {ready_s:.1f} s, {peak >> 10} MiB; page: {shown_s:.1f} s")


def test_the_page_says_that_it_waits_for_the_first_look(place, start, save, page):
    save(1)
    page.route("**/api/state?*", lambda route: route.fulfill(json={"epoch": "1", "revision": 0, "all": True, "rows": {}, "gone": []}))
    page.goto(start(place.storage).address)
    expect(page.locator("#live")).to_have_text("reading the storage…")
    page.unroute("**/api/state?*")
    expect(page.locator("#live")).to_contain_text("live", timeout=20_000)
    expect(page.locator(".card").first).to_contain_text("global_step1")
