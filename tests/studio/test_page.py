"""The page in a real Chromium: its content, its updates, its controls, and hostile names that do no harm."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import pytest
from nebulaml._session import locate
from playwright.sync_api import expect

NIGHTLY = os.environ.get("NEBULA_TEST_NIGHTLY")  # before a test removes the variables
TABS = ["now", "checkpoints", "metrics", "version", "compare", "timeline", "nodes", "config"]
TRAINS = """
    path, first, interval = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    nm.init(path, interval, 2, on_error="raise")
    for step in range(first, 10_000):
        checkpoint = nm.Checkpoint(f"global_step{step}")
        checkpoint.save("model.pt", {"weight": torch.ones(1000)})
        checkpoint.commit()
        say(step)
        time.sleep(0.2)
"""


def pins(storage: Path, *words: str) -> dict[str, str]:
    """Pins a version, if there are words. Returns the reasons by tag."""
    command = [locate.agent_path() or os.environ["NEBULA_AGENT_PATH"], "pin", "--path", storage]
    if words:
        subprocess.run([*command, *words], check=True, capture_output=True)
    listed = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True)
    return {one["tag"]: one["pinned"] for one in json.loads(listed.stdout)["pins"]}


def card(page, title):
    return page.locator(".card").filter(has=page.get_by_role("heading", name=title, exact=True))


def open_tab(page, name):
    page.locator(f"#tab-{name}").click()
    expect(page.locator(f"#tab-{name}")).to_have_attribute("aria-selected", "true")


def test_a_job_is_followed_live_through_a_kill_and_a_resume(place, start, page):
    trainer = place.trainer(TRAINS, place.storage, 1, 0.5)
    assert trainer.stdout.readline()
    page.goto(start(place.storage).address)
    newest = card(page, "Newest loadable checkpoint")
    expect(newest.locator(".big")).to_have_text(re.compile(r"global_step\d+"))
    first = int(newest.locator(".big").inner_text()[11:])
    expect(newest.locator(".big")).not_to_have_text(f"global_step{first}")  # without a reload
    expect(card(page, "Trainers")).to_contain_text(f"rank 0 of 1, pid {trainer.pid}")
    expect(card(page, "Lost if all processes died now")).to_contain_text("about")
    expect(card(page, "Goodput so far")).to_contain_text("%")
    trainer.send_signal(signal.SIGKILL)
    last = int(trainer.communicate()[0].split()[-1])
    expect(card(page, "Trainers")).to_contain_text("none connected")
    expect(card(page, "Lost if all processes died now")).to_contain_text("no trainer is connected")
    again = place.trainer(TRAINS, place.storage, last - 1, 0.5)
    assert again.stdout.readline()
    expect(card(page, "Trainers")).to_contain_text(f"pid {again.pid}")
    open_tab(page, "timeline")
    expect(page.locator(".events")).to_contain_text(f"rank 0 (pid {trainer.pid}) is gone")
    expect(page.locator(".events")).to_contain_text(f"rank 0 of 1 (pid {again.pid}) has connected")
    expect(page.locator(".events")).to_contain_text(f"the job saves step {last - 1} again")
    expect(page.locator(".events")).to_contain_text("the last trainer on this node had ended")
    assert page.locator("svg circle").count() >= last
    again.send_signal(signal.SIGKILL)
    again.communicate()


@pytest.mark.nightly("test_a_job_is_followed_live_through_a_kill_and_a_resume")
def test_an_agent_that_dies_while_the_page_is_open_is_told(place, start, save, page):
    save(1, 2)
    page.goto(start(place.storage).address)
    expect(card(page, "Memory")).to_contain_text("of")
    place.kill_agent()
    expect(card(page, "Memory")).to_contain_text("no agent runs")
    expect(card(page, "Newest loadable checkpoint")).to_contain_text("global_step2")
    open_tab(page, "nodes")
    expect(page.locator("main")).to_contain_text("does not run")


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    "esc\x1b[31mred\x07",
    "\u202egpj.exe",
    "$(touch pwned)",
    "'; touch pwned #",
    "-rf",
    "a\"b'c\\d",
    "\u0645\u0631\u062d\u0628\u0627",
    "line\nbreak",
]


def test_hostile_names_are_shown_and_do_nothing(place, start, page):
    place.run(
        """
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        for tag in sys.argv[2:]:
            checkpoint = nm.Checkpoint(tag, metrics={"<b>loss</b>": 1.0})
            checkpoint.save("<i>m</i>\\u202e.pt", {"<u>k</u>": torch.ones(3)})
            assert checkpoint.commit()
            checkpoint.wait("durable")
        """,
        place.storage,
        *HOSTILE,
    )
    studio = start(place.storage)
    page.goto(studio.address)
    open_tab(page, "checkpoints")
    expect(page.locator("tbody tr[data-key]")).to_have_count(len(HOSTILE))
    text = page.locator("tbody").inner_text()
    assert "<img src=x onerror=alert(1)>" in text and "\\u{202e}gpj.exe" in text and "esc\\u{1b}[31mred\\u{7}" in text and "line\\u{a}break" in text
    assert not {"\u202e", "\x1b", "\x07"} & set(page.locator("body").inner_text())
    for tag in HOSTILE if NIGHTLY else HOSTILE[::3]:
        open_tab(page, "version")
        page.locator("#which").select_option(tag)
        expect(page.locator("dl")).to_contain_text("storage")
        expect(page.get_by_role("button", name="Look inside").or_(page.get_by_role("button", name="tensors of"))).to_be_visible()
    for name in TABS:
        open_tab(page, name)
    assert page.locator("main img, main script, main b, main i:not(.legend i), main u").count() == 0
    # The line for a shell restores that tag, and runs nothing else.
    for tag in HOSTILE if NIGHTLY else HOSTILE[4:]:
        line = studio.ask("GET", "/api/version?tag=" + urllib.parse.quote(tag))[2]["restore"]
        assert line.isprintable() and line.isascii()
        folder = place.root / "shell"
        folder.mkdir()
        command = Path(os.environ.get("NEBULA_AGENT_PATH") or shutil.which("nebula"))
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, capture_output=True, text=True, env={**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
        )
        assert done.returncode == 0 and [one.name for one in folder.iterdir()] == ["restored"], done.stderr
        shutil.rmtree(folder)


def test_filter_sort_and_compare(place, start, save, page):
    save(1, 2, 3, 10)
    page.goto(start(place.storage).address)
    open_tab(page, "checkpoints")
    rows = page.locator("tbody tr[data-key]")
    expect(rows).to_have_count(4)
    expect(rows.first).to_contain_text("global_step10")  # the newest first
    page.locator("[data-name=step]").click()
    expect(rows.first).to_contain_text("global_step10")
    page.locator("[data-name=step]").click()
    expect(rows.first).to_contain_text("global_step1")
    page.locator("[data-name=tag]").press("Enter")  # by keyboard, and the focus stays where it was
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("Tag")
    assert page.evaluate("document.activeElement.dataset.name") == "tag"
    page.get_by_label("Filter").fill("step1")
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="val_loss").click()  # it is 3 / step
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("val_loss")
    assert page.locator("tbody tr[data-key] td.metric").all_inner_texts() == ["3", "0.3"]
    page.get_by_label("Show", exact=True).select_option("failed")
    expect(rows).to_have_count(0)
    page.get_by_label("Show", exact=True).select_option("")
    page.get_by_label("Filter").fill("")
    expect(page.get_by_role("button", name="Compare", exact=True)).to_be_disabled()
    for step in (2, 3, 10):
        page.get_by_label(f"compare global_step{step}").check()
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page).to_have_url(re.compile("#compare/global_step2/global_step3/global_step10$"))
    table = page.get_by_role("table", name="Checkpoints side by side")
    expect(table.locator("tr", has_text="val_loss").locator("td")).to_have_text(["1.5", "1", "0.3"])
    page.get_by_role("button", name="Compare the tensors").click()
    first = page.get_by_role("region", name="Tensors of global_step2 and global_step3")
    expect(first.locator("tr", has_text="weight")).to_contain_text("2,048 of 2,048")
    expect(page.get_by_role("region", name="Tensors of global_step2 and global_step10").locator("tr", has_text="weight").locator("td.num").first).to_have_text(
        "8",
    )


def test_one_checkpoint_is_verified_looked_into_and_pinned(place, start, save, page):
    save(1, 2)
    page.goto(start(place.storage).address)
    open_tab(page, "checkpoints")
    page.get_by_role("button", name="global_step1").click()
    expect(page.locator("#tab-version")).to_have_attribute("aria-selected", "true")
    page.get_by_role("button", name="tensors of model.pt").click()
    grid = page.get_by_role("region", name="Tensors of model.pt")
    weight, bias = grid.locator("tr", has_text="weight"), grid.locator("tr", has_text="bias")
    expect(weight).to_contain_text("64 \u00d7 32")
    assert weight.locator("td").all_inner_texts() == ["weight", "float32", "64 \u00d7 32", "1", "1", "45.2548", "0", "0"]
    assert bias.locator("td").all_inner_texts()[3:] == ["1", "1", "1", "1", "0"]
    page.get_by_role("button", name="Verify").click()
    expect(page.locator("#check")).to_contain_text("every byte is as it was written")
    page.get_by_role("button", name="Pin…").click()
    page.get_by_label("Reason").fill("the paper's <b>figure</b>")
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    assert pins(place.storage) == {"global_step1": "the paper's <b>figure</b>"}
    expect(page.locator("dl")).to_contain_text("the paper's <b>figure</b>")
    page.get_by_role("button", name="Unpin").click()
    page.get_by_role("button", name="Pin…").click()
    page.get_by_role("button", name="Pin", exact=True).click()  # without a reason
    expect(page.locator("dl")).to_contain_text("pinned, without a reason")
    assert pins(place.storage) == {"global_step1": ""}
    page.get_by_role("button", name="Unpin").click()
    expect(page.get_by_role("button", name="Pin…")).to_be_visible()
    file = place.storage / "global_step1/model.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    page.get_by_role("button", name="Verify").click()
    expect(page.locator("#check")).to_contain_text("DAMAGED: model.pt at byte")


@pytest.mark.nightly
def test_compare_shows_the_files_of_the_last_writing_of_a_tag_only_there(place, start, save, page):
    save(1)
    save(1)
    page.goto(start(place.storage).address)
    open_tab(page, "checkpoints")
    expect(page.locator("tbody tr[data-key]")).to_have_count(2)
    for one in page.get_by_label("compare global_step1").all():
        one.check()
    page.get_by_role("button", name="Compare", exact=True).click()
    rows = page.get_by_role("table", name="Checkpoints side by side").get_by_role("row")
    expect(rows.filter(has_text="entry").locator("td")).to_have_text(["-", "2"])
    expect(rows.filter(has_text="model.pt").locator("td")).to_have_text(["-", re.compile("KiB")])


LONG = "a-name-that-a-program-made-" * 8


@pytest.mark.nightly("studio/test_troubles.py::test_a_trouble_is_on_the_first_screen_of_page_and_command")
@pytest.mark.parametrize("width", [360, 1280])
def test_no_panel_is_wider_than_the_window(place, start, page, width):
    place.run(
        """
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        for tag in (sys.argv[2], "global_step7"):
            checkpoint = nm.Checkpoint(tag, metrics={"a_metric_with_a_long_name": 1.0})
            checkpoint.save(sys.argv[2][:100] + ".pt", torch.ones(10))
            assert checkpoint.commit()
            checkpoint.wait("durable")
        """,
        place.storage,
        LONG[:200],
    )
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(start(place.storage).address)
    for name in TABS:
        open_tab(page, name)
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    open_tab(page, "timeline")
    assert page.locator("svg").bounding_box()["width"] <= width
    assert page.locator("svg text").all_text_contents()[:2] == ["step", "7"]


DAYS = {"today": (0, r"\d\d:\d\d:\d\d"), "another day": (1, r"(\d{4}-)?\d\d-\d\d( \d\d:\d\d)?"), "another year": (400, r"\d{4}-\d\d-\d\d")}


@pytest.mark.nightly("test_hostile_names_are_shown_and_do_nothing")
@pytest.mark.parametrize(("width", "day"), [(1280, "today"), (1280, "another day"), (1920, "another year")])
def test_long_names_are_cut_and_told_whole_and_all_columns_are_in_view(place, start, page, width, day):
    tags = [LONG[:200], "W" * 200, "global_step7"]
    place.run(
        """
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        for tag in sys.argv[2:]:
            checkpoint = nm.Checkpoint(tag, metrics={"a_metric_with_a_long_name": 1.0, "val_loss": 2.0})
            checkpoint.save("f" * 150 + ".pt", {"k" * 180: torch.ones(10)})
            assert checkpoint.commit()
            checkpoint.wait("durable")
        """,
        place.storage,
        *tags,
    )
    pins(place.storage, tags[0], "--reason", "a long reason " * 10)
    page.set_viewport_size({"width": width, "height": 800})
    back, time_form = DAYS[day]
    # The browser's clock: `back` days later than that of the saves.
    page.add_init_script(
        f"const now = Date.now; Date = class extends Date {{ constructor(...all) {{ super(...(all.length ? all : [now() + {back} * 864e5])); }} }};"
    )
    page.goto(start(place.storage).address)
    open_tab(page, "checkpoints")
    expect(page.locator("tbody")).to_contain_text("pinned")
    column = page.locator("th").all_inner_texts().index("When ↓")
    times = page.locator(f"tbody tr[data-key] td:nth-child({column + 1})")
    assert [bool(re.fullmatch(time_form, one)) for one in times.all_inner_texts()] == [True] * len(tags), times.all_inner_texts()
    assert page.locator(".grid").evaluate("(grid) => grid.scrollWidth - grid.clientWidth") <= 0, "a column is out of view"
    assert page.locator("th").last.inner_text() == "Pin"
    is_cut = "(one) => one.scrollWidth > one.clientWidth && getComputedStyle(one).textOverflow === 'ellipsis'"
    for tag in tags:
        shown = page.locator("button.tag").and_(page.get_by_title(tag, exact=True))
        assert shown.evaluate(is_cut) == (len(tag) > 100)
    assert page.locator("tbody tr[data-key] td.metric").all_inner_texts() == ["1", "2"] * len(tags)
    page.get_by_title(tags[0], exact=True).click()
    expect(page.locator("dl")).to_contain_text(tags[0])
    assert page.locator("td").and_(page.get_by_title("f" * 150 + ".pt", exact=True)).evaluate(is_cut)
    page.get_by_role("button", name="tensors of").first.click()
    assert page.locator("td").and_(page.get_by_title("k" * 180, exact=True)).evaluate(is_cut)
    assert page.evaluate("[...document.querySelectorAll('.grid')].every((grid) => grid.scrollWidth <= grid.clientWidth)")


@pytest.mark.nightly
def test_a_time_of_another_day_has_its_date(place, start, save, page):
    save(1)
    page.goto(start(place.storage).address)
    shown = "(at) => import('/grid.js').then((grid) => grid.clock(at))"
    assert re.fullmatch(r"2001-09-0\d \d\d:\d\d:\d\d", page.evaluate(shown, 1e9))
    assert re.fullmatch(r"(\S+ )?\d\d:\d\d:\d\d", page.evaluate(shown, time.time()))


def test_prune_shows_what_goes_and_removes_just_that(place, start, save, page):
    save(1, 2, 3, 4)
    studio = start(place.storage)
    assert studio.ask("POST", "/api/pin", {"tag": "global_step1", "reason": "kept"})[0] == 200
    page.goto(studio.address)
    page.get_by_role("button", name="Prune…").click()
    page.get_by_label("Keep the newest").fill("1")
    page.get_by_role("button", name="Show").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("2 versions would be removed")
    expect(dialog).to_contain_text("global_step1")
    expect(dialog).to_contain_text("(pinned)")
    assert (place.storage / "global_step2/model.pt").exists(), "the preview removed something"
    page.get_by_role("button", name="Remove them").click()
    expect(page.get_by_role("status").first).to_contain_text("done: pruned")  # rows are gone before the files
    open_tab(page, "checkpoints")
    page.get_by_label("Show", exact=True).select_option("durable")
    expect(page.locator("tbody tr[data-key]")).to_have_count(2)
    left = {one.name for one in place.storage.iterdir() if one.name.startswith("global")}
    assert left == {"global_step1", "global_step4"}
    asked = {"versions": [{"tag": "global_step1", "entry": 1}, {"tag": "global_step4", "entry": 1}]}
    told = studio.work("prune", asked)["results"]
    assert [one["removed"] for one in told] == [False, False] and "pinned" in told[0]["reason"] and told[1]["reason"]


@pytest.mark.nightly
def test_prune_keeps_a_version_that_was_written_again_after_the_preview(place, start, save, page):
    save(1, 2, 3)
    studio = start(place.storage)
    page.goto(studio.address)
    page.get_by_role("button", name="Prune…").click()
    page.get_by_label("Keep the newest").fill("1")
    page.get_by_role("button", name="Show").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("2 versions would be removed")
    save(1, 9)  # the newest is another, so that a rule would still remove the first
    page.get_by_role("button", name="Remove them").click()
    expect(dialog).to_contain_text("Some stay")
    expect(dialog).to_contain_text('global_step1: "global_step1" was written again meanwhile')
    left = {one.name for one in place.storage.iterdir() if one.name.startswith("global")}
    assert left == {"global_step1", "global_step3", "global_step9"}


@pytest.mark.nightly("test_prune_shows_what_goes_and_removes_just_that", "studio/test_guard.py::test_a_control_needs_a_post_and_a_read_changes_nothing")
def test_flush_and_save_now(place, start, page):
    trainer = place.trainer(
        """
        with nm.Manager(sys.argv[1], save_every_steps=1_000_000, persistent_time_interval=3600) as manager:
            for step in range(1, 100_000):
                if saved := manager.save(step, {"extra": torch.ones(10)}, force=step in (1, 2)):
                    if step == 1:
                        saved.wait("durable")  # the interval begins
                    say(step)
                if step == 4:
                    say("looks")  # for a wish that comes after the look at step 3
                time.sleep(0.02)
        """,
        place.storage,
    )
    assert [trainer.stdout.readline() for _ in range(3)] == ["1\n", "2\n", "looks\n"]
    studio = start(place.storage)
    page.goto(studio.address)
    newest = card(page, "Newest loadable checkpoint")
    expect(newest).to_contain_text("committed, in memory")
    page.get_by_role("button", name="Flush the newest version").click()
    expect(newest).to_contain_text("durable")
    assert (place.storage / "global_step2/.nebula").exists()
    page.get_by_role("button", name="Save now").click()
    saved = int(trainer.stdout.readline())
    expect(newest.locator(".big")).to_have_text(f"global_step{saved}")
    trainer.kill()
    assert trainer.communicate()[0] == "", "one wish was answered twice"


CONTRAST = """() => {
    const light = (c) => { const [r, g, b] = c.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const ground = (one) => { for (; one; one = one.parentElement) { const c = parse(getComputedStyle(one).backgroundColor); if (c.length < 4 || c[3] === 1) return c.slice(0, 3); } return [255, 255, 255]; };
    const low = [];
    for (const one of document.querySelectorAll('body *')) {
        if (![...one.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || !one.checkVisibility() || one.disabled || one.closest('.skip')) continue;
        const [a, b] = [light(parse(getComputedStyle(one).color).slice(0, 3)), light(ground(one))].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) low.push(one.outerHTML.slice(0, 100));
    }
    return low;
}"""


@pytest.mark.nightly("test_filter_sort_and_compare")
def test_tabs_by_keyboard_and_names_for_a_screen_reader(place, start, save, page):
    save(1, 2, 3)
    page.emulate_media(color_scheme="dark")
    page.goto(start(place.storage).address)
    expect(page.locator(".card").first).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    for name in [*TABS[1:], TABS[0]]:
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == f"tab-{name}"
        assert page.locator("main").get_attribute("aria-labelledby") == f"tab-{name}"
    nameless = """() => [...document.querySelectorAll('button, input, select, canvas, svg, [role=region], table')].filter((one) => {
        const text = one.innerText || one.getAttribute('aria-label') || one.title || (one.labels && one.labels.length);
        return !text;
    }).map((one) => one.outerHTML.slice(0, 120))"""
    for name in TABS:
        open_tab(page, name)
        page.wait_for_timeout(300)
        assert page.evaluate(nameless) == [], name
        assert page.evaluate(CONTRAST) == [], name


@pytest.mark.nightly("test_filter_sort_and_compare")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_asks_for(place, start, save, page, scheme):
    save(1, 2, 3)
    page.emulate_media(color_scheme=scheme)
    page.goto(start(place.storage).address)
    for name in TABS:
        open_tab(page, name)
        page.wait_for_timeout(300)
        assert page.evaluate(CONTRAST) == [], name


@pytest.mark.nightly
def test_a_thousand_versions_and_ranks_are_drawn_without_lag(place, start, page):
    """A trainer saves 1,000 durable versions. The test itself writes the studio's answer with 1,024 ranks of a version."""
    place.storage = place.memory / "storage"  # where a sync costs nothing
    place.run(
        """
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        for step in range(1000):
            checkpoint = nm.Checkpoint(f"global_step{step}")
            checkpoint.save_bytes("a", [b"x"])
            assert checkpoint.commit()
            if step % 50 == 49:
                checkpoint.wait("durable")
        nm.flush_persistence()
        """,
        place.storage,
    )
    studio = start(place.storage)
    studio.until(lambda state: len(state["rows"]) == 1000, 60)
    page.goto(studio.address)
    expect(page.locator(".card").first).to_be_visible()
    took = """(name) => new Promise((done) => {
        const begun = performance.now();
        document.getElementById(`tab-${name}`).click();
        requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begun)));
    })"""
    assert page.evaluate(took, "checkpoints") < 500
    assert page.locator("tbody tr").count() < 80, "rows out of view are drawn"
    region = page.get_by_role("region", name="Checkpoints")
    assert region.locator("table").get_attribute("aria-rowcount") == "1001"
    region.evaluate("(node) => { node.scrollTop = node.scrollHeight; }")
    expect(page.locator("tbody")).to_contain_text("global_step0")
    assert page.evaluate(took, "timeline") < 1500

    ranks = [{"rank": i, "sequence": 1, "begun": 1e9, "captured": 1e9 + 1 + i / 1000, "persisted": 1e9 + 5 + (i * 37 % 1024) / 200} for i in range(1024)]
    answer = {"version": {"tag": "global_step999", "sequence": 1, "size": 1, "files": [], "ranks": ranks}, "check": None, "restore": "nebula"}
    page.route("**/api/version?*", lambda route: route.fulfill(json=answer))
    assert page.evaluate(took, "version") < 500
    canvas = page.locator("canvas")
    expect(canvas).to_have_attribute("aria-label", "1024 ranks, 10\u00a0s from the first begin to the last write; slowest: rank 83")
    assert page.locator("tbody tr").count() < 80


@pytest.mark.nightly("test_a_verdict_is_a_banner_above_every_panel_until_the_job_is_fine", "python/test_studio_collector.py::test_a_storage_that_hangs_is_said_on_the_page")
def test_a_path_that_cannot_be_shown_says_why(place, start, save, page, tmp_path):
    studio = start(tmp_path / "file")
    (tmp_path / "file").write_text("no directory")
    page.goto(studio.address)
    expect(page.get_by_role("alert")).to_contain_text(f"{tmp_path.name}/file")
    expect(card(page, "Newest loadable checkpoint")).to_contain_text("not known")
    expect(card(page, "Storage")).to_contain_text("cannot be read")
    page.goto(start(tmp_path / "nothing-yet").address)
    expect(card(page, "Newest loadable checkpoint")).to_contain_text("none yet")
    for name in TABS:
        open_tab(page, name)
    save(1, 2)
    manifest = next((place.storage / "global_step2/.nebula").glob("manifest-*.json"))
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "version": "9.0"}))
    place.kill_agent()
    page.goto(start(place.storage).address)
    expect(page.get_by_role("alert")).to_contain_text("global_step2")
    expect(card(page, "Newest loadable checkpoint")).to_contain_text("global_step1")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to act as another user")
