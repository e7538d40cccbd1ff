"""Saves and loads of a pytree of JAX arrays, beside Orbax with its best settings.

    python -m bench.jax_trees --gib 1 --rounds 5

The arrays are float32, sharded over 8 virtual devices of the CPU. Each round saves with both, one after the other, and each load has a
process of its own. `blocked`: how long the call of a save holds up the program, and the CPU time of its thread in that call, which depends
less on what else the machine does. `durable`: from the call until the files are synced. `CPU`:
seconds of all processes that worked on the save. `memory`: how much more the process has at its peak than before. A cold load reads files that
the page cache does not have. Times are medians. The last line is what JAX needs to hand out the memory of each shard, which a save that returns
before its copies must hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nebulaml

ROOT = Path(__file__).resolve().parents[1]
LEAVES = 24

COMMON = """
import json, os, resource, sys, time
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import NamedSharding, PartitionSpec as P
way, path, gib, columns, rounds = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == "columns", int(sys.argv[5])
rows = max(8, int(gib * (1 << 30) / 4 / 1024 / 24) // 8 * 8)
mesh = jax.make_mesh((8,), ("x",))
sharding = NamedSharding(mesh, P(None, "x") if columns else P("x"))

def seconds():
    # CPU seconds of this process and of the agents that share its runtime directory
    taken = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(pid) != os.getpid() and os.environ["NEBULA_RUNTIME_DIR"] not in open(f"/proc/{pid}/environ").read():
                continue
            fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
            taken += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            pass
    return taken

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

def synced(where):
    for folder, _, files in os.walk(where):
        for name in [".", *files]:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
"""

SAVES = COMMON + """
import orbax.checkpoint as ocp
import nebulaml as nm, nebulaml.jax as nj
make = jax.jit(lambda n: {f"leaf{i}": jax.random.normal(jax.random.key(100 * n + i), (rows, 1024)) for i in range(24)}, out_shardings=sharding)
nj.init(path + "/nebula", 0, on_error="raise")
manager = ocp.CheckpointManager(path + "/orbax", options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True))
for step in range(1, rounds + 3):  # two to warm up
    state = jax.block_until_ready(make(step))
    for name in ("nebula", "orbax"):
        cpu, own, begun = seconds(), time.thread_time(), time.perf_counter()
        if name == "nebula":
            with nm.Checkpoint(f"global_step{step}") as checkpoint:
                nj.save(checkpoint, "state", state)
            blocked, own = time.perf_counter() - begun, time.thread_time() - own
            checkpoint.wait("durable", 600)
        else:
            manager.save(step, args=ocp.args.StandardSave(state))
            blocked, own = time.perf_counter() - begun, time.thread_time() - own
            manager.wait_until_finished()
            synced(path + "/orbax")
        durable = time.perf_counter() - begun
        if step > 2:
            print(json.dumps([name, blocked, own, durable, seconds() - cpu]), flush=True)
    state = jax.block_until_ready(make(-step))
    own, begun = time.thread_time(), time.perf_counter()
    held = [memoryview(array) for leaf in state.values() for array in leaf._arrays]
    print(json.dumps(["jax", time.perf_counter() - begun, time.thread_time() - own]), flush=True)
    del held
manager.close()
"""

PEAK = COMMON + """
import orbax.checkpoint as ocp
import nebulaml as nm, nebulaml.jax as nj
state = {f"leaf{i}": jax.device_put(jax.random.normal(jax.random.key(i), (rows, 1024)), sharding) for i in range(24)}
jax.block_until_ready(state)
before = peak()
if way == "nebula":
    nj.init(path + "/nebula", 0, on_error="raise")
    with nm.Checkpoint("global_step1000") as checkpoint:
        nj.save(checkpoint, "state", state)
    checkpoint.wait("durable", 600)
else:
    manager = ocp.CheckpointManager(path + "/orbax")
    manager.save(1000, args=ocp.args.StandardSave(state))
    manager.close()
