"""The `nebula` command on storage that C has written, with flipped bytes in every region, and files that torch loads again."""

import contextlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

import fork_server
import pytest
from processes import stop
from waiting import until

torch = pytest.importorskip("torch")


def flip(path: pathlib.Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_nebula_alone_prints_the_overview_and_every_command_has_help(run):
    overview = run()
    assert overview.returncode == 0
    for command in [
        "status",
        "list",
        "inspect",
        "verify",
        "restore",
        "diff",
        "trace",
        "metrics",
        "goodput",
        "pin",
        "unpin",
        "prune",
        "copy",
        "doctor",
        "flush",
        "plan",
        "studio",
        "stop",
        "agent",
        "store",
        "version",
        "help",
    ]:
        assert f"\n  {command}" in overview.stdout
        told = run(command, "--help")
        assert (
            told.returncode == 0 and told.stdout.startswith("usage: nebula " + command) and "\n  nebula " in told.stdout
        )
        assert run("help", command).stdout == told.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["lst"],
        ["list", "--jsn"],
        ["list", "extra"],
        ["inspect"],
        ["restore", "t"],
        ["prune"],
        ["prune", "--keep-last", "0"],
        ["copy", "a"],
        ["copy", "a", "b", "--tag", "t", "--all"],
        ["prune", "--keep-last", "1", "--tag", "t"],
        ["status", "--watch", "--json"],
        ["status", "--watch", "--serve"],
        ["metrics", "--listen", "0", "--textfile", "x"],
        ["metrics", "--every", "5"],
        ["metrics", "--textfile", "x", "--every", "31536001"],
        ["flush", "--timeout", "999999999999999999"],
        ["stop", "--timeout", "999999999999999999"],
        ["prune", "--keep-last", "4294967296"],
        ["verify", "--all", "t"],
        ["list"],
    ],
)
def test_a_wrong_command_line_is_exit_2_with_one_sentence(run, arguments):
    result = run(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("nebula: ") and result.stderr.count("\n") == 1


def test_version_names_formats_and_protocol(run):
    told = json.loads(run("version", "--json").stdout)
    assert told["formats"] == "2.0" and told["nebula"] in run("--version").stdout


def test_a_path_that_is_a_file_is_no_empty_storage(run, tmp_path):
    (tmp_path / "store").write_text("x")
    result = run("list", "--path", tmp_path / "store")
    assert result.returncode and "Not a directory" in result.stderr


def test_list_shows_versions_oldest_first_in_both_forms(run, make):
    make("global_step10", "model.pt=1000")
    store = make("global_step20", "model.pt=50000", "optim.pt=10")
    result = run("list", "--path", store)
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and lines[0].split() == ["TAG", "STEP", "STATE", "SIZE", "FILES", "AGE", "WHERE"]
    assert lines[1].split()[0] == "global_step10" and lines[2].split()[:3] == ["global_step20", "20", "durable"]
    assert all(len(line) <= 80 and line == line.rstrip() and "\033" not in line for line in lines)
    told = json.loads(run("list", "--json", "--path", store).stdout)
    assert [version["tag"] for version in told["versions"]] == ["global_step10", "global_step20"]
    assert told["versions"][1]["file_count"] == 2 and told["versions"][1]["where"] == ["storage"]


def test_storage_is_found_by_option_environment_or_current_directory(run, make, tmp_path):
    store = make("t", "a=10")
    assert "t " in run("list", cwd=store).stdout
    assert "t " in run("list", NEBULA_PERSISTENT_STORAGE_PATH=str(store)).stdout
    assert "t " in run("list", "--path", "store").stdout  # relative
    assert run("list", "--path", tmp_path / "absent").returncode in (3, 4)
    assert run("list", cwd=tmp_path).returncode == 2


def test_inspect_shows_files_ranks_and_the_records_of_one_file(run, make):
    store = make("global_step7", "model.pt=50000", "--raw", "notes.txt", "--rank", 3)
    told = json.loads(run("inspect", "latest", "--json", "--path", store).stdout)
    assert told["step"] == 7 and told["world"] == 4 and [rank["rank"] for rank in told["ranks"]] == [3]
    files = {file["name"]: file for file in told["files"]}
    assert (
        files["model.pt"]["format"] == "zip"
        and files["model.pt"]["chunk_count"] == 4
        and files["notes.txt"]["format"] == "raw"
    )
    with zipfile.ZipFile(store / "global_step7/model.pt") as archive:
        expected = {info.filename: info.CRC for info in archive.infolist()}
    records = json.loads(run("inspect", "global_step7", "model.pt", "--json", "--path", store).stdout)["records"]
    assert {record["name"]: int(record["crc32"], 16) for record in records} == expected
    human = run("inspect", "global_step7", "--path", store)
    assert human.returncode == 0 and "model.pt" in human.stdout and "RANK" in human.stdout
    assert run("inspect", "nope", "--path", store).returncode == 3
    assert run("inspect", "global_step7", "nope", "--path", store).returncode == 3


def test_verify_of_a_sound_version_reads_every_byte(run, make):
    store = make("t", "model.pt=50000", "--raw", "notes.txt")
    result = run("verify", "--path", store)
    assert result.returncode == 0 and "no damage" in result.stdout
    told = json.loads(run("verify", "t", "--json", "--path", store).stdout)
    size = sum((store / "t" / name).stat().st_size for name in ("model.pt", "notes.txt"))
    assert told["ok"] and told["bytes"] == size and told["file_count"] == 2


def regions(path: pathlib.Path) -> dict[str, int]:
    """Returns one offset in each kind of region of a zip image."""
    with zipfile.ZipFile(path) as archive:
        pickle = archive.getinfo("archive/data.pkl")
        storage = archive.getinfo("archive/data/0")
        directory = archive.start_dir
    size = path.stat().st_size
    return {
        "first header": 0,
        "name in a header": storage.header_offset + 32,
        "padding": pickle.header_offset + 50,
        "pickle": pickle.header_offset + 100,
        "payload": storage.header_offset + 5000,
        "last payload": directory - 40,
        "directory": directory + 20,
        "end of directory": size - 3,
    }


# fault: as test_a_flipped_byte_in_any_region_of_a_file_is_found_and_the_older_version_loads
def test_verify_names_file_and_offset_of_a_flipped_byte_in_every_region(run, make, tmp_path):
    store = make("t", "model.pt=50000", "other.pt=10")
    path = store / "t/model.pt"
    whole = path.read_bytes()
    for region, offset in regions(path).items():
        flip(path, offset)
        result = run("verify", "t", "--json", "--path", store)
        assert result.returncode == 1, region
        told = json.loads(result.stdout)
        bad = [file for file in told["versions"][0]["files"] if not file["ok"]]
        assert [file["name"] for file in bad] == ["model.pt"], region
        (damage,) = bad[0]["damage"]
        assert damage["offset"] <= offset < damage["offset"] + damage["size"] <= len(whole), region
        assert damage["size"] <= 65536 and "t/model.pt" in damage["message"]
        if region == "payload":
            assert damage["record_names"] == ["archive/data/0"]
        human = run("verify", "t", "--path", store)
        assert (
            human.returncode == 1
            and f"model.pt at byte {damage['offset']}" in human.stdout
            and "1 damaged" in human.stdout
        )
        path.write_bytes(whole)
    assert run("verify", "t", "--path", store).returncode == 0


def test_verify_tells_all_damage_and_not_only_the_first(run, make):
    store = make("t", "a.pt=100000", "b.pt=100000")
    flip(store / "t/a.pt", 70000)
    flip(store / "t/a.pt", 300000)
    flip(store / "t/b.pt", 10)
    files = json.loads(run("verify", "t", "--json", "--path", store).stdout)["versions"][0]["files"]
    assert {file["name"]: [one["offset"] for one in file["damage"]] for file in files} == {
        "a.pt": [65536, 262144],
        "b.pt": [0],
    }


@pytest.mark.parametrize("change", ["cut", "grown", "missing"])
def test_verify_finds_files_of_another_length_and_missing_ones(run, make, change):
    path = make("t", "model.pt=50000") / "t/model.pt"
    data = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-100] if change == "cut" else data + b"x")
    result = run("verify", "t", "--path", path.parent.parent)
    assert result.returncode == 1 and "model.pt" in result.stdout
    if change == "cut":
        assert f"at byte {len(data) - 100}" in result.stdout


