#!/usr/bin/env bash
# venv.sh PLACE LIST - makes the environment PLACE with the packages of the file LIST, unless it has them.
set -euo pipefail
place=$1 list=$2

mkdir -p "$(dirname "$place")"
exec 9>"$place.lock"
flock 9
[[ -f $place/.ready && $(<"$place/.ready") == "$(<"$list")" ]] && exit
echo "setup: installing the packages of $list" >&2
pip=$(dirname "$0")/../.venv/bin/pip # spares the place one of its own
if [[ -x $pip ]]; then
        "${PYTHON:-python3}" -m venv --without-pip --clear "$place"
        pip=("$pip" --python "$place/bin/python")
else
        "${PYTHON:-python3}" -m venv --clear "$place"
        pip=("$place/bin/pip")
fi
# pip takes packages on PYTHONPATH for installed ones.
env -u PYTHONPATH "${pip[@]}" install -q --disable-pip-version-check -r "$list" >&2
cp "$list" "$place/.ready"
