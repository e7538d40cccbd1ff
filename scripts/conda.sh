#!/usr/bin/env bash
# rattler-build builds the packages of packaging/conda from this checkout, runs their tests, and installs them into .envs/conda/prefix. There a program of
# C is built, killed and continued, and Python saves and loads a checkpoint.
#
#   scripts/conda.sh               with stand-ins for the packages of conda-forge
#   scripts/conda.sh conda-forge   with those of a channel: its name, its URL or its folder
#
# A stand-in has the name of a package of conda-forge, and holds a copy of this system's library, or a link to its program or a call of it. As with
# conda-forge, pkg-config finds a library in the environment alone, and what links it depends on its package. The headers are this system's, and so are
# glibc, the compiler and Python: stand-ins do not show whether the recipe works with conda-forge's versions of them.
set -euo pipefail
cd "$(dirname "$0")/.."

channel=${1:-}
place=$PWD/.envs/conda
mkdir -p "$place"
exec 9>"$place/lock"
flock 9
scripts/venv.sh "$place/python" requirements/conda.txt
unset PYTHONPATH
# shellcheck source=scripts/installation.sh
. scripts/installation.sh
rm -rf "$place/stand-ins" "$place/channel" "$place/prefix"
# rattler keeps what it has unpacked by name and version, and these names stand for other files elsewhere.
export RATTLER_CACHE_DIR=$work/cache
[[ -x .venv/bin/meson ]] && PATH=$PWD/.venv/bin:$PATH
conda() { PATH=$place/python/bin:$PATH python scripts/conda.py "$@"; }
quietly() { "$@" >"$work/log" 2>&1 || { tail -60 "$work/log" >&2; exit 1; }; }