# fault: as test_a_flipped_byte_in_a_manifest_leaves_the_older_version
def test_verify_finds_a_flipped_byte_anywhere_in_record_and_manifest(run, make):
    store = make("t", "model.pt=5000")
    for path in sorted((store / "t/.nebula").glob("*.json")):
        name = path.name
        size = path.stat().st_size
        for offset in {0, 1, size // 3, size // 2, size - 20, size - 1}:
            flip(path, offset)
            for arguments in (["t"], ["--all"]):
                result = run("verify", *arguments, "--json", "--path", store)
                assert result.returncode == 1, (name, offset)
                (version,) = json.loads(result.stdout)["versions"]
                (document,) = [one for one in version["documents"] if not one["ok"]]
                assert document["path"] == ".nebula/" + name and document["damage"][0]["size"] == size
                assert name in document["damage"][0]["message"]
            flip(path, offset)
    assert run("verify", "t", "--path", store).returncode == 0


def test_a_zip_that_was_never_sealed_is_found_although_its_chunks_match(run, make, tmp_path):
    store = make("t", "model.pt=5000")
    lone = tmp_path / "lone.pt"
    torch.save({"x": torch.arange(1000)}, lone)
    sound = run("verify", lone)
    assert sound.returncode == 0 and "no manifest" in sound.stdout
    flip(lone, lone.read_bytes().index(torch.arange(1000).numpy().tobytes()) + 50)
    assert run("verify", lone).returncode == 1
    assert store.exists()


def test_verify_of_all_names_a_version_without_a_manifest(run, make):
    store = make("global_step1", "model.pt=100")
    make("global_step2", "model.pt=100")
    (store / "foreign" / ".nebula").mkdir(parents=True)
    whole = run("verify", "--all", "--path", store)
    (store / "global_step1/.nebula/manifest-1.json").unlink()
    torn = run("verify", "--all", "--path", store)
    assert whole.returncode == torn.returncode == 0 and not whole.stderr
    assert torn.stderr.startswith("nebula: global_step1 was not checked: its manifest is missing; `nebula verify global_step1 --repair`") and torn.stderr.count("\n") == 1


@pytest.mark.parametrize("name", [".nebula", ".nebula/manifest-1.json"])
def test_verify_of_all_calls_a_version_damaged_that_it_cannot_read(run, make, name):
    store = make("global_step1", "model.pt=100")
    make("global_step2", "model.pt=100")
    path = store / "global_step2" / name
    path.rename(store / "away")
    path.symlink_to(path.name)  # leads nowhere, and is no word that nothing is there
    result = run("verify", "--all", "--path", store)
    assert result.returncode == 1 and "1 damaged" in result.stdout and "global_step2/.nebula" in result.stdout


def test_a_newest_version_that_cannot_be_read_is_reported(run, make, tmp_path):
    store = make("global_step1", "model.pt=100")
    make("global_step2", "model.pt=100")
    flip(store / "global_step2/.nebula/manifest-1.json", 5)
    for arguments, code in (
        (["verify"], 1),
        (["verify", "latest"], 1),
        (["restore", "latest", "--to", tmp_path / "out"], 0),
        (["inspect", "latest"], 0),
        (["verify", "global_step1"], 0),
    ):
        result = run(*arguments, "--path", store)
        assert result.returncode == code and "global_step1" in result.stdout
        assert ("skipped" in result.stderr and "global_step2" in result.stderr) == (arguments[-1] != "global_step1")
    told = run("verify", "--json", "--path", store)
    assert told.returncode == 1 and not json.loads(told.stdout)["ok"]


@pytest.mark.parametrize("arguments", [["verify", ""], ["inspect", ""], ["restore", "", "--to", "out"], ["prune", "--tag", ""]])
def test_an_empty_tag_is_a_wrong_command_line(run, make, arguments):
    result = run(*arguments, "--path", make("global_step1", "model.pt=100"))
    assert result.returncode == 2 and ("empty" in result.stderr or "needs a value" in result.stderr)


def test_prune_refuses_the_latest_by_that_word(run, make):
    store = make("global_step1", "model.pt=100")
    for more in ([], ["--yes"]):
        result = run("prune", "--tag", "latest", *more, "--path", store)
        assert result.returncode == 5 and "newest" in result.stderr
    assert (store / "global_step1/model.pt").exists()


BREATH_S = 0.0002  # between two looks at a command, whose work takes a hundred times as long: a test that spins takes the processor from it


def has_open(pid: int, name: str) -> bool:
    for one in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            if os.readlink(one).endswith(name):
                return True
    return False


@pytest.mark.nightly("test_verify_takes_the_newest_that_stands_when_the_newest_is_removed_meanwhile", "test_a_version_that_is_removed_during_a_restore_is_not_found_and_replaces_nothing")
def test_a_version_that_is_removed_during_verify_is_named_and_is_no_damage(nebula, make, tmp_path):
    store = make("global_step1", f"model.pt={16 << 20}", f"optim.pt={16 << 20}")
    make("global_step2", "model.pt=100")
    with subprocess.Popen(
        [nebula, "verify", "--all", "--json", "--path", store], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as verify:
        while not has_open(verify.pid, "model.pt"):
            assert verify.poll() is None, "it was done before it could be held"
            time.sleep(BREATH_S)
        stop(verify.pid)
        for tag in "global_step1", "global_step2":
            shutil.rmtree(store / tag)
        make("global_step3", "model.pt=100", store=store)
        verify.send_signal(signal.SIGCONT)
        out, told = verify.communicate(timeout=60)
    assert told.count("removed or written again meanwhile") == 2 and "global_step1" in told and "global_step2" in told
    assert verify.returncode == 3 and "no checkpoint" in json.loads(out)["error"]["message"]


def test_verify_takes_paths_of_a_file_a_version_and_a_storage(run, make, tmp_path):
    store = make("a/b", "sub/model.pt=50000", "other.pt=10")
    assert json.loads(run("verify", store, "--json").stdout)["file_count"] == 2
    assert json.loads(run("verify", store / "a%2Fb", "--json").stdout)["file_count"] == 2
    one = json.loads(run("verify", store / "a%2Fb/sub%2Fmodel.pt", "--json").stdout)
    assert one["file_count"] == 1 and one["versions"][0]["files"][0]["name"] == "sub/model.pt"
    assert json.loads(run("verify", "a%2Fb/other.pt", "--json", cwd=store).stdout)["file_count"] == 1
    flip(store / "a%2Fb/other.pt", 30)
    assert run("verify", store / "a%2Fb/sub%2Fmodel.pt").returncode == 0  # only the requested file
    assert run("verify", store / "a%2Fb/other.pt").returncode == 1
    assert run("verify", tmp_path / "absent").returncode == 3
    assert run("verify", "absent", "--path", store).returncode == 3


def test_restored_files_are_what_torch_loads(run, make, tmp_path):
    store = make("global_step9", "model.pt=50000", "dir/optim.pt=10", "--raw", "notes.txt")
    out = tmp_path / "out"
    result = run("restore", "latest", "--to", out, "--path", store)
    assert result.returncode == 0 and "verified" in result.stdout and str(out / "model.pt") in result.stdout
    assert sorted(path.name for path in out.iterdir()) == ["dir%2Foptim.pt", "model.pt", "notes.txt"]
    for mmap in (False, True):
        loaded = torch.load(out / "model.pt", mmap=mmap, weights_only=True)
        assert torch.equal(loaded["a"], torch.arange(50000, dtype=torch.float32) + 1) and loaded["b"].tolist() == [
            1,
            2,
            1,
        ]
    assert (out / "model.pt").read_bytes() == (store / "global_step9/model.pt").read_bytes()
    with zipfile.ZipFile(out / "model.pt") as archive:
        assert archive.testzip() is None


def test_restore_overwrites_only_with_force_and_takes_single_files(run, make, tmp_path):
    store = make("t", "model.pt=100", "optim.pt=100")
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.pt").write_text("mine")
    refused = run("restore", "t", "--to", out, "--path", store)
    assert refused.returncode == 5 and "--force" in refused.stderr
    assert (out / "model.pt").read_text() == "mine" and not (out / "optim.pt").exists()
    told = json.loads(run("restore", "t", "optim.pt", "--to", "out", "--json", "--path", store).stdout)
    assert [file["name"] for file in told["files"]] == ["optim.pt"] and told["source"] == "storage"
    assert run("restore", "t", "--to", out, "--force", "--path", store).returncode == 0
    assert torch.load(out / "model.pt")["b"].tolist() == [1, 2, 1]
    assert run("restore", "t", "absent.pt", "--to", out, "--path", store).returncode == 3
    assert run("restore", "none", "--to", out, "--path", store).returncode == 3


def test_restore_never_hands_out_damaged_bytes(run, make, tmp_path):
    store = make("t", "model.pt=50000")
    flip(store / "t/model.pt", 100000)
    out = tmp_path / "out"
    result = run("restore", "t", "--to", out, "--path", store)
    assert result.returncode == 1 and "model.pt" in result.stderr and "65536" in result.stderr
    assert list(out.iterdir()) == []


def test_a_restore_that_fails_leaves_what_was_there(run, make, tmp_path):
    store = make("t", "a.pt=100", "b.pt=50000")
    out = tmp_path / "out"
    assert run("restore", "t", "--to", out, "--path", store).returncode == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    make("t", "a.pt=200", "b.pt=50000", "--writing", 2)
    flip(store / "t/b.pt", 100000)
    assert run("restore", "t", "--to", out, "--force", "--path", store).returncode == 1
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_directory_in_the_way_stops_a_restore_before_it_replaces_a_file(run, make, tmp_path):
    store = make("t", "a.pt=100", "b.pt=200")
    out = tmp_path / "out"
    (out / "b.pt").mkdir(parents=True)
    (out / "a.pt").write_text("before")
    told = run("restore", "t", "--to", out, "--force", "--path", store)
    assert told.returncode == 5 and f"{out}/b.pt is a directory" in told.stderr
    assert sorted(path.name for path in out.iterdir()) == ["a.pt", "b.pt"] and (out / "a.pt").read_text() == "before"


# fault (The machine and other users): The limit of the size of files (`ulimit -f`) is smaller than a file that a command writes.
# result: The command says so and leaves nothing behind.
def test_a_file_larger_than_the_limit_of_files_is_an_error_and_leaves_nothing(nebula, make, tmp_path):
    store = make("t", "a.pt=100", "b.pt=50000")

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    line = [nebula, "restore", "t", "--to", tmp_path / "out", "--path", store]
    told = subprocess.run(line, preexec_fn=limited, capture_output=True, text=True, timeout=60)
    assert told.returncode == 4 and "b.pt: File too large" in told.stderr
    assert list((tmp_path / "out").iterdir()) == []


WRITES_AGAIN_AND_AGAIN = """
import torch, nebulaml as nm
nm.init("store", persistent_time_interval=3600)
for turn in range(1, 10_000):
    checkpoint = nm.Checkpoint("best")
    for name in "abcdef":
        checkpoint.save(name, torch.full((100_000,), float(turn)))
    checkpoint.commit()
    print(turn, flush=True)
"""


def test_a_tag_that_is_written_again_and_again_is_restored_whole_or_not_at_all(run, tmp_path):
    """The restore reads from memory: the agent keeps two writings of the tag, and a restore takes longer than a save."""
    places = {"NEBULA_RUNTIME_DIR": str(tmp_path / "runtime"), "NEBULA_MEMORY_DIR": str(tmp_path / "memory")}
    whole = 0
    with fork_server.start(WRITES_AGAIN_AND_AGAIN, cwd=tmp_path, env=os.environ | places) as trainer:
        try:
            assert trainer.stdout.readline() == "1\n"
            threading.Thread(target=trainer.stdout.read, daemon=True).start()
            deadline = time.monotonic() + 60
            turns = 0
            least = 10 if os.environ.get("NEBULA_TEST_NIGHTLY") else 4
            while turns < least or not whole:  # a restore on a loaded machine may always be too slow for so many turns
                assert time.monotonic() < deadline, "no restore was whole"
                turns += 1
                out = tmp_path / f"out{turns}"
                result = run("restore", "best", "--to", out, "--path", tmp_path / "store")
                assert result.returncode in (0, 3), result.stderr
                found = {float(torch.load(path)[0]) for path in out.iterdir()} if out.exists() else set()
                assert len(found) == (1 if result.returncode == 0 else 0), found
                whole += result.returncode == 0
        finally:
            trainer.kill()
    run("stop", "--now", "--yes")


def run_only_when_others_wait() -> None:
    """Lets this process run only while the test waits. So the test sees each state of it, on a loaded machine too."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def run_as_others(pid: int) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended, or a signal has ended the process
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


@pytest.fixture
def held(nebula, tmp_path):
    """Runs a command, stops it while it reads the file `name`, calls `meanwhile`, and lets the command end."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NEBULA_")}
    environment |= {"NEBULA_RUNTIME_DIR": str(tmp_path / "runtime"), "NEBULA_MEMORY_DIR": str(tmp_path / "memory")}

    def call(name, meanwhile, *arguments):
        with subprocess.Popen(
            [nebula, *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=run_only_when_others_wait,
        ) as process:
            while not has_open(process.pid, name):
                assert process.poll() is None, "it was done before it could be held"
                time.sleep(BREATH_S)
            process.send_signal(signal.SIGSTOP)
            run_as_others(process.pid)
            stop(process.pid)
            meanwhile()
            process.send_signal(signal.SIGCONT)
            out, told = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, told)

    return call


