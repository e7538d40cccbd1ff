"""Each trouble of a job is on the first screen of the page, at any width, and in the first lines of the command. NEBULA_TEST_PICTURES: a directory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nebulaml
import pytest
from nebulaml._session import locate
from playwright.sync_api import Page, expect
from python.conftest import Place
from waiting import until

MIB = 1 << 20
PICTURES = os.environ.get("NEBULA_TEST_PICTURES")  # before a test removes the variables
NIGHTLY = os.environ.get("NEBULA_TEST_NIGHTLY")
Story = Callable[[Place, pytest.MonkeyPatch], Iterator[None]]

RANK = """
import select, threading
rank, world = sys.argv[2:4]
os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world, NEBULA_RUN="one")
nm.init(sys.argv[1], 0)
for word in iter(sys.stdin.readline, ""):
    if word == "hang\\n":
        say("hangs")
        threading.Event().wait()
    elif word == "steps\\n":
        say("steps")
        step = 0
        while not select.select([sys.stdin], [], [], 0.005)[0]:  # until the next word
            step += 1
            nm.progress(step)
    else:
        checkpoint = nm.Checkpoint(f"global_step{word.split()[0]}", -2)
        checkpoint.save_bytes(rank + ".bin", [b"x"])
        if "half" not in word:
            checkpoint.commit()
        say("saved")
