"""The rendezvous of elastic jobs in Azure Table Storage and Azure Blob Storage: the emulator Azurite keeps them."""

from __future__ import annotations

import base64
import http.client
import http.server
import json
import os
import re
import shutil
import sys
import threading
import time
import traceback
import uuid
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

pytest.importorskip("azure.data.tables")
pytest.importorskip("nebulaml")

from azure.data.tables import AccountSasPermissions, ResourceTypes, TableServiceClient, generate_account_sas
from nebulaml._session import locate
from nebulaml.elastic import store_cells, table_cells
from nebulaml.elastic.backend import Backend
from nebulaml.elastic.cells import Cell
from nebulaml.errors import NebulaConfigError
from rendezvous_promises import Promises, make_state, parts
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError

sys.path.insert(0, str(Path(__file__).parent))
import azure_requests
from emulators import between_server, emulator

pytestmark = pytest.mark.skipif(
    shutil.which("npm") is None, reason="npm is not here, which installs the emulator Azurite"
)


@pytest.fixture(scope="module")
def connection():
    for found, _ in emulator():
        yield found


@pytest.fixture(scope="module")
def container(connection):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
        azure_requests.make_container("rendezvous")


@pytest.fixture
def environment(connection, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("AZURE", "NEBULA_PERSISTENT")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    monkeypatch.setenv("NEBULA_AGENT_PATH", os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path())
    return connection


def opener(open_one):
    opened = []

    def open_again():
        opened.append(open_one())
        return opened[-1]

    yield open_again
    for one in opened:
        one.close()


class TestTable(Promises):
    @pytest.fixture
    def cells(self, environment):
        yield from opener(lambda: table_cells.open_cells(None))


@pytest.mark.nightly("rendezvous_promises.py::test_of_sixteen_racers_one_wins_each_round", "test_key_sas_and_connection_string_open_the_table")
class TestBlob(Promises):
    @pytest.fixture
    def cells(self, environment, container):
        def open_one():
            cells = store_cells.open_cells("az://devstoreaccount1/rendezvous/run")
            assert isinstance(cells, store_cells.ObjectCells)  # by stamp, not by log
            return cells

        yield from opener(open_one)


@pytest.fixture
def between(environment):
    yield from between_server(environment)


# fault (Elastic jobs): The storage of the rendezvous answers 503, answers are lost, or a writer slept.
# result: Each write counts once or not at all.
@pytest.mark.parametrize("plan", [["503", "503", "lost"], ["lost", "503"], *(pytest.param([one], marks=pytest.mark.nightly) for one in ("503", "lost"))])
@pytest.mark.parametrize("first", [True, False])
def test_a_table_that_is_busy_or_loses_answers_keeps_each_write_once(between, plan, first):
    handler, endpoint = between
    backend = Backend("nebula-azure-table", table_cells.open_cells(endpoint), uuid.uuid4().hex)
    token = None
    if not first:
        token = backend.set_state(b"x")[1]
    else:
        Backend("nebula-azure-table", table_cells.open_cells(endpoint), uuid.uuid4().hex).set_state(
            b"x"
        )  # makes the table
    handler.plan.extend(plan)
    state, token, written = backend.set_state(b"y", token)
    assert (state, written, handler.plan) == (b"y", True, [])
    assert backend.set_state(b"z", token)[2]


# fault: as test_training_goes_on_while_the_table_is_gone
def test_a_table_that_is_gone_for_a_while_is_waited_for(between, environment):
    handler, endpoint = between
    backend = Backend("nebula-azure-table", table_cells.open_cells(endpoint), uuid.uuid4().hex)
    _, token, _ = backend.set_state(b"x")
    handler.port, port = 9, handler.port
    timer = threading.Timer(2, setattr, (handler, "port", port))
    begun = time.monotonic()
    timer.start()
    assert backend.set_state(b"y", token)[2]
    assert time.monotonic() - begun > 1.5
    timer.join()


def test_a_table_server_that_does_not_exist_is_a_lost_connection(environment):
    cells = table_cells.open_cells("http://127.0.0.1:9/devstoreaccount1")
    with pytest.raises(RendezvousConnectionError):
        Backend("nebula-azure-table", cells, "job", patience_s=1).get_state()


def test_no_failure_tells_the_sas(environment):
    cells = table_cells.open_cells("http://127.0.0.1:9/devstoreaccount1?sv=2019-02-02&sig=geheim%3D")
    with pytest.raises(RendezvousConnectionError) as caught:
        Backend("nebula-azure-table", cells, "job", patience_s=0.5).get_state()
    told = "".join(traceback.format_exception(caught.value))
    assert "127.0.0.1" in told
    assert "geheim" not in told
    long = Exception("HTTPSConnectionPool(host='a', port=443): Max retries exceeded with url: /t?sv=1&sig=geheim (Caused by x)")
    assert table_cells._sentence(long) == "HTTPSConnectionPool(host='a', port=443): Max retries exceeded with url: /t (Caused by x)"


def test_a_wrong_key_is_told_at_once(environment, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", re.sub("AccountKey=[^;]*", "AccountKey=YWJj", environment))
    with pytest.raises(RendezvousConnectionError, match="refuses"):
        Backend("nebula-azure-table", table_cells.open_cells(None), "job", patience_s=3600).get_state()


@pytest.mark.parametrize("columns", [100_000_000, "none"])
def test_an_entity_that_another_program_has_written_is_corrupt(environment, columns):
    job = uuid.uuid4().hex
    backend = Backend("nebula-azure-table", table_cells.open_cells(None), job, patience_s=3600)  # for what may pass: this does not
    assert backend.set_state(b"x")[2]
    table = TableServiceClient.from_connection_string(environment).get_table_client(table_cells.TABLE)
    table.upsert_entity({"PartitionKey": job, "RowKey": "state", "columns": columns})
    with pytest.raises(RendezvousStateError, match="was not written by Nebula"):
        backend.get_state()


def round_trip(endpoint: str | None, kind: str) -> None:
    account = table_cells.find_account(endpoint, os.environ)
    assert account.kind == kind
    backend = Backend("nebula-azure-table", table_cells.TableCells(account), uuid.uuid4().hex)
    state = make_state(2)
    assert backend.set_state(state)[2]
    assert parts(backend.get_state()[0]) == parts(state)


def test_key_sas_and_connection_string_open_the_table(environment, monkeypatch):
    made = dict(part.split("=", 1) for part in environment.split(";"))
    endpoint = made["TableEndpoint"]
    service = TableServiceClient.from_connection_string(environment)
    sas = generate_account_sas(
        service.credential,
        resource_types=ResourceTypes(service=True, object=True),
        permission=AccountSasPermissions(
            read=True, write=True, delete=True, list=True, add=True, create=True, update=True
        ),
        expiry=datetime.now(timezone.utc) + timedelta(hours=1),
    )
    round_trip(None, "key")
    round_trip(f"{endpoint}/own", "key")
    assert "own" in {table.name for table in service.list_tables()}
    round_trip("devstoreaccount1", "key")
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    round_trip(f"{endpoint}?{sas}", "sas")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", sas)
    round_trip(endpoint, "sas")
    monkeypatch.setenv("AZURE_STORAGE_KEY", made["AccountKey"])
    round_trip(endpoint, "key")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "another")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "")
    assert table_cells.find_account(endpoint, os.environ).kind == "token"


