#!/usr/bin/env python3
"""Writes nebula.1 from docs/cli.md, or nebula.3 from include/nebula.h, so that the manuals agree with the documents.

manpage.py docs/cli.md VERSION > nebula.1
manpage.py include/nebula.h VERSION > nebula.3
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path


def roff(text: str) -> str:
    """Returns a line of text as roff, in which nothing can be read as a request or an escape."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def inline(text: str) -> str:
    """Converts the Markdown within a line: links become their text, code and strong text become bold."""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("\\|", "|")
    parts = re.split(r"(`[^`]+`|\*\*.+?\*\*)", text)
    shown = (f"\\fB{roff(part.strip('`*'))}\\fR" if part[:1] == "`" or part[:2] == "**" else roff(part).removeprefix("\\&") for part in parts)
    line = "".join(shown)
    return "\\&" + line if line[:1] in (".", "'") else line


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def from_markdown(text: str) -> Iterator[str]:
    is_code = is_table = False
    for line in text.splitlines():
        if line.startswith("```"):
            yield ".EE\n.RE" if is_code else ".PP\n.RS 4\n.EX"
            is_code = not is_code
        elif is_code:
            yield roff(line)
        elif line.startswith("# "):
            yield ".SH DESCRIPTION"
        elif line.startswith("#"):
            yield f".SH {inline(line.lstrip('# ')).upper()}" if line.startswith("## ") else f".SS {inline(line.lstrip('# '))}"
        elif line.startswith("|"):
            row = cells(line)
            if is_table and not all(set(cell) <= set(":- ") for cell in row):
                yield f".TP\n{inline(row[0])}\n" + "\n.br\n".join(inline(cell) for cell in row[1:] if cell)
            is_table = True
            continue
        elif line.startswith("* "):
            yield f".IP \\(bu 2\n{inline(line[2:])}"
        elif not line.strip():
            yield ".PP"
        else:
            yield inline(line.strip())
        is_table = False


def from_header(text: str) -> Iterator[str]:
    """Converts the first comment to text. The rest of the header stays as it is, because its comments are the manual."""
    about, rest = re.fullmatch(r"/\*\n(.*?)\n \*/\n(.*)", text, re.S).groups()  # type: ignore[union-attr]
    yield ".SH DESCRIPTION"
    yield ".EX"
    yield from (roff(line.removeprefix(" *").removeprefix(" ")) for line in about.splitlines()[2:])
    yield ".EE\n.SH DECLARATIONS\n.EX"
    yield from (roff(line.replace("\t", "        ")) for line in rest.splitlines())
    yield ".EE"


def page(source: Path, version: str) -> str:
    text = source.read_text()
    if source.suffix == ".h":
        head = [f'.TH NEBULA 3 "" "Nebula {version}"', ".SH NAME", "nebula \\- checkpoints of large\\-model training, as a C library"]
        head += [".SH SYNOPSIS", ".B #include <nebula.h>", ".PP", ".B cc ... $(pkg\\-config \\-\\-cflags \\-\\-libs nebula)"]
        body = from_header(text)
    else:
        head = [f'.TH NEBULA 1 "" "Nebula {version}"', ".SH NAME", "nebula \\- checkpoints of large\\-model training: fast, exact, verified"]
        head += [".SH SYNOPSIS", ".B nebula", ".I COMMAND", "[options]"]
        body = from_markdown(text)
    return "\n".join([*head, *body]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(Path(sys.argv[1]), sys.argv[2]))
