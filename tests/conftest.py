"""The order of the tests: the files that take the longest begin first, so that workers side by side (pytest-xdist) end together.

`durations.json` has the seconds of each file, from a whole run with `--record-durations`. A file that it lacks begins first.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "durations.json"
seconds: defaultdict[str, float] = defaultdict(float)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write the seconds of each file of tests to {RECORDED.name}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: a test that takes long, or whose promise a shorter test shows; NEBULA_TEST_NIGHTLY=1 (`make nightly`) runs it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("NEBULA_TEST_NIGHTLY"):
        late = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if item not in late]
    before = json.loads(RECORDED.read_text())
    items.sort(key=lambda item: -before.get(str(item.path.relative_to(HERE)), float("inf")))  # stable: within a file, the order stays


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds[report.nodeid.partition("::")[0].removeprefix("tests/")] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--record-durations") and not hasattr(session.config, "workerinput"):
        kept = {name: took for name, took in json.loads(RECORDED.read_text()).items() if (HERE / name).exists()}
        kept |= {name: round(took, 1) for name, took in seconds.items()}
        RECORDED.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