def test_a_path_without_rights_says_so(place, start, save, tmp_path):
    save(1)
    place.kill_agent()
    place.storage.chmod(0o000)
    for one in (place.root, Path(place.runtime)):
        one.chmod(0o755)
    command = Path(os.environ.get("NEBULA_AGENT_PATH") or shutil.which("nebula"))
    told = subprocess.run(
        [command, "status", "--json", "--path", place.storage],
        capture_output=True,
        text=True,
        user=65534,
        env={"NEBULA_RUNTIME_DIR": str(tmp_path / "none")},
        cwd="/",
    )
    place.storage.chmod(0o755)
    if told.returncode == 126 or "Permission denied" not in told.stdout + told.stderr:
        pytest.skip("another user cannot run the command from here")
    assert "Permission denied" in json.loads(told.stdout)["storage"]["error"]["message"], "what the page shows in its alert"


@pytest.mark.nightly
def test_each_panel_has_an_address_that_a_reload_and_the_back_button_know(place, start, save, page):
    save(1, 2)
    studio = start(place.storage)
    page.goto(studio.address)
    expect(page).to_have_url(re.compile("#now$"))  # the token is in no address that could be given away
    open_tab(page, "checkpoints")
    page.get_by_role("button", name="global_step1").click()
    expect(page).to_have_url(re.compile("#version/global_step1$"))
    page.reload()
    expect(page.locator("#tab-version")).to_have_attribute("aria-selected", "true")
    expect(page.locator("dl")).to_contain_text("global_step1")
    page.go_back()
    expect(page.locator("#tab-checkpoints")).to_have_attribute("aria-selected", "true")
    page.goto("about:blank")
    page.goto(f"{studio.address}/timeline")
    expect(page.locator("#tab-timeline")).to_have_attribute("aria-selected", "true")
    expect(page.locator("svg circle")).to_have_count(2)


