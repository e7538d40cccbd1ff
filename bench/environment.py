"""Describes the machine and the versions of a benchmark run: its figures mean nothing without them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path


def processor() -> str:
    """Returns the processor's name, and the width of its vectors if known: clouds give several generations the same name."""
    facts = dict(re.findall(r"^([^\t\n]+)\t*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    flags = facts.get("flags", "").split()
    vectors = [f", {name}" for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags]
    return facts.get("model name", platform.machine()) + "".join(vectors[:1])


def memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def file_system(path: Path) -> str:
    """Returns the type of the file system that holds a path."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        if str(path.resolve()).startswith(mount) and len(mount) > len(best):
            best, kind = mount, name
    return kind


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of these packages in this process's environment."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def describe(storage: Path) -> dict[str, str]:
    """Returns the description that belongs to every table, in Markdown."""
    return {
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory_bytes() / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "file system": file_system(storage),
        "python": platform.python_version(),
        **versions(("nebula-checkpoint", "torch", "safetensors")),
        "commit": commit(),
        # A load of more than a fraction of the cores means that other programs ran, so the times are not reliable.
        "load when it began": f"{os.getloadavg()[0]:.1f}",
    }