"""


def tell(trainer: Any, word: str) -> None:
    trainer.stdin.write(word + "\n")
    trainer.stdin.flush()
    assert trainer.stdout.readline()


def save(step: int, size: int = 1000, durable: bool = False) -> nebulaml.Checkpoint:
    checkpoint = nebulaml.Checkpoint(f"global_step{step}")
    checkpoint.save_bytes("b", [bytes(size)])
    assert checkpoint.commit()
    if durable:
        checkpoint.wait("durable", 60)
    return checkpoint


def kill(place, patch):
    ranks = [place.trainer(RANK, place.storage, rank, 2, stdin=True) for rank in (0, 1)]
    for rank in ranks:
        tell(rank, "1")
    yield
    tell(ranks[1], "2 half")
    ranks[1].kill()
    ranks[1].wait()
    for step in range(3, 43):
        tell(ranks[0], str(step))
    yield
    ranks[0].kill()
    ranks[0].wait()


def absent(place, patch):
    trainer = place.trainer(RANK, place.storage, 0, 2, stdin=True)
    yield
    tell(trainer, "1")
    yield
    trainer.kill()
    trainer.wait()


def hang(place, patch):
    patch.setenv("NEBULA_HANG_S", "1")
    trainer = place.trainer(RANK, place.storage, 0, 1, stdin=True)
    tell(trainer, "1")
    tell(trainer, "steps")
    until(lambda: any((job.get("steps") or {}).get("step", 0) > 300 for job in json.loads(command("status", "--json"))["jobs"]), 60, "300 steps")
    yield
    tell(trainer, "hang")
    yield
    trainer.kill()
    trainer.wait()


@contextlib.contextmanager
def mounted(place: Place, size: str) -> Iterator[None]:
    place.storage.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "nebula-test", place.storage], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place.storage], capture_output=True)


def fill(place, patch):
    with mounted(place, "12m"):
        nebulaml.init(str(place.storage), 0, 2)
        save(1, MIB, durable=True)
        yield
        save(2, 16 * MIB)
        yield
        nebulaml._shutdown()


def unmount(place, patch):
    with mounted(place, "64m"):
        nebulaml.init(str(place.storage), 0, 2)
        save(1, durable=True)
        yield
        subprocess.run(["umount", "-l", place.storage], check=True)
        save(2)
        yield
        nebulaml._shutdown()


def throttle(place, patch):
    patch.setenv("NEBULA_STORE_MBPS", "1")
    nebulaml.init(str(place.storage), 0, 2)
    yield
    save(1, 256 * MIB)  # for longer than the test looks
    yield
    nebulaml._shutdown()


def memory(place, patch):
    patch.setenv("NEBULA_STORE_MBPS", "1")
    patch.setenv("NEBULA_MEMORY_BUFFER_SIZE", str(300 * MIB))
    nebulaml.init(str(place.storage), 3600, 1)
    yield
    save(1, 256 * MIB)
    yield
    nebulaml._shutdown()


def copies(place, patch):
    nebulaml.init(str(place.storage), 0, 2, replicas=1)
    yield
    save(1, durable=True)
    yield
    nebulaml._shutdown()


def damage(place, patch):
    nebulaml.init(str(place.storage), 0, 2)
    save(1, durable=True)
    nebulaml._shutdown()
    command("stop", "--now", "--yes")
    manifest = place.storage / "global_step1" / ".nebula" / "manifest-1.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"global", b"gl0bal"))
    yield
    nebulaml.init(str(place.storage), 0, 2)
    save(2, durable=True)
    yield
    nebulaml._shutdown()


# The state, the reason and the cure, and the newest checkpoint that can be loaded.
TROUBLES = {
    kill: ("broken", r"global_step42 failed: rank 1 \(process \d+\) ended before it began .*; 41 checkpoints in a row have failed", "start the rank's job again", "global_step1"),
    absent: ("at risk", "global_step1 waits for rank 1 of 2", "look whether these ranks still run", "none yet"),
    hang: ("broken", "the job makes no steps: rank 0 has taken", "read the stacks", "global_step1"),
    fill: ("at risk|broken", 'storage fails, and 1 checkpoint after the durable "global_step1" is only in memory: .*No space left', "make room there", "global_step2"),
    unmount: ("at risk|broken", "storage fails, and 1 checkpoint .* is only in memory.* and with it its file system", "mount that file system again", "global_step2"),
    throttle: ("at risk", "storage is slow: global_step1 waits to become durable, and 1 checkpoint is only in memory: none is durable", "use faster storage", "global_step1"),
    memory: ("at risk", r"memory is full: the next save waits until a version has become durable \(\d+ of \d+ MiB are in use\)", "raise NEBULA_MEMORY_BUFFER_SIZE", "global_step1"),
    copies: ("at risk", "global_step1 has 0 of 1 copies in other nodes' memory", "see that the other nodes run", "global_step1"),
    damage: ("broken", "storage has a damaged checkpoint: .*global_step1", "`nebula verify --all` names what is damaged", "global_step2"),
}  # fmt: skip


def command(*words: str) -> str:
    return subprocess.run([locate.agent_path(), *words], capture_output=True, text=True, timeout=60).stdout


def on_first_screen(page: Page, selector: str) -> bool:
    box = page.locator(selector).first.bounding_box()
    return box is not None and box["y"] >= 0 and box["y"] + box["height"] <= page.viewport_size["height"]


SHORT = (kill,)


# fault: as test_a_rank_that_dies_in_the_middle_of_a_save_breaks_the_job_until_a_version_is_complete_again
@pytest.mark.parametrize("story", TROUBLES if NIGHTLY else SHORT, ids=lambda story: story.__name__)
def test_a_trouble_is_on_the_first_screen_of_page_and_command(story, place, start, page, monkeypatch):
    state, reason, cure, newest = TROUBLES[story]
    monkeypatch.setenv("NEBULA_TAKEOVER_S", "1")
    told = story(place, monkeypatch)
    next(told)
    studio = start(place.storage)
    page.goto(studio.address)
    expect(page.locator("#verdict")).to_be_empty()
    next(told)
    banner = page.locator("#verdict")
    expect(banner).to_contain_text(re.compile(f"({state}) since .*{reason}.*What to do: .*{cure}", re.DOTALL))
    assert re.search(state, banner.get_attribute("class").replace("-", " "))
    expect(page).to_have_title(re.compile(f"^({state}): "))
    expect(page.locator(".card .big").first).to_have_text(newest)
    for width, height in ((1400, 900), (400, 800)):
        page.set_viewport_size({"width": width, "height": height})
        for selector in ("#verdict", ".card"):
            assert on_first_screen(page, selector), (width, selector)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        if PICTURES:
            page.screenshot(path=Path(PICTURES) / f"{story.__name__}-{width}.png")
    for words in (("status",), ("list",)):
        lines = [line for line in command(*words, "--path", str(place.storage)).splitlines() if not line.startswith("agent ")]
        assert re.match(f"job      ({state})( for [^:]+)?: {reason}", lines[0]) and lines[1].startswith("         do: "), lines[:4]
        assert any(newest in line for line in lines[:8]) or newest == "none yet", lines
    for _ in told:
        pass
