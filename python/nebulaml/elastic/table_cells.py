"""Cells in Azure Table Storage: a cell is an entity, and its token is the ETag. Needs ``azure-data-tables``; Entra ID needs
``azure-identity``.
"""

from __future__ import annotations

import contextlib
import email.utils
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..errors import NebulaConfigError, NebulaStorageError, NebulaUnavailable
from .cells import Cell, CellCorrupt, Cells, CellUnreachable, Entry

__all__ = ["Account", "TableCells", "find_account", "open_cells"]

TABLE = "nebularendezvous"
_COLUMN_BYTES = 64 << 10  # Azure's limit for one property
_COLUMNS_MAX = 15  # an entity has at most 1 MiB
_BATCH_MAX = 100
_TIMES = {"connection_timeout": 5, "read_timeout": 15}  # seconds
_PASSING = {408, 429, 500, 502, 503, 504}
_EMULATOR_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # the same in all emulators
)


class Account(NamedTuple):
    """The place of the table, and the proof that a request may use it."""

    endpoint: str  # without query
    table: str
    kind: str  # "key", "sas" or "token"
    name: str
    secret: str


def open_cells(endpoint: str | None) -> Cells:
    """Returns the cells in the table that ``--rdzv-endpoint`` and the environment name."""
    return TableCells(find_account(endpoint, os.environ))


def find_account(endpoint: str | None, environment: Any) -> Account:
    """Finds the account of ``https://ACCOUNT.table.core.windows.net[/TABLE][?SAS]``, an emulator's URL, ``ACCOUNT[/TABLE]``, or the
    environment.
    """
    parts = dict(
        part.split("=", 1) for part in environment.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";") if "=" in part
    )
    if parts.get("UseDevelopmentStorage", "").lower() == "true":
        parts = {
            "AccountName": "devstoreaccount1",
            "AccountKey": _EMULATOR_KEY,
            "TableEndpoint": "http://127.0.0.1:10002/devstoreaccount1",
        }
    suffix = parts.get("EndpointSuffix", "core.windows.net")
    if not endpoint or endpoint == "None":  # Microsoft's torchrun_wrapper.py passes "None"
        endpoint = parts.get("TableEndpoint") or parts.get("AccountName") or environment.get("AZURE_STORAGE_ACCOUNT")
        endpoint = endpoint or environment.get("AZUREML_BLOB_ACCOUNT_NAME", "")
    if "://" not in endpoint:
        account, _, table = endpoint.partition("/")
        own = parts.get("TableEndpoint") if account == parts.get("AccountName") else None
        endpoint = f"{own or f'https://{account}.table.{suffix}'}/{table}" if account else ""
    url = urllib.parse.urlsplit(endpoint)
    path = [piece for piece in url.path.split("/") if piece]
    is_emulator = (url.hostname or "").replace(".", "").isdecimal() or url.hostname == "localhost"
    name = path.pop(0) if is_emulator and path else (url.hostname or "").partition(".")[0]
    if (
        not url.hostname
        or len(path) > 1
        or url.scheme not in ("https", "http")
        or (url.scheme == "http" and not is_emulator)
    ):
        raise NebulaConfigError(
            "the rendezvous needs an account of Azure Table Storage: --rdzv-endpoint=https://ACCOUNT.table.core.windows.net, "
            f"or AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT; found {endpoint.partition('?')[0]!r}"
        )
    if (
        url.scheme == "http"
        and not (url.hostname == "localhost" or url.hostname.startswith("127."))
        and environment.get("NEBULA_STORE_ALLOW_HTTP") != "1"
    ):
        raise NebulaConfigError(
            f"http://{url.hostname} would get a SAS and the state of the rendezvous unencrypted: use https, or set NEBULA_STORE_ALLOW_HTTP=1"
        )
    base = f"{url.scheme}://{url.netloc}" + (f"/{name}" if is_emulator else "")
    kind, secret = _find_secret(name, url.query, parts, environment)
    return Account(base, path[0] if path else TABLE, kind, name, secret)


