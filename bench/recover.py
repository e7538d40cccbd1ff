"""From a failure to the next training step, and where the time goes.

    python -m bench.recover [--rounds 3] [--mib 64] [--imports torch,torch._dynamo] [--faults worker,exception,hang,node,silence,link,spare]

On one node:

    worker      SIGKILL of the worker
    exception   the worker raises
    hang        the worker waits for ever; NEBULA_HANG_S is 2

On two nodes, of which the second one is lost and the first one trains on alone:

    node        SIGKILL of torchrun, worker and agent; the node's memory is removed
    silence     SIGSTOP of all of them: the node says nothing any more, and its connections stay open
    link        its network interface goes down. Both nodes are network namespaces, and reach the storage. It needs root

On two nodes, beside which a third one waits:

    spare       SIGKILL as for node; the third one takes the place of the second one. With `nebula run` it holds copies while it waits. The
                bench then prints how much it has read from them, and how much from the memory of other nodes

Each job saves every 5 steps, with a spare every 20. `nebula run` restores from memory; its template imports what the job imports, as it would
from the second run on. The jobs of torchrun save by torch.save into a directory in memory, and load from there. With two nodes their
rendezvous is c10d, on the first node.
"tuned": keep_alive_interval=1, keep_alive_max_attempt=3, last_call_timeout=1.

    noticed     until the old worker of the surviving node has ended
    round       until the next one begins: torchrun stops workers, and the rendezvous
    imports     until it has imported what the job imports
    group       process group and model
    restore     the checkpoint
    step        the first step
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.networks import Networks, NoNetworks
from tests.ports import held_port

JOB = """
import json, os, sys, threading, time
way, base, mib, imports, fault = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
    began = time.time() - float(uptime.read().split()[0]) + int(stat.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
for name in imports.split(","):
    __import__(name)
import torch
import torch.distributed as dist
imported = time.time()
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(1024, mib * 256, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
grouped = time.time()
done, path = 0, f"{base}/checkpoint.pt"
if way == "torch":
    if os.path.exists(path):
        found = torch.load(path)
        model.load_state_dict(found["model"])
        done = found["step"]
else:
    import nebulaml as nm
    state = {"model": model, "optimizer": optimizer}
    manager = nm.Manager(f"{base}/storage", save_every_steps=20 if fault == "spare" else 5, keep_last=1, replicated=list(state),
                         replicas=min(1, dist.get_world_size() - 1))
    found = manager.restore(state)
    done = found.step if found else 0
restored = time.time()
while True:
    optimizer.zero_grad()
    model(torch.ones(1, 1024)).square().mean().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    optimizer.step()
    done += 1
    with open(f"{base}/steps", "a") as steps:
        print(json.dumps(dict(step=done, pid=os.getpid(), world=dist.get_world_size(), rank=dist.get_rank(), began=began, imported=imported,
                              grouped=grouped, restored=restored, at=time.time())), file=steps)
    if way == "torch" and done % 5 == 0 and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "step": done}, path + ".new")
        os.replace(path + ".new", path)
    elif way == "nebula" and manager.should_save(done):
        manager.save(done, state)
    if os.path.exists(f"{base}/fault") and not os.path.exists(f"{base}/failed"):
        open(f"{base}/failed", "w").close()
        if fault == "exception":
            raise RuntimeError("the fault of this bench")
        if fault == "hang":
            threading.Event().wait()
    time.sleep(0.05)
