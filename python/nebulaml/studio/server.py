"""The web application: the page, its state, and the controls.

No other page can use it. The Host must be a loopback name with our port (DNS rebinding) or a name that the person who started it has
allowed, an Origin must be that host, and every request but those for the page itself needs the token.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .._session import config
from ..errors import NebulaConfigError, NebulaError
from . import works
from .fleet import Fleet, Job

__all__ = ["build"]

log = logging.getLogger("nebulaml")

POLL_S = 20.0
WAITING = 250  # pages that wait for a change at a time: each takes a thread, and leaves those of the other requests alone
BODY_BYTES = 1 << 20
MOST_CHARACTERS = 10_000  # of a text: a command line has room for it
PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/studio.css": ("studio.css", "text/css; charset=utf-8"),
    "/studio.js": ("studio.js", "text/javascript; charset=utf-8"),
    "/panels.js": ("panels.js", "text/javascript; charset=utf-8"),
    "/curves.js": ("curves.js", "text/javascript; charset=utf-8"),
    "/jobs.js": ("jobs.js", "text/javascript; charset=utf-8"),
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

    def __init__(self, app: ASGIApp, port: int, token: str, hosts: Sequence[str] = ()) -> None:
        """hosts: names, with a port unless it is that of https, under which a reverse proxy serves the page."""
        self._app, self._token = app, token.encode()
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")} | {one.lower() for one in hosts}
        self._proxied = {one.lower() for one in hosts}

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
            advice = "open it as http://127.0.0.1, or start it with --host NAME for the name of a reverse proxy"
            return 421, f"this page is served to this machine alone: {advice}"
        for origin in given.get(b"origin", []):
            schemes = ("http", "https") if hosts[0] in self._proxied else ("http",)
            if origin.decode("latin-1").lower() not in [f"{scheme}://{hosts[0]}" for scheme in schemes]:
                return 403, "requests of other pages are refused"
        if any(site not in (b"same-origin", b"none") for site in given.get(b"sec-fetch-site", [])) and scope["path"].startswith("/api"):
            return 403, "requests of other pages are refused"
        if scope["path"].startswith("/api") and not any(hmac.compare_digest(one, self._token) for one in given.get(b"x-nebula-token", [])):
            return 401, "the token is missing or wrong: it was printed when `nebula studio` started"
        return None


Work = Callable[[Job, dict[str, Any]], Any]


class Studio:
    """Answers the requests of the page."""

    def __init__(self, fleet: Fleet, read_only: bool) -> None:
        self._fleet, self._read_only = fleet, read_only
        self._waiting: CapacityLimiter | None = None  # made in the event loop

    def routes(self) -> list[Route]:
        reads: dict[str, Work] = {
            "state": lambda job, asked: job.collector.state(asked.get("epoch", ""), _whole(asked, "since"), POLL_S),
            "version": self._version,
            "records": lambda job, asked: job.source.records(_text(asked, "tag"), _text(asked, "name")),
            "tensors": lambda job, asked: job.source.tensors(_text(asked, "tag"), _text(asked, "name")),
            "doctor": lambda job, asked: {"checks": job.source.doctor()},
            "prune-preview": lambda job, asked: job.source.prune_preview(_whole(asked, "keep_last") or None, asked.get("abandoned") == "1"),
            "work": lambda job, asked: job.works.find(_whole(asked, "id")).whole(),
        }
        reads_only: dict[str, Work] = {"diff": self._diff, "stop": lambda job, asked: job.works.find(_number(asked, "id")).stop()}
        controls: dict[str, Work] = {
            "verify": self._verify,
            "copy": self._copy,
            "export": self._export,
            "pin": lambda job, asked: job.source.pin(_text(asked, "tag"), _text(asked, "reason") if asked.get("reason") else ""),
            "unpin": lambda job, asked: job.source.unpin(_text(asked, "tag")),
            "prune": self._prune,
            "flush": lambda job, asked: job.source.flush(_text(asked, "tag")),
            "save-now": lambda job, asked: job.source.save_now(),
        }
        routes = [Route(path, _static(*file)) for path, file in PAGE.items()]
        routes += [Route("/api/about", self._of_all(lambda: {**self._fleet.about(), "read_only": self._read_only}), methods=["GET"])]
        routes += [Route("/api/jobs", self._of_all(self._fleet.table), methods=["GET"])]
        routes += [Route(f"/api/{name}", self._served(work, True, waits=name == "state"), methods=["GET"]) for name, work in reads.items()]
        routes += [Route(f"/api/{name}", self._served(work, reading=False), methods=["POST"]) for name, work in reads_only.items()]
        routes += [Route(f"/api/{name}", self._served(work, False, self._read_only), methods=["POST"]) for name, work in controls.items()]
        return routes

    def _of_all(self, answer: Callable[[], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return JSONResponse(await to_thread.run_sync(answer, abandon_on_cancel=True))
            except NebulaError as failure:
                return JSONResponse({"error": str(failure)}, 503)

        return endpoint

    def _of_waits(self) -> CapacityLimiter:
        self._waiting = self._waiting or CapacityLimiter(WAITING)
        return self._waiting

    def _served(self, work: Work, reading: bool, refused: bool = False, waits: bool = False) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if refused:
                return JSONResponse({"error": "this studio is read-only: it was started with --read-only"}, 403)
            try:
                asked = dict(request.query_params) if reading else await _body(request)
                name = asked.pop("job", "")
                if not isinstance(name, str):
                    raise NebulaConfigError("job is no text")
                limiter = self._of_waits() if waits else None
                answer = await to_thread.run_sync(lambda: work(self._fleet.job(name), asked), abandon_on_cancel=True, limiter=limiter)
                if not reading:
                    log.info("nebula studio: %s %s", request.url.path, json.dumps(asked))
                    self._fleet.job(name).collector.look()
            except NebulaError as failure:
                return JSONResponse({"error": str(failure)}, 404 if failure.status == "not-found" else 409)
            return JSONResponse(answer if answer is not None else {"ok": True})

        return endpoint

    def _version(self, job: Job, asked: dict[str, Any]) -> Any:
        tag = _text(asked, "tag")
        return {
            "version": job.source.inspect(tag),
            "check": job.checks.get(tag),
            "restore": job.source.restore_command(tag),
        }

    def _verify(self, job: Job, asked: dict[str, Any]) -> Any:
        tag = _text(asked, "tag")

        def do(work: works.Work) -> Any:
            job.checks[tag] = job.source.verify(work, tag)
            return job.checks[tag]

        return _begin(job, f"verify {tag}", do)

    def _copy(self, job: Job, asked: dict[str, Any]) -> Any:
        tag, to = _text(asked, "tag"), _place(asked, "to")
        return _begin(job, f"copy {tag} to {config.shown(to)}", lambda work: job.source.copy(work, tag, to))

    def _export(self, job: Job, asked: dict[str, Any]) -> Any:
        tag, to = _text(asked, "tag"), _place(asked, "to")
        files, dtype = (_text(asked, name) if asked.get(name) else "" for name in ("config", "dtype"))
        return _begin(job, f"export {tag} to {config.shown(to)}", lambda work: job.source.export(work, tag, to, files, dtype))

    def _diff(self, job: Job, asked: dict[str, Any]) -> Any:
        tag, other = _text(asked, "tag"), _text(asked, "other")
        return _begin(job, f"compare {tag} and {other}", lambda work: job.source.diff(work, tag, other))

    def _prune(self, job: Job, asked: dict[str, Any]) -> Any:
        versions = _versions(asked)
        return _begin(job, f"remove {len(versions)} versions", lambda work: {"results": job.source.prune(work, versions)})


def _begin(job: Job, what: str, do: Callable[[works.Work], Any]) -> dict[str, Any]:
    return {"work": job.works.begin(what, do, job.collector.look)}


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


def _place(asked: dict[str, Any], name: str) -> str:
    place = _text(asked, name)
    if "://" not in place and not place.startswith("/"):
        raise NebulaConfigError(f"{place:.200} is no absolute path and no URL")
    return place


def _whole(asked: dict[str, Any], name: str) -> int:
    value = asked.get(name) or "0"
    if not value.isdecimal() or len(value) > 15:  # JavaScript holds these exactly
        raise NebulaConfigError(f"{name}: a whole number")
    return int(value)


def _number(asked: dict[str, Any], name: str) -> int:
    value = asked.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise NebulaConfigError(f"{name}: a whole number")
    return value


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


def build(fleet: Fleet, port: int, token: str, *, hosts: Sequence[str] = (), read_only: bool = False) -> ASGIApp:
    """Returns the application, for a server that listens on loopback at that port."""
    return Guard(Starlette(routes=Studio(fleet, read_only).routes()), port, token, hosts)