@pytest.mark.nightly
def test_a_tag_that_was_selected_on_the_first_panel_stays_selected_while_ages_go_on(place, start, save, page):
    save(1)
    page.goto(start(place.storage).address)
    newest = card(page, "Newest loadable checkpoint")
    expect(newest.locator(".big")).to_have_text("global_step1")
    newest.locator(".big").select_text()
    age = newest.locator(".faint").inner_text()
    expect(newest.locator(".faint")).not_to_have_text(age)
    assert page.evaluate("String(getSelection())").strip() == "global_step1"


@pytest.mark.nightly("studio/test_troubles.py::test_a_trouble_is_on_the_first_screen_of_page_and_command")
def test_a_rank_that_is_gone_is_told_on_the_first_panel_with_the_newest_good_version(place, start, page):
    job = """
        os.environ.update(RANK=sys.argv[2], WORLD_SIZE="2", LOCAL_RANK=sys.argv[2], LOCAL_WORLD_SIZE="2", NEBULA_RUN="one")
        nm.init(sys.argv[1], 0)
        for step in range(1, int(sys.argv[3]) + 1):
            with nm.Checkpoint(f"global_step{step}", -2) as checkpoint:
                checkpoint.save(f"{sys.argv[2]}.pt", torch.ones(3))
            if step <= 2:
                checkpoint.wait("durable")
        say("end")
        sys.stdin.readline()
    """
    stays, goes = (place.trainer(job, place.storage, rank, steps, stdin=True) for rank, steps in ((0, 6), (1, 2)))
    assert goes.stdout.readline() == "end\n"
    goes.kill()
    goes.wait()
    assert stays.stdout.readline() == "end\n"
    page.goto(start(place.storage).address)
    newest = card(page, "Newest loadable checkpoint")
    expect(newest.locator(".big")).to_have_text("global_step2")
    expect(newest).to_contain_text(re.compile(r"4 newer cannot be loaded: global_step6 failed: rank 1 \(process \d+\) ended before it began"))
    expect(card(page, "Trainers").locator(".big")).to_have_text("connected, no checkpoint becomes complete")
    stays.communicate("\n", timeout=60)


