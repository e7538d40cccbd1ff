#!/usr/bin/env python3
"""The parts of scripts/wheels.sh that handle files: fetches pinned sources, puts wheels together and checks them.

A wheel gets the tag of manylinux_2_28. It holds the licences of the libraries that are linked into its agent, and a list
of them (CycloneDX, as PEP 770 wants it).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build-wheels"
GLIBC = (2, 28)
LIBC = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
MIRRORS = {"debian": "http://deb.debian.org/debian", "ubuntu": "http://archive.ubuntu.com/ubuntu"}
LICENCE_FILES = {"openssl": "LICENSE.txt", "curl": "COPYING", "jansson": "LICENSE", "liburing": "LICENSE", "civetweb": "LICENSE.md"}


class Refused(Exception):
    """A file is wrong. The message names the file and the reason."""


@dataclass(frozen=True)
class Source:
    """One line of requirements/wheels/*.txt."""

    name: str
    version: str
    licence: str
    mirror: str
    sha256: str
    path: str

    @property
    def url(self) -> str:
        mirror = os.environ.get(f"NEBULA_{self.mirror.upper()}_MIRROR") or MIRRORS[self.mirror]
        return f"{mirror.rstrip('/')}/{self.path}"


def lines(name: str) -> Iterator[list[str]]:
    for line in (ROOT / "requirements" / "wheels" / name).read_text().splitlines():
        if line and not line.startswith("#"):
            yield line.split()


def libraries(pins: str = "sources.txt") -> list[Source]:
    return [Source(name, version, licence, "debian", sha256, path) for name, version, licence, sha256, path in lines(pins)]


def pythons() -> list[Source]:
    return [Source("python", version, "PSF-2.0", mirror, sha256, path) for version, mirror, sha256, path in lines("pythons.txt")]


def fetch(source: Source, folder: Path) -> Path:
    """Returns the file of `source` in `folder`, and downloads it if it is missing. Raises Refused if its checksum is wrong."""
    file = folder / Path(source.path).name
    if not file.exists():
        part = file.with_name(file.name + ".part")
        with urllib.request.urlopen(source.url, timeout=60) as answer, part.open("wb") as out:  # noqa: S310
            while piece := answer.read(1 << 20):
                out.write(piece)
        part.rename(file)
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != source.sha256:
        file.rename(file.with_name(file.name + ".bad"))
        raise Refused(f"{source.url}: the sha256 is {found}, not {source.sha256}")
    return file


def unpack_headers(source: Source, folder: Path) -> Path:
    """Unpacks the include directory of one CPython. Debian keeps pyconfig.h in a folder for each architecture; both are equal."""
    include = folder / source.version / "usr" / "include"
    if not include.exists():
        with tempfile.TemporaryDirectory(dir=folder) as new:
            subprocess.run(["dpkg-deb", "-x", fetch(source, KEPT / "sources"), new], check=True)
            (Path(new) / "usr/include/aarch64-linux-gnu").symlink_to("x86_64-linux-gnu")
            os.rename(new, folder / source.version)
            os.mkdir(new)
    return include


def readelf(option: str, file: Path) -> str:
    return subprocess.run(["readelf", "-W", option, file], check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout


def is_elf(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4) == b"\x7fELF"


def check_elf(file: Path, arch: str, *, is_trainers: bool) -> None:
    """Raises Refused if the file needs another library than libc, a newer glibc, or names a directory of the build."""
    machine = {"x86_64": "X86-64", "aarch64": "AArch64"}[arch]
    if machine not in readelf("-h", file):
        raise Refused(f"{file.name} is not for {arch}")
    dynamic = readelf("-d", file)
    others = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)) - LIBC
    if others:
        raise Refused(f"{file.name} needs {', '.join(sorted(others))}")
    if "RPATH" in dynamic or "RUNPATH" in dynamic:
        raise Refused(f"{file.name} has a path for libraries")
    for version in re.findall(r"GLIBC_([0-9.]+)", readelf("-V", file)):
        if tuple(map(int, version.split("."))) > GLIBC:
            raise Refused(f"{file.name} needs glibc {version}, newer than {'.'.join(map(str, GLIBC))}")
    if is_trainers:
        exported = [line.split()[-1] for line in readelf("--dyn-syms", file).splitlines() if re.search(r"GLOBAL +DEFAULT +[0-9]", line)]
        strangers = [name for name in exported if not re.match(r"_*nebula_|PyInit_|NEBULA_|_init$|_fini$", name)]
        if strangers:
            raise Refused(f"{file.name} exports {strangers[0]}, which another library may have as well")
    if str(ROOT).encode() + b"/" in file.read_bytes():
        raise Refused(f"{file.name} contains the path of the build")


def metadata(version: str) -> tuple[str, str, str]:
    """Returns METADATA from pyproject.toml for a wheel with libraries, its entry points, and the name of the distribution."""
    from pyproject_metadata import StandardMetadata

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project["project"]["dynamic"] = []
    project["project"]["version"] = version
    project["project"]["license"] = " AND ".join(["Apache-2.0", *sorted({one.licence for one in libraries()} - {"Apache-2.0"})])
    project["project"]["license-files"] = ["LICENSE"]
    standard = StandardMetadata.from_pyproject(project, ROOT, metadata_version="2.4")
    groups = {**standard.entrypoints, "console_scripts": standard.scripts}
    entries = "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(entries.items()))
        for group, entries in sorted(groups.items())
        if entries
    )
    text = bytes(standard.as_rfc822()).decode()
    text = text.replace("License-File: LICENSE\n", "License-File: LICENSE\nLicense-File: THIRD-PARTY-LICENSES\n", 1)
    return text, entries, standard.name


def third_party_licences(sources: Path) -> str:
    """Returns the licences of the libraries that are linked in. `sources` holds the unpacked libraries."""
    parts = ["The command nebula contains the following libraries.\n"]
    for one in libraries():
        text = (sources / one.name / LICENCE_FILES[one.name]).read_text(errors="replace")
        parts.append(f"{'=' * 80}\n{one.name} {one.version} ({one.licence})\n{'=' * 80}\n\n{text.strip()}\n")
    return "\n".join(parts)


def sbom(name: str, version: str) -> dict[str, object]:
    """Returns the list of the wheel's components, as CycloneDX 1.6."""
    components = [
        {
            "type": "library",
            "bom-ref": f"{one.name}@{one.version}",
            "name": one.name,
            "version": one.version,
            "purl": f"pkg:generic/{one.name}@{one.version}?" + urllib.parse.urlencode(
                {"checksum": f"sha256:{one.sha256}", "download_url": f"{MIRRORS[one.mirror]}/{one.path}"}
            ),
            "licenses": [{"license": {"id": one.licence}}],
            "hashes": [{"alg": "SHA-256", "content": one.sha256}],
        }
        for one in libraries()
    ]
    subject = f"{name}@{version}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([subject, components])).urn,
        "version": 1,
        "metadata": {
            "component": {
                "type": "application", "bom-ref": subject, "name": name, "version": version,
                "purl": f"pkg:pypi/{subject}", "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": components,
        "dependencies": [
            {"ref": subject, "dependsOn": [one["bom-ref"] for one in components]},
            *({"ref": one["bom-ref"]} for one in components),
        ],
    }


def project_version() -> str:
    found = re.search(r"^project\(.*\bversion: '([^']+)'", (ROOT / "meson.build").read_text())
    if not found:
        raise Refused("meson.build names no version")
    return found[1]


def assemble(stage: Path, sources: Path, out: Path, python: str, arch: str) -> Path:
    """Makes the wheel of one CPython from the files that `meson install` has put below `stage`. Returns its path."""
    from wheel.wheelfile import WheelFile

    version = project_version()
    head, entries, name = metadata(version)
    base = f"{name.replace('-', '_')}-{version}"
    tag = f"cp{python.replace('.', '')}"
    platform = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{arch}"
    (package,) = stage.glob("lib/**/nebulaml")
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{base}-{tag}-{tag}-{platform}.whl"
    file.unlink(missing_ok=True)
    with WheelFile(file, "w") as wheel:
        files = [path for folder in (package, package.parent / "torch_nebula") for path in folder.rglob("*") if path.is_file()]
        for source in sorted([*files, package.parent / "nebula_rendezvous.py"]):
            target = source.relative_to(package.parent).as_posix()
            if "__pycache__" in target or ".so." in target:
                continue
            if source.name.startswith("_nebula-"):
                if source.name != f"_nebula-{python}.so":
                    continue
                target = f"nebulaml/_nebula.cpython-{python.replace('.', '')}-{arch}-linux-gnu.so"
            if is_elf(source):
                check_elf(source, arch, is_trainers=True)
            wheel.write(source, target)
        check_elf(stage / "bin" / "nebula", arch, is_trainers=False)
        wheel.write(stage / "bin" / "nebula", f"{base}.data/scripts/nebula")
        wheel.write(stage / "include" / "nebula.h", f"{base}.data/headers/nebula.h")
        for source in sorted((stage / "share").rglob("*")):  # the manual, and completion for shells
            if source.is_file():
                wheel.write(source, f"{base}.data/data/{source.relative_to(stage / 'share')}")
        for target, text in {
            "METADATA": head,
            "WHEEL": f"Wheel-Version: 1.0\nGenerator: nebula-wheels ({version})\nRoot-Is-Purelib: false\nTag: {tag}-{tag}-{platform}\n",
            "entry_points.txt": entries,
            "licenses/LICENSE": (ROOT / "LICENSE").read_text(),
            "licenses/THIRD-PARTY-LICENSES": third_party_licences(sources),
            "sboms/nebula.cdx.json": json.dumps(sbom(name, version), indent=2) + "\n",
        }.items():
            wheel.writestr(f"{base}.dist-info/{target}", text)
    return file


