"""The command line of ``nebula plan``."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import NebulaConfigError, NebulaStorageError
from . import deepspeed_config, failures, limits, model, plot, quantities, show
from .planning import Figure, Job, document, make
from .quantities import Quantity

__all__ = ["main"]

EXIT_OK, EXIT_SHORT = 0, 1
ASSUMED = {"nodes": "1", "gpus": "8"}
ASSUMED_COPY = 20e9
ASSUMED_WRITE = 1e9
ASSUMED_READ = 1e9
ASSUMED_OVERLAP_S = 0.002
MEGABIT = 1e6 / 8
# List prices of hot storage for a GB and month, in 2026: first tier, one region of the United States. Requests and traffic cost extra.
PRICES = {"azure": 0.018, "s3": 0.023, "gcs": 0.020, "none": 0.0}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise NebulaConfigError(f"{message}; see `nebula plan --options`")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses the arguments. The word after an option is its value even if it begins with a minus, unless it is an option itself."""
        takes_value = {one.option_strings[0] for one in self._actions if one.nargs is None}
        words: list[str] = []
        for word in arguments:
            if word == "--":  # argparse would take it for an empty list
                self.error("unrecognized arguments: --")
            if words and words[-1] in takes_value and word.split("=", 1)[0] not in self._option_string_actions:
                words[-1] += f"={word}"
            else:
                words.append(word)
        return self.parse_args(words)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nebula plan", add_help=False, allow_abbrev=False,
        description="Sizes may end in K, M, G or T (powers of 1024), times in ms, s, m, h or d. Rates are bytes per second of one node.",
    )  # fmt: skip
    add = parser.add_argument
    add("--options", action="help", help="print this")
    add("--params", metavar="N", help="number of parameters: 350M, 7B")
    add("--config", metavar="FILE", help="config.json of a Hugging Face model, counted with transformers")
    add("--largest-layer", metavar="N", help="parameters of the largest layer, for ZeRO 3")
    add("--nodes", metavar="N", help="nodes (1)")
    add("--gpus", metavar="N", help="GPUs of a node (8)")
    add("--gpu-memory", metavar="SIZE", help="memory of a GPU (80G)")
    add("--host-memory", metavar="SIZE", help="memory of a node for checkpoints and offload (1T; with --measure what is free)")
    add("--activations", metavar="SIZE", help="activations per GPU (a fifth of its memory)")
    add("--stage", metavar="N", help="use this ZeRO stage")
    add("--step-time", metavar="TIME", help="time of a training step: intervals are also shown in steps")
    add("--measure", action="store_true", help="measure this machine and --path with `nebula doctor --measure`")
    add("--limits", metavar="FILE", help="the output of `nebula doctor --measure --json`, of this machine or another one")
    add("--goodput", metavar="FILE", help="the output of `nebula goodput --json` of the job: failures, restarts, saves, steps")
    add("--path", metavar="PATH", help="storage path to measure, and for --write")
    add("--copy", metavar="RATE", help="copies into memory (20 GB/s)")
    add("--network", metavar="MBIT", help="network of a node in Mbit/s, for copies on peers (100000)")
    add("--storage-write", metavar="RATE", help="writes to storage (1 GB/s)")
    add("--storage-read", metavar="RATE", help="reads from storage (1 GB/s)")
    add("--storage-total", metavar="RATE", help="most that the storage takes from, or gives to, all nodes together")
    add("--storage-space", metavar="SIZE", help="space in the storage")
    add("--storage-price", metavar="PRICE", help="azure, s3, gcs (list prices), or dollars of a GB a month (azure)")
    add("--keep-last", default="3", metavar="N", help="durable versions that are kept (3)")
    add("--replicas", metavar="N", help="copies of each version on peers (1 on several nodes)")
    add("--blocked", metavar="TIME", help="time that a save blocks training (that of the copy)")
    add("--overlap", action="store_true", help="saves with overlap=True: they block for 2 ms")
    add("--slowdown", metavar="SHARE", help="training time that a persist costs, as a share of its duration (0.02)")
    add("--failures", choices=sorted(failures.PRESETS), default="llama3", help="published failure rates (llama3)")
    add("--mtbf", metavar="TIME", help="mean time between failures of the job, instead")
    add("--survives", metavar="SHARE", help="share of failures after which memory has the newest version, without copies on peers")
    add("--survives-with-replica", metavar="SHARE", help="the same with them")
    add("--launcher", choices=sorted(failures.LAUNCHERS), default="scheduler", help="what notices a failure and restarts the job (scheduler)")
    add("--detect", metavar="TIME", help="time to notice a failure (that of the launcher)")
    add("--restart", metavar="TIME", help="time to restart, without the load (that of the launcher)")
    add("--json", action="store_true", help="print the plan as JSON")
    add("--plot", metavar="FILE", help="draw memory and progress (needs matplotlib)")
    add("--write", metavar="FILE", help="write a DeepSpeed configuration; refuses to replace a file without --force")
    add("--force", action="store_true", help="--write may replace a file")
    return parser


