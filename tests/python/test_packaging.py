"""The recipes of packaging/ build this version with options that the build has."""

import re
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = (ROOT / "meson.build").read_text()
VERSION = re.search(r"version: '([^']+)'", BUILD)[1]
OPTIONS = set(re.findall(r"^option\('(\w+)'", (ROOT / "meson.options").read_text(), re.M)) | {"werror"}


class Package:
    """What a recipe of Spack uses of its base class."""

    spec = types.SimpleNamespace(satisfies=lambda constraint: True)


def test_the_recipe_of_spack_names_this_version_and_options_of_the_build(monkeypatch):
    said = []

    def directive(name):
        return lambda *words, **more: said.append((name, *words))

    spack = types.ModuleType("spack.package")
    for name in ("license", "version", "variant", "depends_on"):
        setattr(spack, name, directive(name))
    meson = types.ModuleType("meson")
    meson.MesonPackage = Package
    for name, module in (("spack", types.ModuleType("spack")), ("spack.package", spack), ("spack_repo.builtin.build_systems.meson", meson)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    place = ROOT / "packaging/spack/spack_repo/nebula/packages/libnebula/package.py"
    names = {"__file__": str(place)}
    exec(compile(place.read_text(), place, "exec"), names)
    assert ("version", VERSION) in said
    assert names["Libnebula"].git == ROOT.as_uri()
    given = [re.fullmatch(r"-D(\w+)=\w+", word)[1] for word in names["Libnebula"]().meson_args()]
    assert given
    assert set(given) <= OPTIONS
    depends = " ".join(words[1] for words in said if words[0] == "depends_on")
    assert [name for name in ("jansson", "openssl", "curl", "liburing") if name not in depends] == []


def test_the_recipe_of_conda_names_this_version_and_options_of_the_build():
    recipe = (ROOT / "packaging/conda/recipe.yaml").read_text()
    assert re.search(r"^  version: (.+)$", recipe, re.M)[1] == VERSION
    given = re.findall(r"[ =]-D(\w+)=", recipe)
    assert given
    assert set(given) <= OPTIONS
    hosts = re.findall(r"^      host:\n((?: {8}- .+\n)+)", recipe, re.M)
    assert len(hosts) == 2
    for host in hosts:
        assert [name for name in ("jansson", "openssl", "curl", "liburing") if name not in host] == []
