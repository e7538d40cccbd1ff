"""``python -m nebulaml`` runs the command ``nebula`` of this installation."""

from __future__ import annotations

import os
import sys

from . import commands
from ._session import locate


def main() -> None:
    if commands.is_here(sys.argv[1:]):
        sys.exit(commands.run(sys.argv[1], sys.argv[2:]))
    command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    if command is None:
        sys.exit("python -m nebulaml: the `nebula` command of this installation is not found; install the package again")
    os.execv(command, ["nebula", *sys.argv[1:]])


if __name__ == "__main__":
    main()
