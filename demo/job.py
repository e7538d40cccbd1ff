"""Runs the training process: starts it, follows its events, kills it if asked, and starts it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from .progress import Progress

UNREST = 0.25  # with a larger spread, step times say little about the engines
KILL_DELAY = 0.06  # seconds between the start of a save and the kill


@dataclass
class Attempt:
    """One process from start to end or kill."""

    started: float
    events: list[dict[str, Any]] = field(default_factory=list)
    killed: float | None = None

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


@dataclass
class Job:
    """One training job: as many attempts as it took to reach the last step."""

    engine: str
    title: str
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        """Returns the last computation of each step."""
        return {event["step"]: event for attempt in self.attempts for event in attempt.of("step")}

    @property
    def blocked_ms(self) -> list[float]:
        return [e["blocked"] * 1e3 for a in self.attempts for e in a.of("step") if e["blocked"] is not None]

    def step_ms(self, window: int) -> float:
        """Returns the wall time of a step with its share of a save: the median over windows of ``window`` steps.

        A window from one save to the next has each cost once. The median leaves out other work of the machine, and
        the first window of a process, which warms caches up, does not count.
        """
        means = []
        for attempt in self.attempts:
            times = [(event["trained"] + (event["blocked"] or 0)) * 1e3 for event in attempt.of("step")]
            means += [mean(times[at : at + window]) for at in range(window, len(times) - window + 1, window)]
        return median(means)

    def unrest(self, window: int) -> float:
        """Returns the spread of single steps, (9th - 1st decile) / median: a few percent on a quiet machine."""
        times = sorted(event["trained"] for attempt in self.attempts for event in attempt.of("step")[window:])
        return (times[len(times) * 9 // 10] - times[len(times) // 10]) / median(times)

    @property
    def digest(self) -> str:
        return self.attempts[-1].of("ended")[0]["digest"]

    @property
    def checkpoint_bytes(self) -> int:
        return self.attempts[-1].of("ended")[0]["bytes"]

    @property
    def killed_at_step(self) -> int:
        return self.attempts[0].of("saving")[-1]["step"]

    def summary(self, window: int) -> dict[str, Any]:
        """Returns the figures of the table, as plain values."""
        figures: dict[str, Any] = {"step_ms": self.step_ms(window)}
        if self.blocked_ms:
            figures |= {
                "saves": len(self.blocked_ms),
                "blocked_ms_median": median(self.blocked_ms),
                "blocked_ms_max": max(self.blocked_ms),
            }
        if len(self.attempts) > 1:
            figures |= self.recovery()
        return figures

    def recovery(self) -> dict[str, Any]:
        """Returns the cost of the kill: lost steps and seconds."""
        first, second = self.attempts[0], self.attempts[1]
        resumed = second.of("resumed")[0]
        return {
            "killed_at_step": self.killed_at_step,
            "resumed_from_step": resumed["step"],
            "steps_lost": self.killed_at_step - resumed["step"],
            "source": resumed["source"],
            "load_ms": resumed["seconds"] * 1e3,
            "process_start_s": second.of("ready")[0]["at"] - second.started,
            "open_ms": (second.of("opened")[0]["at"] - second.of("ready")[0]["at"]) * 1e3,
            "kill_to_training_s": resumed["at"] - (first.killed or second.started),
        }


class Runner:
    """Starts training processes with the same arguments for each engine."""

    def __init__(self, work: Path, steps: int, every: int, environment: dict[str, str]) -> None:
        self.work, self.steps, self.every = work, steps, every
        self.environment = {**os.environ, **environment}

    def run(self, engine: str, title: str, kill_at: int | None = None) -> Job:
        """Runs a whole job. With ``kill_at`` it is killed shortly after the save of that step began, and then started again."""
        job = Job(engine, title)
        progress = Progress(title, self.steps)
        attempt = self.attempt(job, progress, kill_at)
        if attempt.killed is not None:
            progress.end(f"SIGKILL {KILL_DELAY * 1e3:.0f} ms after the save of step {job.killed_at_step} began")
            progress = Progress(title + ", again", self.steps)
            progress.told = job.killed_at_step
            attempt = self.attempt(job, progress, None)
        note = f"done, loss {self.loss(job.steps[self.steps]):.4f}, {job.step_ms(self.every):.0f} ms a step"
        if attempt.of("resumed"):
            note += f", resumed from step {attempt.of('resumed')[0]['step']}"
        progress.end(note)
        return job

    def attempt(self, job: Job, progress: Progress, kill_at: int | None) -> Attempt:
        path = self.work / f"{job.engine}-{len(job.attempts)}.jsonl"
        path.touch()
        command = [sys.executable, "-m", "demo.train", "--engine", job.engine, "--folder", self.work / job.engine]
        command += ["--events", path, "--steps", str(self.steps), "--every", str(self.every)]
        attempt = Attempt(time.monotonic())
        job.attempts.append(attempt)
        with (
            open(path) as events,
            open(self.work / "stderr.txt", "w+") as stderr,
            subprocess.Popen([str(part) for part in command], env=self.environment, stderr=stderr) as process,
        ):
            try:
                self.follow(process, events, attempt, progress, kill_at)
            finally:
                process.kill()
            if attempt.killed is None and not attempt.of("ended"):
                stderr.seek(0)
                raise RuntimeError(f"the training process of {job.title!r} ended early:\n{stderr.read()}")
        return attempt

    def follow(self, process: Any, events: Any, attempt: Attempt, progress: Progress, kill_at: int | None) -> None:
        partial = ""
        while True:
            running = process.poll() is None
            for text in events.readlines():
                partial += text
                if not partial.endswith("\n"):
                    continue
                event, partial = json.loads(partial), ""
                attempt.events.append(event)
                self.show(event, attempt, progress)
                if event["kind"] == "saving" and event["step"] == kill_at:
                    time.sleep(max(0.0, event["at"] + KILL_DELAY - time.monotonic()))
                    process.kill()
                    attempt.killed = time.monotonic()
                    process.wait()
                    # The events before the kill still count.
                    attempt.events += [json.loads(line) for line in events.readlines() if line.endswith("\n")]
                    return
            if not running:
                return
            time.sleep(0.005)

    def show(self, event: dict[str, Any], attempt: Attempt, progress: Progress) -> None:
        if event["kind"] != "step":
            return
        saves = [past for past in attempt.of("step") if past["blocked"] is not None]
        saved = f"   step {saves[-1]['step']} saved in {saves[-1]['blocked'] * 1e3:.0f} ms" if saves else ""
        progress.show(event["step"], f"loss {self.loss(event):.3f}{saved}")

    @staticmethod
    def loss(event: dict[str, Any]) -> float:
        return float.fromhex(event["loss"])
