#!/usr/bin/env bash
# Makes a framework's own environment, .envs/NAME, from requirements/frameworks/NAME.txt.
#
#   scripts/framework.sh deepspeed-0.19.6
#
# The environment also sees the packages of .venv, so that every framework is tested with the same build of torch and nebulaml.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1
list=requirements/frameworks/$name.txt
[[ -f $list ]] || list=requirements/suites/$name.txt
environment=.envs/$name
[[ -f $list ]] || { printf 'no environment %s; there are:\n%s\n' "$name" "$(cd requirements/frameworks && ls | sed 's/\.txt$//')" >&2; exit 2; }

[[ -f $environment/.ready && $environment/.ready -nt $list ]] && exit 0
printf 'setup: making %s\n' "$environment" >&2
shared=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python -m venv "$environment"
printf '%s\n' "$shared" >"$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
# DeepSpeed is built from source and imports torch during the build: so the build is not isolated, and its tools are installed here.
DS_ACCELERATOR=cpu "$environment/bin/pip" install -q --disable-pip-version-check setuptools wheel
DS_ACCELERATOR=cpu "$environment/bin/pip" install -q --disable-pip-version-check --no-build-isolation -r "$list"
# A line "# alone: PACKAGE" installs a package without its requirements, if they conflict with others.
mapfile -t alone < <(sed -n 's/^# alone: //p' "$list")
[[ ${#alone[@]} -eq 0 ]] || "$environment/bin/pip" install -q --disable-pip-version-check --no-deps "${alone[@]}"
[[ $name != torch-* ]] || .venv/bin/python scripts/without_cuda.py "$environment"
touch "$environment/.ready"