LONG = f"a.pt={16 << 20}"  # long enough to be held while it is read


SIGNALS = [(number, ignored) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) for ignored in (False, True)]
BY_DAY = (signal.SIGTERM, False), (signal.SIGHUP, True)


@pytest.mark.parametrize(("number", "ignored"), [pytest.param(*one, marks=() if one in BY_DAY else pytest.mark.nightly("test_a_restore_that_a_signal_ends_leaves_no_half_file")) for one in SIGNALS])
def test_a_restore_that_a_signal_ends_leaves_no_half_file(nebula, make, tmp_path, number, ignored):
    store = make("best", LONG, "b.pt=100")
    out = tmp_path / "out"
    handling = signal.SIG_IGN if ignored else signal.SIG_DFL  # as nohup does, below which the tests may run themselves
    command = [nebula, "restore", "best", "--to", out, "--path", store]

    def prepare() -> None:
        signal.signal(number, handling)
        run_only_when_others_wait()

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=prepare) as process:
        while not list(out.glob(".nebula-restore-*")):
            assert process.poll() is None, "it was done before it could be ended"
            time.sleep(BREATH_S)
        process.send_signal(number)
        run_as_others(process.pid)
        assert process.wait(timeout=60) == (0 if ignored else -number)
    assert sorted(path.name for path in out.iterdir()) == (["a.pt", "b.pt"] if ignored else [])


