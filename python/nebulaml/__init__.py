"""Nebula: checkpoints that cost almost nothing, and come back.

import nebulaml as nm
nm.init(persistent_storage_path="/scratch/run7")
checkpoint = nm.Checkpoint("global_step500")
checkpoint.save("model.pt", model.state_dict())
checkpoint.commit()

See docs/python.md. Importing this package imports no framework; the first save or load imports torch.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from .errors import (
    NebulaConfigError,
    NebulaCorrupt,
    NebulaError,
    NebulaNotFound,
    NebulaPicklingError,
    NebulaStorageError,
    NebulaTimeout,
    NebulaUnavailable,
)
from .tensors import huge

try:
    from . import _nebula
except ImportError as _failure:
    # Not an ImportError: DeepSpeed would silently fall back to torch.save.
    raise NebulaUnavailable(
        f"the C library of nebulaml cannot be loaded ({_failure}); install the package again for this Python, from its source "
        "tree: pip install --force-reinstall . (a package of that name on PyPI is not this one)"
    ) from _failure

from .api import (
    Checkpoint,
    Session,
    _shutdown,
    checkpoints,
    find_published,
    flush_persistence,
    get_checkpoint,
    get_latest_checkpoint,
    get_latest_checkpoint_path,
    init,
    is_initialized,
    list_checkpoints,
    persist_path,
    phase,
    prepare,
    progress,
    stats,
    unpublish,
)

huge.ask()

__version__: str = _nebula.VERSION

__all__ = [
    "Checkpoint",
    "NebulaConfigError",
    "NebulaCorrupt",
    "NebulaError",
    "NebulaNotFound",
    "NebulaPicklingError",
    "NebulaStorageError",
    "NebulaTimeout",
    "NebulaUnavailable",
    "Session",
    "__version__",
    "_shutdown",
    "checkpoints",
    "find_published",
    "flush_persistence",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "init",
    "is_initialized",
    "list_checkpoints",
    "persist_path",
    "phase",
    "prepare",
    "progress",
    "stats",
    "unpublish",
]

# Name -> module that defines it, imported at first use, because its framework may not be installed.
_LAZY: dict[str, str] = {
    "Best": "._session.keeping",
    "ElasticSampler": ".elastic.sampler",
    "Event": ".events",
    "Far": ".manager.far",
    "HFExport": ".export.background",
    "Manager": ".manager.manager",
    "MetricsLog": ".monitor.metrics",
    "NebulaCallback": ".integrations.lightning",
    "NebulaCheckpointIO": ".integrations.lightning",
    "NebulaDeepspeedStrategy": ".integrations.lightning",
    "NebulaFSDPStrategy": ".integrations.lightning_sharded",
    "NebulaFabricFSDPStrategy": ".integrations.lightning_sharded",
    "NebulaFabricModelParallelStrategy": ".integrations.lightning_sharded",
    "NebulaModelParallelStrategy": ".integrations.lightning_sharded",
    "NebulaTrainerMixin": ".integrations.hf",
    "PublishCallback": ".integrations.publishing",
    "Published": ".weights.subscriber",
    "Publisher": ".weights.publisher",
    "Reader": ".reader",
    "Restored": ".manager.manager",
    "Subscriber": ".weights.subscriber",
    "add_to_trace": ".monitor.profiling",
    "attach": ".integrations.attaching",
    "export_hf": ".export",
    "export_safetensors": ".integrations.export",
    "log_to": ".monitor.trackers",
    "profiler_track": ".monitor.profiling",
    "publish": ".weights.publisher",
    "rng_state": ".tensors.rng",
    "set_rng_state": ".tensors.rng",
    "wait_for_exports": ".integrations.export",
    "watch": ".monitor.view",
}

if TYPE_CHECKING:  # the names of _LAZY, for type checkers and editors
    from ._session.keeping import Best
    from .elastic.sampler import ElasticSampler
    from .events import Event
    from .export import export_hf
    from .export.background import HFExport
    from .integrations.attaching import attach
    from .integrations.export import export_safetensors, wait_for_exports
    from .integrations.hf import NebulaTrainerMixin
    from .integrations.lightning import NebulaCheckpointIO
    from .manager.far import Far
    from .manager.manager import Manager, Restored
    from .monitor.metrics import MetricsLog
    from .monitor.profiling import add_to_trace, profiler_track
    from .monitor.trackers import log_to
    from .monitor.view import watch
    from .reader import Reader
    from .tensors.rng import rng_state, set_rng_state
    from .weights.publisher import Publisher, publish
    from .weights.subscriber import Published, Subscriber

    # made from Lightning's classes when they are used
    NebulaCallback: Any
    PublishCallback: Any
    NebulaDeepspeedStrategy: Any
    NebulaFSDPStrategy: Any
    NebulaFabricFSDPStrategy: Any
    NebulaFabricModelParallelStrategy: Any
    NebulaModelParallelStrategy: Any

    __all__ += [
        "Best",
        "ElasticSampler",
        "Event",
        "Far",
        "HFExport",
        "Manager",
        "MetricsLog",
        "NebulaCallback",
        "NebulaCheckpointIO",
        "NebulaDeepspeedStrategy",
        "NebulaFSDPStrategy",
        "NebulaFabricFSDPStrategy",
        "NebulaFabricModelParallelStrategy",
        "NebulaModelParallelStrategy",
        "NebulaTrainerMixin",
        "PublishCallback",
        "Published",
        "Publisher",
        "Reader",
        "Restored",
        "Subscriber",
        "add_to_trace",
        "attach",
        "export_hf",
        "export_safetensors",
        "log_to",
        "profiler_track",
        "publish",
        "rng_state",
        "set_rng_state",
        "wait_for_exports",
        "watch",
    ]

if not TYPE_CHECKING:  # otherwise a type checker takes every name for one of the package

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'nebulaml' has no attribute {name!r}")
        value = getattr(importlib.import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    # help() and inspect load every listed name, and fail with the error of a name that cannot be loaded.
    needs = {".integrations.lightning": ("lightning", "pytorch_lightning"), ".integrations.publishing": ("transformers",)}
    absent = [module for module, packages in needs.items() if not any(importlib.util.find_spec(package) for package in packages)]
    return sorted({*globals(), *(name for name, module in _LAZY.items() if not module.startswith(tuple(absent)))})
