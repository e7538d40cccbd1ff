#!/usr/bin/env bash
# Builds the C half and its tests.
#
#   scripts/build.sh DIRECTORY [MESON OPTIONS]
#
# TARGETS: what ninja builds. "all" is the product and what the tests in Python need of the C half; the C tests are "meson-test-prereq".
#
# The compiler is $CC, or gcc if it is unset. A directory keeps the compiler of its setup.
set -euo pipefail
cd "$(dirname "$0")/.."

directory=$1
shift
options=(-Dpython=false -Dtests=true "$@")
# Sanitizers' libraries are found when a program starts, not when a library is linked.
[[ $* == *b_sanitize* ]] && options+=(-Db_lundef=false)
# A shared run time is not linked into each of the 170 programs.
if [[ $* == *b_sanitize=address* && ${CC:-} == clang ]]; then
        runtime=$(dirname "$(clang -print-file-name="libclang_rt.asan-$(uname -m).so")")
        [[ $runtime == . ]] || options+=(-Dc_link_args="-shared-libasan -Wl,-rpath,$runtime")
fi
# They link in less than half of the time of ld.
for linker in lld gold; do
        ! command -v "ld.$linker" >/dev/null || { export CC_LD=$linker; break; }
done

if [[ ! -f $directory/build.ninja ]]; then
        echo "build: setting up $directory"
        log=$(mktemp)
        trap 'rm -f "$log"' EXIT
        CC=${CC:-gcc} meson setup "$directory" "${options[@]}" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
fi
echo "build: $directory"
# shellcheck disable=SC2086 # several words
ninja -C "$directory" --quiet ${TARGETS:-all meson-test-prereq}