def check_tag(file: Path) -> None:
    """Asks auditwheel, which knows the rules of manylinux, whether the wheel may have its tag."""
    wanted = file.stem.rsplit("-", 1)[1]
    said = subprocess.run([sys.executable, "-m", "auditwheel", "show", file], check=True, capture_output=True, text=True).stdout
    said = " ".join(said.split())
    if not re.search(rf'consistent with the following platform tag: "(manylinux_2_\d+|manylinux\d+)_{wanted.split("_", 3)[3]}"', said):
        raise Refused(f"{file.name}: auditwheel says: {said}")
    granted = re.search(r'platform tag: "manylinux_2_(\d+)', said)
    if granted and int(granted[1]) > GLIBC[1]:
        raise Refused(f"{file.name}: auditwheel grants manylinux_2_{granted[1]} only")


def main() -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch").add_argument("name")
    commands.add_parser("headers")
    making = commands.add_parser("assemble")
    making.add_argument("arch")
    for option in ("--stage", "--sources", "--out"):
        making.add_argument(option, type=Path, required=True)
    asked = parser.parse_args()
    try:
        if asked.command == "fetch":
            known = libraries() + libraries("emulated.txt")
            print(fetch(next(one for one in known if one.name == asked.name), KEPT / "sources"))
        elif asked.command == "headers":
            (KEPT / "headers").mkdir(exist_ok=True)
            print(",".join(f"{one.version}={unpack_headers(one, KEPT / 'headers')}" for one in pythons()))
        else:
            for one in pythons():
                file = assemble(asked.stage, asked.sources, asked.out, one.version, asked.arch)
                check_tag(file)
                print(file)
    except Refused as refusal:
        print(f"wheels: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
