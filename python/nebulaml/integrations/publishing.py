"""PublishCallback: a Trainer of transformers, and so of TRL, publishes its weights, for rollout engines and evaluators."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ..errors import NebulaConfigError
from ..weights.publisher import Publisher
from ..weights.shards import is_sharded

__all__ = ["PublishCallback"]


def _is_peft(model: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "peft" and kind.__name__ == "PeftModel" for kind in type(model).__mro__)


def _weights(model: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what is published of a model, and options of Publisher for that: of PEFT the adapter, of other models all weights."""
    if not _is_peft(model):
        return model, {}
    from peft import get_peft_model_state_dict

    config = next(iter(model.peft_config.values())).to_dict()
    text = json.dumps(config, indent=2, sort_keys=True, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    files = {"adapter_config.json": text.encode()}
    return lambda: get_peft_model_state_dict(model), {"name": "adapter_model.safetensors", "files": files}


def _refuse_others_shards(model: Any) -> None:
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise NebulaConfigError("PublishCallback: FSDP version 1 gathers its weights by a collective: use version 2 (fsdp_version=2)")
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise NebulaConfigError("PublishCallback: with ZeRO stage 3 no rank has a whole parameter: use stage 2, or FSDP version 2")


def _saved(*objects: Any) -> dict[str, bytes]:
    """Returns the files that save_pretrained writes of configurations and tokenizers."""
    with tempfile.TemporaryDirectory() as directory:
        for item in objects:
            if callable(getattr(item, "save_pretrained", None)):
                item.save_pretrained(directory)
        return {entry.name: Path(entry.path).read_bytes() for entry in os.scandir(directory) if entry.is_file()}


def _make_callback() -> type:
    try:
        from transformers import TrainerCallback
    except ImportError as failure:
        raise NebulaConfigError("PublishCallback is for transformers' Trainer: pip install transformers, or use Publisher") from failure

    class PublishCallback(TrainerCallback):  # type: ignore[misc]
        """Publishes the weights of a transformers ``Trainer``, also of TRL's, after optimizer steps and at the end, for ``Subscriber``.

        every: steps between publications. path and the other options: those of ``Publisher``. Unless ``files`` is given, the configuration and
        the tokenizer are published, too. Of a PEFT model the adapter is published. With FSDP version 2 each rank publishes its shards, else
        rank 0 publishes. Raises NebulaConfigError for FSDP version 1 and for DeepSpeed's ZeRO stage 3.
        """

        def __init__(self, path: str | os.PathLike[str], every: int = 1, **options: Any) -> None:
            if isinstance(every, bool) or not isinstance(every, int) or every < 1:
                raise NebulaConfigError(f"PublishCallback(every={every!r}): give a number of steps")
            self._path, self._every, self._options = path, every, options
            self._publisher: Publisher | None = None
            self._last = -1

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            _refuse_others_shards(model)
            if not is_sharded(dict(model.named_parameters())) and not state.is_world_process_zero:
                return
            weights, options = _weights(model)
            of_model = () if options else (getattr(model, "config", None), getattr(model, "generation_config", None))
            files = _saved(*of_model, kwargs.get("processing_class"))
            options = {"files": {**files, **options.pop("files", {})}, **options, **self._options}
            self._publisher, self._last = Publisher(weights, self._path, **options), -1

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % self._every == 0:
                self._publish(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._publish(state.global_step)
            if self._publisher is not None:
                self._publisher.close()
                self._publisher = None

        def _publish(self, step: int) -> None:
            if self._publisher is not None and step != self._last:
                self._publisher.publish(step)
                self._last = step

    PublishCallback.__qualname__ = "PublishCallback"
    PublishCallback.__module__ = __name__
    return PublishCallback


def __getattr__(name: str) -> Any:
    if name != "PublishCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = _make_callback()
    return value
