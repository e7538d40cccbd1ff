"""An object store for corruption.py: a server of tests/servers in a process of its own, or Azurite. A trial damages its objects as files of a directory."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import urllib.request
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "servers"), str(TESTS / "integration")]

PREFIX = "training/run"


def _serve(name: str, pipe: Any) -> None:
    from http_server import Server

    if name == "gs":
        from gs import ACCESS, SECRET, Google, Object

        handler: Any = Google
        variables = {"GS_ACCESS_KEY_ID": ACCESS, "GS_SECRET_ACCESS_KEY": SECRET, "STORAGE_EMULATOR_HOST": "http://127.0.0.1:{port}"}
    else:
        from buckets import ACCESS, NAMESPACE, SECRET, Buckets, Elsewhere, Object

        handler = Buckets
        other = Server(("127.0.0.1", 0), Elsewhere)
        Buckets.elsewhere = other.server_address[1]
        threading.Thread(target=other.serve_forever, daemon=True).start()
        variables = {
            "AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:{port}" + NAMESPACE, "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        }  # fmt: skip
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send({name: value.format(port=server.server_address[1]) for name, value in variables.items()})
    about: dict[str, tuple[float, str]] = {}  # of each key: when it was written, and by which writer
    while True:
        command, place = pipe.recv()
        with handler.lock:
            if command == "dump":
                for key, found in handler.objects.items():
                    about[key] = (found.written, getattr(found, "writer", ""))
                    path = Path(place, key.removeprefix(PREFIX + "/"))
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(found.data)
            else:
                handler.objects.clear()
                handler.uploads.clear()
                for path in Path(place).rglob("*"):
                    if path.is_file():
                        key = f"{PREFIX}/{path.relative_to(place)}"
                        written, writer = about.get(key, (time.time(), ""))
                        number = next(handler.numbers)
                        last = (number, written, writer) if name == "gs" else (f"{number:x}", written)
                        handler.objects[key] = Object(path.read_bytes(), *last)
        pipe.send(None)


class Objects:
    """name: gs, or s3 for the gateway of buckets.py. Sets the variables of the environment that a client needs."""

    def __init__(self, name: str) -> None:
        self.path = f"{name}://nebula/{PREFIX}"
        self._pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(name, other), daemon=True)
        self._process.start()
        os.environ |= self._pipe.recv()

    def dump(self, place: Path) -> None:
        """Makes a file of each object."""
        self._pipe.send(("dump", place))
        self._pipe.recv()

    def fill(self, place: Path) -> None:
        """Makes an object of each file, and removes all others."""
        self._pipe.send(("fill", place))
        self._pipe.recv()

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


class Blobs:
    """The same of Azurite. A blob that is made again keeps its metadata, which the driver needs; its time is a new one."""

    def __init__(self) -> None:
        from azure_requests import make_container, signed
        from emulators import emulator

        self.path = f"az://devstoreaccount1/training/{PREFIX}"
        self._signed, self._emulator, self._about = signed, emulator(), {}
        os.environ["AZURE_STORAGE_CONNECTION_STRING"], _ = next(self._emulator)
        make_container("training")

    def _call(self, method: str, resource: str, query: str = "", data: bytes = b"", **headers: str) -> tuple[bytes, Any]:
        with urllib.request.urlopen(self._signed(method, resource, query, data=data, **headers), timeout=60) as answer:
            return answer.read(), answer.headers

    def _names(self) -> list[str]:
        found, marker = [], ""
        while True:
            answer, _ = self._call("GET", "training", f"restype=container&comp=list&prefix={PREFIX}/&marker={marker}")
            tree = ElementTree.fromstring(answer.decode("utf-8-sig"))
            found += [name.text.removeprefix(PREFIX + "/") for name in tree.iter("Name")]
            marker = tree.findtext("NextMarker") or ""
            if not marker:
                return found

    def dump(self, place: Path) -> None:
        for name in self._names():
            data, headers = self._call("GET", f"training/{PREFIX}/{name}")
            self._about[name] = {key.replace("-", "_"): headers[key] for key in headers if key.startswith("x-ms-meta-")}
            path = Path(place, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def fill(self, place: Path) -> None:
        files = {str(path.relative_to(place)): path for path in Path(place).rglob("*") if path.is_file()}
        for name in set(self._names()) - files.keys():
            self._call("DELETE", f"training/{PREFIX}/{name}")
        for name, path in files.items():
            self._call("PUT", f"training/{PREFIX}/{name}", data=path.read_bytes(), x_ms_blob_type="BlockBlob", **self._about.get(name, {}))

    def close(self) -> None:
        self._emulator.close()
