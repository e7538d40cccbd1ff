"""docs/durability.md names a test for each fault; here each of them must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(?:([a-z_/]+\.(?:py|c)))?(?:::|: )?([a-z0-9_]*)`")


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


def test_every_test_that_the_table_names_is_there():
    document = ROOT / "docs" / "durability.md"
    if not document.exists():
        pytest.skip("the documents are not here")
    named = named_tests(document.read_text())
    assert len(named) > 40
    for file, name in named:
        path = ROOT / "tests" / file.removeprefix("tests/")
        assert path.exists(), file
        assert not name or re.search(rf"\b{name}\b", path.read_text()), f"{file} has no {name}"
