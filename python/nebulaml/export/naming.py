"""The names of weights in a Hugging Face directory: those of the model's own state_dict(), and each tied tensor once."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .._session import documents
from ..errors import NebulaConfigError, NebulaNotFound
from ..tensors import names
from .sources import Weights
from .tensors import Tensor

__all__ = ["Config", "Model", "named", "same_memory"]

Rename = Callable[[str], "str | None"] | Mapping[str, "str | None"]

CONFIG = "config.json"
_COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model",
    "sentencepiece.*.model", "*.jinja", "chat_template.json", "*processor_config.json", "README.md",
)  # fmt: skip


class Config:
    """config.json and the files beside it, as texts and paths. `source`: a directory, a config or a model of transformers, a dict, or None."""

    def __init__(self, source: Any) -> None:
        self.values: dict[str, Any] | None = None
        self.files: dict[str, bytes | Path] = {}
        if source is None:
            return
        if isinstance(source, (str, os.PathLike)):
            self._read(Path(source))
            return
        generation = getattr(source, "generation_config", None)
        if isinstance(source, torch.nn.Module):
            config = getattr(source, "config", None)
            self._take(config)
            if self.values is not None and not self.values.get("architectures"):
                self.values["architectures"] = [type(source).__name__]
        else:
            self._take(source)
        if generation is not None and hasattr(generation, "to_json_string"):
            self.files["generation_config.json"] = generation.to_json_string().encode()

    def _take(self, config: Any) -> None:
        if hasattr(config, "to_dict"):  # to_dict() of transformers has what config.json has, and JSON types only through to_json_string()
            text = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else json.dumps(config.to_dict())
            config = json.loads(text)
        if not isinstance(config, Mapping):
            raise NebulaConfigError(
                f"config={config!r:.100}: give a directory that has config.json, a configuration or a model of transformers, or a dict"
            )
        self.values = dict(config)

    def _read(self, folder: Path) -> None:
        try:
            values = documents.load(folder / CONFIG)
        except OSError as failure:
            raise NebulaNotFound(f"config={str(folder)!r}: {CONFIG} cannot be read there: {failure.strerror}") from failure
        except ValueError as failure:
            raise NebulaConfigError(f"{folder / CONFIG} is no JSON: {failure}") from failure
        if not isinstance(values, dict):
            raise NebulaConfigError(f"{folder / CONFIG} is no JSON object: it is not a configuration of transformers")
        self._take(values)
        patterns = (*_COPIED, "*.py") if "auto_map" in values else _COPIED
        for one in sorted(folder.iterdir()):
            if one.is_file() and any(fnmatch.fnmatchcase(one.name, pattern) for pattern in patterns):
                self.files[one.name] = one

    def text(self, dtype: torch.dtype | None) -> bytes:
        """Returns config.json, with the dtype of the weights. None: they have several."""
        values = dict(self.values or {})
        if dtype is not None:
            kept = [name for name in ("dtype", "torch_dtype") if name in values] or ["torch_dtype"]  # both are known to every transformers
            values.update((name, str(dtype).removeprefix("torch.")) for name in kept)
        return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"


class Model:
    """What transformers says of a model: the shapes of its state, and which names are one tensor."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], ties: dict[str, str]) -> None:
        self.shapes, self.ties = shapes, ties

    @classmethod
    def of(cls, config: Config) -> Model | None:
        """Builds the model without memory. None: there is no configuration, or transformers is not installed or does not know it."""
        architectures = (config.values or {}).get("architectures") or [None]
        try:
            import transformers

            kind = getattr(transformers, architectures[0] or "", None)
        except ImportError:
            return None
        if kind is None or config.values is None:
            return None
        values = {name: value for name, value in config.values.items() if name not in ("dtype", "torch_dtype", "quantization_config")}
        try:
            with torch.device("meta"):
                module = kind(kind.config_class.from_dict(values))
        except Exception as failure:
            raise NebulaConfigError(f"transformers cannot make a {architectures[0]} of this {CONFIG}: {failure}") from failure
        state = module.state_dict(keep_vars=True)
        return cls({name: tuple(value.shape) for name, value in state.items()}, _ties_of(module, state))


