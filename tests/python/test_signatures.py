"""Versions that a trusted key has signed, and what readers do with all others."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import nebulaml as nm
import pytest
import torch
import torch.distributed.checkpoint as dcp
from nebulaml._session import engine, locate
from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter
from nebulaml.errors import NebulaConfigError, NebulaError
from test_bad_storage import forget_memory
from torch.distributed.checkpoint.api import CheckpointException

pytestmark = pytest.mark.filterwarnings("ignore")


def nebula(*words: object, ok: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=120, env={**os.environ, **variables})
    assert not ok or done.returncode == 0, done.stderr
    return done


class Keys:
    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, name: str, trust: bool = True) -> Path:
        key = self.root / name
        nebula("sign", "--new-key", key)
        if trust:
            nebula("sign", "--trust", f"{key}.pub")
        return key

    def id(self, name: str) -> str:
        return str(json.loads(nebula("sign", "--trust", f"{self.root / name}.pub", "--json").stdout)["trusted"][-1])


@pytest.fixture
def keys(place, monkeypatch):
    monkeypatch.setenv("NEBULA_TRUSTED_KEYS", str(place.root / "trusted"))
    monkeypatch.delenv("NEBULA_SIGNATURES", raising=False)  # init(signatures=...) sets it
    yield Keys(place.root)
    os.environ.pop("NEBULA_SIGNATURES", None)


def save(place, tag: str, value: float, **settings: object) -> None:
    nm.init(str(place.storage), 0, 2, **settings)
    with nm.Checkpoint(tag) as checkpoint:
        checkpoint.save("model.pt", {"value": torch.full((1000,), value)})
    checkpoint.wait("durable", 60)
    forget_memory(place)


def load(place, tag: str = "", policy: str = "require") -> float:
    nm.init(str(place.storage), 0, 2, signatures=policy)
    found = nm.get_checkpoint(tag) if tag else nm.get_latest_checkpoint()
    try:
        return float(found.load("model.pt")["value"][0])
    finally:
        forget_memory(place)


def refused(place, tag: str, policy: str = "require") -> str:
    with pytest.raises(NebulaError) as failure:
        load(place, tag, policy)
    return str(failure.value)


def signature(place, tag: str) -> Path:
    (found,) = (place.storage / tag / ".nebula").glob("signature-*.json")
    return found


def test_what_the_agent_signs_is_read_and_nothing_else(place, keys, monkeypatch):
    save(place, "global_step1", 1.0)
    monkeypatch.setenv("NEBULA_SIGN_KEY", str(keys.make("key")))
    save(place, "global_step2", 2.0)
    monkeypatch.delenv("NEBULA_SIGN_KEY")
    save(place, "global_step3", 3.0)
    assert load(place, policy="off") == 3.0
    assert load(place, policy="prefer") == 3.0
    assert load(place) == 2.0  # the newest one is not signed
    assert "no trusted key has signed" in refused(place, "global_step3")
    nebula("sign", "--all", "--key", place.root / "key", "--path", place.storage)
    assert load(place) == 3.0
    assert load(place, "global_step1") == 1.0


@pytest.fixture
def signed(place, keys, monkeypatch):
    """Two signed versions; the process has no key that signs."""
    monkeypatch.setenv("NEBULA_SIGN_KEY", str(keys.make("key")))
    save(place, "global_step1", 1.0)
    save(place, "global_step2", 2.0)
    monkeypatch.delenv("NEBULA_SIGN_KEY")
    return place


def reseal(path: Path, old: str, new: str) -> None:
    body = path.read_bytes()[:-29].replace(old.encode(), new.encode()).replace(f'"step":{old[-1]}'.encode(), f'"step":{new[-1]}'.encode())
    path.write_bytes(body + f',"crc64":"{crc64(body):016x}"}}\n'.encode())


def crc64(data: bytes) -> int:
    value = (1 << 64) - 1
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x9A6C9329AC4BC9B5 if value & 1 else 0)
    return value ^ (1 << 64) - 1


# fault: as test_a_file_whose_checksums_fit_is_refused_if_it_is_not_the_signed_one
def test_an_older_signed_version_under_a_newer_tag_is_refused(signed):
    (record,) = (signed.storage / "global_step1" / ".nebula").glob("*.record-*.json")
    shutil.copytree(signed.storage / "global_step1", signed.storage / "global_step9")
    for path in sorted((signed.storage / "global_step9" / ".nebula").glob("*.record-*.json")):
        reseal(path, "global_step1", "global_step9")
    for path in (signed.storage / "global_step9" / ".nebula").glob("manifest-*.json"):
        text = path.read_bytes()
        changed = (signed.storage / "global_step9" / ".nebula" / record.name).read_bytes()
        before = record.read_bytes()
        text = text.replace(f"{crc64(before):016x}".encode(), f"{crc64(changed):016x}".encode())
        text = text.replace(f'"size":{len(before)}'.encode(), f'"size":{len(changed)}'.encode())
        path.write_bytes(text)
        reseal(path, "global_step1", "global_step9")
    assert load(signed, policy="off") == 1.0  # as a whole version it is sound, and it looks like the newest
    assert load(signed) == 2.0
    assert "another version" in refused(signed, "global_step9")


# fault (Storage): A program that knows the checksums changes a file and its documents, swaps versions, or cuts a
# signature.
# result: With `NEBULA_SIGNATURES=require` no program reads the version. A search takes an older signed one, and says
# why.
def test_a_file_whose_checksums_fit_is_refused_if_it_is_not_the_signed_one(signed):
    """CRC-64 is no obstacle for somebody who chooses the bytes: eight of them make any sum."""
    path = signed.storage / "global_step2" / "model.pt"
    (record,) = (signed.storage / "global_step2" / ".nebula").glob("*.record-*.json")
    (manifest,) = (signed.storage / "global_step2" / ".nebula").glob("manifest-*.json")
    old, old_record = path.read_bytes(), record.read_bytes()
    new = (signed.storage / "global_step1" / "model.pt").read_bytes()
    assert len(new) == len(old) and new != old
    path.write_bytes(new)
    record.write_bytes(old_record.replace(f"{crc64(old):016x}".encode(), f"{crc64(new):016x}".encode()))
    reseal(record, "x", "x")
    text = manifest.read_bytes().replace(f"{crc64(old_record):016x}".encode(), f"{crc64(record.read_bytes()):016x}".encode())
    manifest.write_bytes(text)
    reseal(manifest, "x", "x")
    assert load(signed, policy="off") == 1.0
    for policy in ("require", "prefer"):
        nm.init(str(signed.storage), 0, 2, signatures=policy)
        with pytest.raises(NebulaError, match="not what was signed"):
            nm.get_checkpoint("global_step2").load("model.pt")
        forget_memory(signed)
    done = nebula("verify", "global_step2", "--path", signed.storage, ok=False)
    assert done.returncode == 1 and "not what was signed" in done.stdout
    out = signed.root / "out"
    done = nebula("restore", "global_step2", "--to", out, "--path", signed.storage, ok=False, NEBULA_SIGNATURES="require")
    assert done.returncode == 1 and "not what was signed" in done.stderr and not list(out.glob("*.pt"))


# fault: as test_a_file_whose_checksums_fit_is_refused_if_it_is_not_the_signed_one
@pytest.mark.parametrize("damage", ["flipped", "of another key", *(pytest.param(damage, marks=pytest.mark.nightly("test_a_signature_that_does_not_hold_is_refused")) for damage in ("cut", "of another version", "empty"))])
def test_a_signature_that_does_not_hold_is_refused(signed, keys, damage):
    path = signature(signed, "global_step2")
    text = path.read_bytes()
    other = signature(signed, "global_step1").read_bytes()
    if damage == "of another key":
        keys.make("other", trust=False)
        nebula("sign", "global_step2", "--key", signed.root / "other", "--path", signed.storage)
        (foreign,) = set((signed.storage / "global_step2" / ".nebula").glob("signature-*.json")) - {path}
        other = foreign.read_bytes()
        foreign.unlink()
    path.write_bytes({
        "cut": text[: len(text) // 2], "flipped": text.replace(b'"world":1', b'"world":2'), "of another version": other, "of another key": other, "empty": b"",
    }[damage])
    assert load(signed, "global_step2", "off") == 2.0
    assert load(signed) == 1.0
    assert "signature-" in refused(signed, "global_step2")
    assert "signature-" in refused(signed, "global_step2", "prefer")
    assert nebula("verify", "global_step2", "--path", signed.storage, ok=False).returncode == 1


def test_a_key_that_was_removed_is_refused_and_its_versions_can_be_signed_anew(signed, keys):
    before = keys.id("key")
    new = keys.make("new")
    assert load(signed) == 2.0  # several keys are trusted
    nebula("sign", "--distrust", before)
    assert "no trusted key has signed" in refused(signed, "global_step2")
    nebula("sign", "global_step2", "--key", new, "--path", signed.storage)
    assert load(signed) == 2.0
    shown = json.loads(nebula("inspect", "global_step2", "--path", signed.storage, "--json").stdout)["signatures"]
    assert sorted(one["state"] for one in shown) == ["trusted", "unknown"]
    listed = json.loads(nebula("list", "--path", signed.storage, "--json").stdout)["versions"]
    assert {row["tag"]: sorted(one["state"] for one in row["signatures"]) for row in listed} == {
        "global_step1": ["unknown"],
        "global_step2": ["trusted", "unknown"],
    }
    table = nebula("list", "--path", signed.storage).stdout
    assert f" {before} (not trusted)\n" in table and "SIGNED" in table
    assert f"signed by {before}, which is not trusted here" in nebula("verify", "global_step1", "--path", signed.storage).stdout


def test_the_list_shows_who_signed_each_version_and_which_signature_does_not_hold(signed, keys, monkeypatch):
    def rows(*words: str) -> list[str]:
        return nebula("list", *words, "--path", signed.storage).stdout.splitlines()

    path = signature(signed, "global_step1")
    path.write_bytes(path.read_bytes()[:-40] + path.read_bytes()[-39:])
    trusted = keys.id("key")
    assert [row.split()[-1] for row in rows() if "global_step" in row] == ["(BAD)", trusted]
    nebula("sign", "--distrust", trusted)
    monkeypatch.delenv("NEBULA_SIGN_KEY", raising=False)
    assert not any("SIGNED" in row for row in rows()), "a user who trusts no key pays no requests"
    assert sum(trusted in row for row in rows("--signatures")) == 2


# fault (Storage): A file of keys is open to others, of another kind, or missing.
# result: `init` and each command raise, and name the file and the cure. Training without it is not affected.
def test_wrong_files_of_keys_are_named(place, keys, monkeypatch):
    key = keys.make("key")
    nebula("sign", "--new-key", place.root / "p256", "--p256")
    key.chmod(0o640)
    (place.root / "text").write_text("-----BEGIN PUBLIC KEY-----\nnothing\n-----END PUBLIC KEY-----\n")
    (place.root / "text").chmod(0o600)
    for path, why in ((key, "open to other users"), (place.root / "p256", "not an Ed25519 key"), (place.root / "text", "no private key"), ("key", "absolute")):
        monkeypatch.setenv("NEBULA_SIGN_KEY", str(path))
        with pytest.raises(NebulaError, match=why):
            nm.init(str(place.storage), 0, 2)
    monkeypatch.delenv("NEBULA_SIGN_KEY")
    assert "not a public Ed25519 key" in nebula("sign", "--trust", place.root / "p256.pub", ok=False).stderr
    assert "not a public Ed25519 key" in nebula("sign", "--trust", key, ok=False).stderr + nebula("sign", "--trust", place.root / "text", ok=False).stderr
    (place.root / "trusted").chmod(0o666)
    with pytest.raises(NebulaError, match="open to other users"):
        nm.init(str(place.storage), 0, 2, signatures="require")
    (place.root / "trusted").unlink()
    with pytest.raises(NebulaError, match="trusted"):
        nm.init(str(place.storage), 0, 2, signatures="require")
    with pytest.raises(NebulaConfigError):
        nm.init(str(place.storage), 0, 2, signatures="yes")
    os.environ["NEBULA_SIGNATURES"] = "off"


def test_what_a_session_without_a_policy_has_read_is_checked_before_a_session_with_one_gets_it(place, keys):
    keys.make("key")
    save(place, "global_step1", 1.0)
    nm.init(str(place.storage), 0, 2, signatures="off")
    found = nm.get_latest_checkpoint()
    assert float(found.load("model.pt")["value"][0]) == 1.0
    nm.init(signatures="require")  # the same agent, whose memory has the file
    with pytest.raises(NebulaError, match="no trusted key"):
        nm.get_checkpoint("global_step1").load("model.pt")
    nm.init(signatures="off")  # an agent does not become less strict
    with pytest.raises(NebulaError, match="no trusted key"):
        nm.get_checkpoint("global_step1").load("model.pt")


@pytest.mark.nightly("test_files_that_carry_over_keep_their_signature")
def test_a_copy_keeps_its_signature_and_a_version_that_goes_takes_it_along(signed):
    other = signed.root / "other"
    nebula("copy", signed.storage, other, "--all")
    assert (other / "global_step2" / ".nebula" / signature(signed, "global_step2").name).read_bytes() == signature(signed, "global_step2").read_bytes()
    nm.init(str(other), 0, 2, signatures="require")
    assert float(nm.get_latest_checkpoint().load("model.pt")["value"][0]) == 2.0
    forget_memory(signed)
    nebula("prune", "--tag", "global_step1", "--yes", "--path", signed.storage)
    assert not (signed.storage / "global_step1").exists()


def test_files_that_carry_over_keep_their_signature(place, keys, monkeypatch):
    monkeypatch.setenv("NEBULA_SIGN_KEY", str(keys.make("key")))
    nm.init(str(place.storage), 0, 2)
    for name in ("a", "b"):
        with nm.Checkpoint("best") as checkpoint:
            checkpoint.save(name, {"value": torch.ones(10)})
        checkpoint.wait("durable", 60)
        forget_memory(place)
        nm.init(str(place.storage), 0, 2)
        assert nm.get_latest_checkpoint()
    monkeypatch.delenv("NEBULA_SIGN_KEY")
    nm.init(str(place.storage), 0, 2, signatures="require")
    found = nm.get_checkpoint("best")
    assert sorted(found.files) == ["a", "b"]
    for name in ("a", "b"):
        assert float(found.load(name)["value"].sum()) == 10.0
    assert len(list((place.storage / "best" / ".nebula").glob("signature-*.json"))) == 1


def test_a_reader_and_dcp_meet_the_same_policy(place, keys, monkeypatch):
    save(place, "global_step1", 1.0)
    dcp.save({"weight": torch.zeros(8)}, checkpoint_id=place.root / "stock" / "step1")  # torch's own writer
    monkeypatch.setenv("NEBULA_SIGN_KEY", str(keys.make("key")))
    state = {"weight": torch.arange(1 << 21, dtype=torch.float32)}  # more than one chunk, so that a reader could ask for a part
    dcp.save(state, storage_writer=NebulaStorageWriter(place.storage / "global_step2"))
    assert nm.flush_persistence()
    forget_memory(place)
    monkeypatch.delenv("NEBULA_SIGN_KEY")
    monkeypatch.setenv("NEBULA_SIGNATURES", "require")
    found = {"weight": torch.zeros(1 << 21)}
    dcp.load(found, storage_reader=NebulaStorageReader(place.storage / "global_step2"))
    assert torch.equal(found["weight"], state["weight"])
    with pytest.raises(CheckpointException, match="no version of Nebula"):
        dcp.load({"weight": torch.zeros(8)}, storage_reader=NebulaStorageReader(place.root / "stock" / "step1"))
    with nm.Reader(str(place.storage)) as reader:
        assert reader.latest().tag == "global_step2"
        with pytest.raises(NebulaError, match="no trusted key"):
            reader.get("global_step1").load("model.pt")
        assert next(iter(reader.follow())).tag == "global_step2"
    forget_memory(place)
    path = place.storage / "global_step2" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointException):
        dcp.load(found, storage_reader=NebulaStorageReader(place.storage / "global_step2"))


@pytest.mark.nightly("test_what_the_agent_signs_is_read_and_nothing_else")
def test_openssfs_verifier_accepts_the_bundle_of_a_directory(place, keys):
    verifying = pytest.importorskip("model_signing.verifying")
    exported = place.root / "exported"
    (exported / "sub").mkdir(parents=True)
    (exported / "config.json").write_text("{}")
    (exported / "sub" / "model.safetensors").write_bytes(os.urandom(3 << 20))
    (exported / ".gitattributes").write_text("not part of it")
    key = place.root / "bundle"
    nebula("sign", "--new-key", key, "--p256")
    nebula("sign", "--bundle", exported, "--key", key)

    def verify() -> None:
        verifying.Config().use_elliptic_key_verifier(public_key=f"{key}.pub").verify(exported, exported / "model.sig")

    verify()
    nebula("sign", "--bundle", exported, "--key", key)  # again: the older one goes
    verify()
    (exported / "config.json").write_text("{ }")
    with pytest.raises(ValueError, match=r"config\.json"):
        verify()
    assert "P-256" in nebula("sign", "--bundle", exported, "--key", keys.make("ed"), ok=False).stderr
    (exported / "link").symlink_to("/etc/passwd")
    assert "no regular file" in nebula("sign", "--bundle", exported, "--key", key, ok=False).stderr


def test_memory_answers_no_session_whose_policy_cannot_be_applied(place, keys):
    keys.make("key")
    save(place, "global_step1", 1.0)
    nm.init(str(place.storage), 0, 2, signatures="off")
    found = nm.get_latest_checkpoint()
    assert float(found.load("model.pt")["value"][0]) == 1.0
    nm.init(signatures="require")  # the same agent, whose memory has the file
    engine.default.session(patient=True)
    (place.root / "trusted").chmod(0o666)  # another user may have changed it since, so storage is not opened
    with pytest.raises(NebulaError, match="open to other users"):
        found.load("model.pt")


def test_a_key_that_cannot_be_made_whole_is_not_in_the_way_of_the_next_try(place, keys):
    key, public = place.root / "key", place.root / "key.pub"
    public.write_text("of another key")
    assert "it exists" in nebula("sign", "--new-key", key, ok=False).stderr
    assert not key.exists() and public.read_text() == "of another key"
    public.unlink()
    nebula("sign", "--new-key", key)
    full = place.root / "full"

    def no_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))

    program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    assert subprocess.run([program, "sign", "--new-key", full], preexec_fn=no_room, capture_output=True, timeout=120).returncode == 4
    assert not full.exists()
    nebula("sign", "--new-key", full)


def test_two_changes_of_the_trusted_keys_at_once_lose_none(place, keys):
    keys.make("first")
    second = keys.make("second", trust=False)
    program = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    trusted = place.root / "trusted"
    directory = os.open(place.root, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # as another command that changes the list
        changing = subprocess.Popen([program, "sign", "--trust", f"{second}.pub"], stdout=subprocess.DEVNULL)
        with pytest.raises(subprocess.TimeoutExpired):
            changing.wait(2)
        trusted.write_text((place.root / "first.pub").read_text() + (keys.make("third", trust=False).with_suffix(".pub")).read_text())
    finally:
        os.close(directory)
    assert changing.wait(60) == 0
    assert len(json.loads(nebula("sign", "--trusted", "--json").stdout)["trusted"]) == 3


@pytest.mark.nightly("test_two_changes_of_the_trusted_keys_at_once_lose_none")
def test_more_trusted_keys_than_are_read_are_refused_and_the_list_stays(place, keys):
    keys.make("key0")
    pem = "".join((keys.make(f"key{number}", trust=False).with_suffix(".pub")).read_text() for number in range(1, 64))
    (place.root / "many.pub").write_text(pem)
    nebula("sign", "--trust", place.root / "many.pub")
    before = (place.root / "trusted").read_text()
    nebula("sign", "--trust", place.root / "many.pub")  # those that are trusted already take no room
    told = nebula("sign", "--trust", keys.make("key64", trust=False).with_suffix(".pub"), ok=False)
    assert told.returncode == 2 and "no room for more trusted keys" in told.stderr
    assert (place.root / "trusted").read_text() == before
    nebula("sign", "--distrust", keys.id("key0"))
