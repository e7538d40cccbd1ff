"""Loads ZeRO checkpoints with another number of ranks: DeepSpeed's own functions convert them to the universal layout first."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from .._session import ranks
from ..errors import NebulaError
from ..integrations import together

__all__ = ["data_parallel", "is_needed", "load", "partitions"]

log = logging.getLogger("nebulaml")

_PARTITION = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
_WEIGHTS = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")  # of ZeRO stage 3
_TAG = "universal"


def partitions(checkpoint: Any) -> int:
    """Returns the number of data-parallel ranks over which ZeRO has divided the optimizer's state. 0: it has not."""
    found = (_PARTITION.fullmatch(name) for name in checkpoint._all_files())
    return max((int(match[1]) + 1 for match in found if match), default=0)


def is_needed(engine: Any, checkpoint: Any, wants_optimizer: bool) -> bool:
    """Returns True if another number of ranks has saved what is to be loaded in parts. Up to stage 2 the weights are whole on each rank.

    A load from the universal layout would also load the state of the optimizer there.
    """
    is_divided = wants_optimizer or any(map(_WEIGHTS.fullmatch, checkpoint._all_files()))
    return is_divided and partitions(checkpoint) not in (0, data_parallel(engine))


@contextlib.contextmanager
def _folder_of(checkpoint: Any) -> Iterator[tuple[str, str]]:
    """Gives a directory and the tag in it, in the universal layout, and removes it at the end. All ranks call it, and all
    have read when a block ends.

    The first rank of each node converts, into the directory for temporary files, which needs the space of two checkpoints.
    """
    here = ranks.current()
    base = failure = ""
    try:
        if here.local_rank == 0:
            try:
                base = tempfile.mkdtemp(prefix="nebula-universal-")
                _convert(checkpoint, base)
            except Exception as error:  # the other ranks wait for it
                failure = f"{type(error).__name__}: {error}"[:2000]
        answers = _gathered((here.rank - here.local_rank, base, failure))
        failures = [text for _, _, text in answers if text]
        if failures:
            raise NebulaError(f"checkpoint {checkpoint.tag} cannot be converted to another number of ranks: {failures[0]}")
        yield next(path for first, path, _ in answers if path and first == here.rank - here.local_rank), _TAG
    finally:
        if base:
            shutil.rmtree(base, ignore_errors=True)


def _gathered(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    result: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(result, value)
    return result


def _convert(checkpoint: Any, base: str) -> None:
    from deepspeed.checkpoint import ds_to_universal

    source = os.path.join(base, checkpoint.tag.replace("/", "_"))
    os.mkdir(source)
    for name in checkpoint._all_files():
        if name.endswith(".pt"):
            with checkpoint.view(name) as data, open(os.path.join(source, os.path.basename(name)), "wb") as file:
                file.write(data)
    options = argparse.Namespace(
        input_folder=source,
        output_folder=os.path.join(base, _TAG),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # hides progress bars
        ds_to_universal.main(options)
    shutil.rmtree(source)


def load(engine: Any, original: Callable[..., Any], checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls DeepSpeed's load_checkpoint on that version, with any number of ranks."""
    world = data_parallel(engine)
    log.warning(
        "nebula: %s was saved by %d data-parallel ranks, and here are %d: it is converted to DeepSpeed's universal layout first",
        checkpoint.tag,
        partitions(checkpoint),
        world,
    )
    ours, settings = engine.checkpoint_engine, engine._config
    before = ours.enable_load, settings.load_universal_checkpoint
    with _folder_of(checkpoint) as (folder, tag):
        try:
            ours.enable_load, settings.load_universal_checkpoint = False, True
            return together.on_all(lambda: original(engine, folder, tag, *args, **kwargs))
        finally:
            ours.enable_load, settings.load_universal_checkpoint = before


def data_parallel(engine: Any) -> int:
    """Returns the number of ranks over which ZeRO divides in this run."""
    return int(getattr(engine, "seq_dp_world_size", None) or engine.dp_world_size)

