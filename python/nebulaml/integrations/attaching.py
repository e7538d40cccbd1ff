"""``nebulaml.attach(object)``: one function for the objects of all frameworks."""

from __future__ import annotations

from typing import Any, TypeVar

from ..errors import NebulaConfigError

__all__ = ["attach"]

T = TypeVar("T")

# Package and class among the bases of an object's class -> what to use instead of attach().
_INSTEAD = {
    ("lightning", "Trainer"): "give the Trainer callbacks=[nebulaml.NebulaCallback(...)]",
    ("pytorch_lightning", "Trainer"): "give the Trainer callbacks=[nebulaml.NebulaCallback(...)]",
    ("torch", "Module"): "save model.state_dict() with nebulaml.Checkpoint(tag).save(name, ...)",
    ("torch", "Optimizer"): "save optimizer.state_dict() with nebulaml.Checkpoint(tag).save(name, ...)",
}


def attach(target: T, **options: Any) -> T:
    """Makes an object of a framework save through Nebula from then on, and returns it. Call it on every rank.

    target: a transformers.Trainer or a subclass, an accelerate.Accelerator, or a DeepSpeedEngine.
    options: those of that framework's adapter, see docs/frameworks.md. Raises NebulaConfigError for other objects.
    """
    # By name, so that no framework is imported only to compare classes.
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(target).__mro__}
    if ("deepspeed", "DeepSpeedEngine") in kinds:
        from ..deepspeed import attach as attach_engine

        return attach_engine(target, **options)
    if ("transformers", "Trainer") in kinds:
        from .hf import attach_trainer

        return attach_trainer(target, **options)
    if ("accelerate", "Accelerator") in kinds:
        from .hf import attach_accelerator

        return attach_accelerator(target, **options)
    advice = next((text for kind, text in _INSTEAD.items() if kind in kinds), None)
    raise NebulaConfigError(
        f"attach() takes a transformers.Trainer, an accelerate.Accelerator or a DeepSpeedEngine, not a "
        f"{type(target).__module__}.{type(target).__qualname__}" + (f": {advice}" if advice else "")
    )
