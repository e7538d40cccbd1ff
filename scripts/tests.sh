#!/usr/bin/env bash
# The Python half of `make test`, from built and installed: tests.sh FRAMEWORK-TESTS [ARGUMENTS of pytest].
#
# Three runs of pytest side by side, since most tests wait for a process, a disk or a clock. That of tests/python is seen while it runs,
# the others when they have ended. The last line says how many passed in all.
set -euo pipefail
cd "$(dirname "$0")/.."
chosen=$1
shift
log=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$log"' EXIT

run() {
        ${python:-.venv/bin/python} -m pytest --timeout=300 -rs --no-header "$@" 2>&1 || [ $? = 5 ] # 5: the arguments chose none of them
}

run tests/model tests/frameworks -k "$chosen" "$@" >"$log/frameworks" &
frameworks=$!
(run tests/integration "$@" && python=.envs/studio/bin/python run tests/studio "$@") >"$log/integration" &
integration=$!
failed=
run tests/python "$@" | tee "$log/python" || failed=1
wait "$integration" || failed=1
wait "$frameworks" || failed=1
cat "$log/integration" "$log/frameworks"
awk '/ in [0-9.]+s/ && /=====/ {
        for (i = 2; i <= NF; i++)
                if ($i ~ /^(passed|failed|error|errors|skipped),?$/) { sub(/,$/, "", $i); sum[$i] += $(i - 1) }
} END {
        printf "== %d passed", sum["passed"]
        for (word in sum)
                if (word != "passed") printf ", %d %s", sum[word], word
        print " =="
}' "$log"/*
[ -z "$failed" ]
