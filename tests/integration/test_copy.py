"""`nebula copy` between directories and an emulator of Azure Blob Storage."""

import json
import os
import pathlib
import signal
import subprocess
import time

import pytest
from test_cli import ask
from test_object_stores import STORES

torch = pytest.importorskip("torch")

HOSTILE = "ev/il\033[31m<b>\u202e"


def lines(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def results(result):
    return {line["tag"]: line["result"] for line in lines(result) if line.get("event") == "version"}


def rewrite(path: pathlib.Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("each_storage", ["directory", "azure", *(pytest.param(name, marks=pytest.mark.nightly) for name in STORES if name != "azure")], indirect=True)
def test_all_versions_arrive_verified_and_are_not_copied_again(run, make, each_storage, tmp_path):
    make("global_step10", "model.pt=50000")
    make("global_step20", "model.pt=1000", "optim.pt=200000")
    make("global_step20", "--writing", "2", "model.pt=1001")  # optim.pt carries over
    store = make(HOSTILE, "--raw", "notes.txt", "a b/ü.pt=40")
    first = run("copy", store, each_storage, "--all", "--json")
    assert first.returncode == 0, first.stderr
    assert results(first) == {"global_step10": "copied", "global_step20": "copied", HOSTILE: "copied"}
    assert lines(first)[-1]["event"] == "end" and lines(first)[-1]["copied_count"] == 3
    listed = json.loads(run("list", "--path", each_storage, "--json").stdout)["versions"]
    before = json.loads(run("list", "--path", store, "--json").stdout)["versions"]
    # A copy writes files that the original had carried over.
    assert [row.pop("written") for row in listed] == [row["size"] for row in listed]
    assert all(row.pop("written") <= row["size"] for row in before)
    assert [row.pop("entry") for row in before] != [row.pop("entry") for row in listed] == [1, 1, 1]  # the copy has a log of its own
    assert listed == before
    checked = run("verify", "--all", "--path", each_storage)
    assert checked.returncode == 0 and "no damage" in checked.stdout
    assert set(results(run("copy", store, each_storage, "--all", "--json")).values()) == {"present"}
    assert run("copy", each_storage, tmp_path / "back", "--all").returncode == 0
    for path in [*store.glob("global*/*.pt"), *store.glob("ev*/*.pt")]:
        assert (tmp_path / "back" / path.relative_to(store)).read_bytes() == path.read_bytes()
    assert torch.load(tmp_path / "back/global_step20/model.pt")["a"].shape == (1001,)
    assert (tmp_path / "back/latest").read_text() == "ev%2Fil%1B[31m<b>\u202e\n"


def test_verify_takes_the_place_of_a_storage_a_version_or_a_file(run, make, each_storage):
    run("copy", make("global_step1", "model.pt=1000", "optim.pt=1000"), each_storage)
    for place, files in (("", 2), ("/", 2), ("/global_step1", 2), ("/global_step1/", 2), ("/global_step1/optim.pt", 1)):
        checked = run("verify", each_storage + place)
        assert checked.returncode == 0 and f"in {files} file" in checked.stdout, (place, checked)
    above = run("verify", each_storage.rsplit("/", 1)[0])
    # several accounts: an object's account follows from its name below the storage path, so from above it may be looked for in another one
    hint = "" if "," in each_storage else f"{each_storage.rsplit('/', 1)[1]} was not checked: it is no checkpoint but a storage path"
    assert above.returncode == 3 and hint in above.stderr, above
    missing = run("verify", each_storage + "/global_step2")
    assert missing.returncode == 3 and "global_step2" in missing.stderr


def test_people_see_neither_control_bytes_nor_a_progress_line_in_a_pipe(run, make, storage):
    store = make(HOSTILE, "m.pt=100000")
    told = run("copy", store, storage)
    assert told.returncode == 0 and told.stderr == ""
    assert "\033" not in told.stdout and "ev/il?[31m<b>" in told.stdout and "copied, verified" in told.stdout


def test_another_version_of_a_tag_is_replaced_only_when_told(run, make, storage, tmp_path):
    store = make("best", "model.pt=5000")
    make("other", "model.pt=70")
    run("copy", store, storage, "--tag", "best")
    newer = tmp_path / "newer"
    make("best", "model.pt=6000", store=newer)
    make("aaa", "model.pt=10", store=newer)
    refused = run("copy", newer, storage, "--all")
    assert refused.returncode == 5 and "another version" in refused.stderr and "--replace" in refused.stderr
    assert [one["tag"] for one in json.loads(run("list", "--path", storage, "--json").stdout)["versions"]] == [
        "best"
    ]  # not even "aaa"
    assert run("copy", newer, storage, "--all", "--replace").returncode == 0
    run("restore", "best", "--to", tmp_path / "out", "--path", storage)
    assert torch.load(tmp_path / "out/model.pt")["a"].shape == (6000,)
    assert run("verify", "--all", "--path", storage).returncode == 0
    assert results(run("copy", newer, storage, "--all", "--json", "--replace")) == {"best": "present", "aaa": "present"}


def test_a_removed_version_can_be_copied_again(run, make, storage):
    make("global_step1", "model.pt=5000")
    store = make("global_step2", "model.pt=10")
    for _ in range(2):
        assert run("copy", store, storage, "--all").returncode == 0
        assert run("verify", "--all", "--path", storage).returncode == 0
        assert run("prune", "--tag", "global_step1", "--yes", "--path", storage).returncode == 0


def test_a_copy_whose_file_is_gone_is_not_taken_for_whole(run, make, tmp_path):
    store = make("global_step1", "model.pt=5000", "optim.pt=10")
    copied = tmp_path / "copied"
    assert run("copy", store, copied).returncode == 0
    for spoil in (lambda path: path.unlink(), lambda path: os.truncate(path, 100)):
        spoil(next(copied.rglob("model.pt")))
        refused = run("copy", store, copied)
        assert refused.returncode == 5 and "--replace" in refused.stderr
        assert run("copy", store, copied, "--replace").returncode == 0
        assert run("verify", "--all", "--path", copied).returncode == 0
        assert results(run("copy", store, copied, "--json")) == {"global_step1": "present"}


def test_a_damaged_source_is_named_and_nothing_of_it_counts(run, make, storage):
    make("global_step1", "--chunk", "4096", "model.pt=1000")
    store = make("global_step2", "--chunk", "4096", "model.pt=9000", "optim.pt=10")
    rewrite(store / "global_step2/model.pt", 20000)
    failed = run("copy", store, storage, "--all", "--json")
    assert failed.returncode == 1
    assert lines(failed)[-1]["error"]["status"] == "corrupt" and "between byte 16384 and 20480" in failed.stderr
    assert [one["tag"] for one in json.loads(run("list", "--path", storage, "--json").stdout)["versions"]] == [
        "global_step1"
    ]


@pytest.mark.parametrize("damage", ["a byte", "a file", "a record"])
def test_a_damaged_version_does_not_keep_the_others_from_being_copied(run, make, storage, damage):
    for step in (1, 2, 3):
        store = make(f"global_step{step}", "model.pt=1000")
    place = store / "global_step2"
    if damage == "a byte":
        rewrite(place / "model.pt", 2000)
    else:
        [one.unlink() for one in place.glob("model.pt" if damage == "a file" else ".nebula/*.record-*")]
    for first in (True, False):
        told = run("copy", store, storage, "--all")
        assert told.returncode == 1 and "global_step2" in told.stderr, told
        assert told.stdout.count("not copied: damaged") == 1 and told.stdout.count("copied, verified") == 2 * first
        versions = json.loads(run("list", "--path", storage, "--json").stdout)["versions"]
        assert [one["tag"] for one in versions] == ["global_step1", "global_step3"]
    said = lines(run("copy", store, storage, "--all", "--json"))
    assert [one["result"] for one in said[:-1]] == ["present", "damaged", "present"] and "error" in said[-1]
    assert run("verify", "--all", "--path", storage).returncode == 0


def test_a_copy_that_was_killed_goes_on_with_the_files_that_are_missing(run, make, storage, nebula, tmp_path):
    """The speed is limited, so that the kill comes when the first file exists and the second does not."""
    store = make("global_step1", "a.pt=250000", "b.pt=2000000")
    environment = os.environ | {"NEBULA_STORE_MBPS": "0.25"}  # a second for the first file, eight for the second
    copying = subprocess.Popen([nebula, "copy", str(store), storage], env=environment, stdout=subprocess.DEVNULL)
    begun = time.monotonic()
    while time.monotonic() - begun < 30 and not first_is_there(run, storage, tmp_path):
        time.sleep(0.05)
    copying.send_signal(signal.SIGKILL)
    copying.wait()
    assert json.loads(run("list", "--path", storage, "--json").stdout)["versions"] == []
    before = first_is_there(run, storage, tmp_path)
    assert before, "the first file did not arrive before the kill"
    done = run("copy", store, storage)
    assert done.returncode == 0, done.stderr
    assert first_is_there(run, storage, tmp_path) == before
    assert run("verify", "--all", "--path", storage).returncode == 0


def first_is_there(run, storage, tmp_path):
    """Returns an identity of the stored a.pt, which another writing changes. None: the file does not exist."""
    if not storage.startswith("az"):
        path = pathlib.Path(storage) / "global_step1/a.pt"
        return path.stat().st_ino if path.exists() else None
    import urllib.error
    import urllib.request

    import azure_requests

    try:
        with urllib.request.urlopen(
            azure_requests.signed("HEAD", storage.split("/", 3)[3] + "/global_step1/a.pt"), timeout=30
        ) as answer:
            return answer.headers["ETag"]
    except urllib.error.HTTPError:
        return None


def test_the_copy_is_the_newest_there_only_if_it_is_the_newest(run, make, storage, tmp_path):
    newer, older = tmp_path / "newer", tmp_path / "older"
    make("global_step5", "m.pt=5", store=older)
    make("global_step9", "m.pt=9", store=newer)
    run("copy", newer, storage)
    run("copy", older, storage)
    assert run("inspect", "latest", "--path", storage, "--json").stdout.find('"global_step9"') > 0
    if not storage.startswith("az"):
        assert (pathlib.Path(storage) / "latest").read_text() == "global_step9\n"


def test_two_copies_at_once_make_one_version(run, make, storage, nebula):
    store = make("global_step1", "a.pt=250000", "b.pt=300000", "c.pt=10")
    copying = [
        subprocess.Popen(
            [nebula, "copy", str(store), storage], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    told = [one.communicate(timeout=60) for one in copying]
    assert [one.returncode for one in copying] == [0, 0, 0], told
    assert run("verify", "--all", "--path", storage).returncode == 0
    assert run("copy", store, storage, "--json").stdout.count('"present"') >= 1


@pytest.mark.parametrize("places", [("absent", "d"), ("store", "nope://x"), ("nope://x", "d")])
def test_a_wrong_place_is_one_sentence(run, make, places, tmp_path):
    make("t", "a.pt=10")
    failed = run("copy", *places, "--json")
    assert failed.returncode in (2, 3, 4) and failed.stderr.count("\n") == 1 and "error" in lines(failed)[0]
    assert not (tmp_path / "d").exists()


def test_bytes_that_were_added_to_a_file_are_damage_for_every_command(run, make, each_storage, nebula, tmp_path):
    run("copy", make("global_step1", "model.pt=1000", "--raw", "notes.txt"), each_storage)
    key = "global_step1/notes.txt"
    notes = ask(nebula, each_storage, {"do": "get", "key": key})[0]["value"]
    assert "stamp" in ask(nebula, each_storage, {"do": "put", "key": key, "value": notes + "more"})[0]
    words = f"notes.txt: has {len(notes) + 4} bytes, it should have {len(notes)}: something was added"
    for command in (
        ["verify", each_storage],
        ["copy", each_storage, tmp_path / "copy"],
        ["restore", "latest", "--path", each_storage, "--to", "out"],
    ):
        told = run(*command)
        assert told.returncode == 1 and words in told.stdout + told.stderr, (command, told)
    assert not (tmp_path / "copy/latest").exists() and not (tmp_path / "out/notes.txt").exists()