def _find_secret(name: str, query: str, parts: dict[str, str], environment: Any) -> tuple[str, str]:
    """Finds the secret in the order of docs/storage.md. Variables that name another account do not count."""
    if query:
        return "sas", query
    if parts.get("AccountName", name) == name and parts.get("AccountKey"):
        return "key", parts["AccountKey"]
    if parts.get("AccountName", name) == name and parts.get("SharedAccessSignature"):
        return "sas", parts["SharedAccessSignature"]
    if environment.get("AZURE_STORAGE_ACCOUNT", name) == name:
        if environment.get("AZURE_STORAGE_KEY"):
            return "key", environment["AZURE_STORAGE_KEY"]
    if environment.get("AZUREML_BLOB_ACCOUNT_NAME") == name and environment.get("AZUREML_BLOB_ACCOUNT_KEY"):
        return "key", environment["AZUREML_BLOB_ACCOUNT_KEY"]
    if environment.get("AZURE_STORAGE_ACCOUNT", name) == name and environment.get("AZURE_STORAGE_SAS_TOKEN"):
        return "sas", environment["AZURE_STORAGE_SAS_TOKEN"]
    return "token", ""


class TableCells(Cells):
    """One table for all jobs. The cells of a job share a partition. Any thread may ask."""

    def __init__(self, account: Account) -> None:
        try:
            from azure.core import MatchConditions
            from azure.core import exceptions as failures
            from azure.data.tables import TableClient, UpdateMode
        except ImportError as failure:
            raise NebulaUnavailable(
                f"the backend nebula-azure-table needs azure-data-tables ({failure}); pip install 'nebula-checkpoint[elastic]'"
            ) from failure
        self._failures, self._same, self._replace = failures, MatchConditions.IfNotModified, UpdateMode.REPLACE
        self._lock = threading.Lock()  # of the connection
        self._clock: tuple[float, float] | None = None  # the server's time, and this machine's at that moment
        self.requests = 0
        # Documents repeats requests: it can tell if a request was done although its answer was lost.
        self._client = TableClient(
            account.endpoint,
            account.table,
            credential=_credential(account),
            raw_response_hook=self._heard,
            retry_total=0,
            **_TIMES,
        )

    def read(self, cell: Cell) -> tuple[str, str] | None:
        try:
            entity = self._call(lambda: self._client.get_entity(cell.job, cell.name))
        except self._failures.ResourceNotFoundError:
            return None
        try:
            columns = int(entity.get("columns", 0))
            if columns > _COLUMNS_MAX:
                raise ValueError(f"{columns} columns")
            return b"".join(entity.get(f"d{i}") for i in range(columns)).decode(), entity.metadata["etag"]
        except (TypeError, ValueError) as failure:
            raise CellCorrupt(
                f"the entity {cell.job}, {cell.name} was not written by Nebula: {failure}"
            ) from failure

    def swap(self, cell: Cell, text: str, token: str | None) -> str | None:
        entity = _entity(cell, text)
        try:
            if token is None:
                return str(self._write(lambda: self._client.create_entity(entity))["etag"])
            options = {"mode": self._replace, "etag": token, "match_condition": self._same}
            return str(self._write(lambda: self._client.update_entity(entity, **options))["etag"])
        except (
            self._failures.ResourceExistsError,
            self._failures.ResourceModifiedError,
            self._failures.ResourceNotFoundError,
        ):
            return None

    def put(self, cell: Cell, text: str) -> None:
        entity = _entity(cell, text)
        self._write(lambda: self._client.upsert_entity(entity, mode=self._replace))

    def delete(self, cell: Cell) -> bool:
        there = self.read(cell) is not None
        if there:
            self._call(lambda: self._client.delete_entity(cell.job, cell.name))
        return there

    def entries(self, job: str | None = None) -> Iterable[Entry]:
        columns = ["PartitionKey", "RowKey", "Timestamp"]
        if job is None:
            pages = self._call(lambda: list(self._client.list_entities(select=columns)))
        else:
            pages = self._call(
                lambda: list(
                    self._client.query_entities("PartitionKey eq @job", parameters={"job": job}, select=columns)
                )
            )
        for entity in pages:
            yield Entry(Cell(entity["PartitionKey"], entity["RowKey"]), entity.metadata["timestamp"].timestamp())

    def remove(self, cells: list[Cell]) -> None:
        jobs: dict[str, list[Cell]] = {}
        for cell in cells:
            jobs.setdefault(cell.job, []).append(cell)
        for of_one in jobs.values():
            for i in range(0, len(of_one), _BATCH_MAX):
                self._remove(of_one[i : i + _BATCH_MAX])

    def clock(self) -> float:
        self.read(Cell("none", "none"))
        assert self._clock is not None
        served, heard = self._clock
        return served + time.time() - heard

    def close(self) -> None:
        self._client.close()

    def _remove(self, cells: list[Cell]) -> None:
        """Removes cells of one job, all at once if they all exist."""
        keys = [{"PartitionKey": cell.job, "RowKey": cell.name} for cell in cells]
        try:
            self._call(lambda: self._client.submit_transaction([("delete", key) for key in keys]))
        except self._failures.HttpResponseError:
            for cell in cells:
                self._call(lambda cell=cell: self._client.delete_entity(cell.job, cell.name))  # type: ignore[misc]

    def _write(self, request: Any) -> Any:
        try:
            return self._call(request)
        except self._failures.ResourceNotFoundError as failure:
            if "TableNotFound" not in str(failure):
                raise
        with contextlib.suppress(self._failures.ResourceExistsError):
            self._call(self._client.create_table)
        return self._call(request)

    def _call(self, request: Any) -> Any:
        """Raises the SDK's errors that report a condition, ``CellUnreachable``, or an error that a repetition cannot cure."""
        failures = self._failures
        with self._lock:
            self.requests += 1
            try:
                return request()
            except (failures.ResourceNotFoundError, failures.ResourceExistsError, failures.ResourceModifiedError):
                raise
            except failures.HttpResponseError as failure:
                if failure.status_code == 404:  # so a batch reports that an entity of it is not there
                    raise
                if failure.status_code in _PASSING or failure.status_code is None:
                    raise CellUnreachable(
                        _sentence(failure)
                    ) from None  # the SDK's own text may hold the URL, and so the SAS
                raise NebulaStorageError(f"Azure Table Storage refuses the request: {_sentence(failure)}") from None
            except failures.AzureError as failure:
                raise CellUnreachable(_sentence(failure)) from None

    def _heard(self, response: Any) -> None:
        text = response.http_response.headers.get("Date")
        if text:
            self._clock = email.utils.parsedate_to_datetime(text).timestamp(), time.time()


