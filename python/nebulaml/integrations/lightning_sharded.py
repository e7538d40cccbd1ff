"""Lightning's FSDP and ModelParallel strategies, for the Trainer and for Fabric, with sharded checkpoints in the background.

Each class derives from Lightning's class and replaces save_checkpoint and load_checkpoint. The directory at the path has the same files
as without Nebula, and appears by one rename when it is durable. Full checkpoints, which are one file, are saved as with other strategies.
"""

from __future__ import annotations

import os
from typing import Any

from .. import api
from . import together
from .lightning import (
    NebulaCheckpointIO,
    _home,
    _is_remote,
    _key,
    _modules,
    _show_parameters,
    checkpoint_tag,
    is_weights_only,
)

__all__ = ["NebulaFSDPStrategy", "NebulaFabricFSDPStrategy", "NebulaFabricModelParallelStrategy", "NebulaModelParallelStrategy"]

META = "meta.pt"  # Lightning's name for the file with all state except model and optimizers


class _Sharded:
    """The base of the four strategies. `_nebula_io` removes old checkpoints, and keeps an old one until a newer one is durable."""

    _nebula_io: NebulaCheckpointIO

    def _nebula_save(self, state: dict[str, Any], rest: dict[str, Any], path: str) -> None:
        from ..dcp.directory import save_directory

        io = self._nebula_io
        session, ending = together.on_all(lambda: io.home(path), "No rank saves it")
        io._begin(path)
        tag = checkpoint_tag(path, rest.get("global_step") if isinstance(rest.get("global_step"), int) else None)
        io._end(save_directory(state, path, str(session.persist_path), tag + ending, {META: rest}), path)

    def _nebula_find(self, path: Any) -> Any:
        """Returns the directory that Nebula saved at this path. None: Nebula did not save it, so Lightning's own load reads the path."""
        from ..dcp.directory import find_directory

        path = self.broadcast(os.fspath(path))  # type: ignore[attr-defined]
        if _is_remote(path):
            return None
        together.on_all(lambda: _home(os.path.dirname(_key(path))))
        found = find_directory(_key(path), self.broadcast)  # type: ignore[attr-defined]
        if found is None and not os.path.exists(path):
            api.flush_persistence()  # the file of a full checkpoint appears when the checkpoint is durable
        return found

    def _nebula_target(self, path: Any) -> str | None:
        """Returns the path of a sharded checkpoint, the same on all ranks. None: the path is remote, so Lightning saves to it."""
        path = self.broadcast(os.fspath(path))  # type: ignore[attr-defined]
        return None if _is_remote(path) else _key(path)


def _split(state: dict[str, Any], is_model: Any) -> tuple[str, Any, dict[str, Any]]:
    """Returns the key of the model, the model, and the optimizers by key. Raises ValueError unless there is exactly one model."""
    from torch.optim import Optimizer

    models = {key: value for key, value in state.items() if is_model(value)}
    if len(models) != 1:
        raise ValueError(f"a checkpoint of this strategy has one model that it has set up, and {len(models)} were given: {sorted(models)}")
    key, model = next(iter(models.items()))
    return key, model, {name: value for name, value in state.items() if isinstance(value, Optimizer)}


def _load_fsdp(found: Any, key: str, model: Any, optimizers: dict[str, Any], strict: bool) -> None:
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    with _modules("strategies.fsdp", fabric=True)[0]._get_sharded_state_dict_context(model):
        weights = {key: model.state_dict()}
        found.load(weights)
        model.load_state_dict(weights[key], strict=strict)
        for name, optimizer in optimizers.items():
            # The other ways to load an optimizer need existing state, and a new optimizer has none.
            moments = load_sharded_optimizer_state_dict(weights[key], name, found.reader())[name]
            optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=moments))


def _load_dtensors(found: Any, key: str, model: Any, optimizers: dict[str, Any], strict: bool) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    weights = {key: get_model_state_dict(model)}
    found.load(weights)
    model.load_state_dict(weights[key], strict=strict)
    for name, optimizer in optimizers.items():
        moments = {name: get_optimizer_state_dict(model, optimizer)}
        found.load(moments)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=moments[name], options=StateDictOptions(cpu_offload=True))


