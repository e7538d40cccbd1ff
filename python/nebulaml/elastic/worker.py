"""Starts a worker that ends when its torchrun ends: ``worker.py PID COMMAND...``. It imports as little as possible."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>; it stays across exec


def main() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(sys.argv[1]):
        sys.exit("nebulaml: torchrun has ended before its worker began")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
