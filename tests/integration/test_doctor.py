"""`nebula doctor --path URL`: it reports the features of a store that work, and a cure for each that does not."""

import base64
import hashlib
import hmac
import http.server
import json
import os
import shutil
import threading
import time
import urllib.parse

import pytest


def checks(result):
    return {one["check"]: one for one in json.loads(result.stdout)["checks"]}


def service_sas(permissions, end):
    """Returns a SAS of the container `training`, signed by the emulator's account."""
    parts = dict(part.split("=", 1) for part in os.environ["AZURE_STORAGE_CONNECTION_STRING"].split(";") if part)
    version, resource = "2021-12-02", f"/blob/{parts['AccountName']}/training"
    text = "\n".join([permissions, "", end, resource, "", "", "", version, "c", "", "", "", "", "", "", ""])
    signature = base64.b64encode(
        hmac.new(base64.b64decode(parts["AccountKey"]), text.encode(), hashlib.sha256).digest()
    )
    query = {"sp": permissions, "se": end, "sv": version, "sr": "c", "sig": signature.decode()}
    return f"{parts['BlobEndpoint']}/training/sas?{urllib.parse.urlencode(query)}", signature.decode()


@pytest.fixture
def sas(azurite, monkeypatch):
    def call(permissions, end):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite["AZURE_STORAGE_CONNECTION_STRING"])
        made = service_sas(permissions, end)
        monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
        return made

    return call


def test_all_that_a_job_needs_is_tried_and_nothing_is_left(run, make, each_storage, tmp_path):
    store = make("t", "a.pt=10")
    assert run("copy", store, each_storage).returncode == 0
    told = run("doctor", "--path", each_storage, "--json")
    assert told.returncode == 0
    found = checks(told)
    for name in ("clock", "may list", "may write", "conditional write", "may read", "speed", "may remove"):
        assert found[name]["result"] == "ok", found[name]
    assert found["checkpoints"]["found"].startswith("1 complete") and "iB/s" in found["speed"]["found"]
    if each_storage.startswith("az"):
        keys = ["the key of account devstoreaccount1, from AZURE_STORAGE_CONNECTION_STRING"]
        if "nebulatwo" in each_storage:
            keys += ["the key of account nebulatwo, from AZURE_STORAGE_KEY"]
        assert found["credentials"]["found"] == "; ".join(keys)
        assert "storage" not in found and "this machine" in found["transport"]["found"]
    assert (
        run("copy", each_storage, tmp_path / "back").returncode == 0
    )  # an object that may be left does not disturb readers
    again = checks(run("doctor", "--path", each_storage, "--json"))
    assert again["checkpoints"] == found["checkpoints"]
    left = [path for path in (tmp_path / "other storage").rglob("*") if "doctor" in path.name]
    assert left == []
    assert "Eby8vdM02x" not in told.stdout + told.stderr


@pytest.fixture
def with_agent(run, nebula):
    """Runs commands that may start an agent, and ends it."""
    runtime = f"/tmp/nb-{os.urandom(4).hex()}"  # a socket's path must be short
    variables = {"NEBULA_RUNTIME_DIR": runtime, "NEBULA_AGENT_PATH": str(nebula)}
    yield lambda *arguments: run(*arguments, **variables)
    run("stop", "--now", "--yes", **variables)
    shutil.rmtree(runtime, ignore_errors=True)


def test_the_life_of_a_checkpoint_is_played_and_nothing_is_left(with_agent, make, tmp_path):
    store = make("global_step1", "model.pt=100")
    before = sorted(path for path in store.rglob("*") if path.is_file())
    told = with_agent("doctor", "--save", store, "--json")
    steps = json.loads(told.stdout)["save"]
    assert told.returncode == 0 and all(one["ok"] and one["seconds"] > 0 for one in steps), told.stdout
    assert [one["check"] for one in steps] == ["save and kill", "load from memory", "make durable", "load from storage", "remove"]
    assert sorted(path for path in store.rglob("*") if path.is_file()) == before and not list(store.rglob("doctor*"))
    assert [one["tag"] for one in json.loads(with_agent("list", "--path", store, "--json").stdout)["versions"]] == ["global_step1"]
    (tmp_path / "file").write_text("no directory")
    told = with_agent("doctor", "--save", "--path", tmp_path / "file", "--json")
    assert told.returncode == 1 and "save" not in json.loads(told.stdout) and "the save is left out" in told.stderr


def test_a_reader_learns_which_right_it_lacks(run, sas):
    path, signature = sas("rl", "2099-01-01T00:00:00Z")
    told = run("doctor", "--path", path, "--json")
    found = checks(told)
    assert told.returncode == 1
    assert (
        found["credentials"]["result"] == "ok"
        and "permissions rl, valid until 2099-01-01" in found["credentials"]["found"]
    )
    assert found["may list"]["result"] == "ok"
    assert found["may write"]["result"] == "BAD" and "c and w in the SAS" in found["may write"]["advice"]
    assert signature not in told.stdout + told.stderr and urllib.parse.quote(signature) not in told.stdout + told.stderr


def test_an_expired_sas_is_called_expired_and_never_shown(run, sas):
    path, signature = sas("racwdl", "2020-01-01T00:00:00Z")
    told = run("doctor", "--path", path)
    assert told.returncode == 1 and "it has expired" in told.stdout
    for text in (signature, urllib.parse.quote(signature), "sig="):
        assert text not in told.stdout + told.stderr


def test_a_signature_in_a_url_that_no_driver_takes_is_not_shown(run):
    for url in ("nope://host/c?sig=SECRET", "nope://user:SECRET@host/c"):
        for command in (["doctor", "--path", url], ["list", "--path", url], ["copy", url, "d"]):
            told = run(*command)
            assert (
                told.returncode
                and "SECRET" not in told.stdout + told.stderr
                and "no driver" in told.stdout + told.stderr
            )


class Late(http.server.BaseHTTPRequestHandler):
    """A service that refuses each request, because its clock is 20 minutes ahead of this machine's."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(403)
        self.send_header("x-ms-request-id", "1")
        self.send_header("x-ms-error-code", "AuthenticationFailed")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_HEAD = do_DELETE = answer  # noqa: N815

    def date_time_string(self, timestamp=None):
        return super().date_time_string(time.time() + 1200)

    def log_message(self, *arguments):
        pass


def test_a_clock_that_is_20_minutes_off_is_named(run, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Late)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AZURE_STORAGE_KEY", "c2VjcmV0")
    told = run("doctor", "--path", f"http://127.0.0.1:{server.server_port}/account/container/run", "--json")
    server.shutdown()
    clock = checks(told)["clock"]
    assert told.returncode == 1 and clock["result"] == "BAD"
    assert clock["found"].startswith("this machine is 20 min behind the storage") and "NTP" in clock["advice"]


def test_a_store_that_does_not_answer_is_waited_for_once(run, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_KEY", "c2VjcmV0")
    begun = time.monotonic()
    told = run("doctor", "--path", "http://127.0.0.1:9/account/container/run", "--json")
    found = checks(told)
    assert told.returncode == 1 and time.monotonic() - begun < 30
    assert found["clock"]["result"] == "BAD" and "network" in found["clock"]["advice"]
    assert all(
        found[name]["found"].startswith("not tried") for name in ("may list", "may write", "speed", "checkpoints")
    )