# One output of the stand-ins' recipe, whose files lie in $work/files/PACKAGE.
stand_in() { # PACKAGE VERSION [FIELD_OF_REQUIREMENTS PACKAGE]...
        local package=$1
        mkdir -p "$work/files/$package"
        printf '  - package: {name: %s, version: "%s"}\n    build: {script: "cp -a %s/. $PREFIX/"}\n' \
                "$package" "$2" "$work/files/$package"
        shift 2
        [[ $# == 0 ]] || echo "    requirements:"
        while [[ $# != 0 ]]; do printf '      %s: [%s]\n' "$1" "$2"; shift 2; done
}
file() { # PACKAGE PATH   standard input is what it holds
        mkdir -p "$(dirname "$work/files/$1/$2")"
        cat >"$work/files/$1/$2"
}
program() { # PACKAGE NAME WORDS_OF_ITS_CALL
        file "$1" "bin/$2" <<<"#!/bin/sh"$'\n'"exec $3 \"\$@\""
        chmod +x "$work/files/$1/bin/$2"
}
library() { # PACKAGE NAME_FOR_PKG_CONFIG
        local module flag name found
        for module in "$2" $(pkg-config --print-requires --print-requires-private "$2"); do
                sed -e 's|^prefix=.*|prefix=${pcfiledir}/../..|; s|^libdir=.*|libdir=${prefix}/lib|' \
                        -e "s|^includedir=.*|includedir=$(pkg-config --variable=includedir "$module")|" \
                        "$(pkg-config --variable=pcfiledir "$module")/$module.pc" | file "$1" "lib/pkgconfig/$module.pc"
                for flag in $(pkg-config --libs-only-l "$module"); do
                        found=$(pkg-config --variable=libdir "$module")/lib${flag#-l}.so
                        name=$(objdump -p "$found" | awk '$1 == "SONAME" { print $2 }')
                        cp -L "$found" "$work/files/$1/lib/$name"
                        ln -sf "$name" "$work/files/$1/lib/lib${flag#-l}.so"
                done
        done
        stand_in "$1" "$(pkg-config --modversion "$2")" run_exports "$1"
}
distribution() { # PACKAGE PACKAGES_THAT_IT_NEEDS DISTRIBUTION...   modules of .venv
        .venv/bin/python - "$work/files/$1" "${@:3}" <<-'PYTHON'
	import shutil, sys
	from importlib import metadata
	from pathlib import Path
	for name in sys.argv[2:]:
	    for file in metadata.distribution(name).files:
	        if file.parts[0] != ".." and "__pycache__" not in file.parts:
	            to = Path(sys.argv[1], "lib", "python%d.%d" % sys.version_info[:2], "site-packages", file)
	            to.parent.mkdir(parents=True, exist_ok=True)
	            shutil.copy(file.locate(), to)
	PYTHON
        stand_in "$1" "$(.venv/bin/python -c "from importlib import metadata; print(metadata.version('$1'))")" run "$2"
}
interpreter() {
        local real version name
        real=$(.venv/bin/python -c 'import os, sys; print(os.path.realpath(sys.executable))')
        version=$("$real" -c 'import platform; print(platform.python_version())')
        file python pyvenv.cfg <<<"home = $(dirname "$real")"
        mkdir "$work/files/python/bin"
        for name in python python3 "python${version%.*}"; do ln -s "$real" "$work/files/python/bin/$name"; done
        stand_in python "$version" run_exports "python ${version%.*}.*"
}

if [[ -z $channel ]]; then
        machine=linux-$(uname -m | sed 's/x86_64/64/')
        sysroot=$(sed -n '/^c_stdlib_version:/{n;s/[^0-9.]//g;p}' packaging/conda/variants.yaml)
        program "gcc_$machine" cc "$(command -v cc)"
        # conda-forge's compiler has these flags as well.
        file "gcc_$machine" etc/conda/activate.d/gcc.sh <<<'export CC=cc LDFLAGS="-Wl,-rpath,$PREFIX/lib -L$PREFIX/lib"'
        program meson meson "$(command -v meson)"
        program ninja ninja "$(command -v ninja)"
        program pkg-config pkg-config 'env PKG_CONFIG_LIBDIR="$PREFIX/lib/pkgconfig"'" $(command -v pkg-config)"
        mkdir "$work/stand-ins"
        {
                printf 'recipe: {name: stand-ins, version: "0"}\noutputs:\n'
                stand_in "gcc_$machine" "$(cc -dumpfullversion)"
                stand_in "sysroot_$machine" "$sysroot"
                stand_in meson "$(meson --version)"
                stand_in ninja "$(ninja --version | grep -o '^[0-9.]*[0-9]')"
                stand_in pkg-config "$(pkg-config --version)"
                library jansson jansson
                library libcurl libcurl
                library liburing liburing
                library openssl openssl
                distribution pip python pip
                distribution meson-python "meson, python" meson-python pyproject-metadata packaging
                interpreter
        } >"$work/stand-ins/recipe.yaml"
        quietly conda build "$work/stand-ins/recipe.yaml" "" "$place/stand-ins"
        channel=$place/stand-ins
        echo "conda: stand-ins from this system's programs and libraries take the place of conda-forge's packages"
fi

quietly conda build packaging/conda/recipe.yaml "$channel" "$place/channel" packaging/conda/variants.yaml
for package in "$place"/channel/*/*.conda; do echo "conda: built ${package##*/}, and its tests pass"; done
quietly conda install "$place/channel,$channel" "$place/prefix" nebula-checkpoint
PATH=$place/prefix/bin:$PATH
export PKG_CONFIG_PATH=$place/prefix/lib/pkgconfig
echo "conda: $(nebula --version | head -n 1) is installed as $(command -v nebula)"
try_heat

# The command takes its libraries from the packages that its own depends on.
linked=$(ldd "$place/prefix/bin/nebula")
for name in jansson curl uring ssl crypto; do
        grep -q " => $place/prefix/.*/lib$name[.]so" <<<"$linked" ||
                { printf 'conda: nebula does not take lib%s from its environment:\n%s\n' "$name" "$linked" >&2; exit 1; }
done
# Another process loads from storage what the first has saved.
for step in save load; do
        python -I - "$step" "$work/checkpoints" <<-'PYTHON'
	import sys
	import nebulaml as nm

	nm.init(persistent_storage_path=sys.argv[2])
	state = {"step": 7, "values": bytes(range(256)) * 4096}
	latest = nm.get_latest_checkpoint()
	if sys.argv[1] == "save":
	    with nm.Checkpoint("global_step7") as checkpoint:
	        checkpoint.save("state.pt", state)
	    nm.flush_persistence()
	elif latest.tag == "global_step7" and latest.load("state.pt") == state:
	    print(f"conda: nebulaml of {nm.__file__.rpartition('/nebulaml/')[0]} loads what it saved")
	else:
	    sys.exit("conda: nebulaml does not load what it saved")
	PYTHON
        nebula stop --yes >/dev/null
done
