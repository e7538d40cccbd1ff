"""Cuts the power below real agents and trainers.

    python tests/power/power.py [--cuts 300] [--seed 1] [--on fuse,ext4] [--stories save,retain] [--kept DIRECTORY]

Each story is played once by a real trainer and its agent, on a file system that keeps a log of all changes and syncs (powerfs.c). With
``--on ext4`` the storage lies on an ext4 of a loop device, and that device's image lies on powerfs: the kernel's file system loses the sectors
that it had not flushed. Then the power is cut at random positions of the log. Each cut makes a state, on which another agent and trainer
begin. It is right if:

* what was reported as durable before the cut loads, bit for bit, unless a removal or a newer writing of its tag had begun;
* nothing is a mixture: what loads under a tag is one of its writings;
* the newest version is the last durable one, or a newer one;
* what was reported as removed does not come back, and what was pinned is there;
* the next save becomes durable, and is then the newest;
* after one more start, no large file lies in storage that no version has.

A wrong state is named with its story, position and seed, which make it again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import nebulaml as nm  # noqa: E402
from processes import agents  # noqa: E402

BUILD = Path(os.environ.get("NEBULA_BUILD_DIR") or ROOT / "build")
POWERFS = BUILD / "tests/power/powerfs"
NEBULA = os.environ.get("NEBULA_AGENT_PATH") or shutil.which("nebula") or str(Path(sys.executable).with_name("nebula"))
MIB = {"ext4": 64, "ext4-writeback": 64, "xfs": 300, "btrfs": 120}  # of the image; the least that each takes
MKFS = {
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "ext4-writeback": ["mkfs.ext4", "-q", "-F"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}
LARGE = 32 << 10  # bytes; documents of Nebula are smaller in these stories
BIG = 3 << 20  # bytes of a file that the agent writes while it is copied
WAIT_S = 60
AT_ONCE = 3  # states that are judged


class PowerFs:
    """A mounted powerfs, and its commands."""

    def __init__(self, backing: Path, mount: Path) -> None:
        for path in (backing, mount):
            path.mkdir(parents=True, exist_ok=True)
        self.mount = mount
        log = mount.with_name("powerfs.log")
        with open(log, "w") as said:  # libfuse complains of its own defaults
            self._process = subprocess.Popen(
                [POWERFS, backing, mount], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
            )
        assert self._process.stdout.readline() == "ready\n", log.read_text()

    def _ask(self, command: str) -> int:
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def position(self) -> int:
        return self._ask("position")

    def cut(self, position: int, seed: int, path: Path) -> None:
        result = self._ask(f"cut {position} {seed} {path}")
        assert result == 0, os.strerror(-result)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


def content(tag: str, writing: int, name: str, size: int) -> bytes:
    return random.Random(f"{tag}/{writing}/{name}").randbytes(size)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Trainer:
    """The trainer of a story. It writes down what it was promised, and when: positions in the log."""

    def __init__(self, root: Path, fs: PowerFs) -> None:
        self.root, self.fs = root, fs  # root: where storage paths lie
        self.events: list[dict[str, Any]] = []
        self.storage = "a"
        self.latest: dict[str, dict[str, bytes]] = {}

    @property
    def path(self) -> Path:
        return self.root / self.storage

    def say(self, what: str, **about: Any) -> None:
        self.events.append({"at": self.fs.position(), "what": what, "storage": self.storage, **about})

    def begin(self, **settings: Any) -> None:
        nm.init(str(self.path), "1h", 16, **settings)

    def save(
        self, tag: str, sizes: dict[str, int], may_go: tuple[str, ...] = (), wait: bool = True, whole: bool = True
    ) -> Any:
        """Saves one writing of the tag. may_go: tags that rules may remove from now on. Without whole, files of the writing before stay."""
        writing = sum(event["what"] == "begun" and event["tag"] == tag for event in self.events)
        files = {name: content(tag, writing if name != "frozen" else 0, name, size) for name, size in sizes.items()}
        for other in may_go:
            self.say("may-go", tag=other)
        both = files if whole else {**self.latest.get(tag, {}), **files}
        self.latest[tag] = both
        self.say("begun", tag=tag, files={name: digest(data) for name, data in both.items()})
        checkpoint = nm.Checkpoint(tag, -2)
        for name, data in files.items():
            assert checkpoint.save_bytes(name, data)
        assert checkpoint.commit()
        if wait:
            checkpoint.wait("durable", WAIT_S)
            self.say("durable", tag=tag)
        return checkpoint

    def opened(self, file: str) -> list[dict[str, Any]]:
        """A framework is about to save a checkpoint, and to make it appear as this file or directory below the root."""
        self.say("begun", tag=None, files={})
        self.say("published-begun", file=file, digest=None)
        return self.events[-2:]

    def closed(self, opened: list[dict[str, Any]]) -> None:
        """The framework has saved it: what it holds is known only now."""
        nm.flush_persistence(timeout=WAIT_S)
        found, (begun, published) = nm.get_latest_checkpoint(), opened
        begun |= {"tag": found.tag, "files": loaded(found)}
        assert found.tag not in self.latest, found.tag
        self.latest[found.tag] = {}
        self.say("durable", tag=found.tag)
        if (self.root / published["file"]).is_file():
            published["digest"] = digest((self.root / published["file"]).read_bytes())
            self.say("published", file=published["file"], digest=published["digest"])
        else:
            self.events.remove(published)

    def command(self, *words: str) -> None:
        done = subprocess.run([NEBULA, *words], capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, (words, done.stdout, done.stderr)


SIZES = {"model": 100_000, "optimizer": 200_000}


def save(job: Trainer) -> None:
    job.begin()
    for step in (1, 2):
        job.save(f"global_step{step}", SIZES)
    job.save("global_step2", SIZES)
    job.save("global_step3", SIZES, wait=False)
    job.save("global_step4", SIZES)


def ahead(job: Trainer) -> None:
    """Large files are written while they are copied."""
    job.begin()
    for step in (1, 2):
        job.save(f"global_step{step}", {"model": BIG, "optimizer": 2 * BIG})


def carry(job: Trainer) -> None:
    """A tag is written again in part: the other files carry over."""
    job.begin()
    job.save("best", {"model": 100_000, "frozen": 300_000})
    job.save("best", {"model": 90_000}, whole=False)
    job.save("best", {"model": 120_000}, whole=False)


def unchanged(job: Trainer) -> None:
    """Versions take unchanged bytes over from the version before."""
    job.begin(keep_last=2)
    for step in range(1, 5):
        job.save(
            f"global_step{step}",
            {"model": 100_000, "frozen": BIG},
            may_go=(f"global_step{step - 2}",) if step > 2 else (),
        )


def retain(job: Trainer) -> None:
    job.begin(keep_last=2)
    for step in range(1, 7):
        job.save(f"global_step{step}", SIZES, may_go=(f"global_step{step - 2}",) if step > 2 else ())


def prune(job: Trainer) -> None:
    job.begin()
    for step in range(1, 5):
        job.save(f"global_step{step}", SIZES)
    job.say("may-go", tag="global_step2")
    job.command("prune", "--path", str(job.path), "--tag", "global_step2", "--yes")
    job.say("gone", tag="global_step2")
    job.save("global_step5", SIZES)
    for step in (1, 3, 4):
        job.say("may-go", tag=f"global_step{step}")
    job.command("prune", "--path", str(job.path), "--keep-last", "1", "--yes")
    for step in (1, 3, 4):
        job.say("gone", tag=f"global_step{step}")


def thin(job: Trainer) -> None:
    """Older versions lose a file, and keep the others."""
    job.begin()
    for step in range(1, 4):
        job.save(f"global_step{step}", SIZES)
    for step in (1, 2):
        job.say("may-lose", tag=f"global_step{step}", file="optimizer")
    job.command("prune", "--path", str(job.path), "--keep-last", "1", "--thin", "optimizer", "--yes")
    for step in (1, 2):
        job.say("lost", tag=f"global_step{step}", file="optimizer")


def pin(job: Trainer) -> None:
    job.begin(keep_last=1)
    job.save("global_step1", SIZES)
    job.command("pin", "global_step1", "--path", str(job.path))
    for step in range(2, 5):
        job.save(f"global_step{step}", SIZES, may_go=(f"global_step{step - 1}",) if step > 2 else ())


def publish(job: Trainer) -> None:
    job.begin()
    for step in (1, 2):
        files = {"model": content("out", step, "model", 150_000)}
        job.say("published-begun", file="out/model.bin", digest=digest(files["model"]))
        job.say("begun", tag=f"global_step{step}", files={name: digest(data) for name, data in files.items()})
        checkpoint = nm.Checkpoint(f"global_step{step}", -2)
        checkpoint.save_bytes("model", files["model"])
        (job.root / "out").mkdir(exist_ok=True)
        checkpoint.publish("model", job.root / "out/model.bin")
        checkpoint.commit()
        checkpoint.wait("durable", WAIT_S)
        job.say("durable", tag=f"global_step{step}")
        job.say("published", file="out/model.bin", digest=digest(files["model"]))


def copy(job: Trainer) -> None:
    job.begin()
    for step in (1, 2):
        job.save(f"global_step{step}", SIZES)
    begun = [event for event in job.events if event["what"] == "begun"]
    source, job.storage = job.path, "b"
    for event in begun:
        job.say("begun", tag=event["tag"], files=event["files"])
    job.command("copy", str(source), str(job.path), "--all")
    for event in begun:
        job.say("durable", tag=event["tag"])
    job.storage = "a"


RANK = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "power"}


def _second_node(path: Path, orders: int, answers: int) -> None:
    os.environ |= {**RANK, "RANK": "1", "NEBULA_NODE_ID": "b"}
    nm.init(str(path), "1h", 16, keep_last=2)
    with os.fdopen(orders) as lines, os.fdopen(answers, "w", buffering=1) as told:
        for line in lines:
            tag, writing = line.split()
            checkpoint = nm.Checkpoint(tag, -2)
            checkpoint.save_bytes("rank1", content(tag, int(writing), "rank1", 100_000))
            assert checkpoint.commit()
            print("committed", file=told)


def nodes(job: Trainer) -> None:
    """Two nodes, each with an agent of its own, write each version together. Both lose power at the same moment."""
    (theirs, orders), (answers, told) = os.pipe(), os.pipe()

    def follow() -> None:
        os.close(orders)
        _second_node(job.path, theirs, told)

    other = Child(follow)
    os.environ |= {**RANK, "RANK": "0", "NEBULA_NODE_ID": "a"}
    os.close(theirs)
    job.begin(keep_last=2)
    with os.fdopen(answers) as lines:
        for tag, writing in [("global_step1", 0), ("global_step2", 0), ("global_step2", 1), ("global_step3", 0), ("global_step4", 0)]:
            step = int(tag[-1])
            if step > 2:
                job.say("may-go", tag=f"global_step{step - 2}")
            files = {name: content(tag, writing, name, 100_000) for name in ("rank0", "rank1")}
            job.say("begun", tag=tag, files={name: digest(data) for name, data in files.items()})
            os.write(orders, f"{tag} {writing}\n".encode())
            checkpoint = nm.Checkpoint(tag, -2)
            assert checkpoint.save_bytes("rank0", files["rank0"]) and checkpoint.commit()
            assert lines.readline() == "committed\n"
            checkpoint.wait("durable", WAIT_S)
            job.say("durable", tag=tag)
    os.close(orders)
    other.end()


def rendezvous(job: Trainer) -> None:
    """The state of an elastic job in a directory: what is read after the cut is one of the writings."""
    from nebulaml.elastic import store_cells
    from nebulaml.elastic.cells import Cell

    cells = store_cells.open_cells(str(job.root / "r"))
    token, cell = None, Cell("job", "state")
    for number in range(12):
        job.say("cell-begun", text=str(number) * 600)
        token = cells.swap(cell, str(number) * 600, token)
    cells.close()


def lightning(job: Trainer) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    torch.set_num_threads(1)  # this process was forked
    job.begin()

    class Watch(pl.Callback):
        last: Any = None

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.close()
            if (trainer.global_step + 1) % 2 == 0:
                self.last = job.opened(f"files/step={trainer.global_step + 1}.ckpt")

        def close(self) -> None:
            if self.last:
                job.closed(self.last)
            self.last = None

    watch = Watch()
    keeper = ModelCheckpoint(dirpath=job.root / "files", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = pl.Trainer(
        max_steps=6, callbacks=[watch, keeper], plugins=[nm.NebulaCheckpointIO()], logger=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=job.root / "root",
    )  # fmt: skip
    trainer.fit(BoringModel())
    watch.close()


def deepspeed(job: Trainer) -> None:
    import deepspeed as ds
    import nebulaml.deepspeed  # noqa: F401
    import torch
    from ports import held_port

    torch.set_num_threads(1)
    held = held_port()
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(held.getsockname()[1]),
    }
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    job.begin()
    ds.init_distributed(dist_backend="gloo")
    model = torch.nn.Linear(64, 64)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1},
        "nebula": {"enabled": True, "persistent_storage_path": str(job.path), "persistent_time_interval": 3600, "num_of_version_in_retention": 16},
    })  # fmt: skip
    for step in range(1, 4):
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()
        opened = job.opened(f"files/global_step{step}")
        engine.save_checkpoint(str(job.root / "files"), tag=f"global_step{step}")
        job.closed(opened)


# Need the environment of their framework: `.envs/lightning/bin/python tests/power/power.py --stories lightning`.
FRAMEWORKS: dict[str, Callable[[Trainer], None]] = {story.__name__: story for story in (lightning, deepspeed)}
STORIES: dict[str, Callable[[Trainer], None]] = {
    story.__name__: story
    for story in (save, ahead, carry, unchanged, retain, prune, thin, pin, publish, copy, nodes, rendezvous)
}


class Expected:
    """What one storage path may have after a cut."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.writings: dict[str, list[dict[str, str]]] = {}  # of each tag: those that may be there, the oldest first
        self.may_lack: dict[str, bool] = {}
        self.may_lose: dict[str, set[str]] = {}
        self.has_lost: dict[str, set[str]] = {}
        self.newest: list[str] = []  # tags that may be the newest
        for event in events:
            tag = event.get("tag")
            match event["what"]:
                case "begun":
                    self.writings.setdefault(tag, []).append(event["files"])
                    self.may_lack.setdefault(tag, True)
                    self.newest.append(tag)
                case "durable":
                    self.writings[tag] = self.writings[tag][-1:]
                    self.may_lack[tag] = False
                    self.newest = self.newest[self.newest.index(tag) :]
                case "may-go":
                    self.may_lack[tag] = True
                case "gone":
                    self.writings[tag] = []
                case "may-lose":
                    self.may_lose.setdefault(tag, set()).add(event["file"])
                case "lost":
                    self.has_lost.setdefault(tag, set()).add(event["file"])

    def wrong(self, tag: str, found: dict[str, str] | None) -> str | None:
        """Returns what is wrong with what loads under this tag."""
        writings = self.writings.get(tag, [])
        if found is None:
            return None if self.may_lack.get(tag, True) else f"{tag} was durable and is not there"
        for writing in writings:
            missing = writing.keys() - found.keys()
            if (
                missing <= self.may_lose.get(tag, set())
                and missing >= self.has_lost.get(tag, set())
                and found.items() <= writing.items()
            ):
                return None
        return (
            f"{tag} is none of its {len(writings)} writings: {found}" if writings else f"{tag} was removed and is back"
        )


