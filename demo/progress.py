"""Shows progress: one changing line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

BLOCKS = " ▏▎▍▌▋▊▉█"


def bar(fraction: float, width: int = 24) -> str:
    """Returns a bar of ``width`` cells, in steps of an eighth of a cell."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (BLOCKS[rest] if rest else "")).ljust(width)


class Progress:
    """The line of one phase."""

    def __init__(self, title: str, total: int, stream: TextIO = sys.stdout) -> None:
        self.title, self.total, self.stream = title, total, stream
        self.live = stream.isatty()
        self.told = 0

    def show(self, step: int, note: str) -> None:
        """Updates the line. Without a terminal it prints a line after every quarter."""
        if self.live:
            line = f"{self.title:<30} {bar(step / self.total)} {step:>4}/{self.total}  {note}"
            self.stream.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
        elif step - self.told >= self.total // 4:
            self.told = step
            self.stream.write(f"{self.title:<30} step {step:>4}/{self.total}  {note}\n")
        self.stream.flush()

    def end(self, note: str) -> None:
        """Prints the last line."""
        self.stream.write(f"{chr(13) + chr(27) + '[K' if self.live else ''}{self.title:<30} {note}\n")
        self.stream.flush()
