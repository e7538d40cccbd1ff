"""``python -m nebulaml`` is the command ``nebula`` of this installation."""

from __future__ import annotations

import os
import sys

from . import locate


def main() -> None:
    command = os.environ.get("NEBULA_AGENT_PATH") or locate.agent_path()
    if command is None:
        sys.exit("python -m nebulaml: the `nebula` command of this installation is not found; install the package again")
    os.execv(command, ["nebula", *sys.argv[1:]])


if __name__ == "__main__":
    main()
