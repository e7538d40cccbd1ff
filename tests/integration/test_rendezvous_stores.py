"""The rendezvous of elastic jobs in object stores whose servers run on this machine: S3, Google Cloud Storage and Azure Data Lake."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("nebulaml")

from nebulaml._session import locate
from nebulaml.elastic import store_cells
from rendezvous_promises import Promises


@pytest.mark.parametrize("store", ["gs", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("s3", "adls"))])
class TestObjectStore(Promises):
    @pytest.fixture
    def cells(self, servers, store, monkeypatch):
        monkeypatch.setenv("NEBULA_AGENT_PATH", os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path())
        for name, value in servers.variables(store).items():
            monkeypatch.setenv(name, value)
        opened, path = [], servers.new_path(store)

        def open_again():
            opened.append(store_cells.open_cells(path))
            return opened[-1]

        yield open_again
        for one in opened:
            one.close()
