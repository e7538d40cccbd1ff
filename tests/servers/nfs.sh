#!/usr/bin/env bash
# nfs.sh NFS_FUSE TEST...: runs a test of TAP below a mount of nfs_fuse, with the rules of NB_TEST_NFS.
set -uo pipefail
program=$1; shift
skip() { echo "1..0 # SKIP $1"; exit 0; }
[[ -x $program ]] || skip "libfuse 3 was not there when this was built"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir "$place/server" "$place/mount"
echo "${NB_TEST_NFS:-}" >"$place/control"
"$program" "$place/server" "$place/mount" "$place/control" "$@"
code=$?
[[ $code != 77 ]] || skip "no file system can be mounted through /dev/fuse here"
exit $code
