"""The object store of the benchmark (bench/stores/sink.c) for tests: a server of this machine that speaks S3 and tells which requests came."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def built(name: str) -> Path:
    """Returns a program of the usual build; those of the sanitizers' builds would take minutes."""
    found = Path(os.environ.get("NEBULA_BUILD_DIR") or ROOT / "build", "tests/unit/cli", name)
    if not found.exists():
        pytest.skip(f"{name} is not built: scripts/build.sh build")
    return found


def make_versions(path: Path | str, count: int) -> None:
    """Writes `count` versions global_step<n> of one small file each, with the writer that agents use."""
    threads = "4" if "://" in str(path) else "1"
    line = [built("make_version"), path, "global_step", "--count", str(count), "--threads", threads, "--raw", "a"]
    subprocess.run(line, check=True, timeout=1200)


class Sink:
    """A running server. Its buckets exist, and end with it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.process = subprocess.Popen([built("bench-sink"), "--keep"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"
        for name, value in {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true", "no_proxy": "127.0.0.1",
        }.items():  # fmt: skip
            patch.setenv(name, value)

    def ask(self, what: str) -> bytes:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{self.endpoint}/{what}") as answer:
            return bytes(answer.read())

    def put(self, key: str, content: bytes) -> None:
        """Makes an object, as another program."""
        request = urllib.request.Request(f"{self.endpoint}/{key}", method="PUT", data=content)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request):
            pass

    def delay(self, milliseconds: int) -> None:
        """Delays all later answers."""
        self.ask(f"__latency__?ms={milliseconds}")

    def counts(self) -> dict[str, Any]:
        return dict(json.loads(self.ask("__counts__")))

    def reads(self) -> int:
        """Returns the number of objects that were read."""
        counts = self.counts()
        return int(counts["gets"] - counts["lists"])

    def requests(self) -> list[str]:
        """Returns the requests since the last call, in the order of their answers: "PUT /bucket/key"."""
        return [line.split(" ", 2)[2] for line in self.ask("__requests__").decode().splitlines()]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