@pytest.mark.nightly
def test_a_pause_of_a_night_takes_little_room_on_the_timeline_and_is_named(place, start, page, tmp_path):
    header = "tag,step,sequence,world,files,size_bytes,result,blocked_ms,copy_ms,capture_cpu_ms,faults,begun,captured,committed,durable"
    rows = [header + ",persist_seconds,persist_mib_per_s,error"]
    for step in range(1, 41):
        at = 1_700_000_000 + 10 * step + (8 * 3600 if step > 20 else 0)
        rows.append(f'"global_step{step}",{step},1,1,1,1000,durable,1,1,1,0,{at},{at},{at},{at + 1},1,1,""')
    (tmp_path / "checkpointHistories.csv").write_text("\n".join(rows) + "\n")
    place.storage.mkdir()
    page.goto(start(place.storage, "--history", str(tmp_path)).address)
    open_tab(page, "timeline")
    expect(page.locator("svg circle")).to_have_count(40)
    places = [float(one.get_attribute("cx")) for one in page.locator("svg circle").all()]
    steps = [right - left for left, right in itertools.pairwise(places)]
    assert min(steps) > 10 and max(steps) == steps[19] < 6 * min(steps), steps
    expect(page.locator("svg text", has_text="8.0 h")).to_be_visible()
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d", " ".join(page.locator("svg text").all_text_contents())), "a time has its date"
    picture = page.get_by_role("region", name="Saves over time")
    picture.press("+")
    expect(page.locator("svg circle")).not_to_have_count(40)
    shown = page.locator("svg circle").count()
    expect(page).to_have_url(re.compile(r"#timeline\?from=[\d.]+&to=[\d.]+$"))
    page.reload()
    expect(page.locator("svg circle")).to_have_count(shown)
    picture.press("0")
    expect(page.locator("svg circle")).to_have_count(40)
    expect(page).to_have_url(re.compile("#timeline$"))
    page.locator("svg circle").first.press("Enter")
    expect(page).to_have_url(re.compile("#version/global_step1$"))


