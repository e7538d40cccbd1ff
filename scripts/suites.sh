#!/usr/bin/env bash
# Runs the frameworks' own checkpoint tests, without and with Nebula, and compares the results.
#
#   scripts/suites.sh                              the tests that the package registry has: accelerate
#   scripts/suites.sh lightning DIR [ARGUMENTS]    the tests in a checkout of Lightning, torch or accelerate, of the version that
#                                                  requirements/suites names
#
# PyPI has the tests of accelerate in its source package; those of Lightning and torch are in their repositories only.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-accelerate}
source=${2:-}

python=$PWD/.venv/bin/python # it has torch
if [[ $name != torch ]]; then
        scripts/framework.sh "suite-$name"
        python=$PWD/.envs/suite-$name/bin/python
fi
if [[ -z $source ]]; then
        [[ $name == accelerate ]] || { printf 'suites: %s has no tests in its packages: give the directory of a checkout\n' "$name" >&2; exit 2; }
        source=.envs/suite-$name/source
        if [[ ! -d $source ]]; then
                package=$("$python" -c 'import importlib.metadata as m; print("accelerate==" + m.version("accelerate"))')
                "$python" -m pip download -q --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: -d "$source.tmp" "$package"
                tar -xzf "$source.tmp"/*.tar.gz -C "$source.tmp" --strip-components=1
                mv "$source.tmp" "$source"
        fi
fi
"$python" tests/suites/compare.py "$name" "$python" "$source" "${@:3}"
