"""The web application: the page, its state, and the controls.

Only browsers of this machine reach it, and no other page can use it. The Host must be a loopback name with our port (DNS rebinding), an
Origin must be ours, and every request but those for the page itself needs the token that is printed at start.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import NebulaConfigError, NebulaError
from .collector import Collector
from .source import Source

__all__ = ["build"]

log = logging.getLogger("nebulaml")

POLL_S = 20.0
BODY_BYTES = 1 << 20
MOST_CHARACTERS = 10_000  # of a text: a command line has room for it
PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/studio.css": ("studio.css", "text/css; charset=utf-8"),
    "/studio.js": ("studio.js", "text/javascript; charset=utf-8"),
    "/panels.js": ("panels.js", "text/javascript; charset=utf-8"),
    "/grid.js": ("grid.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Refuses other hosts and origins before the application sees the request, and requests below /api without the token."""

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *((name.encode(), value.encode()) for name, value in HEADERS.items())]
            await send(message)

        refused = self._refusal(scope)
        if refused is not None:
            await JSONResponse({"error": refused[1]}, refused[0])(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        given: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            given.setdefault(name.lower(), []).append(value)
        hosts = [one.decode("latin-1").lower() for one in given.get(b"host", [])]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return 421, "this page is served to this machine alone: open it as http://127.0.0.1"
        for origin in given.get(b"origin", []):
            if origin.decode("latin-1").lower() != f"http://{hosts[0]}":
                return 403, "requests of other pages are refused"
        if any(site not in (b"same-origin", b"none") for site in given.get(b"sec-fetch-site", [])) and scope["path"].startswith("/api"):
            return 403, "requests of other pages are refused"
        if scope["path"].startswith("/api") and not any(hmac.compare_digest(one, self._token) for one in given.get(b"x-nebula-token", [])):
            return 401, "the token is missing or wrong: it was printed when `nebula studio` started"
        return None


Work = Callable[[dict[str, Any]], Any]


class Studio:
    """Answers the requests of the page."""

    def __init__(self, source: Source, collector: Collector) -> None:
        self._source, self._collector = source, collector
        self._checks: dict[str, dict[str, Any]] = {}

    def routes(self) -> list[Route]:
        reads: dict[str, Work] = {
            "state": self._state,
            "version": self._version,
            "records": lambda asked: self._source.records(_text(asked, "tag"), _text(asked, "name")),
            "tensors": lambda asked: self._source.tensors(_text(asked, "tag"), _text(asked, "name")),
            "doctor": lambda asked: {"checks": self._source.doctor()},
            "prune-preview": self._prune_preview,
        }
        controls: dict[str, Work] = {
            "verify": self._verify,
            "pin": lambda asked: self._source.pin(_text(asked, "tag"), _text(asked, "reason") if asked.get("reason") else ""),
            "unpin": lambda asked: self._source.unpin(_text(asked, "tag")),
            "prune": lambda asked: {"results": self._source.prune(_versions(asked))},
            "flush": lambda asked: self._source.flush(_text(asked, "tag")),
            "save-now": lambda asked: self._source.save_now(),
        }
        routes = [Route(path, _static(*file)) for path, file in PAGE.items()]
        routes += [Route(f"/api/{name}", self._served(work, reading=True), methods=["GET"]) for name, work in reads.items()]
        routes += [Route(f"/api/{name}", self._served(work, reading=False), methods=["POST"]) for name, work in controls.items()]
        return routes

    def _served(self, work: Work, reading: bool) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                asked = dict(request.query_params) if reading else await _body(request)
                answer = await to_thread.run_sync(work, asked, abandon_on_cancel=True)
            except NebulaError as failure:
                return JSONResponse({"error": str(failure)}, 404 if failure.status == "not-found" else 409)
            if not reading:
                log.info("nebula studio: %s %s", request.url.path, json.dumps(asked))
                self._collector.look()
            return JSONResponse(answer if answer is not None else {"ok": True})

        return endpoint

    def _state(self, asked: dict[str, Any]) -> Any:
        return self._collector.state(asked.get("epoch", ""), _whole(asked, "since"), POLL_S)

    def _version(self, asked: dict[str, Any]) -> Any:
        tag = _text(asked, "tag")
        return {
            "version": self._source.inspect(tag),
            "check": self._checks.get(tag),
            "restore": self._source.restore_command(tag),
        }

    def _verify(self, asked: dict[str, Any]) -> Any:
        tag = _text(asked, "tag")
        self._checks[tag] = self._source.verify(tag)
        return self._checks[tag]

    def _prune_preview(self, asked: dict[str, Any]) -> Any:
        return self._source.prune_preview(_whole(asked, "keep_last") or None, asked.get("abandoned") == "1")


def _static(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = (resources.files(__package__) / "page" / name).read_bytes()

    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=kind)

    return endpoint


async def _body(request: Request) -> dict[str, Any]:
    content = b""
    async for piece in request.stream():
        content += piece
        if len(content) > BODY_BYTES:
            raise NebulaConfigError("the request is too long")
    try:
        asked = json.loads(content or b"{}")
    except (ValueError, RecursionError) as failure:
        raise NebulaConfigError(f"the request is not JSON: {failure}") from failure
    if not isinstance(asked, dict):
        raise NebulaConfigError("the request is not a JSON object")
    return asked


def _text(asked: dict[str, Any], name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str) or not value or "\0" in value or len(value) > MOST_CHARACTERS:
        raise NebulaConfigError(f"the request has no {name}")
    try:
        value.encode()
    except UnicodeEncodeError as failure:
        raise NebulaConfigError(f"{name} cannot be written as UTF-8: {failure}") from failure
    return value


def _whole(asked: dict[str, Any], name: str) -> int:
    value = asked.get(name) or "0"
    if not value.isdecimal() or len(value) > 9:
        raise NebulaConfigError(f"{name}: a whole number")
    return int(value)


def _versions(asked: dict[str, Any]) -> list[tuple[str, int]]:
    versions = asked.get("versions")
    if not isinstance(versions, list) or not versions:
        raise NebulaConfigError("the request has no versions")
    return [_tag_and_entry(one) for one in versions]


def _tag_and_entry(version: Any) -> tuple[str, int]:
    entry = version.get("entry") if isinstance(version, dict) else None
    if not isinstance(entry, int) or isinstance(entry, bool) or not 1 <= entry <= 2**48:
        raise NebulaConfigError("a version to remove has a tag, and an entry: a whole number")
    return _text(version, "tag"), entry


def build(source: Source, collector: Collector, port: int, token: str) -> ASGIApp:
    """Returns the application, for a server that listens on loopback at that port."""
    return Guard(Starlette(routes=Studio(source, collector).routes()), port, token)
