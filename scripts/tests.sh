#!/usr/bin/env bash
# The Python half of `make test`, after build and install: tests.sh FRAMEWORK-TESTS [ARGUMENTS of pytest].
#
# The tests of the package and of the command share three workers for each core, a file at a time, since most tests wait for a process, a disk or a clock;
# those of the frameworks and those of the page have other Pythons, and run beside them. Their output appears when they have ended. The last lines name the tests
# that failed, and say how many passed in all. `tests.sh FRAMEWORK-TESTS --record-durations` writes down how long each file takes, for the order.
set -euo pipefail
cd "$(dirname "$0")/.."
chosen=$1
shift
log=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$log"' EXIT

run() {
        ${python:-.venv/bin/python} -m pytest --timeout=300 -rsfE --no-header "$@" 2>&1 || [ $? = 5 ] # 5: the arguments chose none of them
}

# In a new clone, each worker would rewrite the assertions of all tests. `tests.sh collect` does it before them, for all of them.
if [ "$chosen" = collect ]; then
        compgen -G 'tests/python/__pycache__/*pytest*' >/dev/null || run tests/python tests/integration --collect-only -q >/dev/null || true
        exit
fi

failed=
run tests/model tests/frameworks -k "$chosen" "$@" >"$log/frameworks" &
frameworks=$!
python=.envs/studio/bin/python run tests/studio "$@" >"$log/studio" &
studio=$!
run tests/python tests/integration -n $((3 * $(nproc))) --dist loadfile --no-loadscope-reorder "$@" | tee "$log/package" || failed=1
wait $frameworks || failed=1
wait $studio || failed=1
cat "$log/frameworks" "$log/studio"
grep -hE '^(FAILED|ERROR) ' "$log"/* || true
awk '/^=.* in [0-9.]+s/ {
        for (i = 2; i <= NF; i++)
                if ($i ~ /^(passed|failed|error|errors|skipped),?$/) { sub(/,$/, "", $i); sum[$i] += $(i - 1) }
} END {
        printf "== %d passed", sum["passed"]
        for (word in sum)
                if (word != "passed") printf ", %d %s", sum[word], word
        print " =="
}' "$log"/*
[ -z "$failed" ]
