#!/usr/bin/env bash
# Builds the checkpoint libraries of MPI programs that `make bench-mpi` measures beside Nebula: VELOC and SCR with their parts, from their sources, into .envs/mpi.
#
#   scripts/mpi_peers.sh
#
# It needs git, cmake, Open MPI, OpenSSL, autoconf, automake and libtool. One that cannot be built here is reported and left out.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$PWD/.envs/mpi sources=$PWD/.envs/mpi/src
say() { printf '%s\n' "mpi_peers: $*" >&2; }

fetched() { # OWNER/NAME TAG
        local place=$sources/${1##*/}
        [[ -d $place ]] || git -c advice.detachedHead=false clone -q --depth 1 -b "$2" "https://github.com/$1.git" "$place" >&2
        printf '%s' "$place"
}

with_cmake() { # OWNER/NAME TAG [OPTION...]
        local place
        place=$(fetched "$1" "$2")
        cmake -S "$place" -B "$place/build" -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_INSTALL_RPATH="$prefix/lib" \
                -DCMAKE_BUILD_TYPE=Release -DENABLE_TESTS=OFF "${@:3}" >"$place.log" 2>&1 &&
                cmake --build "$place/build" -j "$(nproc)" --target install >>"$place.log" 2>&1 || { tail -n 5 "$place.log" >&2; return 1; }
}

with_configure() { # OWNER/NAME TAG [OPTION...]
        local place
        place=$(fetched "$1" "$2")
        (cd "$place" && autoreconf -fi && CC=mpicc ./configure --prefix="$prefix" "${@:3}" && make -j "$(nproc)" install) >"$place.log" 2>&1 ||
                { tail -n 5 "$place.log" >&2; return 1; }
}

# With POSIX_IO=direct VELOC copies by copy_file_range, which does not leave a file system, such as /dev/shm.
veloc() {
        with_cmake ECP-VeloC/VELOC veloc-1.8 -DCOMM_QUEUE=socket_queue -DPOSIX_IO=rw
}

scr() {
        with_configure LLNL/lwgrp v1.0.6
        with_configure LLNL/dtcmp v1.1.5 --with-lwgrp="$prefix"
        with_cmake ECP-VeloC/spath v0.4.0
        with_cmake LLNL/scr v3.1.0 -DWITH_DTCMP_PREFIX="$prefix" -DENABLE_FORTRAN=OFF -DENABLE_EXAMPLES=OFF -DENABLE_PDSH=OFF -DSCR_RESOURCE_MANAGER=NONE
}

parts() {
        local part
        for part in KVTree:v1.5.0 AXL:v0.9.0 rankstr:v0.4.0 shuffile:v0.4.0 redset:v0.4.0 er:v0.5.0; do
                with_cmake "ECP-VeloC/${part%:*}" "${part#*:}" -DMPI=ON
        done
}

mkdir -p "$sources"
for name in parts veloc scr; do
        [[ ! -f $prefix/.$name ]] || continue
        say "building $name"
        (set -e; "$name") && touch "$prefix/.$name" || say "$name cannot be built here"
done