@pytest.mark.parametrize("tag", [pytest.param("best", marks=pytest.mark.nightly("test_a_version_that_is_written_again_during_a_restore_is_searched_again")), "latest"])
def test_a_version_that_is_written_again_during_a_restore_is_searched_again(held, make, tmp_path, tag):
    store = make("best", LONG, "b.pt=100")
    out = tmp_path / "out"
    again = lambda: make("best", "a.pt=7", "b.pt=7", "--writing", 2)  # noqa: E731
    result = held("best/a.pt", again, "restore", tag, "--to", out, "--path", store)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in out.iterdir()) == ["a.pt", "b.pt"]
    for path in out.iterdir():
        assert path.read_bytes() == (store / "best" / path.name).read_bytes()


def test_a_version_that_is_removed_during_a_restore_is_not_found_and_replaces_nothing(held, run, make, tmp_path):
    store = make("best", "small.pt=100", LONG)
    out = tmp_path / "out"
    out.mkdir()
    (out / "small.pt").write_text("of an earlier restore")
    result = held("best/a.pt", lambda: shutil.rmtree(store / "best"), "restore", "best", "--to", out, "--force", "--path", store)
    assert result.returncode == 3 and "no complete checkpoint" in result.stderr
    assert [path.name for path in out.iterdir()] == ["small.pt"]
    assert (out / "small.pt").read_text() == "of an earlier restore"


@pytest.mark.parametrize("word", [pytest.param([], marks=pytest.mark.nightly("test_verify_takes_the_newest_that_stands_when_the_newest_is_removed_meanwhile")), ["latest"]])
def test_verify_takes_the_newest_that_stands_when_the_newest_is_removed_meanwhile(held, make, tmp_path, word):
    store = make("global_step1", "a.pt=100")
    make("global_step2", LONG)
    result = held("global_step2/a.pt", lambda: shutil.rmtree(store / "global_step2"), "verify", *word, "--json", "--path", store)
    assert result.returncode == 0, result.stderr
    assert [version["tag"] for version in json.loads(result.stdout)["versions"]] == ["global_step1"]


@pytest.mark.parametrize("words", [*(pytest.param(one, marks=pytest.mark.nightly("test_verify_checks_what_was_written_again_meanwhile")) for one in ([], ["best"])), ["--all"]])
def test_verify_checks_what_was_written_again_meanwhile(held, make, tmp_path, words):
    store = make("best", LONG)
    again = lambda: make("best", "a.pt=7", "--writing", 2)  # noqa: E731
    result = held("best/a.pt", again, "verify", *words, "--json", "--path", store)
    assert result.returncode == 0, result.stderr
    assert [version["files"][0]["size"] for version in json.loads(result.stdout)["versions"]] == [(store / "best/a.pt").stat().st_size]


def test_a_rewritten_tag_is_read_where_the_manifest_says(run, make, tmp_path):
    store = make("t", "model.pt=100", "keep.pt=5")
    make("t", "model.pt=100", "--writing", 2)
    (apart,) = (store / "t/.nebula").glob("w*/model.pt")
    (store / "t/model.pt").unlink()
    (store / "t/model.pt").write_text("what another program has saved here is no damage")
    assert apart.exists()
    assert run("verify", "t", "--path", store).returncode == 0
    assert run("restore", "t", "--to", tmp_path / "out", "--path", store).returncode == 0
    assert torch.load(tmp_path / "out/model.pt")["b"].tolist() == [1, 2, 2]
    assert torch.load(tmp_path / "out/keep.pt")["b"].tolist() == [1, 2, 1]
    assert "t (entry 2)" in run("list", "--path", store).stdout


