"""A plugin of pytest: the tests of a framework run with Nebula in the place of its own writers. See compare.py.

NEBULA_SUITE says which framework. Each save is flushed before the call returns, because these tests look at the disk at once.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile

import nebulaml
import pytest

SUITE = os.environ["NEBULA_SUITE"]


def flushed(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        finally:
            if nebulaml.is_initialized():
                nebulaml.flush_persistence(timeout=60)

    return run


def replace(old, new):
    """Replaces a function in every module that has already imported it by name. The tests themselves are imported later."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)


def put_into_lightning():
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    replace(ModelCheckpoint, nebulaml.NebulaCallback)
    pl.Trainer.save_checkpoint = flushed(pl.Trainer.save_checkpoint)
    for name in ("fit", "validate", "test", "predict"):
        setattr(pl.Trainer, name, flushed(getattr(pl.Trainer, name)))


def put_into_accelerate():
    from accelerate import Accelerator

    begin = Accelerator.__init__

    @functools.wraps(begin)
    def attached(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        nebulaml.attach(self)
        self.save_state = flushed(self.save_state)

    Accelerator.__init__ = attached


def put_into_torch():
    import torch.distributed.checkpoint as dcp
    from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter

    class Writer(NebulaStorageWriter):
        def __init__(self, path, *args, **kwargs):
            super().__init__(path)

        def finish(self, *args):
            super().finish(*args)
            nebulaml.flush_persistence(timeout=60)

    replace(dcp.FileSystemWriter, Writer)
    replace(dcp.FileSystemReader, NebulaStorageReader)


def pytest_configure(config):
    config.nebula_place = tempfile.mkdtemp(prefix="nebula-suite-")
    os.environ["NEBULA_AGENT_LINGER"] = "1"  # seconds; it ends by itself
    os.environ["NEBULA_RUNTIME_DIR"] = os.path.join(config.nebula_place, "run")
    {"lightning": put_into_lightning, "accelerate": put_into_accelerate, "torch": put_into_torch}[SUITE]()


@pytest.fixture(autouse=True)
def nebula_of_this_test_alone():
    yield
    nebulaml._shutdown()


def pytest_unconfigure(config):
    nebulaml._shutdown()
    shutil.rmtree(config.nebula_place, ignore_errors=True)
