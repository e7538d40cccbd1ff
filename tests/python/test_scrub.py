"""Rot of bytes: in storage, with sound bytes in memory, and in memory, with sound bytes in storage."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import nebulaml as nm
import torch
from nebulaml._session import locate
from waiting import until


def nebula(*words: object) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=120)


def save(place, tag: str = "global_step1") -> Path:
    nm.init(str(place.storage), 0, 2)
    with nm.Checkpoint(tag) as checkpoint:
        checkpoint.save("model.pt", {"value": torch.arange(3 << 20, dtype=torch.float32)})
    checkpoint.wait("durable", 60)
    return place.storage / tag / "model.pt"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_file_that_has_rotted_in_storage_is_repaired_from_the_agents_memory(place):
    file = save(place)
    sound = file.read_bytes()
    flip(file, 5 << 20)
    done = nebula("verify", place.storage, "--every", "7d", "--repair", "--json")
    assert done.returncode == 0, done.stderr
    assert [one["repaired"] for one in json.loads(done.stdout)["versions"][0]["files"]] == ["memory"]
    assert file.read_bytes() == sound