def loaded(checkpoint: Any) -> dict[str, str] | None:
    return (
        None if checkpoint is None else {name: digest(bytes(checkpoint.read_bytes(name))) for name in checkpoint.files}
    )


def debris(path: Path, allowed: set[str]) -> list[str]:
    found = []
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file() and file.stat().st_size >= LARGE and digest(file.read_bytes()) not in allowed:
                found.append(str(file.relative_to(path)))
    return found


def judge(root: Path, events: list[dict[str, Any]]) -> list[str]:
    """Begins anew on a state, and returns what is wrong with it."""
    wrong: list[str] = []
    for storage in sorted({event["storage"] for event in events if event["what"] == "begun"}):
        wrong += [
            f"{storage}: {line}"
            for line in _judge_storage(root / storage, [e for e in events if e["storage"] == storage])
        ]
    for file in {event["file"] for event in events if event["what"] == "published-begun"}:
        may = [e["digest"] for e in events if e["what"] == "published-begun" and e["file"] == file]
        must = [e["digest"] for e in events if e["what"] == "published" and e["file"] == file]
        data = digest((root / file).read_bytes()) if (root / file).exists() else None
        if (data is None and must) or (data is not None and data not in may[len(must) - 1 if must else 0 :]):
            wrong.append(f"{file} is {data}, published were {must} and begun {may}")
    texts = [event["text"] for event in events if event["what"] == "cell-begun"]
    if texts:
        from nebulaml.elastic import store_cells
        from nebulaml.elastic.cells import Cell

        cells, cell = store_cells.open_cells(str(root / "r")), Cell("job", "state")
        found = cells.read(cell)
        if found is not None and found[0] not in texts:
            wrong.append(f"the rendezvous reads {found[0][:20]!r}")
        if cells.swap(cell, "next", found and found[1]) is None or cells.read(cell)[0] != "next":
            wrong.append("the rendezvous cannot go on")
        cells.close()
    return wrong


