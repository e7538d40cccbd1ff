"""The answers of the command with --json are those of docs/answers.schema.json, and a name means one thing in all of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import nebulaml
import pytest
import torch
from nebulaml._session import locate

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs/answers.schema.json").read_text())
NAMES, ANSWERS = SCHEMA["$defs"]["names"]["$defs"], SCHEMA["$defs"]["answers"]["$defs"]
FREE = {"plan"}  # its names are those of the formulas


def properties(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "properties":
                yield from value.items()
            yield from properties(value)
    elif isinstance(part, list):
        for one in part:
            yield from properties(one)


def test_a_name_has_one_meaning_in_all_answers():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    found = {"names": NAMES, "answers": {name: one for name, one in ANSWERS.items() if name not in FREE}}
    used = list(properties(found))
    assert {name for name, _ in used} == set(NAMES)
    for name, value in used:
        assert value == {"$ref": f"#/$defs/names/$defs/{name}"}, name
    for name, value in NAMES.items():
        assert value["description"], name
        assert not name.endswith("_count") or "integer" in value["type"], name
        assert not name.endswith("_at") or "number" in value["type"], name
        assert not name.endswith("seconds") or "number" in value["type"], name


class Asked:
    """Runs commands, and keeps the names of the answers that were seen."""

    def __init__(self, storage: Path) -> None:
        self.storage, self.seen = storage, set()

    def __call__(self, answer: str, *words: Any, code: int = 0, path: Path | None = None) -> list[Any]:
        line = [os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), *map(str, words), "--json"]
        environment = os.environ | {"NEBULA_PERSISTENT_STORAGE_PATH": str(path or self.storage)}
        done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        told = [json.loads(one) for one in (done.stdout.splitlines() if answer == "copy" else [done.stdout])]
        for one in told:
            self.check(answer, one)
        return told

    def check(self, answer: str, told: Any) -> None:
        failed = isinstance(told.get("error"), dict) and len(told) == 1
        self.seen.add("error" if failed else answer)
        jsonschema.Draft202012Validator(SCHEMA | {"$ref": f"#/$defs/answers/$defs/{'error' if failed else answer}"}).validate(told)

    def serve(self) -> list[Any]:
        """Asks `nebula status --serve` twice."""
        line = [os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path(), "status", "--serve", "--path", str(self.storage)]
        told = [json.loads(one) for one in subprocess.run(line, input="\n\n", capture_output=True, text=True, timeout=120).stdout.splitlines()]
        for one in told:
            self.check("status", one)
        return told


@pytest.fixture
def asked(place) -> Asked:
    """A job that has saved three versions, the last one only in memory."""
    nebulaml.init(str(place.storage), 3600, 3)
    for step, loss in ((1, 0.5), (2, float("nan")), (3, None)):
        checkpoint = nebulaml.Checkpoint(f"global_step{step}", metrics=None if loss is None else {"loss": loss})
        checkpoint.save("model.pt", {"layer.weight": torch.full((3, 4), float(step)), "head": torch.tensor([1.0, float("nan")])})
        checkpoint.save_bytes("notes.txt", [b"x" * step])
        assert checkpoint.commit()
        if step < 3:
            checkpoint.wait("durable") if nebulaml.flush_persistence() else None
    return Asked(place.storage)


def test_every_answer_is_as_the_schema_says(asked, place, tmp_path, monkeypatch):
    monkeypatch.setenv("NEBULA_TRUSTED_KEYS", str(tmp_path / "trusted"))
    asked("version", "version")
    asked("status", "status")
    assert asked.serve()[-1]["storage"] == {"same": True}
    asked("inspect", "inspect", "latest")  # of memory
    asked("inspect NAME", "inspect", "latest", "model.pt")
    asked("flush", "flush")
    for words in ((), ("--metrics",), ("--best", "loss")):
        asked("list", "list", *words)
    asked("list --jobs", "list", "--jobs", path=place.root)
    asked("list --jobs", "list", "--jobs")
    asked("list --stats", "list", "--stats")
    asked("list --find", "list", "--find", "*.weight")
    asked("list --find", "list", "--find", "notes.txt")
    asked("inspect", "inspect", "global_step1")
    asked("inspect NAME --tensors", "inspect", "global_step2", "model.pt", "--tensors")
    asked("diff", "diff", "global_step1", "global_step2", code=1)
    asked("diff", "diff", "global_step1", "global_step1")
    asked("goodput", "goodput")
    asked("verify", "verify", "--all")
    asked("verify", "verify", "--bytes", "1K")
    asked("pin TAG", "pin", "global_step1", "--reason", "the best")
    asked("pin", "pin")
    asked("prune", "prune", "--keep-last", "1")
    asked("unpin", "unpin", "global_step1")
    asked("restore", "restore", "global_step1", "--to", tmp_path / "out")
    asked("restore --hf", "restore", "global_step1", "--hf", tmp_path / "hf")
    key = tmp_path / "key"
    asked("sign --new-key", "sign", "--new-key", key)
    asked("sign --trusted", "sign", "--trust", f"{key}.pub")
    asked("sign", "sign", "--all", "--key", key)
    asked("list", "list")
    asked("sign --new-key", "sign", "--new-key", tmp_path / "p256", "--p256")
    asked("sign --bundle", "sign", "--bundle", tmp_path / "hf", "--key", tmp_path / "p256")
    asked("copy", "copy", place.storage, tmp_path / "copy", "--all")
    (tmp_path / "limits.json").write_text(json.dumps(asked("doctor", "doctor", "--measure", "--save")[0]))
    asked("plan", "plan", "--params", "100M", "--nodes", "4", "--limits", tmp_path / "limits.json")
    record = next((place.storage / "global_step2").glob("model.pt"))
    with open(record, "r+b") as file:
        file.seek(record.stat().st_size // 2)
        file.write(b"\xff\x00")
    asked("verify", "verify", "global_step2", code=1)
    (place.root / "file").write_text("no directory")
    asked("status", "status", path=place.root / "file", code=4)
    asked("list", "list", path=place.root / "file", code=4)
    asked("inspect", "inspect", "nothing", code=3)
    nebulaml._shutdown()
    asked("stop", "stop", "--now", "--yes")
    asked("stop", "stop")
    asked("status", "status")
    assert asked.seen == set(ANSWERS)

