"""The sub-commands of ``nebula`` that are written in Python. The C program (src/cli/cmd_python.c) and ``python -m nebulaml`` start them."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from .errors import NebulaError

__all__ = ["MODULES", "is_here", "run"]

# Each module has `main(arguments) -> exit code`, and is imported when its command runs.
MODULES = {
    "plan": "nebulaml.plan.command", "restore": "nebulaml.export.command", "run": "nebulaml.elastic.run", "studio": "nebulaml.studio.command",
}  # fmt: skip

_EXIT = {"corrupt": 1, "invalid": 2, "not-found": 3, "busy": 5}  # of docs/cli.md; any other failure: 4


def is_here(arguments: Sequence[str]) -> bool:
    """Returns True if this command line is one of this module. `nebula restore` is so only with --hf."""
    if not arguments or arguments[0] not in MODULES or {"--help", "-h"} & set(arguments[1:]):
        return False
    return arguments[0] != "restore" or any(one == "--hf" or one.startswith("--hf=") for one in arguments[1:])


def _one_line(text: str) -> str:
    """Returns the text for a terminal: on one line, with control characters and right-to-left marks as escapes."""
    words = " ".join(text.split())
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode() for one in words)


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs one sub-command. Returns the exit code (see docs/cli.md)."""
    try:
        return int(importlib.import_module(MODULES[name]).main(list(arguments)))
    except NebulaError as failure:
        print(f"nebula: {_one_line(str(failure))}", file=sys.stderr)
        return _EXIT.get(failure.status, 4)
    except ModuleNotFoundError as failure:
        if (failure.name or "").partition(".")[0] != "torch":
            raise
        print(f"nebula: `nebula {name}` needs torch: pip install 'nebula-checkpoint[torch]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `nebula plan | head`: it ends as the commands in C do, and as `cat`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing reads the buffered rest of the output
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
        raise
