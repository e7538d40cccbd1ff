"""Several jobs in one studio, a studio that only reads, one behind a reverse proxy, and long work that is stopped."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from nebulaml._session import locate
from nebulaml.studio import fleet
from playwright.sync_api import expect
from sinks import Sink, make_versions
from waiting import until

sys.path.append(str(Path(__file__).resolve().parents[1] / "integration"))
from store_servers import shared  # noqa: E402

SAVE = """
    nm.init(sys.argv[1], 0, 2, on_error="raise")
    for step in map(int, sys.argv[2:]):
        checkpoint = nm.Checkpoint(f"global_step{step}")
        checkpoint.save("model.pt", {"weight": torch.ones(1000)})
        assert checkpoint.commit()
        checkpoint.wait("durable")
"""


def nebula(*words):
    command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    done = subprocess.run([command, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly("test_the_command_lists_jobs_with_few_looks_at_each")
def test_a_parent_directory_is_a_table_of_its_jobs_and_each_has_an_address(place, start, page):
    for job, steps in (("run7", (1, 2)), ("run8", (5,))):
        place.run(SAVE, place.storage / job, *steps)
    (place.storage / "notes").mkdir()
    studio = start(place.storage)
    page.goto(studio.address)
    rows = page.locator("tbody tr[data-key]")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("run7")
    expect(rows.nth(0)).to_contain_text("global_step2")
    expect(rows.nth(1)).to_contain_text("global_step5")
    expect(rows.nth(0)).to_contain_text("fine")
    page.get_by_label("Filter").fill("run8")
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="run8").click()
    expect(page).to_have_url(re.compile(r"#now\?job=run8$"))
    newest = page.locator(".card").first
    expect(newest).to_contain_text("global_step5")
    page.locator("#tab-checkpoints").click()
    expect(page).to_have_url(re.compile(r"#checkpoints\?job=run8$"))
    page.reload()
    expect(page.get_by_role("button", name="global_step5")).to_be_visible()
    page.goto(page.url.replace("run8", "run7"))
    expect(page.get_by_role("button", name="global_step2")).to_be_visible()
    assert page.get_by_role("button", name="global_step5").count() == 0
    page.locator("#tab-jobs").click()
    expect(page).to_have_url(re.compile("#jobs"))
    assert studio.ask("GET", "/api/state?since=0&job=nothing")[0] == 409
    two = start(place.storage / "run7", "--path", str(place.storage / "run8"))
    page.goto(two.address)
    expect(page.locator("tbody tr[data-key]")).to_have_count(2)
    expect(page.get_by_role("button", name=str(place.storage / "run7"))).to_be_visible()


def test_the_command_lists_jobs_with_few_looks_at_each(place):
    for job in ("run7", "run8"):
        place.run(SAVE, place.storage / job, 1)
    told = json.loads(nebula("list", "--jobs", "--path", place.storage, "--json"))
    assert [(one["name"], one["newest"], one["verdict"]["state"]) for one in told["jobs"]] == [
        ("run7", "global_step1", "fine"),
        ("run8", "global_step1", "fine"),
    ]
    assert not told["is_job"] and "run7" in nebula("list", "--jobs", "--path", place.storage)
    one = json.loads(nebula("list", "--jobs", "--path", place.storage / "run7", "--json"))
    assert one["is_job"] and [row["path"] for row in one["jobs"]] == [str(place.storage / "run7")]


def test_a_studio_that_only_reads_refuses_each_control(place, start, save):
    save(1, 2)
    studio = start(place.storage, "--read-only")
    for name in ("verify", "copy", "export", "pin", "unpin", "prune", "flush", "save-now"):
        status, _, told = studio.ask("POST", f"/api/{name}", {"tag": "global_step1", "to": "/tmp/x", "versions": [{"tag": "global_step1", "entry": 1}]})
        assert status == 403 and "read-only" in told["error"], name
    assert len(studio.work("diff", {"tag": "global_step1", "other": "global_step2"})["files"]) == 2


@pytest.mark.nightly("test_a_studio_that_only_reads_refuses_each_control")
def test_a_studio_that_only_reads_shows_no_control(place, start, save, page):
    save(1, 2)
    page.goto(start(place.storage, "--read-only").address)
    expect(page.locator(".card").first).to_contain_text("global_step2")
    for tab in ("now", "checkpoints", "version"):
        page.locator(f"#tab-{tab}").click()
        page.wait_for_timeout(200)
        for name in ("Save now", "Flush", "Prune…", "Verify", "Pin…", "Copy to…", "Export…"):
            assert not page.get_by_role("button", name=name).is_visible(), (tab, name)


def test_a_reverse_proxy_reads_the_token_from_a_file_and_may_use_its_own_name(place, start, save, tmp_path):
    save(1)
    file = tmp_path / "token"
    studio = start(place.storage, "--token-file", str(file), "--host", "studio.example.org")
    assert studio.token == file.read_text().strip() and stat.S_IMODE(file.stat().st_mode) == 0o600
    proxied = {"Host": "studio.example.org", "Origin": "https://studio.example.org"}
    assert studio.ask("GET", "/api/state?since=0", headers=proxied)[0] == 200
    assert studio.ask("GET", "/api/state?since=0", headers={"Host": "other.example.org"})[0] == 421
    assert studio.ask("GET", "/api/state?since=0", headers={**proxied, "Origin": "https://other.example.org"})[0] == 403
    assert start(place.storage, "--token-file", str(file)).token == studio.token, "a second studio reads what the first has made"
    file.chmod(0o644)
    line = [sys.executable, "-m", "nebulaml", "studio", "--path", str(place.storage), "--token-file", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"chmod 600 {file}" in done.stderr, done.stderr


WORKS = {"verify": "verify global_step3", "copy": "copy global_step3 to ", "prune": "remove 2 versions"}


@pytest.mark.nightly("studio/test_page.py::test_one_checkpoint_is_verified_looked_into_and_pinned", "studio/test_page.py::test_prune_shows_what_goes_and_removes_just_that")
@pytest.mark.parametrize("command", ["verify", "copy", "prune"])
def test_long_work_shows_its_progress_and_can_be_stopped(place, start, save, page, monkeypatch, command):
    save(1, 2, 3)
    real = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    script = place.root / "command"
    script.write_text(
        f"""#!/bin/sh
