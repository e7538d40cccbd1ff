"""Copies in the memory of another node, for corruption.py: the copies themselves, or the connections to them, are damaged."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nebulaml as nm
from power import Child
from processes import agents
from waiting import until

WIRE = ("bit", "zeros", "cut", "twice", "stale")


class Wire:
    """A proxy before an agent. It damages one place of what it forwards, at a random byte of one direction."""

    def __init__(self, chance: random.Random, bytes_max: int) -> None:
        self.kind, self.at, self.side = chance.choice(WIRE), chance.randrange(bytes_max), chance.randrange(2)
        self._bit, self._passed, self._is_done, self._before = 1 << chance.randrange(8), 0, False, b""
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.target = self._listener.getsockname()[1], ("", 0)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self.target)
                for side, (one, other) in enumerate(((near, far), (far, near))):
                    threading.Thread(target=self._forward, args=(side, one, other), daemon=True).start()

    def _forward(self, side: int, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                data = self._damaged(data) if side == self.side else data
                if not data:
                    break
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _damaged(self, data: bytes) -> bytes:
        with self._lock:
            at, self._passed, before = self.at - self._passed, self._passed + len(data), self._before
            self._before = data
            if self._is_done or not 0 <= at < len(data):
                return data
            self._is_done = True
        if self.kind == "bit":
            return data[:at] + bytes([data[at] ^ self._bit]) + data[at + 1 :]
        if self.kind == "zeros":
            return data[:at] + bytes(len(data) - at)
        return {"cut": data[:at] if at else b"", "twice": data + data[at:], "stale": before or data[:at]}[self.kind]

    def close(self) -> None:
        self._listener.close()


def hold(path: Path, is_over: int, end: int) -> None:
    """A node that keeps copies, until the pipe closes."""
    os.close(end)
    os.environ["NEBULA_NODE_ID"] = "b"
    nm.init(str(path), "1h", 16, job="holder", replicas=1)
    nm.list_checkpoints()
    os.read(is_over, 1)


def on_node_a(peer: int, call: Callable[[], Any]) -> Any:
    os.environ["NEBULA_NODE_ID"] = "a"
    if peer:
        os.environ["NEBULA_PEERS"] = f"127.0.0.1:{peer}"
    return call()


def places(pid: int, contents: list[bytes]) -> list[tuple[int, int]]:
    """Returns where in an agent's memory these bytes lie, and how many: copies have no files."""
    found = []
    with open(f"/proc/{pid}/mem", "rb") as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            words = line.split(maxsplit=5)
            if "w" not in words[1] or len(words) < 6 or not ("memfd" in words[5] or "(deleted)" in words[5]):
                continue
            first, end = (int(word, 16) for word in words[0].split("-"))
            memory.seek(first)
            head = memory.read(min(end - first, 64))
            found += [(first, len(one)) for one in contents if one.startswith(head[:64])]
    return found


def damage_in_place(pid: int, contents: list[bytes], chance: random.Random) -> str:
    """Damages a copy in the memory of an agent that lives."""
    found = places(pid, contents)
    assert found, "no copy is in the agent's memory"
    kind, (first, size) = chance.choice(("flip", "run", "zeros", "swap", "stale")), chance.choice(found)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:

        def read(at: int) -> bytearray:
            memory.seek(at)
            return bytearray(memory.read(size))

        def write(at: int, data: bytes) -> None:
            memory.seek(at)
            memory.write(data)

        data, at = read(first), chance.randrange(size)
        other = chance.choice([one for one, length in found if length == size and one != first] or [first])
        if kind == "flip":
            data[at] ^= 1 << chance.randrange(8)
        elif kind in ("swap", "stale"):
            theirs = read(other)
            if kind == "swap":
                write(other, bytes(data))
            data = theirs
        else:
            end = min(at + chance.randint(1, 600), size) if kind == "run" else min(at // 4096 * 4096 + 4096, size)
            at = at if kind == "run" else at // 4096 * 4096
            data[at:end] = chance.randbytes(end - at) if kind == "run" else bytes(end - at)
        write(first, bytes(data))
    return f"{kind} memory"


def trial(place: Path, seed: int, contents: list[bytes], save: Callable[[Path], None], judge: Callable[[Path, str], Any], where: str = "", at: int | None = None) -> tuple[str, Any]:
    """Saves on node a, with copies on node b; loses node a; begins anew on it. Returns what was damaged, and what `judge` says."""
    chance = random.Random(f"copies/{seed}")
    storage, memory = place / "storage", place / "memory"
    for path in (memory, place / "lost"):
        path.mkdir(parents=True)
    where = where or chance.choice(("memory", "copying", "fetching"))
    wire = Wire(chance, sum(map(len, contents))) if where != "memory" else None
    if wire and at is not None:  # what the node that keeps the copies answers
        wire.kind, wire.at, wire.side = "zeros", at, 1
    is_over, end = os.pipe()
    held = Child(lambda: hold(storage, is_over, end), kept=memory)
    os.close(is_over)
    try:
        record = storage / ".nebula/nodes/b.json"
        until(record.exists, what="the record of node b")
        if wire:
            address = json.loads(record.read_text())
            wire.target = (address.get("host", "127.0.0.1"), address["port"])
        Child(lambda: on_node_a(wire.port if where == "copying" else 0, lambda: save(storage)), kept=place / "lost").end()
        (agent,) = agents(lambda variables: f"NEBULA_RUNTIME_DIR={held.runtime}" in variables)
        done = damage_in_place(agent, contents, chance) if where == "memory" else f"{wire.kind} {where}"
        (storage / ".nebula/nodes/a.json").unlink(missing_ok=True)
        return done, Child(lambda: on_node_a(wire.port if where == "fetching" else 0, lambda: judge(storage, done.split()[1]))).end()
    finally:
        os.close(end)
        with contextlib.suppress(RuntimeError):
            held.end()
        if wire:
            wire.close()
