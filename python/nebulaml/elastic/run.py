"""``nebula run``, or ``python -m nebulaml.elastic.run``: torchrun for elastic jobs.

It also accepts the command line of Microsoft's ``torchrun_wrapper.py``.
All options are torchrun's, and those below. Three have other defaults: ``--rdzv_backend=azuretable`` (our ``nebula-azure-table``),
``--nnodes=1:50``, and ``--rdzv_id``, which is the id of the Azure ML run.

``--warm auto`` (the default): workers are forked from a process that has imported what the last worker of this script had imported when it
committed its first checkpoint, and else torch. ``--warm torch,transformers`` names the modules. ``--warm off``: each worker is a new
interpreter.

``--on-hang report`` (the default): if the job makes no steps, the agent says where it hangs. ``--on-hang restart``: it also kills the workers,
and they resume.

``--spares N``: of the largest number of nodes, N wait until another one is lost, and hold copies meanwhile. ``--health-check CMD``: a node
joins, each time, only if the command succeeds (by default ``nebula doctor --health``; "off": none). ``--max-failures-without-progress N``:
after more failures in a row without a new committed step, the job ends (3; 0: never). ``--on-poison older``: then it first passes over the
checkpoint that they loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import sys
import uuid
from argparse import Namespace
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from .._session.pulse import ON_HANG
from ..errors import NebulaConfigError
from .worker import INTERPRETER
from .workers import Workers

__all__ = ["main", "parse"]

_LOGGER = logging.getLogger("nebulaml.elastic")
_DEFAULTS = {"nnodes": "1:50", "rdzv_backend": "azuretable"}
_BACKENDS = {"azuretable": "nebula-azure-table"}
_WORKER = Path(__file__).with_name("worker.py")


def parse(words: Sequence[str], environment: MutableMapping[str, str]) -> Namespace:
    """Parses torchrun's options, with our defaults. Sets variables that the storage account needs in ``environment``."""
    from torch.distributed import run

    parser = _parser()
    # torchrun also takes an option from the environment, as PET_<OPTION>.
    parser.set_defaults(
        **{name: value for name, value in _DEFAULTS.items() if f"PET_{name.upper()}" not in environment}
    )
    if "PET_RDZV_ID" not in environment:
        parser.set_defaults(rdzv_id=None)
    options = parser.parse_args(list(words))
    if options.standalone:  # it needs torchrun's defaults: with 1:50 nodes it would wait for others
        return _parser().parse_args(list(words))
    options.rdzv_backend = _BACKENDS.get(options.rdzv_backend, options.rdzv_backend)
    if options.rdzv_endpoint == "None":  # the wrapper passes this word if it has no endpoint
        options.rdzv_endpoint = ""
    if options.rdzv_id is None:
        options.rdzv_id = _job_id(environment)
    if options.rdzv_backend == "nebula-azure-table" and not options.rdzv_endpoint:
        _take_account(environment)
    least, most = run.parse_min_max_nnodes(options.nnodes)
    if options.spares:
        if not 0 < options.spares < most:
            raise NebulaConfigError(f"--spares={options.spares}: of --nnodes={options.nnodes}, at least one node trains")
        most -= options.spares
        options.nnodes = f"{min(least, most)}:{most}"
    if options.max_failures_without_progress < 0:
        raise NebulaConfigError(
            f"--max-failures-without-progress={options.max_failures_without_progress}: give a number, or 0 for any number of failures"
        )
    if least < most and not options.max_restarts:
        _LOGGER.warning(
            "--max-restarts is 0: the job ends when a node comes or goes. Give it, for example --max-restarts=100"
        )
    return options


def _parser() -> Any:
    from torch.distributed import run

    from .agent import DEFAULT

    parser = run.get_args_parser()
    parser.add_argument("--warm", default="auto")
    parser.add_argument("--max-failures-without-progress", "--max_failures_without_progress", type=int, default=3)
    parser.add_argument("--on-poison", "--on_poison", choices=["end", "older"], default="end")
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--health-check", "--health_check", default=DEFAULT)
    parser.add_argument("--on-hang", "--on_hang", choices=["report", "restart"], default="report")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs a job. Returns 0; a job that fails ends this process with torchrun's exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    from .agent import DEFAULT, OFF, NoProgress, Unwell, use

    @record
    def launch() -> None:
        try:
            options = parse(sys.argv[1:] if words is None else words, os.environ)
        except NebulaConfigError as failure:
            sys.exit(f"nebula run: {failure}")
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        os.environ[ON_HANG] = options.on_hang
        if options.standalone and options.health_check == DEFAULT:
            options.health_check = OFF  # no other node would go on without this one
        use(options.max_failures_without_progress, options.health_check, options.on_poison == "older", bool(options.spares))
        _tie_workers(options)
        if options.standalone:  # other jobs have a handler that does this (handlers.py)
            Workers().begin()
        try:
            run.run(options)
        except RendezvousClosedError:
            _LOGGER.warning("the job %s has ended: this node has nothing to do", options.rdzv_id)
        except (NoProgress, Unwell) as failure:
            sys.exit(f"nebula run: {failure}")

    launch()
    return 0


