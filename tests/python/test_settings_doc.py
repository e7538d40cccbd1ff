"""Every environment variable that the code reads is in the documents, and the documents name no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nebulaml._session import ranks
from nebulaml.studio import snapshot

ROOT = Path(__file__).resolve().parents[2]


MOST = 25  # settings that a user meets; CONTRIBUTING.md lists those for tests and debugging


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
    read = names(r"[\"'](NEBULA_[A-Z0-9_]+)[\"']", *sources)
    assert len(read) > 20
    listed = names(r"\b(NEBULA_[A-Z0-9_]+)\b", *documents)
    for_tests = names(r"\b(NEBULA_[A-Z0-9_]+)\b", ROOT / "CONTRIBUTING.md")
    assert not read - listed - for_tests, "read, but in no document"
    tests_own = names(r"[\"'](NEBULA_TEST_[A-Z_]+)[\"']", *(ROOT / "tests").rglob("*.py"))
    assert not (listed | for_tests) - read - tests_own, "in a document, and nothing reads it"
    assert len(listed - tests_own) <= MOST, sorted(listed - tests_own)
    used = names(r"\b(NEBULA_[A-Z0-9_]+)\b", *(path for path in (ROOT / "tests").rglob("*") if path.suffix in (".py", ".c", ".h") and path.stem != Path(__file__).stem))
    assert not (read & listed) - used, "a setting that no test sets"


def test_the_documents_list_the_variables_of_clouds_and_launchers_that_are_read():
    if not (ROOT / "docs").exists():
        pytest.skip("the documents are not here")
    read = names(r"conf_env\(\"([A-Z0-9_]+)\"\)", *(ROOT / "src").rglob("*.c"))
    read |= names(r"\"((?:AWS|AZURE|AZUREML|GOOGLE|GS|GCE|MSI|IDENTITY)_[A-Z0-9_]*[A-Z0-9])\"", *(ROOT / "src").rglob("*.c"))
    read |= {*ranks._RANK, *ranks._WORLD, *ranks._LOCAL_RANK, *ranks._LOCAL_WORLD, *ranks._NODES}
    assert len(read) > 60
    listed = names(r"\b([A-Z][A-Z0-9_]+)\b", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
    assert not read - listed - {"HOME"}, "read, but in no document"


def test_defaults_are_the_same_in_the_documents_the_agent_and_the_studio():
    if not (ROOT / "docs").exists():
        pytest.skip("the documents are not here")
    tables = (ROOT / "docs/cli.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    listed = dict(re.findall(r"^\| `(NEBULA_[A-Z0-9_]+)` \|.*\| ([^|]*) \|$", tables, re.MULTILINE))
    agents = dict(re.findall(r"time_setting\(\"(NEBULA_[A-Z_]+)\", (\d+)\)", (ROOT / "src/agent/agent.c").read_text()))
    assert len(agents) > 4 and agents == {name: listed[name] for name in agents}
    shown = {name: default for name, default in snapshot.SETTINGS.items() if name in listed}
    assert len(shown) > 3 and shown == {name: listed[name] for name in shown}


def test_a_trainer_passes_each_variable_on_that_a_driver_of_an_object_store_reads():
    if not (ROOT / "src").exists():
        pytest.skip("the sources are not here")
    pattern = r"\"((?:AWS|AZURE|AZUREML|GOOGLE|GS|IDENTITY|MSI|GCE|DEFAULT|STORAGE|NEBULA_S3)_[A-Z0-9_]*[A-Z0-9])\""
    read = names(pattern, *(ROOT / "src/store").rglob("*.c"))
    assert len(read) > 40
    assert read == names(pattern, ROOT / "src/base/vars.c")