def _converted_fsdp(state: dict[str, Any], model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with _modules("strategies.fsdp", fabric=True)[0]._get_sharded_state_dict_context(model):
        return _converted(state, lambda one: one.state_dict(), lambda one: FullyShardedDataParallel.optim_state_dict(model, one))


def _converted_dtensors(state: dict[str, Any], model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    options = StateDictOptions(cpu_offload=True)
    return _converted(
        state, lambda one: get_model_state_dict(one, options=options), lambda one: get_optimizer_state_dict(model, one, options=options)
    )


def _converted(state: dict[str, Any], of_model: Any, of_optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides Fabric's state into the sharded part (model, optimizers) and the rest, as Lightning does."""
    import torch

    sharded: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            sharded[key] = of_model(value)
        elif isinstance(value, torch.optim.Optimizer):
            sharded[key] = of_optimizer(value)
        else:
            rest[key] = value.state_dict() if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else value
    return sharded, rest


def _for_trainer(name: str, is_sharded: Any, model_key: str, load: Any) -> type:
    base = getattr(_modules("strategies")[0], name)

    class Strategy(_Sharded, base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not isinstance(self._checkpoint_io, NebulaCheckpointIO):
                self._checkpoint_io = NebulaCheckpointIO(other=self._checkpoint_io)

        @property
        def _nebula_io(self) -> NebulaCheckpointIO:
            return self._checkpoint_io  # type: ignore[no-any-return]

        def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            path = self._nebula_target(filepath) if is_sharded(self) and storage_options is None else None
            if path is None:
                super().save_checkpoint(checkpoint, filepath, storage_options)
                return
            state = {model_key: checkpoint.pop("state_dict")}
            state.update((f"optimizer_{index}", one) for index, one in enumerate(checkpoint.pop("optimizer_states", [])))
            self._nebula_save(state, checkpoint, path)

        def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
            found = self._nebula_find(checkpoint_path)
            if found is None:
                given = {} if weights_only is None else {"weights_only": weights_only}  # Lightning before 2.6 has no such argument
                return super().load_checkpoint(checkpoint_path, **given)  # type: ignore[no-any-return]
            optimizers = self.optimizers if self.lightning_module.trainer.state.fn == "fit" else []
            load(found, model_key, self.model, {f"optimizer_{index}": one for index, one in enumerate(optimizers)},
                 self.lightning_module.strict_loading)  # fmt: skip
            return found.load_file(META, weights_only=is_weights_only(weights_only))  # type: ignore[no-any-return]

    return _named(Strategy, f"Nebula{name}", base, "with checkpoints in the background. It takes the same arguments")


def _for_fabric(name: str, is_sharded: Any, is_model: Any, convert: Any, load: Any) -> type:
    base = getattr(_modules("strategies", fabric=True)[0], name)

    class Strategy(_Sharded, base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._nebula_io = NebulaCheckpointIO()

        def save_checkpoint(self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None) -> None:  # noqa: A002
            plain = storage_options is not None or filter is not None or not is_sharded(self)
            target = None if plain else self._nebula_target(path)
            if target is None:
                super().save_checkpoint(path, state, storage_options, filter)
                return
            self._nebula_save(*convert(state, _split(state, is_model)[1]), target)

        def load_checkpoint(
            self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
        ) -> dict[str, Any]:
            found = self._nebula_find(path) if isinstance(state, dict) and state else None
            if found is None:
                given = {} if weights_only is None else {"weights_only": weights_only}
                return super().load_checkpoint(path, state, strict, **given)  # type: ignore[no-any-return]
            key, model, optimizers = _split(state, is_model)
            load(found, key, model, optimizers, strict)
            rest: dict[str, Any] = found.load_file(META, weights_only=is_weights_only(weights_only))
            for wanted in state.keys() - {key} - optimizers.keys():
                if wanted in rest:
                    state[wanted] = rest.pop(wanted)
                elif strict:
                    raise KeyError(f"{path} has no {wanted!r}; strict=False loads the rest")
            return rest

    return _named(Strategy, f"NebulaFabric{name}", base, "of Fabric with checkpoints in the background. It takes the same arguments")


def _named(kind: type, name: str, base: type, doc: str) -> type:
    _show_parameters(kind, base)
    kind.__name__ = kind.__qualname__ = name
    kind.__module__, kind.__doc__ = __name__, f"{base.__name__} {doc}."
    return kind


def _is_sharded_fsdp(strategy: Any) -> bool:
    return bool(strategy._state_dict_type == "sharded")


def _is_sharded_parallel(strategy: Any) -> bool:
    return bool(strategy._save_distributed_checkpoint)


def _has_fsdp(value: Any) -> bool:
    return bool(_modules("strategies.fsdp", fabric=True)[0]._has_fsdp_modules(value))


def _has_dtensors(value: Any) -> bool:
    return bool(_modules("strategies.model_parallel", fabric=True)[0]._has_dtensor_modules(value))


_MAKERS = {
    "NebulaFSDPStrategy": lambda: _for_trainer("FSDPStrategy", _is_sharded_fsdp, "model", _load_fsdp),
    "NebulaModelParallelStrategy": lambda: _for_trainer("ModelParallelStrategy", _is_sharded_parallel, "state_dict", _load_dtensors),
    "NebulaFabricFSDPStrategy": lambda: _for_fabric("FSDPStrategy", _is_sharded_fsdp, _has_fsdp, _converted_fsdp, _load_fsdp),
    "NebulaFabricModelParallelStrategy": lambda: _for_fabric(
        "ModelParallelStrategy", _is_sharded_parallel, _has_dtensors, _converted_dtensors, _load_dtensors
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _MAKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _MAKERS[name]()
    return value
