"""A job that fails all the time, for minutes or hours: what grows?

    python tests/campaign/soak.py [--minutes 10] [--seed 1]        (`make soak`)

A trainer saves a version about every 0.1 s, waits for some to be durable, and removes old ones (keep_last). A week of versions every 15 minutes is 672.
Meanwhile, about every 2 s, one of these happens: the trainer is killed, its storage is full, may not be written, or stands still, or, in the first
half, the agent is killed. In the first half the wall clock of agent and trainer steps as well, by up to 30 days in either direction; the times of files do not. At half time the agent is stopped and started again, as in an upgrade: there is no release yet, so it is the same build. The
second half has one agent. The numbers of removals (.nebula/removed) do not count as files: a sweep removes them after 7 days.

Wrong is: a trainer that begins without the newest version that was durable, or with other values; and growth in the second half beyond the bounds below,
of the agent's memory, descriptors and threads, of the files in storage and memory, and of requests to storage per version.

Storage is a file system of its own of 64 MiB, which needs root. Without root, storage is neither full nor refused.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import agents  # noqa: E402

EVENTS_S, SAMPLE_S, DOWN_S = 2.0, 2.0, 1.0
STEPS_S = [0, -3600, 3600, -86400, 86400, 8 * 86400, -30 * 86400, 30 * 86400]
CLOCK = Path(__file__).resolve().parents[1] / "doubles/os/stepped_clock.c"
WEEK = 672
# So much may a measure grow from the third to the fourth quarter of the run: the larger of a share and a number. Of anonymous memory a part is what the C
# library keeps after it was freed: in each of its heaps, of which each thread has one.
BOUNDS = {"anonymous KiB": (0.2, 2048), "descriptors": (0, 4), "threads": (0, 3), "files in storage": (0.1, 8), "files in memory": (0.1, 6), "requests per version": (0.1, 1)}

TRAINER = """
import os, sys, random
import nebulaml as nm
path = sys.argv[1]
def content(step): return random.Random(step).randbytes(200_000)
nm.init(path, 0, 4, keep_last=3, on_error="warn")
found, step = nm.get_latest_checkpoint(), 0
if found is not None:
    step = int(found.tag.removeprefix("global_step"))
    assert bytes(found.read_bytes("model")) == content(step), "other values"
print("resumed", step, flush=True)
while True:
    step += 1
    checkpoint = nm.Checkpoint(f"global_step{step}")
    if checkpoint.save_bytes("model", content(step)) and checkpoint.commit() and step % 4 == 0:
        try:
            checkpoint.wait("durable", 2)
            print("durable", step, flush=True)
        except nm.NebulaError:
            pass
    print("saved", step, flush=True)
    import time; time.sleep(0.05)