def _ties_of(module: Any, state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Returns {name that transformers leaves out: name that it saves}."""
    groups: dict[int, list[str]] = {}
    for name, value in state.items():
        groups.setdefault(id(value), []).append(name)
    said = getattr(module, "_tied_weights_keys", None) or ()
    left_out = set(said)  # the names, or since transformers 5 a dict from them
    ties = {}
    for group in groups.values():
        kept = next((name for name in group if not any(_matches(name, pattern) for pattern in left_out)), group[0])
        ties.update((name, kept) for name in group if name != kept)
    return ties


def _matches(name: str, pattern: str) -> bool:
    import re

    return name == pattern or re.fullmatch(pattern, name) is not None


def named(weights: Weights, rename: Rename | None, model: Model | None) -> tuple[dict[str, Tensor], list[tuple[str, Tensor, str]]]:
    """Returns the tensors under the names of the directory; and those that it leaves out because they are tied, with the name that is kept.

    A tensor is also left out if `rename` gives None. Raises NebulaConfigError if names or shapes are not those of the model.
    """
    tensors, ties = _renamed(weights, rename, model)
    for left, kept in {} if model is None else model.ties.items():
        if left in tensors and kept not in tensors:  # it was saved under the other of its names
            tensors[kept] = tensors.pop(left)
    ties.update(same_memory(tensors) if model is None else model.ties)
    kept_tensors = {name: tensor for name, tensor in tensors.items() if name not in ties}
    if model is not None:
        _check(kept_tensors, model)
    if not kept_tensors:
        raise NebulaConfigError("no tensor is left to export")
    return kept_tensors, [(left, tensors[left], kept) for left, kept in ties.items() if left in tensors]


def _renamed(weights: Weights, rename: Rename | None, model: Model | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    plain = {name: names.plain_key(name) for name in (*weights.tensors, *weights.ties)}
    while all(name.startswith("module.") for name in plain.values()):  # DistributedDataParallel, DeepSpeed
        plain = {name: new.removeprefix("module.") for name, new in plain.items()}
    first = {new.partition(".")[0] for new in plain.values()}
    known = set() if model is None else {name.partition(".")[0] for name in model.shapes}
    if rename is None and len(first) == 1 and not first & known and all("." in name for name in plain.values()):
        if weights.has_prefix or model is not None:  # the program's own module, of which the model is an attribute
            plain = {name: new.partition(".")[2] for name, new in plain.items()}
    if rename is not None:
        call = rename if callable(rename) else lambda name: rename.get(name, name)  # type: ignore[union-attr]
        plain = {name: call(new) for name, new in plain.items()}  # type: ignore[misc]
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.tensors.items():
        new = plain[name]
        if new is None:
            continue
        if not isinstance(new, str) or new in tensors:
            raise NebulaConfigError(f"{name!r} would be named {new!r}" + (", as another tensor" if new in tensors else ": give text or None"))
        tensors[new] = tensor
    ties = {plain[left]: plain[kept] for left, kept in weights.ties.items() if plain[left] is not None and plain[kept] in tensors}
    return tensors, ties


def same_memory(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Returns ties of tensors that were one in the program's memory. The first name is kept, as safetensors' save_model() does."""
    first: dict[Any, str] = {}
    found = {}
    for name in sorted(tensors):
        identity = tensors[name].identity
        if identity is not None and first.setdefault(identity, name) != name:
            found[name] = first[identity]
    return found


def _check(tensors: dict[str, Tensor], model: Model) -> None:
    expected = {name: shape for name, shape in model.shapes.items() if name not in model.ties}
    for text, some in (
        ("the checkpoint lacks", expected.keys() - tensors.keys()),
        ("the model has no", tensors.keys() - expected.keys()),
    ):
        if some:
            listed = sorted(some)
            more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
            raise NebulaConfigError(f"{text} {', '.join(listed[:5])}{more}: rename= maps names of the checkpoint to those of the model")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name]:
            raise NebulaConfigError(f"{name} has the shape {tensor.shape} in the checkpoint, and {expected[name]} in the model")
