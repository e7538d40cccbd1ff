"""Starts trainers by forks of a Python that has imported torch: an import takes 1.7 s of CPU time, a fork 0.05 s.

A server is a process that imports torch, and then forks once for each trainer. A trainer has the arguments, environment, limits, working directory
and streams that it would have as `python -W ignore -c CODE ARGUMENTS`. Its code runs in `__main__`, and its interpreter ends like any other: so
the server sets NEBULA_ENDS_BY_EXIT for it.

Four things differ. /proc/PID/environ and /proc/PID/cmdline are those of the server, and LD_PRELOAD has no effect: a test of one of them starts an
interpreter of its own. And the trainer's end leaves what the server has imported as it is: the modules are not taken apart, and after the trainer's own
functions of atexit, in Python and in C, the process calls _exit before the destructors of libraries and before the interpreter frees what it has itself.
These take most of the 0.25 s of CPU time of a trainer that does nothing. With TEST_WHOLE_END=1 in its environment, a trainer ends as an interpreter does.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
SERVER = """import sys; sys.path.append({here!r}); import fork_server
try: exec(fork_server.next_program({fd}, {modules!r}))
except BaseException: _end_of_trainer.exit = None; raise
"""
ADDRESS = "NEBULA_TEST_FORK_SERVER"  # in a trainer: its server, for trainers that it starts
MOST = 1 << 20  # bytes of a request
WHOLE_END = "TEST_WHOLE_END"
LIMITS = (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)


_imported: dict[str, object] = {}  # by the server
_finalizers: list[weakref.finalize] = []  # of the modules


def leave_modules() -> None:
    """The interpreter takes apart the modules that it finds in sys.modules."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_imported))
    sys.modules.update(dict.fromkeys(_imported))  # None, as the interpreter's own end does it


class End:
    """Ends the process when the interpreter takes its builtins apart. It frees the trainer's globals first, which the collector's freeze may have kept.

    The interpreter would then touch each object of the server once more. That took half of the CPU time of a trainer that does nothing. If an exception ends
    the trainer, its interpreter goes on as usual, so that the status is right.
    """

    def __init__(self) -> None:
        self._globals = vars(sys.modules["__main__"])
        self.exit: Callable[[int], None] | None = ctypes.PyDLL(None).exit  # it runs the functions of atexit in C, and keeps other threads out

    def __del__(self) -> None:
        if self.exit is not None:
            for name in [name for name in self._globals if name != "__builtins__"]:
                self._globals[name] = None
            self.exit(0)


def next_program(fd: int, modules: Iterable[str]) -> object:
    """The server: imports the modules, and forks for each request. Returns in the trainers alone, each with its program."""
    atexit.register(leave_modules)  # the first of these functions runs last
    for name in modules:
        if find_spec(name.partition(".")[0]):
            __import__(name)
    _imported.update((name, module) for name, module in sys.modules.items() if name not in ("sys", "builtins", "__main__", __name__))
    _finalizers.extend(one for one in weakref.finalize._registry if one.atexit)  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # else the end of each trainer takes three times the CPU time, to look for cycles in torch
    listener = socket.socket(fileno=fd)
    address = listener.getsockname()
    clients = [listener.accept()[0]]
    while True:
        ready = select.select([listener, *clients], [], [])[0]
        if listener in ready:
            clients.append(listener.accept()[0])
        for client in set(ready) - {listener}:
            said, streams, _, _ = socket.recv_fds(client, MOST, 3)
            if not said:
                if client is clients[0]:
                    os._exit(0)
                clients.remove(client)
                client.close()
                continue
            request = json.loads(said)
            if "ended" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
            elif (answer := os.fork()) == 0:
                for one in (listener, *clients):
                    one.close()
                return become(request, streams, address)
            for one in streams:
                os.close(one)
            client.send(str(answer).encode())