class _Inputs:
    """Takes each number from its option, or else from the measurement, or else from an assumption."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.measured: dict[str, Any] = {}
        if given.limits is not None and given.measure:
            raise NebulaConfigError("--limits FILE or --measure: give one of them")
        if given.limits is not None:
            self.measured, self.origin = limits.read(given.limits), f"measured ({given.limits})"
        if given.measure:
            self.measured, self.origin = limits.measure(given.path), "measured (nebula doctor --measure)"
        self.ledger = limits.read_goodput(given.goodput) if given.goodput is not None else {}

    def take(
        self, option: str, kind: Quantity, assumed: float, why: str = "assumed", key: str = "", scale: float = 1.0, spent: str = ""
    ) -> Figure:
        """key: of the limits of the machine. spent: of the ledger of the job."""
        text = getattr(self.given, option.replace("-", "_"))
        if text is not None:
            return Figure(kind.read("--" + option, text) * scale, "given")
        found = self.measured.get(key) if key else None
        if found is not None:
            return Figure(kind.read(f"{key}, {self.origin},", str(found), is_measured=True), self.origin)
        if spent in self.ledger:
            origin = f"measured ({self.given.goodput})"
            return Figure(kind.read(f"{spent}, {origin},", str(self.ledger[spent]), is_measured=True), origin)
        return Figure(assumed, why)


def _price(text: str | None) -> Figure:
    name = "azure" if text is None else text
    if name in PRICES:
        return Figure(PRICES[name], f"list price of {name}, hot, one region, 2026: without requests and traffic" if PRICES[name] else "given")
    return Figure(quantities.PRICE.read("--storage-price", name), "given")


def _survives(inputs: _Inputs, preset: failures.Failures) -> tuple[Figure, Figure]:
    """Returns the share of the failures after which memory has the newest version: without copies on peers, and with them."""
    local = inputs.take("survives", quantities.SHARE, preset.local, "causes of Llama 3's failures" if preset.local else "assumed")
    least = max(preset.with_replica, local.value)
    copies = inputs.take("survives-with-replica", quantities.SHARE, least, "assumed: all but those that take both nodes")
    if copies.value < local.value:
        raise NebulaConfigError(f"--survives-with-replica {copies.value:g}: less than --survives {local.value:g}, and copies lose nothing")
    return local, copies


def _whole(given: argparse.Namespace) -> None:
    """Replaces the texts of the whole numbers by the numbers."""
    given.assumed = [name for name in ASSUMED if getattr(given, name) is None]
    for name in given.assumed:
        setattr(given, name, ASSUMED[name])
    counts = dict.fromkeys(("nodes", "gpus", "keep_last"), quantities.WHOLE)
    for name, kind in {**counts, "replicas": quantities.COPIES, "stage": quantities.STAGE}.items():
        text = getattr(given, name)
        if text is not None:
            setattr(given, name, int(kind.read("--" + name.replace("_", "-"), text)))


def _replicas(given: argparse.Namespace) -> int:
    if given.replicas is None:
        return int(given.nodes > 1)
    if given.replicas and given.nodes == 1:
        raise NebulaConfigError("--replicas: a job of one node has no peer for a copy")
    if given.replicas >= given.nodes > 1:
        raise NebulaConfigError(f"--replicas {given.replicas}: a job of {given.nodes} nodes has room for {given.nodes - 1}")
    return int(given.replicas)


def _job(given: argparse.Namespace) -> Job:
    if (given.params is None) == (given.config is None):
        raise NebulaConfigError("give the model: --params N, or --config FILE; see `nebula plan --options`")
    if given.config is not None and given.largest_layer is not None:
        raise NebulaConfigError("--largest-layer belongs to --params: with --config it is counted")
    _whole(given)
    described = model.from_count(given.params, given.largest_layer) if given.params is not None else model.from_config(given.config)
    inputs = _Inputs(given)
    preset = failures.PRESETS[given.failures]
    mtbf = inputs.take("mtbf", quantities.TIME, failures.job_mtbf_s(preset, given.nodes), preset.source, spent="mtbf")
    launcher = failures.LAUNCHERS[given.launcher]
    local, copies = _survives(inputs, preset)
    gpu_memory = inputs.take("gpu-memory", quantities.SIZE, 80 * (1 << 30))
    blocked = inputs.take("blocked", quantities.TIME_OR_NONE, math.nan, spent="blocked")
    if math.isnan(blocked.value):
        blocked = Figure(ASSUMED_OVERLAP_S, "assumed for overlap=True") if given.overlap else None  # type: ignore[assignment]
    return Job(
        model=described,
        nodes=given.nodes,
        assumed=tuple(given.assumed),
        gpus_per_node=given.gpus,
        gpu_memory=gpu_memory,
        host_memory=inputs.take("host-memory", quantities.SIZE, 1 << 40, key="free_memory_bytes"),
        activations=inputs.take("activations", quantities.SIZE_OR_NONE, gpu_memory.value / 5, "assumed: a fifth of the GPU's memory"),
        copy_rate=inputs.take("copy", quantities.RATE, ASSUMED_COPY, key="copy_bytes_per_s"),
        network_rate=inputs.take("network", quantities.SPEED_MBIT, 1e5 * MEGABIT, scale=MEGABIT),
        write_rate=inputs.take("storage-write", quantities.RATE, ASSUMED_WRITE, key="write_bytes_per_s"),
        read_rate=inputs.take("storage-read", quantities.RATE, ASSUMED_READ, key="read_bytes_per_s"),
        storage_rate=inputs.take("storage-total", quantities.RATE, math.inf, "not limited"),
        storage_space=inputs.take("storage-space", quantities.SIZE, math.inf, "not limited"),
        detect_s=inputs.take("detect", quantities.TIME_OR_NONE, launcher.detect_s, launcher.source, spent="notice"),
        restart_s=inputs.take("restart", quantities.TIME_OR_NONE, launcher.restart_s, launcher.source, spent="restart"),
        slowdown=inputs.take("slowdown", quantities.SHARE, 0.02),
        price=_price(given.storage_price),
        mtbf_s=mtbf,
        survives_local=local,
        survives_replica=copies,
        keep_last=given.keep_last,
        replicas=_replicas(given),
        overlap=given.overlap,
        blocked_s=blocked,
        step_s=inputs.take("step-time", quantities.TIME, 0.0, spent="step").value,
        stage=given.stage,
    )


def _write(file: str, content: str, force: bool) -> None:
    """A file that cannot be written whole leaves the one that was there, or none."""
    replaces = force and os.path.isfile(file)
    part = f"{os.path.realpath(file)}.{os.getpid()}.part" if replaces else file
    mode = "w" if force and not replaces and os.path.exists(file) else "x"  # "w": /dev/stdout
    try:
        with open(part, mode, encoding="utf-8") as opened:
            opened.write(content)
        if replaces:
            os.replace(part, os.path.realpath(file))
    except FileExistsError:
        raise NebulaConfigError(f"{file} exists: --force replaces it") from None
    except OSError as failure:
        if mode == "x":
            with contextlib.suppress(OSError):
                os.unlink(part)
        raise NebulaStorageError(f"{file} cannot be written: {failure.strerror}") from failure


def _print(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as failure:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest when it ends
        raise NebulaStorageError(f"the output cannot be written: {failure.strerror}") from failure


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns 0 if the job fits, 1 if a number is short."""
    given = _parser().parse(arguments)
    plan = make(_job(given))
    if given.plot is not None:
        plot.draw(plan, given.plot)
    if given.write is not None and not plan.short:
        path = given.path or os.environ.get("NEBULA_PERSISTENT_STORAGE_PATH")
        _write(given.write, json.dumps(deepspeed_config.build(plan, path), indent=2) + "\n", given.force)
    if given.json:
        _print(json.dumps(document(plan), indent=2) + "\n")
    else:
        _print(show.text(plan))
    if plan.short:
        for one in plan.short:
            print(f"nebula: {show.short_text(one)}", file=sys.stderr)
        if given.write is not None:
            print(f"nebula: {given.write} is not written", file=sys.stderr)
    return EXIT_SHORT if plan.short else EXIT_OK
