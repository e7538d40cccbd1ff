"""For mkdocstrings: the arguments that a docstring of nebulaml describes, as a list. mkdocs.yml names this extension of griffe."""

from __future__ import annotations

from typing import Any

import griffe

from docs import listed


class Arguments(griffe.Extension):
    """Rewrites each docstring before it becomes a part of the reference."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None or not (obj.is_function or obj.is_class):
            return
        function = obj if obj.is_function else obj.members.get("__init__")
        names = {parameter.name for parameter in getattr(function, "parameters", [])}
        if obj.is_class:
            names |= {name for name, member in obj.members.items() if member.is_attribute}
        obj.docstring.value = listed(obj.docstring.value, names)
