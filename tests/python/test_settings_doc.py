"""Every environment variable that the code reads is in the documents, and the documents name no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def names(pattern: str, *files: Path) -> set[str]:
    return {name for file in files for name in re.findall(pattern, file.read_text())}


def test_the_documents_list_the_variables_that_are_read():
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    if not (ROOT / "docs").exists():
        pytest.skip("the documents are not here")
    sources = [
        path
        for folder in ("src", "python/nebulaml")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".c", ".py")
    ]
    read = names(r"[\"'](NEBULA_[A-Z_]+)[\"']", *sources)
    assert len(read) > 20
    told = names(r"\b(NEBULA_[A-Z_]+)\b", *documents)
    assert not read - told, "read, but in no document"
    tests_own = names(r"[\"'](NEBULA_TEST_[A-Z_]+)[\"']", *(ROOT / "tests").rglob("*.py"))
    assert not told - read - tests_own, "in a document, and nothing reads it"