"""

TUNED = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
WAYS = ("`nebula run`", "`nebula run --warm off`", "`torchrun`", "`torchrun`, tuned")
FAULTS = ("worker", "exception", "hang", "node", "silence", "link", "spare")
OF_NODES = ("node", "silence", "link", "spare")
PARTS = ("noticed", "round", "imports", "group", "restore", "step")
SPARE_S = 20.0  # until a third node waits
MOST_S = 75.0  # then it counts as not recovered
STEPS = 31     # before the fault, so that the agent knows how long a step takes
HANG_S = 2


class Job:
    """Nodes of a job on this machine. Each has an address, an agent and memory of its own."""

    def __init__(self, way: str, fault: str, options: argparse.Namespace, networks: Networks | None) -> None:
        self.networks = networks
        self.base = Path(tempfile.mkdtemp(prefix="recover-", dir="/dev/shm"))
        self.way, self.fault, self.options = way, fault, options
        self.is_ours = "nebula" in way
        self.held = held_port()
        self.port = self.held.getsockname()[1]
        (self.base / "job.py").write_text(JOB)
        self.nodes = [self._start(number) for number in range(2 if fault in OF_NODES else 1)]

    def address(self, number: int) -> str:
        return self.networks.address(number + 2) if self.networks else f"127.0.0.{number + 2}"

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        memory = self.base / f"node{number}"
        memory.mkdir()
        environment = {
            **os.environ, "NEBULA_NODE_ID": f"node{number}", "NEBULA_MEMORY_DIR": str(memory), "NEBULA_RUNTIME_DIR": str(self.base / "run"),
            "NEBULA_AGENT_LINGER": "1", "NEBULA_HANG_S": str(HANG_S), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        if self.networks:
            environment |= {"NEBULA_LISTEN": self.address(number), "GLOO_SOCKET_IFNAME": "eth0"}
        command = ["ip", "netns", "exec", self.networks.name(number + 2)] if self.networks else []
        command += [sys.executable, "-m", "nebulaml.elastic.run" if self.is_ours else "torch.distributed.run"]
        if self.is_ours:
            command += [f"--warm={'off' if 'off' in self.way else self.options.imports}", "--on-hang=restart"]
        if self.fault in OF_NODES:
            holds = self.is_ours and self.fault == "spare"
            command += ["--nnodes=1:3", "--spares=1"] if holds else ["--nnodes=1:2"]
            command += ["--rdzv-id=recover", f"--local-addr={self.address(number)}"]
            conf = ["last_call_timeout=10"] if self.is_ours else [TUNED] if "tuned" in self.way else []
            if self.is_ours:
                command += ["--rdzv-backend=nebula-store", f"--rdzv-endpoint={self.base}/rendezvous"]
            else:
                command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.address(0)}:{self.port}"]
                conf.append(f"is_host={int(number == 0)}")
            command.append(f"--rdzv-conf={','.join(conf)}")
        else:
            command.append("--standalone")
        command += ["--nproc-per-node=1", "--max-restarts=9", self.base / "job.py", "nebula" if self.is_ours else "torch", self.base,
                    str(self.options.mib), self.options.imports, self.fault]  # fmt: skip
        if number == 0:
            self.held.close()
        with open(self.base / f"log{number}", "wb") as log:
            return subprocess.Popen(
                list(map(str, command)), env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def rows(self) -> list[dict[str, float]]:
        try:
            return [json.loads(line) for line in (self.base / "steps").read_text().split("\n") if line.endswith("}")]
        except FileNotFoundError:
            return []

    def agent_log(self, number: int) -> str:
        try:
            return (self.base / f"run-node{number}" / "agent.log").read_text()
        except FileNotFoundError:
            return ""

    def holds_newest(self, number: int) -> bool:
        """Whether the agent has the newest copies of the first two nodes, of the same step."""
        newest = {node: step for step, node in re.findall(r'holds \w+?(\d+) for node "(node[01])"', self.agent_log(number))}
        return len(newest) == 2 and len(set(newest.values())) == 1

    def fetched(self, number: int) -> tuple[int, int]:
        """MiB that the agent has read from copies in its own memory, and from the memory of other nodes."""
        ends = ("a copy in this node's own memory", r'the memory of node "\w+"')
        own, others = (sum(map(int, re.findall(rf"(\d+) MiB come from {end}", self.agent_log(number)))) for end in ends)
        return own, others

    def pids(self, number: int) -> list[int]:
        wanted = {f"NEBULA_NODE_ID=node{number}".encode(), f"NEBULA_RUNTIME_DIR={self.base}/run".encode()}
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if wanted <= set(Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")):
                    found.append(int(entry))
        return found

    def signal(self, number: int, what: int) -> None:
        for _ in range(2):
            for pid in self.pids(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, what)

    def close(self) -> None:
        for number in range(len(self.nodes)):
            self.signal(number, signal.SIGKILL)
        for node in self.nodes:
            node.wait()
        shutil.rmtree(self.base, ignore_errors=True)


def until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def one(way: str, fault: str, options: argparse.Namespace) -> dict[str, float] | None:
    """Returns the seconds of each part; None: the job did not go on."""
    networks = Networks() if fault == "link" else None
    job = Job(way, fault, options, networks)
    world = len(job.nodes)
    try:
        if not until(lambda: sum(row["world"] == world for row in job.rows()) >= STEPS * world, 60):
            raise SystemExit(f"{way}, {fault}: the job has not begun\n" + (job.base / "log0").read_text(errors="replace")[-6000:])
        old = [row for row in job.rows() if row["rank"] == 0][-1]["pid"]
        end = os.pidfd_open(int(old))
        if fault == "worker":
            os.kill(int(old), signal.SIGKILL)
        elif fault in ("node", "spare"):
            if fault == "spare":
                job.nodes.append(job._start(2))
                if not job.is_ours or not until(lambda: job.holds_newest(2), SPARE_S):
                    time.sleep(SPARE_S)
            job.signal(1, signal.SIGKILL)
            shutil.rmtree(job.base / "node1", ignore_errors=True)
        elif fault == "silence":
            job.signal(1, signal.SIGSTOP)
        elif networks:
            networks.cut(3)
        else:
            (job.base / "fault").touch()
            until((job.base / "failed").exists, 30)
        failed = time.time()
        ended = 0.0

        def is_new(row: dict[str, float]) -> bool:
            return row["began"] > failed - 0.02 and row["pid"] != old and row["rank"] == 0 and (fault != "spare" or row["world"] == 2)

        def is_back() -> bool:
            nonlocal ended
            if not ended and _is_readable(end):
                ended = time.time()
            return any(is_new(row) for row in job.rows())

        if not until(is_back, MOST_S):
            return None
        row = next(filter(is_new, job.rows()))
        times = [failed, ended or failed, row["began"], row["imported"], row["grouped"], row["restored"], row["at"]]
        parts = {part: max(0.0, after - before) for part, before, after in zip(PARTS, times, times[1:], strict=False)}
        if fault == "spare" and job.is_ours:
            until(lambda: any(row["began"] > failed and row["rank"] == 1 for row in job.rows()), MOST_S)
            print("the spare has read {} MiB from its own memory, {} MiB from other nodes".format(*job.fetched(2)), file=sys.stderr)
        return parts | {"all": row["at"] - failed}
    finally:
        job.close()
        if networks:
            networks.close()


def _is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.recover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--imports", default="torch,torch._dynamo")
    parser.add_argument("--faults", default=",".join(FAULTS))
    options = parser.parse_args()
    print(f"{options.mib} MiB of state, imports {options.imports}, {os.cpu_count()} cores, {options.rounds} rounds; seconds, medians\n")
    print(f"| fault | way | to the next step | least | most | {' | '.join(PARTS)} |")
    print("|" + " --- |" * (5 + len(PARTS)), flush=True)
    for fault in options.faults.split(","):
        for way in WAYS:
            if fault in ("worker", "exception", "hang") and "tuned" in way:
                continue  # of the rendezvous
            if fault in ("hang", "silence", "link") and "nebula" not in way:
                print(f"| {fault} | {way} | not before a time-out of the collective, 30 min |{' |' * (2 + len(PARTS))}", flush=True)
                continue
            try:
                found = [one(way, fault, options) for _ in range(options.rounds)]
            except NoNetworks as failure:
                print(f"| {fault} | {way} | not measured: {failure} |{' |' * (2 + len(PARTS))}", flush=True)
                continue
            good = [each for each in found if each is not None]
            if len(good) < len(found):
                late = f"{len(found) - len(good)} of {len(found)} times not within {MOST_S:.0f} s"
                print(f"| {fault} | {way} | {late} |{' |' * (2 + len(PARTS))}", flush=True)
                continue
            alls = [each["all"] for each in good]
            parts = " | ".join(f"{statistics.median(each[part] for each in good):.2f}" for part in PARTS)
            print(f"| {fault} | {way} | **{statistics.median(alls):.2f}** | {min(alls):.2f} | {max(alls):.2f} | {parts} |", flush=True)


if __name__ == "__main__":
    main()