def _judge_storage(path: Path, events: list[dict[str, Any]]) -> list[str]:
    wrong = []
    expected = Expected(events)
    nm.init(str(path), "1h", 16)
    newest = nm.get_latest_checkpoint()
    if newest is None and not all(expected.may_lack.values()):
        wrong.append("there is no newest version")
    if newest is not None and newest.tag not in expected.newest:
        wrong.append(f"the newest is {newest.tag}, and may be {expected.newest}")
    for tag in expected.writings:
        found = loaded(nm.get_checkpoint(tag))
        fault = expected.wrong(tag, found)
        if fault:
            wrong.append(fault)
    listed = nm.list_checkpoints()
    wrong += [f"{tag} is listed and was never written" for tag in listed if tag not in expected.writings]
    sizes = {name: content("next", 0, name, 50_000) for name in ("model", "next")}
    checkpoint = nm.Checkpoint("global_step900", -2)
    for name, data in sizes.items():
        checkpoint.save_bytes(name, data)
    checkpoint.commit()
    checkpoint.wait("durable", WAIT_S)
    newest = nm.get_latest_checkpoint()
    if (
        newest is None
        or newest.tag != "global_step900"
        or loaded(newest) != {name: digest(data) for name, data in sizes.items()}
    ):
        wrong.append(f"after the next save the newest is {newest and newest.tag}")
    return wrong


