"""The content of a wheel by scripts/wheels.py, and the files that it refuses. The tests compile nothing for another machine."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheels():
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "scripts" / "wheels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["wheels"] = module
    spec.loader.exec_module(module)
    return module


def compiled(file, source, *options):
    file.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", "-x", "c", "-", "-shared", "-fPIC", "-o", file, *options], input=source, text=True, check=True)


@pytest.fixture
def stage(wheels, tmp_path):
    """Makes a tree like that of `meson install`, and unpacked libraries with their licences."""
    stage, sources = tmp_path / "stage", tmp_path / "sources"
    package = stage / "lib/python3.11/site-packages/nebulaml"
    for version in ("3.11", "3.12"):
        compiled(package / f"_nebula-{version}.so", f"int PyInit__nebula(void) {{ return {version[2:]}; }}")
    compiled(package / "lib/libnebula.so", "int getpid(void); int nebula_one(void) { return getpid(); }")
    for name in ("nebulaml/__init__.py", "nebulaml/__pycache__/a.pyc", "torch_nebula/__init__.py", "nebula_rendezvous.py"):
        (package.parent / name).parent.mkdir(exist_ok=True)
        (package.parent / name).write_text("# text\n")
    compiled(stage / "bin/nebula", "int main(void) { return 0; }")
    (stage / "include").mkdir()
    shutil.copy(ROOT / "include/nebula.h", stage / "include")
    for name, licence in wheels.LICENCE_FILES.items():
        (sources / name).mkdir(parents=True)
        (sources / name / licence).write_text(f"the licence of {name}\n")
    return stage, sources


def test_a_wheel_holds_its_own_version_of_the_module_and_records_every_file(wheels, stage, tmp_path):
    file = wheels.assemble(*stage, tmp_path / "dist", "3.12", "x86_64")
    version = wheels.project_version()
    assert file.name == f"nebula_checkpoint-{version}-cp312-cp312-manylinux_2_28_x86_64.whl"
    about = f"nebula_checkpoint-{version}.dist-info/"
    with zipfile.ZipFile(file) as wheel:
        names = wheel.namelist()
        assert [name for name in names if "_nebula" in name and name.endswith(".so")] == ["nebulaml/_nebula.cpython-312-x86_64-linux-gnu.so"]
        assert not any("__pycache__" in name for name in names)
        assert {"nebulaml/lib/libnebula.so", "torch_nebula/__init__.py", "nebula_rendezvous.py"} <= set(names)
        assert wheel.getinfo(f"nebula_checkpoint-{version}.data/scripts/nebula").external_attr >> 16 & 0o111 == 0o111
        recorded = {row[0]: row[1] for row in csv.reader(wheel.read(about + "RECORD").decode().splitlines())}
        assert set(recorded) == set(names)
        for name in set(names) - {about + "RECORD"}:
            digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).rstrip(b"=").decode()
            assert recorded[name] == f"sha256={digest}", name
        metadata = wheel.read(about + "METADATA").decode()
        assert "\nName: nebula-checkpoint\n" in metadata and f"\nVersion: {version}\n" in metadata
        assert "\nLicense-Expression: Apache-2.0 AND MIT AND curl\n" in metadata and "Provides-Extra: elastic" in metadata
        assert "nebula-store = nebula_rendezvous:store" in wheel.read(about + "entry_points.txt").decode()
        assert "Tag: cp312-cp312-manylinux_2_28_x86_64" in wheel.read(about + "WHEEL").decode()


def test_the_same_build_makes_the_same_wheel(wheels, stage, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    one, two = (wheels.assemble(*stage, tmp_path / name, "3.11", "x86_64").read_bytes() for name in "ab")
    assert one == two


def test_every_library_that_is_linked_in_is_named_with_its_licence(wheels, stage, tmp_path):
    file = wheels.assemble(*stage, tmp_path, "3.11", "x86_64")
    about = f"nebula_checkpoint-{wheels.project_version()}.dist-info/"
    with zipfile.ZipFile(file) as wheel:
        licences = wheel.read(about + "licenses/THIRD-PARTY-LICENSES").decode()
        listed = {one["name"]: one for one in json.loads(wheel.read(about + "sboms/nebula.cdx.json"))["components"]}
    built = (ROOT / "scripts/wheels.sh").read_text()
    assert set(listed) == {one.name for one in wheels.libraries()} == set(wheels.LICENCE_FILES)
    for one in wheels.libraries():
        assert f"build_{one.name}()" in built and f"the licence of {one.name}" in licences and one.version in licences
        assert listed[one.name]["hashes"] == [{"alg": "SHA-256", "content": one.sha256}] and one.version in one.path


@pytest.mark.parametrize(
    ("name", "source", "options", "reason"),
    [
        ("lib/libnebula.so", "int deflate(void *, int); int nebula_x(void) { return deflate(0, 0); }", ("-Wl,--no-as-needed", "-l:libgcc_s.so.1"), "needs libgcc_s"),
        ("lib/libnebula.so", "int SSL_new(void) { return 1; }", (), "exports SSL_new"),
        ("lib/libnebula.so", "int nebula_x(void) { return 1; }", ("-Wl,-rpath,/opt/lib",), "path for libraries"),
        ("lib/libnebula.so", f'const char *nebula_x(void) {{ return "{ROOT}/build/x"; }}', (), "path of the build"),
    ],
)  # fmt: skip
def test_a_library_that_would_not_work_elsewhere_is_refused(wheels, stage, tmp_path, name, source, options, reason):
    (package,) = stage[0].glob("lib/**/nebulaml")
    (package / name).unlink()
    compiled(package / name, source, *options)
    with pytest.raises(wheels.Refused, match=reason):
        wheels.assemble(*stage, tmp_path, "3.11", "x86_64")


def test_a_newer_glibc_and_another_machine_are_refused(wheels, stage, monkeypatch):
    (library,) = stage[0].glob("lib/**/libnebula.so")
    with pytest.raises(wheels.Refused, match="not for aarch64"):
        wheels.check_elf(library, "aarch64", is_trainers=True)
    monkeypatch.setattr(wheels, "GLIBC", (2, 1))
    with pytest.raises(wheels.Refused, match=r"needs glibc 2\."):
        wheels.check_elf(library, "x86_64", is_trainers=True)


def test_a_source_with_another_checksum_is_refused_and_not_kept(wheels, tmp_path, monkeypatch):
    monkeypatch.setenv("NEBULA_DEBIAN_MIRROR", (tmp_path / "mirror").as_uri())
    source = next(one for one in wheels.libraries() if one.name == "jansson")
    served = tmp_path / "mirror" / source.path
    served.parent.mkdir(parents=True)
    served.write_bytes(b"something else")
    for _ in range(2):
        with pytest.raises(wheels.Refused, match="sha256"):
            wheels.fetch(source, tmp_path)
    assert not (tmp_path / served.name).exists()


def test_versions_are_the_same_everywhere(wheels):
    version = wheels.project_version()
    assert f'#define NEBULA_VERSION "{version}"' in (ROOT / "include/nebula.h").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    pythons = [one.version for one in wheels.pythons()]
    assert pythons == ["3.10", "3.11", "3.12", "3.13", "3.14"]


def test_the_oldest_torch_is_the_one_that_is_tested():
    (oldest,) = re.findall(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    tested = min((ROOT / "requirements/frameworks").glob("torch-*.txt"), key=lambda list: [int(part) for part in list.stem[6:].split(".")])
    assert f"torch=={tested.stem.removeprefix('torch-')}\n" in tested.read_text()
    assert re.fullmatch(rf"torch-{re.escape(oldest)}(\.0)?", tested.stem)
    assert f"torch {oldest} or newer" in (ROOT / "README.md").read_text()


def test_the_setup_waits_for_another_apt_and_tells_another_failure_at_once(tmp_path):
    fake = tmp_path / "apt-get"
    fake.write_text('#!/bin/sh\necho x >>"$COUNT"\n[ "$(wc -l <"$COUNT")" -gt 2 ] || { echo "E: $PROBLEM" >&2; exit 100; }\n')
    fake.chmod(0o755)
    script = 'source <(sed -n "/^apt() {/,/^}/p" "$1"); sleep() { :; }; say() { echo "$@"; }; apt update && echo done'
    for problem, said in (("Could not get lock /var/lib/apt/lists/lock", "waiting for another apt\ndone\n"), ("no such package", "")):
        count = tmp_path / problem[:3]
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "COUNT": str(count), "PROBLEM": problem}
        done = subprocess.run(["bash", "-c", script, "bash", ROOT / "scripts/setup.sh"], env=environment, capture_output=True, text=True)
        assert done.stdout == said and (problem in done.stderr) == (not said), done
