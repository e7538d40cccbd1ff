#!/usr/bin/env bash
# venv.sh PLACE LIST - makes the environment PLACE with the packages of the file LIST, unless it has them.
set -euo pipefail
place=$1 list=$2

mkdir -p "$(dirname "$place")"
exec 9>"$place.lock"
flock 9
[[ -f $place/.ready && $(<"$place/.ready") == "$(<"$list")" ]] && exit
echo "setup: installing the packages of $list" >&2
"${PYTHON:-python3}" -m venv --without-pip --clear "$place"
"$(dirname "$0")/pip.sh" "$place" -r "$list"
cp "$list" "$place/.ready"
