"""The command line of ``nebula studio``."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from .._session.config import clean_path, parse_seconds
from ..errors import NebulaConfigError, NebulaUnavailable

__all__ = ["main"]

LEAST_S = 0.2
MOST_S = 365 * 86400.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise NebulaConfigError(f"{message}; see `nebula studio --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nebula studio", add_help=False, allow_abbrev=False)
    parser.add_argument("--path")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--history")
    parser.add_argument("--every")
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


def main(arguments: Sequence[str]) -> int:
    """Serves the page until Ctrl-C."""
    given = _parser().parse_args(arguments)
    path = clean_path(given.path or os.environ.get("NEBULA_PERSISTENT_STORAGE_PATH"))
    if path is None:
        raise NebulaConfigError("no storage path is known: give --path, or set NEBULA_PERSISTENT_STORAGE_PATH")
    every_s = None if given.every is None else _every(given.every)
    try:
        import uvicorn

        from . import server
    except ImportError as failure:
        raise NebulaUnavailable(f"the page needs Starlette and uvicorn ({failure}): pip install 'nebula-checkpoint[studio]'") from failure
    from .collector import Collector
    from .source import Source

    source = Source(path, given.history)
    listener = _listen(given.port)
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    collector = Collector(source, every_s)
    print(f"nebula studio shows {source.shown_path}\n  http://127.0.0.1:{port}/#{token}", flush=True)
    print("Ctrl-C ends it. Anyone with the token after # can read and act: do not give the address away.", flush=True)
    collector.start()
    try:
        app = server.build(source, collector, port, token)
        config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=1, lifespan="off")
        served = uvicorn.Server(config)
        end = served.handle_exit

        def handle_exit(number: int, frame: Any) -> None:
            collector.stop()  # ends the waits of pages for changes: otherwise uvicorn would wait for them
            end(number, frame)

        served.handle_exit = handle_exit  # type: ignore[method-assign]
        served.run(sockets=[listener])
    finally:
        collector.close()
        source.close()
    return 0
