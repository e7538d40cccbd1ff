#!/usr/bin/env python3
"""Lets a torch that was built for CUDA be imported without NVIDIA's libraries: without_cuda.py ENVIRONMENT

PyPI's torch for x86_64 loads 2 GiB of them also where there is no GPU. This puts a library of a few KiB in the place of each; its
functions all return the error "no device". Only an environment for tests gets them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
# These libraries' symbols have no version, but a prefix.
UNVERSIONED = {"libnccl.so.2": "nccl", "libcurand.so.10": "curand", "libcufile.so.0": "cuFile"}


def output(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def needed(library: Path) -> set[str]:
    return {line.split("[")[1].rstrip("]") for line in output("readelf", "-d", library) if "(NEEDED)" in line}


def undefined(library: Path) -> set[str]:
    """Names, with @version if they have one."""
    return {line.split()[-1] for line in output("nm", "-D", "--undefined-only", library)}


def build(library: Path, functions: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder, "stub.c"), Path(folder, "versions")
        source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in functions))
        versions.write_text(f"{library.name} {{ *; }};\n")
        options = f"-Wl,-soname,{library.name},--version-script,{versions}"
        subprocess.run(["cc", "-shared", "-fPIC", "-fno-builtin", options, "-o", library, source], check=True)


def main() -> int:
    (folder,) = Path(sys.argv[1]).glob("lib/python*/site-packages/torch/lib")
    libraries = sorted(folder.glob("*.so*"))
    symbols = set().union(*map(undefined, libraries))
    for name in sorted(set().union(*map(needed, libraries))):
        if (folder / name).exists() or not name.startswith(("libcu", "libnccl", "libnv")) or name == "libcuda.so.1":
            continue
        functions = [symbol.split("@")[0] for symbol in symbols if symbol.endswith("@" + name)]
        if name in UNVERSIONED:
            functions += [symbol for symbol in symbols if symbol.startswith(UNVERSIONED[name])]
        build(folder / name, sorted(functions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
