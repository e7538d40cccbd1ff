#!/usr/bin/env python3
"""Simulates the part of Google Cloud Storage's XML API that Nebula uses, by its documentation: gs.py COMMAND...

The command runs with GS_ACCESS_KEY_ID, GS_SECRET_ACCESS_KEY and STORAGE_EMULATOR_HOST. The server checks signatures (GOOG4-HMAC-SHA256), or the
bearer token SECRET_BEARER; CRC-32C of bodies; generations; sizes and numbers of parts. Its one bucket is `nebula`.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import re
import time
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from http_server import Handler, Refused, run_beside

ACCESS, SECRET, BEARER = "GOOG1ENEBULA", "SECRET-of-an-HMAC-key", "SECRET_BEARER"
BUCKET = "/nebula/"
SMALLEST_PART = 5 << 20


def table() -> list[int]:
    rows = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        rows.append(value)
    return rows


TABLE = table()


def crc32c(data: bytes) -> str:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return base64.b64encode((crc ^ 0xFFFFFFFF).to_bytes(4, "big")).decode()


def when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:23] + "Z"


class Object(NamedTuple):
    data: bytes
    generation: int
    written: float
    writer: str


class Google(Handler):
    objects: dict[str, Object] = {}
    uploads: dict[str, tuple[str, str, dict[int, bytes]]] = {}
    begun: dict[str, float] = {}  # uploads, and number/part of each part
    numbers = iter(range(1700000000000000, 1 << 62))

    def error(self, status: int, code: str) -> None:
        self.reply(status, f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code></Error>".encode())

    def reply(self, status: int, body: bytes = b"", **fields: object) -> None:
        self.answer(status, body, X_GUploader_UploadID="x", **fields)

    def do(self) -> None:
        self.check_signature()
        if self.where.rstrip("/") == BUCKET.rstrip("/"):
            return self.list_uploads() if "uploads" in self.query else self.list()
        if not self.where.startswith(BUCKET):
            raise Refused(404, "NoSuchBucket")
        name = self.where.removeprefix(BUCKET)
        if len(name.encode()) > 1024:
            raise Refused(400, "KeyTooLongError")
        self.check_sum()
        if self.command == "POST" and "uploads" in self.query:
            return self.begin(name)
        if "uploadId" in self.query:
            return self.on_upload(name)
        return {"GET": self.get, "HEAD": self.get, "PUT": self.put, "DELETE": self.remove}[self.command](name)

    def check_signature(self) -> None:
        said = self.headers.get("Authorization", "")
        if said == f"Bearer {BEARER}":
            return
        found = re.fullmatch(
            r"GOOG4-HMAC-SHA256 Credential=(\w+)/((\d{8})/auto/storage/goog4_request),SignedHeaders=([\w;-]+),Signature=(\w+)",
            said,
        )
        if not found or found[1] != ACCESS:
            raise Refused(401 if said.startswith("Bearer") else 403, "InvalidAccessKeyId" if found else "AccessDenied")
        names = found[4].split(";")
        must = {name.lower() for name in self.headers if name.lower().startswith("x-goog-")} | {"host"}
        if (
            names != sorted(names)
            or not must <= set(names)
            or any(name.lower().startswith("x-amz") for name in self.headers)
        ):
            raise Refused(403, "SignatureDoesNotMatch")
        payload = self.headers["x-goog-content-sha256"]
        if payload != "UNSIGNED-PAYLOAD" and payload != hashlib.sha256(self.body).hexdigest():
            raise Refused(400, "ContentSha256Mismatch")
        _, _, query = self.path.partition("?")
        pairs = sorted((part.partition("=")[0], part.partition("=")[2]) for part in query.split("&") if part)
        lines = [
            self.command,
            quote(unquote(self.raw_path), safe="/-_.~"),
            "&".join(f"{name}={value}" for name, value in pairs),
        ]
        lines += [f"{name}:{self.headers[name].strip()}" for name in names] + ["", found[4], payload]
        text = (
            f"GOOG4-HMAC-SHA256\n{self.headers['x-goog-date']}\n{found[2]}\n"
            + hashlib.sha256("\n".join(lines).encode()).hexdigest()
        )
        key = b"GOOG4" + SECRET.encode()
        for part in found[2].split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        then = datetime.datetime.strptime(self.headers["x-goog-date"], "%Y%m%dT%H%M%SZ").replace(
            tzinfo=datetime.timezone.utc
        )
        if hmac.new(key, text.encode(), hashlib.sha256).hexdigest() != found[5]:
            raise Refused(403, "SignatureDoesNotMatch")
        if abs(then.timestamp() - time.time()) > 900:
            raise Refused(403, "RequestTimeTooSkewed")

    def check_sum(self) -> None:
        said = self.headers.get("x-goog-hash")
        if said and len(self.body) <= 1 << 20 and said != f"crc32c={crc32c(self.body)}":  # it takes long in Python
            raise Refused(400, "BadDigest")

    def check_generation(self, name: str) -> None:
        wanted = self.headers.get("x-goog-if-generation-match")
        found = self.objects[name].generation if name in self.objects else 0
        if wanted is not None and int(wanted) != found:
            raise Refused(412, "PreconditionFailed")

    def store(self, name: str, data: bytes, writer: str | None) -> dict[str, object]:
        self.objects[name] = Object(data, next(self.numbers), time.time(), writer or "")
        return {"x_goog_generation": self.objects[name].generation}

    def get(self, name: str) -> None:
        if name not in self.objects:
            raise Refused(404, "NoSuchKey")
        self.check_generation(name)
        found = self.objects[name]
        status, data, said = self.range_of(found.data)
        self.reply(
            status,
            data,
            x_goog_generation=found.generation,
            x_goog_meta_nebula=found.writer,
            Last_Modified=formatdate(found.written, usegmt=True),
            ETag=f'"{found.generation}"',
            **said,
        )

    def put(self, name: str) -> None:
        writer = self.headers.get("x-goog-meta-nebula")
        source = self.headers.get("x-goog-copy-source")
        if "compose" in self.query:
            parts = [part.text for part in ElementTree.fromstring(self.body).iterfind("Component/Name")]
            if not 1 <= len(parts) <= 32 or any(part not in self.objects for part in parts):
                raise Refused(404, "NoSuchKey")
            self.check_generation(name)
            return self.reply(
                200,
                b"<ComposeResult/>",
                **self.store(name, b"".join(self.objects[part].data for part in parts), writer),
            )
        data = self.body
        if source:
            if unquote(source).removeprefix(BUCKET) not in self.objects:
                raise Refused(404, "NoSuchKey")
            data = self.objects[unquote(source).removeprefix(BUCKET)].data
        self.check_generation(name)
        self.reply(200, b"<CopyObjectResult/>" if source else b"", **self.store(name, data, writer))

    def remove(self, name: str) -> None:
        if name not in self.objects:
            raise Refused(404, "NoSuchKey")
        self.check_generation(name)
        del self.objects[name]
        self.reply(204)

    def begin(self, name: str) -> None:
        number = f"upload/{next(self.numbers)}"
        self.uploads[number] = (name, self.headers.get("x-goog-meta-nebula", ""), {})
        self.begun[number] = time.time()
        body = f"<InitiateMultipartUploadResult><Bucket>nebula</Bucket><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
        self.reply(200, body.encode())

    def on_upload(self, name: str) -> None:
        number = self.query["uploadId"]
        if number not in self.uploads or self.uploads[number][0] != name:
            raise Refused(404, "NoSuchUpload")
        _, writer, parts = self.uploads[number]
        if self.headers.get("x-goog-if-generation-match"):
            raise Refused(400, "InvalidArgument")  # no precondition is taken here
        if self.command == "DELETE":
            del self.uploads[number]
            return self.reply(204)
        if self.command == "GET":
            return self.list_parts(number, parts)
        if self.command == "PUT":
            part = int(self.query["partNumber"])
            if not 1 <= part <= 10000:
                raise Refused(400, "InvalidArgument")
            parts[part] = self.body
            self.begun[f"{number}/{part}"] = time.time()
            return self.reply(200, ETag=f'"{hashlib.md5(self.body).hexdigest()}"')
        space = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}
        listed = [
            (int(part.find("s3:PartNumber", space).text), part.find("s3:ETag", space).text.strip('"'))
            for part in ElementTree.fromstring(self.body).iterfind("s3:Part", space)
        ]
        if not listed or any(hashlib.md5(parts.get(part, b"-")).hexdigest() != etag for part, etag in listed):
            raise Refused(400, "InvalidPart")
        if [part for part, _ in listed] != sorted(part for part, _ in listed):
            raise Refused(400, "InvalidPartOrder")
        if any(len(parts[part]) < SMALLEST_PART for part, _ in listed[:-1]):
            raise Refused(400, "EntityTooSmall")
        del self.uploads[number]
        self.store(name, b"".join(parts[part] for part, _ in listed), writer)
        self.reply(200, b"<CompleteMultipartUploadResult/>")

    def list_parts(self, number: str, parts: dict[int, bytes]) -> None:
        after = int(self.query.get("part-number-marker", 0))
        first, *more = [*(part for part in sorted(parts) if part > after), None][:2] or [None]
        body = ""
        if first:
            body = f"<PartNumber>{first}</PartNumber><LastModified>{when(self.begun[f'{number}/{first}'])}</LastModified>"
            body += f'<ETag>"{hashlib.md5(parts[first]).hexdigest()}"</ETag><Size>{len(parts[first])}</Size>'
            body = f"<Part>{body}</Part>"
        body += f"<NextPartNumberMarker>{first}</NextPartNumberMarker><IsTruncated>true</IsTruncated>" if first and more[0] else ""
        self.reply(200, f"<ListPartsResult><Bucket>nebula</Bucket>{body}</ListPartsResult>".encode())

    def list_uploads(self) -> None:
        """Lists one upload in each answer, so that a client must ask for the next page."""
        prefix, after = self.query.get("prefix", ""), (self.query.get("key-marker", ""), self.query.get("upload-id-marker", ""))
        found = sorted((name, number) for number, (name, _, _) in self.uploads.items() if name.startswith(prefix) and (name, number) > after)
        body = "".join(
            f"<Upload><Key>{escape(name)}</Key><UploadId>{number}</UploadId><Initiated>{when(self.begun[number])}</Initiated></Upload>"
            for name, number in found[:1]
        )
        if len(found) > 1:
            body += f"<NextKeyMarker>{escape(found[0][0])}</NextKeyMarker><NextUploadIdMarker>{found[0][1]}</NextUploadIdMarker>"
        body += f"<IsTruncated>{'true' if len(found) > 1 else 'false'}</IsTruncated>"
        self.reply(200, f"<ListMultipartUploadsResult><Bucket>nebula</Bucket>{body}</ListMultipartUploadsResult>".encode())

    def list(self) -> None:
        prefix, cut = self.query.get("prefix", ""), self.query.get("delimiter")
        most = int(self.query.get("max-keys", 1000))
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        body, count, last, next_token = "", 0, None, ""
        for name in sorted(self.objects, key=str.encode):
            folded = cut and cut in name[len(prefix) :] and name[: name.index(cut, len(prefix)) + 1]
            if not name.startswith(prefix) or (folded or name) <= after or (folded and folded == last):
                continue
            if count == most:
                next_token = last or ""
                break
            count, last = count + 1, folded or name
            found = self.objects[name]
            body += (
                f"<CommonPrefixes><Prefix>{escape(folded)}</Prefix></CommonPrefixes>"
                if folded
                else f"<Contents><Key>{escape(name)}</Key><Generation>{found.generation}</Generation><MetaGeneration>1</MetaGeneration>"
                f'<LastModified>{when(found.written)}</LastModified><ETag>"x"</ETag><Size>{len(found.data)}</Size></Contents>'
            )
        more = f"<NextContinuationToken>{escape(next_token)}</NextContinuationToken>" if next_token else ""
        head = "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'>"
        self.reply(
            200, f"{head}<Name>nebula</Name><Prefix>{escape(prefix)}</Prefix>{more}{body}</ListBucketResult>".encode()
        )


if __name__ == "__main__":
    run_beside(
        Google,
        {
            "GS_ACCESS_KEY_ID": ACCESS,
            "GS_SECRET_ACCESS_KEY": SECRET,
            "STORAGE_EMULATOR_HOST": "http://{address}:{port}",
        },
    )