print(json.dumps(peak() - before))
"""

LOADS = COMMON + """
import orbax.checkpoint as ocp
import nebulaml as nm, nebulaml.jax as nj
template = {f"leaf{i}": jax.ShapeDtypeStruct((rows, 1024), jnp.float32, sharding=sharding) for i in range(24)}
jax.block_until_ready(jax.device_put(jnp.zeros(8), NamedSharding(mesh, P("x"))))
if way == "nebula":
    nj.init(path + "/nebula", 0, on_error="raise")
    begun = time.perf_counter()
    state = nj.load(nm.get_latest_checkpoint(), "state", template)
else:
    manager = ocp.CheckpointManager(path + "/orbax")
    begun = time.perf_counter()
    state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(template))
jax.block_until_ready(state)
took = time.perf_counter() - begun
assert all(leaf.sharding == sharding for leaf in state.values())
print(json.dumps(took))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    python = ROOT / ".envs/jax/bin/python"
    if not python.exists():
        sys.exit("no environment of JAX: make .envs/jax/.ready")
    with tempfile.TemporaryDirectory(prefix="bench-jax-", dir=ROOT / "build") as place:
        base = Path(place)
        memory = Path(tempfile.mkdtemp(prefix="bench-jax-", dir="/dev/shm"))
        environment = {
            **os.environ, "PYTHONPATH": str(Path(nebulaml.__file__).parents[1]), "NEBULA_MEMORY_DIR": str(memory),
            "NEBULA_RUNTIME_DIR": tempfile.mkdtemp(prefix="nb-"), "NEBULA_AGENT_LINGER": "1",
        }  # fmt: skip

        def run(code: str, way: str, mesh: str = "rows") -> list[Any]:
            command = [python, "-W", "ignore", "-c", code, way, base, chosen.gib, mesh, chosen.rounds]
            said = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
            if said.returncode != 0:
                sys.exit(said.stderr)
            return [json.loads(line) for line in said.stdout.splitlines()]

        rows = run(SAVES, "both")
        figures = {way: [statistics.median(row[i] for row in rows if row[0] == way) for i in (1, 2, 3, 4)] for way in ("nebula", "orbax")}
        held = [statistics.median(row[i] for row in rows if row[0] == "jax") for i in (1, 2)]
        for way in figures:
            figures[way].append(run(PEAK, way)[0])
        for mesh in ("rows", "columns"):
            taken: dict[str, list[float]] = {"nebula": [], "orbax": []}
            for _ in range(chosen.rounds):
                for way in taken:
                    forget(base, environment)
                    taken[way].append(run(LOADS, way, mesh)[0])
            for way, times in taken.items():
                figures[way].append(statistics.median(times))
        subprocess.run(["rm", "-rf", str(memory), environment["NEBULA_RUNTIME_DIR"]], check=True)
    print(f"{chosen.gib} GiB of float32 in {LEAVES} arrays on 8 devices, {os.cpu_count()} cores, {platform.platform()}\n")
    print("| | blocked, ms | its CPU, ms | durable, s | CPU, s | memory, MiB | cold load, s | on another mesh, s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for way, name in (("nebula", "Nebula"), ("orbax", "Orbax, asynchronous")):
        blocked, own, durable, cpu, memory_bytes, load, other = figures[way]
        print(f"| {name} | {1000 * blocked:.1f} | {1000 * own:.1f} | {durable:.2f} | {cpu:.2f}", end="")
        print(f" | {memory_bytes >> 20:,} | {load:.2f} | {other:.2f} |")
    ratios = [first / second for first, second in zip(figures["nebula"], figures["orbax"], strict=True)]
    print(f"| ratio | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    print(f"| JAX alone | {' | '.join(f'{1000 * each:.1f}' for each in held)} | | | | | |")
    return 0


def forget(base: Path, environment: dict[str, str]) -> None:
    """Ends the agent with its memory, and takes the files out of the page cache."""
    subprocess.run(["nebula", "stop", "--now", "--yes"], env=environment, capture_output=True)
    for path in base.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
