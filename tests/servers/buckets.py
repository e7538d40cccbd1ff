#!/usr/bin/env python3
"""Simulates a gateway that speaks a part of S3, as Hugging Face documents that of its Storage Buckets: buckets.py COMMAND...

The command runs with AWS_ENDPOINT_URL_S3 and keys. The rules, of docs/hub/storage-buckets-s3.md of huggingface/hub-docs, read in November 2026:

* The endpoint has the namespace as a path, and buckets are addressed by path.
* GetObject answers 302 to another server (here a second port), with a URL that has a signature and a time. HeadObject answers itself.
* ListObjectsV2 only, with no delimiter but "/".
* A key does not begin or end with "/", has no "//", "../" or backslash, does not begin with "./" and does not end with "..".
* No metadata (x-amz-meta-*) is kept. Headers of other features are accepted, and ignored.
* If-Match and If-None-Match count for PutObject and for the source of CopyObject, and not for GetObject. Of other requests nothing is said, so
  they are ignored here, and replace and remove what is there.
* No UploadPartCopy. No trailing checksums: no body in chunks (aws-chunked).
* Uploads that are not completed end after seven days; nothing is said of their lists, which are refused here.

What is also supposed here: the answers have no ids of requests, the other server takes no header of S3 and no credential, its ETags are its own, and
it refuses a URL whose time is over. The URL of each third read of an object is over when it
is made, but of one in five seconds.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import itertools
import re
import threading
import time
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from http_server import Handler, Refused, Server, run_beside

ACCESS, SECRET, CDN_SECRET = "HFAKNEBULA", "SECRET-of-a-bucket-key", "SECRET-of-the-place"
NAMESPACE, BUCKET = "/My-Org", "/My-Org/nebula"
SMALLEST_PART = 5 << 20


class Object(NamedTuple):
    data: bytes
    etag: str
    written: float


class Buckets(Handler):
    objects: dict[str, Object] = {}
    uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
    reads: dict[str, tuple[int, float]] = {}
    numbers = itertools.count(1)
    elsewhere = 0  # the port of the other server

    def error(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def do(self) -> None:
        self.check_signature()
        if self.where.rstrip("/") == BUCKET:
            return self.list()
        if not self.where.startswith(BUCKET + "/"):
            raise Refused(404, "NoSuchBucket")
        key = self.where.removeprefix(BUCKET + "/")
        if key.startswith(("/", "./")) or key.endswith(("/", "..")) or re.search(r"//|\.\./|\\|\0", key):
            raise Refused(400, "InvalidArgument")
        if "aws-chunked" in self.headers.get("Content-Encoding", "") or self.headers.get("x-amz-trailer"):
            raise Refused(400, "InvalidRequest")
        if self.command == "POST" and "uploads" in self.query:
            return self.begin(key)
        if "uploadId" in self.query:
            return self.on_upload(key)
        return {"GET": self.get, "HEAD": self.head, "PUT": self.put, "DELETE": self.remove}[self.command](key)

    def check_signature(self) -> None:
        found = re.fullmatch(
            r"AWS4-HMAC-SHA256 Credential=(\w+)/((\d{8})/us-east-1/s3/aws4_request),SignedHeaders=([\w;-]+),Signature=(\w+)",
            self.headers.get("Authorization", ""),
        )
        if not found or found[1] != ACCESS:
            raise Refused(403, "InvalidAccessKeyId" if found else "AccessDenied")
        names = found[4].split(";")
        if not {name.lower() for name in self.headers if name.lower().startswith("x-amz-")} | {"host"} <= set(names):
            raise Refused(403, "SignatureDoesNotMatch")
        payload = self.headers["x-amz-content-sha256"]
        if payload != "UNSIGNED-PAYLOAD" and payload != hashlib.sha256(self.body).hexdigest():
            raise Refused(400, "XAmzContentSHA256Mismatch")
        pairs = sorted((part.partition("=")[0], part.partition("=")[2]) for part in self.path.partition("?")[2].split("&") if part)
        lines = [self.command, quote(unquote(self.raw_path), safe="/-_.~"), "&".join(f"{name}={value}" for name, value in pairs)]
        lines += [f"{name}:{self.headers[name].strip()}" for name in names] + ["", found[4], payload]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{self.headers['x-amz-date']}\n{found[2]}\n{digest}"
        key = b"AWS4" + SECRET.encode()
        for part in found[2].split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        if hmac.new(key, text.encode(), hashlib.sha256).hexdigest() != found[5]:
            raise Refused(403, "SignatureDoesNotMatch")

    def find(self, key: str) -> Object:
        if key not in self.objects:
            raise Refused(404, "NoSuchKey")
        return self.objects[key]

    def head(self, key: str) -> None:
        found = self.find(key)
        self.answer(
            200, Content_Length=len(found.data), ETag=f'"{found.etag}"', Last_Modified=formatdate(found.written, usegmt=True)
        )

    def get(self, key: str) -> None:
        self.find(key)
        count, refused = self.reads.get(key, (0, 0.0))
        is_over = count % 3 == 2 and refused < time.time() - 5
        self.reads[key] = (count + 1, time.time() if is_over else refused)
        until = int(time.time()) + (-1 if is_over else 60)
        self.answer(302, Location=f"http://127.0.0.1:{self.elsewhere}{place(key, until)}")

    def check(self, key: str) -> None:
        match, none = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        found = self.objects.get(key)
        if (none and found) or (match and (not found or match.strip('"') != found.etag)):
            raise Refused(412, "PreconditionFailed")

    def store(self, key: str, data: bytes) -> str:
        self.objects[key] = Object(data, f"{hashlib.md5(data).hexdigest()}-{next(self.numbers)}", time.time())
        return f'"{self.objects[key].etag}"'

    def put(self, key: str) -> None:
        source = self.headers.get("x-amz-copy-source")
        if not source:
            self.check(key)
            return self.answer(200, ETag=self.store(key, self.body))
        found = self.find(unquote(source).removeprefix("/nebula/"))
        if self.headers.get("x-amz-copy-source-if-match", f'"{found.etag}"').strip('"') != found.etag:
            raise Refused(412, "PreconditionFailed")
        self.answer(200, f"<CopyObjectResult><ETag>{escape(self.store(key, found.data))}</ETag></CopyObjectResult>".encode())

    def remove(self, key: str) -> None:
        self.objects.pop(key, None)
        self.answer(204)

    def begin(self, key: str) -> None:
        number = f"upload{next(self.numbers)}"
        self.uploads[number] = (key, {})
        body = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
        self.answer(200, body.encode())

    def on_upload(self, key: str) -> None:
        number = self.query["uploadId"]
        if number not in self.uploads or self.uploads[number][0] != key:
            raise Refused(404, "NoSuchUpload")
        if self.command == "GET" or self.headers.get("x-amz-copy-source"):
            raise Refused(501, "NotImplemented")
        parts = self.uploads[number][1]
        if self.command == "DELETE":
            del self.uploads[number]
            return self.answer(204)
        if self.command == "PUT":
            parts[int(self.query["partNumber"])] = self.body
            return self.answer(200, ETag=f'"{hashlib.md5(self.body).hexdigest()}"')
        space = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}
        listed = [int(part.find("s3:PartNumber", space).text) for part in ElementTree.fromstring(self.body).iterfind("s3:Part", space)]
        if not listed or any(part not in parts for part in listed):
            raise Refused(400, "InvalidPart")
        if any(len(parts[part]) < SMALLEST_PART for part in listed[:-1]):
            raise Refused(400, "EntityTooSmall")
        del self.uploads[number]
        etag = self.store(key, b"".join(parts[part] for part in listed))
        self.answer(200, f"<CompleteMultipartUploadResult><ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>".encode())

    def list(self) -> None:
        if self.query.get("list-type") != "2" or self.query.get("delimiter", "/") != "/":
            raise Refused(501, "NotImplemented")
        prefix, cut = self.query.get("prefix", ""), self.query.get("delimiter")
        most = int(self.query.get("max-keys", 1000))
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        body, count, last, more = "", 0, "", ""
        for key in sorted(self.objects, key=str.encode):
            folded = cut and cut in key[len(prefix) :] and key[: key.index(cut, len(prefix)) + 1]
            if not key.startswith(prefix) or (folded or key) <= after or (folded and folded == last):
                continue
            if count == most:
                more = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
                break
            count, last, found = count + 1, folded or key, self.objects[key]
            written = datetime.datetime.fromtimestamp(found.written, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
            body += (
                f"<CommonPrefixes><Prefix>{escape(folded)}</Prefix></CommonPrefixes>"
                if folded
                else f"<Contents><Key>{escape(key)}</Key><LastModified>{written}</LastModified>"
                f"<ETag>&quot;{found.etag}&quot;</ETag><Size>{len(found.data)}</Size></Contents>"
            )
        body += f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{more}"
        self.answer(200, f"<ListBucketResult>{body}</ListBucketResult>".encode())


def place(key: str, until: int) -> str:
    sign = hmac.new(CDN_SECRET.encode(), f"{key} {until}".encode(), hashlib.sha256).hexdigest()
    return f"/{quote(key)}?until={until}&sig={sign}"


class Elsewhere(Handler):
    def error(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def do(self) -> None:
        key, until = self.where[1:], int(self.query.get("until", 0))
        if self.path != place(key, until) or until < time.time():
            raise Refused(403, "AccessDenied")
        if any(name.lower().startswith(("authorization", "x-amz-", "if-")) for name in self.headers):
            raise Refused(400, "BadRequest")
        if key not in Buckets.objects:
            raise Refused(404, "NoSuchKey")
        status, data, said = self.range_of(Buckets.objects[key].data)
        self.answer(status, data, ETag=f'"{next(Buckets.numbers)}"', **said)


if __name__ == "__main__":
    other = Server(("127.0.0.1", 0), Elsewhere)
    Buckets.elsewhere = other.server_address[1]
    threading.Thread(target=other.serve_forever, daemon=True).start()
    run_beside(
        Buckets,
        {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:{port}" + NAMESPACE,
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        },
    )
