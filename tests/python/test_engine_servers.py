"""examples/rl/engine.py with played servers. Their rules, as published in November 2026:

* SGLang: POST /update_weights_from_disk with model_path and weight_version; 200 {"success": true, "message": ...}, or 400 with success false.
* vLLM with VLLM_SERVER_DEV_MODE=1: POST /pause?mode=wait, POST /collective_rpc with the name of a worker's method and its keyword arguments, all
  strings, and POST /resume. A weights_path that reload_weights has read before may be served from a cache.
"""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import nebulaml as nm
import pytest
import torch
from safetensors.torch import load_file
from waiting import until

ENGINE = Path(__file__).resolve().parents[2] / "examples/rl/engine.py"


class Server(http.server.ThreadingHTTPServer):
    """Reads the directories that it is told, and notes each request."""

    def __init__(self) -> None:
        self.requests, self.steps, self.refusals, self.deaths = [], [], 0, 0
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(self.path)
        path = body.get("model_path") or body.get("kwargs", {}).get("weights_path")
        if path and self.server.deaths:
            self.server.deaths -= 1
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.close_connection = True  # in the middle of its answer
            return None
        if path and self.server.refusals:
            self.server.refusals -= 1
            return self.answer(400, {"success": False, "message": "out of memory", "num_paused_requests": 0})
        if path:
            found = load_file(Path(path) / "model.safetensors")
            self.server.steps.append((path, int(found["step"])))
        self.answer(200, {"success": True, "message": "", "results": [None]})

    def answer(self, status: int, body: dict) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.nightly("test_a_server_gets_each_publication_under_a_name_of_its_own_and_a_refused_one_again"))])
def test_a_server_gets_each_publication_under_a_name_of_its_own_and_a_refused_one_again(place, server, engine):
    state = {"step": torch.tensor(0), "w": torch.zeros(1000)}
    server.refusals = server.deaths = 1
    with nm.Publisher(state, place.storage) as publisher:
        command = [sys.executable, ENGINE, place.storage, server.url, "--engine", engine]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            for step in (1, 2, 3):
                state["step"].fill_(step)
                publisher.publish(step)
                until(lambda step=step: server.steps and server.steps[-1][1] == step, 60)
                assert f"step {step} in" in job.stdout.readline()
        finally:
            job.terminate()
            _, errors = job.communicate(timeout=60)
    assert "not served yet" in errors and "out of memory" in errors and "cannot be reached" in errors
    assert [step for _, step in server.steps] == [1, 2, 3] and len({path for path, _ in server.steps}) == 3
    one = ["/update_weights_from_disk"] if engine == "sglang" else ["/pause?mode=wait", "/collective_rpc", "/resume"]
    assert server.requests == one * 5
