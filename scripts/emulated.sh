#!/usr/bin/env bash
# Runs the C tests of sums, images and storage for aarch64, under qemu, with the compiler and the libraries of that wheel:
# after scripts/wheels.sh aarch64. Needs qemu-aarch64-static (Debian's package qemu-user-static).
set -euo pipefail
cd "$(dirname "$0")/.."
kept=$PWD/build-wheels/aarch64
tests=(sum_test image_test name_test manifest_test manifest_keys_test record_test document_test tag_log_test scan_test store_file_test)
export PATH=$PWD/.venv/bin:$PATH ZIG_GLOBAL_CACHE_DIR=$PWD/build-wheels/zig-cache QEMU_LD_PREFIX=$kept/sysroot

say() { printf '%s\n' "emulated: $*" >&2; }
command -v qemu-aarch64-static >/dev/null || { say "needs qemu-aarch64-static; type: apt-get install -y qemu-user-static"; exit 1; }
[[ -f $kept/machine.ini ]] || { say "run scripts/wheels.sh aarch64 first"; exit 1; }

if [[ ! -e $kept/sysroot/lib/ld-linux-aarch64.so.1 ]]; then
        mkdir -p "$kept/sysroot"
        dpkg-deb -x "$(.venv/bin/python scripts/wheels.py fetch libc6)" "$kept/sysroot"
fi
sed "s#^\[properties\]#exe_wrapper = ['qemu-aarch64-static']\n[properties]#" "$kept/machine.ini" >"$kept/machine-tests.ini"
if [[ ! -f $kept/tests/build.ninja ]]; then
        say "setting up"
        meson setup "$kept/tests" --cross-file "$kept/machine-tests.ini" --prefix=/ -Dpython=false -Dtests=true -Dlock_checks=disabled \
                -Dmetrics_server=disabled -Dbuildtype=release -Doptimization=2 -Dc_link_args=-Wl,-S -Dwerror=false >"$kept/tests.log" 2>&1 ||
                { tail -20 "$kept/tests.log" >&2; exit 1; }
fi
ninja -C "$kept/tests" --quiet "${tests[@]/#/tests/unit/}" >"$kept/tests.log" 2>&1 || { tail -20 "$kept/tests.log" >&2; exit 1; }
meson test -C "$kept/tests" --print-errorlogs --no-rebuild --timeout-multiplier 8 "${tests[@]}"
