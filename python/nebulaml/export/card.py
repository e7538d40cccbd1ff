"""README.md of an exported directory: a model card for Hugging Face, with the training's checkpoints and their metrics."""

from __future__ import annotations

import html
import shlex
import time
from typing import Any

from .. import _nebula
from .._session import config as settings
from .._session.printing import human_bytes, printable
from .._session.rows import Row
from ..errors import NebulaError
from ..reader import LOADABLE, Reader

__all__ = ["FILE", "text"]

FILE = "README.md"
SHOWN = 20  # the metrics of each checkpoint cost a request or two


def text(version: Any, has_config: bool) -> bytes:
    """Returns the card of a checkpoint of Nebula. has_config: transformers can load the directory."""
    path, tag, step = version._report().get("persist_path") or "", version.tag, version.step
    rows, metrics = _training(path) if path else ([], {})
    metrics[tag] = version.metrics
    names = sorted({name for found in metrics.values() for name in found})
    head = ["---", *(["library_name: transformers"] if has_config else []), "tags:", "- nebula-checkpoint", "---", ""]
    at = f", step {step} of the training" if step is not None else ""
    lines = [f"# {_cell(tag)}", "", f"The weights of the checkpoint `{_code(tag)}`{at}, written by Nebula {_nebula.VERSION}.", ""]
    if rows:
        columns = ["checkpoint", "step", "committed (UTC)", "size", *map(_cell, names)]
        lines += ["## Checkpoints of the training", "", _line(columns), _line(["---"] * len(columns))]
        lines += [_line(_row(row, metrics.get(row.tag, {}), names, row.tag == tag)) for row in rows]
        lines += ["", "The weights are those of the checkpoint in bold. Abandoned ones were left behind when the training went back.", ""]
    if path:
        command = f"nebula restore {shlex.quote(tag)} --hf DIR --path {shlex.quote(settings.shown(path))}"
        lines += ["## Make it again", "", "```", printable(command), "```", ""]
    return "\n".join([*head, *lines]).encode(errors="replace")


def _training(path: str) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """Returns the newest checkpoints that can be loaded, and their metrics; none if storage fails: no export fails for its card."""
    metrics = {}
    try:
        with Reader(path) as reader:
            rows = [row for row in reader.versions() if row.state in LOADABLE][:SHOWN]
            for row in rows:
                found = reader.get(row.tag)
                metrics[row.tag] = found.metrics if found is not None else {}
    except NebulaError:
        return [], {}
    return rows, metrics


def _row(row: Row, metrics: dict[str, float], names: list[str], is_this: bool) -> list[str]:
    tag = f"**{_cell(row.tag)}**" if is_this else _cell(row.tag)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row.committed_at))
    return [
        tag + (", abandoned" if row.abandoned else ""),
        str(row.step) if row.step is not None else "",
        at,
        human_bytes(row.size),
        *(f"{metrics[name]:.6g}" if name in metrics else "" for name in names),
    ]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    return printable(text).replace("`", "'")


def _cell(text: str) -> str:
    """Returns a text that Markdown shows as it is."""
    return "".join(f"&#{ord(one)};" if one in "|\\`*[]" else one for one in html.escape(printable(text)))