"""


class Soak:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.root = Path(tempfile.mkdtemp(prefix="soak-"))
        self.memory = Path(tempfile.mkdtemp(prefix="soak-", dir="/dev/shm"))
        self.mount, self.runtime = self.root / "mount", self.root / "run"
        self.mount.mkdir()
        self.is_mounted = os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "soak", self.mount]).returncode == 0
        self.storage, self.clock = self.mount / "storage", self.root / "clock"
        subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-o", self.root / "clock.so", CLOCK], check=True)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("NEBULA_")} | {
            "NEBULA_RUNTIME_DIR": str(self.runtime), "NEBULA_MEMORY_DIR": str(self.memory), "NEBULA_AGENT_LINGER": "600",
            "NEBULA_AGENT_PATH": os.environ.get("NEBULA_AGENT_PATH") or str(Path(sys.executable).with_name("nebula")), "NEBULA_MEMORY_BUFFER_SIZE": "256M",
            "LD_PRELOAD": str(self.root / "clock.so"), "NEBULA_TEST_CLOCK": str(self.clock),
        }  # fmt: skip
        self.durable, self.saved, self.wrong, self.happened = 0, 0, [], Counter()
        self.program = self.root / "trainer.py"
        self.program.write_text(TRAINER)
        self.output, self.errors = self.root / "output", self.root / "errors"
        self.trainer: subprocess.Popen[bytes] | None = None
        self.read, self.count = 0, 0

    def agent(self) -> int | None:
        return next(iter(agents(lambda variables: f"NEBULA_RUNTIME_DIR={self.runtime}" in variables)), None)

    def start(self) -> None:
        with open(self.output, "ab") as output, open(self.errors, "ab") as errors:
            self.trainer = subprocess.Popen([sys.executable, self.program, self.storage], env=self.environment, stdout=output, stderr=errors)

    def listen(self) -> None:
        """Reads the lines of trainers. A trainer must begin with a version that was durable before it began, or a newer one."""
        with open(self.output, "rb") as file:
            file.seek(self.read)
            *lines, _ = file.read().split(b"\n")
        for line in lines:
            self.read += len(line) + 1
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "durable":
                self.durable = max(self.durable, int(rest))
            elif word == "saved":
                self.saved += 1
            elif word == "resumed" and int(rest) < self.durable:
                self.wrong.append(f"a trainer resumes from step {rest}, and step {self.durable} was durable")

    def kill_trainer(self) -> None:
        assert self.trainer
        self.trainer.kill()
        self.trainer.wait()
        self.listen()
        self.start()

    def kill_agent(self) -> None:
        if agent := self.agent():
            os.kill(agent, signal.SIGKILL)

    def fill(self) -> None:
        with contextlib.suppress(OSError), open(self.mount / "filler", "wb") as filler:
            while True:
                filler.write(bytes(1 << 20))
        time.sleep(DOWN_S)
        (self.mount / "filler").unlink()

    def refuse(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", self.mount], check=False, capture_output=True)  # busy: nothing happens
        time.sleep(DOWN_S)
        subprocess.run(["mount", "-o", "remount,rw", self.mount], check=True)

    def stand_still(self) -> None:
        """As storage that throttles or hangs: the agent does not get on."""
        if agent := self.agent():
            os.kill(agent, signal.SIGSTOP)
            time.sleep(DOWN_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGCONT)

    def step_clock(self) -> None:
        (self.root / "next").write_text(str(self.chance.choice(STEPS_S)))
        (self.root / "next").rename(self.clock)

    def upgrade(self) -> None:
        subprocess.run([self.environment["NEBULA_AGENT_PATH"], "stop"], env=self.environment, timeout=60, capture_output=True)
        self.kill_trainer()

    def happen(self, has_agents: bool) -> None:
        choices = [self.kill_trainer, self.kill_trainer, self.stand_still] + ([self.fill, self.refuse] if self.is_mounted else []) + ([self.kill_agent, self.step_clock, self.step_clock] if has_agents else [])
        chosen = self.chance.choice(choices)
        self.happened[chosen.__name__] += 1
        chosen()

    def sample(self) -> dict[str, float] | None:
        agent = self.agent()
        if not agent:
            return None
        try:
            status = Path(f"/proc/{agent}/status").read_text()
            descriptors = len(os.listdir(f"/proc/{agent}/fd"))
        except OSError:
            return None
        told = subprocess.run([self.environment["NEBULA_AGENT_PATH"], "metrics", "--path", self.storage], env=self.environment, capture_output=True, text=True, timeout=60).stdout
        return {
            "agent": agent,
            "anonymous KiB": int(re.search(r"RssAnon:\s*(\d+)", status)[1]),
            "descriptors": descriptors,
            "threads": int(re.search(r"Threads:\s*(\d+)", status)[1]),
            "files in storage": sum(len(files) for place, _, files in os.walk(self.storage) if "/.nebula/removed" not in place),
            "files in memory": len(os.listdir(self.memory)),
            "operations": Counter({name: float(value) for name, value in re.findall(r'^nebula_storage_requests_total\{.*operation="(\w+)".*\} ([\d.e+]+)$', told, re.M)}),
            "requests": sum(float(value) for value in re.findall(r"^nebula_storage_requests_total\S* ([\d.e+]+)$", told, re.M)),
            "saved": self.saved,
        }

    def close(self) -> None:
        if self.trainer:
            self.trainer.kill()
            self.trainer.wait()
        self.kill_agent()
        if self.is_mounted:
            subprocess.run(["umount", "-l", self.mount], check=False)
        for place in (self.root, self.memory):
            shutil.rmtree(place, ignore_errors=True)


def requests_per_version(samples: list[dict[str, float]]) -> float:
    return (samples[-1]["requests"] - samples[0]["requests"]) / max(samples[-1]["saved"] - samples[0]["saved"], 1)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    soak, samples = Soak(given.seed), []
    begun, half, end = time.monotonic(), False, given.minutes * 60
    try:
        soak.start()
        next_event, next_sample = EVENTS_S, SAMPLE_S
        while (now := time.monotonic() - begun) < end:
            if not half and now > end / 2:
                half = True
                soak.upgrade()
                time.sleep(2)
            if soak.trainer.poll() is not None:
                soak.wrong.append(f"a trainer ended by itself with {soak.trainer.returncode}: {soak.errors.read_text(errors='replace')[-800:]}")
                soak.start()
            if now > next_sample and half and (sample := soak.sample()):
                samples.append(sample)
                next_sample = now + SAMPLE_S
            if now > next_event:
                soak.happen(not half)
                next_event = time.monotonic() - begun + EVENTS_S * (0.5 + soak.chance.random())
            soak.listen()
            time.sleep(0.05)
        middle = len(samples) // 2
        quarters = samples[:middle], samples[middle:]
        if len({sample["agent"] for sample in samples}) != 1:
            soak.wrong.append("the agent of the second half did not live to its end")
        print(f"{given.minutes:g} minutes: {soak.saved} versions, as many as in {soak.saved / WEEK:.1f} weeks; {', '.join(f'{count} {name}' for name, count in sorted(soak.happened.items()))}")
        for name, (share, number) in BOUNDS.items():
            before, after = (requests_per_version(part) if name == "requests per version" else mean(one[name] for one in part) for part in quarters)
            limit = before + max(share * before, number)
            print(f"    {name:<22} {before:10.1f} {after:10.1f}{'' if after <= limit else '   GROWS'}")
            if after > limit:
                soak.wrong.append(f"{name} grow from {before:.1f} to {after:.1f}")
    finally:
        soak.close()
    for line in dict.fromkeys(soak.wrong):
        print("    wrong:", line)
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