class Identity(http.server.BaseHTTPRequestHandler):
    """Simulates the managed identity of App Service, which gives a token for Storage."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        claims = {
            "aud": "https://storage.azure.com",
            "iss": "https://sts.windows.net/00000000-0000-0000-0000-000000000000/",
        }
        claims |= {
            "iat": int(time.time()) - 9,
            "nbf": int(time.time()) - 9,
            "exp": int(time.time()) + 3600,
            "ver": "1.0",
        }
        coded = [
            base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()
            for part in ({"alg": "HS256", "typ": "JWT"}, claims)
        ]
        answer = {
            "access_token": ".".join([*coded, "c2ln"]),
            "expires_on": str(claims["exp"]),
            "resource": claims["aud"],
            "token_type": "Bearer",
        }
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.nightly("test_key_sas_and_connection_string_open_the_table")
def test_entra_id_opens_the_table_by_a_managed_identity(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Identity)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        for connection, certificate in emulator("--tls"):
            for name in list(os.environ):
                if name.startswith(("AZURE", "IDENTITY", "MSI")):
                    monkeypatch.delenv(name)
            monkeypatch.setenv("REQUESTS_CA_BUNDLE", certificate)
            monkeypatch.setenv("IDENTITY_ENDPOINT", f"http://127.0.0.1:{server.server_port}/token")
            monkeypatch.setenv("IDENTITY_HEADER", "header")
            round_trip(re.search(r"TableEndpoint=([^;]*)", connection)[1], "token")
            assert any("storage.azure.com" in path for path in Identity.asked)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_accounts_are_found_and_plain_http_is_refused():
    find = table_cells.find_account
    assert find("https://acct.table.core.windows.net", {})[:3] == (
        "https://acct.table.core.windows.net",
        "nebularendezvous",
        "token",
    )
    assert find("https://acct.table.core.windows.net/jobs/?sv=1&sig=x", {}) == (
        "https://acct.table.core.windows.net",
        "jobs",
        "sas",
        "acct",
        "sv=1&sig=x",
    )
    assert find("acct/jobs", {"AZURE_STORAGE_KEY": "k"}) == (
        "https://acct.table.core.windows.net",
        "jobs",
        "key",
        "acct",
        "k",
    )
    string = "DefaultEndpointsProtocol=https;AccountName=acct;AccountKey=a==;EndpointSuffix=core.chinacloudapi.cn"
    assert find("None", {"AZURE_STORAGE_CONNECTION_STRING": string}) == (
        "https://acct.table.core.chinacloudapi.cn",
        "nebularendezvous",
        "key",
        "acct",
        "a==",
    )
    assert find("other", {"AZURE_STORAGE_CONNECTION_STRING": string}).kind == "token"
    assert find("", {"AZUREML_BLOB_ACCOUNT_NAME": "aml", "AZUREML_BLOB_ACCOUNT_KEY": "k"})[2:] == ("key", "aml", "k")
    assert (
        find(None, {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"}).endpoint
        == "http://127.0.0.1:10002/devstoreaccount1"
    )
    for bad in (
        None,
        "",
        "https://",
        "http://acct.table.core.windows.net",
        "https://acct.table.core.windows.net/a/b",
        "ftp://x",
        "http://10.0.0.4:10002/acct",
        "http://127.0.0.1.example.com/acct",
    ):
        with pytest.raises(NebulaConfigError):
            find(bad, {})
    assert find("http://10.0.0.4:10002/acct", {"NEBULA_STORE_ALLOW_HTTP": "1"}).endpoint == "http://10.0.0.4:10002/acct"


@pytest.mark.parametrize("fault", ["503", "lost"])
def test_a_table_that_is_busy_or_loses_answers_is_swept_all_the_same(between, fault):
    handler, endpoint = between
    backend = Backend("nebula-azure-table", table_cells.open_cells(endpoint), uuid.uuid4().hex)
    backend.set_state(b"x")
    documents = backend.documents
    documents.put(Cell(backend.job, "key"), {"value": "1"})
    handler.plan.append(fault)  # the removal is a POST
    documents.remove([Cell(backend.job, "key")])
    assert not handler.plan
    assert [entry.cell.name for entry in documents.entries(backend.job)] == ["state"]
