"""Documents that another program has put into the place of Nebula's: each reader answers, or names the file, and none waits or dies."""

from __future__ import annotations

import itertools
import json
import os
import signal

import pytest
from nebulaml._session import about, agree, documents
from nebulaml.elastic.cells import Cell, CellCorrupt, Documents
from nebulaml.errors import NebulaCorrupt, NebulaError
from nebulaml.export import command, naming
from nebulaml.export.files import Directory
from nebulaml.export.sources import _safetensors
from nebulaml.integrations import hf
from nebulaml.plan import limits, model
from nebulaml.weights.publication import About, Layout

DEEP = "[" * 100_000
WRONG = {
    "empty": "", "cut": '{"tag": "a"', "deep": DEEP, "deep object": '{"tag":' * 100_000, "binary": "\0\x01", "list": "[]", "text": '"tag"', "null": "null",
    "number": "1e999", "other": '{"tag": 1e999, "limits": 1, "restarts": 1}',
}  # fmt: skip


@pytest.fixture(autouse=True)
def limit():
    """A reader that waits for a FIFO would wait for ever."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture(params=[*WRONG, "not utf-8", "fifo", "directory", "link", "absent"])
def wrong(request, tmp_path):
    """The path of a document that is none."""
    path = tmp_path / "config.json"
    if request.param in WRONG:
        path.write_text(WRONG[request.param])
    elif request.param == "not utf-8":
        path.write_bytes(b'{"tag": "\xff"}')
    elif request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "directory":
        path.mkdir()
    elif request.param == "link":
        path.symlink_to(path)
    return path


def test_a_document_is_its_value(tmp_path):
    path = tmp_path / "x"
    path.write_text('{"a": [1, "é"]}')
    assert documents.load(path) == {"a": [1, "é"]} and documents.read(path, 16) == path.read_bytes()
    with pytest.raises(OSError, match="more than 15 bytes"):
        documents.read(path, 15)


def reason(read, path):
    """Returns the error of a reader. None: the document has all that it needs."""
    try:
        read(path)
    except NebulaError as failure:
        return str(failure)
    return None


# fault (Storage): Another program has put something else into the place of a small document: a FIFO, a directory, bytes,
# lists that are nested without end.
# result: The program gets an error that names the file, or goes on without the document. No rank waits or ends.
def test_no_reader_of_a_document_waits_or_ends_its_program(wrong, monkeypatch):
    assert agree._read_document(str(wrong)) in (None, {}, {"tag": float("inf"), "limits": 1, "restarts": 1})
    monkeypatch.setattr(hf, "LABEL", wrong.name)
    assert hf._tag_in(str(wrong.parent)) is None
    for read in (limits.read, limits.read_goodput, model.from_config, lambda path: naming.Config(os.path.dirname(path)), lambda path: command._json("--rename", path)):
        said = reason(read, str(wrong))
        assert said is None or str(wrong.parent) in said


class OneCell:
    def __init__(self, text):
        self.text = text

    def read(self, cell):
        return self.text, "token"


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_no_reader_of_a_text_ends_its_program(text, tmp_path):
    with pytest.raises(NebulaCorrupt):
        about.decode(text.encode())
    if text != WRONG["other"]:
        with pytest.raises(CellCorrupt):
            Documents(OneCell(text)).get(Cell("job", "state"))
    head = len(text).to_bytes(8, "little") + text.encode()
    with pytest.raises(NebulaCorrupt):
        Layout.of(memoryview(head))
    (tmp_path / "a.safetensors").write_bytes(head)
    with pytest.raises(NebulaCorrupt):
        _safetensors(Directory(tmp_path).file("a.safetensors"))


def test_numbers_that_are_none_are_damage(tmp_path):
    sound = {"metrics": {"x": 1}, "metadata": {}, "world": 2}
    assert about.decode(json.dumps(sound).encode()).world == 2
    for wrong in ('{"metrics": {"x": 1' + "0" * 400 + '}, "metadata": {}}', '{"metrics": {}, "metadata": {}, "world": 1e999}'):
        with pytest.raises(NebulaCorrupt):
            about.decode(wrong.encode())
    assert About.read({"number": float("inf"), "step": 1, "first": 1, "name": "a", "total": "0"}) is None
    parts = [[0, 4], [4, 0], [0, 1e999], [0, 1 << 70], [-4, 0], ["0", "4"], [0], 4]
    for (number, offsets), shape in itertools.product(enumerate(parts), ([1], [-1], [1 << 70], [0, 1 << 70], "1", [1e999], None)):
        if (number, shape) == (0, [1]):
            continue
        head = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
        (tmp_path / "a.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
        with pytest.raises(NebulaCorrupt):
            _safetensors(Directory(tmp_path).file("a.safetensors"))
