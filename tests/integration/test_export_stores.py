"""Hugging Face directories in object stores whose servers run on this machine: whole with config.json, or unfinished without it."""

from __future__ import annotations

import json
import os
import signal

import fork_server
import pytest
import torch

pytest.importorskip("nebulaml")

from nebulaml import _nebula
from nebulaml._session import locate
from nebulaml.elastic.store_cells import StoreProcess
from nebulaml.errors import NebulaConfigError, NebulaError
from nebulaml.export import export_hf, upload

safetensors = pytest.importorskip("safetensors.torch")

STATE = {"a": torch.arange(300.0), "b": torch.arange(7), "c": torch.ones(40, 5)}


@pytest.fixture(params=["gs", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("s3", "azure", "adls"))])
def url(servers, request, monkeypatch, tmp_path):
    monkeypatch.setenv("NEBULA_AGENT_PATH", os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path())
    for name, value in servers.variables(request.param).items():
        monkeypatch.setenv(name, value)
    torch.save(STATE, tmp_path / "model.pt")
    return servers.new_path(request.param)


def names(url: str) -> list[str]:
    process = StoreProcess(url)
    try:
        return sorted(entry["key"] for entry in process.ask(do="list", prefix="")["entries"])
    finally:
        process.close()


def test_a_directory_in_a_store_is_written_verified_and_replaced_only_if_asked(url, tmp_path, monkeypatch):
    order = []
    take = upload._Store.take

    def noted(self, folder, name):
        order.append(name)
        with open(os.path.join(folder, name), "rb") as file:
            (tmp_path / f"sent-{name}").write_bytes(file.read())
        take(self, folder, name)

    monkeypatch.setattr(upload._Store, "take", noted)
    export_hf(str(tmp_path / "model.pt"), url, config={"model_type": "mine"}, max_shard_size=1300)
    shards = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    assert order == [*shards, "model.safetensors.index.json", "config.json"] and names(url) == sorted(order)
    assert json.loads((tmp_path / "sent-config.json").read_text())["model_type"] == "mine"
    loaded = {name: value for shard in shards for name, value in safetensors.load_file(tmp_path / f"sent-{shard}").items()}
    assert loaded.keys() == STATE.keys() and all(torch.equal(loaded[name], value) for name, value in STATE.items())
    with pytest.raises(NebulaConfigError, match="exists already"):
        export_hf(str(tmp_path / "model.pt"), url, config={"model_type": "mine"})
    export_hf(str(tmp_path / "model.pt"), url, config={"model_type": "mine"}, replace=True)
    assert names(url) == ["config.json", "model.safetensors"]


# fault (Deaths): A program that writes a Hugging Face directory is killed at any step.
# result: There is no directory, or a whole one: the old or the new one if it was to be replaced. In an object store
# there is no `config.json`, or all. The next export removes what was left.
def test_an_export_that_is_killed_on_its_way_has_no_config_and_the_next_one_takes_its_place(url, tmp_path):
    code = """
import os, signal, sys
from nebulaml.export import export_hf, upload
take, left = upload._Store.take, [2]
def dying(self, folder, name):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    take(self, folder, name)
upload._Store.take = dying
export_hf(sys.argv[1], sys.argv[2], config={"a": 1}, max_shard_size=1300)
"""
    model = str(tmp_path / "model.pt")
    with fork_server.start(code, model, url, stdout=None, env={**os.environ, "TMPDIR": str(tmp_path)}) as export:
        assert export.wait(120) == -signal.SIGKILL
    assert names(url) == ["model-00001-of-00002.safetensors"]
    export_hf(model, url, config={"a": 1})
    assert names(url) == ["config.json", "model.safetensors"]


def test_what_a_store_holds_is_compared_and_a_difference_leaves_nothing(url, tmp_path, monkeypatch):
    ask = StoreProcess.ask

    def damaged(self, **request):
        answer = ask(self, **request)
        return {**answer, "crc64": "0" * 16} if request["do"] == "sum" else answer

    monkeypatch.setattr(StoreProcess, "ask", damaged)
    with pytest.raises(NebulaError, match="is not as it was sent"):
        export_hf(str(tmp_path / "model.pt"), url, config={"a": 1})
    assert names(url) == []


# fault (Object stores): Two programs write a Hugging Face directory to one URL at the same time, each replaces that of the other.
# result: At most one of them succeeds, and then the directory has its files alone. The other one removes nothing of it.
@pytest.mark.parametrize("turn", [1, 2, 3, 4])
def test_two_exports_to_one_url_never_make_a_directory_of_both(url, tmp_path, monkeypatch, turn):
    torch.save({name: value + 1 for name, value in STATE.items()}, tmp_path / "other.pt")
    take, outcomes, order = upload._Store.take, [], []

    def export(model):
        try:
            export_hf(str(tmp_path / model), url, config={"of": model}, max_shard_size=1300, replace=True)
            outcomes.append(model)
        except NebulaError as failure:
            outcomes.append(failure)

    def taking(self, folder, name):
        order.append(name)
        if len(order) == turn:  # the other export runs from begin to end meanwhile, or as far as it comes
            export("other.pt")
        take(self, folder, name)

    monkeypatch.setattr(upload._Store, "take", taking)
    export("model.pt")
    succeeded = [one for one in outcomes if isinstance(one, str)]
    assert len(succeeded) == 1 and len(outcomes) == 2, outcomes
    shards = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    assert names(url) == sorted([*shards, "model.safetensors.index.json", "config.json"])
    found = StoreProcess(url)
    try:
        assert json.loads(found.ask(do="get", key="config.json")["value"])["of"] == succeeded[0]
        sums = [found.ask(do="sum", key=name)["crc64"] for name in shards]
    finally:
        found.close()
    export_hf(str(tmp_path / succeeded[0]), tmp_path / "out", config={"of": succeeded[0]}, max_shard_size=1300)
    for name, crc64 in zip(shards, sums, strict=True):
        [wanted] = _nebula.read_sums(str(tmp_path / "out" / name), [(0, (tmp_path / "out" / name).stat().st_size)])
        assert crc64 == f"{wanted:016x}"
