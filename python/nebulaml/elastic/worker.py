"""Ends a worker together with its torchrun: an orphan would go on training in the old world.

As a script, ``worker.py PID COMMAND...`` starts a worker of the torchrun PID. The command ``nebula-warm`` does the same for plain torchrun. It
imports as little as possible. If torchrun has a template (warm.py), the template forks the worker, and this process is its stub: it passes
signals on, and ends as the worker ends.
"""

import os
import signal
import sys

__all__ = ["TORCHRUN", "end_with", "interpret", "join", "passed_over", "tell", "tell_spares"]

WARM = "NEBULA_WARM"  # the address of the template
PASSED_OVER = "NEBULA_PASSED_OVER"  # versions that the job fails after, one a line: SEQUENCE TAG
COMMITTED = "NEBULA_COMMITTED"  # the file where rank 0 leaves its newest committed step (agent.py)
SPARES = "NEBULA_SPARES"  # the job may have spare nodes: the file where rank 0 leaves the place of its checkpoints (spare.py)
RECORD = "NEBULA_WARM_RECORD"  # the file where a worker leaves the names of its modules
ROUND = "NEBULA_ROUND"  # the job's id and this round of its rendezvous: the same on all nodes, another one at each start of the workers
INTERPRETER = "nebula-warm"  # the value of PYTHON_EXEC for warm workers of plain torchrun
PROGRAM = (
    "import sys; from nebulaml.elastic import warm; exec(warm.serve({fd!r}, {parent!r}, {modules!r}, {bad!r}, {tells!r}))"  # of a template
)
MESSAGE_MOST = 1 << 20  # bytes of a request to the template
WAIT_S = 120.0  # a template that imports for longer is not waited for
# variables that differ between ranks and starts: no library should read them when it is imported
ENVIRONMENT_OF_RANK = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
     "MASTER_ADDR", "MASTER_PORT", "PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE")
)  # fmt: skip
LIMITS = tuple(range(16))  # RLIMIT_* of <linux/resource.h>
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)

TORCHRUN = "NEBULA_TORCHRUN"  # the process id of a torchrun with our rendezvous, for its workers
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>; it stays across exec


def end_with(parent: int) -> bool:
    """Makes the kernel kill this process when its parent ends. False: the parent is another one, because that one has ended."""
    import ctypes  # only workers of a torchrun need it

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


def join() -> None:
    """Ties this process to its torchrun, if its parent is a torchrun whose rendezvous is Nebula's. Otherwise it does nothing."""
    text = os.environ.get(TORCHRUN, "")
    if not text.isdecimal() or int(text) != os.getppid():
        return
    try:
        tied = end_with(int(text))
    except OSError as failure:
        import logging  # the script starts sooner without it

        logging.getLogger("nebulaml.elastic").warning("this worker would train on if its torchrun died: %s", failure)
        return
    if not tied:
        os.kill(os.getpid(), signal.SIGKILL)


def passed_over() -> list:
    """(sequence, tag) of the versions that are not to be loaded."""
    lines = [line.partition(" ") for line in os.environ.get(PASSED_OVER, "").split("\n") if line]
    return [(int(sequence), tag) for sequence, _, tag in lines]


def tell(step: int = -1, loaded: str = "") -> None:
    """Rank 0 tells the agent of its node its newest committed step, or that it uses Nebula, or "SEQUENCE TAG" of the version that it loads."""
    path = os.environ.get(COMMITTED)
    if not path or os.environ.get("RANK", "0") != "0":
        return
    try:
        with open(path, "r+b", buffering=0) as file:
            if step >= 0 or not file.read(1):
                os.pwrite(file.fileno(), f"{step:<20}\n".encode(), 0)
            if loaded:
                os.ftruncate(file.fileno(), 21)
                os.pwrite(file.fileno(), loaded.encode(), 21)
    except OSError:
        pass  # torchrun has ended, or runs elsewhere


def tell_spares(path: str, job: str, memory_bytes: int) -> None:
    """Rank 0 tells spare nodes where the job's checkpoints are, so that they can hold copies."""
    file = os.environ.get(SPARES)
    if not file or os.environ.get("RANK", "0") != "0":
        return
    import json

    try:
        with open(file, "r+b", buffering=0) as place:
            place.write(json.dumps({"path": path, "job": job, "memory_bytes": memory_bytes}).encode())
            place.truncate()
    except OSError:
        pass  # torchrun has ended, or runs elsewhere


def main() -> None:
    if not end_with(int(sys.argv[1])):
        sys.exit("nebulaml: torchrun has ended before its worker began")
    address, command = os.environ.pop(WARM, ""), sys.argv[2:]
    if address and command[0] == sys.executable:
        _be_stub(address, command[1:])
    os.execvp(command[0], command)


def interpret() -> None:
    """The command ``nebula-warm``, in place of the interpreter of plain torchrun's workers."""
    sys.argv[1:1] = [os.environ.get(TORCHRUN) or str(os.getppid()), sys.executable]
    main()


def _be_stub(address: str, command: list) -> None:
    """Lets the template fork the worker, and ends as it ends. Returns if the worker is to start cold."""
    import json
    import resource
    import socket

    woken, waker = socket.socketpair()
    waker.setblocking(False)
    template = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {
        "pid": os.getpid(), "command": command, "environment": dict(os.environ), "directory": os.getcwd(), "umask": _umask(),
        "limits": [resource.getrlimit(limit) for limit in LIMITS], "processors": sorted(os.sched_getaffinity(0)), "oom_score": _oom_score(),
    }  # fmt: skip
    try:
        template.settimeout(WAIT_S)
        template.connect("\0" + address)
        template.recv(4096)  # it is ready; a stopped one would keep the streams open
        template.settimeout(None)
        socket.send_fds(template, [json.dumps(request).encode()], [0, 1, 2])
        answer = json.loads(template.recv(4096) or b"{}")
    except (OSError, ValueError) as failure:
        answer = {"cold": f"the template does not answer ({failure})"}
    if "pid" not in answer:
        print(f"nebula: a worker starts cold: {answer.get('cold', 'the template has ended')}", file=sys.stderr, flush=True)
        for each in (template, woken, waker):
            each.close()
        return
    _pass_on(template, answer["pid"], woken, waker)


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _oom_score() -> str:
    with open("/proc/self/oom_score_adj") as file:
        return file.read()


def _pass_on(template, worker: int, woken, waker) -> None:  # noqa: ANN001
    import contextlib
    import json
    import select

    for number in FORWARDED:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    while True:
        ready = select.select([template, woken], [], [])[0]
        for number in woken.recv(4096) if woken in ready else b"":
            with contextlib.suppress(OSError):
                os.killpg(worker, number)
        if template in ready:
            said = template.recv(4096)
            status = json.loads(said)["status"] if said else signal.SIGKILL  # the template has died, and its workers with it
            if os.WIFSIGNALED(status):
                import resource

                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's core is the one to look at
                signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) not in (signal.SIGKILL, signal.SIGSTOP) else None
                os.kill(os.getpid(), os.WTERMSIG(status))
            os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
