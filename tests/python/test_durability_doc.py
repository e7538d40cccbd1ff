"""tests/FAULTS.md names a test for each fault, docs/durability.md for each death, docs/security.md for each access; here each of them must exist."""

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


@pytest.mark.parametrize(("document", "least"), [("tests/FAULTS.md", 200), ("docs/durability.md", 2), ("docs/security.md", 10)])
def test_every_test_that_the_table_names_is_there(document, least):
    if not (ROOT / document).exists():
        pytest.skip("the documents are not here")
    named = named_tests((ROOT / document).read_text())
    assert len(named) > least
    for file, name in named:
        path = ROOT / "tests" / file.removeprefix("tests/")
        assert path.exists(), file
        assert not name or re.search(rf"\b{name}\b", path.read_text()), f"{file} has no {name}"
