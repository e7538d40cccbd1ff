"""Warm workers: a process that has imported what a script imports, and forks for each start of a worker.

``nebula run`` starts this template before the rendezvous. worker.py asks it for a worker, with the worker's command, environment, directory,
limits and streams, and passes signals and the end on to torchrun. The forked process runs the script as ``__main__`` of its interpreter.

The template imports one module after the other. If a module starts a thread, opens a socket or initialises CUDA when it is imported, the
template begins anew without it, and the worker imports it. If anything is in doubt, the answer is "cold", and worker.py starts an
interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from typing import Any

from .worker import ENVIRONMENT_OF_RANK, LIMITS, MESSAGE_MOST, PROGRAM, end_with

__all__ = ["imported", "serve", "start"]

MEMORY_MOST = 4 << 30  # bytes of the template
BEGINNINGS = 8  # then the template imports torch alone
CUDA_NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED
GONE_S = 10.0  # a killed worker has ended after this time, or the next one starts cold
# what launchers send to all processes of a job
TO_ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def start(modules: list[str], environment: dict[str, str], tells: bool = True) -> str:
    """Starts a template that ends with this process. Returns its address for workers, as the variable NEBULA_WARM has it.

    tells: also of modules that cannot be imported.
    """
    import subprocess

    address = f"nebula-warm-{os.getpid()}-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + address)
    listener.listen(128)
    program = PROGRAM.format(fd=listener.fileno(), parent=os.getpid(), modules=modules, bad=[], tells=tells)
    subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()],
        start_new_session=True,
    )  # fmt: skip
    listener.close()
    return address


def record(path: str) -> None:
    """Leaves the names of this process's modules for the templates of later runs. A failure costs a cold start and no more."""
    names = imported(os.path.dirname(os.path.abspath(sys.argv[0])))
    with contextlib.suppress(OSError):
        with open(f"{path}.{os.getpid()}", "w") as file:
            json.dump(names, file)
        os.replace(f"{path}.{os.getpid()}", path)


def imported(script_directory: str) -> list[str]:
    """Returns the names of this process's modules that a template may import: not the program's own."""
    names = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None) or ""
        is_installed = "site-packages" in origin or "dist-packages" in origin
        is_library = is_installed or origin in ("built-in", "frozen") or origin.startswith(sys.base_prefix)
        if spec is not None and spec.name == name and is_library and not origin.startswith(script_directory + os.sep):
            names.append(name)
    return names


# -- the template


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _sockets() -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return count


def _cuda_is_used() -> bool:
    """Whether any library has initialised the CUDA driver in this process: a forked child could not use it then."""
    with open("/proc/self/maps") as maps:
        if "libcuda.so" not in maps.read():
            return False
    return ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_NOT_INITIALISED


def _memory() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()


