"""Each test has its own agent, storage and studio; pages are opened in a real Chromium (scripts/studio.sh browser)."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from python.conftest import Place, place  # noqa: F401 - a fixture

CHROMIUM = shutil.which("chromium")
PATIENCE_S = 60  # a slow machine needs long for what a page or a studio is to show
expect.set_options(timeout=1000 * PATIENCE_S)


class Studio:
    """A `nebula studio` process and the address that it prints."""

    def __init__(self, path: str, *arguments: str) -> None:
        line = [sys.executable, "-m", "nebulaml", "studio", "--path", path, "--every", "0.3", *arguments]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline() + self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/#(\S+)", self.said)
        assert found, self.said + self.process.stdout.read()
        self.address, self.port, self.token = found[0], int(found[1]), found[2]

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, token: str | None = "") -> tuple[int, dict[str, str], Any]:
        """Makes one request. body: bytes, or a value that is sent as JSON. token: None for none, "" for the right one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {} if token is None else {"X-Nebula-Token": token or self.token}
        content = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, content, {**sent, **(headers or {})})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        kind = answer.headers.get("content-type", "")
        return (answer.status, {k.lower(): v for k, v in answer.getheaders()}, json.loads(content) if "json" in kind else content.decode())

    def state(self) -> dict[str, Any]:
        return self.ask("GET", "/api/state?since=0")[2]

    def work(self, name: str, body: Any) -> Any:
        """Starts long work, waits for its end, and returns its answer."""
        status, _, told = self.ask("POST", f"/api/{name}", body)
        assert status == 200, told
        self.until(lambda state: next(one for one in state["works"] if one["id"] == told["work"])["state"] != "running")
        return self.ask("GET", f"/api/work?id={told['work']}")[2]["answer"]

    def until(self, holds: Callable[[dict[str, Any]], Any], limit_s: float = PATIENCE_S) -> dict[str, Any]:
        """Waits for a state for which the condition holds, and returns it."""
        deadline = time.monotonic() + limit_s
        while not holds(state := self.state()):
            assert time.monotonic() < deadline, state
            time.sleep(0.1)
        return state

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Studio]]:
    """Starts studios, and ends them after the test."""
    started: list[Studio] = []

    def run(path: str | Path, *arguments: str) -> Studio:
        started.append(Studio(str(path), *arguments))
        return started[-1]

    yield run
    for one in started:
        one.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("this machine has no Chromium: scripts/studio.sh browser")
    with sync_playwright() as playwright:
        # The sandbox of Chromium does not start for root.
        options = ["--no-sandbox"] if os.getuid() == 0 else []
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield found
        found.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Returns a page. Its errors, and requests to other servers, fail the test."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(1000 * PATIENCE_S)
    made = context.new_page()
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(f"error: {error}"))
    made.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    made.on("request", lambda request: problems.append(request.url) if not re.match(r"http://127\.0\.0\.1:|data:", request.url) else None)
    made.on("console", lambda told: problems.append(told.text) if "Content Security Policy" in told.text else None)
    yield made
    context.close()
    assert problems == []


SAVE = """
    nm.init(sys.argv[1], 0, 2, on_error="raise")
    for step in map(int, sys.argv[2:]):
        checkpoint = nm.Checkpoint(f"global_step{step}", metrics={"val_loss": 3 / step})
        checkpoint.save("model.pt", {"weight": torch.full((64, 32), float(step)), "bias": torch.tensor([1.0, float("nan")])})
        assert checkpoint.commit()
        checkpoint.wait("durable")
"""


@pytest.fixture
def save(place: Place) -> Callable[..., None]:  # noqa: F811
    """Saves durable versions of these steps, by a separate trainer."""
    return lambda *steps: place.run(SAVE, place.storage, *steps) and None
