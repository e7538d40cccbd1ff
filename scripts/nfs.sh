#!/usr/bin/env bash
# A server of NFS, nfs-ganesha, and a client that mounts it through FUSE, for tests: prints the directory that has both.
#
#   DIRECTORY/ganesha.nfsd, DIRECTORY/fsal, DIRECTORY/no_rpcbind.so, DIRECTORY/nfs_bridge; all need LD_LIBRARY_PATH=DIRECTORY/lib
#
# Server and libnfs come from the system's packages, unpacked into .envs/nfs: nothing is installed and no service starts. Exit code 77 if the packages, or what compiles the client, are not available.
set -euo pipefail
cd "$(dirname "$0")/.."

place=$PWD/.envs/nfs
mkdir -p "$place"
exec 9>"$place/lock"
flock 9
if [[ ! -f $place/ready || tests/servers/nfs_bridge.c -nt $place/ready ]]; then
        command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo "there is no apt-get, which brings nfs-ganesha" >&2; exit 77; }
        pkg-config --exists fuse3 && command -v cc >/dev/null || { echo "there is no compiler, or no libfuse 3" >&2; exit 77; }
        mapfile -t libraries < <(apt-cache depends nfs-ganesha nfs-ganesha-vfs 2>/dev/null | sed -n 's/^ *Depends: \(lib[a-z].*\)/\1/p' | grep -v '^libc6$' | sort -u)
        rm -rf "$place/packages" && mkdir "$place/packages"
        (cd "$place/packages" && apt-get download -qq -o APT::Sandbox::User=root nfs-ganesha nfs-ganesha-vfs libnfs-dev libnfs13 "${libraries[@]}" >&2) ||
                { echo "there are no packages nfs-ganesha, nfs-ganesha-vfs, libnfs-dev and libnfs13" >&2; exit 77; }
        for package in "$place"/packages/*.deb; do dpkg -x "$package" "$place/packages"; done
        mkdir -p "$place/lib" "$place/fsal"
        find "$place/packages" -name '*.so*' -not -name 'libfsal*' -exec cp -P {} "$place/lib" \;
        find "$place/packages" -name 'libfsal*' -exec cp {} "$place/fsal" \;
        cp "$(find "$place/packages" -name ganesha.nfsd -type f)" "$place"
        lacking=$(LD_LIBRARY_PATH=$place/lib ldd "$place/ganesha.nfsd" "$place"/fsal/libfsalvfs.so | grep "not found" || true)
        [[ -z $lacking ]] || { echo "nfs-ganesha lacks libraries: $lacking" >&2; exit 77; }
        cc -shared -fPIC -o "$place/no_rpcbind.so" tests/servers/no_rpcbind.c
        # shellcheck disable=SC2046
        cc -std=gnu11 -D_GNU_SOURCE -Wall -Wextra -O1 -I "$place/packages/usr/include" $(pkg-config --cflags fuse3) -o "$place/nfs_bridge" tests/servers/nfs_bridge.c \
                -L "$place/lib" -lnfs $(pkg-config --libs fuse3) -pthread
        rm -rf "$place/packages"
        touch "$place/ready"
fi
echo "$place"
