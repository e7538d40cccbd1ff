"""Trainers that do not pay the two seconds of `import torch`: a process that has imported it forks them.

A trainer is what `python -W ignore -c CODE ARGUMENTS` would be: it has its own environment, directory and descriptors, and it ends as an
interpreter does. It cannot be given what the interpreter or torch reads from the environment when it starts: `Nursery.takes` says so.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys

# The process that forks. `serve` returns in each child, whose code then takes the place of this one.
SERVER = """
def serve():
    import json, os, select, signal, socket, sys
    import torch
    control = socket.socket(fileno=int(sys.argv[1]))
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living = {}
    while True:
        ready = select.select([control, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            while living:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                os.write(living[pid], b"%d" % status)
                os.close(living.pop(pid))
        if control not in ready:
            continue
        said, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not said:
            os._exit(0)
        pid = os.fork()
        if pid:
            living[pid] = descriptors.pop()
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(b"%d" % pid)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for place, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, place)
        for descriptor in (woken, wake, control.detach(), *living.values(), *descriptors):
            os.close(descriptor)
        asked = json.loads(said)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["directory"])
        sys.argv = ["-c", *asked["arguments"]]
        return compile(asked["code"], "<string>", "exec")

exec(serve())
"""
# Nothing reads these before a trainer imports nebulaml.
LATE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Nursery:
    """The process that forks. It lives from the first trainer to the end of the tests."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-W", "ignore", "-c", SERVER, str(theirs.fileno())]
        self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()

    def takes(self, environment: dict[str, str]) -> bool:
        changed = dict(environment.items() ^ self.environment.items())
        return all(name.startswith(("NEBULA_", "PYTEST_")) or name in LATE for name in changed)

    def fork(self, code: str, arguments: list[str], directory: str, descriptors: list[int]) -> tuple[int, int]:
        """Starts a trainer. Returns its pid, and a descriptor from which its status can be read when it has ended."""
        ended, theirs = os.pipe()
        asked = {"code": code, "arguments": arguments, "directory": directory, "environment": dict(os.environ)}
        socket.send_fds(self.control, [json.dumps(asked).encode()], [*descriptors, theirs])
        os.close(theirs)
        return int(self.control.recv(64)), ended

    def close(self) -> None:
        self.control.close()
        self.server.wait()


class Trainer(subprocess.Popen):
    """A trainer that a nursery has forked, with all that subprocess.Popen offers. It is no child of this process."""

    def __init__(self, nursery: Nursery, code: str, arguments: list[str], **options: object) -> None:
        self.nursery, self.code, self.ended = nursery, code, -1
        super().__init__(arguments, **options)

    def _execute_child(self, *given: object) -> None:
        arguments, directory, pipes = given[0], given[5], given[10:16]
        descriptors = [place if theirs == -1 else theirs for place, theirs in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid, self.ended = self.nursery.fork(self.code, arguments, os.fspath(directory), descriptors)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self.ended], [], [], 0)[0]:
            return 0, 0
        status = int(os.read(self.ended, 64))
        os.close(self.ended)
        return self.pid, status

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        with self._waitpid_lock:
            if self.returncode is None:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
        return self.returncode