def steps(store: pathlib.Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step")) for path in store.iterdir() if path.is_dir() and path.name != ".nebula")


def test_prune_shows_first_and_removes_only_what_nebula_made(run, make):
    for step in range(1, 7):
        store = make(f"global_step{step}", "model.pt=100")
    (store / "global_step1/mine.txt").write_text("keep me")
    (store / "foreign").mkdir()
    (store / "foreign/model.pt").write_text("x")
    shown = run("prune", "--keep-last", 2, "--path", store)
    assert shown.returncode == 0 and "would remove 4 of 6" in shown.stdout and "--yes" in shown.stdout
    assert (store / "global_step1/model.pt").exists()
    told = json.loads(run("prune", "--keep-last", 2, "--keep-every", 3, "--yes", "--json", "--path", store).stdout)
    assert [one["tag"] for one in told["removed"]] == ["global_step1", "global_step2", "global_step4"] and not told[
        "dry_run"
    ]
    assert [path.name for path in (store / "global_step1").iterdir()] == ["mine.txt"]
    assert (
        not (store / "global_step2").exists() and (store / "foreign/model.pt").exists() and (store / "latest").exists()
    )
    (store / "global_step1/mine.txt").unlink()
    (store / "global_step1").rmdir()
    shutil.rmtree(store / "foreign")
    assert steps(store) == [3, 5, 6]
    assert run("verify", "--all", "--path", store).returncode == 0


def test_prune_keeps_by_days_weeks_and_time_and_says_why_each_one_stays(run, make):
    hour, day = 3600, 24 * 3600
    ages = {1: 40 * day, 2: 9 * day, 3: 2 * day + hour, 4: 2 * day, 5: 60, 6: 0}
    for step, age in ages.items():
        store = make(f"global_step{step}", "model.pt=100", "--age", age)

    def stays(*words):
        told = json.loads(run("prune", *words, "--json", "--path", store).stdout)
        assert all(one["stays"] == "" for one in told["removed"])
        return {int(one["tag"].removeprefix("global_step")): one["stays"] for one in told["kept"]}

    assert stays("--keep-within", "3d") == {3: "within", 4: "within", 5: "within", 6: "newest, within"}
    assert stays("--keep-daily", 100)[1] == stays("--keep-daily", 100)[4] == "daily"
    assert stays("--keep-weekly", 100)[2] == "weekly" and stays("--keep-hourly", 1) == {6: "newest, hourly"}
    assert stays("--keep-last", 2, "--keep-every", 4) == {4: "every 4", 5: "last", 6: "newest, last"}
    assert run("prune", "--keep-within", "soon", "--path", store).returncode == 2
    shown = run("prune", "--keep-last", 2, "--keep-within", "10d", "--path", store).stdout
    assert re.search("global_step1 .* would go$", shown, re.M) and re.search("global_step6 .* stays: newest, last, within$", shown, re.M)
    run("pin", "global_step1", "--path", store)
    assert stays("--keep-last", 1) == {1: "pinned", 6: "newest, last"}
    assert run("prune", "--keep-within", "3d", "--yes", "--path", store).returncode == 0 and steps(store) == [1, 3, 4, 5, 6]


def test_prune_of_an_entry_keeps_a_version_that_was_written_again(run, make):
    store = make("global_step1", "model.pt=100")
    make("global_step2", "model.pt=100")
    planned = json.loads(run("prune", "--keep-last", 1, "--path", store, "--json").stdout)["removed"]
    assert [(one["tag"], one["entry"]) for one in planned] == [("global_step1", 1)]
    make("global_step1", "model.pt=200", "--writing", 2)
    make("global_step3", "model.pt=100")
    words = ("prune", "--tag", "global_step1", "--yes", "--path", store)
    refused = run(*words, "--entry", 1)
    assert refused.returncode == 5 and '"global_step1" was written again meanwhile: it is entry 2 of its log, not 1' in refused.stderr
    assert steps(store) == [1, 2, 3]
    assert run(*words, "--entry", 2).returncode == 0 and steps(store) == [2, 3]
    make("global_step1", "model.pt=300")  # the numbers go on after a removal
    assert run(*words, "--entry", 1).returncode == 5 and run(*words, "--entry", 2).returncode == 5
    assert run("prune", "--keep-last", 1, "--entry", 1, "--path", store).returncode == 2


def test_prune_never_takes_the_newest_complete_one_and_counts_jobs_apart(run, make):
    for step in (1, 2, 3):
        store = make(f"global_step{step}", "model.pt=100")
    make("global_step9", "model.pt=100", "--job", "other")
    assert run("prune", "--tag", "global_step3", "--yes", "--path", store).returncode == 5
    assert run("prune", "--tag", "global_step9", "--yes", "--path", store).returncode == 5
    assert run("prune", "--tag", "none", "--yes", "--path", store).returncode == 3
    assert run("prune", "--tag", "global_step1", "--yes", "--path", store).returncode == 0
    assert run("prune", "--keep-every", 5, "--yes", "--path", store).returncode == 0
    assert steps(store) == [3, 9]
    assert run("prune", "--keep-last", 1, "--yes", "--path", store).stdout.rstrip().endswith("nothing to remove")


def test_doctor_tries_the_storage_and_exits_1_when_it_cannot_be_written(run, make, tmp_path):
    store = make("t", "a=10")
    told = json.loads(run("doctor", "--path", store, "--json").stdout)
    verdicts = {check["check"]: check["result"] for check in told["checks"]}
    assert verdicts["storage"] == "ok" and verdicts["checkpoints"] == "ok"
    assert {"io_uring", "copy-on-write capture", "memlock limit", "O_DIRECT", "memory tier", "agent"} <= verdicts.keys()
    assert list(store.iterdir()) and not list(store.glob(".nebula-tmp*"))
    (tmp_path / "file").write_text("no directory")
    result = run("doctor", "--path", tmp_path / "file/store")
    assert result.returncode == 1 and "BAD" in result.stdout


def test_doctor_measures_memory_and_storage_and_leaves_nothing(run, make, tmp_path):
    store = make("t", "a=10")
    before = set(store.rglob("*"))
    result = run("doctor", "--measure", "--path", store, "--json")
    limits = json.loads(result.stdout)["limits"]
    assert result.returncode == 0 and limits["measured_bytes"] == 256 << 20
    assert all(limits[name] > 1e6 for name in ("copy_bytes_per_s", "sum_bytes_per_s", "write_bytes_per_s", "read_bytes_per_s"))
    assert before - set(store.rglob("*")) <= {store / ".nebula/.nebula"}, "only the empty directory of temporary files may be gone"
    assert not set(store.rglob("*")) - before
    if os.environ.get("NEBULA_TEST_NIGHTLY"):  # it measures again
        assert "storage write" in run("doctor", "--measure", "--path", store).stdout
    assert "limits" not in json.loads(run("doctor", "--path", store, "--json").stdout)
    (tmp_path / "file").write_text("no directory")
    failed = run("doctor", "--measure", "--path", tmp_path / "file/store", "--json")
    limits = json.loads(failed.stdout)["limits"]
    assert failed.returncode == 1 and limits["reason"] and limits["write_bytes_per_s"] is None and limits["copy_bytes_per_s"] > 1e6


def test_a_fifo_in_the_place_of_a_file_is_damage_and_does_not_block(run, make):
    store = make("global_step1", "model.pt=100")
    make("global_step2", "model.pt=100")
    for path in (store / "global_step1/.nebula/manifest-1.json", store / "global_step2/model.pt"):
        path.unlink()
        os.mkfifo(path)
    verified = run("verify", "--all", "--path", store)
    assert verified.returncode == 1 and "global_step1/.nebula/manifest-1.json" in verified.stdout + verified.stderr
    assert run("verify", "global_step2", "--path", store).returncode == 1
    assert "is not a regular file" in run("inspect", "global_step2", "model.pt", "--path", store).stderr


def test_every_error_is_one_harmless_line_or_json(run, make, tmp_path):
    store = make("global_step1", "model.pt=100")
    odd = os.fsdecode(b"\xff\x1b[31m")
    for arguments in (["inspect", odd], ["restore", "latest", odd, "--to", tmp_path / "out"], ["list", "--path", odd]):
        failed = run(*arguments, *([] if "--path" in arguments else ["--path", store]), "--json")
        assert failed.returncode in (2, 3) and json.loads(failed.stdout)["error"]["message"]
        assert failed.stderr.count("\n") == 1 and "\x1b" not in failed.stderr
    assert not (tmp_path / "out").exists(), "a directory was made for nothing"
    make("esc\x1b[31m", "model.pt=100")
    for command in ("inspect", "verify", "status", "list"):
        shown = run(command, *(["latest"] if command == "inspect" else []), "--path", store)
        assert shown.returncode == 0 and "esc?[31m" in shown.stdout
    make("two\nagent    running, pid 1", "model.pt=100", store=tmp_path / "two\nlines")
    for command in (["inspect", "latest"], ["verify"], ["status"], ["restore", "latest", "--to", "out\nof"]):
        shown = run(*command, "--path", tmp_path / "two\nlines")
        assert shown.returncode == 0 and "?" in shown.stdout and "\nlines" not in shown.stdout and "\nof" not in shown.stdout
        assert not [line for line in shown.stdout.splitlines() if line.startswith("agent    running")], command


def test_json_is_whole_for_paths_that_are_long_or_no_utf8(run, make, tmp_path):
    deep = tmp_path / ("x" + "ä" * 120)
    machine = run("doctor", "--path", deep, "--json")
    assert "storage" in [one["check"] for one in json.loads(machine.stdout)["checks"]]
    odd = os.fsencode(tmp_path) + b"/\xff"
    make("global_step1", "model.pt=100", store=odd)
    for command in ("list", "verify"):
        for arguments, why in ([], "--path DIR"), (["--path", "."], "not valid UTF-8"):
            shown = run(command, "--json", *arguments, cwd=odd)
            assert shown.returncode == 2 and why in json.loads(shown.stdout)["error"]["message"], command
    assert json.loads(run("status", "--json", cwd=odd).stdout)["running"] is False


def test_a_file_that_has_no_records_is_not_called_damaged(run, make):
    store = make("global_step1", "model.pt=100", "--raw", "notes.txt")
    asked = run("inspect", "global_step1", "notes.txt", "--path", store)
    assert asked.returncode == 2 and '"notes.txt" is not a torch file' in asked.stderr


def test_an_agent_that_cannot_be_talked_to_is_not_called_absent(run, tmp_path):
    runtime = tmp_path / "runtime"
    assert run("stop").stdout == "no agent is running\n"
    assert run("stop", NEBULA_RUNTIME_DIR="relative").returncode == 2
    runtime.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime / "agent.sock"))
        listener.listen()
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        stopped = run("stop")
    assert stopped.returncode == 4 and "no agent" not in stopped.stdout


