"""Plays the stories of requeue.py with real trainers, agents and kills.

Other than in requeue_player.c, an agent has threads, and persists when it likes. So a run's versions wait for ``persist`` (an interval of an
hour), a run that is left without it ends by a kill of trainer and agent together, and a story never says ``scan``. More commands, and other
faults:

    way NAME          all runs use Nebula in this way: by its functions (api), a Manager, Lightning's plugin for files, or an engine of DeepSpeed
    steps             Manager.all_steps()
    fault unmounted   directories: the mounts of both storage paths go away. An agent that has not seen the mount cannot know
    fault read-only   directories: both are mounted read-only
    fault slow        servers: the server stands still for some seconds
    fault all         NFS: the server does not answer, and calls fail
    fault stale-1     NFS: clients believe what they have seen
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import fork_server
from nebulaml._session import locate
from nodes import Node
from requeue import NODES, PATHS, WAYS, Story

ROOT = Path(__file__).resolve().parents[2]
FROZEN_S = 4  # longer than an agent looks at storage before it answers a status

BEGIN = """
import os, sys
answers = os.dup(1)
os.dup2(2, 1) # DeepSpeed's log
import torch
import nebulaml as nm
HOUR = 3600
def say(*words):
    os.write(answers, (" ".join(map(str, words)) + chr(10)).encode())
path, keep, files = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rank = int(os.environ.get("RANK", "0"))
def values(words):
    return {name: int(value) for name, _, value in (one.partition("=") for one in words)}
def text(tag, passed, values):
    return " ".join([tag, str(passed), *(f"{name}={values[name]}" for name in sorted(values))])
def step_of(tag):
    return int(tag.removeprefix("global_step"))
def persist(limit):
    nm.flush_persistence(timeout=limit)
"""

API = """
nm.init(path, HOUR, 16, keep_last=keep, on_error="warn")
def show(found):
    return text(found.tag, len(found.passed_over), {name: bytes(found.read_bytes(name)).decode() for name in found.files}) if found else "none"
def newest():
    return show(nm.get_latest_checkpoint())
def load(tag):
    return show(nm.get_checkpoint(tag))
def save(tag, values):
    checkpoint = nm.Checkpoint(tag, -2)
    for name, value in values.items():
        if name.isupper() == bool(rank):
            checkpoint.save_bytes(name, str(value).encode())
    return checkpoint.commit()
"""

MANAGER = """
class Item:
    def __init__(self, value=-1):
        self.value = value
    def state_dict(self):
        return {"value": torch.tensor(self.value)}
    def load_state_dict(self, state):
        self.value = int(state["value"])
manager = nm.Manager(path, keep_last=keep or None, on_error="warn", persistent_time_interval=HOUR, num_of_version_in_retention=16)
def restore(**wanted):
    items = {"x": Item(), "y": Item()}
    found = manager.restore(items, **wanted)
    if found is None:
        return "none"
    passed = manager._session.get_latest_checkpoint().passed_over if not wanted else ()
    return text(f"global_step{found.step}", len(passed), {name: item.value for name, item in items.items()})
def newest():
    return restore()
def load(tag):
    return restore(step=step_of(tag))
def save(tag, values):
    return manager.save(step_of(tag), {name: Item(value) for name, value in values.items()}, force=True) is not None
def steps():
    return " ".join(map(str, manager.all_steps()))
def persist(limit):
    manager.wait(timeout=limit)
"""

LIGHTNING = """
nm.init(path, HOUR, 16, keep_last=keep, on_error="warn")
io = nm.NebulaCheckpointIO()
def place(name):
    return os.path.join(files, name + ".ckpt")
def show(name):
    try:
        found = io.load_checkpoint(place(name))
    except FileNotFoundError:
        return "none"
    return text(f"global_step{found['global_step']}", 0, {"x": found["x"]})
def newest():
    return show("last")
def load(tag):
    return show(f"epoch=0-step={step_of(tag)}")