def _credential(account: Account) -> Any:
    from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential

    if account.kind == "key":
        return AzureNamedKeyCredential(account.name, account.secret)
    if account.kind == "sas":
        return AzureSasCredential(account.secret)
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError as failure:
        raise NebulaUnavailable(
            f"no key or SAS for {account.endpoint} is known, and Entra ID needs azure-identity ({failure}); "
            "pip install 'nebula-checkpoint[elastic]'"
        ) from failure
    return DefaultAzureCredential()


def _entity(cell: Cell, text: str) -> dict[str, Any]:
    data = text.encode()
    pieces = [data[i : i + _COLUMN_BYTES] for i in range(0, len(data), _COLUMN_BYTES)]
    if len(pieces) > _COLUMNS_MAX:
        raise NebulaStorageError(
            f"{cell.job}/{cell.name} has {len(data)} bytes; Azure takes {_COLUMNS_MAX * _COLUMN_BYTES} in one entity"
        )
    return {"PartitionKey": cell.job, "RowKey": cell.name, "columns": len(pieces)} | {
        f"d{i}": piece for i, piece in enumerate(pieces)
    }


def _sentence(failure: Exception) -> str:
    text = re.sub(r"\?[^\s'\")>]*", "", " ".join(str(failure).split()))  # no query of a URL
    return text[:400] or type(failure).__name__
