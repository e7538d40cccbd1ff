"""Runs a job, and ends its process before the destructors of C++ run: python ending.py SCRIPT ARGUMENT...

Plain PyTorch with DDP on gloo, without Nebula, aborts at about one of eight ends of the interpreter ("terminate called without an active
exception", -6), after all its work. This script does the work of Python's end itself, including Nebula's exit functions.
"""

import atexit
import faulthandler
import gc
import os
import runpy
import sys
import traceback


def run(script: str) -> int:
    """Runs the script. Returns its exit code."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(code: int) -> None:
    """Ends this process."""
    distributed = sys.modules.get("torch.distributed")
    if code == 0 and distributed is not None and distributed.is_initialized():  # after a failure the other ranks may not reach this point
        distributed.barrier()
        distributed.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    # DeepSpeed's launcher puts its --local_rank between this file and the script.
    sys.argv[0] = next(argument for argument in sys.argv[1:] if not argument.startswith("-"))
    del sys.argv[sys.argv.index(sys.argv[0], 1)]
    gc.set_threshold(100_000)  # with the usual 700 a fifth of the CPU time of importing a framework goes into collections
    faulthandler.enable()  # a test that has waited long enough asks by SIGABRT where this is
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    end(run(sys.argv[0]))