def _job_id(environment: MutableMapping[str, str]) -> str:
    if environment.get("AZUREML_RUN_ID"):
        return environment["AZUREML_RUN_ID"]
    if environment.get("DEBUG"):  # the wrapper's variable for a test on one machine
        return uuid.uuid4().hex
    raise NebulaConfigError(
        "the job has no id, and its nodes find each other by that id: give --rdzv-id, the same on all nodes"
    )


def _take_account(environment: MutableMapping[str, str]) -> None:
    """Takes the account of the workspace's default datastore, if the environment names none.

    As in Microsoft's wrapper, this needs ``azureml-core``.
    """
    if any(
        environment.get(name)
        for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT", "AZUREML_BLOB_ACCOUNT_NAME")
    ):
        return
    try:
        from azureml.core import Run
    except ImportError:
        return  # the backend reports what is missing
    store = Run.get_context().experiment.workspace.get_default_datastore()
    environment["AZURE_STORAGE_ACCOUNT"] = store.account_name
    if store.account_key:
        environment["AZURE_STORAGE_KEY"] = store.account_key
    elif store.sas_token:
        environment["AZURE_STORAGE_SAS_TOKEN"] = store.sas_token


def _tie_workers(options: Namespace) -> None:
    """Starts each worker by a script that ends it together with this process: an orphan would go on training in the old world."""
    if options.run_path:
        return  # the script runs in a process that torch has forked
    command = [options.training_script, *options.training_script_args]
    if not options.no_python:
        _warm(options)
        python = os.environ.get("PYTHON_EXEC", sys.executable)
        python = sys.executable if os.path.basename(python) == INTERPRETER else python
        command = [python, "-u", *(["-m"] if options.module else []), *command]
    options.no_python, options.module = True, False
    options.training_script, options.training_script_args = (
        sys.executable,
        ["-S", "-E", str(_WORKER), str(os.getpid()), *command],
    )


def _warm(options: Namespace) -> None:
    """Starts the template of the workers. They find it by a variable, and where to leave the names of their modules by another."""
    from . import warm
    from .worker import RECORD, WARM

    if options.warm == "off":
        return
    names: list[str] = []
    if options.warm != "auto":
        names = options.warm.split(",")
    elif (record := _record(options.training_script)) is not None:
        with contextlib.suppress(OSError, ValueError):
            names = [str(name) for name in json.loads(record.read_text())]
        os.environ[RECORD] = str(record)
    environment = dict(os.environ)
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # these two as torchrun sets them for its workers
    if _workers_of(options.nproc_per_node) != "1":  # libraries read it when they are imported
        environment.setdefault("OMP_NUM_THREADS", "1")
    try:
        os.environ[WARM] = warm.start(warm.usual(names), environment, tells=options.warm != "auto")
    except OSError as failure:
        _LOGGER.warning("workers start cold, because no template could be started: %s", failure)


def warm_for_torchrun(words: Sequence[str]) -> None:
    """Starts the template of plain torchrun's workers. Its handler calls this, with torchrun's command line."""
    from torch.distributed import run

    try:
        options = run.parse_args(list(words))
    except SystemExit:  # another program has made the handler
        _LOGGER.warning("workers start cold: the command line of this program is not torchrun's")
        return
    options.warm = "auto"
    if not options.no_python and not options.run_path:
        _warm(options)


def _record(script: str) -> Path | None:
    """Returns the file for the modules of this script, in the directory of this user's agent. None: there is no safe directory."""
    folder = Path(os.environ.get("NEBULA_RUNTIME_DIR") or f"/tmp/nebula-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError:
        return None
    is_safe = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    return folder / f"imports-{hashlib.sha256(os.path.abspath(script).encode()).hexdigest()[:16]}.json" if is_safe else None


def _workers_of(text: str) -> str:
    """Returns nproc_per_node as torchrun counts it: a number, or another text for more than one."""
    from torch.distributed import run

    try:
        return str(run.determine_local_world_size(text))
    except (ValueError, RuntimeError):
        return text


if __name__ == "__main__":
    main()