case "$1 $2" in
"verify "*|"copy "*|"prune --yes") echo $$ >{place.root}/pid; echo '{{"done": 1048576, "total": 4194304}}' >&2; exec sleep 1000;;
esac
exec {real} "$@"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("NEBULA_AGENT_PATH", str(script))
    page.goto(start(place.storage).address + "/version/global_step3")
    if command == "verify":
        page.get_by_role("button", name="Verify").click()
    elif command == "copy":
        page.get_by_role("button", name="Copy to…").click()
        page.get_by_role("textbox", name="To").fill(str(place.root / "copies"))
        page.get_by_role("button", name="Copy", exact=True).click()
    else:
        page.locator("#tab-checkpoints").click()
        page.get_by_role("button", name="Prune…").click()
        page.get_by_label("Keep the newest").fill("1")
        page.get_by_role("button", name="Show").click()
        page.get_by_role("button", name="Remove them").click()
    works = page.get_by_role("status", name="Long work")
    expect(works).to_contain_text(WORKS[command])
    expect(works).to_contain_text("1.0\u00a0MiB of 4.0\u00a0MiB")
    page.locator("#tab-now").click()
    works.get_by_role("button", name="Stop").click()
    expect(works).to_be_empty()
    expect(page.get_by_role("dialog")).to_contain_text("was stopped")
    pid = (place.root / "pid").read_text().strip()
    until(lambda: not Path(f"/proc/{pid}").exists(), 60, "the end of the command")
    listed = json.loads(subprocess.run([real, "list", "--path", place.storage, "--json"], capture_output=True, text=True).stdout)
    assert [one["tag"] for one in listed["versions"]] == ["global_step1", "global_step2", "global_step3"]