def test_status_does_not_call_an_agent_of_another_version_absent(run, tmp_path):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)

    def refuse(listener):
        client = listener.accept()[0]
        client.recv(1 << 20)
        text = b"this agent speaks another version\0"
        client.sendall(struct.pack("=IHHIiii", 0x3142454E, 1, 0, len(text), 40, 71, 0) + text)
        client.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime / "agent.sock"))
        listener.listen()
        threading.Thread(target=refuse, args=[listener], daemon=True).start()
        status = run("status")
    assert status.returncode == 4 and "another version" in status.stdout and "not running" not in status.stdout


def test_an_agent_that_is_silent_is_named_and_storage_is_shown_all_the_same(run, make, tmp_path):
    store = make("global_step1", "model.pt=100")
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:  # clients can connect, but no process reads: like a stopped agent
        listener.bind(str(runtime / "agent.sock"))
        listener.listen(16)
        listed = run("list", "--path", store)
        status = run("status", "--path", store)
        restored = run("restore", "latest", "--to", "out", "--path", store)
        machine = run("doctor", "--path", store)
    assert listed.returncode == 0 and "global_step1" in listed.stdout and "has not answered" in listed.stderr
    assert status.returncode == 4 and "has not answered" in status.stdout and "global_step1" in status.stdout
    assert restored.returncode == 0 and "has not answered" in restored.stderr and (tmp_path / "out/model.pt").exists()
    assert machine.returncode == 1 and "has not answered" in machine.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to act as another user")
def test_the_command_does_not_listen_to_another_users_agent(run, make, tmp_path):
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o777)
        path = f"{shared}/agent.sock"
        program = (
            "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
            f"s.bind({path!r}); s.listen(); print('ready', flush=True); s.accept()[0].recv(1)"
        )
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout.readline() == "ready\n"
            status = run("status", NEBULA_RUNTIME_DIR=shared)
            other.kill()
    assert status.returncode == 4 and "user 65534 listens on" in status.stdout


def test_without_an_agent_status_says_so_and_stop_is_done(run, make):
    store = make("t", "a=10")
    result = run("status", "--path", store)
    assert result.returncode == 0 and "not running" in result.stdout and "t " in result.stdout
    assert json.loads(run("status", "--json", "--path", store).stdout)["running"] is False
    assert run("stop").returncode == 0 and json.loads(run("stop", "--json").stdout) == {"was_running": False}