def judge_debris(root: Path, events: list[dict[str, Any]]) -> list[str]:
    """Begins once more, because an agent that completes a removal leaves files of its last minute to the next one, and returns what it leaves."""
    wrong = []
    for storage in sorted({event["storage"] for event in events if event["what"] == "begun"}):
        nm.init(str(root / storage), "1h", 16)
        allowed = {each for tag in nm.list_checkpoints() for each in (loaded(nm.get_checkpoint(tag)) or {}).values()}
        deadline = time.monotonic() + 10
        while left := debris(root / storage, allowed):
            if time.monotonic() > deadline:
                wrong.append(f"{storage}: no version has {left}")
                break
            time.sleep(0.02)
    return wrong


def kill_agents(runtime: Path) -> None:
    def mine() -> list[int]:
        return agents(lambda variables: f"NEBULA_RUNTIME_DIR={runtime}" in variables)

    for agent in mine():
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGKILL)
            while agent in mine():
                time.sleep(0.002)


def age(root: Path) -> None:
    """Shows all files as written an hour ago: a sweep leaves younger ones alone."""
    then = time.time() - 3600
    for path in root.rglob("*"):
        os.utime(path, (then, then))


def again(root: Path, events: list[dict[str, Any]]) -> list[str]:
    age(root)
    return Child(lambda: judge_debris(root, events)).end()


