"""The number of parameters of a model: given, or counted for a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from .._session import documents
from ..errors import NebulaConfigError, NebulaNotFound, NebulaUnavailable
from . import quantities

__all__ = ["Model", "from_config", "from_count"]

MOST_REASON = 200  # characters of an error of transformers


@dataclasses.dataclass(frozen=True)
class Model:
    """parameters: shared ones count once.

    largest_layer: the parameters of the module that has the most of its own (ZeRO 3 gathers it).
    """

    parameters: int
    largest_layer: int
    source: str
    layer_source: str


def from_count(text: str, largest_layer: str | None = None) -> Model:
    """Makes a Model from a number that may end in K, M, B or T (powers of 1000). The default layer is a fiftieth of the parameters."""
    parameters = _count("--params", text)
    if largest_layer is not None:
        layer = _count("--largest-layer", largest_layer)
        if layer > parameters:
            raise NebulaConfigError(f"--largest-layer {largest_layer}: the whole model has {text} parameters")
        return Model(parameters, layer, "given", "given")
    return Model(parameters, max(1, parameters // 50), "given", "assumed: a fiftieth of the parameters; --largest-layer gives it")


def from_config(path: str) -> Model:
    """Builds the model of a config.json on torch's meta device, which takes no memory, and counts its parameters.

    Needs transformers. Runs no remote code. Raises NebulaConfigError, NebulaNotFound or NebulaUnavailable.
    """
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    try:
        described = documents.load(file)
    except FileNotFoundError:
        raise NebulaNotFound(f"{file} does not exist: --config takes a config.json of Hugging Face, or its folder") from None
    except (OSError, ValueError) as failure:
        raise NebulaConfigError(f"{file} cannot be read as a config.json: {failure}") from failure
    if not isinstance(described, dict) or not isinstance(described.get("model_type"), str):
        raise NebulaConfigError(f'{file} has no "model_type": it is not a config.json of Hugging Face; --params N gives the number itself')
    try:
        import torch
        import transformers
    except ImportError as failure:
        raise NebulaUnavailable(
            f"--config needs transformers, which counts the parameters of {file} ({failure}): install it, or give --params"
        ) from failure
    try:
        kind = described.pop("model_type")
        config = transformers.AutoConfig.for_model(kind, **described)
        named = (config.architectures or [""])[0]
        maker: Any = getattr(transformers, named, None) or transformers.AutoModel
        with torch.device("meta"):
            model = maker._from_config(config) if hasattr(maker, "_from_config") else maker.from_config(config)
    except Exception as failure:  # any error of a model's class for a wrong configuration
        why = " ".join(str(failure).split())  # it can be a page, with all models that transformers knows
        why = why if len(why) <= MOST_REASON else why[:MOST_REASON] + "..."
        raise NebulaConfigError(f"transformers cannot make a model of {file}: {why}; --params N gives the number itself") from failure
    layers = [sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules()]
    name = type(model).__name__
    return Model(sum(one.numel() for one in model.parameters()), max(layers), f"counted in {name} of {file}", f"counted in {name}")


def _count(name: str, text: str) -> int:
    return round(quantities.PARAMETERS.read(name, text.replace("_", "").replace(",", "")))
