#!/usr/bin/env python3
"""Simulates the part of Azure Data Lake Storage's dfs endpoint that Nebula uses, by its documentation: dfs.py COMMAND...

The command runs with AZURE_STORAGE_CONNECTION_STRING. The server checks signatures (SharedKey), CRC-64 of bodies, positions and conditions.
It has directories: they are made by the creation of a file, are needed by a rename, and stay when they are empty. Its one container is
`nebula`. An append does not change the time of a file, and nobody sees it before a flush. A test sets the server's clock ahead with `POST /clock?ahead=SECONDS`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from email.utils import formatdate, parsedate_to_datetime
from urllib.parse import unquote

from http_server import Handler, Refused, run_beside

ACCOUNT, CONTAINER = "datalake", "nebula"
KEY = base64.b64encode(b"SECRET-key-of-a-data-lake-account-of-tests").decode()
VERSION = "2021-12-02"
SIGNED = ("If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range")


def table() -> list[int]:
    rows = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x9A6C9329AC4BC9B5 if value & 1 else 0)
        rows.append(value)
    return rows


TABLE = table()


def crc64(data: bytes) -> str:
    crc = (1 << 64) - 1
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return base64.b64encode((crc ^ (1 << 64) - 1).to_bytes(8, "little")).decode()


class Path:
    def __init__(self, is_directory: bool, etag: int, properties: str = ""):
        self.is_directory, self.etag, self.properties = is_directory, f"0x{etag:X}", properties
        self.data, self.pending, self.written = b"", {}, Lake.now()


def parent_of(name: str) -> str:
    return name.rpartition("/")[0]


class Lake(Handler):
    numbers = iter(range(2, 1 << 62))
    paths: dict[str, Path]

    def error(self, status: int, code: str) -> None:
        self.reply(status, json.dumps({"error": {"code": code}}).encode(), x_ms_error_code=code)

    def reply(self, status: int, body: bytes = b"", **fields: object) -> None:
        self.answer(status, body, x_ms_request_id="1", **fields)

    def do(self) -> None:
        if self.command == "POST":
            Handler.ahead_s += int(self.query["ahead"])
            return self.reply(200)
        self.check_signature()
        container, _, name = self.where.removeprefix(f"/{ACCOUNT}/").partition("/")
        if container != CONTAINER:
            raise Refused(404, "FilesystemNotFound")
        if not name and self.query.get("resource") == "filesystem":
            return self.list()
        said = self.headers.get("x-ms-content-crc64")
        if said and len(self.body) <= 1 << 18 and said != crc64(self.body):  # it takes long in Python
            raise Refused(400, "Crc64Mismatch")
        return {"GET": self.get, "HEAD": self.get, "PUT": self.put, "PATCH": self.patch, "DELETE": self.remove}[
            self.command
        ](name)

    def check_signature(self) -> None:
        length = self.headers.get("Content-Length", "0")
        lines = [self.command, "", "", "" if length == "0" else length, "", self.headers.get("Content-Type", ""), ""]
        lines += [self.headers.get(name, "") for name in SIGNED]
        lines += sorted(
            f"{name.lower()}:{value}" for name, value in self.headers.items() if name.lower().startswith("x-ms-")
        )
        lines.append(f"/{ACCOUNT}{self.raw_path}")
        lines += sorted(f"{name}:{value}" for name, value in self.query.items())
        signature = hmac.new(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
        if self.headers.get("Authorization") != f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}":
            raise Refused(403, "AuthenticationFailed")
        if abs(parsedate_to_datetime(self.headers["x-ms-date"]).timestamp() - time.time()) > 900:
            raise Refused(403, "AuthenticationFailed")
        if self.headers.get("x-ms-version") != VERSION:
            raise Refused(400, "InvalidHeaderValue")

    def check_conditions(self, name: str) -> None:
        found, match = self.paths.get(name), self.headers.get("If-Match")
        if self.headers.get("If-None-Match") and found:
            raise Refused(409, "PathAlreadyExists")
        if match and (not found or match != f'"{found.etag}"'):
            raise Refused(412 if found else 404, "ConditionNotMet" if found else "PathNotFound")

    def find(self, name: str) -> Path:
        if name not in self.paths:
            raise Refused(404, "PathNotFound")
        return self.paths[name]

    def get(self, name: str) -> None:
        found = self.find(name)
        self.check_conditions(name)
        said: dict[str, object] = {
            "ETag": f'"{found.etag}"',
            "Last_Modified": formatdate(found.written, usegmt=True),
            "x_ms_resource_type": "directory" if found.is_directory else "file",
            "x_ms_properties": found.properties,
        }
        if found.is_directory and self.command == "GET":
            raise Refused(409, "InvalidResourceType")
        status, data, part = self.range_of(found.data)
        self.reply(status, data, **said, **part)

    def make_directories(self, name: str) -> None:
        while name and name not in self.paths:
            self.paths[name] = Path(True, next(self.numbers))
            name = parent_of(name)
        if not self.paths[name].is_directory:
            raise Refused(409, "ParentNotADirectory")

    def put(self, name: str) -> None:
        if source := self.headers.get("x-ms-rename-source"):
            return self.rename(unquote(source.partition("?")[0]).removeprefix(f"/{CONTAINER}/"), name)
        self.check_conditions(name)
        self.make_directories(parent_of(name))
        is_directory = self.query["resource"] == "directory"
        if name in self.paths and self.paths[name].is_directory != is_directory:
            raise Refused(409, "PathAlreadyExists")
        if name not in self.paths or not is_directory:
            self.paths[name] = Path(is_directory, next(self.numbers), self.headers.get("x-ms-properties", ""))
        self.reply(201, ETag=f'"{self.paths[name].etag}"')

    def rename(self, source: str, name: str) -> None:
        if source not in self.paths:
            raise Refused(404, "SourcePathNotFound")
        if parent_of(name) not in self.paths:
            raise Refused(404, "RenameDestinationParentPathNotFound")
        self.check_conditions(name)
        if not self.paths[parent_of(name)].is_directory or (name in self.paths and self.paths[name].is_directory):
            raise Refused(409, "InvalidDestinationPath")
        moved = self.paths.pop(source)
        moved.etag = f"0x{next(self.numbers):X}"
        self.paths[name] = moved
        self.reply(201)

    def patch(self, name: str) -> None:
        found, position = self.find(name), int(self.query.get("position", 0))
        if self.query["action"] == "setProperties":
            found.properties, found.written = self.headers.get("x-ms-properties", ""), self.now()
            found.etag = f"0x{next(self.numbers):X}"
            return self.reply(200, ETag=f'"{found.etag}"')
        if self.query["action"] == "append":
            if not self.body:
                raise Refused(400, "InvalidInput")
            if position < len(found.data):
                raise Refused(400, "InvalidFlushPosition")
            found.pending[position] = self.body
            return self.reply(202)
        self.flush(found, position)
        self.reply(200, ETag=f'"{found.etag}"')

    def flush(self, found: Path, position: int) -> None:
        pieces, end = [], len(found.data)
        for start in sorted(found.pending):
            if start == end and end + len(found.pending[start]) <= position:
                pieces.append(found.pending[start])
                end += len(pieces[-1])
        if position != end:
            raise Refused(400, "InvalidFlushPosition")
        keeps = self.query.get("retainUncommittedData") == "true"
        found.pending = {start: data for start, data in found.pending.items() if start >= end and keeps}
        if pieces:
            found.data, found.written = b"".join([found.data, *pieces]), self.now()
            found.etag = f"0x{next(self.numbers):X}"

    def remove(self, name: str) -> None:
        found = self.find(name)
        self.check_conditions(name)
        if found.is_directory and any(parent_of(other) == name and other for other in self.paths):
            raise Refused(409, "DirectoryNotEmpty")
        del self.paths[name]
        self.reply(200)

    def list(self) -> None:
        directory, is_deep = self.query.get("directory", ""), self.query["recursive"] == "true"
        if not self.find(directory).is_directory:
            raise Refused(409, "PathIsNotDirectory")
        before = f"{directory}/" if directory else ""
        names = [
            name
            for name in sorted(self.paths, key=lambda name: name.split("/"))  # not the order of bytes
            if name and name.startswith(before) and (is_deep or "/" not in name[len(before) :])
        ]
        first, most = int(self.query.get("continuation", 0)), int(self.query.get("maxResults", 5000))
        paths = [
            {
                "name": name,
                "etag": self.paths[name].etag,
                "lastModified": formatdate(self.paths[name].written, usegmt=True),
            }
            | (
                {"isDirectory": "true"}
                if self.paths[name].is_directory
                else {"contentLength": str(len(self.paths[name].data))}
            )
            for name in names[first : first + most]
        ]
        more = {"x_ms_continuation": first + most} if first + most < len(names) else {}
        self.reply(200, json.dumps({"paths": paths}).encode(), **more)


Lake.paths = {"": Path(True, 1)}

if __name__ == "__main__":
    text = f"AccountName={ACCOUNT};AccountKey={KEY};DfsEndpoint=http://127.0.0.1:{{port}}/{ACCOUNT}"
    run_beside(Lake, {"AZURE_STORAGE_CONNECTION_STRING": text})
