"""The studio answers only browsers of this machine, from its own page, with the token."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time

READS = ["state", "version?tag=t", "records?tag=t&name=n", "tensors?tag=t&name=n", "doctor", "prune-preview?keep_last=1"]
CONTROLS = ["verify", "pin", "unpin", "prune", "flush", "save-now"]
ALL = [*(("GET", one) for one in READS), *(("POST", one) for one in CONTROLS)]


def test_without_the_token_nothing_is_told_and_nothing_done(place, start):
    studio = start(place.storage)
    for (method, name), token in itertools.product(ALL, (None, "wrong", studio.token[:-1], studio.token + "x")):
        body = {"tag": "global_step1", "reason": "r", "tags": ["global_step1"]} if method == "POST" else None
        status, _, told = studio.ask(method, f"/api/{name}", body, token=token)
        assert status == 401 and "token" in told["error"] and "global_step1" not in str(told), (name, token)
    assert not (place.storage / ".nebula/pins").exists() and not (place.storage / ".nebula/save-now").exists()


def test_other_hosts_and_origins_are_refused(place, start):
    studio = start(place.storage)
    for path in ("/", "/studio.js", "/api/state", "/api/save-now"):
        check_hosts(place, studio, path)


def check_hosts(place, studio, path):
    method = "POST" if "save" in path else "GET"
    # A name that an attacker's DNS leads to 127.0.0.1, another port, no host, a page of another site, a sandboxed frame.
    for host in ("evil.example", f"evil.example:{studio.port}", "127.0.0.1:1", f"127.0.0.1.evil.example:{studio.port}", ""):
        assert studio.ask(method, path, headers={"Host": host})[0] == 421, host
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{studio.port + 1}", f"https://127.0.0.1:{studio.port}"):
        assert studio.ask(method, path, headers={"Origin": origin})[0] == 403, origin
    if path.startswith("/api"):
        assert studio.ask(method, path, headers={"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert not (place.storage / ".nebula/save-now").exists()
    for host in (f"127.0.0.1:{studio.port}", f"localhost:{studio.port}"):
        assert studio.ask(method, path, {}, headers={"Host": host, "Origin": f"http://{host}"} if method == "POST" else {"Host": host})[0] == 200


def test_the_page_may_load_nothing_from_elsewhere_and_stand_in_no_frame(place, start):
    for path in ("/", "/studio.js", "/api/state"):
        status, headers, _ = start(place.storage).ask("GET", path)
        policy = headers["content-security-policy"]
        assert status == 200 and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and "access-control-allow-origin" not in headers


def test_pages_that_wait_for_a_change_hold_up_no_control(place, start, save):
    """A request that had to wait for the threads of the waiting pages would come after the first of them."""
    save(1)
    studio = start(place.storage)
    for _ in range(3):  # a change of the job would end the waits
        known = studio.until(lambda state: state["now"])
        ended: list[int] = []
        asked = f"/api/state?epoch={known['epoch']}&since={known['revision']}"
        pages = [threading.Thread(target=lambda at, to: to.append(studio.ask("GET", at)[0]), args=(asked, ended)) for _ in range(100)]
        for page in pages:
            page.start()
        time.sleep(1)
        assert studio.ask("GET", "/api/version?tag=global_step1")[0] == 200
        before = len(ended)
        studio.ask("POST", "/api/pin", {"tag": "global_step1"})  # ends the waits
        for page in pages:
            page.join()
        assert set(ended) == {200}
        studio.ask("POST", "/api/unpin", {"tag": "global_step1"})
        if not before:
            return
    raise AssertionError(f"{before} waits had ended before another request was answered")


def test_a_control_needs_a_post_and_a_read_changes_nothing(place, start, save):
    save(1)
    studio = start(place.storage)
    for name in CONTROLS:
        assert studio.ask("GET", f"/api/{name}?tag=global_step1&reason=r")[0] == 405
    for body in ("[]", "{", '"text"'):
        assert studio.ask("POST", "/api/pin", body)[0] == 409
    assert studio.ask("POST", "/api/pin", b"[" * 100_000)[0] == 409
    for name in CONTROLS[:-1]:
        for tag in ("global_step1\0", "\ud800", "x" * 200_000, "x" * (2 << 20)):
            assert studio.ask("POST", f"/api/{name}", {"tag": tag, "reason": "r", "versions": [{"tag": tag, "entry": 1}]})[0] == 409
    for name in ("state?since=", "prune-preview?keep_last="):
        for number in ("1" * 5000, "-1", "1.5", "x"):
            assert studio.ask("GET", f"/api/{name}{number}")[0] == 409
    assert studio.ask("GET", "/api/version?tag=nothing")[0] == 404
    assert studio.ask("GET", "/../command.py")[0] == 404


def test_only_this_machine_can_connect(place, start):
    studio = start(place.storage)
    others = {one[4][0] for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in [*others, "127.0.0.2"]:
        with socket.socket() as probe:
            assert probe.connect_ex((address, studio.port)) != 0, address


def test_it_ends_by_ctrl_c_and_says_what_is_wrong_with_its_arguments(place, start):
    studio = start(place.storage)
    os.kill(studio.process.pid, signal.SIGINT)
    assert studio.process.wait(60) in (0, 130, -2)
    for arguments, why in ((["--port", "99999"], "port"), (["--shiny"], "shiny"), (["--port", str(start(place.storage).port)], "cannot be listened on")):
        told = subprocess.run([sys.executable, "-m", "nebulaml", "studio", "--path", place.storage, *arguments], capture_output=True, text=True, timeout=60)
        assert told.returncode in (2, 4) and why in told.stderr and told.stderr.count("\n") == 1, told.stderr
