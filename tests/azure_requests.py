"""Requests to Blob Storage, signed with the key of AZURE_STORAGE_CONNECTION_STRING, for tests that look at blobs or change them without Nebula."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import os
import re
import urllib.error
import urllib.parse
import urllib.request

VERSION = "2021-12-02"


def signed(method: str, resource: str, query: str = "", account: str = "", data: bytes = b"", **headers: str) -> urllib.request.Request:
    """Makes a signed request for CONTAINER/BLOB. query: name=value pairs, joined with &. account: another account with the same key.
    headers: x_ms_… for x-ms-…, and others as they are."""
    text = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    text = text.replace("devstoreaccount1", account) if account else text
    parts = dict(part.split("=", 1) for part in text.split(";") if part)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    headers["x-ms-date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers["x-ms-version"] = VERSION
    if method == "PUT":  # or urllib sends a type of its own
        headers["Content-Type"] = "application/octet-stream"
    path = re.sub(r"https?://[^/]+", "", parts["BlobEndpoint"]) + "/" + urllib.parse.quote(resource)
    pairs = sorted(urllib.parse.parse_qsl(query, keep_blank_values=True))
    text = (
        f"{method}\n\n\n{len(data) or ''}\n\n{headers.get('Content-Type', '')}" + "\n" * 7
        + "".join(f"{name}:{headers[name]}\n" for name in sorted(headers) if name.startswith("x-ms-"))
        + f"/{parts['AccountName']}{path}" + "".join(f"\n{name}:{value}" for name, value in pairs)
    )  # fmt: skip
    signature = hmac.new(base64.b64decode(parts["AccountKey"]), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {parts['AccountName']}:{base64.b64encode(signature).decode()}"
    address = f"{parts['BlobEndpoint']}/{urllib.parse.quote(resource)}" + (f"?{urllib.parse.urlencode(pairs)}" if pairs else "")
    return urllib.request.Request(address, data or (b"" if method == "PUT" else None), headers, method=method)


def make_container(name: str, account: str = "") -> None:
    try:
        assert urllib.request.urlopen(signed("PUT", name, "restype=container", account), timeout=30).status == 201
    except urllib.error.HTTPError as error:
        if error.code != 409:  # it is there
            raise
