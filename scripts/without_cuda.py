#!/usr/bin/env python3
"""Lets a torch that was built for CUDA be imported without NVIDIA's libraries: without_cuda.py ENVIRONMENT

PyPI's torch for x86_64 loads 2 GiB of them also where there is no GPU. This puts a library of a few KiB in the place of each; its
functions all return the error "no device". Only an environment for tests gets them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
# These libraries' symbols have no version, but a prefix.
UNVERSIONED = {"libnccl.so.2": "nccl", "libcurand.so.10": "curand", "libcufile.so.0": "cuFile", "libcusparseLt.so.0": "cusparseLt"}


def output(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def needed(library: Path) -> set[str]:
    return {line.split("[")[1].rstrip("]") for line in output("readelf", "-d", library) if "(NEEDED)" in line}


def undefined(library: Path) -> set[str]:
    """Names, with @version if they have one."""
    return {line.split()[-1] for line in output("nm", "-D", "--undefined-only", library)}


def versions(library: Path) -> dict[str, set[str]]:
    """Returns the names of the versions that a library wants of each library that it needs. Most are the name of the other library."""
    found: dict[str, set[str]] = {}
    name = ""
    for line in output("readelf", "-VW", library):
        if at := re.search(r"Version: \d+ +File: (\S+)", line):
            name = at[1]
        elif name and (at := re.search(r"Name: (\S+) +Flags:", line)):
            found.setdefault(name, set()).add(at[1])
    return found


def build(library: Path, functions: dict[str, list[str]]) -> None:
    """Makes a library with the functions of each version. A version without a function takes what no other version has."""
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "versions")
        names = sorted(set().union(*functions.values()))
        source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names))
        script.write_text("".join(f"{version} {{ {'; '.join(some or ['*'])}; }};\n" for version, some in functions.items()))
        options = f"-Wl,-soname,{library.name},--version-script,{script}"
        subprocess.run(["cc", "-shared", "-fPIC", "-fno-builtin", options, "-o", library, source], check=True)


def main() -> int:
    (folder,) = Path(sys.argv[1]).glob("lib/python*/site-packages/torch/lib")
    libraries = sorted(folder.glob("*.so*"))
    symbols = set().union(*map(undefined, libraries))
    wanted = [versions(library) for library in libraries]
    for name in sorted(set().union(*map(needed, libraries))):
        if (folder / name).exists() or not name.startswith(("libcu", "libnccl", "libnv")) or name == "libcuda.so.1":
            continue
        functions = {
            version: sorted(symbol.split("@")[0] for symbol in symbols if symbol.endswith("@" + version))
            for version in set().union(*(one.get(name, set()) for one in wanted))
        }
        if name in UNVERSIONED:
            functions[name] = [symbol for symbol in symbols if symbol.startswith(UNVERSIONED[name])]
        build(folder / name, functions or {name: []})
    return 0


if __name__ == "__main__":
    sys.exit(main())
