"""verl: checkpoints of FSDP workers in the background, with a tracker file that names only durable steps.

verl loads this module in every worker (entry point ``verl.plugins``). Two settings turn it on:

* ``VERL_ENGINE_VENDOR=nebula`` in the environment: verl's EngineRegistry then makes the FSDP engines of this module.
* ``trainer.checkpoint_callback_class=nebulaml.integrations.verl.NebulaCheckpointCallback``: the callback writes
  ``latest_checkpointed_iteration.txt``. verl itself does not write it if ``async_save`` is set.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from typing import Any

from . import places, together

__all__ = ["NebulaCheckpointCallback", "make_manager", "register"]

log = logging.getLogger("nebulaml")

VENDOR = "nebula"
STAGING = "-staging"
MARK = ".nebula.json"  # the agent puts this file into each directory that it publishes
TRACKER = "latest_checkpointed_iteration.txt"
POLL_S = 0.2
END_S = 600  # the driver waits this many seconds for the last checkpoint before it ends


def _staging_of(target: str) -> str:
    """Returns where the files of <run>/global_step_<n>/<role> wait for their place, which is there until they have it."""
    run = os.path.dirname(os.path.dirname(target))
    return os.path.join(places.beside(run, STAGING), os.path.relpath(target, run))


def _is_there(target: str) -> bool:
    """Returns True if the last checkpoint that was saved at this path is there. An older one may be there before."""
    return os.path.exists(os.path.join(target, MARK)) and not os.path.isdir(_staging_of(target))


def make_manager() -> type:
    """Returns the class of the checkpoint manager.

    It derives from verl's class, and verl is still being imported when it imports this module.
    """
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from .redirect import Capture, captured

    class NebulaFSDPCheckpointManager(FSDPCheckpointManager):  # type: ignore[misc]
        """verl's FSDP checkpoint manager. A save returns when the values are fixed; the directory appears by one rename when it is durable."""

        def save_checkpoint(
            self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
        ) -> None:
            if local_path is None:
                return
            target = os.path.abspath(local_path)
            run = os.path.dirname(os.path.dirname(target))  # <run>/global_step_<n>/<role>
            session, prefix = places.store(run)
            staging = _staging_of(target)
            role = os.path.basename(target)
            with captured(Capture(f"{prefix}{role}-global_step{global_step}", staging, -2, session=session)) as capture:
                super().save_checkpoint(staging, hdfs_path, global_step, None)
            if self.rank == 0:
                places.make(os.path.dirname(target))
                capture.checkpoint.publish_directory(staging, target)
            if capture.checkpoint.commit() and self.rank == 0:
                super().register_checkpoint(target, max_ckpt_to_keep)  # removes older checkpoints

        def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None) -> None:
            """Does nothing: verl's own save calls it with the staging directory, before the commit."""

        def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
            target = None if local_path is None else os.path.abspath(local_path)
            if target is not None and (together.several() or not os.path.isdir(target) or os.path.isdir(_staging_of(target))):
                run = os.path.dirname(os.path.dirname(target))
                together.flush(places.store(run)[:1])  # an agent may still write the checkpoint of a run that was killed
            super().load_checkpoint(local_path, *args, **kwargs)

        def remove_previous_save_local_path(self, path: Any) -> None:
            for one in [path] if isinstance(path, str) else path:
                run = os.path.dirname(os.path.dirname(os.path.abspath(one)))
                places.store(run)[0]._remove(one)  # removes the directory and the stored checkpoint, after all earlier saves

    return NebulaFSDPCheckpointManager


def register() -> None:
    """Registers FSDP engines with Nebula's checkpoint manager at verl, as vendor "nebula"."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    manager = make_manager()
    for model_type, base in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):

        class Engine(base):  # type: ignore[misc, valid-type]
            def initialize(self) -> None:
                super().initialize()
                self.checkpoint_manager = manager(
                    model=self.module, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler,
                    processing_class=self.model_config.get_processor(), checkpoint_config=self.checkpoint_config,
                    trust_remote_code=self.model_config.trust_remote_code,
                )  # fmt: skip

        Engine.__name__ = Engine.__qualname__ = f"Nebula{base.__name__}"
        EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"], vendor=VENDOR)(Engine)


class NebulaCheckpointCallback:
    """Runs on the driver. Writes the tracker file when all directories of a step are durable."""

    def __init__(self, config: Any = None) -> None:
        self.config = config
        self._lock = threading.Condition()  # guards all below
        self._waited: list[tuple[int, str, list[str]]] = []  # step, the run's directory, the directories of the step
        self._written = -1
        self._thread: threading.Thread | None = None

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **_: Any) -> None:
        """verl calls this after each save. It returns at once."""
        if not async_save:
            return  # verl itself has written the tracker file
        roles = ["actor", *(["critic"] if getattr(trainer, "use_critic", False) else [])]
        folder = os.path.abspath(checkpoint_dir)
        with self._lock:
            self._waited.append((global_step, os.path.dirname(folder), [os.path.join(folder, role) for role in roles]))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nebula-verl-tracker", daemon=True)
                self._thread.start()
                atexit.register(self.wait, END_S)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the tracker file names the newest save. Returns False if it does not after `timeout` seconds (None: no limit)."""
        with self._lock:
            done = self._lock.wait_for(lambda: not self._waited, timeout)
            if not done:
                log.error("nebula: %s does not name step %d: that checkpoint is not durable", TRACKER, self._waited[-1][0])
        return done

    def _run(self) -> None:
        while True:
            with self._lock:
                waited = list(self._waited)
            there = [one for one in waited if all(map(_is_there, one[2]))]
            if there:
                step, run, _ = max(there)
                _write_tracker(run, step)
                with self._lock:
                    self._waited = [one for one in self._waited if one[0] > step]  # an older step may have failed, so its wait ends, too
                    self._written = step
                    self._lock.notify_all()
            time.sleep(POLL_S)


def _write_tracker(run: str, step: int) -> None:
    path = os.path.join(run, TRACKER)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w") as file:
        file.write(str(step))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


if os.getenv("VERL_ENGINE_VENDOR") == VENDOR:
    register()