def become(request: dict, streams: list[int], address: bytes) -> object:
    """Gives this process what the request says of the trainer. Returns the trainer's program."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["directory"])
    for limit, values in zip(LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, tuple(values))
    os.environ.clear()
    os.environ.update(request["environment"] | {"NEBULA_ENDS_BY_EXIT": str(os.getpid()), ADDRESS: address.hex()})
    del sys.modules[__name__], sys.modules["__main__"].fork_server
    sys.path.remove(HERE)
    added = [one for one in dict.fromkeys(request["environment"].get("PYTHONPATH", "").split(os.pathsep)) if one]
    sys.path[1:] = added + [one for one in sys.path[1:] if one not in added]
    sys.argv = ["-c", *request["arguments"]]
    builtins._end_of_trainer = end = End()  # type: ignore[attr-defined]
    if WHOLE_END in request["environment"]:
        end.exit = None
        atexit.unregister(leave_modules)
    else:
        for one in _finalizers:
            one.atexit = False
        libc = ctypes.CDLL(None)  # its functions run in the reverse order
        libc.on_exit(libc._exit, None)  # with the status
        libc.__cxa_atexit(libc.fflush, None, None)
    return compile(request["program"], "<string>", "exec")


class Trainer:
    """A process of a server, with the methods of subprocess.Popen that tests use. Its streams are text."""

    def __init__(self, server: Server, pid: int, streams: dict[str, int]) -> None:
        self.pid, self.returncode = pid, None
        self._server, self._end = server, os.pidfd_open(pid)
        self.stdin, self.stdout, self.stderr = (
            open(streams[name], mode) if name in streams else None  # noqa: SIM115
            for name, mode in (("stdin", "w"), ("stdout", "r"), ("stderr", "r"))
        )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._end)

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"trainer {self.pid}", timeout)
            os.close(self._end)
            self.returncode = self._server.ask({"ended": self.pid})
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, text: str | None = None, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Writes the text, which must fit into a pipe, closes the input, and returns what the trainer says until its end."""
        if self.stdin is not None and not self.stdin.closed:
            with self.stdin:
                self.stdin.write(text or "")
        said: dict[str, str] = {}
        named = {"stdout": self.stdout, "stderr": self.stderr}
        readers = [
            threading.Thread(target=lambda name=name, stream=stream: said.update({name: stream.read()}), daemon=True)
            for name, stream in named.items()
            if stream is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(f"the output of trainer {self.pid}", timeout)
        self._close()
        return said.get("stdout"), said.get("stderr")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Server:
    """A connection to a Python that has imported the modules."""

    def __init__(self, address: bytes) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
        self._socket.connect(address)

    @classmethod
    def launch(cls, python: str, modules: tuple[str, ...], environment: Mapping[str, str]) -> Server:
        """Starts a server that ends with this process."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # the kernel chooses an address
            listener.listen()
            process = subprocess.Popen(
                [python, "-W", "ignore", "-c", SERVER.format(here=HERE, fd=listener.fileno(), modules=modules)],
                env={**environment, "PYTHONPATH": ""}, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            server = cls(listener.getsockname())
        atexit.register(process.wait)
        atexit.register(server._socket.close)
        return server

    def ask(self, request: dict, streams: Iterable[int] = ()) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(streams))
            return int(self._socket.recv(64))


_servers: dict[tuple[str, tuple[str, ...]], Server] = {}


def start(
    program: str,
    *arguments: object,
    stdin: int | None = None,
    stdout: int | None = subprocess.PIPE,
    stderr: int | None = None,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
    modules: tuple[str, ...] = ("torch",),
) -> Trainer:
    """Starts a trainer. The keywords are those of subprocess.Popen, except that a trainer without `stdin` reads nothing."""
    env = {name: str(value) for name, value in (os.environ if env is None else env).items()}
    if (python, modules) not in _servers:
        if ADDRESS in os.environ:  # this process is a trainer
            _servers[python, modules] = Server(bytes.fromhex(os.environ[ADDRESS]))
        else:
            _servers[python, modules] = Server.launch(python, modules, {name: value for name, value in env.items() if not name.startswith("NEBULA_")})
    server = _servers[python, modules]
    request = {
        "program": program,
        "arguments": list(map(str, arguments)),
        "directory": str(cwd or os.getcwd()),
        "environment": env,
        "limits": list(map(resource.getrlimit, LIMITS)),
    }
    ours, theirs, opened = {}, [], []
    for number, (name, wanted) in enumerate({"stdin": stdin, "stdout": stdout, "stderr": stderr}.items()):
        if wanted == subprocess.PIPE:
            reads, writes = os.pipe()
            ours[name], wanted = (writes, reads) if name == "stdin" else (reads, writes)
            opened.append(wanted)
        elif wanted is None and name == "stdin":
            opened.append(wanted := os.open(os.devnull, os.O_RDONLY))
        theirs.append(number if wanted is None else wanted)
    try:
        return Trainer(server, server.ask(request, theirs), ours)
    finally:
        for stream in opened:
            os.close(stream)


MODULE = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def run_module(module: str, *arguments: object, timeout: float, modules: tuple[str, ...], **streams: Any) -> subprocess.CompletedProcess[str]:
    """Runs `python -m MODULE ARGUMENTS`, as subprocess.run does with capture_output."""
    trainer = start(MODULE, module, *arguments, stderr=subprocess.PIPE, modules=modules, **streams)
    try:
        said, errors = trainer.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        trainer.kill()
        raise
    return subprocess.CompletedProcess([module, *arguments], trainer.returncode, said, errors)
