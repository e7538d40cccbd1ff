"""Ends a worker together with its torchrun: an orphan would go on training in the old world.

As a script, ``worker.py PID COMMAND...`` starts a worker of the torchrun PID. It imports as little as possible.
"""

import ctypes
import os
import signal
import sys

__all__ = ["TORCHRUN", "join"]

TORCHRUN = "NEBULA_TORCHRUN"  # the process id of a torchrun with our rendezvous, for its workers
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>; it stays across exec


def _end_with(parent: int) -> bool:
    """Makes the kernel kill this process when its parent ends. False: the parent is another one, because that one has ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


def join() -> None:
    """Ties this process to its torchrun, if its parent is a torchrun whose rendezvous is Nebula's. Otherwise it does nothing."""
    text = os.environ.get(TORCHRUN, "")
    if not text.isdecimal() or int(text) != os.getppid():
        return
    try:
        tied = _end_with(int(text))
    except OSError as failure:
        import logging  # the script starts sooner without it

        logging.getLogger("nebulaml.elastic").warning("this worker would train on if its torchrun died: %s", failure)
        return
    if not tied:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    if not _end_with(int(sys.argv[1])):
        sys.exit("nebulaml: torchrun has ended before its worker began")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