class Child:
    """Calls a function in a process with an agent of its own. With ``kept``, its agent dies before it, and its memory stays there."""

    def __init__(self, call: Callable[[], Any], kept: Path | None = None) -> None:
        read, write = os.pipe()
        parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._memory = kept or Path(tempfile.mkdtemp(prefix="nebula-power-", dir=parent))
        self.runtime = Path(tempfile.mkdtemp(prefix="np-"))
        self._is_kept = kept is not None
        self._pid = os.fork()
        if not self._pid:
            os.close(read)
            self._run(call, write)
        os.close(write)
        self._read = read

    def _run(self, call: Callable[[], Any], write: int) -> None:
        try:
            for name in [name for name in os.environ if name.startswith("NEBULA_")]:
                del os.environ[name]
            os.environ |= {
                "NEBULA_RUNTIME_DIR": str(self.runtime), "NEBULA_MEMORY_DIR": str(self._memory), "NEBULA_AGENT_PATH": NEBULA,
                "NEBULA_AGENT_LINGER": "20",
            }  # fmt: skip
            try:
                answer = {"result": call()}
                if self._is_kept:
                    kill_agents(self.runtime)
            except BaseException:
                answer = {"failure": traceback.format_exc()}
            with os.fdopen(write, "w") as pipe:
                json.dump(answer, pipe)
        finally:
            os._exit(0)

    def end(self) -> Any:
        """Ends process and agent, and returns the result. Raises what the function raised, as a text."""
        with os.fdopen(self._read) as pipe:
            answer = json.loads(pipe.read() or '{"failure": "the process ended without an answer"}')
        os.waitpid(self._pid, 0)
        kill_agents(self.runtime)
        log = self.runtime / "agent.log"
        kept = log.read_text() if log.exists() else ""
        shutil.rmtree(self.runtime, ignore_errors=True)
        if not self._is_kept:
            shutil.rmtree(self._memory, ignore_errors=True)
        if "failure" in answer:
            raise RuntimeError(answer["failure"] + kept[-2000:])
        return answer["result"]


