#!/usr/bin/env bash
# Spack builds and installs libnebula from the last commit, by the recipe of packaging/spack, into .envs/spack/opt. Then a program of C and one of CMake
# are built with that installation, killed, and continued.
#
#   scripts/spack.sh
#
# Spack takes the compiler, meson and the libraries of this system, and builds those that are missing. Exit code 77 if Spack cannot be fetched.
set -euo pipefail
cd "$(dirname "$0")/.."

spack_at=5817ab9613f211442a2747b304960c556797c40f    # 1.3.0.dev0, June 2026
packages_at=1e8cf059e35d55c4fe1142fed41785bedf6c7246 # July 2026
wrapper_at=25b8a3c809632e480098cf17fd278bd82618ccf0  # 1.1.0, which those packages take
recipe=packaging/spack/spack_repo/nebula
place=$PWD/.envs/spack
git rev-parse -q --verify HEAD >/dev/null || { echo "spack: the sources have no commit, and the recipe takes the last one" >&2; exit 77; }
mkdir -p "$place"
exec 9>"$place/lock"
flock 9

fetched() { # REPOSITORY COMMIT DIRECTORY
        [[ $(git -C "$3" rev-parse -q --verify HEAD 2>/dev/null) == "$2" ]] && return
        rm -rf "$3"
        git init -q "$3"
        git -C "$3" fetch -q --depth 1 "https://github.com/spack/$1.git" "$2" && git -C "$3" -c advice.detachedHead=false checkout -q FETCH_HEAD ||
                { rm -rf "$3"; echo "spack: cannot fetch $1 from GitHub" >&2; exit 77; }
}
fetched spack "$spack_at" "$place/spack"
fetched spack-packages "$packages_at" "$place/packages"
# Spack downloads its compiler wrapper as the archive of this commit. Made here, it has the same bytes and checksum, so git fetches all.
fetched compiler-wrapper "$wrapper_at" "$place/wrapper"
wrapper=$place/sources/_source-cache/archive/a0/a07b35081d14b0729090bc1e5790a5dda2d5b997e064c62da39a1224ee249b2a.tar.gz
mkdir -p "${wrapper%/*}"
git -C "$place/wrapper" archive --format=tar --prefix=compiler-wrapper-1.1.0/ HEAD | gzip -6n >"$wrapper"
scripts/venv.sh "$place/python" requirements/spack.txt

# shellcheck source=scripts/installation.sh
. scripts/installation.sh

# What this system has is not built again.
external() { # PACKAGE VERSION PREFIX [MORE]
        printf '  %s:\n    externals: [{spec: "%s@%s", prefix: %s%s}]\n    buildable: false\n' "$1" "$1" "$2" "$3" "${4:-}"
}
program() { # PACKAGE [MORE]
        local found
        found=$(command -v "$1") || return 0
        external "$1" "$("$1" --version)" "$(dirname "$(dirname "$found")")" "${2:-}"
}
library() { # PACKAGE NAME_FOR_PKG_CONFIG
        ! pkg-config --exists "$2" || external "$1" "$(pkg-config --modversion "$2")" "$(pkg-config --variable=prefix "$2")"
}
[[ -x .venv/bin/meson ]] && PATH=$PWD/.venv/bin:$PATH
mkdir "$work/etc"
{
        echo "packages:"
        external python "$(python3 -c 'import platform; print(platform.python_version())')" "$(python3 -c 'import sys; print(sys.prefix)')"
        program meson ", dependencies: [{spec: python, deptypes: [build, run]}]"
        program ninja
        program pkgconf
        library curl libcurl
        library jansson jansson
        library liburing liburing
        library openssl openssl
} >"$work/etc/packages.yaml"
printf 'repos::\n  nebula: %s\n  builtin: %s\n' "$PWD/$recipe" "$place/packages/repos/spack_repo/builtin" >"$work/etc/repos.yaml"
printf 'config:\n  install_tree: {root: %s}\n  build_stage: [%s]\n  source_cache: %s\n' "$place/opt" "$work/stage" "$place/sources" >"$work/etc/config.yaml"

unset PYTHONPATH
export SPACK_PYTHON=$place/python/bin/python SPACK_DISABLE_LOCAL_CONFIG=1 SPACK_USER_CACHE_PATH=$place/cache
spack() { "$place/spack/bin/spack" -C "$work/etc" "$@"; }
spack audit packages libnebula
! command -v ruff >/dev/null || spack style -t import -t ruff-format -t ruff-check "$PWD/$recipe/packages/libnebula/package.py"
rm -rf "$place/opt"
spack install -j "$(nproc)" libnebula
eval "$(spack load --sh libnebula)"
echo "spack: $(nebula --version | head -n 1) is installed as $(command -v nebula)"

try_heat
mkdir "$work/walk"
cat >"$work/walk/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.16)
project(walk CXX)
find_package(nebula 0.2 REQUIRED)
add_executable(walk $PWD/examples/walk/walk.cpp)
target_compile_features(walk PRIVATE cxx_std_17)
target_link_libraries(walk nebula::nebula)
END
cmake -S "$work/walk" -B "$work/walk/build" >"$work/log" && cmake --build "$work/walk/build" >>"$work/log" || { cat "$work/log" >&2; exit 1; }
try walk 230 "$work/walk/build/walk"