def save(tag, values):
    for name in (f"epoch=0-step={step_of(tag)}", "last"):
        io.save_checkpoint({"global_step": step_of(tag), **values}, place(name))
    return io._sound
"""

DEEPSPEED = """
import deepspeed, nebulaml.deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
nm.init(path, HOUR, 16, keep_last=keep, on_error="warn")
deepspeed.init_distributed(dist_backend="gloo")
model = torch.nn.Linear(4, 4, bias=False)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
    "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1},
    "nebula": {"enabled": True, "persistent_storage_path": path, "persistent_time_interval": HOUR, "num_of_version_in_retention": 16}})
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
state = next(iter(engine.optimizer.optimizer.state.values()))
def show(tag):
    found, client = engine.load_checkpoint(files, tag=tag)
    if found is None:
        return "none"
    moment = next(iter(engine.optimizer.optimizer.state.values()))["exp_avg"]
    values = {"x": int(model.weight.min()), "y": int(moment.min())}
    if values["x"] != client["x"]:
        return f"{found} has weights of {values['x']} and the client's state of {client['x']}"
    return text(os.path.basename(os.path.dirname(found)), 0, values)
def newest():
    return show(None)
def load(tag):
    return show(tag)
def save(tag, values):
    with torch.no_grad():
        model.weight.fill_(values["x"])
        for flat in engine.optimizer.single_partition_of_fp32_groups:
            flat.fill_(values["x"])
        next(iter(engine.optimizer.optimizer.state.values()))["exp_avg"].fill_(values["y"])
    return engine.save_checkpoint(files, tag=tag, client_state={"x": values["x"]})
"""

LOOP = """
def do(word, *rest):
    if word == "save":
        return "ok" if save(rest[0], values(rest[1:])) else "error it is not saved"
    if word == "persist":
        try:
            persist(float(rest[0]))
        except nm.NebulaError as failure: # a version that gave way, or whose base was removed
            print(failure, file=sys.stderr)
        return "ok"
    return globals()[word](*rest)
for line in sys.stdin:
    try:
        say(do(*line.split()))
    except nm.NebulaNotFound:
        say("none")
    except Exception as failure:
        say("error", *f"{type(failure).__name__} {failure}".split())
