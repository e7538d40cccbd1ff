"""Comments of the tests name the fault that each shows (scripts/faults.py); docs/durability.md names a test for each death, docs/security.md for each
access. Each of these tests must exist."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(?:([a-z_/]+\.(?:py|c)))?(?:::|: )?([a-z0-9_]*)`")


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    if not (ROOT / "scripts").exists():
        pytest.skip("the scripts are not here")
    spec = importlib.util.spec_from_file_location("faults", ROOT / "scripts/faults.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module  # for its dataclass
    spec.loader.exec_module(module)
    return module


def named_tests(text: str) -> list[tuple[str, str]]:
    """Returns (file, test) pairs. A name without a file belongs to the file before it in the same line."""
    found = []
    for line in text.splitlines():
        current = ""
        for file, name in NAMED.findall(line):
            current = file or current
            if file or (current and len(name) > 20):
                found.append((current, name))
    return found


@pytest.mark.parametrize(("document", "least"), [("docs/durability.md", 2), ("docs/security.md", 10)])
def test_every_test_that_the_table_names_is_there(document, least):
    if not (ROOT / document).exists():
        pytest.skip("the documents are not here")
    named = named_tests((ROOT / document).read_text())
    assert len(named) > least
    for file, name in named:
        path = ROOT / "tests" / file.removeprefix("tests/")
        assert path.exists(), file
        assert not name or re.search(rf"\b{name}\b", path.read_text()), f"{file} has no {name}"


def test_each_fault_has_a_result_and_tests_that_a_command_runs(faults):
    found = faults.faults()
    assert len(found) > 200 and sum(len(fault.tests) for fault in found) > 300
    for fault in found:
        assert fault.text.endswith(".") and fault.result.endswith((".", "`")), fault
        for path, name in fault.tests:
            assert not name or re.search(rf"\bTEST\({name}\)|def {name}\(", path.read_text()), f"{path} runs no {name}"
            assert faults.where(path, name).startswith("`make ")
    page = faults.page()
    assert all(f"## {group}\n" in page for group in faults.GROUPS)


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("# fault (Weather): It rains.\n# result: All is wet.\n", "a fault of 'Weather'"),
        ("# fault (Memory): It is full.\n", "has no result"),
        ("# fault: as test_b\n", "names 0 tests"),
    ],
)
def test_a_comment_that_names_no_group_result_or_test_is_an_error(faults, tmp_path, monkeypatch, comment, message):
    (tmp_path / "test_x.py").write_text(f"import os\n\n\n{comment}def test_a():\n    pass\n")
    monkeypatch.setattr(faults, "TESTS", tmp_path)
    with pytest.raises(faults.Wrong, match=message):
        faults.faults()
