"""Loses and regains nodes of the job on this one machine, and compares its losses with those of an undisturbed run.

A node is a torchrun with an address, an agent and memory of its own. To lose a node, the script kills all its processes at once and removes
its memory.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nebulaml as nm

HERE = Path(__file__).resolve().parent
CONF = "join_timeout=120,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"


class Nodes:
    """The nodes of one job."""

    def __init__(self, root, memory, name, script, options, offset, storage=None):
        self.path, self.memory = root / name, memory / name
        self.storage = storage and f"{storage}/{name}"
        self.runtime = root / f"{name}-run"
        self.logs = root / f"{name}-logs"
        self.logs.mkdir(parents=True)
        self.script, self.options, self.offset = script, options, offset  # offset: of the nodes' addresses
        self.processes = {}

    def start(self, number, most=4, least=1):
        memory = self.memory / f"node{number}"
        memory.mkdir(parents=True)
        environment = {
            **os.environ,
            "NEBULA_NODE_ID": f"node{number}",
            "NEBULA_MEMORY_DIR": str(memory),
            "NEBULA_RUNTIME_DIR": str(self.runtime),
            "NEBULA_AGENT_LINGER": "5",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={least}:{most}", "--nproc-per-node=1", "--max-restarts=100"]
        command += ["--rdzv-backend=nebula-store", f"--rdzv-endpoint={self.storage or self.path}", "--rdzv-id=elastic-cifar"]
        command += [f"--rdzv-conf={CONF}"]
        command += [f"--local-addr=127.0.0.{number + self.offset}", str(self.script), "--path", str(self.path), *self.options]
        command += ["--storage", self.storage] if self.storage else []
        with open(self.logs / f"node{number}", "ab") as log:
            self.processes[number] = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def pids(self, number):
        """Returns the processes of a node: torchrun, the worker and the agent. They have the environment of that node."""
        wanted = {f"NEBULA_NODE_ID=node{number}".encode(), f"NEBULA_RUNTIME_DIR={self.runtime}".encode()}
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if wanted <= set(Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")):
                    found.append(int(entry))
            except OSError:
                continue
        return found

    def lose(self, number):
        while pids := self.pids(number):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.processes[number].poll()
            time.sleep(0.02)
        shutil.rmtree(self.memory / f"node{number}", ignore_errors=True)

    def rows(self):
        return nm.MetricsLog(self.path / "metrics.jsonl").read()

    def until(self, condition, what, timeout=150):
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                tails = "\n".join(f"{log.name}: {log.read_text(errors='replace')[-3000:]}" for log in sorted(self.logs.iterdir()))
                raise SystemExit(f"{what} did not come within {timeout} s\n{tails}")
            time.sleep(0.05)

    def until_step(self, step, world=None):
        def reached():
            rows = self.rows()
            return bool(rows) and rows[-1]["step"] >= step and (world is None or rows[-1]["world"] == world)

        self.until(reached, f"step {step}")

    def finish(self):
        self.until(lambda: all(process.poll() is not None for process in self.processes.values()), "the end")

    def close(self):
        for number in self.processes:
            self.lose(number)


def scenario(root, memory, script, steps, log, storage=None):
    """Runs the job undisturbed, then with the loss of node 0 after a third of the steps. A node joins later, while the other one continues."""
    options = ["--steps", str(steps)]
    calm = Nodes(root, memory, "calm", script, options, 2, storage)
    stormy = Nodes(root, memory, "stormy", script, options, 3, storage)
    events = []

    def say(what):
        events.append((time.time(), what))
        log(f"{time.time() - events[0][0]:6.1f} s  {what}")

    try:
        say("an undisturbed run begins, on one node of its own")
        calm.start(0, most=1)
        say("the same job begins on nodes 0 and 1")
        stormy.start(0)
        stormy.start(1)
        stormy.until_step(steps // 3, world=2)
        stormy.lose(0)
        say("node 0 is lost, with its agent and its memory")
        stormy.until(lambda: any(row["world"] == 1 for row in stormy.rows()), "a step of node 1 alone")
        say("node 1 trains alone")
        stormy.start(2)
        say("node 2 is started")
        stormy.until(lambda: any(row["world"] == 2 and row["at"] > events[-1][0] for row in stormy.rows()), "a step with node 2")
        say("nodes 1 and 2 train")
        stormy.finish()
        calm.finish()
        say("the end of both")
        return calm.rows(), stormy.rows(), events
    finally:
        calm.close()
        stormy.close()


def report(calm, stormy, events, log):
    """Prints the comparison. Returns True if the steps are equal and the losses differ by less than 0.1 %."""
    steps_equal = [row["step"] for row in calm] == [row["step"] for row in stormy] == list(range(1, len(calm) + 1))
    apart = max(abs(one["loss"] - other["loss"]) / one["loss"] for one, other in zip(calm, stormy, strict=True)) if steps_equal else 1.0
    lost = next(at for at, what in events if "is lost" in what)
    after = next((row for row in stormy if row["at"] > lost and row["world"] == 1), None)
    log(f"steps of both runs: {len(calm)} and {len(stormy)}, each once: {'yes' if steps_equal else 'NO'}")
    log(f"largest relative difference of a loss: {apart:.1e}")
    if after is not None:
        log(f"from the loss of node 0 to the first step of node 1 alone: {after['at'] - lost:.1f} s (step {after['step']}), of that")
        log(f"  until torchrun has started the worker again and Python has imported torch: {after['begun'] - lost:.1f} s")
        log(f"  the process group, the restore and the step: {after['at'] - after['begun']:.1f} s; the restore: {after['restored_s']:.2f} s")
    return steps_equal and apart < 1e-3


def plot(calm, stormy, events, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, times) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    losses.plot([row["step"] for row in calm], [row["loss"] for row in calm], color="#c3c8d4", lw=6, label="undisturbed, one node")
    for world, color in ((2, "#4338ca"), (1, "#ea7317")):
        mine = [row for row in stormy if row["world"] == world]
        losses.plot([row["step"] for row in mine], [row["loss"] for row in mine], ".", color=color, label=f"elastic, {world} node(s)")
    losses.set(xlabel="global step", ylabel="training loss", title="The losses are those of the undisturbed run")
    losses.legend(frameon=False)
    begin = next(at for at, what in events if "nodes 0 and 1" in what)
    for world, color in ((2, "#4338ca"), (1, "#ea7317")):
        mine = [row for row in stormy if row["world"] == world]
        times.plot([row["at"] - begin for row in mine], [row["step"] for row in mine], ".", color=color)
    for at, what in events:
        if at > begin and ("lost" in what or "started" in what):
            times.axvline(at - begin, color="#d11149", lw=1)
            style = {"rotation": 90, "va": "top", "ha": "right", "fontsize": 8, "color": "#d11149"}
            times.text(at - begin, 0.98, what.split(",")[0], transform=times.get_xaxis_transform(), **style)
    times.set(xlabel="seconds", ylabel="global step", title="Nodes go and come")
    for axes in (losses, times):
        axes.grid(color="#e6e8ee")
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--script", type=Path, default=HERE / "train.py", help="the program of the job")
    parser.add_argument("--storage", help="an object store in place of a directory; NEBULA_SECRET_FILE must be set")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="nb-elastic-"))
    memory = Path(tempfile.mkdtemp(prefix="nebula-elastic-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        job = arguments.script, arguments.steps
        calm, stormy, events = scenario(root, memory, *job, lambda line: print(line, flush=True), arguments.storage)
        is_one = report(calm, stormy, events, print)
        if arguments.json:
            arguments.json.write_text(json.dumps({"calm": calm, "stormy": stormy, "events": events}))
        if arguments.plot:
            plot(calm, stormy, events, arguments.plot)
            print(f"the picture: {arguments.plot}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    print("the elastic run is the undisturbed one" if is_one else "THE RUNS DIFFER")
    return 0 if is_one else 1


if __name__ == "__main__":
    sys.exit(main())