"""

CODE = {"api": API, "manager": MANAGER, "lightning": LIGHTNING, "deepspeed": DEEPSPEED}
ENVIRONMENTS = {"lightning": "lightning", "deepspeed": "deepspeed-0.19.8"}  # of .envs
MODULES = {"lightning": ("torch", "lightning.pytorch"), "deepspeed": ("torch", "deepspeed")}


def ways_here() -> list[str]:
    """Returns the ways that this machine has the environments of. DeepSpeed is rare, because each of its runs takes seconds to begin."""
    here = [way for way in WAYS if way not in ENVIRONMENTS or (ROOT / ".envs" / ENVIRONMENTS[way] / ".ready").exists()]
    return [*here, *(way for way in here if way != "deepspeed"), "api", "manager"]


class Directories:
    """Storage paths on file systems that can go away, or be mounted read-only. Path A is a mount, path B is below one."""

    faults = ("unmounted", "read-only")

    def __init__(self, root: Path) -> None:
        self._kept, self._mounts = root / "kept", {"A": root / "storage", "B": root / "other"}

    def begin(self) -> None:
        self._kept.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", self._kept], check=True)
        for path, mount in self._mounts.items():
            mount.mkdir(exist_ok=True)
            (self._kept / path).mkdir()
        self._mount(True)

    def end(self) -> None:
        self._mount(False)
        subprocess.run(["umount", "-l", self._kept], check=True)

    def path(self, path: str, node: str) -> str:
        """Returns the storage path, as the node names it."""
        return str(self._mounts["A"] if path == "A" else self._mounts["B"] / "run7")

    def fault(self, kind: str) -> None:
        self._mount(kind != "unmounted")
        for mount in self._mounts.values():
            if kind != "unmounted":
                subprocess.run(["mount", "-o", f"remount,bind,{'ro' if kind == 'read-only' else 'rw'}", mount], check=True)

    def tags(self, path: str) -> list[str]:
        """Returns the tags that storage has, also while it fails."""
        return _tags_in(self._kept / path if path == "A" else self._kept / path / "run7")

    def _mount(self, wanted: bool) -> None:
        for path, mount in self._mounts.items():
            if wanted and not mount.is_mount():
                subprocess.run(["mount", "--bind", self._kept / path, mount], check=True)
            elif not wanted and mount.is_mount():
                subprocess.run(["umount", "-l", mount], check=True)


def _tags_in(directory: Path) -> list[str]:
    return [one.name for one in directory.glob("[!.]*") if (one / ".nebula").is_dir()]


class Shares:
    """Storage paths on a server of NFS. Each node is a client of its own (tests/servers/nfs_fuse.c)."""

    faults = ("slow", "all", "stale-1")

    def __init__(self, program: Path, root: Path) -> None:
        self._server, self._story = root / "server", 0
        self._clients: dict[str, subprocess.Popen[str]] = {}
        self._mounts = {node: root / f"client{node}" for node in NODES}
        self._server.mkdir()
        self.fault("0")
        for node, mount in self._mounts.items():
            mount.mkdir()
            command = [program, self._server, mount, self._rules(node), "sh", "-c", "echo mounted; read line"]
            self._clients[node] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._clients[node].stdout.readline() == "mounted\n"

    def close(self) -> None:
        for client in self._clients.values():
            client.communicate("end\n", timeout=60)

    def begin(self) -> None:
        self._story += 1

    def end(self) -> None:
        self.fault("0")

    def path(self, path: str, node: str) -> str:
        return str(self._mounts[node] / str(self._story) / path)

    def fault(self, kind: str) -> None:
        self._write({"0": "", "slow": "down 1", "all": "down 2", "stale-1": "ttl_ms 3600000"}[kind])
        if kind == "slow":
            threading.Timer(FROZEN_S, self._write, [""]).start()

    def tags(self, path: str) -> list[str]:
        return _tags_in(self._server / str(self._story) / path)

    def _rules(self, node: str) -> Path:
        return self._mounts[node].with_suffix(".rules")

    def _write(self, rules: str) -> None:
        for node in NODES:
            fresh = self._rules(node).with_suffix(".new")
            fresh.write_text(rules)
            fresh.rename(self._rules(node))


class Objects:
    """Storage paths in an object store. make: makes an empty path. server: can stand still."""

    faults = ("slow",)

    def __init__(self, make: Callable[[], str], server: int) -> None:
        self._make, self._server = make, server
        self._paths: dict[str, str] = {}

    def begin(self) -> None:
        self._paths = {path: self._make() for path in PATHS}

    def end(self) -> None:
        self.fault("0")

    def path(self, path: str, node: str) -> str:
        return self._paths[path]

    def fault(self, kind: str) -> None:
        os.kill(self._server, signal.SIGSTOP if kind == "slow" else signal.SIGCONT)
        if kind == "slow":
            threading.Timer(FROZEN_S, os.kill, [self._server, signal.SIGCONT]).start()

    def tags(self, path: str) -> list[str]:
        command = [locate.agent_path(), "list", "--json", "--path", self._paths[path]]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"NEBULA_RUNTIME_DIR": "/nonexistent"})
        return [one["tag"] for one in json.loads(said.stdout).get("versions", [])]


class Real:
    """The player. make: makes a node of that name. files: a directory in which frameworks find files, on all nodes."""

    def __init__(self, storage: Directories | Shares | Objects, make: Callable[[str], Node], files: Path) -> None:
        self._storage, self._make, self._files = storage, make, files
        self.faults = storage.faults
        self._nodes: dict[str, Node] = {}
        self._node: Node
        self._ranks: list[fork_server.Trainer] = []
        self._path, self._way, self._fault = PATHS[0], WAYS[0], "0"

    def play(self, story: Story) -> list[str]:
        """Plays one story in empty storage paths. It ends with no agent left."""
        self._path, self._way, self._fault = PATHS[0], WAYS[0], "0"
        self._storage.begin()
        try:
            self._go_to(NODES[0])
            return [self._command(*command.split(" ")) for command in story]
        finally:
            self._leave(is_killed=True)
            for node in self._nodes.values():
                node.place.close()
            self._nodes = {}
            shutil.rmtree(self._files, ignore_errors=True)
            self._storage.end()

    def _command(self, word: str, *rest: str) -> str:
        if word == "way":
            self._way = rest[0]
        elif word == "node":
            self._leave()
            self._go_to(rest[0])
        elif word == "run":
            self._leave()
            self._path = rest[2]
            self._ranks = [self._start(rank, *rest) for rank in range(int(rest[3]))]
        elif word in ("kill", "forget"):
            self._leave(is_killed=True)
            if word == "forget":
                self._node.forget()
        elif word == "fault":
            self._fault = rest[0]
            self._storage.fault(rest[0])
        elif word == "prune":
            return "ok" if self._nebula("prune", "--tag", rest[0], "--yes") == 0 else "none"
        elif word in ("pin", "unpin"):
            return "ok" if self._nebula(word, *(["--early"] if word == "pin" else []), rest[0]) == 0 else "none"
        elif word == "persist":
            self._ask(word, "60" if self._fault in ("0", "slow") else "3")
            return " ".join(sorted(self._storage.tags(self._path)))
        elif word != "scan":
            return self._ask(word, *rest)
        return "ok"

    def _go_to(self, node: str) -> None:
        if node not in self._nodes:
            self._nodes[node] = self._make(node)
        self._node = self._nodes[node]

    def _start(self, rank: int, name: str, keep: str, path: str, world: str) -> fork_server.Trainer:
        way = self._way
        files = self._files / path
        files.mkdir(parents=True, exist_ok=True)
        python = ROOT / ".envs" / ENVIRONMENTS[way] / "bin" / "python" if way in ENVIRONMENTS else sys.executable
        launched = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._node.place.port, "NEBULA_RUN": name, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
            "NEBULA_AGENT_LINGER": "600",
        }  # fmt: skip
        with self._node.here():
            return fork_server.start(
                BEGIN + CODE[way] + LOOP, self._storage.path(path, self._node.name), keep, files, stdin=subprocess.PIPE, cwd=self._node.place.root,
                env=os.environ | launched, python=str(python), modules=MODULES.get(way, ("torch",)),
            )  # fmt: skip

    def _nebula(self, *words: str) -> int:
        with self._node.here():
            command = [locate.agent_path(), *words, "--path", self._storage.path(self._path, self._node.name)]
            return subprocess.run(command, capture_output=True, timeout=120).returncode

    def _ask(self, *words: str) -> str:
        """Returns what all ranks answer."""
        for trainer in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                trainer.stdin.write(" ".join(words) + "\n")
                trainer.stdin.flush()
        said = [(trainer.stdout.readline() or "error the trainer has ended").strip() for trainer in self._ranks]
        return said[0] if len(set(said)) == 1 else f"error the ranks say {said}"

    def _leave(self, is_killed: bool = False) -> None:
        """Ends the ranks. is_killed: together with the agent of their node, which persists nothing more."""
        ranks, self._ranks = self._ranks, []
        if is_killed and self._nodes and self._node.place.agents():
            self._node.place.kill_all(*ranks)
        else:
            for trainer in ranks:
                with contextlib.suppress(BrokenPipeError):
                    trainer.stdin.close()
            for trainer in ranks:
                trainer.wait(timeout=60)
                trainer.stdout.close()