@contextlib.contextmanager
def mounted(kind: str, image: Path, place: Path) -> Iterator[Path]:
    place.mkdir(parents=True, exist_ok=True)
    options = "loop,data=writeback" if kind == "ext4-writeback" else "loop,nouuid" if kind == "xfs" else "loop"
    subprocess.run(["mount", "-t", kind.partition("-")[0], "-o", options, image, place], check=True)
    try:
        yield place
    finally:
        for _ in range(100):
            if subprocess.run(["umount", place], capture_output=True).returncode == 0:
                break
            time.sleep(0.1)


def play(name: str, kind: str, place: Path, cuts: int, seed: int, kept: Path | None) -> tuple[int, list[str]]:
    """Plays one story, cuts the power so often, and returns how many positions the log has, and what was wrong."""
    backing, mount = place / "backing", place / "mount"
    backing.mkdir(parents=True)
    if kind != "fuse":
        with open(backing / "image", "wb") as image:
            image.truncate(MIB[kind] << 20)
        subprocess.run([*MKFS[kind], backing / "image"], check=True)
    fs = PowerFs(backing, mount)
    try:
        with (
            contextlib.nullcontext(mount) if kind == "fuse" else mounted(kind, mount / "image", place / "disk") as root
        ):

            def story() -> list[dict[str, Any]]:
                job = Trainer(root, fs)
                (STORIES | FRAMEWORKS)[name](job)
                return job.events

            events = Child(story).end()
            end = fs.position()
        chance = random.Random(f"{name}/{kind}/{seed}")
        chosen = [(chance.randint(events[0]["at"], end), chance.choice((0, 1, *range(2, 1000)))) for _ in range(cuts)]
        chosen[: len(events)] = [(event["at"], 0) for event in events][
            :cuts
        ]  # at each promise, nothing but what was synced
        wrong: list[str] = []

        def judged(position: int, its_seed: int) -> Iterator[None]:
            """Cuts and begins to judge; ends when it is asked again."""
            state, known = (
                place / f"state-{position}-{its_seed}",
                [event for event in events if event["at"] <= position],
            )
            fs.cut(position, its_seed, state)
            try:
                with (
                    contextlib.nullcontext(state)
                    if kind == "fuse"
                    else mounted(kind, state / "image", place / f"{state.name}-disk") as found
                ):
                    age(found)
                    child = Child(lambda: judge(found, known))
                    yield
                    faults = child.end() or again(found, known)
            except (RuntimeError, subprocess.CalledProcessError) as failure:
                faults = [str(failure)]
            wrong.extend(
                f"{name} on {kind}, position {position} of {end}, seed {its_seed}: {fault}" for fault in faults
            )
            if faults and kept:
                kept.mkdir(parents=True, exist_ok=True)
                fs.cut(position, its_seed, kept / f"{name}-{kind}-{position}-{its_seed}")
            shutil.rmtree(state, ignore_errors=True)

        running: list[Iterator[None]] = []
        for each in dict.fromkeys(chosen):
            running.append(judged(*each))
            next(running[-1], None)
            if len(running) == AT_ONCE:
                next(running.pop(0), None)
        for left in running:
            next(left, None)
        return end, wrong
    finally:
        fs.close()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=300, help="on each file system, shared among the stories")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--on", default="fuse", help=f"fuse, {', '.join(MIB)}")
    parser.add_argument("--stories", default=",".join(STORIES))
    parser.add_argument("--kept", type=Path, help="where wrong states are kept")
    given = parser.parse_args(arguments)
    names, all_wrong = given.stories.split(","), []
    for kind in given.on.split(","):
        if kind != "fuse" and not shutil.which(MKFS[kind][0]):
            print(f"{kind}: {MKFS[kind][0]} is not here", flush=True)
            continue
        for name in names:
            begun, count = time.monotonic(), max(1, given.cuts // len(names))
            with tempfile.TemporaryDirectory(prefix="power-") as place:
                positions, wrong = play(name, kind, Path(place), count, given.seed, given.kept)
            print(
                f"{kind:<15} {name:<11} {positions:>6} changes and syncs, {count:>5} cuts, {len(wrong)} wrong, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
            for line in wrong:
                print("   ", line, flush=True)
            all_wrong += wrong
    return 1 if all_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
