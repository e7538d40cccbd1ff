"""Starts the object store of the benchmark (sink.c), and makes the environment variables by which clients find it."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

PROGRAMS = Path("build-bench/bench")
ACCOUNT = "bench"
KEY = "c2VjcmV0IG9mIHRoZSBzaW5r"  # any key: the sink accepts every signature


class Sink:
    """A running sink. Its objects end with it."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [PROGRAMS / "bench-sink", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.endpoint = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={self.endpoint}/{ACCOUNT};",
            "no_proxy": "127.0.0.1",
        }

    def counts(self) -> dict[str, Any]:
        """Returns requests, bytes in and out, and the processor time of the sink, since its start."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.endpoint}/__counts__") as answer:
            return json.loads(answer.read())

    def begin_upload(self) -> str:
        """Begins a multipart upload that is never completed, and returns its URL."""
        request = urllib.request.Request(f"{self.endpoint}/bench/raw?uploads", method="POST", data=b"")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            number = answer.read().decode().split("<UploadId>")[1].split("<")[0]
        return f"{self.endpoint}/bench/raw?uploadId={number}"
