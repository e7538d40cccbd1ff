#!/usr/bin/env bash
# The documentation as pages, in out/docs: see scripts/docs.py. Its tools have an environment of their own, .envs/docs.
set -euo pipefail
cd "$(dirname "$0")/.."

place=.envs/docs
list=requirements/docs.txt

mkdir -p .envs
exec 9>"$place.lock"
flock 9
if [[ ! -f $place/.ready || $(<"$place/.ready") != "$(<"$list")" ]]; then
        echo "setup: installing what makes the documentation" >&2
        "${PYTHON:-python3}" -m venv --without-pip --clear "$place"
        scripts/pip.sh "$place" -r "$list"
        cp "$list" "$place/.ready"
fi
"$place/bin/python" scripts/docs.py
