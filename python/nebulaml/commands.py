"""The sub-commands of ``nebula`` that are written in Python. The C program (src/cli/cmd_python.c) and ``python -m nebulaml`` start them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from .errors import NebulaError

__all__ = ["MODULES", "run"]

# Each module has `main(arguments) -> exit code`, and is imported when its command runs.
MODULES = {"plan": "nebulaml.plan.command", "studio": "nebulaml.studio.command"}


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs one sub-command. Returns the exit code (see docs/cli.md)."""
    try:
        return int(importlib.import_module(MODULES[name]).main(list(arguments)))
    except NebulaError as failure:
        print(f"nebula: {failure}", file=sys.stderr)
        return 2 if failure.status == "invalid" else 4
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `nebula plan | head`: nothing reads the buffered rest of the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 4
