"""``make bench-mlperf``: the checkpoint workload of MLPerf Storage (DLIO, llama3-8b scaled down), with DLIO's writers and with Nebula.

DLIO itself is installed into .envs/mlperf, and measures: its own summary has the times. The rules that one small machine cannot meet are listed
in bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from .nodes import NEBULA, ROOT

PLACE = ROOT / ".envs/mlperf"
WRITERS = {
    "DLIO's PyTorch writer, as it comes: nothing is synced": ("Stock", {"BENCH_SYNC": "0"}),
    "DLIO's PyTorch writer, each file synced": ("Stock", {"BENCH_SYNC": "1"}),
    "Nebula, until durable": ("Nebula", {"BENCH_STATE": "durable"}),
    "Nebula, until committed": ("Nebula", {"BENCH_STATE": "committed"}),
}
S3_WRITERS = {"DLIO's S3 writer (s3torchconnector)": ("", {}), **{name: one for name, one in WRITERS.items() if one[0] == "Nebula"}}

# DLIO counts what it may read below s3://BUCKET/s3://BUCKET/FOLDER/, where nothing writes: each of these objects counts as a checkpoint.
COUNTED = """
import os, sys
from s3torchconnector._s3client import S3Client, S3ClientConfig
client = S3Client(region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=S3ClientConfig(force_path_style=True))
for number in range(int(sys.argv[2])):
    writer = client.put_object(sys.argv[1].split("/")[2], f"{sys.argv[1]}/{number}")
    writer.write(b"-")
    writer.close()
"""


class Run:
    """One writer with an empty storage."""

    def __init__(self, base: Path, writer: tuple[str, dict[str, str]], chosen: argparse.Namespace, bucket: str) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=base))
        self.memory = Path(tempfile.mkdtemp(prefix="nebula-bench-", dir="/dev/shm"))
        self.chosen = chosen
        name, variables = writer
        self.is_on_s3 = not name
        storage = f"{bucket}/{uuid.uuid4().hex[:8]}" if bucket else str(self.folder / "storage")
        self.environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "NEBULA_MEMORY_DIR": str(self.memory), "NEBULA_RUNTIME_DIR": tempfile.mkdtemp(prefix="nb-"),
            "NEBULA_AGENT_PATH": str(NEBULA), "NEBULA_AGENT_LINGER": "600", "BENCH_STORAGE": storage, "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **variables,
        }  # fmt: skip
        shape = {"hidden_size": 4096, "ffn_hidden_size": 14336, "vocab_size": 128256}
        self.settings = [
            "workload=llama_8b_zero3", f"++workload.model.num_layers={32 // chosen.divisor}",
            *[f"++workload.model.transformer.{key}={value // chosen.divisor}" for key, value in shape.items()],
            f"++workload.checkpoint.time_between_checkpoints={chosen.between}", f"++workload.output.folder={self.folder}/output",
            f"hydra.run.dir={self.folder}/output",
        ]  # fmt: skip
        if name:
            classname = f"++workload.checkpoint.checkpoint_mechanism_classname=bench.dlio_writers.{name}"
            self.settings += [classname, f"++workload.checkpoint.checkpoint_folder={self.folder}/checkpoints"]
        else:
            access = {"endpoint_url": "AWS_ENDPOINT_URL", "access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"}
            self.settings += [
                "++workload.storage.storage_type=s3", f"++workload.storage.storage_root={bucket.removeprefix('s3://')}",
                "++workload.dataset.format=npz", f"++workload.checkpoint.checkpoint_folder={storage}", "++workload.reader.data_loader=pytorch",
                *[f"++workload.storage.storage_options.{key}={os.environ[value]}" for key, value in access.items()],
                "++workload.storage.storage_options.region=us-east-1", "++workload.storage.storage_options.s3_force_path_style='true'",
            ]  # fmt: skip

    def __call__(self, writes: int, reads: int) -> dict[str, Any]:
        counts = [f"++workload.checkpoint.num_checkpoints_write={writes}", f"++workload.checkpoint.num_checkpoints_read={reads}"]
        command = ["mpirun", "--oversubscribe", "-n", str(self.chosen.ranks), PLACE / "bin/dlio_benchmark", *self.settings, *counts]
        ran = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True)
        if self.is_on_s3 and writes > 0:
            counting = [PLACE / "bin/python", "-c", COUNTED, self.environment["BENCH_STORAGE"], str(writes)]
            subprocess.run(counting, env=self.environment, check=True)
        summary = self.folder / "output/summary.json"
        if ran.returncode != 0 or not summary.exists():
            raise RuntimeError(ran.stdout[-3000:] + ran.stderr[-3000:])
        return json.loads(summary.read_text())["metric"]

    def forget(self) -> None:
        """Ends the agent with its memory, and takes the files out of the page cache: the rules ask for a cold read."""
        subprocess.run([NEBULA, "stop", "--now", "--yes"], env=self.environment, capture_output=True)
        for path in self.folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    def close(self) -> None:
        self.forget()
        for place in (self.folder, self.memory, self.environment["NEBULA_RUNTIME_DIR"]):
            shutil.rmtree(place, ignore_errors=True)
        time.sleep(2)  # DLIO's next run begins on a quiet disk


def table(base: Path, writers: dict[str, tuple[str, dict[str, str]]], chosen: argparse.Namespace, bucket: str = "") -> None:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in writers}
    for _ in range(chosen.rounds):
        for name, writer in writers.items():
            run = Run(base, writer, chosen, bucket)
            try:
                written = run(chosen.count, 0)
                run.forget()
                read = run(-1, chosen.count)
            finally:
                run.close()
            size = written["checkpoint_size_GB"]
            found[name].append((written["save_checkpoint_duration_mean_seconds"], read["load_checkpoint_duration_mean_seconds"], size))
    print(f"| {size:.2f} GB in {bucket or 'files'} | save, s | GB/s | cold load, s | GB/s |\n| --- | --- | --- | --- | --- |")
    for name, rows in found.items():
        save, load, size = (statistics.median(row[i] for row in rows) for i in range(3))
        print(f"| {name} | {save:.2f} | {size / save:.2f} | {load:.2f} | {size / load:.2f} |", flush=True)
    print()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mlperf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--divisor", type=int, default=8, help="layers, hidden sizes and vocabulary of llama3-8b are divided by it")
    parser.add_argument("--count", type=int, default=5, help="checkpoints that are written, then read")
    parser.add_argument("--between", type=float, default=3, help="seconds between two of them")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--on", nargs="+", choices=("files", "s3"), default=["files", "s3"])
    chosen = parser.parse_args()
    if not (PLACE / ".ready").exists():
        sys.exit("no environment of DLIO: scripts/framework.sh mlperf")
    base = Path(tempfile.mkdtemp(prefix="nebula-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        print(f"{chosen.ranks} ranks, {chosen.count} checkpoints, {os.cpu_count()} cores, {platform.platform()}\n")
        if "files" in chosen.on:
            table(base, WRITERS, chosen)
        if "s3" in chosen.on:
            table(base, S3_WRITERS, chosen, "s3://nebula")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
