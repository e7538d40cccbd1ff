"""The order of the tests: the files that take the longest begin first, so that workers side by side (pytest-xdist) end together.

`durations.json` has the seconds of each file, from a whole run with `--record-durations`. A file that it lacks begins first.

`--cpu-seconds` prints the CPU time of each test, as root: that of all processes it has started, agents and servers too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "durations.json"
GROUP = Path("/sys/fs/cgroup", "cpuacct" if Path("/sys/fs/cgroup/cpuacct").exists() else "", f"nebula-test-{os.getpid()}")
CPU, BEGUN = "CPU seconds", pytest.StashKey[float]()
seconds: defaultdict[str, float] = defaultdict(float)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write the seconds of each file of tests to {RECORDED.name}")
    parser.addoption("--cpu-seconds", action="store_true", help="print the CPU time of each test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "nightly(instead): a test that takes long, or whose promise a shorter test shows, `instead`; NEBULA_TEST_NIGHTLY=1 (`make nightly`) runs it",
    )
    if config.getoption("--cpu-seconds"):
        GROUP.mkdir()
        atexit.register(leave_group)
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))  # and so all that this process starts


def leave_group() -> None:
    """Removes the group, unless a process is left there, which also the end of the tests has not ended."""
    (GROUP.parent / "cgroup.procs").write_text(str(os.getpid()))
    with contextlib.suppress(OSError):
        GROUP.rmdir()


def cpu_seconds() -> float:
    if (GROUP / "cpuacct.usage").exists():
        return int((GROUP / "cpuacct.usage").read_text()) / 1e9
    return int((GROUP / "cpu.stat").read_text().split()[1]) / 1e6


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    if item.config.getoption("--cpu-seconds"):
        item.stash[BEGUN] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if item.config.getoption("--cpu-seconds"):
            item.user_properties.append((CPU, cpu_seconds() - item.stash[BEGUN]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--cpu-seconds"):
        reports = [report for kind in terminalreporter.stats.values() for report in kind if getattr(report, "when", "") == "teardown"]
        took = {report.nodeid: dict(report.user_properties)[CPU] for report in reports}
        terminalreporter.section(f"{sum(took.values()):.0f} s of CPU time")
        for name in sorted(took, key=lambda name: -took[name]):
            terminalreporter.write_line(f"{took[name]:8.2f} s  {name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        check_instead(item)
    if not os.environ.get("NEBULA_TEST_NIGHTLY"):
        late = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if item not in late]
    before = json.loads(RECORDED.read_text())
    items.sort(key=lambda item: -before.get(str(item.path.relative_to(HERE)), float("inf")))  # stable: within a file, the order stays


def check_instead(item: pytest.Item) -> None:
    """A test that shows the promise of a nightly one is there, and runs in `make test`."""
    for mark in item.iter_markers("nightly"):
        for name in mark.args:
            file, _, test = name.rpartition("::")
            text = (HERE / file if file else item.path).read_text()
            above, found, _ = text.partition(f"def {test}(")
            if not found or "@pytest.mark.nightly" in above.rpartition("\n\n")[2]:
                raise pytest.UsageError(f"{item.nodeid}: `make test` runs no {name}, which its mark names")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds[report.nodeid.partition("::")[0].removeprefix("tests/")] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--record-durations") and not hasattr(session.config, "workerinput"):
        kept = {name: took for name, took in json.loads(RECORDED.read_text()).items() if (HERE / name).exists()}
        kept |= {name: round(took, 1) for name, took in seconds.items()}
        RECORDED.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
