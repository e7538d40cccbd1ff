#!/usr/bin/env bash
# Plays the real stories of requeue.py on an earlier state of the package, to show that they find its faults.
#
#   tests/campaign/before.sh COMMIT [OPTIONS OF PYTEST]
#
# It builds the package of COMMIT in a directory of its own, and runs the tests of test_requeue.py with it, as root. Each story that goes wrong is
# printed up to its first wrong answer. 3fac9ab1 is the state before memory was compared with storage.
set -euo pipefail
cd "$(dirname "$0")/../.."

commit=$1
shift
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir "$place/source"
git archive "$commit" | tar -x -C "$place/source"
PATH=$PWD/.venv/bin:$PATH pip install -q --disable-pip-version-check --no-build-isolation --no-deps --target "$place/package" \
        --config-settings=setup-args=-Dwerror=false "$place/source"
PYTHONPATH=$place/package .venv/bin/python -m pytest -q --no-header --tb=short -k "real or once" "$@" tests/python/test_requeue.py 2>/dev/null |
        sed -n 's/^E  *//p; /^[0-9]* \(failed\|passed\)/p' | grep -v '^assert \|^+ \|^  *+'
