"""An object store of the tests: HTTP/1.1 on this machine, one request after the other, and a command that runs beside it."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote


class Refused(Exception):
    def __init__(self, status: int, code: str):
        self.status, self.code = status, code


# The faults of a server or a proxy: before the request is executed, or in its answer.
FAULTS = ("busy", "stall", "reset", "flip request", "lost", "broken", "cut", "long", "flip answer")


class Handler(BaseHTTPRequestHandler):
    """A subclass has `error` and a method `do` that answers with self.answer or raises Refused."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait for the client's late acknowledgement
    lock = threading.Lock()
    chance = random.Random(1)
    lost = float(os.environ.get("NEBULA_TEST_LOST", 0))  # so many of all answers get lost after the request was done
    faults = float(os.environ.get("NEBULA_TEST_FAULTS", 0))  # so many of all requests have a fault
    rate = float(os.environ.get("NEBULA_TEST_RATE", 0)) * (1 << 20)  # of all answers with data together, MiB/s; 0: as fast as they come
    pace, free_s = threading.Lock(), 0.0
    fault = ""  # of this request
    ahead_s = 0  # of the machine's clock

    @classmethod
    def now(cls) -> float:
        return time.time() + Handler.ahead_s

    def log_message(self, *arguments):
        pass

    def answer(self, status: int, body: bytes = b"", **fields: object) -> None:
        if self.chance.random() < self.lost or self.fault == "lost":
            return self.hang_up()
        if self.fault == "broken":
            status, body, fields = 500, b"", {}
        is_data = self.command == "GET" and status in (200, 206) and len(body) > 1024
        if is_data and self.fault == "flip answer":
            body = body[: len(body) // 2] + bytes([body[len(body) // 2] ^ 1]) + body[len(body) // 2 + 1 :]
        self.send_response_only(status)
        self.send_header("Date", formatdate(self.now(), usegmt=True))
        length = fields.pop("Content_Length", len(body))
        if is_data and self.fault == "long":  # it says more than it sends
            length, self.close_connection = len(body) + 10, True
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if is_data and self.fault == "cut":
            body, self.close_connection = body[: len(body) // 2], True
        if self.command != "HEAD":
            for at in range(0, len(body), 65536) if self.rate and is_data else []:
                self.await_turn(min(65536, len(body) - at))
                self.wfile.write(body[at : at + 65536])
            if not (self.rate and is_data):
                self.wfile.write(body)

    def await_turn(self, size: int) -> None:
        with Handler.pace:
            begin = max(time.monotonic(), Handler.free_s)
            Handler.free_s = begin + size / self.rate
        time.sleep(max(0.0, begin - time.monotonic()))

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def fails(self) -> bool:
        """Chooses the fault of this request. True: the request is not executed."""
        self.fault = self.chance.choice(FAULTS) if self.chance.random() < self.faults else ""
        if self.fault == "flip request" and self.body:
            self.body = self.body[:-1] + bytes([self.body[-1] ^ 4])
        if self.fault == "busy":
            self.fault = ""
            self.error(503, "ServerBusy")
            return True
        if self.fault == "stall":
            time.sleep(0.1)
        if self.fault in ("stall", "reset"):
            self.hang_up()
            return True
        return False

    def serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.raw_path, _, query = self.path.partition("?")
        self.where = unquote(self.raw_path)
        self.query = dict(parse_qsl(query, keep_blank_values=True))
        if self.fails():
            return
        with self.lock:
            try:
                self.do()
            except Refused as refused:
                self.error(refused.status, refused.code)

    def range_of(self, data: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Returns the status, the bytes, and the field with their range."""
        wanted = self.headers.get("Range")
        if not wanted:
            return 200, data, {}
        first, last = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
        if first >= len(data):
            raise Refused(416, "InvalidRange")
        part = data[first : last + 1]
        return 206, part, {"Content_Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"}


for method in ("GET", "HEAD", "PUT", "POST", "PATCH", "DELETE"):
    setattr(Handler, f"do_{method}", Handler.serve)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may go away at any time
            super().handle_error(request, client_address)


def run_beside(handler: type[Handler], environment: dict[str, str]) -> None:
    """Runs the command of sys.argv with the environment, in which {address} and {port} are the server's, and ends with its exit code."""
    address = os.environ.get("NEBULA_TEST_ADDRESS", "127.0.0.1")
    server = Server((address, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    added = {name: value.format(address=address, port=port) for name, value in environment.items()}
    sys.exit(subprocess.run(sys.argv[1:], env=os.environ | added).returncode)