def _note() -> None:
    """Leaves a file for `nebula status` beside the agent's (ipc_place_find). Its name is all that it says."""
    node = os.environ.get("NEBULA_NODE_ID")
    folder = (os.environ.get("NEBULA_RUNTIME_DIR") or f"/tmp/nebula-{os.getuid()}") + (f"-{node}" if node else "")
    with contextlib.suppress(OSError):
        os.makedirs(folder, 0o700, exist_ok=True)
        for name in os.listdir(folder):
            if name.startswith("template-") and not os.path.exists(f"/proc/{name.removeprefix('template-')}"):
                os.unlink(f"{folder}/{name}")
        os.close(os.open(f"{folder}/template-{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))


def _import_all(modules: list[str], bad: list[str]) -> None:
    """Imports the modules. Begins anew, in the same process, without the first one that leaves more than modules behind."""
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy")  # its threads end at a fork, and begin again in the child
    before = (_threads(), _sockets(), False)
    for name in modules:
        if name in bad or name == "__main__":
            continue
        try:
            importlib.import_module(name)
        except BaseException as failure:  # the worker sees it too, if it imports the module
            if _given["tells"]:
                print(f"nebula: --warm: {name} cannot be imported: {failure!r:.200}", file=sys.stderr, flush=True)
        after = (_threads(), _sockets(), _cuda_is_used())
        is_large = _memory() > MEMORY_MOST
        if after == before and not is_large:
            continue
        if is_large:
            what = f"takes the template over {MEMORY_MOST >> 30} GiB"
        else:
            what = "starts a thread" if after[0] != before[0] else "opens a connection" if after[1] != before[1] else "initialises CUDA"
        print(f"nebula: {name} {what} when it is imported: each worker imports it", file=sys.stderr, flush=True)
        begin_anew([*bad, name], dict(os.environ))


def begin_anew(bad: list[str], environment: dict[str, str]) -> None:
    """Runs this program again in the same process, without these modules."""
    given = dict(_given)
    if len(bad) > BEGINNINGS:
        given["modules"], bad = [name for name in given["modules"] if name == "torch"], []
    os.set_inheritable(given["fd"], True)
    os.execve(sys.executable, [sys.executable, "-c", PROGRAM.format(**{**given, "bad": bad})], environment)


_given: dict[str, Any] = {}
_outlived: dict[int, Any] = {}  # the signals that this process outlives, and what they do in a worker


def _outlive_signals() -> None:
    """The template ends with its torchrun. If it ended before, its workers would be killed before they have saved."""
    for number in TO_ALL:
        if (before := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler):
            _outlived[number] = before
            signal.signal(number, lambda *_: None)


def _stamps() -> dict[str, tuple[int, int]]:
    """The time and size of each module's file, and of the interpreter."""
    found = {}
    for file in [sys.executable, *(getattr(module, "__file__", None) for module in list(sys.modules.values()))]:
        if file:
            with contextlib.suppress(OSError):
                about = os.stat(file)
                found[file] = (about.st_mtime_ns, about.st_size)
    return found


def _relevant(environment: dict[str, str]) -> dict[str, str]:
    """The variables that a library may have read at its import."""
    ours = ("TORCHELASTIC_", "NEBULA_")
    return {name: value for name, value in environment.items() if name not in ENVIRONMENT_OF_RANK and not name.startswith(ours)}


class Worker:
    """A forked worker, and the stub that torchrun takes for it."""

    def __init__(self, pid: int, stub: socket.socket, stub_pid: int) -> None:
        self.pid, self.stub = pid, stub
        self.end, self.stub_end = os.pidfd_open(pid), os.pidfd_open(stub_pid)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError):
            self.stub.send(json.dumps({"status": status}).encode())
        self.stub.close()
        os.close(self.end)
        os.close(self.stub_end)


def serve(fd: int, parent: int, modules: list[str], bad: list[str], tells: bool) -> object:
    """The template: imports, and forks for each request. Returns in the workers alone, each with its program."""
    _given.update(fd=fd, parent=parent, modules=modules, tells=tells)
    if not end_with(parent):
        os._exit(0)
    begun = dict(os.environ)
    _outlive_signals()
    _import_all(modules, bad)
    _note()
    stamps, listener = _stamps(), socket.socket(fileno=fd)
    gc.collect()
    gc.freeze()
    workers: list[Worker] = []
    template = os.getpid()
    while True:
        by_fd = {one.end: one for one in workers} | {one.stub_end: one for one in workers}
        for ready in select.select([fd, *by_fd], [], [])[0]:
            if ready == fd:
                client = listener.accept()[0]
                request, streams = _take(client)
                reason = "" if request else "the request is damaged"
                if request and _relevant(request["environment"]) != _relevant(begun):
                    changed = set(_relevant(request["environment"]).items()) ^ set(_relevant(begun).items())
                    reason = "the environment has changed: " + ", ".join(sorted({name for name, _ in changed}))
                elif request and _stamps() != stamps:
                    reason = "a module's file has changed"
                for one in [one for one in workers if not _lives(one.stub_end)]:
                    one.kill()
                    if not select.select([one.end], [], [], GONE_S)[0]:
                        reason = "the worker before has not ended"
                        break
                    one.reap()
                    workers.remove(one)
                if not reason:
                    try:
                        pid = os.fork()
                    except OSError as failure:
                        reason = f"no process can be made: {failure}"
                if not reason and pid == 0:
                    listener.close()
                    for one in workers:
                        one.stub.close()
                        os.close(one.end)
                        os.close(one.stub_end)
                    client.close()
                    return _become(request, streams, template)
                for stream in streams:
                    os.close(stream)
                if reason:
                    with contextlib.suppress(OSError):
                        client.send(json.dumps({"cold": reason}).encode())
                    client.close()
                    if "changed" in reason and not workers:
                        begin_anew(bad, request["environment"])  # what was imported is out of date
                    continue
                with contextlib.suppress(OSError):
                    client.send(json.dumps({"pid": pid}).encode())
                workers.append(Worker(pid, client, request["pid"]))
            elif (one := by_fd[ready]) in workers:
                if ready == one.stub_end:
                    one.kill()
                    if not select.select([one.end], [], [], GONE_S)[0]:
                        continue
                one.reap()
                workers.remove(one)


def _lives(end: int) -> bool:
    return not select.select([end], [], [], 0)[0]


def _take(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns a request and its streams. {}: it is none of a worker of this user. Any user can connect."""
    streams: list[int] = []
    client.settimeout(GONE_S)  # a stub that is stopped holds up no other one for longer
    try:
        pid, uid, _ = struct.unpack("iII", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            return {}, streams
        client.send(b"ready")
        said, streams, _, _ = socket.recv_fds(client, MESSAGE_MOST, 3)
        request = json.loads(said)
        is_sound = isinstance(request, dict) and request.get("pid") == pid and len(streams) == 3
    except (OSError, ValueError):
        is_sound = False
    return (request if is_sound else {}), streams


# -- the worker


def _become(request: dict[str, Any], streams: list[int], template: int) -> object:
    """Gives this process what a fresh one would have. Returns the program, for the namespace of ``__main__``."""
    os.setsid()
    if not end_with(template):
        os._exit(1)  # it has died since the fork
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        if stream > 2:
            os.close(stream)
    os.chdir(request["directory"])
    os.umask(request["umask"])
    for limit, values in zip(LIMITS, request["limits"], strict=True):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, tuple(values))
    os.sched_setaffinity(0, request["processors"])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(request["oom_score"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ["NEBULA_ENDS_BY_EXIT"] = str(os.getpid())
    for each, before in _outlived.items():
        signal.signal(each, before)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    sys.stdout.reconfigure(write_through=True)
    _seed()
    sys.excepthook = _without_own_frame
    return _program(request["command"])


def _without_own_frame(kind: Any, failure: Any, trace: Any) -> None:
    """The traceback of a script begins in the script."""
    if trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
        failure.__traceback__ = trace
    sys.__excepthook__(kind, failure, trace)


def _seed() -> None:
    """Random generators that a fresh interpreter seeds by chance. Python's own is seeded anew by the fork."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _program(command: list[str]) -> object:
    """command: the words after the interpreter: [-u] SCRIPT ARGUMENTS... or [-u] -m MODULE ARGUMENTS..."""
    words = command[1:] if command[:1] == ["-u"] else command
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name.startswith("__")]:
        delattr(main, name)
    gc.unfreeze()
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path[0] = os.getcwd()
        return compile(f"import runpy; runpy._run_module_as_main({words[1]!r})", "<string>", "exec")
    script = os.path.abspath(words[0])
    sys.argv = list(words)
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    main.__file__, main.__cached__ = script, None
    main.__builtins__ = sys.modules["builtins"]
    main.__spec__ = None
    from importlib.machinery import SourceFileLoader

    main.__loader__ = SourceFileLoader("__main__", script)
    with open(script, "rb") as file:
        return compile(file.read(), script, "exec")


def usual(names: Iterable[str]) -> list[str]:
    """Puts torch first: its import decides how many threads others have."""
    rest = [name for name in names if name not in ("torch", "")]
    return ["torch", *rest]
