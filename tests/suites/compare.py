"""Runs the checkpoint tests of the frameworks themselves, as they are and with Nebula in place, and compares.

    python tests/suites/compare.py NAME PYTHON SOURCE [arguments of pytest]

SOURCE: the unpacked source of the framework, with its tests. The exit code is 0 if all tests that pass without Nebula pass with it, except for
the tests in KNOWN, each with its reason in README.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
SUITES = {  # the directory that tests run in, below the source, and the tests
    "accelerate": (".", ["tests/test_state_checkpointing.py"]),
    "lightning": (
        "tests/tests_pytorch",
        [
            "checkpointing/test_model_checkpoint.py",
            "trainer/connectors/test_checkpoint_connector.py",
            "models/test_restore.py",
            "plugins/test_checkpoint_io_plugin.py",
        ],
    ),
    "torch": (
        "test/distributed/checkpoint",
        ["test_file_system_checkpoint_cpu.py", "test_save_load_api.py", "test_checkpoint.py", "test_planner.py"],
    ),
}
KNOWN: dict[str, tuple[str, ...]] = {
    "accelerate": ("test_with_save_limit",),  # it counts the entries beside the checkpoints, and Nebula has its .nebula there
    "lightning": (
        "test_ckpt_for_fsspec",  # paths of memory://, which are refused at setup
        "test_local_cross_device_checkpoint",
        "test_checkpoint_plugin_called",  # the user's own CheckpointIO: Nebula's stands before it
        "test_async_checkpoint_plugin",
    ),
    "torch": (),
}


def outcomes(name: str, python: str, source: Path, nebula: bool, more: list[str]) -> dict[str, str]:
    folder, files = SUITES[name]
    cwd = source / folder
    files = [file for file in files if (cwd / file).exists()]
    if not files:
        sys.exit(f"{cwd} has none of the tests: give the source of {name}, tests among it")
    paths = [str(HERE), str(source / "tests"), str(source)]
    environment = {**os.environ, "NEBULA_SUITE": name, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--timeout=180"]
        command += [*(["-p", "in_place"] if nebula else []), *files, *more]
        Path("out").mkdir(exist_ok=True)
        with open(f"out/suite-{name}-{'nebula' if nebula else 'stock'}.log", "wb") as log:
            subprocess.run(command, cwd=cwd, env=environment, stdout=log, stderr=log, check=False)
        if not report.exists():
            sys.exit(f"the tests of {name} did not run: see {log.name}")
        found = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            state = "skipped" if "skipped" in kinds else "failed" if kinds & {"failure", "error"} else "passed"
            key = f"{case.get('classname')}::{case.get('name')}"
            found[key] = state if found.get(key, state) == state else "failed"
    return found


def main() -> int:
    name, python, source, *more = sys.argv[1:]
    stock = outcomes(name, python, Path(source).resolve(), False, more)
    ours = outcomes(name, python, Path(source).resolve(), True, more)
    passes = sorted(test for test, state in stock.items() if state == "passed")
    lost = [test for test in passes if ours.get(test) != "passed"]
    unknown = [test for test in lost if not any(known in test for known in KNOWN[name])]
    print(f"{name:12} {'tests':>6} {'pass stock':>11} {'of these with Nebula':>21}")
    print(f"{'':12} {len(stock):6} {len(passes):11} {len(passes) - len(lost):21}")
    for test in lost:
        print(f"  {'known' if test not in unknown else 'DIFFERS'}: {test}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
