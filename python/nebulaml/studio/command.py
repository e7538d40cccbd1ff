"""The command line of ``nebula studio``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from .._session.config import clean_path, parse_seconds, shown
from ..errors import NebulaConfigError, NebulaUnavailable

__all__ = ["main"]

LEAST_S = 0.2
MOST_S = 365 * 86400.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise NebulaConfigError(f"{message}; see `nebula studio --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nebula studio", add_help=False, allow_abbrev=False)
    parser.add_argument("--path", action="append", default=[])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--history")
    parser.add_argument("--every")
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--token-file")
    parser.add_argument("--host", action="append", default=[])
    return parser


def _listen(port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise NebulaConfigError(f"--port {port}: a port is a number from 0 to 65535")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as failure:
        listener.close()
        raise NebulaUnavailable(f"port {port} cannot be listened on: {failure.strerror}; leave --port out for a free one") from failure
    listener.listen(128)
    return listener


def _every(text: str) -> float:
    seconds = parse_seconds("--every", text)
    if seconds > MOST_S:
        raise NebulaConfigError(f"--every {text:.40}: more than a year")
    return max(seconds, LEAST_S)


def _token(file: str | None) -> str:
    """Returns a new token, or that of the file, which is made if it is missing: a reverse proxy reads it, too."""
    if file is None:
        return secrets.token_urlsafe(24)
    try:
        with contextlib.suppress(FileExistsError), open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
            made.write(secrets.token_urlsafe(24) + "\n")
        with open(file, encoding="ascii") as opened:
            mode, token = os.fstat(opened.fileno()).st_mode, opened.read().strip()
    except (OSError, UnicodeDecodeError) as failure:
        raise NebulaConfigError(f"--token-file {file}: {failure}") from failure
    if mode & 0o007:
        raise NebulaConfigError(f"--token-file {file}: every user of this machine can read or write it; chmod 600 {file}")
    if not re.fullmatch(r"[A-Za-z0-9_.~-]{16,200}", token):
        raise NebulaConfigError(f"--token-file {file}: a token has 16 to 200 letters, digits, and - _ . ~; remove the file for a new one")
    return token


def main(arguments: Sequence[str]) -> int:
    """Serves the page until Ctrl-C."""
    given = _parser().parse_args(arguments)
    paths = [path for path in map(clean_path, given.path or [os.environ.get("NEBULA_PERSISTENT_STORAGE_PATH")]) if path is not None]
    if not paths:
        raise NebulaConfigError("no storage path is known: give --path, or set NEBULA_PERSISTENT_STORAGE_PATH")
    if given.history and len(paths) > 1:
        raise NebulaConfigError("--history is for one path")
    every_s = None if given.every is None else _every(given.every)
    try:
        import uvicorn

        from . import server
    except ImportError as failure:
        raise NebulaUnavailable(f"the page needs Starlette and uvicorn ({failure}): pip install 'nebula-checkpoint[studio]'") from failure
    from .fleet import Fleet

    token = _token(given.token_file)
    listener = _listen(given.port)
    port = listener.getsockname()[1]
    fleet = Fleet(paths, given.history, every_s)
    print(f"nebula studio shows {', '.join(map(shown, paths))}\n  http://127.0.0.1:{port}/#{token}", flush=True)
    rights = "read" if given.read_only else "read and act"
    print(f"Ctrl-C ends it. Anyone with the token after # can {rights}: do not give the address away.", flush=True)
    fleet.start()
    try:
        app = server.build(fleet, port, token, hosts=given.host, read_only=given.read_only)
        config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=1, lifespan="off")
        served = uvicorn.Server(config)
        end = served.handle_exit

        def handle_exit(number: int, frame: Any) -> None:
            fleet.stop()  # ends the waits of pages for changes: otherwise uvicorn would wait for them
            end(number, frame)

        served.handle_exit = handle_exit  # type: ignore[method-assign]
        served.run(sockets=[listener])
    finally:
        fleet.close()
    return 0
