"""`nebula verify --sample, --bytes, --time`: a part of the versions at a time, and the time of each check is remembered in storage."""

import json
import os
import pathlib
import subprocess
import time

import pytest


@pytest.fixture
def four(make):
    """Makes four versions with two files of one chunk each."""
    for step in (1, 2, 3, 4):
        store = make(f"global_step{step}", f"a.pt={1000 * step}", f"b.pt={1000 * step + 7}")
    return store


def listed(run, store):
    return {one["step"]: one for one in json.loads(run("list", "--path", store, "--json").stdout)["versions"]}


def sample(run, store, *words, code=0):
    done = run("verify", *words, "--json", "--path", store)
    assert done.returncode == code, done.stderr
    told = json.loads(done.stdout)
    return [(one["tag"][11:], [file["name"] for file in one["files"]]) for one in told["versions"]], told["sample"]


def test_samples_go_on_where_the_last_one_stopped_until_all_were_verified_and_then_begin_with_the_oldest(run, four):
    assert sample(run, four, "--bytes", "1K") == ([("1", ["a.pt"])], {"version_count": 4, "bytes": pytest.approx(0, abs=1 << 30), "never_verified_count": 3, "oldest_at": 0.0})
    assert listed(run, four)[1]["verified_at"] is None, "half of it was checked"
    assert sample(run, four, "--bytes", "1K")[0] == [("1", ["b.pt"])]
    assert listed(run, four)[1]["verified_ok"] is True
    seen, told = sample(run, four, "--sample", "100%")
    assert [tag for tag, _ in seen] == ["2", "3", "4", "1"] and told["never_verified_count"] == 0
    assert "all were verified" in run("verify", "--sample", "1%", "--path", four).stdout
    assert sample(run, four, "--time", "1h")[0][0] == ("2", ["b.pt"]), "the last sample had read one file of it"


def test_the_time_of_a_check_is_stored_and_listed_and_a_new_writing_of_the_tag_was_not_checked(run, four, make):
    before = time.time()
    assert run("verify", "global_step2", "--path", four).returncode == 0
    row = listed(run, four)[2]
    assert before - 2 <= row["verified_at"] <= time.time() and row["verified_ok"]
    assert run("verify", "global_step3", "--path", four / "global_step3" / "a.pt").returncode != 2
    assert listed(run, four)[3]["verified_at"] is None, "one file is not the version"
    table = run("list", "--path", four).stdout
    assert "VERIFIED" in table and "never" in table
    make("global_step2", "a.pt=5000", "--writing", "2")
    assert listed(run, four)[2]["verified_at"] is None


# fault (The machine and other users): The clock of the node that verifies is years ahead, once.
# result: The versions are verified again when they are due by a right clock. Damage that was found then stays known.
def test_a_check_by_a_clock_that_is_ahead_does_not_end_all_later_checks(run, four, tmp_path):
    clock = tmp_path / "clock.so"
    source = pathlib.Path(__file__).parents[1] / "doubles/os/stepped_clock.c"
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", clock, source], check=True)
    ahead = tmp_path / "ahead"
    ahead.write_text(str(1000 * 86400))
    (four / "global_step3/b.pt").write_bytes(b"")
    assert run("verify", "--all", "--path", four, LD_PRELOAD=str(clock), NEBULA_TEST_CLOCK=str(ahead)).returncode == 1
    rows = listed(run, four)
    assert all(row["verified_at"] == pytest.approx(row["committed_at"]) for row in rows.values()), "the time of the commit"
    assert [step for step, row in rows.items() if not row["verified_ok"]] == [3]
    assert [step for step, _ in sample(run, four, "--every", "1ms", code=1)[0]] == ["1", "2", "3", "4"]


def test_damage_is_remembered_and_in_the_metrics(run, four):
    file = four / "global_step3/b.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert run("verify", "--sample", "100%", "--path", four).returncode == 1
    assert [step for step, one in listed(run, four).items() if not one["verified_ok"]] == [3]
    assert "DAMAGED" in run("list", "--path", four).stdout
    page = run("metrics", "--path", four).stdout
    assert "\nnebula_checkpoints_damaged 1\n" in page and "nebula_checkpoint_verified_timestamp_seconds 1" in page


