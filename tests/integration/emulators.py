"""Starts the emulator Azurite for a test, and a proxy before it that breaks or counts requests."""

from __future__ import annotations

import http.client
import http.server
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "azurite.sh"
KEEP = ["sh", "-c", 'printf "%s\\n" "$AZURE_STORAGE_CONNECTION_STRING" "${SSL_CERT_FILE:-none}"; cat >/dev/null']


def emulator(*options: str):
    """Runs an emulator until the generator is exhausted. Yields its connection string, and its certificate or "none"."""
    process = subprocess.Popen(
        [SCRIPT, "run", "--table", *options, *KEEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield [process.stdout.readline().strip() for _ in range(2)]
    finally:
        process.stdin.close()
        process.wait(60)


class Between(http.server.BaseHTTPRequestHandler):
    """A proxy before the table's server. ``plan`` gives the fate of each write request, in order."""

    plan: list[str] = []
    seen: list[tuple[float, str]] = []  # when which request came
    port = 0

    def handle_one(self) -> None:
        self.seen.append((time.time(), f"{self.command} {self.path}"))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.plan.pop(0) if self.plan and self.command in ("POST", "PUT", "PATCH") else ""
        if fault == "503":
            self.send_error(503, "Server Busy")
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        if fault == "lost":
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def between_server(connection: str) -> Iterator[tuple[type[Between], str]]:
    """Starts a proxy. Returns the class of its handler, which has its own `plan` and `seen`, and the endpoint."""
    port = int(re.search(r"TableEndpoint=http://127.0.0.1:(\d+)", connection)[1])
    handler = type("Handler", (Between,), {"plan": [], "seen": [], "port": port})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield handler, f"http://127.0.0.1:{server.server_port}/devstoreaccount1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