def test_a_verdict_is_a_banner_above_every_panel_until_the_job_is_fine(place, start, page, monkeypatch):
    """Storage fails, and later works again."""
    monkeypatch.setenv("NEBULA_TAKEOVER_S", "1")
    trainer = place.trainer(TRAINS, place.storage, 1, 0)
    assert trainer.stdout.readline()
    studio = start(place.storage)
    studio.until(lambda state: (state.get("verdict") or {}).get("state") == "fine" and state["now"]["newest"])
    page.goto(studio.address)
    expect(card(page, "Newest loadable checkpoint").locator(".big")).to_have_text(re.compile(r"global_step\d+"))
    banner = page.locator("#verdict")
    expect(banner).to_be_empty()
    aside = place.storage.rename(place.root / "aside")
    place.storage.write_text("a file in the place of the directory")
    expect(banner).to_contain_text("broken since")
    for name in TABS:
        open_tab(page, name)
        expect(banner).to_be_visible()
        expect(banner).to_contain_text("storage fails, and ")
        expect(banner).to_contain_text("What to do: move away")
    assert banner.get_attribute("class") == "broken"
    open_tab(page, "now")  # what memory has can be loaded
    expect(card(page, "Newest loadable checkpoint").locator(".big")).to_have_text(re.compile(r"global_step\d+"))
    expect(card(page, "Newest loadable checkpoint")).to_contain_text("in memory")
    expect(card(page, "Lost if the node died now")).to_contain_text("not known")
    place.storage.unlink()
    aside.rename(place.storage)
    expect(banner).to_be_empty()
    trainer.kill()
    trainer.communicate()


