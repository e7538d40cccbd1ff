"""Bytes and text as a person reads them, on a terminal or in a notebook."""

from __future__ import annotations

__all__ = ["escaped", "human_bytes", "printable"]


def human_bytes(size: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


def printable(text: str) -> str:
    """Returns a text without characters on which a terminal would act, or that it cannot show."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def escaped(text: str) -> str:
    """Returns a text as HTML."""
    import html  # a notebook alone needs it

    return html.escape(text)
