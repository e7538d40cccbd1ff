"""Small metadata servers with the answers of the clouds."""

import contextlib
import datetime
import email.utils
import http.server
import json
import threading


class Metadata(http.server.BaseHTTPRequestHandler):
    """Refuses a request that the cloud would refuse."""

    def reply(self, text, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass

    def do_GET(self):  # noqa: N802
        server, path = self.server, self.path.partition("?")[0]
        server.asked += 1
        if server.broken:
            return self.reply("broken", 503)
        if path.startswith("/metadata/"):
            if self.headers["Metadata"] != "true" or "api-version=" not in self.path:
                return self.reply("Bad request", 400)
            if path == "/metadata/instance/compute/name":
                return self.reply("vm_3")
            return self.reply(json.dumps({"DocumentIncarnation": 1, "Events": server.events}))
        if path.startswith("/latest/"):
            if self.headers["X-aws-ec2-metadata-token"] != "secret":
                return self.reply("Unauthorized", 401)
            return self.reply(json.dumps(server.action)) if server.action else self.reply("Not Found", 404)
        if self.headers["Metadata-Flavor"] != "Google":
            return self.reply("Forbidden", 403)
        return self.reply("TRUE" if server.preempted else "FALSE")

    def do_PUT(self):  # noqa: N802
        assert self.path == "/latest/api/token" and int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
        self.reply("secret")


@contextlib.contextmanager
def serving():
    """Runs a server: `events`, `action` and `preempted` are what it announces, `asked` counts questions, `url` is its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.events, server.action, server.preempted, server.broken, server.asked = [], None, False, False, 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def soon(seconds):
    return datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)


def azure(cloud, kind="Preempt", resources=("vm_3",), seconds=45):
    event = {"EventId": "A1", "EventStatus": "Scheduled", "EventType": kind, "ResourceType": "VirtualMachine"}
    cloud.events = [{**event, "Resources": list(resources), "NotBefore": email.utils.format_datetime(soon(seconds), usegmt=True)}]