AXE = Path(sys.prefix) / "axe/node_modules/axe-core/axe.min.js"


@pytest.mark.nightly("test_filter_sort_and_compare")
@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not here: scripts/studio.sh browser installs it with npm")
@pytest.mark.parametrize("width", [400, 1280])
def test_axe_finds_no_fault_on_any_panel(place, start, save, page, width):
    """https://github.com/dequelabs/axe-core: the rules of WCAG 2.2 that a program can check."""
    save(1, 2, 3)
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(start(place.storage).address)
    expect(card(page, "Newest loadable checkpoint")).to_contain_text("global_step3")
    page.evaluate(AXE.read_text())
    for name in TABS:
        open_tab(page, name)
        page.wait_for_timeout(300)
        found = page.evaluate("axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa'] })")["violations"]
        assert [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in found] == [], name


@pytest.mark.nightly
def test_a_verification_by_the_command_is_shown_and_closes_nothing_that_is_open(place, start, save, page):
    save(1, 2)
    page.goto(start(place.storage).address + "/version/global_step1")
    expect(page.locator("#check")).to_have_text("never verified")
    page.get_by_role("button", name="tensors of model.pt").click()
    tensors = page.get_by_role("region", name="Tensors of model.pt")
    expect(tensors).to_be_visible()
    command = locate.agent_path() or os.environ["NEBULA_AGENT_PATH"]
    subprocess.run([command, "verify", "--sample", "100%", "--path", place.storage], check=True, capture_output=True)
    expect(page.locator("#check")).to_contain_text("every byte was as it was written, ")
    expect(tensors).to_be_visible()
    open_tab(page, "checkpoints")
    assert page.locator("tbody tr[data-key] td", has_text=re.compile(r"^\d\d:\d\d:\d\d$")).count() == 4, "when, and when it was verified"