# fault (Reports): An export of the studio's page is stopped.
# result: It leaves nothing.
@pytest.mark.nightly("studio/test_page.py::test_one_checkpoint_is_verified_looked_into_and_pinned", "python/test_export_hf.py::test_the_command_exports")
def test_an_export_shows_its_progress_leaves_nothing_if_it_is_stopped_and_is_loaded_if_not(place, start, page):
    place.run(
        """
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        with nm.Checkpoint("global_step1", metrics={"loss": 0.5}) as checkpoint:
            checkpoint.save("model.pt", {"w": torch.arange(6, dtype=torch.float32)})
        checkpoint.wait("durable")
        """,
        place.storage,
    )
    slow = place.root / "slow"  # a Python whose exports wait after the first slice
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        f"""
import os, time
if os.environ.get("NEBULA_PROGRESS") == "json" and os.path.exists("{slow}/wait"):
    from nebulaml.export import directory
    cast = directory.cast
    def waits(found, kind):
        open("{slow}/begun", "w").close()
        while os.path.exists("{slow}/wait"):
            time.sleep(0.05)
        return cast(found, kind)
    directory.cast = waits
"""
    )
    (slow / "wait").touch()
    os.environ["PYTHONPATH"] = str(slow)
    try:
        studio = start(place.storage)
    finally:
        del os.environ["PYTHONPATH"]
    page.goto(studio.address + "/version/global_step1")
    out = place.root / "out"
    out.mkdir()
    works = page.get_by_role("status", name="Long work")

    def export():
        page.get_by_role("button", name="Export…").click()
        page.get_by_label("New directory").fill(str(out / "hf"))
        page.get_by_label("Floats").select_option("bf16")
        page.get_by_role("button", name="Export", exact=True).click()

    export()
    expect(works).to_contain_text(f"export global_step1 to {out}/hf")
    until((slow / "begun").exists, 60, "the begin of the export")
    works.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("dialog")).to_contain_text("was stopped")
    until(lambda: not list(out.iterdir()), 60, "the removal of what was exported")
    page.get_by_role("button", name="Close").click()
    (slow / "wait").unlink()
    export()
    expect(page.get_by_role("status").first).to_contain_text("done: export of global_step1")
    told = studio.state()["works"][-1]
    assert told["state"] == "done" and told["progress"] == {"done": 12, "total": 12}
    assert sorted(one.name for one in (out / "hf").iterdir()) == ["README.md", "model.safetensors"]


def put_below(sink, folder, key):
    for file in sorted(one for one in folder.rglob("*") if one.is_file()):
        sink.put(f"training/{key}/{file.relative_to(folder)}", file.read_bytes())


@pytest.mark.nightly("test_the_command_lists_jobs_with_few_looks_at_each")
def test_two_hundred_jobs_of_a_bucket_take_five_requests_each_and_none_while_no_page_shows_them(place, monkeypatch):
    bucket = Sink(monkeypatch)
    make_versions(place.root / "job", 2)
    for number in range(200):
        put_below(bucket, place.root / "job", f"jobs/run{number:03}")
    bucket.requests()
    monkeypatch.setattr(fleet, "TABLE_CLOUD_S", 0.0)
    monkeypatch.setattr(fleet, "IDLE_S", 3600.0)
    asked, firsts = fleet._jobs_of, []

    def jobs_of(path):
        answer = asked(path)
        firsts.append([] if firsts else bucket.requests())
        return answer

    monkeypatch.setattr(fleet, "_jobs_of", jobs_of)
    jobs = fleet.Fleet(["s3://training/jobs"], None, None)
    try:
        jobs.start()
        until(lambda: len(jobs.table()["jobs"]) == 200, 60, "the table")
        assert {one["newest"] for one in jobs.table()["jobs"]} == {"global_step2"}
        assert len(firsts[0]) <= 200 * 5 + 4, (len(firsts[0]), firsts[0][:9])
        looked_at = jobs.table()["looked_at"]
        until(lambda: jobs.table()["looked_at"] > looked_at, 60, "another look, because a page shows the table")
        monkeypatch.setattr(fleet, "IDLE_S", 0.0)  # as if no page had asked for long
        until(lambda: not jobs._asked.is_set(), 60, "the end of the looks")
        bucket.requests()
        assert jobs._table["looked_at"] and bucket.requests() == [], "nothing looks"
        looked_at = jobs._table["looked_at"]
        monkeypatch.setattr(fleet, "IDLE_S", 3600.0)
        until(lambda: jobs.table()["looked_at"] > looked_at, 60, "a look, because a page asks again")
    finally:
        jobs.close()
        bucket.close()


@pytest.mark.nightly
def test_a_prefix_of_a_bucket_is_a_table_of_its_jobs(place, start, page, monkeypatch):
    for name, value in shared().variables("s3").items():
        monkeypatch.setenv(name, value)
    parent = shared().new_path("s3")
    for job, steps in (("run7", (1, 2)), ("run8", (5,))):
        place.run(SAVE, f"{parent}/{job}", *steps)
    page.goto(start(parent).address)
    rows = page.locator("tbody tr[data-key]")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("run7")
    expect(rows.nth(0)).to_contain_text("global_step2")
    page.get_by_role("button", name="run8").click()
    expect(page.locator(".card").first).to_contain_text("global_step5")
    page.goto(page.url.replace("run8", "run7"))
    expect(page.locator(".card").first).to_contain_text("global_step2")
