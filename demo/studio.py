"""``make demo-studio``: a job trains, saves, is killed and resumes, while `nebula studio` shows it. Ctrl-C ends all of it.

``--pictures DIR`` opens the page in Chromium, without a window, and makes the pictures of docs/operate.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .__main__ import environment, stop_agent

STEPS, EVERY, KILLS = 60, 2, 2
LINGER_S = 120


def wait_for(folder: Path, step: int, trainer: subprocess.Popen[bytes]) -> None:
    """Waits until a version of that step or a later one is durable, or the trainer has ended."""
    while trainer.poll() is None:
        steps = [int(one.name[11:]) for one in folder.glob("global_step*") if one.name[11:].isdecimal() and (one / ".nebula").exists()]
        if max(steps, default=0) >= step:
            return
        time.sleep(0.1)


LIVE = (("now", "light"),)
AFTER = (("checkpoints", "dark"), ("metrics", "light"), ("version", "light"), ("timeline", "dark"))


def pictures(address: str, folder: Path, panels: tuple[tuple[str, str], ...]) -> None:
    """Makes a picture of each panel, in that colour scheme."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        for name, scheme in panels:
            context = browser.new_context(viewport={"width": 1280, "height": 720}, color_scheme=scheme)
            page = context.new_page()
            page.goto(address)
            page.locator(".card").first.wait_for()
            page.locator(f"#tab-{name}").click()
            if name == "version":
                page.get_by_role("button", name="Verify").click()
                page.locator("#check .good").wait_for()
                page.get_by_role("button", name="tensors of").first.click()
                page.get_by_role("region", name="Tensors of").wait_for(timeout=60_000)
            page.wait_for_timeout(800)
            page.screenshot(path=folder / f"studio-{name}.png")
            context.close()
        browser.close()


def train(folder: Path, work: Path, variables: dict[str, str], steps: int) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-W", "ignore", "-m", "demo.train", "--engine", "nebula", "--folder", str(folder)]
    line += ["--events", str(work / "events"), "--steps", str(steps), "--every", str(EVERY)]
    return subprocess.Popen(line, env={**os.environ, **variables}, stdout=subprocess.DEVNULL)


def play(folder: Path, work: Path, variables: dict[str, str], steps: int, near_the_end: Callable[[], None]) -> None:
    """Trains to the end, and kills the trainer several times in between."""
    for kill in range(KILLS + 1):
        trainer = train(folder, work, variables, steps)
        print(f"training, pid {trainer.pid}", flush=True)
        try:
            if kill == KILLS:
                wait_for(folder, steps * 9 // 10, trainer)
                near_the_end()
                trainer.wait()
                return
            wait_for(folder, steps * (kill + 1) // (KILLS + 2), trainer)
            print("SIGKILL", flush=True)
        finally:
            if trainer.poll() is None:
                trainer.kill()
            trainer.wait()
        time.sleep(3)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.studio", description=__doc__)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="nebula-demo-")).resolve()
    memory = Path(tempfile.mkdtemp(prefix="nebula-demo-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    variables = environment(work, memory)
    folder = work / "run7"
    line = [sys.executable, "-m", "nebulaml", "studio", "--path", str(folder), "--port", str(args.port), "--history", str(work / "output")]
    studio = subprocess.Popen(line, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)
    try:
        assert studio.stdout is not None
        said = [studio.stdout.readline() for _ in range(3)]
        print("".join(said), flush=True)
        address = said[1].strip()
        if not address:
            return 1  # the trainer has printed the reason
        play(folder, work, variables, args.steps, lambda: args.pictures and pictures(address, args.pictures, LIVE))
        if args.pictures:
            pictures(address, args.pictures, AFTER)
        else:
            print(f"The job has ended. The page stays for {LINGER_S} s, or until Ctrl-C.", flush=True)
            time.sleep(LINGER_S)
    except KeyboardInterrupt:
        print()
    finally:
        studio.terminate()
        studio.wait()
        stop_agent(variables)
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