def test_the_command_line_of_a_running_command_shows_no_signature(nebula, tmp_path):
    url = "https://account.blob.core.windows.net/training/run7?sv=2022-11-02&sig=SECRET"
    environment = os.environ | {"NEBULA_RUNTIME_DIR": str(tmp_path / "runtime")}
    for arguments in (["--path", url], [f"--path={url}"]):
        line = [nebula, "status", "--serve", *arguments]
        with subprocess.Popen(line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command:
            shown = pathlib.Path(f"/proc/{command.pid}/cmdline")
            until(lambda: b"/training/run7?xxx" in shown.read_bytes(), 60, "the command to hide the signature")  # noqa: B023
            assert b"SECRET" not in shown.read_bytes()
            command.stdin.close()
            assert command.wait(60) == 0


# fault (Storage): Storage hangs, and a person asks for the status.
# result: The state of the agent and the verdicts on its jobs come at once, before storage is read.
def test_status_shows_the_agent_before_a_storage_that_hangs(nebula, tmp_path):
    environment = os.environ | {"NEBULA_RUNTIME_DIR": str(tmp_path / "runtime"), "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "r"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        line = [nebula, "status", "--path", "s3://training/run7"]
        with subprocess.Popen(line, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as command:
            asked = silent.accept()  # storage is asked, and says nothing
            late = threading.Timer(60, command.kill)
            late.start()
            first = command.stdout.readline()
            late.cancel()
            command.kill()
            asked[0].close()
    assert first.startswith(b"agent    not running")


def test_a_path_that_is_none_is_an_error_of_status_too(run):
    for path in ("ftp://host/run7", "s3://", "az://account"):
        shown = run("status", "--path", path)
        assert shown.returncode == 2 and "the storage path" in shown.stdout, shown
        told = run("status", "--json", NEBULA_PERSISTENT_STORAGE_PATH=path)
        assert told.returncode == 2 and json.loads(told.stdout)["storage"]["error"]["status"] == "invalid"


def test_a_program_asks_for_status_again_and_again_and_reads_versions_that_have_changed(nebula, make, tmp_path):
    store = make("a1", "x=10")
    environment = os.environ | {"NEBULA_RUNTIME_DIR": str(tmp_path / "runtime")}
    line = [nebula, "status", "--serve", "--path", store]
    with subprocess.Popen(line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask():
            process.stdin.write("\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        first = ask()
        assert first["running"] is False and [one["tag"] for one in first["storage"]["versions"]] == ["a1"] and "reading" not in first
        assert ask()["storage"] == {"same": True}
        make("a2", "x=20")
        told = ask()["storage"]["versions"]
        assert [(one["tag"], one["file_count"], one["written"] > 0) for one in told] == [("a1", 1, True), ("a2", 1, True)]
        assert told[0] == first["storage"]["versions"][0]
        shutil.rmtree(store / "a1")
        assert [one["tag"] for one in ask()["storage"]["versions"]] == ["a2"]
        shutil.rmtree(store)
        assert ask()["storage"]["error"]["status"] == "not_found"
        make("a3", "x=30")
        assert [one["tag"] for one in ask()["storage"]["versions"]] == ["a3"]
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture
def train(nebula, maker, run, tmp_path):
    """Runs a trainer that saves through the library and dies. Its agent stays until the test ends."""
    trainer = maker.parent / "save_versions"
    if not trainer.exists():
        pytest.skip("save_versions is not built")
    environment = os.environ | {
        "NEBULA_RUNTIME_DIR": str(tmp_path / "runtime"),
        "NEBULA_MEMORY_DIR": str(tmp_path / "memory"),
    }

    def call(path, interval, count, **extra):
        subprocess.run([trainer, nebula, path, str(interval), str(count)], check=True, env=environment | extra, timeout=60)

    @contextlib.contextmanager
    def stay(path, interval, count, name):
        """Runs a trainer that saves a file of that name and lives as long as the context."""
        arguments = [trainer, nebula, path, str(interval), str(count), name]
        with subprocess.Popen(arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"saved\n"
            yield

    call.stay = stay
    yield call
    run("stop", "--now", "--yes")


def test_versions_in_memory_are_listed_inspected_and_restored(run, train, tmp_path):
    train("-", 0, 3)
    told = json.loads(run("list", "--json").stdout)
    assert told["running"] and [version["tag"] for version in told["versions"]][-1] == "global_step3"
    assert told["versions"][-1]["where"] == ["memory"] and told["versions"][-1]["state"] == "committed"
    status = run("status")
    assert status.returncode == 0 and "running, pid" in status.stdout and "global_step3" in status.stdout
    assert "in the agent's memory" in run("inspect", "latest").stdout
    told = json.loads(run("restore", "latest", "--to", "out", "--json").stdout)
    assert told["source"] == "memory" and told["tag"] == "global_step3"
    words = run("restore", "latest", "--to", tmp_path / "again").stdout
    assert "from memory, " in words and "verified" not in words
    with zipfile.ZipFile(tmp_path / "out/model.pt") as archive:
        assert archive.testzip() is None
        crcs = {one.filename: f"{one.CRC:08x}" for one in archive.infolist()}
    told = json.loads(run("inspect", "latest", "model.pt", "--json").stdout)
    assert told["tag"] == "global_step3" and {one["name"]: one["crc32"] for one in told["records"]} == crcs
    assert "data.pkl" in run("inspect", "latest", "model.pt").stdout
    missing = run("inspect", "latest", "other.pt")
    assert missing.returncode == 3 and "other.pt" in missing.stderr
    assert torch.load(tmp_path / "out/model.pt")["a"][:2].tolist() == [3, 0]
    assert run("restore", "global_step99", "--to", "out").returncode == 3


def test_prune_leaves_what_the_agent_writes_again_with_files_of_it(run, train, tmp_path):
    store = tmp_path / "store"
    train(store, 0, 3)
    until(lambda: all((store / f"global_step{step}/.nebula/manifest-1.json").exists() for step in (1, 2, 3)))
    with train.stay(store, 3600, 1, "other.pt"):
        refused = run("prune", "--tag", "global_step1", "--yes", "--path", store)
        assert refused.returncode == 5 and "writing it again" in refused.stderr
        told = json.loads(run("prune", "--keep-last", 1, "--yes", "--json", "--path", store).stdout)
        assert [one["tag"] for one in told["removed"]] == ["global_step2"]
    assert run("stop").returncode == 0
    assert run("verify", "--all", "--path", store).returncode == 0
    told = json.loads(run("inspect", "global_step1", "--json", "--path", store).stdout)
    assert {one["name"] for one in told["files"]} == {"model.pt", "other.pt"}


def test_a_path_that_was_only_looked_at_is_no_job_of_the_agent(run, train, make, tmp_path):
    """The trainers of that job run elsewhere, or there is none: "fine" would be a guess."""
    parent = tmp_path / "jobs"
    other, typo = make("t", "a=10", store=parent / "other"), parent / "tpyo"
    train(parent / "own", 0, 1)
    for command in ("list", "status", "verify", ("inspect", "latest"), ("prune", "--keep-last", 1)):
        for path in (other, typo):
            run(*([command] if isinstance(command, str) else command), "--path", path)
    told = json.loads(run("status", "--json", "--path", other).stdout)
    assert [one["path"] for one in told["jobs"]] == [str(parent / "own")]
    assert "tpyo" not in run("metrics").stdout and "other" not in run("metrics").stdout
    told = json.loads(run("list", "--jobs", "--json", "--path", parent).stdout)
    assert {one["name"]: (one["verdict"] or {}).get("state") for one in told["jobs"]} == {"own": "fine", "other": None}


def test_stop_persists_and_stop_now_asks_before_it_drops(run, train, tmp_path):
    store = tmp_path / "store"
    train(store, 0, 2)
    refused = run("stop", "--now")
    assert refused.returncode == 5 and "--yes" in refused.stderr
    assert "running" in run("status").stdout
    stopped = run("stop")
    assert stopped.returncode == 0 and "has ended" in stopped.stdout
    assert "not running" in run("status", "--path", store).stdout
    told = json.loads(run("list", "--json", "--path", store).stdout)
    assert [version["where"] for version in told["versions"]] == [["storage"]] * 2
    assert run("verify", "--all", "--path", store).returncode == 0
    assert not list((tmp_path / "memory").glob("*.img"))


def test_stop_on_slow_storage_says_what_it_waits_for_and_can_be_given_up(run, nebula, train, tmp_path):
    store = tmp_path / "store"
    train(store, 0, 1, NEBULA_STORE_MBPS="0.002")  # a version takes minutes; no command waits for it
    given_up = run("stop", "--timeout", 2)
    assert given_up.returncode == 6 and f"waiting for 1 version (391.3 KiB) for {store}" in given_up.stderr
    assert "the agent goes on" in given_up.stderr and "finishing 1 version" in given_up.stdout
    told = json.loads(run("stop", "--timeout", 1, "--json").stdout)
    assert told["error"]["status"] == "timeout"

    environment = os.environ | {"NEBULA_RUNTIME_DIR": str(tmp_path / "runtime")}
    waiting = subprocess.Popen(
        [nebula, "stop"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background has it ignored
    )
    assert "Ctrl-C leaves the agent running" in waiting.stderr.readline()
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(timeout=60) == -signal.SIGINT
    waiting.stderr.close()
    until(lambda: not json.loads(run("status", "--json").stdout)["agent"]["stopping"], 60, "the agent to notice that no client asks")
    train(store, 0, 2)  # it serves as before
    status = json.loads(run("status", "--json", "--path", store).stdout)
    assert [row["tag"] for row in status["queue"]][-1] == "global_step1"


def test_stop_now_with_yes_drops_the_memory_tier(run, train):
    train("-", 0, 2)
    told = json.loads(run("stop", "--now", "--yes", "--json").stdout)
    assert told["was_running"] and told["dropped"] and told["unsaved_count"] >= 1
    assert run("list").returncode == 2  # nothing is left to look at


def ask(nebula, store, *lines):
    """Returns the answers of `nebula store` to these requests."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    done = subprocess.run([nebula, "store", "--path", str(store)], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(lines)
    return answers


def test_store_answers_each_request_by_one_line(nebula, tmp_path):
    store, key = tmp_path / "objects", "a/b"
    answers = ask(
        nebula,
        store,
        {"do": "get", "key": key},
        {"do": "list", "prefix": ""},
        {"do": "put", "key": key, "value": "\u00e4\n", "if": "absent"},
        {"do": "put", "key": key, "value": "other", "if": "absent"},
        {"do": "get", "key": key},
        {"do": "put", "key": key, "value": "third"},
        {"do": "get", "key": key},
        {"do": "put", "key": "a/c", "value": ""},
        {"do": "list", "prefix": "a/"},
        {"do": "clock"},
        {"do": "remove", "keys": [key, "a/never"]},
        {"do": "list", "prefix": "a/"},
    )
    assert answers[0]["error"]["status"] == "not_found" and not answers[0]["error"]["again"]
    assert answers[1] == {"entries": []}
    assert answers[3]["error"]["status"] == "busy"
    assert answers[4] == {"value": "\u00e4\n", "stamp": answers[2]["stamp"]}
    assert answers[6] == {"value": "third", "stamp": answers[5]["stamp"]} and answers[5] != answers[2]
    assert [entry["key"] for entry in answers[8]["entries"]] == [key, "a/c"]
    assert abs(answers[8]["entries"][0]["time_ns"] - answers[9]["time_ns"]) < 60 * 10**9
    assert answers[10] == {}
    assert [entry["key"] for entry in answers[11]["entries"]] == ["a/c"]
    assert ask(nebula, store, {"do": "features"})[0] == {"puts_if_same": False, "lists_fresh": True}


def test_store_refuses_what_is_no_request_and_goes_on(nebula, tmp_path):
    store = tmp_path / "objects"
    (store / "a").mkdir(parents=True)
    (store / "a" / "bytes").write_bytes(b"\xff")
    pathlib.Path(os.fsdecode(bytes(store) + b"/a/\xff")).touch()
    bad = [
        "",
        "[1]",
        "{",
        {"do": "format"},
        {"do": "get"},
        {"do": "get", "key": "../x"},
        {"do": "put", "key": "k"},
        {"do": "put", "key": "k", "value": 1},
        {"do": "put", "key": "k", "value": "v", "if": "maybe"},
        {"do": "put", "key": "k", "value": "v", "if": "same"},
        {"do": "put", "key": "k", "value": "v", "if": "same", "stamp": "s" * 200},
        {"do": "put", "key": "k", "value": "v", "if": "same", "stamp": "s"},
        {"do": "list"},
        {"do": "remove", "keys": "k"},
        {"do": "remove", "keys": [1]},
    ]
    *refused, corrupt, there = ask(nebula, store, *bad, {"do": "get", "key": "a/bytes"}, {"do": "list", "prefix": ""})
    assert [answer["error"]["status"] for answer in refused] == ["invalid"] * len(bad)
    assert corrupt["error"]["status"] == "corrupt"
    assert [entry["key"] for entry in there["entries"]] == ["a/bytes"]


@pytest.mark.parametrize("name", ["s3", pytest.param("azure", marks=pytest.mark.nightly)])
def test_inspect_reads_the_directory_of_a_stored_file_and_verify_reads_its_bytes_once(name, run, make, servers, monkeypatch):
    from test_unchanged import Counter

    for variable, value in servers.variables(name).items():
        monkeypatch.setenv(variable, value)
    path, size = servers.new_path(name), 16 << 20
    assert run("copy", make("global_step1", f"model.pt={size // 4}"), path).returncode == 0
    counter = Counter()
    whole = run("inspect", "latest", "--path", path)
    assert whole.returncode == 0 and re.search(r"model\.pt +0 +- +16\.0 MiB +zip +5 ", whole.stdout), whole
    records = run("inspect", "latest", "model.pt", "--path", path)
    assert records.returncode == 0 and "archive/data/0" in records.stdout
    assert counter.received < 1 << 20
    checked = run("verify", "--path", path)
    assert checked.returncode == 0 and size < counter.received < size + (1 << 20), (checked, counter.received)


def test_verify_does_not_call_damaged_what_the_store_does_not_answer(run, make, servers, monkeypatch):
    import http.client
    import http.server

    from emulators import Between

    for variable, value in servers.variables("s3").items():
        monkeypatch.setenv(variable, value)
    path = servers.new_path("s3")
    for tag in ("global_step1", "global_step2", "global_step3"):
        store = make(tag, "model.pt=100000")
    assert run("copy", store, path, "--all").returncode == 0

    class Broken(Between):
        """Answers other ranges of one file than are asked for. Such an answer is repeated without a pause."""

        port = int(re.search(r":(\d+)", os.environ["AWS_ENDPOINT_URL"])[1])

        def do_GET(self):
            if "global_step2/model.pt" not in self.path:
                return self.handle_one()
            self.send_response(206)
            self.send_header("Content-Range", "bytes 77-77/99999999")
            self.send_header("Content-Length", "1")
            self.end_headers()
            self.wfile.write(b"x")

        def do_HEAD(self):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            connection.request("HEAD", self.path, headers=dict(self.headers))
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "date", "server"):
                    self.send_header(name, value)
            self.end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        told = run("verify", "--all", "--path", path)
        assert told.returncode == 4 and "another range" in told.stderr and "DAMAGED" not in told.stdout, told
        assert "global_step1" in told.stdout and "global_step2" not in told.stdout  # what was checked before
        told = run("verify", "--all", "--path", path, "--json")
        assert told.returncode == 4 and json.loads(told.stdout)["error"]["status"] == "unavailable"
        assert run("verify", "global_step3", "--path", path).returncode == 0
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
