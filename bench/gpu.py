"""``python -m bench.gpu``: measures what a save of tensors on a GPU costs training, for Nebula and for other ways to save.

Each way runs in a process of its own. Right after each save an optimizer step changes every element. At the end the last version is loaded
and compared. Needs one GPU, and no other environment than this one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from . import environment, loops, peers, report, run, workloads
from .peer import Peer, State
from .peers.dcp_async import DistributedCheckpoint
from .peers.nebula import Nebula
from .workload import VALUES, Workload

COUNT = 6  # versions that a process saves; figures come from those after the third
LOADS = 2
MARK = "result: "
WIDTH, DEPTH, BATCH = 4096, 6, 4096  # ten steps take half a second on an H200; weights and both moments are 1.2 GB


class Overlapped(Nebula):
    title = "Nebula, overlap=True"
    overlap = True


class Pinned(DistributedCheckpoint):
    """DCP as its documentation recommends for a GPU: pinned staging memory, filled while training computes. torch's stager serves one save
    and then frees its memory (2.11), so each save makes a new stager."""

    title = "DCP async_save (pinned staging)"

    def prepare(self) -> None:
        super().prepare()
        from torch.distributed.checkpoint import staging

        options = staging.StagingOptions(
            use_pinned_memory=True, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=True
        )
        self.make_stager = lambda: staging.DefaultStager(options)
        self.stager: Any = None

    def save(self, tag: str, state: State) -> None:
        if self.pending:
            self.pending.upload_completion.result()
            self.stager.close()
        self.stager = self.make_stager()
        writer = self.dcp.FileSystemWriter(self.folder / tag, sync_files=True)
        self.pending = self.dcp.async_save(state, storage_writer=writer, no_dist=True, async_stager=self.stager)

    def before_change(self) -> None:
        self.pending.staging_completion.result()

    def wait_durable(self, tag: str) -> None:
        self.pending.upload_completion.result()

    def close(self) -> None:
        self.stager.close()


WAYS: dict[str, type[Peer]] = {
    "overlapped": Overlapped,
    "nebula": Nebula,
    "prepared": peers.load("nebula_prepared"),
    "pinned": Pinned,
    **{name: peers.load(name) for name in ("safetensors_file", "torch_save")},
}


def idle() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def base(workload: Workload, name: str) -> torch.Tensor:
    """Returns version 0 of a tensor, like Workload.base(), but on the device."""
    random = torch.Generator("cuda").manual_seed(zlib.crc32(name.encode()))
    return torch.empty(workload.sizes[name], device="cuda").random_(0, VALUES, generator=random)


def differs(workload: Workload, state: State, version: int) -> str | None:
    """Returns the first difference of a state from that version. None: every bit is equal."""
    if set(state) != set(workload.sizes):
        return f"{len(state)} tensors instead of {len(workload.sizes)}"
    wrong = (name for name in workload.sizes if not torch.equal(state[name], base(workload, name).add_(version)))
    return next((f"{name} does not hold the values of version {version}" for name in wrong), None)


def on_device(workload: Workload) -> tuple[State, Callable[[], None]]:
    """Returns version 0 on the device, and a function that turns it into the next version: an optimizer step that adds 1 to each element."""
    parameters = {name: nn.Parameter(base(workload, name)) for name in workload.sizes}
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, -1.0)
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    return {name: parameter.data for name, parameter in parameters.items()}, optimizer.step


def copy_limit(state: State, loads: bool = False) -> float:
    """Returns the seconds of one copy of these bytes into pinned memory, or out of it for loads: the limit without device memory."""
    size = sum(tensor.nbytes for tensor in state.values())
    source, target = torch.ones(size, dtype=torch.uint8, device="cuda"), torch.zeros(size, dtype=torch.uint8).pin_memory()
    if loads:
        source, target = target, source
    took = []
    for _ in range(5):
        begun = idle()
        target.copy_(source, non_blocking=True)
        took.append(idle() - begun)
    return median(took)


def single(peer: Peer, workload: Workload) -> dict[str, Any]:
    """Saves versions one by one. Measures the time that each call blocks, and the delay of the next step."""
    peer.prepare()
    state, step = on_device(workload)
    limit, load_limit = copy_limit(state), copy_limit(state, loads=True)
    quiet = []
    for _ in range(5):
        begun = idle()
        step()
        quiet.append(idle() - begun)
    peer.open()
    peer.expect(state)
    rounds = []
    for index in range(COUNT):
        begun = idle()
        peer.save(f"step{index + 1}", state)
        returned = time.perf_counter()
        peer.before_change()
        blocked = time.perf_counter()
        step()
        changed = idle()
        peer.wait_durable(f"step{index + 1}")
        if not peer.durable:
            os.sync()
        rounds.append(
            {
                "call": returned - begun,
                "blocked": blocked - begun,
                "whole": changed - begun - median(quiet),
                "durable": time.perf_counter() - begun,
            }
        )
    loads, tag, version = [], f"step{COUNT}", len(quiet) + COUNT - 1
    for _ in range(LOADS):
        begun = idle()
        found = {name: tensor.cuda() for name, tensor in peer.load(tag, workload.sizes).items()}
        loads.append(idle() - begun)
    wrong = differs(workload, found, version)
    peer.close()
    return {"limit": limit, "rounds": rounds, "load": median(loads), "load_limit": load_limit, "gate": wrong}


def train(peer: Peer, workload: Workload) -> dict[str, Any]:
    """Trains a real model in windows of ten steps. Every second window begins with a save."""
    peer.prepare()
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    x = torch.randn(BATCH, WIDTH, device="cuda")

    def step(before_change: Callable[[], None] = lambda: None) -> None:
        optimizer.zero_grad()
        for _ in range(4):  # micro-batches: their gradients are added
            with torch.autocast("cuda", torch.bfloat16):
                loss = nn.functional.mse_loss(model(x), x)
            loss.backward()
        before_change()
        optimizer.step()

    def window(before: Callable[[], None], before_change: Callable[[], None]) -> float:
        begun = idle()
        before()
        step(before_change)
        for _ in range(loops.EVERY - 1):
            step()
        return idle() - begun

    step()
    state: State = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    peer.open()
    quiet, lost, blocked, kept = [], [], [], {}
    for index in range(COUNT):
        tag = f"step{index + 1}"
        quiet.append(window(lambda: None, lambda: None))
        kept = {name: tensor.clone() for name, tensor in state.items()}

        def save(tag: str = tag) -> None:
            begun = time.perf_counter()
            peer.save(tag, state)
            blocked.append(time.perf_counter() - begun)

        took = window(save, peer.before_change)
        peer.wait_durable(tag)
        if index >= report.WARMING:
            lost.append(took - median(quiet[report.WARMING - 1 :]))
    found = peer.load(f"step{COUNT}", {name: tensor.shape for name, tensor in kept.items()})  # type: ignore[arg-type]
    wrong = next((name for name, value in kept.items() if not torch.equal(found[name].cpu(), value.cpu())), None)
    peer.close()
    return {
        "bytes": sum(tensor.nbytes for tensor in state.values()),
        "window": median(quiet),
        "lost": median(lost),
        "call": median(blocked[report.WARMING :]),
        "gate": f"{wrong} does not hold the values it was saved with" if wrong else None,
    }


def measure(name: str, task: str, workload: Workload, root: Path) -> dict[str, Any]:
    """Measures one way to save, in a process of its own."""
    way = WAYS[name]
    with run.places(root) as (folder, memory):
        variables = {**os.environ, **way.environment(folder, memory, False)}
        command = [sys.executable, "-m", "bench.gpu", "--worker", task, name, workload.name, str(folder), str(memory)]
        try:
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
        finally:
            way.clean(variables)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    return {"failed": (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:200]}


def rows(columns: list[str], found: dict[str, dict[str, Any]], cells: Callable[[dict[str, Any]], list[str]]) -> list[str]:
    lines = ["| " + " | ".join(["", *columns, "gate"]) + " |", "|---|" + "---:|" * len(columns) + "---|"]
    for name, result in found.items():
        if "failed" in result:
            lines.append(f"| {WAYS[name].title} | did not run: {result['failed']} |" + " |" * len(columns))
            continue
        gate = "passed" if result["gate"] is None else f"**failed**: {result['gate']}"
        lines.append("| " + " | ".join([WAYS[name].title, *cells(result), gate]) + " |")
    return [*lines, ""]


def single_table(workload: Workload, found: dict[str, dict[str, Any]]) -> list[str]:
    def cells(result: dict[str, Any]) -> list[str]:
        blocked, whole, durable = (report.steady(result["rounds"], key) for key in ("blocked", "whole", "durable"))
        return [
            " / ".join(report.seconds(each["blocked"]) for each in result["rounds"][: report.WARMING]),
            f"**{report.seconds(blocked)}**",
            report.seconds(whole),
            f"{whole / limit:.2f}",
            report.seconds(durable),
            report.seconds(result["load"]),
            f"{result['load'] / load_limit:.1f}",
        ]

    limit = median(result["limit"] for result in found.values() if "limit" in result)
    load_limit = median(result["load_limit"] for result in found.values() if "limit" in result)
    return [
        f"### {workload.title.removesuffix(', pages of 4 KiB')}, on the GPU ({workload.bytes / 2**20:.0f} MiB)",
        "",
        f"The machine copies as many bytes, in one piece, into pinned memory in {report.seconds(limit)}, and from there in "
        f"{report.seconds(load_limit)}.",
        "",
        *rows(
            ["blocked, first saves", "blocked, steady", "with the step after it", "/ copy", "durable after", "load onto the GPU", "/ copy"],
            found,
            cells,
        ),
    ]


def train_table(found: dict[str, dict[str, Any]]) -> list[str]:
    right = [result for result in found.values() if "failed" not in result]
    if not right:
        return []
    return [
        f"### Training on the GPU, saved every {loops.EVERY} steps ({right[0]['bytes'] / 2**20:.0f} MiB)",
        "",
        f"Ten steps without a save take {report.seconds(median(result['window'] for result in right))}.",
        "",
        *rows(
            ["the call blocks", "ten steps take longer by", "of their time"],
            found,
            lambda result: [
                report.seconds(result["call"]),
                f"**{report.seconds(max(0.0, result['lost']))}**",
                f"{100 * result['lost'] / result['window']:.1f} %",
            ],
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=["two_gib", "small", "train"], help="the documentation is left alone")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="the same")
    parser.add_argument("--dir", type=Path, default=Path("out"), help="a directory of the file system to measure")
    parser.add_argument("--json", type=Path, help="all figures, as a file")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        task, name, workload_name, folder, memory = args.worker
        peer = WAYS[name](Path(folder), Path(memory))
        result = {"single": single, "train": train}[task](peer, workloads.load(workload_name))
        print(MARK + json.dumps(result), flush=True)
        return 0
    if not torch.cuda.is_available():
        print("bench.gpu: there is no GPU here", file=sys.stderr)
        return 2
    args.dir.mkdir(parents=True, exist_ok=True)
    where = {"GPU": torch.cuda.get_device_name(), "CUDA of torch": str(torch.version.cuda), **environment.describe(args.dir)}
    lines: list[str] = []
    everything: dict[str, Any] = {"environment": where}
    for what in args.only or ["two_gib", "train", "small"]:
        task, workload = ("train", workloads.load("two_gib")) if what == "train" else ("single", workloads.load(what))
        found = {}
        for name in args.ways or WAYS:
            begun = time.monotonic()
            found[name] = measure(name, task, workload, args.dir)
            note = found[name].get("failed") or found[name]["gate"] or "gate passed"
            print(f"{what:<10} {WAYS[name].title:<34} {time.monotonic() - begun:5.1f} s  {note}", file=sys.stderr, flush=True)
        everything[what] = found
        lines += train_table(found) if what == "train" else single_table(workload, found)
        if args.json:
            args.json.write_text(json.dumps(everything, indent=1) + "\n")
    lines += report.environment(where)
    if not args.only and not args.ways:
        report.publish("gpu", "make bench-gpu", "Tensors on a GPU", lines)
    print("\n".join(lines))
    ours = [found for what, found in everything.items() if what != "environment"]
    return 1 if any(r.get("gate", "") is not None for f in ours for n, r in f.items() if n in ("nebula", "overlapped")) else 0


if __name__ == "__main__":
    sys.exit(main())
