"""The figures of docs/performance.md and of the README stand in the tables of bench/results that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"


def quoted(line: str) -> list[str]:
    return re.findall(r"\*\*([0-9.,]+(?: ?(?:ms|s|%|MiB|times))?)\*\*", line)


def columns(page: Path) -> str:
    """The cells of all tables of a page, with one blank between them."""
    return " ".join(re.sub(r"[|*]", " ", page.read_text()).split())


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="the documents are not here")
def test_each_figure_of_the_summary_stands_in_the_table_that_its_row_names():
    rows = [line for line in (ROOT / "docs/performance.md").read_text().splitlines() if "](../bench/results/" in line]
    assert len(rows) > 10
    for row in rows:
        (name,) = re.findall(r"bench/results/([a-z-]+\.md)", row)
        figures, there = quoted(row), columns(RESULTS / name)
        assert figures and not [figure for figure in figures if figure not in there], f"{name} lacks a figure of: {row}"


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="the documents are not here")
def test_the_headline_of_the_readme_is_that_of_the_newest_table():
    headline = re.search(r"while training stands still for ([\d.]+ ms), where `torch.save` stops it for ([\d.]+) s", (ROOT / "README.md").read_text())
    section = (RESULTS / "peers.md").read_text().split("### 2 GiB in 64 tensors, huge pages")[1]
    steady = dict(re.findall(r"^\| ([^|]+) \|[^|]+\| \*\*([^*]+)\*\* \|", section, re.MULTILINE)[::-1])
    assert headline and headline[1] == steady["Nebula"]
    assert steady["torch.save + fsync"].endswith(" s") and float(headline[2]) == round(float(steady["torch.save + fsync"][:-2]), 1)