def test_a_list_of_checks_that_cannot_be_read_counts_as_empty_and_is_written_again(run, four):
    file = pathlib.Path(four, ".nebula/verified.json")
    assert run("verify", "--all", "--path", four).returncode == 0
    for content in (b"", b"{}", b"\xff" * 100, file.read_bytes().replace(b"true", b"null")):
        file.write_bytes(content)
        assert all(one["verified_at"] is None for one in listed(run, four).values())
    assert run("verify", "--sample", "100%", "--path", four).returncode == 0
    assert all(one["verified_ok"] for one in listed(run, four).values())
    assert run("prune", "--keep-last", "1", "--yes", "--path", four).returncode == 0
    assert run("verify", "--sample", "1%", "--path", four).returncode == 0
    assert list(json.loads(file.read_text())["versions"]) == ["global_step4"], "entries of versions that are gone stay"


def test_a_wrong_sample_is_a_wrong_command_line(run, four):
    for words in ("--sample 5", "--sample 0%", "--sample 101%", "--bytes x", "--time -1", "--sample 5% --all", "--bytes 1G latest"):
        assert run("verify", *words.split(), "--path", four).returncode == 2, words


def spoil(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# fault (Storage): A check of all versions is interrupted.
# result: The next one goes on at that file, and leaves out what was verified a short time ago.
def test_a_scrub_checks_what_was_not_verified_for_so_long_and_goes_on_where_it_was_stopped(run, four):
    assert sample(run, four, "--every", "7d", "--bytes", "1K")[0] == [("1", ["a.pt"])]
    assert sample(run, four, "--every", "7d")[0] == [("1", ["b.pt"]), *((step, ["a.pt", "b.pt"]) for step in "234")]
    assert sample(run, four, "--every", "7d")[0] == [], "all were verified a moment ago"
    assert len(sample(run, four, "--every", "1ms")[0]) == 4
    spoil(four / "global_step2/a.pt")
    assert sample(run, four, "--every", "7d")[0] == [], "nothing is due"
    assert run("verify", "global_step2", "--path", four).returncode == 1
    assert sample(run, four, "--every", "7d", code=1)[0] == [("2", ["a.pt", "b.pt"])], "damage is due until it is repaired"


def test_a_scrub_reads_no_faster_than_its_rate(run, four):
    told = json.loads(run("verify", four, "--every", "7d", "--rate", "200K", "--json").stdout)
    assert told["seconds"] >= told["bytes"] / 200e3 / 2 and told["bytes"] > 50_000  # half: the last pieces of each thread may come at once


# fault (Storage): A file has rotted in storage, and memory, a peer or another storage has the bytes.
# result: `nebula verify --repair` writes them again, after it has compared them with the version's checksums.
def test_damaged_files_are_repaired_from_another_storage(run, four, each_storage, tmp_path):
    other = tmp_path / "copies"
    assert run("copy", four, each_storage, "--all").returncode == 0
    assert run("copy", four, other, "--all").returncode == 0
    files = [path.relative_to(four) for path in sorted(four.glob("*/*.pt"))]
    sound = {name: (four / name).read_bytes() for name in files}
    spoil(four / files[0])
    (four / files[2]).write_bytes(sound[files[2]][:1000])
    (four / files[4]).unlink()
    (four / files[6]).write_bytes(sound[files[6]] + b"more")
    assert run("verify", "--all", "--path", four).returncode == 1
    alone = run("verify", "--all", "--repair", "--path", four)
    assert alone.returncode == 1, "no source is named, and no agent runs"
    assert alone.stderr.count("was not repaired from memory; --from names another storage that has it") == 4
    told = json.loads(run("verify", four, "--every", "7d", "--repair", "--from", each_storage, "--json").stdout)
    assert told["ok"] and sum("repaired" in file for version in told["versions"] for file in version["files"]) == 4
    assert {name: (four / name).read_bytes() for name in files} == sound
    assert run("verify", "--all", "--path", four).returncode == 0
    if "://" not in each_storage:
        return
    spoil(other / files[0])  # a source that is damaged, too, is no source
    spoil(four / files[0])
    in_vain = run("verify", "global_step1", "--repair", "--from", other, "--path", four)
    assert in_vain.returncode == 1 and f"was not repaired from memory, nor from {other}" in in_vain.stderr


# fault (Storage): A manifest or a record has rotted in storage, and another storage has the version.
# result: `nebula verify --repair --from` writes it again. A record must be the one that the manifest names, and a manifest is taken only if the index
# says that the other storage has that version.
def test_damaged_manifests_and_records_are_repaired_from_another_storage(run, four, each_storage):
    assert run("copy", four, each_storage, "--all").returncode == 0
    (record,) = (four / "global_step1/.nebula").glob("*.record-*")
    (lost,) = (four / "global_step2/.nebula").glob("*.record-*")
    (manifest,) = (four / "global_step3/.nebula").glob("manifest-*")
    (its,) = (four / "global_step3/.nebula").glob("*.record-*")
    sound = record.read_bytes(), lost.read_bytes()
    spoil(record)
    lost.unlink()
    spoil(manifest)
    its.unlink()  # so the manifest cannot be made again
    before = listed(run, four)
    assert run("verify", "--all", "--repair", "--path", four).returncode == 1, "no source is named"
    done = run("verify", "--all", "--repair", "--from", each_storage, "--path", four, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["ok"], done
    repaired = [version["tag"] for version in told["versions"] for document in version["documents"] if "repaired" in document]
    assert sorted(repaired) == ["global_step1", "global_step2", "global_step3"]
    assert (record.read_bytes(), lost.read_bytes()) == sound
    assert list(listed(run, four)) == list(before), "the order of the versions stays"
    assert run("verify", "--all", "--path", four).returncode == 0


def test_a_manifest_is_not_repaired_from_another_version_of_its_tag(run, four, make, tmp_path):
    other = tmp_path / "copies"
    assert run("copy", four, other, "--all").returncode == 0
    make("global_step4", "a.pt=4000", "b.pt=5000")  # a newer writing
    (manifest,) = (four / "global_step4/.nebula").glob("manifest-*")
    spoil(manifest)
    (record,) = (four / "global_step4/.nebula").glob("*.record-*")
    record.unlink()  # so it cannot be made again
    kept = manifest.read_bytes()
    assert run("verify", "--all", "--repair", "--from", other, "--path", four).returncode == 1
    assert manifest.read_bytes() == kept


# fault (Storage): A manifest is damaged or missing, and its records and the index, or memory, say what it was.
# result: `nebula verify --repair` makes it again. Else it writes nothing, and says why and what to do. A newer version of the tag stays.
WAYS = [(words, is_missing) for words in ("--all", "--every 7d", "global_step3") for is_missing in (False, True)]
BY_DAY = ("--all", False), ("--every 7d", True)


@pytest.mark.parametrize(("words", "is_missing"), [pytest.param(*one, marks=() if one in BY_DAY else pytest.mark.nightly("test_a_damaged_or_missing_manifest_is_made_again_from_its_records")) for one in WAYS])
def test_a_damaged_or_missing_manifest_is_made_again_from_its_records(run, four, make, is_missing, words):
    words = words.split()
    make("global_step3", "a.pt=4000", "b.pt=5000", "--writing", "2")
    (manifest,) = (four / "global_step3/.nebula").glob("manifest-*")
    before, files = listed(run, four), {path: path.read_bytes() for path in four.glob("*/*.pt")}
    if is_missing:
        manifest.unlink()
    else:
        spoil(manifest)
    done = run("verify", *words, "--path", four)
    assert done.returncode or (is_missing and "its manifest is missing" in done.stderr) or "--every" in words
    done = run("verify", *words, "--repair", "--json", "--path", four)
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["ok"], done
    assert [(one["tag"], document["repaired"]) for one in told["versions"] for document in one["documents"] if "repaired" in document] == [("global_step3", "its records")]
    assert run("verify", "--all", "--path", four).returncode == 0
    after = listed(run, four)
    changed = {(step, name) for step, row in after.items() for name in row if row[name] != before[step][name] and "verified" not in name}
    assert changed == (set() if is_missing else {(3, "entry")})
    assert {path: path.read_bytes() for path in four.glob("*/*.pt")} == files


# fault: as test_a_damaged_or_missing_manifest_is_made_again_from_its_records
def test_manifests_in_each_storage_are_made_again_from_their_records(run, nebula, four, each_storage):
    assert run("copy", four, each_storage, "--all").returncode == 0
    before = listed(run, each_storage)
    requests = [{"do": "put", "key": "global_step2/.nebula/manifest-1.json", "value": "rubbish"}, {"do": "remove", "keys": ["global_step4/.nebula/manifest-1.json"]}]
    told = subprocess.run(
        [nebula, "store", "--path", each_storage], input="".join(json.dumps(one) + "\n" for one in requests), capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0 and "error" not in told.stdout, told
    done = run("verify", "--all", "--repair", "--path", each_storage, "--json")
    assert done.returncode == 0, done
    assert [one["tag"] for one in json.loads(done.stdout)["versions"] for document in one["documents"] if "repaired" in document] == ["global_step2", "global_step4"]
    assert {step: row["sequence"] for step, row in listed(run, each_storage).items()} == {step: row["sequence"] for step, row in before.items()}
    assert run("verify", "--all", "--path", each_storage).returncode == 0


# fault: as test_a_damaged_or_missing_manifest_is_made_again_from_its_records
def test_a_manifest_that_cannot_be_made_again_is_named_with_the_cure(run, four):
    (manifest,) = (four / "global_step3/.nebula").glob("manifest-*")
    (record,) = (four / "global_step3/.nebula").glob("*.record-*")
    spoil(manifest)
    spoil(record)
    kept = manifest.read_bytes()
    done = run("verify", "--all", "--repair", "--path", four)
    assert done.returncode == 1 and manifest.read_bytes() == kept
    assert f"global_step3/.nebula/{manifest.name} cannot be made again" in done.stderr and "--from PATH" in done.stderr


# fault: as test_a_damaged_or_missing_manifest_is_made_again_from_its_records
def test_repairs_at_once_of_which_one_is_killed_leave_one_whole_version(nebula, run, make):
    for look in range(8):
        tag = f"global_step{1 + look}"
        store = make(tag, "a.pt=1000", "b.pt=1007")
        (manifest,) = (store / tag / ".nebula").glob("manifest-*")
        if look % 2:
            spoil(manifest)
        else:
            manifest.unlink()
        command = [nebula, "verify", tag, "--repair", "--path", store]
        three = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(3)]
        time.sleep(0.002 * look)
        three[0].kill()
        for one in three:
            one.wait(60)
        assert run("verify", tag, "--path", store).returncode == 0
        entries = {*(store / tag / ".nebula").glob("manifest-*")}
        # A repair that is killed after it has made its entry leaves the one before to a sweep of the next job.
        assert len(entries) == 1 or (three[0].returncode == -9 and len(entries - {manifest}) == 1)
    assert [len(one["files"]) for one in json.loads(run("verify", "--all", "--json", "--path", store).stdout)["versions"]] == [2] * 8


def test_a_wrong_scrub_is_a_wrong_command_line(run, four):
    for words in ("--rate 0", "--rate x", "--every x", "--from /tmp", "--every 7d --all"):
        assert run("verify", *words.split(), "--path", four).returncode == 2, words


def test_a_damaged_and_a_missing_object_are_repaired_from_a_directory(run, nebula, four, each_storage):
    assert run("copy", four, each_storage, "--all").returncode == 0
    requests = [{"do": "put", "key": "global_step2/a.pt", "value": "rubbish"}, {"do": "remove", "keys": ["global_step3/b.pt"]}]
    told = subprocess.run(
        [nebula, "store", "--path", each_storage], input="".join(json.dumps(one) + "\n" for one in requests), capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0 and "error" not in told.stdout, told
    assert run("verify", "--all", "--path", each_storage).returncode == 1
    done = run("verify", "--all", "--repair", "--from", four, "--path", each_storage, "--json")
    assert done.returncode == 0, done
    repaired = [file["name"] for version in json.loads(done.stdout)["versions"] for file in version["files"] if "repaired" in file]
    assert repaired == ["a.pt", "b.pt"]
    assert run("verify", "--all", "--path", each_storage).returncode == 0
